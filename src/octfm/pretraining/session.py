"""One process's hold on a run: what it reads from and writes to, and how it acts on what the monitors find.

Every rank has one and all act alike; only rank 0's writes and speaks.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import numpy as np

from octfm.errors import CheckpointError, TrainingError
from octfm.io import bucket
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors.monitors import Finding
from octfm.pretraining.monitors.recovery import respond, roll_back
from octfm.pretraining.run_folder import RunFolder
from octfm.pretraining.settings import PretrainConfig
from octfm.run import checkpoint, shards
from octfm.run.checkpoint_writer import CheckpointWriter, Retention
from octfm.run.trackers import open_trackers
from octfm.run.tracking import Listener, Metrics, Unheard
from octfm.store.loader import Loader
from octfm.store.store import Store

Echo = Callable[[str], None]


@dataclass(eq=False)
class Session:
    """Everything that a rollback touches besides the networks."""

    store: Store
    train_rows: np.ndarray
    run: RunFolder
    learner: Learner
    loader: Loader
    metrics: Metrics
    writer: CheckpointWriter
    participants: dict
    echo: Echo
    saved: int = -1
    """Updates that the last checkpoint holds."""
    aloud: Echo = print
    """For what a rank says of itself: `echo` is rank 0's."""
    requests_before: bucket.Tally = field(default_factory=bucket.tally)
    """What this process had asked of buckets before the run began, unless the run itself is in a bucket, and knows."""
    told_retries: int = 0
    lost: int = -1
    """Updates that the last checkpoint would hold that was not written anywhere."""

    def save(self) -> None:
        """Write a checkpoint in the background."""
        learner = self.learner
        if self.writer.places:
            self.writer.save(learner.step, learner.content(self.run.record, self.store.fingerprint, self.participants))
        self.saved = learner.step
        self.tell_requests()

    def tell_requests(self) -> None:
        """How many of the run's requests to buckets had to be sent again, where that became more."""
        remote = self.writer.remote
        spent = bucket.tally() - (remote.before if remote else self.requests_before)
        if spent.retries > self.told_retries:
            self.told_retries = spent.retries
            sentence = f"{spent.retries:,} of {spent.requests:,} requests to the bucket failed and were sent again; nothing is missing"
            self.metrics.write(
                "bucket", self.learner.step, verdict="watch", what="bucket", sentence=sentence, **asdict(spent)
            )

    def finish(self) -> None:
        """Save what is not saved yet and wait for it: what was trained since the last checkpoint would be lost without a word."""
        if self.saved != self.learner.step:
            self.save()
        self.writer.finish()
        # Of what was still being uploaded when the last checkpoint began.
        self.tell_requests()
        self.learner.runtime.first(self._require_written)

    def _require_written(self) -> None:
        self.tell_failures(self.learner.step - 1)
        # Also where the loop has told of it before: the background write may have ended at any moment.
        if self.lost == self.learner.step:
            last = self.run.last_checkpoint()
            if self.writer.remote is not None and self.writer.remote.waiting():
                raise CheckpointError(
                    f"{self.writer.remote.where}: the bucket lacks the checkpoint after step {self.learner.step}; it is {last}, and "
                    "the same command on this machine sends it"
                )
            raise CheckpointError(
                f"{self.run.path}: the checkpoint after step {self.learner.step} could not be written; free some space or set "
                "ckpt_second_dir, and run again: "
                + (f"it continues from {last}" if last else "it starts from the beginning")
            )

    def tell_failures(self, step: int) -> None:
        """Say which checkpoints were not written where they should be, and remember the last that was not written at all."""
        failures = self.writer.failures()
        for failure in failures:
            self.metrics.write(
                "checkpoint",
                step,
                what="checkpoint",
                verdict="bad" if failure.lost else "watch",
                sentence=failure.sentence,
            )
            self.echo(f"step {step}: {failure.sentence}")
            if failure.lost:
                self.lost = failure.step  # they arrive in the order in which they were written

    def tell_waiting(self, what: str, seconds: float, sentence: str) -> None:
        """No step has finished for longer than the deadline (F8); called from another thread."""
        self.metrics.write("waiting", self.learner.step, what=what, seconds=seconds, sentence=sentence)
        runtime = self.learner.runtime
        runtime.say(f"waiting for {what} for {seconds:.0f} s when it was last heard, in step {self.learner.step}")
        self.aloud(sentence if runtime.leads else f"rank {runtime.rank}: {sentence}")

    def tell_memory(self, step: int, before: int) -> None:
        """Memory ran out and the step was computed again in smaller parts."""
        size = self.learner.micro_batch
        self._tell_memory(
            step, f"memory ran out; the step was computed again with {size} instead of {before} volumes at a time"
        )

    def recall_memory(self) -> None:
        """Go on with the micro-batch that memory allows, if it ran out since the last checkpoint where that stopped the job."""
        learner = self.learner
        noted = learner.runtime.first(self.run.noted_memory)
        if noted is None or noted >= (before := learner.micro_batch):
            return
        learner.state = replace(learner.state, micro_batch=noted)
        self._tell_memory(
            learner.step,
            f"memory ran out before; it goes on with {learner.micro_batch} instead of {before} volumes at a time",
        )

    def _tell_memory(self, step: int, what: str) -> None:
        sentence = (
            f"{what}, the same global batch of {self.learner.config.data.global_batch_size} and the same images (F7)"
        )
        self.metrics.write(
            "incident",
            step,
            what="memory",
            verdict="watch",
            action="smaller micro-batch",
            sentence=sentence,
            volumes=[],
        )
        self.echo(f"step {step}: {sentence}")

    def exclude(self) -> None:
        """Tell the loader which volumes the run's state excludes."""
        if self.learner.state.excluded:
            known = set(self.learner.state.excluded)
            self.loader.exclude(row for row in self.train_rows if self.name(row) in known)

    def name(self, row: int) -> str:
        """Keyed hash of a volume, as the run's state knows it: a checkpoint must not give acquisitions away."""
        return checkpoint.keyed_hash(self.store.rows[row].acquisition, self.participants["key"])

    def act(self, step: int, finding: Finding) -> bool:
        """Do what the policy says; True if the run went back to an earlier step. Raises TrainingError when it must not go on."""
        learner, config = self.learner, self.learner.config.health
        names = [self.name(row) for row in finding.volumes]
        response = respond(config, finding, step, learner.state, names, len(self.train_rows))
        learner.state = response.state
        volumes = [self.store.rows[row].uri for row in finding.volumes]
        told = f"{finding.what}: {finding.sentence}" + (f" ({', '.join(volumes)})" if volumes else "")
        sentence, extra = response.sentence, {}
        if response.action == "exclude":
            self.exclude()
        if response.action == "roll back":
            sentence = f"{sentence}; {roll_back(config, learner, self.run, step, finding.what)}"
            extra = {"rollback": len(learner.state.rollbacks), "to": learner.step}
            steps = response.state.skips or (step,)
            size = self.loader.global_batch_size
            positions = np.concatenate([(s + response.state.offset) * size + np.arange(size) for s in steps])
            volumes = volumes or sorted({self.store.rows[row].uri for row in self.loader.indices(positions)})
        verdict = "watch" if response.action in ("skip", "exclude", "watch") else "bad"
        incident = {
            "what": finding.what,
            "verdict": verdict,
            "action": response.action,
            "sentence": f"{finding.sentence}; {sentence}",
        }
        self.metrics.write("incident", step, **incident, volumes=volumes, **extra)
        self.echo(f"step {step}: {told}; {sentence}")
        if response.action == "stop":
            last = self.run.last_checkpoint()
            kept = f"The last checkpoint is {last}" if last else "No checkpoint was written yet"
            raise TrainingError(f"step {step}: {told}; {sentence}. {kept}")
        if response.action != "roll back":
            return False
        # In this order a kill at any moment changes nothing: until the new state is saved, the old one repeats all this.
        self.writer.forget_after(learner.step)
        self.tell_failures(learner.step)
        self.lost = -1  # that was in an abandoned course of training
        self.metrics.rewind(learner.step, len(learner.state.rollbacks))
        self.save()
        return True


