"""Will it fit, and how long will it take: parameters, memory, disk, destination, data rate against step rate (F6, F7, F8, F19)."""

import secrets
import shutil
import tempfile
from pathlib import Path

from octfm.errors import BucketError
from octfm.io.location import BucketPath, Location, write_whole
from octfm.models.vit3d import count_parameters
from octfm.pretraining.learner import blueprint
from octfm.pretraining.preflight.check import Check, fail, passed, warn
from octfm.pretraining.preflight.cost import GB, Cost, measure_speed, step_cost
from octfm.pretraining.preflight.data import Sample
from octfm.pretraining.settings import PretrainConfig
from octfm.run import checkpoint, checkpoint_files
from octfm.run.bucket import mirror_of
from octfm.run.runtime import Runtime
from octfm.store.loader import accumulation
from octfm.store.store import Store

ACCURACY = 0.2
"""The memory estimate is trusted to so much; between the two ends a run is warned, not stopped."""


def parameters(config: PretrainConfig, store: Store) -> Check:
    """What will really be trained (F19)."""
    counts = blueprint(config, store.preprocessing).parameters_by_part()
    total = counts.pop("total")
    parts = ", ".join(f"{name.replace('_', ' ')} {count / 1e6:.3f}" for name, count in counts.items())
    return passed("parameters", f"{total / 1e6:.3f} M parameters: {parts}")


