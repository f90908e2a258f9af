"""Files on disk, in buckets and in ZIP archives; locks, atomic writes, and child processes for untrusted decoders."""
