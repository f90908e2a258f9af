"""What the packaged network of `octfm segment` finds on real development scans, beside the experts' lines and masks.

python benchmarks/segment_packaged.py --data FOLDER              # FOLDER of real scans, as OCTFM_REAL_DATA
python benchmarks/segment_packaged.py --data FOLDER --picture out.png
python benchmarks/segment_packaged.py --data FOLDER --degraded   # the same scans as JPEG, with noise, at other sizes
"""

import argparse
import io
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import gaussian_filter

from octfm.layers.edges import EDGES, onto_edge, onto_edges
from octfm.layers.finder import LayerFinder, Layers, load_finder
from octfm.layers.training import from_state
from octfm.models.layer_net import SURFACES
from octfm.volume.margins import imaged_rows
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.surface import at_rows
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Volume
from octfm.weights.packaged import CURRENT

ROW_UM = 3.872
COLOURS = {"ilm": (255, 60, 60), "ez": (0, 255, 255), "rpe_peak": (0, 255, 0), "bm": (255, 0, 200)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default=CURRENT)
    parser.add_argument("--state", type=Path, help="of `python -m octfm.layers.training`, instead of --model")
    parser.add_argument("--every", type=int, default=1, help="of the AMD volume's B-scans")
    parser.add_argument("--picture")
    parser.add_argument("--degraded", action="store_true", help="one B-scan in 15, as exports and screenshots show it")
    arguments = parser.parse_args()
    finder = from_state(arguments.state) if arguments.state else load_finder(arguments.model)
    if arguments.degraded:
        return degraded(finder, arguments.data)
    print(f"{finder.name} {finder.digest[:12]}, {torch.get_num_threads()} threads")
    pictures = amd(finder, arguments.data, arguments.every) + fluid(finder, arguments.data)
    speed(finder)
    if arguments.picture:
        height, width = (max(p.shape[i] for p in pictures) for i in (0, 1))
        padded = [np.pad(p, ((0, height - p.shape[0]), (0, width - p.shape[1]), (0, 0))) for p in pictures]
        Image.fromarray(np.concatenate(padded)).save(arguments.picture)


