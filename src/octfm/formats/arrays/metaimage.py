"""MetaImage: a text header (.mhd) with voxels in a file of their own (.raw, .zraw), or behind the header (.mha).

Axes are listed fastest first. Spacing identifies the axes if it differs enough between them, as in NIfTI; otherwise x
is lateral, y axial and z the B-scan, as in RETOUCH and in files that SimpleITK writes from [B-scan, axial, lateral].
The file of masks in such a folder (reference.mhd) has the same structure and holds labels instead of an image.
Structure: MetaIO's documentation of its tags. Verified on headers as SimpleITK writes them, not on RETOUCH's own files.
"""

import codecs
import io
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import PurePath

import numpy as np

from octfm.errors import ReadError, shown
from octfm.formats.arrays import exact_gray, in_order
from octfm.formats.arrays.nifti import axes_of_spacing, plausible
from octfm.formats.bscans import MOST_LABELS, Bscans, check_size, damage_has_a_code, uid_from
from octfm.formats.declared import read_declared
from octfm.formats.images import digest_of
from octfm.formats.names import MASKS, last_part
from octfm.formats.reasons import PADDING, expect_bytes, voxel_labels
from octfm.io.archive import open_file, read_start
from octfm.io.location import listed
from octfm.volume.volume import Shape3

HEAD_BYTES = 65536
"""A header is a few hundred bytes; with a comment or a list of tags it may be longer."""
_TYPES = {
    "MET_UCHAR": "u1", "MET_CHAR": "i1", "MET_USHORT": "u2", "MET_SHORT": "i2", "MET_UINT": "u4", "MET_INT": "i4",
    "MET_ULONG_LONG": "u8", "MET_LONG_LONG": "i8", "MET_FLOAT": "f4", "MET_DOUBLE": "f8",
}  # fmt: skip
_DEFAULT_AXES = "WHD"
_SUFFIXES = (".mhd", ".mha")
_HEADERS = {".raw": (".mhd", ".nhdr"), ".zraw": (".mhd",), ".img": (".hdr",)}
"""Ending of a file of voxels -> those of the header next to it, also of formats that are not read."""


@dataclass(frozen=True)
class _Header:
    stored: Shape3
    """As stored: fastest axis first."""
    dtype: np.dtype
    mm: tuple[float, float, float] | None
    axes: str
    """Letters of the stored axes, fastest first."""
    data: str
    """uri of the file with the voxels."""
    offset: int | None
    """Of the voxels in it; None: they end with the file."""
    zipped: bool

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * int(np.prod(self.stored, dtype=object))


def fits(head: bytes) -> bool:
    """Whether a file starts as MetaImage: lines of tag = value, the object type or the number of dimensions first."""
    text = head.removeprefix(codecs.BOM_UTF8)
    return re.match(rb"\s*(Comment *=[^\n]*\n\s*)?(ObjectType *= *Image|NDims *= *\d)", text) is not None


def data_file(head: bytes) -> str:
    """Lower-case name of the file with the voxels, from the start of a header; empty if they follow the header."""
    found = re.search(rb"^ElementDataFile *= *([^\r\n]*)", head, re.MULTILINE) if fits(head) else None
    name = found[1].decode("utf-8", "replace").strip() if found else "LOCAL"
    return "" if name.upper() in ("LOCAL", "LIST") or "%" in name else last_part(name).lower()


def open_bscans(uri: str) -> Bscans:
    header = _read_header(uri)
    if PurePath(uri).suffix.lower() in _SUFFIXES and PurePath(uri).stem.lower() in MASKS:
        raise voxel_labels(uri)
    mm = in_order(header.mm, header.axes) if header.mm else None
    return Bscans(
        uri=uri,
        shape=in_order(header.stored, header.axes),
        decode=lambda: exact_gray(_voxels(header, uri), uri),
        uid=uid_from(digest_of(dict.fromkeys([uri, header.data]))),
        in_plane_mm=(mm[1], mm[2]) if mm else None,
        between_mm=mm[0] if mm else None,
        bits=8 if header.dtype.itemsize == 1 else None,
        flags=("axial_direction_assumed",),
    )


def place_of(uri: str) -> tuple[np.ndarray, str] | None:
    """Affine [4, 4] of the stored axes as NIfTI has it, x to the right and y to the front (in MetaImage they run the
    other way), and the letters of the axes; None without millimetres or three directions. Raises ReadError."""
    with damage_has_a_code(uri):
        header = _read_header(uri)
        tags, _ = _tags(read_start(uri, HEAD_BYTES), uri)
        # The direction of one axis after the other.
        directions = np.array(tags.get("TransformMatrix", "1 0 0 0 1 0 0 0 1").split(), float)
        origin = np.array(tags.get("Offset", tags.get("Position", "0 0 0")).split(), float)
    if header.mm is None or directions.size != 9 or origin.size != 3:
        return None
    affine = np.eye(4)
    affine[:3, :3], affine[:3, 3] = directions.reshape(3, 3).T * header.mm, origin
    if not (np.isfinite(affine).all() and abs(np.linalg.det(directions.reshape(3, 3))) > 1e-3):
        return None
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ affine, header.axes


def read_mask(uri: str) -> np.ndarray:
    """uint8 [B-scan, axial, lateral]: the label of every voxel, as it lies in the file.

    Raises ReadError; not_labels if the values are those of an image.
    """
    with damage_has_a_code(uri):
        found = exact_gray(_voxels(_read_header(uri), uri), uri)
        if found.max() > MOST_LABELS:
            raise ReadError(
                "not_labels", f"{uri}: values up to {found.max()} are an image; labels are 0 to {MOST_LABELS}"
            )
        return found.astype(np.uint8)


