"""DICOMDIR: which OCT files a medium should hold, so that those left behind when it was copied are named.

Standard: DICOM PS3.3 F (basic directory), PS3.10 8.2 (file IDs). Its records are not needed to find files, a scan looks at every one.
"""

import os
from collections.abc import Iterable, Sequence

from octfm.catalog.acquisition import Reject
from octfm.errors import ReadError
from octfm.formats.dicom.file import guarded
from octfm.io.location import Location

_OPHTHALMIC_TOMOGRAPHY = "1.2.840.10008.5.1.4.1.1.77.1.5.4"


def listed_files(uri: str | Location) -> list[tuple[str, ...]]:
    """Path of every listed Ophthalmic Tomography file, from the folder of the DICOMDIR. Raises ReadError: unreadable."""
    from pydicom import dcmread

    found = []
    with guarded(str(uri)) as file:
        if file.read(132)[128:] != b"DICM":
            return []  # a name does not make a DICOMDIR
        file.seek(0)
        for record in dcmread(file, specific_tags=["DirectoryRecordSequence"]).get("DirectoryRecordSequence") or []:
            name = record.get("ReferencedFileID")
            if (
                name
                and str(record.get("ReferencedSOPClassUIDInFile", _OPHTHALMIC_TOMOGRAPHY)) == _OPHTHALMIC_TOMOGRAPHY
            ):
                found.append((name,) if isinstance(name, str) else tuple(str(part) for part in name))
    return found


def left_behind(directories: Iterable[Location], files: Sequence[Location]) -> list[Reject]:
    """A reject for every OCT file that a DICOMDIR lists and `files` has not; case and version do not count in names (ISO 9660)."""
    there = {_plain(str(path)) for path in files}
    rejects = []
    for directory in directories:
        folder = os.path.dirname(str(directory))  # noqa: PTH120  (archive.zip!/ is no path)
        try:
            listed = listed_files(directory)
        except ReadError as error:
            rejects.append(Reject(str(directory), error.code, str(error), 0))
            continue
        for parts in listed:
            path = "/".join((folder, *parts))
            if _plain(path) not in there:
                sentence = f"{path}: listed in {directory}, and not there; copy the whole medium again"
                rejects.append(Reject(path, "missing_file", sentence, 0))
    return rejects


def _plain(path: str) -> str:
    return path.lower().removesuffix(";1").removesuffix(".")
