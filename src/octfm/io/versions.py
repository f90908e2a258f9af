"""Which version of a file this is, without reading it: size and time on a disk, what a listing says in a bucket."""

import bisect
from collections.abc import Callable
from pathlib import Path

from octfm.errors import ReadError
from octfm.io import bucket
from octfm.io.archive import list_folder, split_uri
from octfm.io.hashing import hash_text
from octfm.io.location import BucketPath, Location


def listing_of(root: Location) -> dict[str, str]:
    """Every file or object below: its version, which changes with its content."""
    if isinstance(root, BucketPath):
        return {uri: f"{found.size}-{found.version}" for uri, found in bucket.find(str(root)).items()}
    return {str(path): _version(path) for path in root.rglob("*") if path.is_file()}


def _version(path: Path) -> str:
    facts = path.stat()
    return f"{facts.st_size}-{facts.st_mtime_ns}"


def versions(listing: dict[str, str]) -> Callable[[str], str]:
    """A function of the uris of acquisitions: the version of the file that each names."""
    names = sorted(listing)

    def version_of(uri: str) -> str:
        """Of a file, of the archive that a member is in, of all images of a folder together."""
        inside = split_uri(uri)
        path = inside[0] if inside else uri
        if path in listing:
            return listing[path]
        first, last = bisect.bisect_left(names, f"{path}/"), bisect.bisect_left(names, f"{path}0")  # "0" follows "/"
        below = [f"{name} {listing[name]}" for name in names[first:last]]
        if not below:  # reached through a link, under another name; or gone, which reading it will tell
            try:
                below = (
                    [_version(Path(path))]
                    if Path(path).is_file()
                    else [f"{name} {_version(Path(name))}" for name in list_folder(path)]
                )
            except (OSError, ReadError):
                return "gone"
        return hash_text("\n".join(below))[:24]

    return version_of