def amd(finder: LayerFinder, data: Path, every: int) -> list[np.ndarray]:
    """B-scans 75 to 145 of a Spectralis volume with drusen: RPE and BM against an expert's lines."""
    file = np.load(data / "medvisbonn_amd_spectralis_145.npz")
    voxels, labels = file["volume"][75::every], file["labels"][75::every]
    volume = Volume(voxels, (0.030 * every, ROW_UM / 1000, 0.011182))
    own = finder.find(volume)
    found = replace(own, rows=onto_edges(volume.voxels, own.rows, volume.spacing_mm))
    drawn = {"rpe": line(labels, 255), "bm": line(labels, 127)}
    for name, truth in (("rpe_inner", "rpe"), ("rpe_peak", "rpe"), ("bm", "bm")):
        show(name, found.rows[SURFACES.index(name)] - drawn[truth])
        show(f"{name} of the network", own.rows[SURFACES.index(name)] - drawn[truth])
    peak, fall = snapped(volume)
    show("tissue band, snapped to the peak", peak - drawn["rpe"])
    show("tissue band, snapped to the fall", fall - drawn["bm"])
    band = find_tissue(voxels, volume.spacing_mm).bm
    for name, above_um, truth in (("rpe_peak", 15.0, "rpe"), ("bm", 0.0, "bm")):
        moved = onto_edge(voxels, band - above_um / ROW_UM, EDGES[name], volume.spacing_mm)
        show(f"tissue band, moved onto edges as {name}", moved - drawn[truth])
    height = (drawn["bm"] - drawn["rpe"]) * ROW_UM
    for low, high in ((0, 20), (20, 40), (40, np.inf)):
        there = (height >= low) & (height < high)
        for name, rows in (("rpe_peak", found.rows), ("rpe_peak of the network", own.rows)):
            off = rows[SURFACES.index("rpe_peak")] - drawn["rpe"]
            show(f"{name}, RPE and BM {low} to {high} µm apart", off[there])
    return [overlay(voxels[d], found, d) for d in (0, len(voxels) // 2)]


def line(labels: np.ndarray, value: int) -> np.ndarray:
    """[D, W] row of an expert's line; 170 marks where both coincide."""
    hit, rows = (labels == value) | (labels == 170), np.arange(labels.shape[1])[None, :, None]
    count = hit.sum(axis=1)
    return np.where(count > 0, (hit * rows).sum(axis=1) / np.maximum(count, 1), np.nan)


def snapped(volume: Volume) -> tuple[np.ndarray, np.ndarray]:
    """The cheapest rival, rows [D, W]: the brightest row within 40 µm of the tissue band's RPE, and the steepest fall
    in the 40 µm below it."""
    smooth = gaussian_filter(volume.voxels.astype(np.float32), (0, 0.7, 2))
    centre = find_tissue(volume.voxels, volume.spacing_mm).bm - 15 / ROW_UM
    reach = np.arange(-10, 11)
    near = np.stack([at_rows(smooth.transpose(0, 2, 1), centre + r) for r in reach])
    peak = centre + reach[near.argmax(axis=0)]
    below = np.arange(12)
    falls = -np.diff(np.stack([at_rows(smooth.transpose(0, 2, 1), peak + r) for r in below]), axis=0)
    return peak, peak + 0.5 + below[falls.argmax(axis=0)]


def show(name: str, off: np.ndarray) -> None:
    off = off * ROW_UM
    print(
        f"AMD volume {name:55} {np.nanmean(np.abs(off)):5.2f} µm, bias {np.nanmean(off):+5.2f}, "
        f"{100 * np.nanmean(np.abs(off) > 20):.1f} % beyond 20 µm, {100 * np.isnan(off).mean():.1f} % missing"
    )


def fluid(finder: LayerFinder, data: Path) -> list[np.ndarray]:
    """55 B-scans of five eyes with diabetic macular oedema: Dice of fluid with each of two graders."""
    file = np.load(data / "chiu2015_dme_subjects1to5.npz")
    voxels, shape = file["bscans"], tuple(file["shape"])
    graders = [np.unpackbits(file[f"fluid_grader{i}"])[: np.prod(shape)].reshape(shape).astype(bool) for i in (1, 2)]
    found = finder.find(Volume(voxels, (0.12, 0.00387, 0.0115)))
    ours = np.isin(found.lesions, (1, 2))
    shown = [[truth[d].any() for d in range(len(voxels))] for truth in graders]
    seen = [ours[d].any() for d in range(len(voxels))]
    print(
        f"DME presence per B-scan agrees with graders in {np.mean(np.equal(seen, shown[0])):.2f} and "
        f"{np.mean(np.equal(seen, shown[1])):.2f}, they with each other in {np.mean(np.equal(*shown)):.2f}"
    )
    for eye in range(5):
        part = slice(11 * eye, 11 * eye + 11)
        between = dice(graders[0][part], graders[1][part])
        print(
            f"DME eye {eye + 1}: graders {between:.2f}, ours {dice(ours[part], graders[0][part]):.2f} and "
            f"{dice(ours[part], graders[1][part]):.2f}; area over theirs "
            f"{ours[part].sum() / max(1, graders[0][part].sum()):.2f}, {ours[part].sum() / graders[1][part].sum():.2f}"
        )
    print(
        f"DME pooled: graders {dice(*graders):.2f}, ours {dice(ours, graders[0]):.2f}, {dice(ours, graders[1]):.2f}; "
        f"area over theirs {ours.sum() / graders[0].sum():.2f}, {ours.sum() / graders[1].sum():.2f}"
    )
    return [overlay(voxels[d], found, d) for d in (5, 49)]


def degraded(finder: LayerFinder, data: Path) -> None:
    """Lines and fluid of B-scans altered as exports alter them, and the tissue band of `octfm prepare`; in rows
    and A-scans of the originals."""
    file = np.load(data / "medvisbonn_amd_spectralis_145.npz")
    voxels, labels = file["volume"][5::15], file["labels"][5::15]
    drawn = {"rpe_peak": line(labels, 255), "bm": line(labels, 127)}
    oedema = np.load(data / "chiu2015_dme_subjects1to5.npz")
    shape = tuple(oedema["shape"])
    grader = np.unpackbits(oedema["fluid_grader1"])[: np.prod(shape)].reshape(shape).astype(bool)[::2]
    print(f"{'':24} rpe_peak, µm (bias)    bm, µm (bias)  fluid, Dice  area over grader's  sure eyes, B-scans; before")
    for name, altered in ALTERED.items():
        amd, dme = (np.stack([altered(bscan) for bscan in these]) for these in (voxels, oedema["bscans"][::2]))
        scale = voxels.shape[1] / amd.shape[1]
        found = finder.find(Volume(amd, (0.45, scale * ROW_UM / 1000, scale * 0.011182)))
        rows = onto_edges(amd, found.rows, (0.45, scale * ROW_UM / 1000, scale * 0.011182))
        cells = []
        for surface, truth in drawn.items():
            at = (np.arange(truth.shape[1]) + 0.5) / scale - 0.5
            own = [np.interp(at, np.arange(amd.shape[2]), each) for each in rows[SURFACES.index(surface)]]
            off = ((np.array(own) + 0.5) * scale - 0.5 - truth) * ROW_UM
            cells.append(f"{np.nanmean(np.abs(off)):8.1f} ({np.nanmean(off):+.1f})")
        lesions = finder.find(Volume(dme, (0.24, scale * 0.00387, scale * 0.0115))).lesions
        fluid_here = np.stack([resized(np.isin(each, (1, 2)), shape[1:]) for each in lesions])
        cells += [f"{dice(fluid_here, grader):12.2f} {fluid_here.sum() / grader.sum():10.2f}"]
        every = np.stack([altered(bscan) for bscan in oedema["bscans"]])
        spacing = (0.12, scale * 0.00387, scale * 0.0115)
        eyes = [Volume(eye, spacing) for eye in np.split(every, 5)]
        single = [Volume(bscan[None], spacing, layout="line") for bscan in every[::3]]
        for settings in (Preprocessing(), Preprocessing(algorithm=3)):
            sure = sum(settings(eye).confident for eye in eyes)
            of_single = sum(settings.of_bscans()(bscan).confident for bscan in single)
            cells += [f"{sure:10} of {len(eyes)}, {of_single:2} of {len(single)}"]
        print(f"{name:24} {'  '.join(cells)}", flush=True)


def resized(bscan: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    method = Image.Resampling.NEAREST if bscan.dtype == bool else Image.Resampling.BOX
    return np.asarray(Image.fromarray(bscan).resize((shape[1], shape[0]), method))


def jpeg(bscan: np.ndarray, quality: int) -> np.ndarray:
    packed = io.BytesIO()
    Image.fromarray(bscan).save(packed, "JPEG", quality=quality)
    return np.asarray(Image.open(packed))


EVERY = slice(None)


def drawn_over(bscan: np.ndarray, level: int, *places: tuple) -> np.ndarray:
    """With this grey level in some rows and A-scans."""
    found = bscan.copy()
    for place in places:
        found[place] = level
    return found


def with_margins(bscan: np.ndarray, level: int) -> np.ndarray:
    """With its white and black margins of this grey level."""
    rows, image = np.arange(len(bscan))[:, None], imaged_rows(bscan[None], 255)
    return bscan if image is None else np.where((rows >= image[0]) & (rows < image[1]), bscan, np.uint8(level))


def clipped(values: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


ALTERED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "as it is": lambda bscan: bscan,
    "JPEG, quality 50": lambda bscan: jpeg(bscan, 50),
    "JPEG, quality 8": lambda bscan: jpeg(bscan, 8),
    "half as many pixels": lambda bscan: resized(bscan, (bscan.shape[0] // 2, bscan.shape[1] // 2)),
    "a third": lambda bscan: resized(bscan, (bscan.shape[0] // 3, bscan.shape[1] // 3)),
    "noise, SD 30": lambda bscan: clipped(bscan + np.random.default_rng(0).normal(0, 30, bscan.shape)),
    "smoothed, SD 2": lambda bscan: clipped(gaussian_filter(bscan.astype(np.float32), 2)),
    "8 levels of grey": lambda bscan: bscan // 32 * 32,
    "a third of the contrast": lambda bscan: clipped(bscan * 0.3 + 80),
    "twice, white clipped": lambda bscan: clipped((bscan - 40.0) * 2),
    "black margins": lambda bscan: with_margins(bscan, 0),
    "grey margins": lambda bscan: with_margins(bscan, 128),
    "gamma .5": lambda bscan: clipped(255 * (bscan / 255) ** 0.5),
    "dark on bright": lambda bscan: 255 - bscan,
    "black bars of 25 rows": lambda bscan: drawn_over(bscan, 0, (slice(25),), (slice(-25, None),)),
    "grey frame of 3 voxels": lambda bscan: drawn_over(
        bscan, 128, (slice(3),), (slice(-3, None),), (EVERY, slice(3)), (EVERY, slice(-3, None))
    ),
    "white scale bars": lambda bscan: drawn_over(
        bscan, 255, (slice(-70, -20), slice(15, 17)), (slice(-22, -20), slice(15, 65))
    ),
    "bright rows": lambda bscan: drawn_over(bscan, 200, (slice(60, 62),), (180,), (300,)),
    "bright A-scans": lambda bscan: drawn_over(bscan, 220, (EVERY, slice(250, 256))),
}
"""How a B-scan may look after export, by name."""


def dice(one: np.ndarray, other: np.ndarray) -> float:
    return float(2 * (one & other).sum() / max(1, one.sum() + other.sum()))


def speed(finder: LayerFinder) -> None:
    """Seconds for 49 B-scans of 496 × 512."""
    volume = Volume(np.random.default_rng(0).integers(0, 255, (49, 496, 512), dtype=np.uint8), (0.12, 0.0039, 0.0115))
    start = time.perf_counter()
    finder.find(volume)
    print(f"49 x 496 x 512: {time.perf_counter() - start:.1f} s")


def overlay(bscan: np.ndarray, found: Layers, d: int) -> np.ndarray:
    """uint8 [H, W, 3]: a B-scan with lines, fluid in blue, drusen and detachments in red."""
    picture = np.repeat(bscan[..., None], 3, axis=2)
    for value, colour in ((1, (0, 0, 255)), (2, (0, 160, 255)), (3, (255, 0, 0)), (4, (255, 160, 0))):
        inside = found.lesions[d] == value
        picture[inside] = picture[inside] // 2 + np.array(colour, np.uint8) // 2
    for name, colour in COLOURS.items():
        row = found.rows[SURFACES.index(name), d]
        columns = np.nonzero(np.isfinite(row))[0]
        picture[np.clip(np.rint(row[columns]).astype(int), 0, len(bscan) - 1), columns] = colour
    return picture


if __name__ == "__main__":
    main()
