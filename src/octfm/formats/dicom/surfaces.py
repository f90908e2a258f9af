"""Height maps: the surfaces of a segmentation, and their match to the volume they belong to.

Standard: DICOM PS3.3 A.89 and C.8.20.5 (Height Map Segmentation). A frame is a surface; its rows are the frames of the
referenced volume, its columns the A-scans; a value is the depth below the upper edge of the B-scan, in rows.
"""

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np

from octfm.errors import ReadError
from octfm.formats.declared import declared_for_dicom
from octfm.formats.dicom.file import guarded, integer, referenced_uids, text
from octfm.formats.dicom.geometry import floats
from octfm.formats.dicom.groups import Elements
from octfm.formats.dicom.header import HEIGHT_MAP
from octfm.formats.dicom.reader import read_geometry_of
from octfm.formats.reasons import expect_bytes
from octfm.volume.volume import Surfaces

MAX_VALUES = 2**28


def read_height_map(uri: str | Path) -> tuple[Surfaces, tuple[str, ...]]:
    """The surfaces of a DICOM height map, in the order of the volume's stored frames, and the SOP Instance UIDs that it
    refers to: of the volume, or of the files that form it.

    Raises ReadError: unreadable, not_layer_heights, absurd_size, missing_pixel_data, truncated_pixel_data,
    frame_count_mismatch.
    """
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
        needed = 4 * prod(shape)
        if min(shape) < 1 or needed > 4 * MAX_VALUES:
            raise ReadError("absurd_size", f"{uri}: {shape[0]} surfaces of {shape[1]} x {shape[2]} values")
        if content is None or len(content) == 0:
            raise ReadError("missing_pixel_data", f"{uri}: no FloatPixelData; export it again")
        expect_bytes(uri, len(content), needed)
        if len(content) > needed:
            raise ReadError(
                "frame_count_mismatch",
                f"{uri}: more heights than {shape[0]} surfaces of {shape[1]} x {shape[2]}; export it again",
            )
        # (implicit VR, little endian), as found in the file.
        big_endian = not dataset.original_encoding[1]
        heights = np.frombuffer(content, ">f4" if big_endian else "<f4").astype(np.float32).reshape(shape)
        names = [text(item, "SegmentLabel") for item in dataset.get("SegmentSequence") or []]
        names = names if len(names) == shape[0] else [f"surface {n + 1}" for n in range(shape[0])]
        surfaces = Surfaces(tuple(names), _without_padding(heights, dataset), _row_mm(dataset), uri)
        return surfaces, referenced_uids(dataset)


def surfaces_of_volume(volume_uri: str | Path, height_map: str | Path) -> Surfaces:
    """The surfaces in the B-scan order of `read_volume(volume_uri)`, with the volume's axial spacing.

    Raises ReadError other_volume if the map refers to another volume or differs in size; also those of reading the two.
    """
    surfaces, uids = read_height_map(height_map)
    header, frame_order = read_geometry_of(volume_uri)
    shape = surfaces.heights_px.shape
    if uids and header.sop_instance_uid not in uids:
        raise ReadError(
            "other_volume", f"{surfaces.source}: its surfaces are of {uids[0]}, not of {header.sop_instance_uid}"
        )
    if shape[1:] != (header.shape[0], header.shape[2]):
        sizes = f"{shape[1]} B-scans of {shape[2]} A-scans, {header.uri} has {header.shape[0]} of {header.shape[2]}"
        raise ReadError("other_volume", f"{surfaces.source}: surfaces of {sizes}")
    heights = surfaces.heights_px if frame_order is None else surfaces.heights_px[:, list(frame_order)]
    if declared_for_dicom(str(volume_uri)).upside_down:
        heights = header.shape[1] - 1 - heights
    return replace(
        surfaces, heights_px=heights, axial_mm=header.spacing_mm[1] if header.spacing_mm else surfaces.axial_mm
    )


def _without_padding(heights: np.ndarray, dataset: Elements) -> np.ndarray:
    """The heights with NaN for padding, for values that are not finite, and for values above the image."""
    padding, limit = floats(dataset.get("FloatPixelPaddingValue")), floats(dataset.get("FloatPixelPaddingRangeLimit"))
    absent = ~np.isfinite(heights) | (heights < 0)
    if padding is not None:
        low, high = sorted((padding[0], limit[0] if limit else padding[0]))
        absent |= (heights >= low) & (heights <= high)
    return np.where(absent, np.float32(np.nan), heights)


def _row_mm(dataset: Elements) -> float | None:
    """Millimetres per row from the real-world value mapping; None without a plausible one."""
    shared = dataset.get("SharedFunctionalGroupsSequence") or []
    frames = dataset.get("PerFrameFunctionalGroupsSequence") or []
    for group in (*shared, *frames[:1]):
        for mapping in group.get("RealWorldValueMappingSequence") or []:
            slope = floats(mapping.get("RealWorldValueSlope"))
            unit = mapping.get("MeasurementUnitsCodeSequence") or [{}]
            scale = {"mm": 1.0, "um": 1e-3, "": 1.0}.get(text(unit[0], "CodeValue"))
            if slope and scale and 0 < slope[0] * scale < 0.1:
                return slope[0] * scale
    return None
