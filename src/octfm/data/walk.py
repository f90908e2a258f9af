"""Which files below a folder may hold images; tables, documents and ground truth beside them are companions."""

import os
import stat
from dataclasses import dataclass, field
from pathlib import Path

_COMPANION_FOLDERS = {"ground_truth"}
_COMPANION_NAMES = {"dicomdir", "license", "readme", "changelog", "thumbs.db"}
_COMPANION_SUFFIXES = {".tsv", ".csv", ".json", ".md", ".txt", ".html", ".pdf", ".yaml", ".yml", ".parquet"}


@dataclass
class Found:
    files: list[Path] = field(default_factory=list)
    companions: list[Path] = field(default_factory=list)
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    """(path, sentence) of folders that cannot be listed, broken links, pipes and names that are not text."""


def walk(root: Path) -> Found:
    """Everything below `root`, sorted by path. Links are followed; a folder reached twice is listed once."""
    found = Found()
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
            found.unreadable.append((_text(folder), f"{_text(folder)}: cannot be listed: {error.strerror}; check permissions"))
            continue
        for entry in entries:
            if problem := _sort(entry, root, found, pending):
                found.unreadable.append((_text(entry), f"{_text(entry)}: {problem}"))
    found.files.sort()
    found.companions.sort()
    return found


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
    elif _is_companion(entry, root):
        found.companions.append(entry)
    else:
        found.files.append(entry)
    return ""


def _is_companion(path: Path, root: Path) -> bool:
    """Named like a table, a document or ground truth, and not DICOM inside."""
    name = path.name.lower()
    if _COMPANION_FOLDERS & set(path.relative_to(root).parts[:-1]):
        return True
    if not (name.startswith(".") or path.suffix.lower() in _COMPANION_SUFFIXES or path.stem.lower() in _COMPANION_NAMES):
        return False
    try:
        with path.open("rb") as file:
            return name == "dicomdir" or file.read(132)[128:] != b"DICM"
    except OSError:
        return True


def _text(path: Path) -> str:
    """The path as text that can be stored; undecodable bytes are escaped."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")
