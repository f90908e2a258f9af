"""Export segmentations: NIfTI height and label maps, DICOM SEG (with highdicom), DICOM height maps."""

import gzip
import json
from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from octfm.catalog.participants.safe_values import is_known_protocol, is_known_scanner
from octfm.errors import EvaluationError, ExportError, reason_of
from octfm.formats import within
from octfm.formats.arrays.nifti import HEIGHTS
from octfm.io.isolation import Limits
from octfm.io.location import from_json, is_remote, local_path, replacing, write_whole
from octfm.version import __version__
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.segmentation import Segmentation
from octfm.volume.volume import Shape3, Volume


def label_map(found: Segmentation, image_rows: int | None = None) -> tuple[np.ndarray, dict[int, str]]:
    """Labels uint8 [D, H, W] in the native frame and the names of their values: layers between consecutive surfaces,
    then masks; 0 is everything else. `image_rows`: H of the scan, if `found` does not know it."""
    names = list(found.surfaces)
    shape = next(iter(found.masks.values())).shape if found.masks else None
    depth, width = next(iter(found.surfaces.values())).shape if names else (shape or (0, 0, 0))[::2]
    # If the number of rows is unknown, the image must reach below the lowest surface; all may lie above row 0.
    lowest = max([-1.0, *(float(np.nanmax(rows)) for rows in found.surfaces.values() if np.isfinite(rows).any())])
    height = found.image_rows or image_rows or int(lowest) + 2
    labels = np.zeros((depth, height, width), np.uint8)
    meaning: dict[int, str] = {}
    row = np.arange(height)[None, :, None]
    for value, (upper, lower) in enumerate(pairwise(names), start=1):
        inside = (row >= found.surfaces[upper][:, None]) & (row < found.surfaces[lower][:, None])
        labels[inside] = value
        meaning[value] = f"{upper} to {lower}"
    for value, (name, mask) in enumerate(found.masks.items(), start=len(meaning) + 1):
        labels[mask] = value
        meaning[value] = name
    return labels, meaning


def write_nifti(found: Segmentation, folder: str | Path, stem: str, volume: Volume | None = None) -> list[Path]:
    """<stem>_heights_um.nii.gz, float32 [A-scan, B-scan, surface], and <stem>_labels.nii.gz, uint8 [A-scan, row,
    B-scan].

    A header extension (comment) has the names of surfaces or values; the description has the note of the segmentation,
    if there is one, else as many names as fit. Spacing is in mm, in the frame of the image (x along A-scans, y
    downwards, z along B-scans), not of the patient. Where millimetres are only estimated, heights are rows,
    <stem>_heights_rows.nii.gz, and spacing is 1 without a unit. Labels of a scan that is a NIfTI or
    MetaImage file have its axes, affine and unit instead.
    volume: the scan, whose eye, scanner, positions of B-scans and fingerprint go into <stem>_labels.json, since NIfTI
    cannot hold them; octfm.read_volume reads them with the labels.
    Returns the paths of the images. Raises EvaluationError without nibabel.
    """
    try:
        import nibabel
    except ImportError:
        raise EvaluationError("NIfTI export needs nibabel: pip install 'octfm[export]'") from None
    folder, measured = local_path(folder), not found.why_no_um
    dz, dy, dx = found.spacing_mm if measured else (1.0, 1.0, 1.0)
    unit = "mm" if measured else "unknown"
    folder.mkdir(parents=True, exist_ok=True)
    labels, meaning = label_map(found, None if volume is None else volume.shape[1])
    axes, on_scan = "WHD", _on_grid_of(volume, labels) if volume is not None else None
    if on_scan is None:
        image = nibabel.Nifti1Image(labels.transpose(2, 1, 0), np.diag([dx, dy, dz, 1.0]))
        image.header.set_xyzt_units(unit)
    else:
        image, axes = on_scan
    image.header.set_intent("label")
    _describe(image, found, "; ".join(f"{value} {name}" for value, name in meaning.items()))
    # Before any image: require_own knows by it whose results these are.
    if volume is not None:
        facts = _sidecar(volume) | {"axes": axes, "scan": fingerprint(volume.voxels)}
        write_whole(folder / f"{stem}_labels.json", json.dumps(facts).encode())
    written = []
    if found.surfaces:
        of = found.heights_um if measured else found.surfaces.__getitem__
        heights = np.stack([of(name).T for name in found.surfaces], axis=-1).astype(np.float32)
        surfaces = nibabel.Nifti1Image(heights, np.diag([dx, dz, 1.0, 1.0]))
        surfaces.header.set_intent("estimate", name=HEIGHTS)
        _describe(surfaces, found, " ".join(found.surfaces))
        surfaces.header.set_xyzt_units(unit)
        written.append(_nifti(surfaces, folder / f"{stem}_heights_{'um' if measured else 'rows'}.nii.gz"))
    return [*written, _nifti(image, folder / f"{stem}_labels.nii.gz")]


