"""Segmentation of real drusen: expert RPE and BM lines of one Spectralis volume, two-fold over halves of its B-scans.

    python benchmarks/segment_amd.py --run runs/a --data FOLDER

Prints a table; no pixel of the data is written anywhere.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from octfm.config import load
from octfm.encoder.encoder import Encoder, load_encoder
from octfm.tasks.segment import Labelled, Segmenter, Tokens, to_prepared
from octfm.tasks.segment_settings import SegmentConfig
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Volume

NAMES = ("rpe", "bm")
LINES = {"rpe": (255, 170), "bm": (127, 170)}
"""Label values of the expert's lines; 170 marks where both coincide."""


def expert_rows(labels: np.ndarray) -> np.ndarray:
    """Mean row of each line per A-scan, float [2, D, W]; NaN if not drawn."""
    row = np.arange(labels.shape[1])[None, :, None]
    found = []
    for name in NAMES:
        drawn = np.isin(labels, LINES[name])
        count = drawn.sum(1)
        found.append(np.divide((drawn * row).sum(1), count, out=np.full(count.shape, np.nan), where=count > 0))
    return np.stack(found)


def read(folder: Path) -> tuple[Volume, np.ndarray]:
    """Read the volume and the expert's surface rows."""
    facts = json.loads((folder / "medvisbonn_amd_spectralis_145.json").read_text())
    with np.load(folder / "medvisbonn_amd_spectralis_145.npz") as file:
        return Volume(file["volume"], tuple(facts["spacing_mm_zyx"]), scanner="heidelberg_spectralis"), expert_rows(
            file["labels"]
        )


Halves = list[list[float]]
"""Errors of RPE and BM in µm: trained on the first half and tested on the second, and the reverse."""


def by_halves(
    sources: dict[str, tuple[Encoder, Tokens]], folder: Path, steps: int, decoder: str = "linear"
) -> dict[str, Halves]:
    """Errors of every source of tokens; all encoders must share one preprocessing."""
    volume, truth = read(folder)
    _, dy, _ = volume.spacing_mm
    prepared = next(iter(sources.values()))[0].preprocessing(volume)
    transform = prepared.transform
    depth = volume.shape[0]
    # A prepared B-scan averages native ones, so B-scans within one prepared spacing of the border are in neither half.
    gap = int(np.ceil(transform.scale[0]))
    inner = {"first": np.arange(depth) < depth // 2 - gap, "second": np.arange(depth) >= depth // 2 + gap}
    config = load(SegmentConfig, {"surfaces": list(NAMES), "steps": steps, "batch_size": 1, "decoder": decoder})

    def score(rows: np.ndarray, test: str) -> list[float]:
        errors = np.abs(rows - truth)[:, inner[test]]
        return [float(np.nanmean(e) * dy * 1000) for e in errors]

    table: dict[str, Halves] = {}
    for train, test in (("first", "second"), ("second", "first")):
        known = np.where(inner[train][None, :, None], truth, np.nan)
        target = to_prepared({"rows": known, "mask": None}, transform)
        for name, (encoder, tokens) in sources.items():
            segmenter = Segmenter(config, encoder, tokens)
            segmenter.train(lambda _: prepared.voxels, [target])
            rows, _ = segmenter.predict(prepared.voxels)
            native = np.stack([transform.rows_to_native(r) for r in rows])
            table.setdefault(name, []).append(score(native, test))
        mean = np.nanmean(np.where(np.isfinite(target.rows), target.rows, np.nan), axis=(1, 2))
        flat = Labelled(np.broadcast_to(mean[:, None, None], target.rows.shape).astype(np.float32), None)
        table.setdefault("mean_height", []).append(
            score(np.stack([transform.rows_to_native(r) for r in flat.rows]), test)
        )
        bm = find_tissue(volume.voxels, volume.spacing_mm).bm
        table.setdefault("no labels (tissue band's BM)", []).append([float("nan"), score(np.stack([bm] * 2), test)[1]])
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--decoder", default="linear")
    chosen = parser.parse_args()
    encoder = load_encoder(chosen.run)
    sources: dict[str, tuple[Encoder, Tokens]] = {
        "pretrained": (encoder, "encoder"),
        "random_init": (load_encoder(chosen.run, random_init=True), "encoder"),
        "voxels": (encoder, "voxels"),
    }
    table = by_halves(sources, chosen.data, chosen.steps, chosen.decoder)
    print(f"{'mean absolute error, µm':<30} {'RPE 1→2':>9} {'RPE 2→1':>9} {'BM 1→2':>9} {'BM 2→1':>9}")
    for name, ((rpe_a, bm_a), (rpe_b, bm_b)) in table.items():
        print(f"{name:<30} {rpe_a:9.2f} {rpe_b:9.2f} {bm_a:9.2f} {bm_b:9.2f}")


if __name__ == "__main__":
    main()
