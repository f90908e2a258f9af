"""Builds a small run folder, catalog and store from synthetic numbers, in the formats of the real ones, for the
report's tests."""

import json
from pathlib import Path

import numpy as np

from octfm.catalog.catalog import Acquisition, Catalog, Reject
from octfm.store.prepare import prepare
from octfm.tasks.scene import NONE, Overlay, Placement, Scene, save_scenes
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import Volume

SCANNERS = ("heidelberg_spectralis", "topcon_triton")
SIZE, PATCH, SPACING = (16, 96, 96), (4, 8, 8), (0.375, 0.0208, 0.0625)


def write_run(folder: Path, *, probe: bool = True, figures: bool = True, steps: int = 400) -> Path:
    """<folder>/run with run.json, config.yaml, metrics.jsonl and, when asked, probe.json and figures/."""
    run = folder / "run"
    run.mkdir(parents=True)
    (run / "run.json").write_text(json.dumps(_record()))
    (run / "config.yaml").write_text("model:\n  width: 192\n  depth: 6\nsteps: 400\n")
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in _metrics(steps)))
    if probe:
        (run / "probe.json").write_text(json.dumps(probe_result()))
    if figures:
        save_scenes(example_scenes(), run / "figures" / "scenes.npz")
    return run


def write_catalog(folder: Path, *, sentence: str = "the file ends after 1,204 of 9,817 bytes; fetch it again") -> Path:
    return _catalog(sentence).save(folder / "catalog")


def write_store(folder: Path) -> Path:
    """A real store of tiny volumes, made by `prepare`; one cannot be read and ends up quarantined."""
    settings = Preprocessing(image_size=(8, 48, 48), target_spacing=(0.75, 0.0416, 0.125))
    catalog = Catalog("memory", _catalog("").acquisitions[:7], ())
    return prepare(catalog, folder / "prepared", settings, workers=1, progress=False, read=_read).path


def probe_result() -> dict:
    """Numbers in the shape that `octfm probe` writes: one clear win, one inconclusive, one too small for an
    interval."""
    results, comparisons = [], []
    plan = {
        ("disease", "binary", "auroc", "participant", 0.5): (
            (0.91, 0.86, 0.95),
            (0.80, 0.72, 0.87),
            (0.74, 0.65, 0.82),
        ),
        ("disease", "binary", "balanced_accuracy", "participant", 0.5): (
            (0.84, 0.77, 0.9),
            (0.74, 0.66, 0.81),
            (0.69, 0.6, 0.77),
        ),
        ("diagnosis", "multiclass", "auroc", "participant", 0.5): (
            (0.88, 0.83, 0.92),
            (0.85, 0.79, 0.9),
            (0.71, 0.63, 0.78),
        ),
        ("cst_um", "regression", "r2", "eye", 0.0): ((0.62, 0.5, 0.71), (0.41, 0.26, 0.53), (0.2, 0.05, 0.33)),
        ("study_group", "binary", "auroc", "participant", 0.5): (
            (0.52, None, None),
            (0.55, None, None),
            (0.49, None, None),
        ),
        ("scanner", "binary", "auroc", "acquisition", 0.5): ((0.97, 0.94, 0.99), (0.999, 0.99, 1.0), (1.0, 1.0, 1.0)),
    }
    for (target, kind, metric, unit, chance), numbers in plan.items():
        for encoder, (estimate, low, high) in zip(("pretrained", "random_init", "histogram"), numbers, strict=True):
            results.append(
                {
                    "target": target, "column": target, "kind": kind, "metric": metric, "encoder": encoder, "leakage": target == "scanner",
                    "estimate": estimate, "low": low, "high": high, "chance": chance, "design": "recommended_split", "unit": unit,
                    "n_train_participants": 174, "n_test_participants": 126, "n_test_units": 126 if unit == "participant" else 252,
                    "n_test_acquisitions": 277, "unlabelled_acquisitions": 0, "left_out_classes": [], "seen_test_participants": 0,
                    "note": None if low else "No interval: only 6 participants with a in the test, fewer than 10.",
                    "test_participants_per_class": None, "penalty": [0.01],
                }
            )  # fmt: skip
        for other, (estimate, low, _) in zip(("random_init", "histogram"), numbers[1:], strict=True):
            gap, spread = numbers[0][0] - estimate, 0.05
            sure = low is not None
            verdict = "inconclusive" if not sure or abs(gap) < spread else "better" if gap > 0 else "worse"
            comparisons.append(
                {
                    "target": target, "metric": metric, "a": "pretrained", "b": other, "leakage": target == "scanner", "difference": gap,
                    "low": gap - spread if sure else None, "high": gap + spread if sure else None,
                    "p": (0.3 if verdict == "inconclusive" else 0.001) if sure else None, "verdict": verdict, "note": None,
                }
            )  # fmt: skip
    curve = [
        {"target": "disease", "metric": "auroc", "encoder": encoder, "fraction": fraction, "n_train_participants": round(174 * fraction),
         "estimate": 0.6 + gain * fraction**0.5, "low": 0.5 + gain * fraction**0.5, "high": 0.65 + gain * fraction**0.5, "chance": 0.5,
         "seeds": 3}
        for encoder, gain in (("pretrained", 0.3), ("random_init", 0.2))
        for fraction in (0.05, 0.1, 0.25, 0.5, 1.0)
    ]  # fmt: skip
    fewer = [
        {"target": "disease", "metric": "auroc", "a": "pretrained", "b": "random_init", "leakage": False, "difference": gain,
         "low": gain - 0.05, "high": gain + 0.05, "p": p, "p_holm": 2 * p, "verdict": verdict, "note": None, "fraction": fraction,
         "n_train_participants": round(174 * fraction)}
        for fraction, gain, p, verdict in ((0.25, 0.13, 0.001, "better"), (0.5, 0.02, 0.4, "inconclusive"))
    ]  # fmt: skip
    return {
        "format": "octfm-probe",
        "version": 1,
        "label_efficiency": curve,
        "label_efficiency_comparisons": fewer,
        "results": results,
        "comparisons": comparisons,
        "skipped": [{"target": "iop", "sentence": "No acquisition has a label in column iop."}],
        "settings": {
            "design": "recommended_split",
            "folds": None,
            "resamples": 2000,
            "seed": 0,
            "allow_seen": False,
            "level": 0.95,
        },
        "interval_meaning": "Intervals answer: what if other participants had been tested?",
        "commands": ["octfm scan clinic --out catalog", "octfm probe run --labels labels.tsv"],
    }