def refuse_data_file(uri: str) -> None:
    """Raise ReadError for a file of voxels with its header next to it: the header is the file to read."""
    place = listed(uri)
    for suffix in _HEADERS.get(place.suffix.lower(), ()):
        header = place.parent / f"{place.stem}{suffix}"
        if header.is_file():
            raise ReadError("not_dicom", f"{uri}: only the voxels; give {header.name}, which describes them")


def _read_header(uri: str) -> _Header:
    with open_file(uri) as file:
        tags, length = _tags(file.read(HEAD_BYTES), uri)
        size = file.seek(0, io.SEEK_END)
    if tags.get("BinaryData", "True").lower() == "false":
        raise ReadError("unsupported_pixels", f"{uri}: voxels written as text; save it with BinaryData = True")
    kind, channels = tags.get("ElementType", ""), tags.get("ElementNumberOfChannels", "1")
    if kind not in _TYPES or channels != "1":
        raise ReadError(
            "unsupported_pixels",
            f"{uri}: ElementNumberOfChannels {shown(channels, 24)}, ElementType {shown(kind, 24)}; save one channel of "
            "MET_UCHAR or MET_USHORT",
        )
    sizes = [int(n) for n in tags.get("DimSize", "").split()]
    if len(sizes) != 3:
        raise ReadError("unknown_axes", f"{uri}: {len(sizes)} dimensions in DimSize; expected three")
    stored = (sizes[0], sizes[1], sizes[2])
    swapped = tags.get("ElementByteOrderMSB", tags.get("BinaryDataByteOrderMSB", "False")).lower() == "true"
    dtype = np.dtype(_TYPES[kind]).newbyteorder(">" if swapped else "<")
    check_size(stored, uri, dtype.itemsize)
    zipped = tags.get("CompressedData", "False").lower() == "true"
    mm = _spacing(tags)
    name = tags["ElementDataFile"]
    if name.upper() == "LIST" or name.upper().startswith("LIST ") or "%" in name:
        raise ReadError(
            "incomplete_export", f"{uri}: its B-scans are files of their own; save it with one file of voxels"
        )
    local = name.upper() == "LOCAL"
    data = uri if local else str(listed(uri).parent / last_part(name))
    skip = 0 if local else int(tags.get("HeaderSize", "0"))
    axes = read_declared(uri).axes or axes_of_spacing(mm)
    if axes is None:
        if mm is not None and mm[1] > 1.05 * min(mm):
            raise ReadError(
                "unknown_axes",
                f"{uri}: ElementSpacing {mm[0]:g} {mm[1]:g} {mm[2]:g} fits no order of axes; declare them in a .json "
                'of the same name, such as "axes": "WHD"',
            )
        axes = _DEFAULT_AXES
    found = _Header(stored, dtype, mm, axes, data, length if local else skip if skip >= 0 else None, zipped)
    _expect_data(found, uri, size)
    return found


def _expect_data(header: _Header, uri: str, size: int) -> None:
    """Raise ReadError unless the voxels are there, compressed or not."""
    if header.data != uri:
        try:
            with open_file(header.data) as file:
                size = file.seek(0, io.SEEK_END)
        except (OSError, ReadError):
            raise ReadError(
                "incomplete_export",
                f"{uri}: {shown(PurePath(header.data).name)} with its voxels is not next to it; copy the whole folder",
            ) from None
    # deflate never shrinks by more than a factor of about 1,030.
    least = header.bytes // 1100 if header.zipped else header.bytes
    exact = header.offset is not None and not header.zipped
    expect_bytes(header.data, size, (header.offset or 0) + least, PADDING if exact else math.inf)


def _tags(head: bytes, uri: str) -> tuple[dict[str, str], int]:
    """The tags of a header and its length in bytes. ElementDataFile is always its last line."""
    tags: dict[str, str] = {}
    at = len(codecs.BOM_UTF8) if head.startswith(codecs.BOM_UTF8) else 0
    while (end := head.find(b"\n", at)) >= 0:
        name, equals, value = head[at:end].decode("latin-1").partition("=")
        at = end + 1
        if not equals:
            break
        tags[name.strip()] = value.strip()
        if name.strip() == "ElementDataFile":
            return tags, at
    # The last line may lack its end where the voxels are elsewhere.
    name, equals, value = head[at:].decode("latin-1").partition("=")
    if name.strip() == "ElementDataFile" and value.strip():
        return {**tags, "ElementDataFile": value.strip()}, len(head)
    raise ReadError("damaged_file", f"{uri}: a MetaImage header must end with ElementDataFile; save it again")


def _spacing(tags: dict[str, str]) -> tuple[float, float, float] | None:
    """Millimetres of the stored axes, where they are stated and plausible."""
    words = (tags.get("ElementSpacing") or tags.get("ElementSize") or "").split()
    if len(words) != 3:
        return None
    x, y, z = (abs(float(word)) for word in words)
    return plausible((x, y, z))


def _voxels(header: _Header, uri: str) -> np.ndarray:
    """[B-scan, axial, lateral] as stored, of any type."""
    with open_file(header.data, whole=True) as file:
        offset = header.offset
        if offset is None:
            offset = max(0, file.seek(0, io.SEEK_END) - header.bytes)
        file.seek(offset)
        if header.zipped:
            inflate = zlib.decompressobj()
            # At most these bytes, so that a small file cannot fill the memory.
            content = inflate.decompress(file.read(), header.bytes)
            # One byte more shows whether the stream ends, and makes zlib compare its checksum.
            inflate.decompress(inflate.unconsumed_tail, 1)
        else:
            content = file.read(header.bytes)
    expect_bytes(uri, len(content), header.bytes)
    array = np.frombuffer(content, header.dtype).reshape(header.stored, order="F")
    return array.transpose(in_order((0, 1, 2), header.axes))
