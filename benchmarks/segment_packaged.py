"""What the packaged network of `octfm segment` finds on real development scans, beside the experts' lines and masks.

python benchmarks/segment_packaged.py --data FOLDER              # FOLDER of real scans, as OCTFM_REAL_DATA
python benchmarks/segment_packaged.py --data FOLDER --picture out.png
"""

import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from octfm.layers.finder import LayerFinder, Layers
from octfm.layers.packaged import CURRENT, load_finder
from octfm.models.layer_net import SURFACES
from octfm.volume.volume import Volume

ROW_UM = 3.872
COLOURS = {"ilm": (255, 60, 60), "ez": (0, 255, 255), "rpe_peak": (0, 255, 0), "bm": (255, 0, 200)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", default=CURRENT)
    parser.add_argument("--every", type=int, default=1, help="of the AMD volume's B-scans")
    parser.add_argument("--picture")
    arguments = parser.parse_args()
    finder = load_finder(arguments.model)
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
    found = finder.find(Volume(voxels, (0.030 * every, ROW_UM / 1000, 0.011182)))
    rows = np.arange(labels.shape[1])[None, :, None]
    for name, drawn in (("rpe_inner", 255), ("rpe_peak", 255), ("bm", 127)):
        hit = (labels == drawn) | (labels == 170)
        count = hit.sum(axis=1)
        truth = np.where(count > 0, (hit * rows).sum(axis=1) / np.maximum(count, 1), np.nan)
        off = (found.rows[SURFACES.index(name)] - truth) * ROW_UM
        print(
            f"AMD volume {name:10} {np.nanmean(np.abs(off)):5.2f} µm, bias {np.nanmean(off):+5.2f}, "
            f"{100 * np.nanmean(np.abs(off) > 20):.1f} % beyond 20 µm, {100 * np.isnan(off).mean():.1f} % missing"
        )
    return [overlay(voxels[d], found, d) for d in (0, len(voxels) // 2)]


def fluid(finder: LayerFinder, data: Path) -> list[np.ndarray]:
    """55 B-scans of five eyes with diabetic macular oedema: Dice of fluid with each of two graders."""
    file = np.load(data / "chiu2015_dme_subjects1to5.npz")
    voxels, shape = file["bscans"], tuple(file["shape"])
    graders = [np.unpackbits(file[f"fluid_grader{i}"])[: np.prod(shape)].reshape(shape).astype(bool) for i in (1, 2)]
    found = finder.find(Volume(voxels, (0.12, 0.00387, 0.0115)))
    ours = np.isin(found.lesions, (1, 2))
    for eye in range(5):
        part = slice(11 * eye, 11 * eye + 11)
        between = dice(graders[0][part], graders[1][part])
        print(
            f"DME eye {eye + 1}: graders {between:.2f}, ours {dice(ours[part], graders[0][part]):.2f} and "
            f"{dice(ours[part], graders[1][part]):.2f}; area over theirs "
            f"{ours[part].sum() / max(1, graders[0][part].sum()):.2f}, {ours[part].sum() / graders[1][part].sum():.2f}"
        )
    print(f"DME pooled: {dice(ours, graders[0]):.2f} and {dice(ours, graders[1]):.2f}")
    return [overlay(voxels[d], found, d) for d in (5, 49)]


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
