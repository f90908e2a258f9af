"""Which files below a folder, and in ZIP archives there, may hold images; tables, documents and ground truth are companions."""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from octfm.catalog.acquisition import Reject
from octfm.catalog.folders import join_images
from octfm.errors import ReadError
from octfm.formats.reasons import REASONS
from octfm.io.archive import MEMBER, Archive, file_size, open_archive, read_start
from octfm.io.location import BucketPath, Location, listed

_COMPANION_FOLDERS = {"ground_truth"}
_COMPANION_NAMES = {"dicomdir", "license", "readme", "changelog", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
_COMPANION_SUFFIXES = {".tsv", ".csv", ".json", ".md", ".txt", ".html", ".pdf", ".yaml", ".yml", ".parquet"}


@dataclass
class Found:
    files: list[Location] = field(default_factory=list)
    """A folder stands for the images in it where those are the B-scans of one volume."""
    companions: list[Location] = field(default_factory=list)
    """And images that are B-scans of a volume in `files`. Members of archives are archive.zip!/member."""
    archives: list[Archive] = field(default_factory=list)
    refused: list[Reject] = field(default_factory=list)
    """Folders that cannot be listed, broken links, pipes, names that are not text, damaged archives, hostile members."""


def walk(root: Location, *, follow_links: bool = True) -> Found:
    """Everything below `root`, sorted by path; a bucket is listed once.

    Links are followed, also out of `root`, and a folder reached twice is listed once; without `follow_links` they are refused with a code.
    """
    found = Found()
    if isinstance(root, BucketPath):
        _list_bucket(root, found)
        return found
    pending, seen = [root], set()
    while pending:
        folder = pending.pop()
        try:
            identity = folder.stat()
            if (identity.st_dev, identity.st_ino) in seen:
                continue
            seen.add((identity.st_dev, identity.st_ino))
            entries = sorted(folder.iterdir())
        except OSError as error:
            found.refused.append(_unreadable(folder, f"cannot be listed: {error.strerror}; check permissions"))
            continue
        for entry in entries:
            if not follow_links and entry.is_symlink():
                reason = REASONS["link_not_followed"]
                text = _text(entry)
                found.refused.append(Reject(text, "link_not_followed", f"{text}: {reason.meaning}; {reason.fix}", 0))
                continue
            if problem := _sort(entry, root, found, pending):
                found.refused.append(_unreadable(entry, problem))
    join_images(found.files, found.companions)
    found.files.sort()
    found.companions.sort()
    return found


def _list_bucket(root: BucketPath, found: Found) -> None:
    """One listing, then the first bytes of every object, which header, archives and doubtful names all need."""
    from octfm.io import bucket
    from octfm.io.ranged import fetch_heads, remember

    objects = bucket.find(str(root))
    fetch_heads(objects)
    for uri, facts in objects.items():
        remember(uri, facts)
        path = replace(BucketPath.of(uri), facts=facts)
        if _is_companion(path, PurePosixPath(path.relative_to(root)).parts):
            found.companions.append(path)
        elif path.suffix.lower() == ".zip" and _starts_with(path, b"PK"):
            _look_inside(path, found)
        else:
            found.files.append(path)
    join_images(found.files, found.companions)
    found.files.sort()
    found.companions.sort()


def _sort(entry: Path, root: Path, found: Found, pending: list[Path]) -> str:
    """Put `entry` where it belongs; what is wrong with it, or an empty string."""
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        return f"{error.strerror}; a broken link? fetch it again"
    if stat.S_ISDIR(mode):
        pending.append(entry)
    elif not stat.S_ISREG(mode):
        return "a device, socket or pipe, not a file; remove it"
    elif _text(entry) != str(entry):
        return "the name is not UTF-8; rename it"
    elif _is_companion(entry, entry.relative_to(root).parts):
        found.companions.append(entry)
    elif entry.suffix.lower() == ".zip" and _starts_with(entry, b"PK"):
        _look_inside(entry, found)
    else:
        found.files.append(entry)
    return ""


def _look_inside(path: Location, found: Found) -> None:
    try:
        archive = open_archive(path)
    except ReadError as error:
        found.refused.append(Reject(str(path), error.code, str(error), file_size(path)))
        return
    found.archives.append(archive)
    found.refused += [Reject(r.uri, r.code, r.sentence, r.bytes) for r in archive.refused]
    for name in archive.members:
        member = listed(f"{path}{MEMBER}{name}")
        if isinstance(path, BucketPath) and isinstance(member, BucketPath):
            member = replace(member, facts=path.facts)
        (found.companions if _is_companion(member, PurePosixPath(name).parts) else found.files).append(member)


def _is_companion(path: Location, parts: Sequence[str]) -> bool:
    """Named like a table, a document or ground truth, and not DICOM inside. `parts` of the path below the root or inside the archive."""
    name = path.name.lower()
    if _COMPANION_FOLDERS & set(parts[:-1]):
        return True
    if not (
        name.startswith((".", "~$"))
        or path.suffix.lower() in _COMPANION_SUFFIXES
        or {name, path.stem.lower()} & _COMPANION_NAMES
    ):
        return False
    return name == "dicomdir" or not _starts_with(path, b"DICM", 128)


def _starts_with(path: Location, magic: bytes, at: int = 0) -> bool:
    try:
        return read_start(path, at + len(magic))[at:] == magic
    except (OSError, ReadError):
        return False


def _unreadable(path: Path, problem: str) -> Reject:
    return Reject(_text(path), "unreadable", f"{_text(path)}: {problem}", 0)


def _text(path: Path) -> str:
    """The path as text that can be stored; undecodable bytes are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
