"""Everything that can be known to be wrong before step 0: each check says what was measured and what to do."""

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from octfm.data.loader import accumulation, select
from octfm.data.store import Store
from octfm.errors import ConfigError
from octfm.masks import BACKGROUND, PADDING, TISSUE, sample_masks, token_grid, token_map
from octfm.models.objective import TokenIndex
from octfm.models.vit3d import count_parameters, take_patches
from octfm.training.inputs import build_objective, generators
from octfm.training.runtime import Runtime, start
from octfm.training.schedule import Schedule
from octfm.training.settings import PretrainConfig

SAMPLE = 32
"""Volumes that are read to count tokens."""


@dataclass(frozen=True)
class Check:
    """One row of the table."""

    name: str
    status: Literal["PASS", "WARN", "FAIL"]
    measured: str
    advice: str = ""


def checks(
    config: PretrainConfig, store: Store, runtime: Runtime, train_rows: np.ndarray, validation_rows: np.ndarray, out: Path
) -> list[Check]:
    """All checks, in seconds. Wrong settings are found first, so that a later check never fails for an earlier reason."""
    grid = patches_tile(config, store)
    if grid.status == "FAIL":
        return [grid]
    found = [
        grid,
        arithmetic(config, runtime, len(train_rows)),
        *learning_rate(Schedule(config.schedule, config.steps)),
        teacher(Schedule(config.schedule, config.steps)),
        prepared(store),
        splits(store, train_rows, validation_rows),
        destination(out),
        disk(config, store, out),
    ]
    found += tokens(config, store, train_rows)
    if not any(check.status == "FAIL" for check in found):
        found += objective_integrity(config, store, train_rows)
    return found


def examine(config: PretrainConfig, out: Path, device: str | None = None) -> list[Check]:
    """All checks of a config whose store is named in `data.store`, for `octfm doctor`."""
    if config.data.store is None:
        raise ConfigError("data.store is not set; name the prepared store, for example data.store=prepared/")
    store = Store.open(config.data.store)
    train_rows, validation_rows = training_rows(config, store)
    return checks(config, store, start(config.precision, device), train_rows, validation_rows, out)


def training_rows(config: PretrainConfig, store: Store) -> tuple[np.ndarray, np.ndarray]:
    """Store rows to train on and to validate on; the latter may be none."""
    train = select(store, "train", config.data.scanners, config.data.max_samples)
    held_out = any(row.split == "val" and (not config.data.scanners or row.scanner in config.data.scanners) for row in store.rows)
    validation = select(store, "val", config.data.scanners, config.validation_volumes) if held_out else np.array([], np.int64)
    return train, validation


def require(found: list[Check], echo: Callable[[str], None]) -> None:
    """Say what is not right, and stop before step 0 when anything failed."""
    for check in found:
        if check.status != "PASS":
            echo(f"preflight {check.status}: {check.name}: {check.measured}; {check.advice}")
    failed = [check for check in found if check.status == "FAIL"]
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more; octfm doctor lists them)" if len(failed) > 1 else ""
        raise ConfigError(f"preflight stopped the run before step 0: {first.name}: {first.measured}; {first.advice}{more}")
    told = next((c.measured for c in found if c.name == "disk"), "")
    echo(f"preflight: {len(found)} checks, {sum(c.status == 'PASS' for c in found)} passed; {told}")


def patches_tile(config: PretrainConfig, store: Store) -> Check:
    """Volumes divide into whole patches."""
    size, patch = store.preprocessing.image_size, config.model.patch_size
    try:
        return Check("token grid", "PASS", "{} x {} x {} tokens".format(*token_grid(size, patch)))
    except ValueError as error:
        return Check("token grid", "FAIL", str(error).partition(";")[0], "choose a model.patch_size that divides the store's volumes")


def arithmetic(config: PretrainConfig, runtime: Runtime, volumes: int) -> Check:
    """Global batch = per-device batch x ranks x accumulation (F7)."""
    data = config.data
    parts = accumulation(data.global_batch_size, data.per_device_batch_size, runtime.world)
    product = f"{data.per_device_batch_size} x {runtime.world} ranks x {parts} accumulation"
    measured = f"global batch {data.global_batch_size} = {product}; {volumes} volumes"
    if volumes == 0:
        return Check(
            "batch arithmetic", "FAIL", "no training volume is left after selection", "check data.scanners, data.max_samples and the splits"
        )
    epochs = config.steps * data.global_batch_size / volumes
    return Check("batch arithmetic", "PASS", f"{measured}, {epochs:.1f} epochs")


