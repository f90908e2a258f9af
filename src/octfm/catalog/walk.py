"""List the files below a folder that may hold images, also in ZIP archives; tables and documents are companions."""

import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path, PurePosixPath

from octfm.catalog.acquisition import Reject
from octfm.errors import ReadError
from octfm.formats.arrays.metaimage import HEAD_BYTES as METAIMAGE_BYTES
from octfm.formats.arrays.metaimage import data_file
from octfm.formats.heyex_xml import HEAD_BYTES, MAX_BYTES, fits, named_images, names_of
from octfm.formats.image_folder import SUFFIXES, is_image
from octfm.formats.reasons import REASONS, ZARR_FILES, zarr_array
from octfm.io import bucket
from octfm.io.archive import MEMBER, Archive, open_archive, read_start
from octfm.io.location import BucketPath, Location, listed
from octfm.io.ranged import fetch_heads, remember

_ZARR_CHUNK = re.compile(r"(c\.)?\d+(\.\d+)*")
_IMAGES_PER_OTHER_FILE = 8
"""A folder with more images than this per other file is one volume in spite of those files."""

_COMPANION_FOLDERS = {"ground_truth"}
_COMPANION_NAMES = {"dicomdir", "license", "readme", "changelog", "thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"}
_COMPANION_SUFFIXES = {
    *(".tsv", ".csv", ".json", ".jsonl", ".md", ".txt", ".html", ".pdf", ".yaml", ".yml", ".parquet"),
    *(".xlsx", ".xls", ".ods", ".docx", ".doc", ".rtf", ".pptx", ".py", ".ipynb", ".m", ".bib", ".log"),
}


@dataclass
class Found:
    """The files of a scan, sorted into kinds by name and first bytes."""

    files: list[Location] = field(default_factory=list)
    """Files to examine. A folder stands for its images if these are the B-scans of one volume."""
    companions: list[Location] = field(default_factory=list)
    """Tables, documents and ground truth, and images that are B-scans of a volume in `files`."""
    archives: list[Archive] = field(default_factory=list)
    refused: list[Reject] = field(default_factory=list)
    """Folders that cannot be listed, broken links, pipes, names that are not UTF-8, damaged or hostile archives."""


def walk(root: Location, *, follow_links: bool = True, folders_are_volumes: bool = True) -> Found:
    """Everything below `root`, sorted by path; archive members are archive.zip!/member. A bucket is listed once.

    Links are followed, also out of `root`; a folder reached twice is listed once. Without `follow_links` they are
    rejected with a code. `folders_are_volumes`: see `join_images`.
    """
    found = Found()
    if isinstance(root, BucketPath):
        _list_bucket(root, found)
    else:
        _list_folder(root, found, follow_links)
    join_images(found.files, found.companions, folders_are_volumes)
    _join_data_files(found.files, found.companions)
    _join_zarr(found)
    found.files.sort()
    found.companions.sort()
    return found


def _list_folder(root: Path, found: Found, follow_links: bool) -> None:
    # A stack instead of recursion: links can make a tree deeper than Python recurses.
    pending, seen = [root], set()
    while pending:
        folder = pending.pop()
        try:
            identity = folder.stat()
            # By device and inode: links may form circles, and reach a folder under several names.
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


def _list_bucket(root: BucketPath, found: Found) -> None:
    """List a bucket once, and fetch the first bytes of every object: headers, archives and doubtful names need them."""
    objects = bucket.find(str(root))
    fetch_heads(objects)
    for uri, facts in objects.items():
        remember(uri, facts)
        path = replace(BucketPath.of(uri), facts=facts)
        if str(path) != uri:
            problem = "its key has an empty name or a dot between slashes; copy it to a key without, and scan that"
            found.refused.append(Reject(uri, "unreadable", f"{uri}: {problem}", facts.size))
        else:
            _add(path, PurePosixPath(path.relative_to(root)).parts, found)


def _sort(entry: Path, root: Path, found: Found, pending: list[Path]) -> str:
    """Add `entry` to `found` or `pending`. Returns what is wrong with it, or an empty string."""
    try:
        mode = entry.stat().st_mode
    except OSError as error:
        return f"{error.strerror}; a broken link? fetch it again"
    if stat.S_ISDIR(mode):
        pending.append(entry)
    elif not stat.S_ISREG(mode):
        return "a device, socket or pipe, not a file; remove it"
    elif _text(entry) != str(entry):
        encoding = sys.getfilesystemencoding()
        known = encoding == "utf-8"
        return "the name is not UTF-8; rename it" if known else f"names are read as {encoding}; set PYTHONUTF8=1"
    else:
        _add(entry, entry.relative_to(root).parts, found)
    return ""


def _add(path: Location, parts: Sequence[str], found: Found) -> None:
    """Sort a file by its name and its first bytes; `parts` of the path below the root."""
    if _is_companion(path, parts):
        found.companions.append(path)
    # The ending counts as well: .npz, .docx and others are ZIP archives but no folders of files.
    elif path.suffix.lower() == ".zip" and _starts_with(path, b"PK"):
        _look_inside(path, found)
    else:
        found.files.append(path)


