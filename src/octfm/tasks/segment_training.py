"""The training of `octfm segment`: the segmenter of the encoder and those of the baselines, one after the other."""

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np

from octfm.config import load
from octfm.run.folder import Kind
from octfm.run.loop import Interruption, Session
from octfm.run.tracking import TrackingConfig
from octfm.tasks.segment import Fit
from octfm.tasks.segment_settings import SegmentConfig
from octfm.version import __version__

# Not even max_cache_gb may change: tokens that are kept are rounded, and others are not.
SEGMENTATION = Kind("segment", frozenset(), lambda settings, _: load(SegmentConfig, settings))


class Segmentations:
    """A training of run/loop.py: `config.steps` updates of the pretrained segmenter, then as many of the next."""

    tracking = TrackingConfig()

    def __init__(self, fits: dict[str, Fit]):
        self.fits, self.names = fits, list(fits)
        self.segmenter = fits[self.names[0]].segmenter
        self.config, self.runtime = self.segmenter.config, self.segmenter.runtime
        self.frozen = {} if self.segmenter.learns else {"frozen_encoder": self.segmenter.encoder.digest}
        self.step, self.steps = 0, len(fits) * self.config.steps
        self.losses: deque[float] = deque(maxlen=20)

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    def update(self, session: Session, interruption: Interruption) -> str | None:
        name = self.names[self.step // self.config.steps]
        fit, step = self.fits[name], self.step % self.config.steps
        session.waiting.for_("the device")
        if step == 0:
            session.echo(f"{name}: {len(fit.truth)} training volumes")
            fit.begin()
        self.losses.append(fit.update(step))
        session.metrics.write("train", self.step, segmenter=name, loss=self.losses[-1])
        self.step += 1
        if self._fifth():
            session.echo(f"step {step + 1:>5}/{self.config.steps}  loss {np.mean(self.losses):.3f}")
        if step + 1 == self.config.steps:  # the next segmenter has tokens of its own
            fit.forget()
            self.losses.clear()
        return interruption.signal_name

    def recover(self, session: Session) -> bool:
        return False

    def validate(self, session: Session) -> bool:
        """Whether to write a checkpoint: after every fifth of a segmenter's updates.

        Nothing is scored here: scores are for test participants, and come last.
        """
        return self._fifth() or self.finished

    def _fifth(self) -> bool:
        """Whether another fifth of a segmenter's updates is made."""
        # Segmenters are trained one after the other, each for config.steps updates.
        step = (self.step - 1) % self.config.steps + 1
        return step % max(1, self.config.steps // 5) == 0 or step == self.config.steps

    def content(self) -> dict[str, Any]:
        """All that `load_segmenter` needs except the pretraining run; to resume, also baselines and optimizer."""
        # Rounded up, so that the segmenter in training counts.
        begun = -(-self.step // self.config.steps)
        current = None if self.step % self.config.steps == 0 else self.fits[self.names[begun - 1]].segmenter
        baselines = {name: self.fits[name].segmenter.weights() for name in self.names[1:begun]}
        encoder = self.segmenter.encoder
        return {
            "model": self.segmenter.weights(),
            "optimizer": current.optimizer.state_dict() if current is not None else {},
            "state": {"tokens": self.segmenter.tokens, "baselines": baselines},
            "config": self.config.model_dump(mode="json"),
            "preprocessing": encoder.preprocessing.model_dump(mode="json"),
            "fingerprint": encoder.fingerprint,
            **self.frozen,
            "participants": {"key": "", "hashes": []},
            "octfm": __version__,
        }

    def restore(self, content: dict[str, Any] | None, source: Path) -> None:
        assert content is not None, "one process segments"
        self.step = content["step"]
        # The first segmenter is trained, or it is the one in training; the optimizer is that of the last one begun.
        self.segmenter.load_weights(content["model"])
        # Checkpoints up to version 0.1 hold the first segmenter, fully trained, and no baselines.
        for name, tensors in content["state"].get("baselines", {}).items():
            if name in self.fits:
                self.fits[name].segmenter.load_weights(tensors)
        if content["optimizer"] and not self.finished:
            name = self.names[self.step // self.config.steps]
            self.fits[name].segmenter.optimizer.load_state_dict(content["optimizer"])