def learning_rate(schedule: Schedule) -> list[Check]:
    """One warm-up, one decay (or a declared constant), no restart, never 0 (F1, F2); evaluated at every step."""
    curve = np.array([schedule.lr(step) for step in range(schedule.steps)])
    peak = schedule.config.base_lr
    measured = f"{curve[0]:.2e} at step 0, peak {curve.max():.2e} at step {curve.argmax()}, {curve[-1]:.2e} at the end"
    found = []
    if not (curve > 0).all():
        found.append(
            Check("learning rate", "FAIL", f"0 at step {int(np.argmin(curve > 0))}", "a step with learning rate 0 trains nothing (F2)")
        )
    rises = np.flatnonzero(np.diff(curve) > 1e-12 * peak) + 1
    late = rises[rises > schedule.warmup_steps]
    if late.size:
        again = f"rises again at step {late[0]}, after the warm-up of {schedule.warmup_steps} steps"
        found.append(Check("learning rate", "FAIL", again, "a restart diverges (F1)"))
    return found or [Check("learning rate", "PASS", f"one warm-up, then {schedule.config.lr_shape}: {measured}")]


def teacher(schedule: Schedule) -> Check:
    """No more than 5 % of the initial teacher may be left after a quarter of the run."""
    quarter = max(1, schedule.steps // 4)
    left = float(np.exp(np.sum(np.log(np.maximum(1e-12, [schedule.ema(step) for step in range(quarter)])))))
    measured = f"{left:.1%} of the initial teacher is left after {quarter} steps (momentum from {schedule.ema_base:.5f})"
    # A derived momentum leaves 5 % by construction, a little more because the momentum rises; 10 % tells a wrong one from it.
    if left <= 0.10:
        return Check("teacher momentum", "PASS", measured)
    status = "FAIL" if schedule.steps >= 3000 else "WARN"
    return Check("teacher momentum", status, measured, "lower schedule.ema_base, or set it to null to derive it from the run length (F11)")


def prepared(store: Store) -> Check:
    """Volumes as this version prepares them, and bytes as they were written, on a sample."""
    if store.fingerprint != store.preprocessing.fingerprint():
        return Check("store", "FAIL", f"{store.path} was prepared by another version of octfm", "prepare into a new folder (F15)")
    return Check("store", "PASS", f"{len(store)} volumes, {store.verify(sample=min(8, len(store)))} checksums verified")


def splits(store: Store, train_rows: np.ndarray, validation_rows: np.ndarray) -> Check:
    """No participant in two splits (F16), and somebody to validate on (F12)."""
    train, validation = ({store.rows[row].participant for row in rows} for rows in (train_rows, validation_rows))
    if shared := train & validation:
        return Check("splits", "FAIL", f"{len(shared)} participants are in training and validation", "split by participant (F16)")
    measured = f"{len(train)} participants to train on, {len(validation)} to validate on"
    if not validation:
        return Check("splits", "WARN", measured, "without validation participants there is no validation loss; scan with a val split")
    return Check("splits", "PASS", measured)


def destination(out: Path) -> Check:
    """The run folder can be written, read back and cleaned (F6)."""
    parent = next(p for p in (out, *out.parents) if p.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".octfm-probe-") as probe:
            probe.write(b"octfm")
            probe.flush()
            if Path(probe.name).read_bytes() != b"octfm":
                return Check("destination", "FAIL", f"{parent} returns other bytes than were written", "choose another --out (F6)")
    except OSError as error:
        return Check("destination", "FAIL", f"{parent} cannot be written: {error.strerror}", "choose another --out (F6)")
    return Check("destination", "PASS", f"{out} was write-tested")


def disk(config: PretrainConfig, store: Store, out: Path) -> Check:
    """Room for the checkpoints that the retention policy keeps, and one more while it is written."""
    with torch.device("meta"):
        model = build_objective(config, store.preprocessing)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = 4 * (count_parameters(model) + 2 * trained)
    needed = size * (config.keep_checkpoints + 1) / 1e9
    free = shutil.disk_usage(next(p for p in (out, *out.parents) if p.exists())).free / 1e9
    measured = f"{count_parameters(model) / 1e6:.3f} M parameters, {needed:.2f} GB for checkpoints, {free:.1f} GB free"
    if free < needed:
        return Check("disk", "FAIL", measured, "free some space or lower keep_checkpoints")
    return Check("disk", "PASS", measured)


def tokens(config: PretrainConfig, store: Store, train_rows: np.ndarray) -> list[Check]:
    """What the token budget is spent on (F14), and that masks are what they must be."""
    size, patch = store.preprocessing.image_size, config.model.patch_size
    grid = token_grid(size, patch)
    sample = train_rows[np.linspace(0, len(train_rows) - 1, min(SAMPLE, len(train_rows))).astype(int)] if len(train_rows) else train_rows
    if not len(sample):
        return []
    arrays = store.read(sample)
    maps = token_map(arrays.band, arrays.valid, size, patch)
    count = {
        name: (maps == value).reshape(len(maps), -1).sum(1)
        for name, value in (("tissue", TISSUE), ("background", BACKGROUND), ("padding", PADDING))
    }
    kept, num_context, num_target = config.masks.counts(grid)
    share = ", ".join(f"{name} {np.mean(n):.0f}" for name, n in count.items())
    measured = f"{np.prod(grid)} tokens: {share}; {kept} kept, {num_context} context, {num_target} target"
    image = count["tissue"] + count["background"]
    starved = float(np.mean(count["tissue"] > kept))
    short = float(np.mean(image < kept))
    padding = float(np.mean(count["padding"])) / np.prod(grid)
    rows_of_retina = float(np.mean((arrays.band[:, 1] - arrays.band[:, 0]).clip(0))) / patch[1]
    found = [Check("token budget", "PASS", measured)]
    if padding > 0.4:
        found.append(
            Check("padding", "WARN", f"{padding:.0%} of the grid is padding", "choose target_spacing to fit the field of view (F14)")
        )
    if rows_of_retina < 2:
        found.append(
            Check(
                "axial detail",
                "WARN",
                f"the tissue band is {rows_of_retina:.1f} tokens deep",
                "use a finer axial target_spacing or patch (F14)",
            )
        )
    if starved > 0.1:
        found.append(
            Check(
                "tissue dropped",
                "WARN",
                f"{starved:.0%} of volumes have more tissue tokens than the budget",
                f"raise masks.budget to {int(count['tissue'].max())}",
            )
        )
    if short > 0.1:
        found.append(
            Check(
                "tokens repeated",
                "WARN",
                f"{short:.0%} of volumes have fewer image tokens than the budget",
                f"lower masks.budget to {int(image.min())}",
            )
        )
    masks = sample_masks(config.masks, maps, generators(config.seed, 0, np.arange(len(maps))))
    overlap = sum(np.intersect1d(c, t).size for c, t in zip(masks.context, masks.target, strict=True))
    padded = int((np.take_along_axis(maps.reshape(len(maps), -1), masks.kept, 1) == PADDING).sum())
    if overlap or padded:
        found.append(
            Check(
                "masks", "FAIL", f"{overlap} tokens are context and target, {padded} kept tokens are padding", "report this as a bug (F4)"
            )
        )
    else:
        found.append(Check("masks", "PASS", f"context and target are disjoint; {masks.dead.mean():.0%} of targets are background"))
    return found


def objective_integrity(config: PretrainConfig, store: Store, train_rows: np.ndarray) -> list[Check]:
    """On one real volume: the context path gets no gradient from target voxels, the teacher moves and gets no gradient (F11)."""
    arrays = store.read(train_rows[:1])
    patch = config.model.patch_size
    small = config.model_copy(update={"model": config.model.model_copy(update={"depth": min(2, config.model.depth)})})
    model = build_objective(small, store.preprocessing)
    maps = token_map(arrays.band, arrays.valid, store.preprocessing.image_size, patch)
    masks = sample_masks(config.masks, maps, generators(config.seed, 0, np.array([0])))
    index = TokenIndex(*(torch.from_numpy(x) for x in (masks.kept, masks.where(masks.context), masks.where(masks.target))))
    voxels = torch.from_numpy(arrays.voxels).unsqueeze(1)
    patches = (take_patches(voxels, index.kept, patch).float() / 255).requires_grad_()
    model(patches, patches, index, config.objective.context_loss).loss.backward()
    assert patches.grad is not None
    leak = float(patches.grad.gather(1, index.target.unsqueeze(-1).expand(-1, -1, patches.shape[-1])).abs().max())
    taught = sum(float(p.grad.abs().sum()) for p in model.target_encoder.parameters() if p.grad is not None)
    found = []
    if leak:
        found.append(
            Check(
                "context is blind to targets",
                "FAIL",
                f"gradient of the loss w.r.t. target voxels is {leak:.1e}",
                "the encoder sees the answers (F11)",
            )
        )
    if taught:
        found.append(Check("teacher gets no gradient", "FAIL", f"gradient {taught:.1e}", "the target encoder must only be averaged (F11)"))
    before = [p.clone() for p in model.target_encoder.parameters()]
    with torch.no_grad():
        for p in model.encoder.parameters():
            p.add_(0.01)
    model.update_target(Schedule(config.schedule, config.steps).ema(0))
    moved = any(not torch.equal(a, b) for a, b in zip(before, model.target_encoder.parameters(), strict=True))
    if not moved:
        found.append(
            Check("teacher moves", "FAIL", "the target encoder is unchanged after an update", "its average is not being taken (F11)")
        )
    return found or [
        Check("objective integrity", "PASS", "targets are invisible to the context path; the teacher moves and gets no gradient")
    ]
