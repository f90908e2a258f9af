"""Scans as octfm segment returns them, made without a network."""

import numpy as np

from octfm.layers.finder import Layers
from octfm.layers.segment import ScanSegmentation
from octfm.layers.verdict import Verdict
from octfm.models.layer_net import MASKS, SURFACES
from octfm.volume.segmentation import Segmentation
from octfm.volume.volume import Volume
from support.vendor_files import SPACING_MM
from support.volumes import SHAPE


def found_in(depth: int = 25, *, laterality="R", reasons=(), fluid_in: int | None = None) -> ScanSegmentation:
    """A retina 300 µm thick with a pit, 6 mm wide, as if a network had found it."""
    height, width = 200, 120
    volume = Volume(
        np.full((depth, height, width), 40, np.uint8), (6 / depth, 0.004, 0.05), laterality=laterality,
        superior_first=True, source="scan",
    )  # fmt: skip
    y, x = np.meshgrid(np.linspace(-3, 3, depth), np.linspace(-3, 3, width), indexing="ij")
    thickness = 300 - 90 * np.exp(-(x**2 + y**2) / 0.4)
    bm = np.full((depth, width), 150.0)
    share = np.array([0, 0.1, 0.36, 0.46, 0.54, 0.84, 0.94, 0.96, 1])[:, None, None]  # of an eye without atrophy
    rows = bm - thickness / 4 * (1 - share)
    flat = np.zeros((depth, width))
    masks = {name: np.zeros(volume.shape, bool) for name in MASKS}
    if fluid_in is not None:
        masks["intraretinal_fluid"][fluid_in, 90:110, 40:60] = True
    return ScanSegmentation(
        surfaces={name: row.astype(np.float32) for name, row in zip(SURFACES, rows, strict=True)},
        masks=masks,
        spacing_mm=volume.spacing_mm,
        volume=volume,
        found=Layers(rows, np.ones_like(rows), np.ones_like(rows), flat, flat + 1, np.zeros(volume.shape, np.uint8)),
        verdict=Verdict(reasons, 1.5 if reasons else 0.1),
        model="test 000000000000",
    )


def for_segmentation(dataset):
    """What a study needs for a DICOM SEG."""
    dataset.StudyInstanceUID, dataset.StudyID, dataset.SeriesNumber, dataset.InstanceNumber = "1.2", "1", 1, 1
    dataset.StudyDate = dataset.StudyTime = dataset.AccessionNumber = dataset.PatientSex = ""
    dataset.SeriesInstanceUID, dataset.FrameOfReferenceUID = "1.2.3", "1.2.4"


NAMES = ("ilm", "rpe", "bm")


def segmentation(seed: int, shape=SHAPE, spacing_mm=SPACING_MM) -> Segmentation:
    """Surfaces at fractions of rows with gaps, and an area."""
    depth, height, width = shape
    rng = np.random.default_rng(seed)
    rows = np.cumsum(rng.uniform(1, height / 5, (len(NAMES), depth, width)), axis=0).astype(np.float32)
    rows[:, rng.random((depth, width)) < 0.1] = np.nan
    mask = np.zeros(shape, bool)
    mask[min(1, depth - 1), 5:9, 3:7] = True
    return Segmentation(dict(zip(NAMES, rows, strict=True)), {"fluid": mask}, spacing_mm)
