"""Version of a file without reading it: size and modification time on a disk, size and ETag in a bucket."""

import bisect
from collections.abc import Callable
from pathlib import Path

from octfm.errors import ReadError
from octfm.io import bucket
from octfm.io.archive import list_folder, split_uri
from octfm.io.hashing import hash_text
from octfm.io.location import BucketPath, Location

GONE = "gone"
"""Version of a file that is not there."""


def listing_of(root: Location) -> dict[str, str]:
    """All files or objects below `root` -> version, which changes with the content."""
    if isinstance(root, BucketPath):
        return {uri: f"{found.size}-{found.version}" for uri, found in bucket.find(str(root)).items()}
    found: dict[str, str] = {}
    # Links are followed, as in a scan; a folder reached twice is listed once, as links may form circles.
    pending, seen = [root], set()
    while pending:
        folder = pending.pop()
        try:
            identity = folder.stat().st_dev, folder.stat().st_ino
            entries = [] if identity in seen else list(folder.iterdir())
        except OSError:  # gone or closed to us, which the scan or reading its files will report
            continue
        seen.add(identity)
        pending += [entry for entry in entries if entry.is_dir()]
        found |= {str(entry): _version(entry) for entry in entries if entry.is_file()}
    return found


def _version(path: Path) -> str:
    facts = path.stat()
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def versions(listing: dict[str, str]) -> Callable[[str], str]:
    """A function from the uri of an acquisition to the version of its file, by this listing."""
    names = sorted(listing)

    def version_of(uri: str) -> str:
        """Version of a file, of the archive that has the member, or of all images of a folder together."""
        inside = split_uri(uri)
        path = inside[0] if inside else uri
        if path in listing:
            return listing[path]
        first, last = (bisect.bisect_left(names, path + end) for end in ("/", "0"))  # "0" sorts right after "/"
        below = [f"{name} {listing[name]}" for name in names[first:last]]
        if not below:  # reached through a link under another name, or deleted, which reading it will report
            try:
                file, is_file = Path(path), Path(path).is_file()
                below = [_version(file)] if is_file else [f"{n} {_version(Path(n))}" for n in list_folder(path)]
            except (OSError, ReadError):
                return GONE
        return hash_text("\n".join(below))[:24]

    return version_of