def open_metrics(run: RunFolder, learner: Learner, listeners: Sequence[Listener]) -> Metrics:
    """metrics.jsonl and the trackers, on rank 0: one run per job (F10)."""
    config, runtime = learner.config, learner.runtime
    trackers = open_trackers(config.tracking, run.path, config.model_dump(mode="json"), learner.step, runtime.rank)
    if not runtime.leads:
        return Unheard()
    return Metrics(run.metrics, learner.step, len(learner.state.rollbacks), (*trackers, *listeners))


def open_writer(run: RunFolder, learner: Learner, steps_per_epoch: float) -> CheckpointWriter:
    """Rank 0 writes checkpoints; sharded ones are written by all ranks."""
    runtime = learner.runtime
    places, kept = runtime.first(lambda: run.destinations), retention(learner.config, steps_per_epoch)
    if runtime.sharded:
        return CheckpointWriter(places, kept, shards.writer(runtime), tidies=runtime.leads)
    return CheckpointWriter(places if runtime.leads else [], kept)


def retention(config: PretrainConfig, steps_per_epoch: float) -> Retention:
    """The config's wishes in steps."""
    intervals = [config.keep_every_steps, config.keep_every_epochs and config.keep_every_epochs * steps_per_epoch]
    return Retention(config.keep_checkpoints, tuple(float(interval) for interval in intervals if interval))


def second_destination(config: PretrainConfig, run: RunFolder) -> dict[str, str]:
    """A folder of this run's own on the other disk, for run.json."""
    if config.ckpt_second_dir is None:
        return {}
    return {
        "second_destination": str(Path(config.ckpt_second_dir).resolve() / f"{run.path.resolve().name}-{run.key[:8]}")
    }