def stem_of(source: str) -> str:
    """The name with which results of a scan begin, unless several scans share it."""
    return Path(source).stem.removesuffix(".nii")


def write_files(
    found: Segmentation, volume: Volume, folder: Path, stem: str, *, dicom: bool = False, limits: Limits | None = None
) -> Iterator[Path]:
    """Write NIfTI, and with `dicom` also DICOM (within `limits` if given); yields the path of each file once written.
    A scan that DICOM files cannot refer to gets no file at all.

    Raises ExportError if results of another scan would be overwritten, and if DICOM files cannot refer to this scan.
    """
    require_own(folder, stem, volume)
    # DICOM first, because it refuses scans.
    write = partial(write_dicom, found, folder=folder, stem=stem)
    refer_to_scan = within(limits, write, volume.source) if dicom else []
    yield from write_nifti(found, folder, stem, volume)
    yield from refer_to_scan


def expect_writable_for(
    volume: Volume, folder: Path, stem: str, *, dicom: bool = False, limits: Limits | None = None
) -> None:
    """Raise, before a scan is segmented, what `write_files` would raise because the folder has results of another scan,
    because this one is no DICOM file that holds the whole volume, or because highdicom is not installed."""
    require_own(folder, stem, volume)
    if dicom:
        _highdicom()
        within(limits, partial(_expect_dicom, shape=volume.shape), volume.source)


def require_own(folder: Path, stem: str, volume: Volume) -> None:
    """Raise ExportError if the folder has results of this stem that are not known to be of this scan."""
    sidecar = folder / f"{stem}_labels.json"
    if not sidecar.exists():
        return
    try:
        owner = from_json(sidecar.read_bytes())["scan"]
    except (ValueError, TypeError, KeyError):
        owner = None
    if owner != fingerprint(volume.voxels):
        raise ExportError(
            f"{sidecar}: results of a scan other than {volume.source}, or of an earlier octfm; choose another --out, "
            "or delete them"
        )


def _on_grid_of(volume: Volume, labels: np.ndarray) -> tuple[Any, str] | None:
    """Labels [D, H, W] as a NIfTI image with the axes, affine and units of the scan's NIfTI or MetaImage file, so that
    other programs overlay them, and the letters of its axes. None for other files, and if the volume's voxels are not
    ordered as in the file."""
    import nibabel

    from octfm.formats import detect
    from octfm.formats.arrays import metaimage, nifti

    if is_remote(volume.source) or not Path(volume.source).is_file():
        return None
    reader = detect.find_reader(volume.source)
    if reader is metaimage and (place := metaimage.place_of(volume.source)) is not None:
        affine, axes = place
        if not np.array_equal(volume.voxels, metaimage.open_bscans(volume.source).decode()):
            return None
        image = nibabel.Nifti1Image(labels.transpose(["DHW".index(letter) for letter in axes]), affine)
        image.set_qform(affine, 1)
        image.header.set_xyzt_units("mm")
        return image, axes
    if reader is not nifti:
        return None
    scan: Any = nibabel.load(volume.source)
    axes = nifti.stored_axes(volume.source)
    stored = ["DHW".index(letter) for letter in axes]
    voxels, found = volume.voxels.transpose(stored), np.asanyarray(scan.dataobj)
    # Files may have axes of length 1. A sidecar may give B-scans another order, or say that the vitreous is at the
    # bottom.
    if found.size != voxels.size or not np.array_equal(voxels, found.reshape(voxels.shape)):
        return None
    image = nibabel.Nifti1Image(labels.transpose(stored), scan.affine)
    image.header["xyzt_units"] = scan.header["xyzt_units"]
    for form in ("sform", "qform"):
        affine, code = getattr(scan, f"get_{form}")(coded=True)
        getattr(image, f"set_{form}")(affine, int(code))
    return image, axes


def _sidecar(volume: Volume) -> dict[str, Any]:
    """Facts of a scan for octfm.formats.declared: no participant, no estimated millimetres, and only known names of
    scanners and protocols, since in DICOM these are free text that may identify someone."""
    facts: dict[str, Any] = {"laterality": volume.laterality, "superior_first": volume.superior_first}
    facts["modality"] = volume.modality
    facts["scanner"] = volume.scanner if is_known_scanner(volume.scanner) else None
    facts["protocol"] = volume.protocol if is_known_protocol(volume.protocol) else None
    if not volume.spacing_estimated:
        facts["spacing_mm"] = list(volume.spacing_mm)
    if volume.lines is not None and np.isfinite([volume.lines.start, volume.lines.end]).all():
        facts["bscan_lines_mm"] = np.concatenate([volume.lines.start, volume.lines.end], axis=1).tolist()
    return {name: value for name, value in facts.items() if value not in (None, "unknown")}


