"""DICOMDIR: the OCT files that a medium should hold, to report those that were not copied.

Standard: DICOM PS3.3 F (basic directory), PS3.10 8.2 (file IDs). A scan examines all files anyway: it does not need the
records to find them.
"""

import os
from collections.abc import Sequence

from octfm.catalog.acquisition import Reject
from octfm.errors import ReadError
from octfm.formats.dicom.file import guarded
from octfm.formats.dicom.header import OPHTHALMIC_TOMOGRAPHY
from octfm.io.archive import file_size, recall
from octfm.io.bucket import Account
from octfm.io.location import Location
from octfm.io.spread import Spread


def left_behind(
    directories: Sequence[Location], files: Sequence[Location], account: Account, in_children: Spread
) -> list[Reject]:
    """A reject for every OCT file that a DICOMDIR lists but `files` lacks, and for a DICOMDIR that cannot be read.

    `account` counts requests to buckets. Case and version number of names are ignored: ISO 9660 media have upper-case
    names that may end in ;1.
    """
    present = {_plain(str(path)) for path in files}
    rejects = []
    # In child processes: a DICOMDIR may be damaged, or inflate to gigabytes, as any other file.
    contents = in_children(
        account.counting(_listed_files),
        directories,
        lambda place, lost: Reject.lost(place, lost, "read it", 0),
        deadline=lambda limits, place: limits.deadline(file_size(place), str(place)),
    )
    for directory, listed in zip(directories, account.counted(contents), strict=True):
        if isinstance(listed, Reject):
            rejects.append(listed)
            continue
        folder = os.path.dirname(str(directory))  # noqa: PTH120  (archive.zip!/ is no path)
        for parts in listed:
            path = "/".join((folder, *parts))
            if _plain(path) not in present:
                sentence = f"{path}: listed in {directory}, but missing; copy the whole medium again"
                rejects.append(Reject(path, "missing_file", sentence, 0))
    return rejects


def _listed_files(directory: Location) -> list[tuple[str, ...]] | Reject:
    """Parts of the path of every listed Ophthalmic Tomography file, from the DICOMDIR's folder."""
    from pydicom import dcmread

    recall(directory)
    found = []
    try:
        with guarded(str(directory)) as file:
            if file.read(132)[128:] != b"DICM":
                return []  # only named like a DICOMDIR
            file.seek(0)
            for record in dcmread(file, specific_tags=["DirectoryRecordSequence"]).get("DirectoryRecordSequence") or []:
                name = record.get("ReferencedFileID")
                sop_class = str(record.get("ReferencedSOPClassUIDInFile", OPHTHALMIC_TOMOGRAPHY))
                if name and sop_class == OPHTHALMIC_TOMOGRAPHY:
                    found.append((name,) if isinstance(name, str) else tuple(str(part) for part in name))
    except ReadError as error:
        return Reject.of(directory, error, 0)
    return found


def _plain(path: str) -> str:
    return path.lower().removesuffix(";1").removesuffix(".")