def _record() -> dict:
    return {
        "format": "octfm-run",
        "version": 1,
        "command": "octfm pretrain demo data.store=prepared --out run",
        "started": "2026-01-01T00:00:00Z",
        "participant_key": "never-shown",
        "git": {"commit": "0" * 40, "dirty": False},
        "parameters": {"encoder": 2_700_000, "target_encoder": 2_700_000, "predictor": 500_000, "total": 5_900_000},
        "environment": {"python": "3.11", "torch": "2.13.0", "device": "cpu"},
        "tokens": {
            "grid": [4, 12, 12],
            "tissue_mean": 0.21,
            "padding_mean": 0.04,
            "budget": 192,
            "context": 96,
            "target": 96,
        },
    }


def _metrics(steps: int) -> list[dict]:
    rng = np.random.default_rng(0)
    rows: list[dict] = []
    for step in range(0, steps, 2):
        share = step / steps
        ratio = 0.45 + 0.55 * np.exp(-5 * share) + 0.015 * rng.normal()
        row = {
            "kind": "train", "step": step, "loss": ratio, "masked_loss": 0.7 * ratio, "masked_over_baseline": ratio,
            "context_loss": 0.5 * ratio, "context_over_baseline": 0.8 * ratio,
            "by_scanner": {name: ratio + 0.03 * i for i, name in enumerate(SCANNERS)}, "lr": 1e-3 * min(1, step / 40) * (1 - share),
            "weight_decay": 0.04 + 0.1 * share, "ema": 0.996 + 0.004 * share, "grad_norm": float(np.exp(0.3 * rng.normal())),
            "effective_rank": 20 + 15 * share + rng.normal(), "feature_std": 0.8 + 0.01 * rng.normal(),
            "teacher_step": 1e-4 * (1 - share) + 1e-6,
            "teacher_distance": 0.02 + 0.02 * share, "volumes_per_s": 40 + rng.normal(), "data_wait_share": 0.03, "peak_memory_gb": 1.2,
            "time": 1.7e9 + step,
        }  # fmt: skip
        rows.append(row)
        if step % 100 == 98:
            ratio = float(row["masked_over_baseline"]) + 0.02
            rows.append(
                {
                    "kind": "validation",
                    "step": step,
                    "masked_over_baseline": ratio,
                    "context_over_baseline": 0.8 * ratio,
                }
            )
            rows.append(
                {
                    "kind": "health",
                    "step": step,
                    "what": "masked loss",
                    "verdict": "ok",
                    "sentence": f"{ratio:.0%} of the baseline",
                }
            )
            rows.append(
                {
                    "kind": "health",
                    "step": step,
                    "what": "effective rank",
                    "verdict": "watch",
                    "sentence": "20 of 192: low",
                }
            )
    return rows