def memory(config: PretrainConfig, store: Store, runtime: Runtime) -> Check:
    """The highest moment of a step against what is free, and the largest micro-batch that would fit (F7)."""
    per_rank = config.data.global_batch_size // runtime.world
    chosen = config.data.per_device_batch_size
    other = 1 if chosen > 1 else 2

    def cost(micro_batch: int) -> Cost:
        return step_cost(
            config, store.preprocessing, micro_batch, max(1, per_rank // micro_batch), runtime.world, runtime.sharded
        )

    def peak(micro_batch: int) -> int:
        return cost(micro_batch).peak_bytes

    needed, compared, free = peak(chosen), peak(other), runtime.free_memory_gb() * GB
    slope = max(1.0, (needed - compared) / (chosen - other))
    sizes = [
        n
        for n in range(1, per_rank + 1)
        if per_rank % n == 0 and needed + slope * (n - chosen) <= (1 - ACCURACY) * free
    ]
    fitting = f"per_device_batch_size {max(sizes)} would fit" if sizes else "not even one volume at a time would fit"
    held = "a share of weights and optimizer" if runtime.sharded else "weights and optimizer"
    each = " on each rank" if runtime.world > 1 else ""
    measured = f"{needed / GB:.2f} GB estimated{each} ({cost(chosen).weights_bytes / GB:.2f} of it {held}), {free / GB:.1f} GB free; {fitting}"
    smaller = f"data.per_device_batch_size={max(sizes)}" if sizes else "a smaller model or masks.budget"
    advice = f"choose {smaller}; the global batch stays (F7)"
    if needed > (1 + ACCURACY) * free:
        return fail("memory", measured, advice)
    if needed > (1 - ACCURACY) * free:
        return warn("memory", measured, advice)
    return passed("memory", measured)


def forecast(config: PretrainConfig, store: Store, runtime: Runtime, sample: Sample) -> Check:
    """How long a step and the run will take, and whether the store can feed it (F8)."""
    data = config.data
    micro_steps = accumulation(data.global_batch_size, data.per_device_batch_size, runtime.world)
    cost = step_cost(
        config, store.preprocessing, data.per_device_batch_size, micro_steps, runtime.world, runtime.sharded
    )
    tokens = config.masks.counts(sample.tokens.shape[1:])[0] * data.per_device_batch_size
    step_s = measure_speed(runtime, config.model.width, tokens).seconds(cost)
    needs = data.global_batch_size / step_s
    reads = sample.volumes_per_s * runtime.world
    slowest = max(step_s, data.global_batch_size / reads)
    measured = (
        f"about {duration(step_s)} a step ({cost.flops / 1e12:.2f} TFLOP), {needs:.3g} volumes/s wanted, the store gives {reads:.3g}; "
        f"{config.steps:,} steps take about {duration(config.steps * slowest)}"
    )
    if reads < needs:
        waiting = f"the device would wait {1 - reads / needs:.0%} of the time"
        return warn(
            "forecast",
            f"{measured}; {waiting}",
            "use a local, uncompressed store (octfm prepare --compression none), or more data.prefetch",
        )
    return passed("forecast", measured)


def destinations(config: PretrainConfig, out: Location) -> list[Check]:
    """Where checkpoints go, and where they go when that disk is full, can be written, read back and cleaned (F6)."""
    found = [_bucket(out) if isinstance(out, BucketPath) else _folder("destination", out, "choose another --out (F6)")]
    if config.ckpt_second_dir is not None:
        second = Path(config.ckpt_second_dir)
        found.append(
            _folder(
                "second destination", second, "name a folder that can be written in ckpt_second_dir, or set it to null"
            )
        )
    return found


def _folder(name: str, out: Path, advice: str) -> Check:
    parent = next(p for p in (out, *out.parents) if p.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=parent, prefix=".octfm-probe-") as probe:
            probe.write(b"octfm")
            probe.flush()
            if Path(probe.name).read_bytes() != b"octfm":
                return fail(name, f"{parent} returns other bytes than were written", advice)
    except OSError as error:
        return fail(name, f"{parent} cannot be written: {error.strerror}", advice)
    return passed(name, f"{out} was write-tested")


def _bucket(out: BucketPath) -> Check:
    probe = out / f".octfm-probe-{secrets.token_hex(4)}"
    try:
        write_whole(probe, b"octfm")
        if probe.read_bytes() != b"octfm":
            return fail("destination", f"{out} returns other bytes than were written", "choose another --out (F6)")
        probe.unlink()
    except (BucketError, OSError) as error:
        return fail("destination", f"{error}", "choose another --out (F6)")
    return passed("destination", f"{out} was write-tested")


def disk(config: PretrainConfig, store: Store, out: Location, volumes: int) -> Check:
    """Room for the checkpoints that the retention policy keeps until the end, and one more while it is written.

    What is there already is not demanded again: a checkpoint either stays, and is counted, or is deleted. A finished run needs nothing.
    """
    out = out if isinstance(out, Path) else mirror_of(out)
    last = (checkpoint.everywhere(out) or [None])[-1]
    if last is not None and checkpoint.step_of(last) >= config.steps:
        return passed("disk", "the run is finished and writes no checkpoint")
    model = blueprint(config, store.preprocessing)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = 4 * (count_parameters(model) + 2 * trained)
    every = [
        config.keep_every_steps,
        config.keep_every_epochs and config.keep_every_epochs * volumes / config.data.global_batch_size,
    ]
    for_good = sum(int(config.steps // max(interval, config.ckpt_every_steps)) for interval in every if interval)
    count = min(config.keep_checkpoints + for_good, -(-config.steps // config.ckpt_every_steps)) + 1
    folder = out / "checkpoints"
    held = sum(map(checkpoint_files.size_of, [*checkpoint_files.steps(folder), *checkpoint_files.left_over(folder)]))
    # One is written before the first is deleted, however many there are.
    needed = max(size * count - held, size) / GB
    free = _free(out) / GB
    had = f" ({held / GB:.2f} GB of them are there)" if held else ""
    measured = f"{needed:.2f} GB for up to {count} checkpoints{had}, {free:.1f} GB free"
    if free < needed:
        second = Path(config.ckpt_second_dir) if config.ckpt_second_dir else None
        if second is not None and _free(second) / GB >= needed:
            return warn(
                "disk", measured, f"checkpoints that find no room go to ckpt_second_dir {second}, where there is enough"
            )
        return fail(
            "disk",
            measured,
            "free some space, or lower keep_checkpoints or raise keep_every_steps and keep_every_epochs",
        )
    return passed("disk", measured)


def _free(folder: Path) -> int:
    """Bytes on the disk that a folder lies on, or will."""
    return shutil.disk_usage(next(p for p in (folder, *folder.parents) if p.exists())).free


def duration(seconds: float) -> str:
    """`41 ms`, `12 s`, `3.5 h`, `4.2 days`."""
    for limit, unit, name in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} days"
