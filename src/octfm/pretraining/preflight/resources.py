"""Checks of resources: parameters, memory, time, data rate, destinations, disk and trackers (F6, F7, F8, F19)."""

import shutil
from pathlib import Path

from octfm.display import duration
from octfm.errors import BucketError, CheckpointError
from octfm.io.location import Location, existing, unwritable
from octfm.models.vit3d import count_parameters
from octfm.pretraining.initial_weights import Initial, begin_with, is_query, read_initial
from octfm.pretraining.learner import blueprint, build_objective
from octfm.pretraining.preflight.check import Check, fail, fail_with, passed, warn
from octfm.pretraining.preflight.cost import GB, Cost, step_cost, step_seconds
from octfm.pretraining.preflight.data import Sample
from octfm.pretraining.resume import retention
from octfm.pretraining.settings import PretrainConfig
from octfm.run import checkpoint_files, trackers
from octfm.run.bucket import mirror_of
from octfm.run.checkpoint import recogniser
from octfm.run.runtime import Runtime
from octfm.store.loader import accumulation
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing, differences
from octfm.weights.exported import KEY

ACCURACY = 0.2
"""Relative error of the memory estimate; within it a run is warned and not stopped."""


def parameters(config: PretrainConfig, store: Store) -> Check:
    """Count the parameters of the model that will be trained (F19)."""
    counts = blueprint(config, store.preprocessing).parameters_by_part()
    total = counts.pop("total")
    parts = ", ".join(f"{name.replace('_', ' ')} {count / 1e6:.3f}" for name, count in counts.items())
    return passed("parameters", f"{total / 1e6:.3f} M parameters: {parts}")


def initial_weights(config: PretrainConfig, store: Store) -> list[Check]:
    """Read the weights that model.init names, and compare whom they have seen with whom the store keeps for tests."""
    if config.model.init is None:
        return []
    try:
        initial = read_initial(config.model.init, config)
        filled = begin_with(initial, build_objective(config, store.preprocessing))
    except (CheckpointError, BucketError) as error:
        return [fail_with("initial weights", error)]
    return [*_filled(config, initial, filled), *_inherited(initial, store), *_prepared_alike(initial, store)]


def _filled(config: PretrainConfig, initial: Initial, networks: list[str]) -> list[Check]:
    state = initial.encoder
    count = sum(tensor.numel() for name, tensor in state.items() if config.model.summary or not is_query(name))
    more = f" (and {', '.join(networks[1:])})" if networks[1:] else ""
    measured = f"{count / 1e6:.3f} M parameters of the encoder{more} begin as in {initial.named}"
    if config.model.summary or not any(map(is_query, state)):
        return [passed("initial weights", measured)]
    # After 14 CPU-minutes of mae on 5,000 phantom volumes AUROC of seven diagnoses was .866, on 500 .857; before .910.
    queries = state["summary.query"].shape[1]
    advice = (
        "short runs without them made vectors worse than no training; keep them with objective.name=anchored (or "
        f"dense) model.summary={queries} objective.pool=summary"
    )
    return [warn("initial weights", f"{measured}, without the queries that read its vectors", advice)]


def _inherited(initial: Initial, store: Store) -> list[Check]:
    """Nobody who is kept for tests was seen by the weights that the run begins with (F16). How many of the validation
    split were is only said: validation chooses among checkpoints that have all seen them."""
    known = [part for part in initial.before if part["key"] is not None]
    checks = []
    if len(known) < len(initial.before):
        measured = (
            f"nobody can tell whom {initial.named} has seen: weights behind it were published without the key of their "
            "participants"
        )
        advice = (
            "evaluations of this run will need --allow-seen, and say so; if you can get the "
            f"{KEY} of those weights, put it into their folder before the run begins"
        )
        checks = [warn("inherited participants", measured, advice)]
    if not known:
        return checks
    was_seen = recogniser({"hashes": (), "before": known})
    held_out = {split: {row.participant for row in store.rows if row.split == split} for split in ("test", "val")}
    (seen, tests), (known_too, validated) = ((sum(map(was_seen, people)), len(people)) for people in held_out.values())
    measured = (
        f"{seen} of {tests} test participants of this store and {known_too} of {validated} in its validation split "
        f"were seen by {initial.named}"
    )
    if not seen:
        return checks or [passed("inherited participants", measured)]
    advice = (
        "no evaluation would accept them; keep everybody's split from the catalog or store that it was trained on "
        "(octfm scan FOLDER --splits-of OLD), prepare into a new store, and name that one (F16)"
    )
    return [*checks, fail("inherited participants", measured, advice)]