def write_dicom(found: Segmentation, source: str | Path, folder: str | Path, stem: str | None = None) -> list[Path]:
    """<stem>_seg.dcm and, with surfaces, <stem>_heights.dcm, both referring to the DICOM file `source` that was
    segmented, whose stem is the default.

    The SEG holds layers and masks frame by frame (highdicom). The height map holds rows of the source image in
    FloatPixelData, laid out as in AI-READI and PS3.3 A.91; no program that validates this IOD was at hand.
    The algorithm of a segment is SEMIAUTOMATIC if somebody has corrected or checked it (PS3.3 C.8.20). Returns the
    paths. Raises EvaluationError without highdicom, and ExportError if the source is no DICOM file on this disk, does
    not hold the whole volume or has no geometry.
    """
    from pydicom import dcmread

    from octfm.formats.declared import declared_for_dicom
    from octfm.formats.dicom.reader import read_geometry_of

    highdicom = _highdicom()
    source, folder = Path(source), local_path(folder)
    stem = stem or source.stem
    labels, meaning = label_map(found)
    frames, rows, columns = _expect_dicom(source, labels.shape)
    image = dcmread(source)
    # A volume has its B-scans ordered by position and the vitreous at the top. In a file they may be ordered by time,
    # and the vitreous may be at the bottom.
    order = list(read_geometry_of(source)[1] or range(frames))
    flipped = bool(declared_for_dicom(str(source)).upside_down)
    whole = np.zeros((frames, rows, columns), np.uint8)
    whole[order, : labels.shape[1]] = labels[:, :rows]
    whole = whole[:, ::-1] if flipped else whole
    target = folder / f"{stem}_seg.dcm"
    try:
        seg = highdicom.seg.Segmentation(
            source_images=[image],
            pixel_array=whole,
            segmentation_type=highdicom.seg.SegmentationTypeValues.BINARY,
            segment_descriptions=[_segment(highdicom, found, number, name) for number, name in meaning.items()],
            series_instance_uid=highdicom.UID(),
            series_number=int(image.get("SeriesNumber") or 1) + 1000,
            sop_instance_uid=highdicom.UID(),
            instance_number=1,
            manufacturer="octfm",
            manufacturer_model_name="octfm segment",
            software_versions=__version__,
            device_serial_number="0",
            omit_empty_frames=False,
        )
    except (AttributeError, KeyError, ValueError, TypeError) as error:
        reason = reason_of(error, 200)
        raise ExportError(f"{source}: no DICOM SEG can be written for it ({reason}); use NIfTI") from None
    if found.note:
        seg.SeriesDescription = seg.ContentDescription = found.note
        seg.ImageComments = found.comments
    folder.mkdir(parents=True, exist_ok=True)
    _save(seg, target)
    if not found.surfaces:
        return [target]
    heights = np.stack(list(found.surfaces.values())).astype("<f4")
    stored = np.empty_like(heights)
    stored[:, order] = rows - 1 - heights if flipped else heights
    return [target, _height_map(highdicom, image, seg, found, stored, folder / f"{stem}_heights.dcm")]


def _highdicom() -> Any:
    """The package that writes SEG and height maps. Raises EvaluationError without it."""
    try:
        import highdicom
    except ImportError:
        raise EvaluationError("DICOM export needs highdicom: pip install 'octfm[export]'") from None
    return highdicom


def _expect_dicom(source: str | Path, shape: Shape3) -> Shape3:
    """Frames, rows and columns of a DICOM file that holds a volume of `shape`. Raises ExportError for another file."""
    from pydicom import dcmread
    from pydicom.errors import InvalidDicomError

    try:
        image = dcmread(source, stop_before_pixels=True)
    except (InvalidDicomError, OSError):
        raise ExportError(f"{source}: no DICOM file on this disk, so no DICOM SEG can refer to it; use NIfTI") from None
    frames, rows, columns = int(image.get("NumberOfFrames", 1)), int(image.Rows), int(image.Columns)
    if (frames, columns) != (shape[0], shape[2]):
        raise ExportError(
            f"{source}: has {frames} frames of {columns} columns, the segmentation {shape[0]} of {shape[2]}; a DICOM "
            "SEG refers to one file that holds the whole volume; use NIfTI"
        )
    return frames, rows, columns


def _algorithm_type(found: Segmentation, *names: str) -> str:
    return "AUTOMATIC" if found.by_hand.isdisjoint(names) else "SEMIAUTOMATIC"


