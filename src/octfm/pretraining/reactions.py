"""Reactions to findings of monitors and to memory that ran out: exclude volumes, roll back, stop, report."""

from dataclasses import dataclass, replace

import numpy as np

from octfm.errors import OctfmError, TrainingError
from octfm.io.hashing import keyed_hash
from octfm.pretraining.data import Data
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors.monitors import Finding
from octfm.pretraining.monitors.recovery import respond, roll_back
from octfm.run.loop import Session
from octfm.store.loader import Loader


@dataclass(frozen=True, eq=False)
class Reactions:
    """Reactions of a run, the same on all ranks."""

    data: Data
    learner: Learner
    loader: Loader
    key: str
    """Key of the run's hashes."""

    def exclude(self) -> None:
        """Have the loader leave out the volumes that the run's state excludes."""
        if self.learner.state.excluded:
            excluded = set(self.learner.state.excluded)
            self.loader.exclude(row for row in self.data.train_rows if self._hashed(row) in excluded)

    def _hashed(self, row: int) -> str:
        """A volume as the run's state names it: a checkpoint must not reveal acquisitions."""
        return keyed_hash(self.data.store.rows[row].acquisition, self.key)

    def recall_memory(self, session: Session) -> None:
        """Use the noted micro-batch if the job ended because memory ran out after the last checkpoint."""
        learner = self.learner
        noted = learner.runtime.first(session.run.noted_memory)
        if noted is None or noted >= (before := learner.micro_batch):
            return
        learner.state = replace(learner.state, micro_batch=noted)
        self._report_memory(
            session,
            learner.step,
            f"memory ran out before; it goes on with {learner.micro_batch} instead of {before} volumes at a time",
        )

    def report_smaller(self, session: Session, before: int) -> None:
        """Log that memory ran out and the step was computed again in smaller parts than `before`."""
        size = self.learner.micro_batch
        what = f"memory ran out; the step was computed again with {size} instead of {before} volumes at a time"
        self._report_memory(session, self.learner.step, what)

    def _report_memory(self, session: Session, step: int, what: str) -> None:
        batch = self.learner.config.data.global_batch_size
        sentence = f"{what}, the same global batch of {batch} and the same images (F7)"
        facts = {"what": "memory", "verdict": "watch", "action": "smaller micro-batch", "sentence": sentence}
        session.metrics.write("incident", step, **facts, volumes=[])
        session.echo(f"step {step + 1}: {sentence}")

    def act(self, session: Session, step: int, finding: Finding) -> bool:
        """Do what the policy says; True if the run went back a few steps. Raises TrainingError if it must not go on."""
        learner, rows = self.learner, self.data.store.rows
        names = [self._hashed(row) for row in finding.volumes]
        response = respond(learner.config.health, finding, step, learner.state, names, len(self.data.train_rows))
        learner.state = response.state
        volumes = [rows[row].uri for row in finding.volumes]
        what = f"{finding.what}: {finding.sentence}" + (f" ({', '.join(volumes)})" if volumes else "")
        action, sentence, facts, failure = response.action, response.sentence, {}, None
        if action == "exclude":
            self.exclude()
        if action in ("roll back", "stop"):
            # The checkpoint to return to, or to name, may be the one that is still being written.
            session.writer.wait()
        if action == "roll back":
            # The response's state, because rolling back empties the learner's list of skipped steps.
            volumes = volumes or self._volumes_of(response.state.skips or (step,), response.state.offset)
            try:
                sentence = f"{sentence}; {roll_back(learner, session.run, step, finding.what)}"
                facts = {"rollback": len(learner.state.rollbacks), "to": learner.step}
            except OctfmError as error:
                # The run's pages must say why it ended.
                action, failure = "stop", error
                sentence = f"{sentence}; {str(error).removeprefix(f'step {step + 1}: ')}"
        verdict = "watch" if action in ("skip", "exclude", "watch") else "bad"
        incident = {
            "what": finding.what,
            "verdict": verdict,
            "action": action,
            "sentence": f"{finding.sentence}; {sentence}",
        }
        session.metrics.write("incident", step, **incident, volumes=volumes, **facts)
        if failure is None:
            session.echo(f"step {step + 1}: {what}; {sentence}")
        if failure is None and action == "stop":
            last = session.run.last_checkpoint()
            kept = f"The last checkpoint is {last}" if last else "No checkpoint was written yet"
            failure = TrainingError(f"step {step + 1}: {what}; {sentence}. {kept}")
        if failure is not None:
            # Every rank raises it, and rank 0 reports it for all of them.
            failure.elsewhere = not learner.runtime.leads
            raise failure
        if action == "roll back":
            # After the incident is logged: its row has the rollback's number and is kept.
            session.rewind(len(learner.state.rollbacks))
        return action == "roll back"

    def _volumes_of(self, steps: tuple[int, ...], offset: int) -> list[str]:
        """Uris of all volumes in the batches of these steps."""
        size = self.loader.global_batch_size
        positions = np.concatenate([(step + offset) * size + np.arange(size) for step in steps])
        return sorted({self.data.store.rows[row].uri for row in self.loader.indices(positions)})
