"""Names that all formats share: scanners and protocols as slugs, eyes as R or L."""

import re
from functools import lru_cache
from pathlib import PurePath
from typing import Any

from octfm.io.archive import is_folder
from octfm.io.location import is_remote, listed
from octfm.volume.volume import Laterality

_SCANNERS = (
    ("heidelberg_spectralis", "heidelberg", r"spectralis"),
    ("topcon_maestro2", "topcon", r"maestro ?-?2"),
    ("topcon_triton", "topcon", r"triton"),
    ("zeiss_cirrus", "zeiss", r"cirrus"),
)


def scanner_slug(manufacturer: str, model: str) -> str:
    """heidelberg_spectralis, topcon_maestro2, topcon_triton or zeiss_cirrus; else slugify("manufacturer model")."""
    text = f"{manufacturer} {model}".lower()
    for slug, maker, pattern in _SCANNERS:
        if maker in text and re.search(pattern, text):
            return slug
    return slugify(f"{manufacturer} {model}")


def slugify(text: str) -> str:
    """The text in lower case, its words joined by _; unknown if it has none."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_") or "unknown"


def last_part(path: str) -> str:
    """The file's name in a path of the computer that wrote it, mostly a Windows one."""
    return path.replace("\\", "/").rsplit("/", 1)[-1].strip()


MASKS = frozenset({"reference", "mask", "masks", "label", "labels", "seg", "segmentation"})
"""Names of files that hold labels of voxels. RETOUCH calls its own reference.mhd."""
_OF_MASKS = MASKS | {"msk", "gt", "truth", "groundtruth", "labelstr", "labelsts", "segmentations", "annotations"}
"""Words in the names of folders or files that may hold labels of voxels."""


def may_be_labels(uri: str) -> bool:
    """Whether the name of a file, or of one of the three folders around it, has a word for labels of voxels."""
    return any(word in _OF_MASKS for part in PurePath(uri).parts[-4:] for word in re.split(r"[^a-z]+", part.lower()))


_FLOW, _STRUCTURE = {"octa", "flow", "angio", "angiography"}, ("oct", "structure", "structural")


def is_flow_beside_structure(uri: str) -> bool:
    """Whether a file lies below a folder named OCTA, or similarly, that has a sibling named OCT."""
    path: Any = listed(uri)
    for folder in [*path.parents][:3]:
        if folder.name.lower() in _FLOW:
            return (_listed_once if is_remote(uri) else _has_structure)(str(folder.parent))
    return False


def _has_structure(folder: str) -> bool:
    names = [form(name) for name in _STRUCTURE for form in (str.upper, str, str.title)]
    return any(is_folder(f"{folder}/{name}") for name in names)


# In a bucket each check lists a prefix, and all files of a folder need the same one.
_listed_once = lru_cache(maxsize=1024)(_has_structure)


_EYES: dict[str, Laterality] = {"R": "R", "OD": "R", "RIGHT": "R", "L": "L", "OS": "L", "LEFT": "L"}


BOTH = ("B", "OU", "BOTH")
_NO_EYE = ("", *BOTH, "U", "UNK", "UNKNOWN", "UNSPECIFIED", "NA", "N/A", "NONE", "-")


def may_be_an_eye(text: str) -> bool:
    """Whether a text stands for an eye, for both or for none; any other text in its place is a mistake."""
    return text.strip().upper() in (*_EYES, *_NO_EYE)


def lateralities(values: list[str]) -> tuple[Laterality | None, bool]:
    """The eye if all stated values agree, and whether they contradict each other. B and U state no eye."""
    stated: set[Laterality] = {eye for value in values if (eye := _EYES.get(value.strip().upper()))}
    return stated.pop() if len(stated) == 1 else None, len(stated) > 1


def stated_eye(values: list[str]) -> tuple[Laterality | None, list[str]]:
    """The eye that a file states, None unless all `values` agree on one; and flags for what is doubtful about it."""
    eye, conflict = lateralities(values)
    flags = ["laterality_conflict"] if conflict else [] if eye else ["laterality_unknown"]
    return eye, flags + ["laterality_not_read"] * (not all(map(may_be_an_eye, values)))
