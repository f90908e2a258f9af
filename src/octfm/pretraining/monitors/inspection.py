"""Inspection of a finished step: its findings, its row in metrics.jsonl and the line that is printed."""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors import feed, health, monitors
from octfm.pretraining.monitors.measure import Window, train_row
from octfm.pretraining.monitors.summary import StepSummary
from octfm.pretraining.schedule import Schedule
from octfm.pretraining.step import MicroStep
from octfm.run.loop import Session
from octfm.store.loader import Batch, Loader
from octfm.store.store import Store


@dataclass(frozen=True, eq=False)
class FinishedStep:
    """A finished step, as inspections receive it."""

    step: int
    epoch: float
    rows: np.ndarray
    """Store rows of the global batch."""
    batch: Batch
    """This rank's share of it."""
    micro_steps: list[MicroStep]
    rates: dict[str, float]
    """Weight decay, EMA momentum and weight of the context loss, as columns of metrics.jsonl."""
    movement: dict[str, torch.Tensor]
    """What `measure.update` returned; empty if it was not measured."""
    summary: StepSummary


class Inspection:
    """Inspects the steps of one run."""

    def __init__(self, store: Store, learner: Learner, loader: Loader, schedule: Schedule):
        self.store, self.learner, self.schedule, self.config = store, learner, schedule, learner.config
        self.feed = feed.Feed(learner.config, store, loader, learner.runtime)
        self.restart()

    def restart(self) -> None:
        """Forget learning rates and times of steps that a rollback has undone."""
        self._check_rate, self.window = monitors.LearningRate(self.schedule.warmup_steps), Window()

    def _logs(self, step: int) -> bool:
        return step % self.config.log_every_steps == 0 or step + 1 == self.config.steps

    def due(self, step: int) -> bool:
        """Whether features and weights are measured in this step; always if it is logged."""
        return self._logs(step) or step % self.config.health.check_every_steps == 0

    def examine(self, session: Session, finished: FinishedStep) -> monitors.Finding | None:
        """Log what is due, remember what later steps are compared with, and return the fault, if there is one."""
        config, learner, step, summary = self.config, self.learner, finished.step, finished.summary
        lr = float(learner.optimizer.param_groups[0]["lr"])
        finding = self._check_rate(step, lr) or monitors.step_findings(config, learner.state, summary, finished.rows)
        finding = finding or feed.finding(summary.fed, finished.rows)
        row: dict[str, Any] = {}
        # Losses of updates that were not made would widen the limits for the next ones.
        if summary.made:
            learner.state = learner.state.accept(summary.loss, summary.grad_norm, config.health.window)
        if self.due(step) and summary.made:
            scanners = [self.store.rows[i].scanner for i in finished.rows]
            row = train_row(learner, finished.micro_steps, finished.movement, finished.rates["ema"], scanners)
            # The rate as the optimizer has it, not as the schedule says: a difference must show.
            row |= {"lr": lr, **finished.rates, "grad_norm": summary.grad_norm, "epoch": finished.epoch}
            # Exactly 0, or the context encoder sees the answers (F11).
            row |= {"target_gradient": summary.leak} if summary.leak is not None else {}
            finding = finding or monitors.row_findings(config.health, learner.state, row, config.model.width)
            learner.state = learner.state.with_rank(row["effective_rank"])
        self.window.add(finished.batch, learner.runtime.world)
        if self._logs(step) and row:
            row |= self.window.close(learner.runtime)
            session.metrics.write("train", step, **row)
            self._report(session, row | {"step": step, "warmup_steps": self.schedule.warmup_steps})
        return finding

    def _report(self, session: Session, row: dict[str, Any]) -> None:
        """Log the verdicts on a logged step, and print its line."""
        step, config = row["step"], self.config
        for verdict in health.verdicts(row, config.model.width):
            session.metrics.write("health", step, **asdict(verdict))
            if verdict.verdict == "bad":
                session.echo(f"step {step + 1}: {verdict.what}: {verdict.sentence}")
        # The context loss is shown only if training lowers it.
        context = f" and context {row['context_over_baseline']:.3f}" if config.objective.context_loss else ""
        session.echo(
            f"step {step + 1:>6}/{config.steps}  masked {row['masked_over_baseline']:.3f}{context} of baseline  "
            f"rank {row['effective_rank']:5.1f}  lr {row['lr']:.1e}  grad {row['grad_norm']:.2f}  "
            f"{row['volumes_per_s']:.1f} volumes/s  waiting for data {row['data_wait_share']:.0%}"
        )
