"""Checks before step 0: each reports what was measured and what to do."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from octfm.errors import ConfigError, Echo, StoreError, one_line
from octfm.io.location import Location
from octfm.io.progress import Progress
from octfm.pretraining.data import given_store, training_rows
from octfm.pretraining.learner import blueprint
from octfm.pretraining.preflight import cohort, curves, data, objective, resources, tokens, tpu
from octfm.pretraining.preflight.check import Check, fail_with
from octfm.pretraining.schedule import Schedule
from octfm.pretraining.settings import PretrainConfig, in_steps
from octfm.run.runtime import Runtime, start, torch_defaults
from octfm.store.loader import epoch_volumes
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing

__all__ = ["Check", "checks", "examine", "examine_tpu", "require"]


def checks(
    config: PretrainConfig,
    store: Store,
    runtime: Runtime,
    train_rows: np.ndarray,
    validation_rows: np.ndarray,
    out: Location,
    *,
    resumed: bool = False,
) -> list[Check]:
    """Run all checks, in seconds. Settings are checked first, so that no later check fails because of them. A resumed
    run passed the slow ones when it began."""
    first = [data.patches_tile(config, store), data.arithmetic(config, store, runtime.replicas, len(train_rows))]
    if any(check.status == "FAIL" for check in first):
        return first
    schedule = Schedule(config.schedule, config.steps)
    whole = data.prepared(store)
    if whole.status == "FAIL":
        return [*first, whole]  # the other checks read volumes
    sample, model = data.read_sample(config, store, train_rows), blueprint(config, store.preprocessing)
    found = [
        *first,
        data.ranks(config, store, train_rows, runtime.world),
        data.order(config, store, train_rows),
        *curves.learning_rate(schedule),
        curves.weight_decay(schedule),
        *([curves.teacher(schedule)] if model.target_encoder is not None else []),
        data.splits(store, train_rows, validation_rows),
        whole,
        *resources.destinations(config, out),
        resources.disk(config, store, out, len(train_rows)),
        resources.parameters(config, store),
        *([] if resumed else resources.initial_weights(config, store)),
        resources.tracker(config, resumed=resumed),
        *data.probed(config, store, train_rows, validation_rows),
        *tokens.budget(config, sample),
        *tokens.starved(config, store, sample),
        *tokens.moved(config, store, sample),
        *tokens.masking(config, sample),
    ]
    if resumed or any(check.status == "FAIL" for check in found):
        return found

    def slow() -> Iterator[Iterable[Check]]:
        yield cohort.checks(store, store.recorded(train_rows))
        yield objective.integrity(config, store, train_rows)
        yield [objective.views(config, store, train_rows)]
        yield [objective.masks_change(config, store, train_rows)]
        yield objective.validation_masks(config, store, validation_rows)
        fails = any(check.status == "FAIL" for check in found)
        yield [] if fails else [objective.overfit(config, store, train_rows)]
        yield [resources.memory(config, store, runtime)]
        yield [resources.forecast(config, store, runtime, sample)]

    with Progress("checks", 8, "groups", enabled=runtime.leads) as progress:
        for group in progress.over(slow()):
            found += group
    return found


@torch_defaults()
def examine(
    config: PretrainConfig, out: Location, device: str | None = None, plot: Path | None = None, ranks: int = 1
) -> list[Check]:
    """All checks of a config whose store is named in `data.store`, for `octfm doctor`. `ranks`: check as for a job of
    so many ranks, each on a device like this one. `plot`: a PNG to draw the config's curves and masks in. Raises
    ConfigError or StoreError if the store cannot be opened."""
    store = given_store(config)
    try:
        train_rows, validation_rows = training_rows(config, store)
    except StoreError as error:
        return [fail_with("splits", error)]
    config = in_steps(config, epoch_volumes(store, train_rows, config.data.global_batch_size))
    runtime = replace(
        start(config.precision, device), world=ranks, sharded=ranks > 1 and config.runtime.parallel == "fsdp"
    ).for_run(config.runtime, config.steps_per_program)
    found = checks(config, store, runtime, train_rows, validation_rows, out)
    if plot is not None and all(
        check.status != "FAIL" for check in found if check.name in ("token grid", "batch arithmetic")
    ):
        from octfm.pretraining.preflight.plot import draw_plot

        draw_plot(plot, config, store, train_rows)
    return found


def examine_tpu(config: PretrainConfig, name: str, echo: Echo) -> list[Check]:
    """Check that the step of a config compiles for and fits a TPU slice, for `octfm doctor --tpu v4-32`. Only the size
    of the store's volumes matters; if no store is named, it is the default size."""
    preprocessing = Preprocessing() if config.data.store is None else Store.open(config.data.store).preprocessing  # pyright: ignore[reportCallIssue]
    return tpu.examine(config, preprocessing, name, echo)


def require(found: list[Check], echo: Echo) -> None:
    """Print warnings and failures; raise ConfigError if any check failed."""
    for check in found:
        if check.status != "PASS":
            echo(one_line(f"preflight {check.status}: {check.name}: {check.measured}; {check.advice}"))
    failed = [check for check in found if check.status == "FAIL"]
    if failed:
        first = failed[0]
        more = f" (and {len(failed) - 1} more; octfm doctor lists them)" if len(failed) > 1 else ""
        raise ConfigError(
            f"preflight stopped the run before step 0: {first.name}: {first.measured}; {first.advice}{more}"
        )
    echo(f"preflight: {len(found)} checks, {sum(c.status == 'PASS' for c in found)} passed")
    for check in found:
        if check.name in ("initial weights", "inherited participants", "parameters", "memory", "forecast"):
            echo(f"preflight: {check.name}: {check.measured}")
