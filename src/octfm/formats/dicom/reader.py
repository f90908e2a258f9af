"""Read Ophthalmic Tomography DICOM, one file or several that form one volume, into a Volume.

Standard: DICOM PS3.3 A.52 (Ophthalmic Tomography Image IOD).
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from octfm.errors import ReadError
from octfm.formats.declared import declared_way_up
from octfm.formats.dicom.file import OpenFile, locate_pixels, parsed, referenced_uids, refusing_damage, text
from octfm.formats.dicom.geometry import Geometry, read_geometry
from octfm.formats.dicom.groups import Elements
from octfm.formats.dicom.parts import Part, expect_all_parts, merged, part_of, parts_beside
from octfm.formats.dicom.pixels import MAX_BYTES, Pixels, decode, is_blank
from octfm.formats.reasons import REASONS, Header, blank
from octfm.volume.planes import used_full_scale
from octfm.volume.radial import expect_a_star
from octfm.volume.volume import LAYOUTS, RASTER_ONLY, Laterality, Layout, Shape3, Volume

OPHTHALMIC_TOMOGRAPHY = "1.2.840.10008.5.1.4.1.1.77.1.5.4"
_LEFT_OUT = {
    "1.2.840.10008.5.1.4.1.1.77.1.5.8": "angiography",
    "1.2.840.10008.5.1.4.1.1.77.1.5.7": "en_face",
    "1.2.840.10008.5.1.4.1.1.77.1.5.1": "photograph",
    "1.2.840.10008.5.1.4.1.1.77.1.5.2": "photograph",
    "1.2.840.10008.5.1.4.1.1.77.1.5.5": "photograph",
    "1.2.840.10008.5.1.4.1.1.77.1.5.6": "photograph",
    "1.2.840.10008.5.1.4.1.1.66.8": "layer_heights",
}
"""SOP classes exported along with OCT (PS3.4 B.5) -> reason code; all others get not_oct."""
_SCANNERS = (
    ("heidelberg_spectralis", "heidelberg", r"spectralis"),
    ("topcon_maestro2", "topcon", r"maestro ?-?2"),
    ("topcon_triton", "topcon", r"triton"),
    ("zeiss_cirrus", "zeiss", r"cirrus"),
)


def read_dicom(uri: str | Path, layouts: Collection[Layout] = RASTER_ONLY) -> Volume:
    """The Volume of an Ophthalmic Tomography file, or of all files that form one volume with it; white is `full_scale`.

    Raises ReadError; not_raster for a layout that is not among `layouts`.
    """
    uri = str(uri)
    with parsed(uri, whole=True) as file:
        found = _inspect(file, layouts)
        if not isinstance(found, Part):
            header, geometry, pixels = found
            voxels = decode(file.stream, pixels, uri)
    if isinstance(found, Part):
        with refusing_damage(uri):
            parts = parts_beside(found)
            header, geometry, _ = _inspect_parts(parts, layouts)
            voxels, pixels = _decode_parts(parts, header.shape)
    # Plane by plane: the comparison of the whole volume would take another byte per voxel.
    if all((plane == voxels[0, 0, 0]).all() for plane in voxels):
        raise blank(uri)
    if geometry.frame_order is not None:
        _reorder(voxels, geometry.frame_order)
    white = 65535
    if "bits_from_values" in header.flags:
        # `decode` inverts MONOCHROME1 against 65,535: the brightest stored value is then the smallest voxel.
        white = used_full_scale(65535 - voxels.min(keepdims=True) if pixels.inverted else voxels)
        if pixels.inverted:
            np.subtract(voxels, np.uint16(65535 - white), out=voxels)
    if declared_way_up(uri):
        for plane in voxels:  # in place: a second volume would not fit into a worker's memory
            plane[:] = plane[::-1].copy()
    return Volume(
        voxels=voxels,
        full_scale=white,
        spacing_mm=geometry.spacing_mm,
        laterality=header.laterality,
        scanner=header.scanner,
        protocol=header.protocol,
        participant=header.participant or "unknown",
        acquisition=header.sop_instance_uid,
        superior_first=header.superior_first,
        layout=geometry.layout,
        lines=geometry.lines,
        source=header.uri,
    )


def read_header(uri: str | Path, layouts: Collection[Layout] = RASTER_ONLY) -> Header:
    """The header without decoding. Truncated, miscounted and blank pixel data raise ReadError all the same."""
    found = examine(uri, layouts)
    return read_header_of_parts(parts_beside(found), layouts) if isinstance(found, Part) else found


def examine(uri: str | Path, layouts: Collection[Layout] = RASTER_ONLY) -> Header | Part:
    """The header of a file that is a whole volume, else the file as a Part of one; a scan joins the parts itself."""
    uri = str(uri)
    with parsed(uri) as file:
        found = _inspect(file, layouts)
        if isinstance(found, Part):
            return found
        header, geometry, pixels = found
        _expect_resampling(geometry, uri)
        if is_blank(file.stream, pixels, uri):
            raise blank(uri)
    return header


def read_geometry_of(uri: str | Path) -> tuple[Header, tuple[int, ...] | None]:
    """The header of a volume, and the stored frame of each B-scan; None if frames are stored in order of position."""
    with parsed(str(uri)) as file:
        found = _inspect(file, LAYOUTS)
    header, geometry, _ = _inspect_parts(parts_beside(found), LAYOUTS) if isinstance(found, Part) else found
    return header, geometry.frame_order


def read_header_of_parts(parts: Sequence[Part], layouts: Collection[Layout] = RASTER_ONLY) -> Header:
    """The header of the volume that these files form.

    Raises ReadError: missing_part, inconsistent_parts, and those of single files.
    """
    with refusing_damage(parts[0].uri):
        header, geometry, all_blank = _inspect_parts(parts, layouts)
        _expect_resampling(geometry, header.uri)
        if all_blank and np.ptp(_decode_parts(parts, header.shape)[0]) == 0:  # each may hold another value
            raise blank(header.uri)
    return header


def scanner_slug(manufacturer: str, model: str) -> str:
    """heidelberg_spectralis, topcon_maestro2, topcon_triton or zeiss_cirrus; else slugify("manufacturer model")."""
    text = f"{manufacturer} {model}".lower()
    for slug, maker, pattern in _SCANNERS:
        if maker in text and re.search(pattern, text):
            return slug
    return slugify(f"{manufacturer} {model}") or "unknown"


def slugify(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


_EYES: dict[str, Laterality] = {"R": "R", "OD": "R", "RIGHT": "R", "L": "L", "OS": "L", "LEFT": "L"}


def lateralities(values: list[str]) -> tuple[Laterality | None, bool]:
    """The eye if all stated values agree, and whether they contradict each other. B and U state no eye."""
    stated: set[Laterality] = {eye for value in values if (eye := _EYES.get(value.upper()))}
    return stated.pop() if len(stated) == 1 else None, len(stated) > 1


def _inspect(file: OpenFile, layouts: Collection[Layout]) -> Part | tuple[Header, Geometry, Pixels]:
    """The facts of the volume in a file, or the file as a Part if it holds only part of a volume. Raises ReadError."""
    _expect_oct(file)
    if (part := part_of(file)) is not None:
        return part
    pixels = locate_pixels(file)
    return *_describe(file.dataset, pixels, pixels.shape, file.uri, layouts), pixels


def _expect_oct(file: OpenFile) -> None:
    """Raises ReadError unless the file is structural OCT with a SOP Instance UID."""
    from pydicom.uid import UID

    dataset, uri = file.dataset, file.uri
    # Some writers state the class in the meta group only.
    sop_class = text(dataset, "SOPClassUID") or text(dataset.file_meta, "MediaStorageSOPClassUID")
    if not sop_class:
        raise ReadError(
            "not_dicom", f"{uri}: no SOP Class UID, so this is not a DICOM object; remove it or export it again"
        )
    # A file may end inside the SOP Class UID itself: a prefix counts as well.
    if file.pixel_offset >= file.size and OPHTHALMIC_TOMOGRAPHY.startswith(sop_class):
        raise ReadError(
            "missing_pixel_data",
            f"{uri}: the file ends at byte {file.size:,} without pixel data; fetch or export it again",
        )
    if sop_class != OPHTHALMIC_TOMOGRAPHY:
        code = _LEFT_OUT.get(sop_class, "not_oct")
        about = next(iter(referenced_uids(dataset)), "") if code == "layer_heights" else ""
        raise ReadError(
            code, f"{uri}: {REASONS[code].meaning} ({UID(sop_class).name}){about and f' of {about}'}; left out", about
        )
    if not text(dataset, "SOPInstanceUID"):
        raise ReadError("missing_sop_uid", f"{uri}: SOP Instance UID is missing; export it again")


def _expect_resampling(geometry: Geometry, uri: str) -> None:
    if geometry.layout == "radial":
        expect_a_star(geometry.lines, uri)


def _describe(
    dataset: Elements, pixels: Pixels, shape: Shape3, uri: str, layouts: Collection[Layout]
) -> tuple[Header, Geometry]:
    """`dataset` may be merged from several files, `pixels` those of one of them."""
    scanner = scanner_slug(text(dataset, "Manufacturer"), text(dataset, "ManufacturerModelName"))
    geometry = read_geometry(dataset, shape, scanner, uri, layouts)
    laterality, conflict = lateralities(_stated_lateralities(dataset))
    flags = (
        *geometry.flags,
        *(("laterality_conflict",) if conflict else ()),
        *(() if laterality or conflict else ("laterality_unknown",)),
        # Converters write BitsStored 16 whatever the number of bits in use. Signed pixels state their white.
        *(("bits_from_values",) if pixels.bits_stored == 16 and pixels.gray is None else ()),
    )
    header = Header(
        uri=uri,
        shape=shape,
        spacing_mm=geometry.spacing_mm,
        spacing_source=geometry.spacing_source,
        laterality=laterality,
        scanner=scanner,
        protocol=slugify(text(dataset, "ProtocolName")) or "unknown",
        participant=text(dataset, "PatientID") or None,
        sop_instance_uid=text(dataset, "SOPInstanceUID"),
        superior_first=geometry.superior_first,
        flags=flags,
        layout=geometry.layout,
    )
    return header, geometry


def _inspect_parts(parts: Sequence[Part], layouts: Collection[Layout]) -> tuple[Header, Geometry, bool]:
    """Header, geometry, and whether every file is blank by itself. The volume has the uri and UID of its first part."""
    # Checked before and after reading: some gaps show in the numbers, others only in the positions.
    expect_all_parts(parts)
    datasets, pixels, all_blank = [], [], True
    for part in parts:
        with parsed(part.uri) as file:
            datasets.append(file.dataset)
            pixels.append(locate_pixels(file))
            all_blank = all_blank and is_blank(file.stream, pixels[-1], part.uri)
    shape = _joint_shape(parts, pixels)
    frames = [p.shape[0] for p in pixels]
    header, geometry = _describe(merged(datasets, frames), pixels[0], shape, parts[0].uri, layouts)
    expect_all_parts(parts, geometry)
    return replace(header, flags=(*header.flags, "several_files")), geometry, all_blank


def _joint_shape(parts: Sequence[Part], pixels: Sequence[Pixels]) -> Shape3:
    forms = {(p.shape[1:], p.bits_allocated) for p in pixels}
    if len(forms) > 1:
        raise ReadError(
            "inconsistent_parts",
            f"{parts[0].uri}: its {len(parts)} files have B-scans of different size or depth; export it again",
        )
    frames = sum(p.shape[0] for p in pixels)
    if sum(p.bytes_expected for p in pixels) > MAX_BYTES:
        raise ReadError(
            "absurd_size",
            f"{parts[0].uri}: {len(parts)} files of {frames} frames together; expected at most {MAX_BYTES:,} bytes",
        )
    return (frames, *pixels[0].shape[1:])


def _decode_parts(parts: Sequence[Part], shape: Shape3) -> tuple[np.ndarray, Pixels]:
    """All B-scans, and the pixel format of the last file."""
    voxels, pixels, at = None, None, 0
    for part in parts:
        with parsed(part.uri, whole=True) as file:
            pixels = locate_pixels(file)
            planes = decode(file.stream, pixels, part.uri)
        voxels = np.empty(shape, planes.dtype) if voxels is None else voxels
        voxels[at : at + len(planes)] = planes
        at += len(planes)
    assert voxels is not None and pixels is not None  # there is at least one part
    return voxels, pixels


def _reorder(voxels: np.ndarray, order: Sequence[int]) -> None:
    """`voxels[order]` in place, cycle by cycle: a second volume would not fit into a worker's memory."""
    misplaced = {at: stored for at, stored in enumerate(order) if at != stored}
    while misplaced:
        first, source = misplaced.popitem()
        kept, at = voxels[first].copy(), first
        while source != first:
            voxels[at] = voxels[source]
            at, source = source, misplaced.pop(source)
        voxels[at] = kept


def _stated_lateralities(dataset: Elements) -> list[str]:
    """From FrameAnatomySequence, shared and of the first frame, then ImageLaterality and the series' Laterality."""
    shared = dataset.get("SharedFunctionalGroupsSequence") or []
    frames = dataset.get("PerFrameFunctionalGroupsSequence") or []
    anatomy = [item for group in (*shared[:1], *frames[:1]) for item in group.get("FrameAnatomySequence") or []]
    # The first frame speaks for all: one acquisition shows one eye.
    values = [text(item, "FrameLaterality") for item in anatomy]
    return [*values, text(dataset, "ImageLaterality"), text(dataset, "Laterality")]
