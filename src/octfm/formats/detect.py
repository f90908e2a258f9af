"""Choose the reader of a file by content: magic bytes, then structure; by name only for formats that have neither.

Every reader except DICOM's has `open_bscans(uri) -> Bscans`; the steps from there on are the same for all of them.
Readers that a caller passes as objects are tried first.
"""

import zlib
from collections.abc import Collection, Sequence
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

from octfm.errors import ReadError
from octfm.formats import bioptigen, bscans, heidelberg_e2e, heyex_xml, images, optovue, zeiss_img
from octfm.formats.arrays import metaimage
from octfm.formats.bscans import Reader
from octfm.formats.heyex_xml import DeviceGrid
from octfm.formats.plug_in import PlugIn
from octfm.formats.reasons import Header, cannot_open
from octfm.io.archive import MEMBER, file_size, is_folder, list_folder, read_start
from octfm.volume.volume import Fundus, Layout, Modality, Spacing3, Surfaces, Volume

if TYPE_CHECKING:
    from octfm.formats.dicom.parts import Part

_HEAD = 4096
DICOM = "dicom.reader"

_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"HSF-OCT", "heyex_vol"),
    (b"ep-v", "heyex_vol"),  # written by eyepy
    (b"CMDb", "heidelberg_e2e"),
    (b"E2EMultipleVolumeFile", "heidelberg_e2e"),
    (b"FOCT", "topcon"),
    (b"\x93NUMPY", "arrays.npy"),
    (b"MATLAB 5.0 MAT-file", "arrays.matlab"),
    (b"MATLAB 7.3 MAT-file", "arrays.matlab"),  # HDF5, refused with a hint
    (b"\x89HDF\r\n\x1a\n", "arrays.matlab"),
    *((magic, "images") for magic in images.MAGIC),
)
"""First bytes, and the module that reads such a file."""


def read_volume(
    uri: str,
    spacing_mm: Spacing3 | None,
    layouts: Collection[Layout],
    readers: Sequence[Reader],
    modalities: Collection[Modality],
) -> Volume:
    reader = find_reader(uri, readers)
    if is_dicom(reader):
        return reader.read_dicom(uri, layouts, modalities)
    with bscans.damage_has_a_code(uri):
        return bscans.to_volume(reader.open_bscans(uri), spacing_mm, layouts, modalities)


def read_header(
    uri: str, layouts: Collection[Layout], readers: Sequence[Reader], modalities: Collection[Modality]
) -> Header:
    reader = find_reader(uri, readers)
    return (
        reader.read_header(uri, layouts, modalities) if is_dicom(reader) else _header(reader, uri, layouts, modalities)
    )


def examine(
    uri: str, layouts: Collection[Layout], readers: Sequence[Reader], modalities: Collection[Modality]
) -> "Header | Part":
    """The Header of a file, or the Part of a DICOM file that may be one of several. Raises ReadError."""
    reader = find_reader(uri, readers)
    return reader.examine(uri, layouts, modalities) if is_dicom(reader) else _header(reader, uri, layouts, modalities)


def _header(
    reader: "ModuleType | PlugIn", uri: str, layouts: Collection[Layout], modalities: Collection[Modality]
) -> Header:
    with bscans.damage_has_a_code(uri):
        return bscans.to_header(reader.open_bscans(uri), layouts, modalities)


def volumes_in(uri: str, readers: Sequence[Reader] = ()) -> list[str]:
    """uris of the volumes in a file, its own if it is one volume. Raises ReadError."""
    reader = find_reader(uri, readers)
    if not isinstance(reader, PlugIn) and (reader is not heidelberg_e2e or heidelberg_e2e.split_series(uri)[1]):
        return [uri]
    with bscans.damage_has_a_code(uri):
        return reader.volumes(uri)