def _look_inside(path: Location, found: Found) -> None:
    try:
        archive = open_archive(path)
    except ReadError as error:
        found.refused.append(Reject.of(path, error))
        return
    found.archives.append(archive)
    found.refused += [Reject(r.uri, r.code, r.sentence, r.bytes) for r in archive.refused]
    for name in archive.members:
        member = listed(f"{path}{MEMBER}{name}")
        if isinstance(path, BucketPath) and isinstance(member, BucketPath):
            member = replace(member, facts=path.facts)
        (found.companions if _is_companion(member, PurePosixPath(name).parts) else found.files).append(member)


def _is_companion(path: Location, parts: Sequence[str]) -> bool:
    """Whether a file is named like a table, a document or ground truth, and does not contain DICOM.

    `parts`: of the path below the root or inside the archive.
    """
    name = path.name.lower()
    if _COMPANION_FOLDERS & set(parts[:-1]):
        return True
    if not (
        name.startswith((".", "~$"))
        or path.suffix.lower() in _COMPANION_SUFFIXES
        or {name, path.stem.lower()} & _COMPANION_NAMES
    ):
        return False
    # Exports may give DICOM files any name: 1.2.txt can be an image.
    return name == "dicomdir" or not _starts_with(path, b"DICM", 128)


def _starts_with(path: Location, magic: bytes, at: int = 0) -> bool:
    try:
        return read_start(path, at + len(magic))[at:] == magic
    except (OSError, ReadError):
        return False


def _unreadable(path: Path, problem: str) -> Reject:
    return Reject(_text(path), "unreadable", f"{_text(path)}: {problem}", 0)


def _text(path: Path) -> str:
    """The path as UTF-8 text, with undecodable bytes escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def join_images(files: list[Location], companions: list[Location], folders_are_volumes: bool) -> None:
    """Replace images in `files` by their folder if they are the B-scans of one volume; the images go to `companions`.

    B-scans are the images that a HEYEX XML in the folder names, else, if `folders_are_volumes`, all images if the
    folder has almost nothing else. Only files with the usual endings are opened: other images stay files of their own,
    which are not volumes.
    """
    folders: dict[Location, list[Location]] = {}
    for path in files:
        folders.setdefault(path.parent, []).append(path)
    taken: list[Location] = []
    for folder, inside in folders.items():
        images = [path for path in inside if path.suffix.lower() in SUFFIXES and is_image(path)]
        if not images:
            continue
        exports = [path for path in inside if path.suffix.lower() == ".xml"]
        named = set().union(*(_named_by(path) for path in exports))
        parts = [path for path in images if names_of(path.name) & named]
        # A few other files do not turn B-scans into single images; they stay files of their own.
        few_others = not named and len(images) > _IMAGES_PER_OTHER_FILE * (len(inside) - len(images))
        if folders_are_volumes and len(images) > 1 and (len(images) == len(inside) or few_others):
            parts = images
            files.append(folder)
        taken += parts
    left_out = set(taken)
    files[:] = [path for path in files if path not in left_out]
    companions.extend(taken)


def _join_data_files(files: list[Location], companions: list[Location]) -> None:
    """Move the files of voxels that a MetaImage header names (oct.mhd, oct.raw) from `files` to `companions`."""
    named: set[tuple[Location, str]] = set()
    for path in files:
        if path.suffix.lower() == ".mhd":
            try:
                named.add((path.parent, data_file(read_start(path, METAIMAGE_BYTES))))
            except (OSError, ReadError):
                continue
    if not named:
        return
    taken = {path for path in files if (path.parent, path.name.lower()) in named and path.suffix.lower() != ".mhd"}
    files[:] = [path for path in files if path not in taken]
    companions.extend(taken)


def _join_zarr(found: Found) -> None:
    """Refuse an array or a group of arrays in Zarr as a whole, and not each of its chunks, which go to `companions`.
    DICOM files below it may be named like chunks, by a UID or a number."""
    folders = {str(path.parent) for path in found.companions if path.name in ZARR_FILES}
    if not folders:
        return
    chunks: dict[Location, str] = {}
    for path in found.files:
        if _ZARR_CHUNK.fullmatch(path.name):
            above = accumulate(str(path).split("/"), "{}/{}".format)
            top = next((folder for folder in above if folder in folders), None)
            if top and not _starts_with(path, b"DICM", 128):
                chunks[path] = top
    found.files[:] = [path for path in found.files if path not in chunks]
    found.companions.extend(chunks)
    found.refused += [Reject.of(folder, zarr_array(folder), 0) for folder in sorted(set(chunks.values()))]


def _named_by(path: Location) -> set[str]:
    try:
        content = read_start(path, MAX_BYTES)
    except (OSError, ReadError):
        return set()
    return named_images(content) if fits(content[:HEAD_BYTES]) else set()
