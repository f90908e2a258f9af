"""The tissue band holds the retina, is tight, and says so when it cannot tell."""

import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octfm.phantom import phantom_volume
from octfm.volume.registration import register_bscans
from octfm.volume.tissue import MARGIN_MM, Tissue, find_tissue
from octfm.volume.volume import Volume

SCANNERS = ("heidelberg_spectralis", "topcon_triton")
FIRST = [SCANNERS[0], pytest.param(SCANNERS[1], marks=pytest.mark.slow)]


def band(tissue: Tissue, volume: Volume) -> tuple[np.ndarray, np.ndarray]:
    margin = MARGIN_MM / volume.spacing_mm[1]
    return tissue.ilm - margin, tissue.bm + margin


def inside(tissue: Tissue, volume: Volume) -> np.ndarray:
    """bool [D, H, W]: voxels in the band; all of them where the search is not confident."""
    if not tissue.confident:
        return np.ones(volume.shape, bool)
    rows = np.arange(volume.shape[1])[None, :, None]
    upper, lower = band(tissue, volume)
    return (rows >= upper[:, None]) & (rows < lower[:, None])


def contained(tissue: Tissue, volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> float:
    """Share of the ILM-to-BM voxels that lie inside the band."""
    rows = np.arange(volume.shape[1])[None, :, None]
    retina = (rows >= ilm[:, None]) & (rows <= bm[:, None])
    return float(inside(tissue, volume)[retina].mean())


def tight(tissue: Tissue, volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> float:
    """Share of A-scans on which the band reaches, inside the frame, at most 150 µm above ILM and 300 µm below BM."""
    upper, lower, ilm, bm = (np.clip(surface, 0, volume.shape[1]) for surface in (*band(tissue, volume), ilm, bm))
    return float((((ilm - upper) * volume.spacing_mm[1] <= 0.15) & ((lower - bm) * volume.spacing_mm[1] <= 0.3)).mean())


# What can happen to a scan. Each takes (volume, ilm, bm) and returns them changed.
Case = tuple[Volume, np.ndarray, np.ndarray]


def vitreous(volume: Volume, shape: tuple[int, ...]) -> np.ndarray:
    """Samples of the dark noise above the retina."""
    return np.random.default_rng(0).choice(volume.voxels[:, :20].ravel(), shape)


def off_centre_mm(volume: Volume) -> np.ndarray:
    """[D, W]: distance of every A-scan from the middle of the field."""
    d, w = ((np.arange(n) - n / 2) * mm for n, mm in zip(volume.shape[::2], volume.spacing_mm[::2], strict=True))
    return np.hypot(d[:, None], w[None])


def hyaloid_line(volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> Case:
    """A detached posterior hyaloid: a bright line 150-350 µm above the ILM across most of the field."""
    top = ilm - (0.15 + 0.2 * np.cos(off_centre_mm(volume) / 3) ** 2) / volume.spacing_mm[1]
    rows = np.arange(volume.shape[1])[None, :, None]
    line = np.abs(rows - top[:, None]) <= 0.01 / volume.spacing_mm[1]
    line[:, :, : volume.shape[2] // 5] = False
    return replace(volume, voxels=np.where(line, 150, volume.voxels).astype(np.uint8)), ilm, bm


def detachment(volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> Case:
    """A serous detachment: the neurosensory retina lifted by up to 350 µm off the RPE, dark fluid below it."""
    dome = np.maximum(0.35 * (1 - (off_centre_mm(volume) / 1.8) ** 2), 0) / volume.spacing_mm[1]
    seam = bm - 0.035 / volume.spacing_mm[1]
    rows = np.arange(volume.shape[1])[None, :, None]
    lifted = np.take_along_axis(
        volume.voxels, np.clip(np.rint(rows + dome[:, None]), 0, volume.shape[1] - 1).astype(int), 1
    )
    fluid = (rows >= (seam - dome)[:, None]) & (rows < seam[:, None])
    voxels = np.where(fluid, vitreous(volume, volume.shape), np.where(rows < seam[:, None], lifted, volume.voxels))
    return replace(volume, voxels=voxels), ilm - dome, bm


def atrophy(volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> Case:
    """Geographic atrophy: RPE and ellipsoid zone lost over 3 mm, choroid brighter below."""
    rows = np.arange(volume.shape[1])[None, :, None]
    lesion = (off_centre_mm(volume) < 1.5)[:, None]
    rpe = (rows > (bm - 0.09 / volume.spacing_mm[1])[:, None]) & (rows <= bm[:, None])
    voxels = volume.voxels.astype(float)
    voxels = np.where(lesion & rpe, 0.45 * voxels, np.where(lesion & (rows > bm[:, None]), 1.3 * voxels, voxels))
    return replace(volume, voxels=np.minimum(voxels, 255).astype(np.uint8)), ilm, bm


def macular_hole(volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> Case:
    """A full-thickness hole of 500 µm."""
    rows = np.arange(volume.shape[1])[None, :, None]
    hole = (off_centre_mm(volume) < 0.25)[:, None] & (rows < (bm - 0.03 / volume.spacing_mm[1])[:, None])
    return replace(volume, voxels=np.where(hole, vitreous(volume, volume.shape), volume.voxels)), ilm, bm


def tilted(volume: Volume, ilm: np.ndarray, bm: np.ndarray, um_per_mm: float = 180) -> Case:
    """A retina that crosses the frame obliquely; on fields wider than 6 mm less steeply, so that it stays in the
    frame as before."""
    lateral_mm = (
        (np.arange(volume.shape[2]) - volume.shape[2] / 2) * volume.spacing_mm[2] * min(1, 6 / volume.extent_mm[2])
    )
    shift = np.rint(lateral_mm * um_per_mm / 1000 / volume.spacing_mm[1]).astype(int)
    rows = np.arange(volume.shape[1])[:, None] - shift
    voxels = volume.voxels[:, np.clip(rows, 0, volume.shape[1] - 1), np.arange(volume.shape[2])]
    outside = np.broadcast_to((rows < 0) | (rows >= volume.shape[1]), voxels.shape)
    return replace(volume, voxels=np.where(outside, vitreous(volume, voxels.shape), voxels)), ilm + shift, bm + shift


def clipped_above(volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> Case:
    """The retina leaves the frame at the top on up to a third of the A-scans, wholly on less than a tenth."""
    volume, ilm, bm = tilted(volume, ilm, bm, 80)
    cut = int(
        min(np.quantile(ilm + 0.1 / volume.spacing_mm[1], 0.33), np.quantile(bm - 0.11 / volume.spacing_mm[1], 0.08))
    )
    return replace(volume, voxels=volume.voxels[:, cut:]), ilm - cut, bm - cut


def clipped_below(volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> Case:
    """The RPE leaves the frame at the bottom on a quarter of the A-scans."""
    volume, ilm, bm = tilted(volume, ilm, bm, 120)
    return replace(volume, voxels=volume.voxels[:, : int(np.quantile(bm, 0.75))]), ilm, bm


def blank_margins(volume: Volume, ilm: np.ndarray, bm: np.ndarray) -> Case:
    """A-scans without image at both sides and a lost B-scan, as image registration leaves them."""
    voxels = volume.voxels.copy()
    voxels[:, :, :12] = voxels[:, :, -20:] = 0
    voxels[volume.shape[0] // 3] = 0
    return replace(volume, voxels=voxels), ilm, bm


def dim(volume: Volume, ilm: np.ndarray, bm: np.ndarray, share: float = 0.35) -> Case:
    """A cataract: only part of the signal is left above the noise."""
    noise = vitreous(volume, volume.shape).astype(float)
    voxels = noise + share * np.maximum(volume.voxels - np.median(noise), 0)
    return replace(volume, voxels=np.minimum(voxels, 255).astype(np.uint8)), ilm, bm


CASES: tuple[Callable[..., Case], ...] = (
    hyaloid_line,
    detachment,
    atrophy,
    macular_hole,
    tilted,
    clipped_above,
    clipped_below,
    blank_margins,
    dim,
)


def phantom(scanner: str, diagnosis="healthy", severity=0.5, seed=0, bscans=32) -> Case:
    volume, truth = phantom_volume(
        seed,
        diagnosis=diagnosis,
        severity=severity,
        scanner=scanner,
        laterality="RL"[seed % 2],
        size=(bscans, 256, 192),
    )
    return volume, truth.surface("ilm"), truth.surface("bm")


def assert_found(volume, ilm, bm):
    tissue = find_tissue(volume.voxels, volume.spacing_mm)
    assert tissue.confident, tissue.confidence
    assert contained(tissue, volume, ilm, bm) >= 0.99
    assert tight(tissue, volume, ilm, bm) >= 0.95


@pytest.mark.parametrize("scanner", SCANNERS)
@pytest.mark.parametrize(
    ("diagnosis", "severity"), [("healthy", 0.5), ("drusen", 0.4), ("drusen", 1.0), ("dme", 0.3), ("dme", 1.0)]
)
def test_band_holds_the_retina_of_every_phantom_and_is_tight(scanner, diagnosis, severity):
    for seed in (1, 2):
        assert_found(*phantom(scanner, diagnosis, severity, seed, bscans=16))


@pytest.mark.parametrize("scanner", FIRST)
@pytest.mark.parametrize("case", CASES)
def test_band_survives(case, scanner):
    assert_found(*case(*phantom(scanner, seed=3)))


@pytest.mark.parametrize("scanner", SCANNERS)
def test_hole_and_everything_above_its_floor_stay_inside(scanner):
    volume, ilm, _ = macular_hole(*phantom(scanner, seed=1))
    upper, _ = band(find_tissue(volume.voxels, volume.spacing_mm), volume)
    hole = off_centre_mm(volume) < 0.25
    assert (upper[hole] < ilm[hole] + 0.04 / volume.spacing_mm[1]).all()


@pytest.mark.parametrize("scanner", FIRST)
@pytest.mark.parametrize("share", [0.2, 0.1, 0.05, 0.02])
def test_fading_signal_never_gives_a_confident_wrong_band(scanner, share):
    volume, ilm, bm = dim(*phantom(scanner, "drusen", 0.6, seed=2), share=share)
    assert contained(find_tissue(volume.voxels, volume.spacing_mm), volume, ilm, bm) >= 0.99


def no_retina(volume: Volume, what: str) -> np.ndarray:
    rng = np.random.default_rng(0)
    match what:
        case "noise":
            return rng.integers(0, 256, volume.shape).astype(np.uint8)
        case "vitreous":
            return vitreous(volume, volume.shape)
        case "constant":
            return np.full(volume.shape, 9, np.uint8)
        case "ramp":
            return np.broadcast_to(np.linspace(0, 255, volume.shape[1])[None, :, None], volume.shape).astype(np.uint8)
        case "upside_down":
            return volume.voxels[:, ::-1]
        case "axes_swapped":
            return volume.voxels.transpose(0, 2, 1)
        case "shuffled_bscans":
            return np.stack([np.roll(b, rng.integers(-90, 90), axis=0) for b in volume.voxels])
        case _:
            return volume.voxels[:1, :8, :4]


@pytest.mark.parametrize(
    "what", ["noise", "vitreous", "constant", "ramp", "upside_down", "axes_swapped", "shuffled_bscans", "crumb"]
)
@pytest.mark.parametrize("scanner", FIRST)
def test_no_retina_no_confidence(scanner, what):
    volume, _, _ = phantom(scanner)
    tissue = find_tissue(np.ascontiguousarray(no_retina(volume, what)), volume.spacing_mm)
    assert not tissue.confident
    assert np.isfinite(tissue.ilm).all()
    assert np.isfinite(tissue.bm).all()


@pytest.mark.parametrize("bscans", [1, 2, 5])
def test_a_few_bscans_are_enough(bscans):
    volume, ilm, bm = phantom("heidelberg_spectralis", seed=2)
    some = slice(10, 10 + bscans)
    volume = replace(volume, voxels=volume.voxels[some])
    tissue = find_tissue(volume.voxels, volume.spacing_mm)
    assert tissue.confident
    assert contained(tissue, volume, ilm[some], bm[some]) >= 0.99


@pytest.mark.parametrize("scanner", SCANNERS)
def test_registration_undoes_motion_and_keeps_the_curvature(scanner):
    """What is left between neighbours is a small part of the motion, and a still eye is left alone up to a row."""
    volume, _, bm = phantom(scanner, seed=4)
    coarse = volume.voxels.transpose(0, 2, 1).astype(np.float32)
    displacement = register_bscans(coarse, volume.spacing_mm)
    before, after = (np.abs(np.diff(surface, 2, axis=0)).mean() for surface in (bm, bm - displacement[:, None]))
    assert after < 0.25 * before

    d = np.arange(volume.shape[0])[:, None, None]
    bowl = np.rint(0.02 * (d - d.mean()) ** 2 + 0.5 * d).astype(int)
    rows = np.clip(np.arange(volume.shape[1]) - bowl, 0, volume.shape[1] - 1)
    still = np.take_along_axis(
        np.repeat(coarse[15:16], volume.shape[0], axis=0), np.broadcast_to(rows, coarse.shape), axis=2
    )
    assert np.abs(register_bscans(still, volume.spacing_mm)).max() < 1


def test_fovea_is_found_or_not_claimed():
    for seed in range(3):
        volume, ilm, bm = phantom("topcon_triton", "drusen", 0.5, seed)
        tissue = find_tissue(volume.voxels, volume.spacing_mm)
        thickness = np.where(off_centre_mm(volume) < 1, bm - ilm, np.inf)
        truth = np.unravel_index(thickness.argmin(), thickness.shape)
        assert tissue.fovea is not None
        assert (
            np.hypot(*((a - b) * mm for a, b, mm in zip(tissue.fovea, truth, volume.spacing_mm[::2], strict=True)))
            < 0.5
        )
        noise = find_tissue(vitreous(volume, volume.shape), volume.spacing_mm)
        assert noise.fovea is None or not noise.confident


@pytest.mark.slow
def test_real_amd_volume(real_data: Path):
    """Expert RPE (255) and BM (127, 170 where they overlap) on every B-scan of a Spectralis volume with drusen."""
    with np.load(real_data / "medvisbonn_amd_spectralis_145.npz") as file:
        voxels, labels = file["volume"], file["labels"]
    volume = Volume(voxels, (0.030, 0.003872, 0.011182))
    tissue = find_tissue(volume.voxels, volume.spacing_mm)
    held = inside(tissue, volume)
    assert tissue.confident
    assert held[(labels == 255) | (labels == 170)].mean() >= 0.99
    assert held[(labels == 127) | (labels == 170)].mean() >= 0.99
    assert held.mean() <= 0.5


@pytest.mark.parametrize("dy", [0.003, 0.003872, 0.006])
def test_real_macular_hole_and_its_cysts_stay_inside(real_data: Path, dy: float):
    """Spacing of this volume is unknown, so several are declared. Boxes (B-scan, rows, A-scans) were read off the
    images by eye."""
    with np.load(real_data / "macular_hole_49.npz") as file:
        volume = Volume(file["volume"], (0.06, dy, 0.0117))
    tissue = find_tissue(volume.voxels, volume.spacing_mm)
    held = inside(tissue, volume)
    assert tissue.confident
    hole = (slice(22, 31), slice(112, 165), slice(60, 135))
    cysts = [(slice(11, 14), slice(108, 132), slice(15, 60)), (slice(35, 38), slice(105, 125), slice(0, 62))]
    rims = [(slice(24, 25), slice(80, 165), slice(0, 40)), (slice(24, 25), slice(90, 165), slice(160, 199))]
    for box in (hole, *cysts, *rims):
        assert held[box].all()


@pytest.mark.parametrize("name", ["Willis_B_716_0.vol", "Willis_B_716_2.vol"])
def test_real_scans_at_the_optic_disc(real_data: Path, name: str):
    """One line scan that ends in the disc and one circle around it: thick, bright nerve fibres, segmented by the
    instrument."""
    data = (real_data / "heyex_vol" / name).read_bytes()
    width, _, height = struct.unpack_from("<3i", data, 12)
    dx, _, dy = struct.unpack_from("<3d", data, 24)
    start = 2048 + int(np.prod(struct.unpack_from("<2i", data, 48)))
    surfaces = np.frombuffer(
        data, np.float32, 2 * width, start + struct.unpack_from("<i", data, start + 52)[0]
    ).reshape(2, 1, width)
    power = np.frombuffer(data, np.float32, width * height, start + struct.unpack_from("<i", data, 100)[0]).reshape(
        1, height, width
    )
    volume = Volume((255 * np.where(power > 1, 0, power) ** 0.25).astype(np.uint8), (0.1, dy, dx))
    known = (surfaces < height).all(axis=0)
    ilm, bm = (np.where(known, surface, side) for surface, side in zip(surfaces, (height, -1), strict=True))
    tissue = find_tissue(volume.voxels, volume.spacing_mm)
    assert tissue.confident, tissue.confidence
    assert contained(tissue, volume, ilm, bm) >= 0.99
    assert inside(tissue, volume).mean() < 0.3


def test_overexposed_scans_are_not_trusted():
    """Where half the retina is white, nerve fibres and RPE look the same."""
    volume, ilm, bm = phantom("heidelberg_spectralis", "dme", 0.7, seed=2)
    white = replace(volume, voxels=np.minimum(volume.voxels * 1.6 + 40, 255).astype(np.uint8))
    assert contained(find_tissue(white.voxels, white.spacing_mm), white, ilm, bm) >= 0.99


@pytest.mark.parametrize("size", [(1, 3, 1), (2, 8, 5), (3, 40, 9), (5, 1, 4)])
@pytest.mark.parametrize("spacing_mm", [(0.1, 0.002, 0.01), (0.02, 0.1, 0.1), (3.0, 0.5, 2.0)])
def test_volumes_of_any_size_and_spacing_are_searched(size, spacing_mm):
    """Nothing sensible can be found in them, and nothing breaks."""
    voxels = np.random.default_rng(0).integers(0, 256, size).astype(np.uint8)
    tissue = find_tissue(voxels, spacing_mm)
    assert tissue.ilm.shape == tissue.bm.shape == (size[0], size[2]) and np.isfinite([tissue.ilm, tissue.bm]).all()
    backwards = find_tissue(voxels[:, :, ::-1], spacing_mm)
    assert backwards.ilm.shape == tissue.ilm.shape


@pytest.mark.parametrize("scanner", SCANNERS)
def test_a_mirrored_view_and_its_copy_give_the_same_band(scanner):
    """The view is read as it lies in memory, which must make no difference; also where the last block of A-scans is
    not full."""
    voxels = phantom(scanner)[0].voxels[:, :, :-5]
    spacing_mm = phantom(scanner)[0].spacing_mm
    view, copy = (find_tissue(v, spacing_mm) for v in (voxels[:, :, ::-1], np.ascontiguousarray(voxels[:, :, ::-1])))
    np.testing.assert_array_equal(view.ilm, copy.ilm)
    np.testing.assert_array_equal(view.bm, copy.bm)


@pytest.mark.parametrize("dz", [0.03, 0.05])
def test_close_bscans_are_searched_in_steps_and_keep_their_displacement(dz):
    """B-scans nearer than 0.11 mm share a search; each is still moved back by its own eye motion, to the row."""
    volume = phantom("topcon_triton")[0]
    dense = np.repeat(volume.voxels, round(volume.spacing_mm[0] / dz), axis=0)
    shift = np.random.default_rng(3).integers(-8, 9, len(dense))
    moved = np.stack([np.roll(plane, s, axis=0) for plane, s in zip(dense, shift, strict=True)])
    spacing_mm = (dz, *volume.spacing_mm[1:])
    still, jumping = find_tissue(dense, spacing_mm), find_tissue(moved, spacing_mm)
    assert len(still.ilm) == len(dense) and still.confident and jumping.confident
    row_mm = volume.spacing_mm[1]
    assert np.median(np.abs(jumping.bm - shift[:, None] - still.bm)) * row_mm < 0.01
