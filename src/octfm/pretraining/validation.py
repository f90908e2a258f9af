"""Between two updates: validation loss and online probe, when they are due."""

from functools import partial
from typing import Any

import numpy as np

from octfm.pretraining.monitors import monitors
from octfm.pretraining.monitors.anchor import anchor_row, unseen_row
from octfm.pretraining.monitors.measure import tissue_vectors, validate
from octfm.pretraining.monitors.online_probe import Cases, online_probe
from octfm.pretraining.monitors.sample_picture import sample_picture
from octfm.pretraining.reactions import Reactions
from octfm.run.checkpoint_writer import best_step
from octfm.run.folder import RunFolder
from octfm.run.loop import Session
from octfm.run.tracking import read_metrics


class Validation:
    """Measures a run's networks on participants that they are not trained on."""

    def __init__(self, run: RunFolder, reactions: Reactions, cases: Cases | None):
        self.run, self.reactions, self.cases = run, reactions, cases
        self.data, self.learner = reactions.data, reactions.learner
        self.config, self.runtime = self.learner.config, self.learner.runtime

    def loss(self, session: Session, step: int) -> bool:
        """Validation loss after update `step`, if it is due; False if it is not."""
        store, rows, metrics = self.data.store, self.data.validation_rows, session.metrics
        if not (len(rows) and self.due(self.config.validate_every_steps)):
            return False
        metrics.write("validation", step, **validate(self.learner, store, rows))
        if anchor := anchor_row(self.learner, store, rows):
            metrics.write("anchor", step, **anchor)
            apart = f"separable with AUROC {anchor['domain_auroc']:.3f}" if "domain_auroc" in anchor else "too few"
            far = "segmenter_um" in anchor
            distance = f"; borders in scans {anchor['segmenter_um']:.1f} µm from the packaged network's" if far else ""
            session.echo(
                f"step {step + 1}: scans and phantoms {apart}; layers out of order at "
                f"{anchor['surface_disorder']:.1%} of crossings in scans, {anchor['surface_disorder_phantoms']:.1%} in "
                f"phantoms{distance}"
            )
        if unseen := unseen_row(self.learner, store):
            metrics.write("unseen", step, **unseen)
            session.echo(
                f"step {step + 1}: left-out conditions separable from health with AUROC {unseen['unseen_auroc']:.3f}"
            )
        if advice := self.runtime.first(lambda: monitors.held_out(read_metrics(self.run.metrics))):
            self.reactions.act(session, step, advice)
        if metrics.listeners:
            metrics.picture("masks", step, sample_picture(self.config, store, rows[:4], step))
        return True

    def probe(self, session: Session, step: int) -> bool | None:
        """Probe the encoder after update `step`, if a probe is due then; else None.

        True, on all ranks, if it is the best state so far: its checkpoint is written and kept.
        """
        config, learner, cases = self.config, self.learner, self.cases
        if cases is None or not self.due(config.probe.every_steps or config.ckpt_every_steps):
            return None
        pool, encoder = config.objective.pool, learner.whole().frozen_encoder(config.objective.frozen)
        vectors_of = partial(tissue_vectors, learner, encoder, self.data.store)
        row = online_probe(cases, vectors_of, self.runtime)

        def is_best() -> bool:
            # Scores of vectors that were pooled in another way, or on other labels, are not comparable; nor are those
            # of earlier versions, which chose the penalty by another rule and name no cases.
            alike: dict[str, Any] = {"kind": "probe", "target": cases.target, "pool": pool, "cases": cases.key}
            rows = read_metrics(self.run.metrics)
            # Compared with the best one that was written: a better one may have been lost to a full disk or a kill.
            session.writer.wait()
            best = best_step(self.run.checkpoints)
            # Read before this probe's own row is written.
            before = [float(r["score"]) for r in rows if alike.items() <= r.items() and int(r["step"]) + 1 == best]
            session.metrics.write("probe", step, pool=pool, **row)
            score = f"{row['metric']} {row['score']:.3f} (nearest neighbours {row['knn']:.3f})"
            session.echo(f"step {step + 1}: {cases.target} from frozen features: {score}")
            if best is not None and not before:
                session.echo(
                    f"{self.run.metrics} has no such score of the best checkpoint so far, after step {best}; this one "
                    "counts as the best now"
                )
            return float(row["score"]) >= max(before, default=-np.inf)

        return self.runtime.first(is_best)

    def due(self, every: int) -> bool:
        """Every so many updates, and after the last."""
        return self.learner.step % every == 0 or self.learner.step >= self.config.steps
