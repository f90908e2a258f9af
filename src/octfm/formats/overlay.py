"""Surfaces and labels in files of their own, put on the scan that they were drawn in: DICOM height maps and SEG, NIfTI
as octfm segment writes it, MetaImage masks."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np

from octfm.errors import ReadError
from octfm.formats import bscans, detect
from octfm.formats.arrays import in_order, metaimage, nifti
from octfm.formats.declared import read_declared
from octfm.io.location import from_json
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.volume import Labels, Shape3, Spacing3, Surfaces, Volume


def read_overlay(uri: str | Path, of: str | Path, shape: Shape3, spacing_mm: Spacing3) -> Surfaces | Labels:
    """Read an overlay for the Volume of file `of`, which has this shape and spacing; see octfm.formats.read_overlay."""
    uri, of = str(uri), str(of)
    reader = detect.find_reader(uri)
    if detect.is_dicom(reader):
        return _of_dicom(uri, of)
    with bscans.damage_has_a_code(uri):
        if reader is nifti:
            return _of_nifti(uri, of, shape, spacing_mm)
        if reader is metaimage:
            return _as_in_volume(_labels(metaimage.read_mask(uri), {}, uri, shape), of)
    raise _neither(uri)


def expect_scan_of(uri: str | Path, of: Volume) -> None:
    """Raise ReadError if the sidecar of NIfTI files that octfm segment wrote has the fingerprint of other voxels."""
    sidecar = Path(re.sub(r"_(labels|heights_um|heights_rows)\.nii(\.gz)?$", "_labels.json", str(uri)))
    if sidecar.suffix != ".json" or not sidecar.is_file():
        return
    try:
        scan = from_json(sidecar.read_bytes())["scan"]
    except (OSError, ValueError, TypeError, KeyError):
        return  # written by another program or an earlier octfm
    if re.fullmatch("[0-9a-f]{32}", str(scan)) and scan != fingerprint(of.voxels):
        raise ReadError(
            "other_volume",
            f"{uri}: results of a scan other than {of.source}, by the fingerprint in {sidecar.name}; give those of "
            "this scan",
        )


def _of_dicom(uri: str, of: str) -> Surfaces | Labels:
    from pydicom import dcmread

    from octfm.formats.dicom.file import guarded, text
    from octfm.formats.dicom.header import HEIGHT_MAP, LABEL_MAP, SEGMENTATION
    from octfm.formats.dicom.labels import labels_of_volume
    from octfm.formats.dicom.surfaces import surfaces_of_volume

    with guarded(uri) as file:
        kind = text(dcmread(file, force=True, specific_tags=["SOPClassUID"]), "SOPClassUID")
    if kind not in (HEIGHT_MAP, SEGMENTATION, LABEL_MAP):
        raise _neither(uri)
    if not detect.is_dicom(detect.find_reader(of)):
        raise ReadError("other_volume", f"{uri}: refers to a DICOM file, and {of} is none; give the NIfTI of this scan")
    return surfaces_of_volume(of, uri) if kind == HEIGHT_MAP else labels_of_volume(of, uri)


def _neither(uri: str) -> ReadError:
    return ReadError(
        "not_labels",
        f"{uri}: neither labels nor heights of layers; give a DICOM SEG or height map, NIfTI or MetaImage",
    )


def _of_nifti(uri: str, of: str, shape: Shape3, spacing_mm: Spacing3) -> Surfaces | Labels:
    depth, height, width = shape
    found = nifti.read_drawn(uri)
    stored, are_labels = found.values.shape, bool(np.isin(found.values, np.arange(256)).all())
    if sorted(stored) == sorted(shape) or are_labels:
        if not are_labels:
            raise ReadError("not_labels", f"{uri}: values that are no labels, which are 0 to 255; give the labels")
        # Labels drawn on a NIfTI scan have its axes; octfm declares them next to its own. Without a scan at hand it
        # wrote WHD, which the shape may show.
        declared, names = read_declared(uri), _names_of_labels(found.comments)
        axes = declared.axes or (nifti.stored_axes(of) if detect.find_reader(of) is nifti else "WHD")
        if in_order(stored, axes) != shape and stored == (width, height, depth):
            axes = "WHD"
        values = found.values.transpose(in_order((0, 1, 2), axes)).astype(np.uint8)
        labels = _labels(values, names, uri, shape)
        # octfm's own lie as the volume, and their sidecar never says upside_down; others lie as the file that they were
        # drawn on, whose sidecar may have been copied for them.
        if (declared.axes and not declared.upside_down) or names:
            return labels
        if detect.find_reader(of) is nifti and not nifti.same_directions(uri, of):
            raise ReadError(
                "other_volume",
                f"{uri}: its affine turns axes another way than that of {Path(of).name}, so labels would lie mirrored; "
                "save it with the scan's axes and affine",
            )
        return _as_in_volume(labels, of)
    if stored[:2] != (width, depth):
        raise ReadError(
            "other_volume",
            f"{uri}: heights of {stored[1]} B-scans of {stored[0]} A-scans, the scan has {depth} of {width}",
        )
    heights = found.values.transpose(2, 1, 0).astype(np.float32)
    row_um = 1000 * spacing_mm[1]
    rows = heights / np.float32(row_um) - np.float32(0.5) if found.has_mm else heights
    names = found.comments.partition(";")[0].split()
    named = names if len(names) == len(rows) else [f"surface {n + 1}" for n in range(len(rows))]
    return Surfaces(tuple(named), rows, spacing_mm[1], uri)


def _as_in_volume(labels: Labels, of: str) -> Labels:
    """Labels that lie as the voxels in the file `of`, in the order of its volume: its sidecar may say that rows are
    upside down, or where B-scans lie."""
    reader = detect.find_reader(of)
    if reader not in (nifti, metaimage):
        return labels
    return replace(labels, values=np.ascontiguousarray(bscans.to_labels(reader.open_bscans(of), labels.values)))


def _names_of_labels(comments: str) -> dict[int, str]:
    """Label → name, from the start of a comment such as `1 ilm to nfl; 2 drusen; synthetic`."""
    names = {}
    for part in comments.split("; "):
        if (match := re.fullmatch(r"(\d{1,3}) (.+)", part)) is None:
            break
        if 0 < int(match[1]) < 256:  # 0 is nothing, and a label is a byte
            names[int(match[1])] = match[2]
    return names


def _labels(values: np.ndarray, names: dict[int, str], uri: str, shape: Shape3) -> Labels:
    if values.shape != tuple(shape):
        raise ReadError(
            "other_volume",
            f"{uri}: labels of {' x '.join(map(str, values.shape))} voxels, the scan has {' x '.join(map(str, shape))}",
        )
    known = {int(value): f"label {value}" for value in np.unique(values) if value} | names
    return Labels(np.ascontiguousarray(values), dict(sorted(known.items())), uri)
