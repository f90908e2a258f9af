"""Read Ophthalmic Tomography DICOM, one file or several that form one volume, into a Volume.

Standard: DICOM PS3.3 A.52 (Ophthalmic Tomography Image IOD).
"""

from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np

from octfm.formats.declared import declared_for_dicom
from octfm.formats.dicom.file import OpenFile, locate_pixels, parsed, refusing_damage
from octfm.formats.dicom.geometry import Geometry
from octfm.formats.dicom.header import describe, expect_oct, with_sidecar
from octfm.formats.dicom.parts import Part, decode_parts, inspect_parts, part_of, parts_beside
from octfm.formats.dicom.pixels import Pixels, decode, is_blank
from octfm.formats.reasons import Header, blank
from octfm.volume.radial import expect_a_star
from octfm.volume.volume import LAYOUTS, MODALITIES, Layout, Modality, Volume, used_full_scale


def read_dicom(uri: str, layouts: Collection[Layout], modalities: Collection[Modality]) -> Volume:
    """The Volume of an Ophthalmic Tomography file, or of all files that form one volume with it; white is `full_scale`.

    Raises ReadError; not_raster for a layout that is not among `layouts`, angiography for flow likewise.
    """
    with parsed(uri, whole=True) as file:
        found = _inspect(file, layouts, modalities)
        if not isinstance(found, Part):
            header, geometry, pixels = found
            # Header and pixel count are consistent by now; only the codec can still find damage.
            voxels = decode(file.stream, pixels, uri)
    if isinstance(found, Part):
        with refusing_damage(uri):
            parts = parts_beside(found)
            header, geometry, _ = inspect_parts(parts, layouts)
            voxels, pixels = decode_parts(parts, header.shape)
    # Plane by plane: the comparison of the whole volume would take another byte per voxel.
    if all((plane == voxels[0, 0, 0]).all() for plane in voxels):
        raise blank(uri)
    # Files may store B-scans in the order of acquisition; a Volume has them in the order of position.
    if geometry.frame_order is not None:
        _reorder(voxels, geometry.frame_order)
    # Converters state 16 bits whatever number is used: white then comes from the values, or volumes would be dark.
    white = 65535
    declared = declared_for_dicom(uri)
    if "bits_from_values" in header.flags:
        # `decode` inverts MONOCHROME1 against 65,535: the brightest stored value is then the smallest voxel.
        white = used_full_scale(65535 - voxels.min(keepdims=True) if pixels.inverted else voxels)
        white = max(white, (1 << (declared.bits or 0)) - 1)
        if pixels.inverted:
            np.subtract(voxels, np.uint16(65535 - white), out=voxels)
    if declared.upside_down:
        for plane in voxels:  # in place: a second volume would not fit into a worker's memory
            plane[:] = plane[::-1].copy()
    return with_sidecar(header, declared).volume(voxels, white, geometry.spacing_mm, geometry.lines)


def read_header(uri: str, layouts: Collection[Layout], modalities: Collection[Modality]) -> Header:
    """The header without decoding. Truncated, miscounted and blank pixel data raise ReadError all the same."""
    found = examine(uri, layouts, modalities)
    header = read_header_of_parts(parts_beside(found), layouts) if isinstance(found, Part) else found
    return with_sidecar(header, declared_for_dicom(uri))


def examine(uri: str, layouts: Collection[Layout], modalities: Collection[Modality]) -> Header | Part:
    """The header of a file that is a whole volume, else the file as a Part of one; a scan joins the parts, and adds
    what sidecars state, itself."""
    with parsed(uri) as file:
        found = _inspect(file, layouts, modalities)
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
        found = _inspect(file, LAYOUTS, MODALITIES)
    header, geometry, _ = inspect_parts(parts_beside(found), LAYOUTS) if isinstance(found, Part) else found
    return header, geometry.frame_order


def read_header_of_parts(parts: Sequence[Part], layouts: Collection[Layout]) -> Header:
    """The header of the volume that these files form.

    Raises ReadError: missing_part, inconsistent_parts, and those of single files.
    """
    with refusing_damage(parts[0].uri):
        header, geometry, all_blank = inspect_parts(parts, layouts)
        _expect_resampling(geometry, header.uri)
        if all_blank and np.ptp(decode_parts(parts, header.shape)[0]) == 0:  # each may hold another value
            raise blank(header.uri)
    return header


def _inspect(
    file: OpenFile, layouts: Collection[Layout], modalities: Collection[Modality]
) -> Part | tuple[Header, Geometry, Pixels]:
    """The facts of the volume in a file, or the file as a Part if it holds only part of a volume. Raises ReadError."""
    expect_oct(file, modalities)
    if (part := part_of(file)) is not None:
        return part
    pixels = locate_pixels(file)
    return *describe(file.dataset, pixels, pixels.shape, file.uri, layouts), pixels


def _expect_resampling(geometry: Geometry, uri: str) -> None:
    if geometry.layout == "radial":
        expect_a_star(geometry.lines, uri)


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