def read_surfaces(uri: str) -> Surfaces | None:
    reader = find_reader(uri)
    if is_dicom(reader):
        from octfm.formats.dicom.surfaces import read_height_map

        try:
            return read_height_map(uri)[0]
        except ReadError as error:
            if error.code == "not_layer_heights":
                return None  # a DICOM volume holds none: its height map is a separate file
            raise
    with bscans.damage_has_a_code(uri):
        return bscans.to_surfaces(reader.open_bscans(uri))


def read_fundus(uri: str) -> Fundus | None:
    reader = find_reader(uri)
    if is_dicom(reader):
        return None
    with bscans.damage_has_a_code(uri):
        return bscans.to_fundus(reader.open_bscans(uri))


def read_device_grid(uri: str) -> DeviceGrid | None:
    uri = heidelberg_e2e.split_series(uri)[0]
    with bscans.damage_has_a_code(uri):
        if is_folder(uri):
            found = heyex_xml.only_export(list_folder(uri), uri)
        else:
            found = uri if heyex_xml.fits(_head(uri)) else None
        return heyex_xml.read_device_grid(found) if found else None


def is_dicom(reader: "ModuleType | PlugIn") -> TypeGuard[ModuleType]:
    return isinstance(reader, ModuleType) and reader.__name__ == f"octfm.formats.{DICOM}"


def find_reader(uri: str, readers: Sequence[Reader] = ()) -> "ModuleType | PlugIn":
    """A caller's reader that fits, else the module that reads the file; if no format fits, DICOM's, whose errors say
    what is wrong. Raises ReadError."""
    if readers and (found := _fitting(uri, readers)) is not None:
        return found
    container, series = heidelberg_e2e.split_series(uri)
    name = "image_folder" if not series and is_folder(uri) else _by_content(container)
    return import_module(f"octfm.formats.{name}")


def _fitting(uri: str, readers: Sequence[Reader]) -> PlugIn | None:
    outer, _, inner = uri.rpartition(MEMBER)
    # The uri of a file, of a member of an archive, or of one volume in either.
    for file, name in ((uri, ""), (outer, inner)):
        try:
            head = read_start(file, _HEAD)
        except (OSError, ReadError):
            continue
        for reader in readers:
            if (plug_in := PlugIn(reader, file, name)).fits(head):
                return plug_in
    return None


def _head(uri: str) -> bytes:
    try:
        return read_start(uri, _HEAD)
    except OSError as error:
        raise cannot_open(uri, error) from None


def _by_content(uri: str) -> str:
    head = _head(uri)
    if head[128:132] == b"DICM":
        return DICOM  # before the magic bytes: the 128-byte preamble may be the header of a TIFF (PS3.10 7.1)
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    # NIfTI has its magic behind other fields, and is often gzipped as a whole.
    if is_nifti(_unzipped(head) if head[:2] == b"\x1f\x8b" else head):
        return "arrays.nifti"
    if head[:4] == b"PK\x03\x04" and b".npy" in head[30 : 30 + int.from_bytes(head[26:28], "little")]:
        return "arrays.npy"
    if heyex_xml.fits(head):
        return "heyex_xml"
    if metaimage.fits(head):
        return "arrays.metaimage"
    if bioptigen.fits(head):
        return "bioptigen"
    # Formats without magic bytes: known by their name, with a size or a second file that fits.
    if zeiss_img.fits(uri, file_size(uri)):
        return "zeiss_img"
    if optovue.fits(uri):
        return "optovue"
    metaimage.refuse_data_file(uri)
    return DICOM


def is_nifti(head: bytes) -> bool:
    return head[344:348] in (b"n+1\0", b"ni1\0") or head[4:12] in (b"n+2\0\r\n\x1a\n", b"ni2\0\r\n\x1a\n")


def _unzipped(head: bytes) -> bytes:
    try:
        # 31 = 16 + 15: with a gzip header, and the largest window.
        return zlib.decompressobj(31).decompress(head, _HEAD)
    except zlib.error:
        return b""
