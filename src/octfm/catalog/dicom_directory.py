"""DICOMDIR: the OCT files that a medium should hold, to report those that were not copied.

Standard: DICOM PS3.3 F (basic directory), PS3.10 8.2 (file IDs). A scan examines all files anyway: it does not need the
records to find them.
"""

import os
from collections.abc import Iterable, Sequence

from octfm.catalog.acquisition import Reject
from octfm.errors import ReadError
from octfm.formats.dicom.file import guarded
from octfm.formats.dicom.header import OPHTHALMIC_TOMOGRAPHY
from octfm.io.location import Location


def listed_files(uri: str | Location) -> list[tuple[str, ...]]:
    """Parts of the path of every listed Ophthalmic Tomography file, from the DICOMDIR's folder. Raises ReadError."""
    from pydicom import dcmread

    found = []
    with guarded(str(uri)) as file:
        if file.read(132)[128:] != b"DICM":
            return []  # only named like a DICOMDIR
        file.seek(0)
        for record in dcmread(file, specific_tags=["DirectoryRecordSequence"]).get("DirectoryRecordSequence") or []:
            name = record.get("ReferencedFileID")
            sop_class = str(record.get("ReferencedSOPClassUIDInFile", OPHTHALMIC_TOMOGRAPHY))
            if name and sop_class == OPHTHALMIC_TOMOGRAPHY:
                found.append((name,) if isinstance(name, str) else tuple(str(part) for part in name))
    return found


def left_behind(directories: Iterable[Location], files: Sequence[Location]) -> list[Reject]:
    """A reject for every OCT file that a DICOMDIR lists but `files` lacks.

    Case and version number of names are ignored: ISO 9660 media have upper-case names that may end in ;1.
    """
    present = {_plain(str(path)) for path in files}
    rejects = []
    for directory in directories:
        folder = os.path.dirname(str(directory))  # noqa: PTH120  (archive.zip!/ is no path)
        try:
            listed = listed_files(directory)
        except ReadError as error:
            rejects.append(Reject.of(directory, error, 0))
            continue
        for parts in listed:
            path = "/".join((folder, *parts))
            if _plain(path) not in present:
                sentence = f"{path}: listed in {directory}, but missing; copy the whole medium again"
                rejects.append(Reject(path, "missing_file", sentence, 0))
    return rejects


def _plain(path: str) -> str:
    return path.lower().removesuffix(";1").removesuffix(".")