def _prepared_alike(initial: Initial, store: Store) -> list[Check]:
    """What a voxel of the weights' volumes and of the store's means, apart from the size of the grid."""
    if initial.preprocessing is None:
        return []
    now = store.preprocessing.model_dump(mode="json")
    # Rotary positions are in millimetres, and learned ones of another grid do not fit at all.
    before = {**Preprocessing.recorded(initial.preprocessing).model_dump(mode="json"), "image_size": now["image_size"]}
    differ = differences(before, store.preprocessing)
    if not differ:
        return []
    advice = (
        "features may be worth less than where they were learned; to keep them, prepare the store like those weights' "
        "(octfm prepare CATALOG --like RUN)"
    )
    return [warn("preparation", f"{initial.named} learned on volumes that were prepared otherwise: {differ}", advice)]


def cost_on(
    runtime: Runtime, config: PretrainConfig, preprocessing: Preprocessing, micro_batch: int, micro_steps: int
) -> Cost:
    """`step_cost` of a rank of this runtime."""
    # The settings are frozen and so hashable, which pyright does not see.
    own = (runtime.world, runtime.sharded, runtime.device.type, runtime.graphs)
    return step_cost(config, preprocessing, micro_batch, micro_steps, *own)  # pyright: ignore[reportArgumentType]