def _catalog(sentence: str) -> Catalog:
    acquisitions = []
    for i in range(40):
        scanner, split = SCANNERS[i % 4 == 0], ("train", "train", "train", "val", "test")[i // 2 % 5]
        where, spacing = ("macula", (8, 64, 48)), (0.75, 0.031, 0.125)
        acquisitions.append(
            Acquisition(
                f"/clinic/{i}.dcm", f"p{i // 2:03d}", "RL"[i % 2], scanner, *where, spacing, "shared", f"1.2.{i}", split
            )
        )
    rejects = [
        Reject(f"/clinic/bad{i}.dcm", code, sentence, 9)
        for i, code in enumerate(["truncated_pixel_data"] * 3 + ["not_oct"])
    ]
    return Catalog("/clinic", tuple(acquisitions), tuple(rejects))


def _read(uri: str) -> Volume:
    number = int(Path(uri).stem)
    if number == 6:
        raise ValueError("this one is broken")
    voxels = np.stack([_bscan(64, 48, number, z / 8) for z in range(8)])
    return Volume(
        voxels,
        (0.75, 0.031, 0.125),
        "RL"[number % 2],
        SCANNERS[number % 4 == 0],
        source=uri,
        acquisition=f"1.2.{number}",
    )


def _bscan(rows: int, columns: int, seed: int, z: float) -> np.ndarray:
    """Layers under a pit, with speckle: enough to look at."""
    rng, thickness = np.random.default_rng((seed, int(z * 100))), 20
    x, y = np.linspace(-1, 1, columns)[None], np.arange(rows)[:, None]
    top = rows * 0.35 + 0.25 * thickness * np.exp(-(x**2 + (2 * z - 1) ** 2) / 0.05)
    bottom = np.broadcast_to(rows * 0.35 + thickness, x.shape)
    depth = (y - top) / (bottom - top)
    bright = np.where(
        (depth >= 0) & (depth < 1), 110 + 60 * np.cos(9 * depth), np.where(depth >= 1, 90 * np.exp(1 - depth), 12)
    )
    return np.clip(bright * rng.gamma(6, 1 / 6, (rows, columns)), 0, 255).astype(np.uint8)


def example_scenes() -> list[Scene]:
    """Two volumes of one scanner, a right and a left eye, and one of another, with every overlay that stands on
    tokens."""
    D, H, W = SIZE
    d, h, w = (n // p for n, p in zip(SIZE, PATCH, strict=True))
    rng = np.random.default_rng(0)
    z, y, x = np.meshgrid(np.linspace(0, 1, d), np.linspace(0, 1, h), np.linspace(0, 1, w), indexing="ij")
    band = np.stack([np.full((D, W), H * 0.35 - 3), np.full((D, W), H * 0.35 + 23)]).astype(np.float32)
    tissue = np.full((d, h, w), NONE, np.uint8)
    tissue[:, 3:8] = 0
    rgba = np.stack([255 * y, 255 * x, 255 * z, np.where(tissue == 0, 255, 0)], axis=-1).astype(np.uint8)
    scalar = np.where(tissue == 0, x, np.nan).astype(np.float32)
    scenes = []
    for i, (scanner, laterality) in enumerate(((SCANNERS[0], "R"), (SCANNERS[0], "L"), (SCANNERS[1], None))):
        mask = rng.integers(0, 3, (d, h, w)).astype(np.uint8)
        mask[mask == 2] = NONE
        overlays = (
            Overlay(
                "band",
                "Tissue band",
                "lines",
                band,
                (("upper", (240, 228, 66)), ("lower", (240, 228, 66))),
                "What counts as tissue.",
            ),
            Overlay("tokens", "Tissue tokens", "classes", tissue, (("tissue", (0, 158, 115)),)),
            Overlay(
                "mask", "One training mask", "classes", mask, (("context", (86, 180, 233)), ("target", (230, 159, 0)))
            ),
            Overlay("pca", "PCA of tokens", "colours", rgba),
            Overlay("occlusion", "Occlusion", "scalar", scalar, unit="of it"),
        )
        voxels = np.stack([_bscan(H, W, i, k / D) for k in range(D)])
        scenes.append(
            Scene(
                f"{scanner}, volume {i}", voxels, SPACING, laterality, laterality == "L", True, True, scanner, overlays,
                Placement.whole(SIZE), rng.integers(-90, 90, (d, h, w, 8)).astype(np.int8), "Similarities of eight directions.",
            )
        )  # fmt: skip
    return scenes
