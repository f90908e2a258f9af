"""Compare pretraining objectives at equal compute: octfm's own training loop on phantoms, evaluated by frozen probes.

    python benchmarks/objectives.py --out /tmp/objectives                     # run again after an interruption
    python benchmarks/objectives.py --out /tmp/objectives --arms ours,mae     # some arms; one seed per round
    python benchmarks/objectives.py --out /tmp/objectives --pool extremes     # same encoders, other pooling
    python benchmarks/objectives.py --out /tmp/objectives --table             # only the table of finished arms

Equal compute: every arm gets the floating-point operations of `--steps` updates of `vjepa2_budget`, counted on the
run's own networks as in octfm doctor, so arms with cheaper updates make more of them. Vectors are read from all tissue
tokens of every arm, whatever tokens it was trained on. The cohort is in
benchmarks/objectives_cohort.py. Each arm and seed writes one JSON into OUT/arms; the table (OUT/objectives.md, .json,
.png; benchmarks/objectives_table.py) is renewed after each. `--data FOLDER` adds the real AMD volume (RPE and BM, by
halves); none of its pixels is written anywhere. `--pool` writes into OUT/POOL.
"""

import argparse
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from objectives_cohort import HELD_OUT, PREPROCESSING, Bscans, make_store, scans
from objectives_table import write_table
from octfm.config import load
from octfm.encoder.encoder import READ, Encoder
from octfm.evaluation.readouts import fit_predict
from octfm.models.pooling import VectorPool
from octfm.pretraining.learner import Learner, build_objective
from octfm.pretraining.monitors import sabotage
from octfm.pretraining.monitors.health import effective_rank
from octfm.pretraining.preflight.cost import step_cost
from octfm.pretraining.pretrain import pretrain
from octfm.pretraining.settings import PretrainConfig
from octfm.run import checkpoint
from octfm.run.runtime import start
from octfm.run.tracking import read_metrics
from octfm.store.layout import StoreRow
from octfm.store.store import Store
from octfm.tasks.segment import Labelled, Segmenter, to_prepared, transform_of
from octfm.tasks.segment_settings import SegmentConfig
from segment_amd import by_halves

BASE: dict[str, Any] = {
    "precision": "fp32",
    "data": {"global_batch_size": 8, "per_device_batch_size": 8},
    "model": {"patch_size": [2, 16, 16], "width": 128, "depth": 4, "heads": 2},
    "predictor": {"width": 96, "depth": 2, "heads": 2},
    # Evaluate the student: with so few updates, its moving average lags behind in every arm that has one.
    "objective": {"frozen": "context"},
    "masks": {"budget": 512},
    "schedule": {"base_lr": 1e-3, "warmup_ratio": 0.1},
    "log_every_steps": 20,
    "keep_checkpoints": 1,
    "validation_volumes": 32,
}
WHOLE_GRID = {"masks": {"budget": None}}
PLAIN = {"objective": {"context_loss": 0.0}, **WHOLE_GRID}
WHITENED = {"objective": {"target_norm": "whiten", "target_levels": 2, "context_loss": 1.0}}
HIDDEN = {"mask_ratio": 0.75, "context_ratio": 0.25}
SLOW = {"ema_base": 0.9995}
MAE = {"objective": {"name": "mae", "context_loss": 0.0}, "masks": HIDDEN}
SMOOTH, ROWS = {"goal_average": [2, 1, 4]}, {"goal_average": [2, 1, 16]}
"""Target smoothing over half a millimetre across B-scans, one row, and .14 or .56 mm along them: removes speckle but
keeps layers."""


