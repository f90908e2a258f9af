"""Layer height maps: the surfaces of a segmentation, and the volume they belong to.

Standard: DICOM PS3.3 A.89 and C.8.20.5 (Height Map Segmentation): a frame is a surface, its rows are the frames of the referenced volume
and its columns the A-scans; a value is the depth below the upper edge of the B-scan in rows.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from octfm.errors import ReadError
from octfm.formats.dicom.file import guarded, integer, referenced_uids, text
from octfm.formats.dicom.geometry import floats
from octfm.formats.dicom.reader import read_geometry_of
from octfm.volume.volume import Surfaces

HEIGHT_MAP = "1.2.840.10008.5.1.4.1.1.66.8"
MAX_VALUES = 2**28


@dataclass(frozen=True)
class HeightMap:
    surfaces: Surfaces
    """Rows in the order of the volume's stored frames; `surfaces_of_volume` brings them into the order of the Volume."""
    volume_uids: tuple[str, ...]
    """SOP Instance UIDs that it refers to: the volume, or the files of one."""


def read_height_map(uri: str | Path) -> HeightMap:
    """Raises ReadError: unreadable, not_layer_heights, missing_pixel_data, truncated_pixel_data, frame_count_mismatch, absurd_size."""
    from pydicom import dcmread

    uri = str(uri)
    with guarded(uri, whole=True) as file:
        dataset = dcmread(file, force=True)
        if text(dataset, "SOPClassUID") != HEIGHT_MAP:
            raise ReadError(
                "not_layer_heights",
                f"{uri}: expected a height map ({HEIGHT_MAP}), got {text(dataset, 'SOPClassUID')[:64] or 'no DICOM'}",
            )
        shape = (integer(dataset, "NumberOfFrames", 1), integer(dataset, "Rows", 0), integer(dataset, "Columns", 0))
        content = dataset.get("FloatPixelData")
        if min(shape) < 1 or int(np.prod(shape, dtype=np.int64)) > MAX_VALUES:
            raise ReadError("absurd_size", f"{uri}: {shape[0]} surfaces of {shape[1]} x {shape[2]} values")
        if content is None or len(content) == 0:
            raise ReadError("missing_pixel_data", f"{uri}: no FloatPixelData; export it again")
        if len(content) < 4 * np.prod(shape):
            raise ReadError(
                "truncated_pixel_data",
                f"{uri}: {len(content):,} of {4 * np.prod(shape):,} bytes of heights; fetch it again",
            )
        if len(content) > 4 * np.prod(shape):
            raise ReadError(
                "frame_count_mismatch",
                f"{uri}: more heights than {shape[0]} surfaces of {shape[1]} x {shape[2]}; export it again",
            )
        big_endian = not dataset.original_encoding[1]
        heights = np.frombuffer(content, ">f4" if big_endian else "<f4").astype(np.float32).reshape(shape)
        names = [text(item, "SegmentLabel") for item in dataset.get("SegmentSequence") or []]
        return HeightMap(
            Surfaces(
                names=tuple(names if len(names) == shape[0] else (f"surface {n + 1}" for n in range(shape[0]))),
                heights_px=_without_padding(heights, dataset),
                axial_mm=_row_mm(dataset),
                source=uri,
            ),
            referenced_uids(dataset),
        )


def surfaces_of_volume(volume_uri: str | Path, height_map: HeightMap | str | Path) -> Surfaces:
    """The surfaces, B-scan for B-scan as in `read_volume(volume_uri)`, with the volume's axial spacing, so that heights are known in mm.

    Raises ReadError: other_volume where the map refers to another volume or has another size, and what reading the two may raise.
    """
    found = height_map if isinstance(height_map, HeightMap) else read_height_map(height_map)
    header, frame_order = read_geometry_of(volume_uri)
    surfaces, shape = found.surfaces, found.surfaces.heights_px.shape
    if found.volume_uids and header.sop_instance_uid not in found.volume_uids:
        raise ReadError(
            "other_volume",
            f"{surfaces.source}: its surfaces are of {found.volume_uids[0]}, not of {header.sop_instance_uid}",
        )
    if shape[1:] != (header.shape[0], header.shape[2]):
        sizes = f"{shape[1]} B-scans of {shape[2]} A-scans, {header.uri} has {header.shape[0]} of {header.shape[2]}"
        raise ReadError("other_volume", f"{surfaces.source}: surfaces of {sizes}")
    heights = surfaces.heights_px if frame_order is None else surfaces.heights_px[:, list(frame_order)]
    return replace(
        surfaces, heights_px=heights, axial_mm=header.spacing_mm[1] if header.spacing_mm else surfaces.axial_mm
    )


def _without_padding(heights: np.ndarray, dataset: Any) -> np.ndarray:
    """NaN for padding, for what is no number and for what lies above the image."""
    padding, limit = floats(dataset.get("FloatPixelPaddingValue")), floats(dataset.get("FloatPixelPaddingRangeLimit"))
    absent = ~np.isfinite(heights) | (heights < 0)
    if padding is not None:
        low, high = sorted((padding[0], limit[0] if limit else padding[0]))
        absent |= (heights >= low) & (heights <= high)
    return np.where(absent, np.float32(np.nan), heights)


def _row_mm(dataset: Any) -> float | None:
    """Millimetres of a row, from the real-world value mapping, where there is one."""
    for group in (
        *(dataset.get("SharedFunctionalGroupsSequence") or []),
        *list(dataset.get("PerFrameFunctionalGroupsSequence") or [])[:1],
    ):
        for mapping in group.get("RealWorldValueMappingSequence") or []:
            slope, unit = (
                floats(mapping.get("RealWorldValueSlope")),
                mapping.get("MeasurementUnitsCodeSequence") or [{}],
            )
            scale = {"mm": 1.0, "um": 1e-3, "": 1.0}.get(text(unit[0], "CodeValue"))
            if slope and scale and 0 < slope[0] * scale < 0.1:
                return slope[0] * scale
    return None
