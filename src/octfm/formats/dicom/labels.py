"""DICOM segmentations (SEG): the class of each voxel of a volume.

Standard: DICOM PS3.3 A.51 and C.8.20.2. In a binary segmentation a frame is the mask of one segment in one frame of the
volume, one bit per voxel; in a label map its bytes are numbers of segments.
"""

from math import prod
from pathlib import Path

import numpy as np

from octfm.errors import ReadError, shown
from octfm.formats.declared import declared_for_dicom
from octfm.formats.dicom.file import guarded, integer, referenced_uids, text
from octfm.formats.dicom.groups import Elements
from octfm.formats.dicom.header import LABEL_MAP, SEGMENTATION
from octfm.formats.dicom.reader import read_geometry_of
from octfm.formats.reasons import expect_bytes
from octfm.volume.volume import Labels, Shape3

_NATIVE = ("1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.1.99")
MOST_SEGMENTS = 255


def labels_of_volume(volume_uri: str | Path, seg_uri: str | Path) -> Labels:
    """The labels in a segmentation, in the frame of `read_volume(volume_uri)`; where segments overlap, the last counts.
    One that refers to no volume at all is taken if its size fits.

    Raises ReadError: not_labels; other_volume if it refers to another volume, differs in size or does not say which
    frame a mask is of; unsupported_pixels, unsupported_transfer_syntax; also those of reading the volume's header.
    """
    from pydicom import dcmread

    uri = str(seg_uri)
    header, order = read_geometry_of(volume_uri)
    _, height, width = header.shape
    with guarded(uri, whole=True) as file:
        dataset = dcmread(file, force=True)
        if (kind := text(dataset, "SOPClassUID")) not in (SEGMENTATION, LABEL_MAP):
            raise ReadError(
                "not_labels", f"{uri}: expected a DICOM SEG ({SEGMENTATION}), got {kind[:64] or 'no DICOM'}"
            )
        uids = referenced_uids(dataset)
        if uids and header.sop_instance_uid not in uids:
            raise ReadError("other_volume", f"{uri}: its labels are of {uids[0]}, not of {header.sop_instance_uid}")
        if (size := (integer(dataset, "Rows", 0), integer(dataset, "Columns", 0))) != (height, width):
            raise ReadError(
                "other_volume",
                f"{uri}: labels of {size[0]} x {size[1]} pixels, {header.uri} has {height} x {width}",
            )
        names = _names(dataset, uri)
        stored = _stored_labels(dataset, kind == LABEL_MAP, header.shape, names, uri)
    values = stored if order is None else stored[list(order)]
    if declared_for_dicom(str(volume_uri)).upside_down:
        values = values[:, ::-1]
    return Labels(np.ascontiguousarray(values), names, uri)


def _names(dataset: Elements, uri: str) -> dict[int, str]:
    names = {}
    for item in dataset.get("SegmentSequence") or []:
        value = integer(item, "SegmentNumber", 0)
        if not 0 < value <= MOST_SEGMENTS:
            if text(item, "SegmentLabel").lower() == "background":
                continue  # label maps may name the value 0
            raise ReadError("unsupported_pixels", f"{uri}: segment number {value}; expected 1 to {MOST_SEGMENTS}")
        names[value] = text(item, "SegmentLabel") or f"segment {value}"
    return names


def _stored_labels(dataset: Elements, is_map: bool, shape: Shape3, names: dict[int, str], uri: str) -> np.ndarray:
    """uint8 [D, H, W] in the order of the volume's stored frames."""
    meta: Elements | None = getattr(dataset, "file_meta", None)
    syntax = text(meta, "TransferSyntaxUID") if meta is not None else _NATIVE[0]
    if syntax not in _NATIVE:
        raise ReadError(
            "unsupported_transfer_syntax", f"{uri}: compressed labels ({syntax[:64]}); save it uncompressed"
        )
    bits, form = integer(dataset, "BitsAllocated", 0), text(dataset, "SegmentationType").upper()
    if bits != (8 if is_map else 1) or (not is_map and form != "BINARY"):
        raise ReadError(
            "unsupported_pixels", f"{uri}: {shown(form, 24)} segments of {bits} bits; save it as BINARY or LABELMAP"
        )
    count, pixels = integer(dataset, "NumberOfFrames", 1), prod(shape[1:])
    groups, content = dataset.get("PerFrameFunctionalGroupsSequence") or [], dataset.get("PixelData")
    if content is None or len(content) == 0:
        raise ReadError("missing_pixel_data", f"{uri}: no PixelData; export it again")
    if not 0 < count <= shape[0] * len(names) or len(groups) != count:
        raise ReadError(
            "frame_count_mismatch", f"{uri}: {count} frames and positions of {len(groups)}; export it again"
        )
    expect_bytes(uri, len(content), (count * pixels * bits + 7) // 8)
    values, raw = np.zeros(shape, np.uint8), np.frombuffer(content, np.uint8)
    for number, group in enumerate(groups):
        frame, first = _frame_of(group, shape[0], uri), number * pixels
        if is_map:
            values[frame] = raw[first : first + pixels].reshape(shape[1:])
            continue
        segment = integer((group.get("SegmentIdentificationSequence") or [{}])[0], "ReferencedSegmentNumber", 0)
        if segment not in names:
            raise ReadError("damaged_file", f"{uri}: a mask of segment {segment}, which has no name; export it again")
        # Frames follow each other bit by bit, the first voxel in the lowest bit (PS3.5 8.1.1).
        bytes_ = raw[first // 8 : (first + pixels + 7) // 8]
        mask = np.unpackbits(bytes_, bitorder="little")[first % 8 :][:pixels].reshape(shape[1:])
        values[frame][mask.astype(bool)] = segment
    if unnamed := set(np.unique(values).tolist()) - {0, *names}:
        raise ReadError("damaged_file", f"{uri}: voxels of segment {min(unnamed)}, which has no name; export it again")
    return values


def _frame_of(group: Elements, depth: int, uri: str) -> int:
    """The stored frame of the volume, from 0, to which a frame of the segmentation belongs."""
    sources = [s for d in group.get("DerivationImageSequence") or [] for s in d.get("SourceImageSequence") or []]
    number = integer(sources[0], "ReferencedFrameNumber", 1 if depth == 1 else 0) if len(sources) == 1 else 0
    if not 0 < number <= depth:
        raise ReadError(
            "other_volume",
            f"{uri}: does not say which of the {depth} B-scans a mask is of (ReferencedFrameNumber); export it again",
        )
    return number - 1
