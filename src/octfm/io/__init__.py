"""Files, buckets and archives: where things are, how they are read and written, and processes that may crash."""
