"""Pretraining: `pretrain` sets a run up, `Pretraining.update` is one step of the algorithm, run/loop.py repeats it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octfm.catalog.participants.ids import under_one_id
from octfm.config import load, without_text
from octfm.errors import Echo
from octfm.io.location import Location, location
from octfm.models.objectives.objective import ObjectiveConfig
from octfm.pretraining import preflight
from octfm.pretraining.data import Data, given_store, training_rows
from octfm.pretraining.initial_weights import with_hash
from octfm.pretraining.inputs import draw
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors.inspection import FinishedStep, Inspection
from octfm.pretraining.monitors.limits import limits
from octfm.pretraining.monitors.measure import update
from octfm.pretraining.monitors.monitors import Finding
from octfm.pretraining.monitors.online_probe import Cases, find_cases
from octfm.pretraining.monitors.summary import exchange_results
from octfm.pretraining.preflight.ranks import (
    require_disjoint,
    require_same_data,
    require_same_folder,
    require_same_order,
)
from octfm.pretraining.reactions import Reactions
from octfm.pretraining.resume import PRETRAINING, retention, second_destination
from octfm.pretraining.schedule import Schedule, ramp
from octfm.pretraining.settings import PretrainConfig, in_steps
from octfm.pretraining.step import OutOfMemory, accumulate, judge
from octfm.pretraining.validation import Validation
from octfm.run import checkpoint
from octfm.run.folder import Identity, RunFolder, open_run, resume, volumes_digest
from octfm.run.launch import join
from octfm.run.loop import Interruption, Session, open_session, train
from octfm.run.runtime import Runtime, torch_defaults
from octfm.run.trackers import open_trackers
from octfm.run.tracking import Listener, require_listeners
from octfm.store.loader import Loader, epoch_volumes
from octfm.store.store import Store


@torch_defaults()
def pretrain(
    config: PretrainConfig,
    store: Store | None = None,
    out: str | Location = "runs/run",
    device: str | torch.device | None = None,
    echo: Echo = print,
    *,
    override: bool = False,
    listeners: Sequence[Listener] = (),
    objective: ObjectiveConfig | None = None,
) -> Path:
    """Train until `config.steps` updates are made and return the run folder; the same call resumes an interrupted run.

    Name the store either here or in `config.data.store`, not in both. `override` accepts a config that contradicts
    the run's. `listeners` get everything that metrics.jsonl gets, as a monitor does (octfm.run.tracking.Listener).
    `objective`: settings of an objective of your own instead of the config's section (docs/guide/plug-ins.md).
    `device`: as --device of the command (docs/guide/scale-out.md). Raises Preempted after SIGTERM, SIGINT or SIGHUP,
    once the step is finished and saved.
    Under torchrun every rank makes this call; only rank 0 prints and writes.
    """
    if not isinstance(config, PretrainConfig):
        raise TypeError(f"config: expected a PretrainConfig, got {type(config).__name__}; octfm.load_config makes one")
    require_listeners(listeners)
    if objective is not None:
        config = config.with_objective(objective)
    # model_copy(update=…) of a caller checks nothing.
    config, device = with_hash(load(PretrainConfig, dict(config))).on_device(device)
    where = location(out)
    store = given_store(config, store)
    runtime = join(config.runtime, config.precision, device)
    echo_first = echo if runtime.leads else lambda _: None
    data = Data(store, *training_rows(config, store))
    config = in_steps(config, epoch_volumes(store, data.train_rows, config.data.global_batch_size))
    runtime = runtime.for_run(config.runtime, config.steps_per_program)
    identity = Identity(PRETRAINING, config, store.fingerprint, volumes_digest(store, data.train_rows))

    def examine(folder: Path) -> None:
        begun = (folder / "config.yaml").is_file()
        found = preflight.checks(config, store, runtime, data.train_rows, data.validation_rows, where, resumed=begun)
        preflight.require(found, echo_first)

    try:
        with runtime.guarded():
            # Before the folder is touched: a rank with another store would train on other volumes.
            require_same_data(runtime, identity.data)
            opened = open_run(where, identity, runtime, override=override, echo=echo_first, check=examine)
            with opened as run, Interruption() as interruption:
                require_same_folder(runtime, run)
                training = begin(config, data, runtime, run, echo_first)
                with training.loader:
                    settings = without_text(config)
                    trackers = open_trackers(config.tracking, run.path, settings, training.step, runtime.rank)
                    session = open_session(
                        training,
                        run,
                        retention(config, training.loader.steps_per_epoch),
                        echo_first,
                        aloud=echo,
                        listeners=(*trackers, *listeners),
                        rollbacks=len(training.learner.state.rollbacks),
                    )
                    # The restored state names excluded volumes, which the new loader does not know of yet.
                    training.reactions.exclude()
                    training.reactions.recall_memory(session)
                    train(training, session, interruption)
                echo_first(f"pretraining done: {training.step} updates, checkpoint {run.shown(run.last_checkpoint())}")
    finally:
        runtime.close()
    return run.path


def begin(config: PretrainConfig, data: Data, runtime: Runtime, run: RunFolder, echo: Echo) -> "Pretraining":
    """Networks at their initial weights or at the run's newest checkpoint, and the loader that feeds them."""
    # Before a checkpoint is looked for there.
    runtime.first(lambda: run.write_record(**second_destination(config, run, echo)))
    # A run that has checkpoints no longer needs the weights that it began with (model.init).
    fresh = runtime.first(lambda: run.last_checkpoint() is None)
    known = runtime.first(lambda: run.record.get("initial_weights"))
    learner = Learner(config, data.store.preprocessing, runtime, fresh=fresh, began_with=known)
    resume(run, learner, echo)
    # Nobody can be evaluated on a phantom of a stream.
    names = sorted({data.store.rows[row].participant for row in data.store.recorded(data.train_rows)})
    people = len(set(under_one_id(names)))
    facts = {
        "parameters": learner.model.parameters_by_part(),
        "store": {"volumes": len(data.store), "train_participants": people},
        "precision": config.precision,
        **({"initial_weights": learner.began_with} if learner.began_with else {}),
    }
    key = runtime.first(lambda: run.key)
    cases = find_cases(config.probe, data.store, data.train_rows, data.validation_rows)
    # Who scores the checkpoints helps to choose one, and is no test participant of the one that was chosen.
    judging = np.empty(0, int) if cases is None else data.store.recorded(cases.held_out)
    judges = {data.store.rows[row].participant for row in judging}
    # Hashes, so that an evaluation can refuse these participants, and no checkpoint names any.
    people_seen = sorted({*names} | judges)
    hashes = checkpoint.participant_hashes(people_seen, key)
    participants: dict[str, Any] = {"key": key, "hashes": hashes, "trained_on": people}
    if learner.before:
        participants["before"] = list(learner.before)
        # At least: hashes under different keys cannot be compared with each other.
        facts["inherited_participants"] = max(_others(part, people_seen) for part in learner.before)
        unknown = [len(part["hashes"]) for part in learner.before if part["key"] is None]
        facts["inherited_unknown"] = max(unknown, default=0)
    runtime.first(lambda: run.write_record(**facts))
    loader = Loader(
        data.store,
        data.train_rows,
        config.data.global_batch_size,
        config.seed,
        runtime.rank,
        runtime.world,
        config.data.prefetch,
        config.data.balance_scanners,
        runtime.host_memory,
        # While the device computes the steps before.
        lambda batch: draw(config, data.store.preprocessing, batch),
    )
    data_step = learner.step + learner.state.offset
    require_disjoint(runtime, loader, data_step)
    require_same_order(runtime, loader, data_step)
    return Pretraining(run, data, learner, loader, participants, cases)