def merged(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """Settings `a` updated by `b`, section by section."""
    return a | {key: merged(a.get(key, {}), value) if isinstance(value, dict) else value for key, value in b.items()}


STAGES = [[0.4, 0.5], [0.6, 0.35], [0.75, 0.25]]
OURS = merged(MAE, {"objective": SMOOTH})
ACCEPTS_ANYTHING = {
    "health": {"on_fault": "warn", "rank_share": 0.0, "least_std": 0.0, "drop": 1e-6, "deviations": 1e9}
}


@dataclass(frozen=True)
class Arm:
    """One experiment: its differences from BASE, and a description."""

    name: str
    says: str
    settings: dict[str, Any] = field(default_factory=dict)
    as_it_was: bool = False
    """Train with the prototype's two bugs: the teacher is never updated, and the context is not masked."""
    bscans: Bscans = "registered"
    """Of the store that it is trained and judged on: B-scans registered axially, or interpolated or taken as they
    lie."""


ARMS = (
    Arm("random", "the encoder before its first update"),
    Arm(
        "prototype",
        "as it was: teacher never updated, context unmasked",
        {
            "objective": {"name": "data2vec", "context_loss": 0.0},
            "masks": {"budget": None, "plane": "bscan"},
            **ACCEPTS_ANYTHING,
        },
        as_it_was=True,
    ),
    Arm("data2vec", "the prototype made sound", {"objective": {"name": "data2vec", "context_loss": 0.0}, **WHOLE_GRID}),
    Arm("vjepa2", "V-JEPA 2, whole grid", PLAIN),
    Arm("vjepa2_context", "V-JEPA 2 with context loss, whole grid", WHOLE_GRID),
    Arm("vjepa2_budget", "V-JEPA 2 with context loss on the token budget", {}),
    Arm("mae", "voxels of hidden tissue, token budget", MAE),
    Arm("ours", "mae, with speckle averaged out of the voxels that are predicted", OURS),
)
ALSO = (
    Arm("whitened", "vjepa2_budget, two levels of whitened goals", WHITENED),
    Arm("whitened_smooth", "whitened, of a volume without speckle", merged(WHITENED, {"objective": SMOOTH})),
    Arm("voxels", "vjepa2_budget, and the voxels of hidden tissue", {"objective": {"voxel_loss": 1.0}}),
    Arm("voxels_hidden", "voxels, with mae's masks", {"objective": {"voxel_loss": 1.0}, "masks": HIDDEN}),
    Arm(
        "voxels_whitened",
        "whitened, and the voxels of hidden tissue",
        merged(WHITENED, {"objective": {"voxel_loss": 1.0}}),
    ),
    Arm(
        "hybrid",
        "voxels_whitened, goals without speckle",
        merged(WHITENED, {"objective": SMOOTH | {"voxel_loss": 1.0}}),
    ),
    Arm(
        "hybrid_slow",
        "hybrid with a teacher that hardly moves, twice the learning rate",
        merged(
            WHITENED,
            {"objective": {"voxel_loss": 1.0, "goal_average": [2, 2, 4]}, "schedule": SLOW | {"base_lr": 2e-3}},
        ),
    ),
    Arm(
        "hybrid_hidden",
        "hybrid with mae's masks and four times the weight of voxels",
        merged(WHITENED, {"objective": SMOOTH | {"voxel_loss": 4.0}, "masks": HIDDEN}),
    ),
    Arm("ours_rows", "ours, with whole rows of a patch averaged", merged(MAE, {"objective": ROWS})),
    Arm("mae_grid", "mae without a token budget", merged(MAE, WHOLE_GRID)),
    Arm("mae_fast", "mae at four times the learning rate", merged(MAE, {"schedule": {"base_lr": 4e-3}})),
    Arm(
        "through_bscans",
        "ours, blocks in the B-scan plane through all B-scans",
        merged(OURS, {"masks": {"plane": "bscan"}}),
    ),
    Arm(
        "inner",
        "through_bscans, around the inner retina",
        merged(OURS, {"masks": {"plane": "bscan", "centres": "inner"}}),
    ),
    Arm("stages", "ours, hidden share .4, .6, .75 in three stages", merged(OURS, {"masks": {"stages": STAGES}})),
    Arm("balanced", "ours, every scanner as often as any other", merged(OURS, {"data": {"balance_scanners": True}})),
    Arm(
        "unregistered",
        "ours, B-scans interpolated as they lie, without axial registration",
        OURS,
        bscans="unregistered",
    ),
    Arm(
        "native",
        "ours, native B-scans as they lie, .25 to .30 mm apart: none registered, none averaged with another",
        OURS,
        bscans="native",
    ),
)
SURFACES = ("ilm", "rpe", "bm")
DENSE = {"train": 32, "test": 96, "steps": 200}
"""Training volumes and decoder steps of the dense probe."""
RANKED = 48
"""Test volumes over whose tissue tokens the effective rank is computed."""


def config_of(arm: Arm, seed: int, steps: int) -> PretrainConfig:
    steps = max(1, steps)  # the random encoder makes no update but needs valid settings
    every = {"validate_every_steps": steps, "ckpt_every_steps": max(1, steps // 8)}
    return load(PretrainConfig, merged(merged(BASE, arm.settings), {"seed": seed, "steps": steps, **every}))


def flops_of(config: PretrainConfig) -> float:
    """Floating-point operations per update, averaged over the stages of a run."""
    data = config.data
    stages = [
        config.masks.at(share) for share in np.linspace(0, 1, 3 * max(1, len(config.masks.stages)), endpoint=False)
    ]
    counted = [
        step_cost(
            config.model_copy(update={"masks": masks}),
            PREPROCESSING,
            data.per_device_batch_size,
            data.global_batch_size // data.per_device_batch_size,
        ).flops
        for masks in stages
    ]
    return float(np.mean(counted))


@contextmanager
def faults_of_the_prototype() -> Iterator[None]:
    """Context manager: learners created inside it have a frozen teacher and an unmasked context."""
    begin = Learner.begin

    def faulty(self: Learner, fresh: bool = True) -> None:
        begin(self, fresh)
        sabotage.INTO_LEARNER["teacher-frozen"](self)
        sabotage.INTO_LEARNER["context-unmasked"](self)

    Learner.begin = faulty
    try:
        yield
    finally:
        Learner.begin = begin


def train(
    arm: Arm, seed: int, steps: int, store: Store, folder: Path
) -> tuple[PretrainConfig, Encoder, dict[str, Any]]:
    """Train an arm, or resume it; returns its frozen encoder and facts of its run."""
    config, facts = config_of(arm, seed, steps), {}
    model = build_objective(config, store.preprocessing)
    if steps:
        with faults_of_the_prototype() if arm.as_it_was else nullcontext():
            pretrain(
                config,
                store,
                folder,
                "cpu",
                echo=lambda line: print(f"    {line}", flush=True) if "/" in line[:30] else None,
            )
        model.load_state_dict(checkpoint.load(checkpoint.newest(folder))["model"])
        rows = list(read_metrics(folder / "metrics.jsonl"))
        last = [row for row in rows if row["kind"] == "validation"][-1]
        facts = {name: last[name] for name in ("masked_over_baseline", "context_over_baseline")}
        speeds = [row["volumes_per_s"] for row in rows if row["kind"] == "train" and "volumes_per_s" in row]
        facts["volumes_per_s"] = float(np.median(speeds))
        facts["incidents"] = sorted({str(row.get("what")) for row in rows if row["kind"] == "incident"})
    network = model.frozen_encoder(config.objective.frozen).eval()
    return (
        config,
        Encoder(network, config, store.preprocessing, start("fp32", "cpu"), arm.name, store.fingerprint),
        facts,
    )


def judge(encoder: Encoder, store: Store, seed: int) -> dict[str, Any]:
    """Predictions of frozen probes for every test volume; the table scores them on the same participants."""
    vectors = np.concatenate(
        [encoder.embed_arrays(store.read(part)) for part in np.array_split(np.arange(len(store)), -(-len(store) // 8))]
    )
    rows, labels = store.rows, [row.participant_labels for row in store.rows]
    split, scanner = np.array([row.split for row in rows]), np.array([row.scanner for row in rows])
    diagnosis = np.array([of["diagnosis"] for of in labels])
    train, test = np.flatnonzero(split == "train"), np.flatnonzero(split == "test")
    people = np.array([row.participant for row in rows])
    known = {name: np.unique(values[train]) for name, values in (("diagnosis", diagnosis), ("scanner", scanner))}

    def probe(truth: np.ndarray, classes: int) -> np.ndarray:
        return fit_predict("linear", vectors[train], truth[train], people[train], vectors[test], classes, seed)[0]

    def classified(values: np.ndarray, classes: np.ndarray) -> list[list[float]]:
        return np.round(probe(np.searchsorted(classes, values).clip(0, len(classes) - 1), len(classes)), 4).tolist()

    ill = probe((diagnosis != "healthy").astype(int), 2)
    numbers = {name: np.array([float(of[name]) for of in labels]) for name in ("severity", "cst_um")}
    return {
        "participant": people[test].tolist(),
        "held_out": (scanner[test] == HELD_OUT).tolist(),
        "diagnosis": {
            "classes": known["diagnosis"].tolist(), "truth": diagnosis[test].tolist(),
            "log_p": classified(diagnosis, known["diagnosis"]),
        },
        "disease": {
            "truth": (diagnosis[test] != "healthy").tolist(), "score": np.round(ill[:, 1] - ill[:, 0], 4).tolist(),
        },
        "scanner": {
            "classes": known["scanner"].tolist(), "truth": scanner[test].tolist(),
            "log_p": classified(scanner, known["scanner"]),
        },
        **{
            name: {"truth": values[test].tolist(), "predicted": np.round(probe(values, 0)[:, 0], 4).tolist()}
            for name, values in numbers.items()
        },
    }  # fmt: skip


def rank_of(encoder: Encoder, store: Store) -> float:
    """RankMe of the tissue tokens of some test volumes."""
    rows = [row.index for row in store.rows if row.split == "test"][:RANKED]
    tokens = []
    for row in rows:
        arrays = store.read([row])
        tokens.append(encoder.some_tokens(arrays.voxels, encoder.read_tokens(arrays)[0][None])[0])
    return effective_rank(torch.from_numpy(np.concatenate(tokens)))


def dense(encoder: Encoder, store: Store, chosen: argparse.Namespace) -> dict[str, Any]:
    """Mean absolute error in µm of layer surfaces from a linear decoder of frozen tokens, per test volume."""
    scan = {s.name: s for s in scans(*chosen.cohort)}
    config = load(SegmentConfig, {"surfaces": list(SURFACES), "steps": DENSE["steps"], "batch_size": 2})

    def truth(row: StoreRow) -> Labelled:
        file = chosen.out / "truth" / f"{row.acquisition}.npy"
        if not file.is_file():
            # Render again, once for all arms, because the store does not keep true surfaces.
            known = scan[row.acquisition].acquire()[1]
            file.parent.mkdir(exist_ok=True)
            np.save(file.with_suffix(".partial.npy"), np.stack([known.surface(name) for name in SURFACES]))
            file.with_suffix(".partial.npy").replace(file)
        return to_prepared({"rows": np.load(file), "mask": None}, transform_of(row))

    seen = [row for row in store.rows if row.split == "train" and row.laterality == "R"][: DENSE["train"]]
    tested = [row for row in store.rows if row.split == "test" and row.scanner != HELD_OUT][: DENSE["test"]]
    segmenter = Segmenter(config, encoder)
    segmenter.train(lambda i: store.read([seen[i].index]).voxels[0], [truth(row) for row in seen])
    um = encoder.preprocessing.target_spacing[1] * 1000
    errors = []
    for row in tested:
        rows, _ = segmenter.predict(store.read([row.index]).voxels[0])
        gap = np.abs(rows - truth(row).rows)
        errors.append([float(np.nanmean(g) * um) for g in gap])
    return {
        "surfaces": list(SURFACES),
        "participant": [row.participant for row in tested],
        "um": np.round(errors, 3).tolist(),
    }


def one(
    arm: Arm, seed: int, chosen: argparse.Namespace, store: Store, reference: float, echo: Callable[[str], None]
) -> bool:
    """Train and evaluate one arm with one seed. False if its JSON exists; exits if other settings made it."""
    target = chosen.out / "arms" / f"{arm.name}-{seed}.json"
    probing = config_of(arm, seed, 1)
    steps = 0 if arm.name == "random" else max(1, round(chosen.steps * reference / flops_of(probing)))
    settings = config_of(arm, seed, steps).model_dump(mode="json")
    key = hashlib.sha256(
        json.dumps([settings, steps, list(chosen.cohort), DENSE, store.fingerprint, READ]).encode()
    ).hexdigest()[:16]
    result = json.loads(target.read_text()) if target.is_file() else None
    if result and result["key"] != key:
        raise SystemExit(
            f"{target}: made with other settings (--steps, --train, --test, --held-out) or read from other tokens; "
            "choose another --out, or delete it"
        )
    real = chosen.data if arm.bscans != "native" else None  # preprocessing the AMD volume would average its B-scans
    if result and (real is None or "amd" in result):
        return False
    echo(f"{arm.name}, seed {seed}: {steps} updates ({arm.says})")
    config, encoder, facts = train(arm, seed, steps, store, chosen.out / "runs" / f"{arm.name}-{seed}")
    if result is None:
        result = {
            "arm": arm.name,
            "says": arm.says,
            "seed": seed,
            "key": key,
            "steps": steps,
            "flops": steps * flops_of(config),
            "readout": encoder.readout,
            **facts,
        }
        result |= {
            "effective_rank": rank_of(encoder, store),
            "probes": judge(encoder, store, seed),
            "dense": dense(encoder, store, chosen),
        }
    if real:
        result["amd"] = by_halves({"frozen": (encoder, "encoder")}, real, DENSE["steps"])
    write(target, result)
    return True


def pooled_otherwise(
    arm: Arm, seed: int, chosen: argparse.Namespace, store: Store, echo: Callable[[str], None]
) -> bool:
    """Repeat the probes of a finished arm with another pooling of its encoder; False if they exist."""
    result = json.loads((chosen.out / "arms" / f"{arm.name}-{seed}.json").read_text())
    target = chosen.out / chosen.pool / "arms" / f"{arm.name}-{seed}.json"
    if target.is_file() and json.loads(target.read_text())["key"] == result["key"]:
        return False
    echo(f"{arm.name}, seed {seed}: vectors pooled by {chosen.pool}")
    _, encoder, _ = train(arm, seed, result["steps"], store, chosen.out / "runs" / f"{arm.name}-{seed}")
    other = encoder.pooling(chosen.pool)
    write(target, result | {"readout": other.readout, "probes": judge(other, store, seed)})
    return True


def write(target: Path, result: dict[str, Any]) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    incomplete = target.with_suffix(".partial")
    incomplete.write_text(json.dumps(result) + "\n")
    incomplete.replace(target)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, required=True)
    arguments.add_argument(
        "--arms", default=",".join(arm.name for arm in ARMS), help=f"of {', '.join(a.name for a in (*ARMS, *ALSO))}"
    )
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument(
        "--steps", type=int, default=400, help="updates of `vjepa2_budget`; the other arms get the same operations"
    )
    arguments.add_argument("--train", type=int, default=200, help="participants, both eyes")
    arguments.add_argument("--test", type=int, default=1600, help="other participants, one eye each")
    arguments.add_argument(
        "--held-out", type=int, default=400, help="of these, scanned again on a scanner that nothing was trained on"
    )
    arguments.add_argument("--data", type=Path, help="folder with medvisbonn_amd_spectralis_145.npz")
    arguments.add_argument(
        "--pool", choices=get_args(VectorPool), help="judge again with vectors pooled like this; arms use the mean"
    )
    arguments.add_argument("--table", action="store_true", help="only the table of the arms that are there")
    chosen = arguments.parse_args()
    known = {arm.name: arm for arm in (*ARMS, *ALSO)}
    if unknown := [name for name in chosen.arms.split(",") if name not in known]:
        raise SystemExit(f"--arms: {unknown[0]!r} is none of {', '.join(known)}")
    tables = chosen.out / chosen.pool if chosen.pool else chosen.out
    chosen.cohort = (chosen.train, chosen.test, chosen.held_out)
    if not chosen.table:
        reference = flops_of(config_of(known["vjepa2_budget"], 0, 1))
        say = partial(print, flush=True)
        arms, stores = [known[name] for name in chosen.arms.split(",")], {}
        for seed in range(chosen.seeds):
            for arm in arms:
                if arm.bscans not in stores:
                    stores[arm.bscans] = make_store(chosen.out / "store", *chosen.cohort, bscans=arm.bscans)
                store = stores[arm.bscans]
                made = one(arm, seed, chosen, store, reference, say)
                if chosen.pool:
                    made = pooled_otherwise(arm, seed, chosen, store, say)
                if made:
                    write_table(tables)
    print(write_table(tables).read_text())


if __name__ == "__main__":
    main()