def micro_batches(config: PretrainConfig, preprocessing: Preprocessing, runtime: Runtime) -> tuple[Cost, list[int]]:
    """The cost of a step as configured, and the micro-batches that fit this device's free memory, ascending."""
    per_rank = config.data.global_batch_size // runtime.world
    chosen = config.data.per_device_batch_size
    # Any second point of the line below.
    other = 1 if chosen > 1 else 2

    def cost(micro_batch: int) -> Cost:
        return cost_on(runtime, config, preprocessing, micro_batch, max(1, per_rank // micro_batch))

    estimate = cost(chosen)
    # Memory grows linearly with the micro-batch: two estimates give the line.
    slope = max(1.0, (estimate.peak_bytes - cost(other).peak_bytes) / (chosen - other))
    room = (1 - ACCURACY) * runtime.free_memory_gb() * GB
    sizes = range(1, per_rank + 1)
    return estimate, [n for n in sizes if per_rank % n == 0 and estimate.peak_bytes + slope * (n - chosen) <= room]


def memory(config: PretrainConfig, store: Store, runtime: Runtime) -> Check:
    """Compare a step's peak memory with what is free, and name the largest micro-batch that fits (F7)."""
    estimate, sizes = micro_batches(config, store.preprocessing, runtime)
    free, needed = runtime.free_memory_gb() * GB, estimate.peak_bytes
    fitting = f"per_device_batch_size {max(sizes)} would fit" if sizes else "not even one volume at a time would fit"
    held = "a share of weights and optimizer" if runtime.sharded else "weights and optimizer"
    each = " on each rank" if runtime.world > 1 else ""
    measured = (
        f"{needed / GB:.2f} GB estimated{each} ({estimate.weights_bytes / GB:.2f} of it {held}), {free / GB:.1f} GB "
        f"free; {fitting}"
    )
    smaller = f"data.per_device_batch_size={max(sizes)}" if sizes else "a smaller model or masks.budget"
    advice = f"choose {smaller}; the global batch stays (F7)"
    if needed > (1 + ACCURACY) * free:
        return fail("memory", measured, advice)
    if needed > (1 - ACCURACY) * free:
        return warn("memory", measured, advice)
    return passed("memory", measured)


def step_time(config: PretrainConfig, preprocessing: Preprocessing, runtime: Runtime) -> tuple[float, Cost]:
    """Forecast of the seconds of one step on this device, without reading volumes; and the cost of the step."""
    data = config.data
    micro_steps = accumulation(data.global_batch_size, data.per_device_batch_size, runtime.world)
    cost = cost_on(runtime, config, preprocessing, data.per_device_batch_size, micro_steps)
    return step_seconds(cost, runtime, config, preprocessing), cost


def forecast(config: PretrainConfig, store: Store, runtime: Runtime, sample: Sample) -> Check:
    """Forecast the time of a step and of the run, and warn if reading volumes is the bottleneck (F8)."""
    source = "reading the store" if config.data.phantoms is None else "rendering phantoms"
    advice = (
        "use a local, uncompressed store (octfm prepare --compression none), or more data.prefetch"
        if config.data.phantoms is None
        else "use more CPU cores, which render in parallel, or more data.prefetch"
    )
    batch = config.data.global_batch_size
    step_s, cost = step_time(config, store.preprocessing, runtime)
    needs = batch / step_s
    # Every rank reads with a process of its own.
    reads = sample.volumes_per_s * runtime.world
    slowest = max(step_s, batch / reads)
    measured = (
        f"about {duration(step_s)} per step ({cost.flops / 1e12:.2f} TFLOP), which needs {needs:.3g} volumes/s, and "
        f"{source} gives {reads:.3g}; {config.steps:,} steps take about {duration(config.steps * slowest)}"
    )
    if reads < needs:
        waiting = f"the device would wait {1 - reads / needs:.0%} of the time"
        return warn("forecast", f"{measured}; {waiting}", advice)
    return passed("forecast", measured)


def destinations(config: PretrainConfig, out: Location) -> list[Check]:
    """Write, read back and delete a file in the run folder, and in the second one for checkpoints if set (F6)."""
    found = [_write_tested("destination", out, "choose another --out (F6)")]
    if config.ckpt_second_dir is not None:
        advice = "name a folder that can be written in ckpt_second_dir, or set it to null"
        found.append(_write_tested("second destination", Path(config.ckpt_second_dir), advice))
    return found


def _write_tested(name: str, out: Location, advice: str) -> Check:
    try:
        problem = unwritable(out)
    except BucketError as error:
        problem = str(error)
    return fail(name, problem, advice) if problem else passed(name, f"{out} was write-tested")


def disk(config: PretrainConfig, store: Store, out: Location, volumes: int) -> Check:
    """Check that the disk has room for all checkpoints that will be kept, and one more while it is written. Checkpoints
    already there are subtracted: each either stays and is counted, or is deleted. A finished run needs nothing."""
    out = out if isinstance(out, Path) else mirror_of(out)
    last = checkpoint_files.newest(out)
    if last is not None and checkpoint_files.step_of(last) >= config.steps:
        return passed("disk", "the run is finished and writes no checkpoint")
    model = blueprint(config, store.preprocessing)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    size = 4 * (count_parameters(model) + 2 * trained)  # float32: weights, and two moments of those that are trained
    intervals = retention(config, volumes / config.data.global_batch_size).intervals
    # Kept for ever; an interval shorter than that of checkpoints keeps each of them.
    for_good = sum(int(config.steps // max(interval, config.ckpt_every_steps)) for interval in intervals)
    # The best one is kept besides the last ones, and may be none of them.
    best = config.probe.target is not None
    count = min(config.keep_checkpoints + for_good, -(-config.steps // config.ckpt_every_steps)) + best + 1
    folder = out / "checkpoints"
    held = sum(map(checkpoint_files.size_of, [*checkpoint_files.steps(folder), *checkpoint_files.left_over(folder)]))
    # The next checkpoint is written before an old one is deleted, so there must be room for one in any case.
    needed = max(size * count - held, size) / GB
    free = _free(out) / GB
    had = f" besides {held / GB:.2f} GB already there" if held else ""
    measured = f"{needed:.2f} GB for up to {count} checkpoints{had}, {free:.1f} GB free"
    if free < needed:
        second = Path(config.ckpt_second_dir) if config.ckpt_second_dir else None
        if second is not None and _free(second) / GB >= needed:
            return warn("disk", measured, f"checkpoints without room go to ckpt_second_dir {second}, which has enough")
        advice = "free some space, or lower keep_checkpoints or raise keep_every_steps and keep_every_epochs"
        return fail("disk", measured, advice)
    return passed("disk", measured)


def _free(folder: Path) -> int:
    """Free bytes on the disk of a folder, which need not exist yet."""
    return shutil.disk_usage(existing(folder)).free


def tracker(config: PretrainConfig, *, resumed: bool = False) -> Check:
    """Check that trackers are installed, and that a W&B server answers unless tracking is offline. A resumed run
    continues without its server: its weights are worth more than its curves."""
    tracking = config.tracking
    if absent := trackers.missing(tracking):
        advice = f"pip install octfm[{absent[0]}], or turn tracking.{absent[0]} off"
        return fail("tracker", f"{absent[0]} is not installed", advice)
    names = " and ".join(["metrics.jsonl", *(["TensorBoard"] if tracking.tensorboard else [])])
    if tracking.wandb is None:
        return passed("tracker", names)
    if trackers.mode(tracking) == "offline":
        return passed("tracker", f"{names}; Weights & Biases offline, `wandb sync` uploads it later")
    if why := trackers.unusable():
        if resumed:
            return warn("tracker", why, "the run continues offline; `wandb sync` uploads it later")
        return fail("tracker", why, "set tracking.wandb=offline and `wandb sync` later, or run `wandb login`")
    return passed("tracker", f"{names}; Weights & Biases answers")