def _others(part: Mapping[str, Any], people: Sequence[str]) -> int:
    """How many participants of a run before this one are not among `people`; if its key is kept elsewhere, the least
    number, and never 0, because pages call a run that inherited none one that began at random."""
    if part["key"] is None:
        return max(1, len(part["hashes"]) - len(people))
    return len({*part["hashes"]} - checkpoint.possible_hashes(people, part["key"]))


class Pretraining:
    """A self-supervised training, driven by run/loop.py: the networks, their data, and the monitors that watch them."""

    def __init__(
        self,
        run: RunFolder,
        data: Data,
        learner: Learner,
        loader: Loader,
        participants: dict[str, Any],
        cases: Cases | None,
    ) -> None:
        """`participants`: the key and the keyed hashes of those who are trained on or judge checkpoints, and how many
        are trained on; `cases`: what the online probe predicts."""
        config = learner.config
        self.run, self.data, self.learner, self.loader, self.participants = run, data, learner, loader, participants
        self.config, self.runtime, self.tracking = config, learner.runtime, config.tracking
        self.schedule = Schedule(config.schedule, config.steps)
        self.inspection = Inspection(data.store, learner, loader, self.schedule)
        self.reactions = Reactions(data, learner, loader, participants["key"])
        self.validation = Validation(run, self.reactions, cases)
        self.finding: Finding | None = None
        """What is wrong with the last update, if anything is."""

    @property
    def step(self) -> int:
        return self.learner.step

    @property
    def steps(self) -> int:
        return self.config.steps

    @property
    def finished(self) -> bool:
        return self.learner.finished

    def update(self, session: Session, interruption: Interruption) -> str | None:
        """One step: read a batch, compute gradients, decide whether to apply the update, inspect the result."""
        config, learner, runtime, step = self.config, self.learner, self.runtime, self.step
        size = config.data.global_batch_size
        # A rollback passes over batches: from then on data are ahead of updates.
        data_step = step + learner.state.offset
        session.waiting.for_("data")
        batch = self.loader.batches(data_step)
        rows = self.loader.indices(data_step * size + np.arange(size))

        session.waiting.for_("the device")
        rates = {
            "weight_decay": self.schedule.weight_decay(step),
            "ema": self.schedule.ema(step),
            "context_weight": config.objective.context_loss
            * ramp(step, config.objective.context_warmup * config.steps),
        }
        learner.set_rates(self.schedule.lr(step) * learner.state.lr_scale, rates["weight_decay"], rates["ema"])
        inspect = self.inspection.due(step)
        # Compiled steps are all alike, so they measure whether inspected or not.
        measured = runtime.measures(inspect)
        micro_batch = learner.micro_batch
        try:
            micro_steps = accumulate(learner, batch, rates["context_weight"], everything=measured)
        except OutOfMemory as error:
            # The last checkpoint does not know of it: the next start reads it from memory.json.
            session.run.note_memory(error.micro_batch)
            raise

        session.waiting.for_("the other ranks")
        runtime.average_gradients(learner.trained)
        # After averaging: the limit is on the norm of the global batch's gradient, whatever the number of ranks.
        grad_norm = runtime.clip(learner.trained, config.clip_grad_norm)
        # Judged on the device: the host does not wait, and an update that is not made runs the same kernels.
        outcome = judge(learner, micro_steps, grad_norm, limits(config.health, learner.state))
        movement = update(learner, outcome.made, inspect=measured, micro_steps=micro_steps)

        # On the host while the device works.
        excluded = bool(learner.state.excluded)
        fed = self.inspection.feed.inspect(data_step, rows, excluded, batch, micro_steps, closely=inspect)
        # The first moment at which the host waits for the device, and the ranks for each other.
        summary = exchange_results(learner, micro_steps, outcome, interruption.signal_name, fed)
        session.waiting.for_("the device")
        if learner.micro_batch != micro_batch:
            self.reactions.report_smaller(session, micro_batch)
        epoch = data_step * size / epoch_volumes(self.data.store, self.data.train_rows, size)
        finished = FinishedStep(step, epoch, rows, batch, micro_steps, rates, movement, summary)
        self.finding = self.inspection.examine(session, finished)
        learner.step += 1
        return summary.signal_name

    def recover(self, session: Session) -> bool:
        """Skip, exclude, roll back or stop, as the finding demands."""
        if self.finding is None or not self.reactions.act(session, self.step - 1, self.finding):
            return False
        self.inspection.restart()
        return True

    def validate(self, session: Session) -> bool:
        """Validation loss and online probe, when they are due; True when a checkpoint is."""
        step = self.step - 1
        validated, best = self.validation.loss(session, step), self.validation.probe(session, step)
        if validated or best is not None:
            # The time that they took is not the training's.
            self.inspection.window.restart()
        session.best = bool(best)
        return session.best or self.validation.due(self.config.ckpt_every_steps)

    def content(self) -> dict[str, Any]:
        return self.learner.content(self.run.record, self.data.store.fingerprint, self.participants)

    def restore(self, content: dict[str, Any] | None, source: Path) -> None:
        self.learner.restore(content, source)