def _segment(highdicom: Any, found: Segmentation, number: int, name: str) -> Any:
    from pydicom.sr.codedict import codes

    algorithm = highdicom.AlgorithmIdentificationSequence(
        name="octfm", family=codes.DCM.ArtificialIntelligence, version=__version__, source="octfm"
    )
    # Fluid and drusen are coded as lesions, layers as anatomy; only the label says which lesion or layer.
    lesion, sct = name in found.masks, codes.SCT
    return highdicom.seg.SegmentDescription(
        segment_number=number,
        segment_label=name[:64],
        segmented_property_category=sct.MorphologicallyAbnormalStructure if lesion else sct.AnatomicalStructure,
        segmented_property_type=sct.Lesion if lesion else sct.Retina,
        anatomic_regions=[sct.Retina] if lesion else None,
        algorithm_type=_algorithm_type(found, *name.split(" to ")),  # a layer lies between two surfaces
        algorithm_identification=algorithm,
    )


def _height_map(highdicom: Any, image: Any, seg: Any, found: Segmentation, heights: np.ndarray, path: Path) -> Path:
    """Write the height map; `heights`: rows [S, D, W] of the surfaces in the stored frames. Rows of the file are
    B-scans, columns are A-scans, and there is one frame per surface (PS3.3 A.91)."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, generate_uid

    from octfm.formats.dicom.header import HEIGHT_MAP

    ds = Dataset()
    # Patient, study, equipment, dates and references are those of the SEG.
    for group in (0x0008, 0x0010, 0x0018, 0x0020, 0x0070):
        ds.update(deepcopy(seg.group_dataset(group)))
    ds.SOPClassUID, ds.SOPInstanceUID, ds.SeriesInstanceUID = HEIGHT_MAP, generate_uid(), generate_uid()
    ds.SeriesNumber += 1
    if (eye := image.get("ImageLaterality") or image.get("Laterality")) in ("R", "L"):  # not B or U, as an image's
        ds.Laterality = eye
    # At most 64 characters; the names of the surfaces are in the segment sequence.
    ds.SeriesDescription = found.note or "Layer surfaces, rows of the referenced image"
    reference = Dataset()
    reference.ReferencedSOPClassUID, reference.ReferencedSOPInstanceUID = image.SOPClassUID, image.SOPInstanceUID
    ds.ReferencedImageSequence = [reference]  # where readers of AI-READI's height maps look
    ds.SegmentationType = "HEIGHTMAP"
    ds.SegmentSequence = [_segment(highdicom, found, number, name) for number, name in enumerate(found.surfaces, 1)]
    ds.DimensionIndexSequence = ds.DimensionIndexSequence[:1]  # the segment; positions are those of the whole scan
    derivation = deepcopy(seg.PerFrameFunctionalGroupsSequence[0].DerivationImageSequence)
    # Without a frame number, rows are all frames, in their order; pixels are not where those of the scan are.
    for name in ("ReferencedFrameNumber", "SpatialLocationsPreserved"):
        derivation[0].SourceImageSequence[0].pop(name, None)
    shared = Dataset()
    shared.DerivationImageSequence = derivation
    ds.SharedFunctionalGroupsSequence = [shared]
    ds.PerFrameFunctionalGroupsSequence = [_surface_frame(number) for number in range(1, len(heights) + 1)]
    ds.NumberOfFrames, ds.Rows, ds.Columns = heights.shape
    ds.SamplesPerPixel, ds.PhotometricInterpretation, ds.BitsAllocated = 1, "MONOCHROME2", 32
    # NaN marks A-scans outside the field that was analysed.
    ds.FloatPixelPaddingValue = float("nan")
    ds.FloatPixelData = heights.tobytes()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    _save(ds, path)
    return path


def _surface_frame(number: int) -> Any:
    """Functional groups of the frame of this segment."""
    from pydicom.dataset import Dataset

    content, segment, frame = Dataset(), Dataset(), Dataset()
    content.DimensionIndexValues = segment.ReferencedSegmentNumber = number
    frame.FrameContentSequence, frame.SegmentIdentificationSequence = [content], [segment]
    return frame


def _describe(image: Any, found: Segmentation, names: str) -> None:
    from nibabel.nifti1 import Nifti1Extension

    image.header["descrip"] = (found.note or names).encode()[:79]
    image.header.extensions.append(
        Nifti1Extension("comment", "; ".join(filter(None, (names, found.comments, found.why_no_um))).encode())
    )


def _nifti(image: Any, path: Path) -> Path:
    write_whole(path, gzip.compress(image.to_bytes(), mtime=0))
    return path


def _save(dataset: Any, path: Path) -> None:
    with replacing(path) as partial:
        dataset.save_as(partial, enforce_file_format=True)
