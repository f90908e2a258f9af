"""A fine-tuning or segmentation that sends itself a signal."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from octfm.tasks import finetune as tuning
from octfm.tasks import segment_score


@contextmanager
def signal_in(verb: str, name: str, step: int) -> Iterator[None]:
    """This process sends itself SIGTERM or SIGKILL, named term or kill, before that update of the verb."""
    training: Any = tuning.FineTuning if verb == "finetune" else segment_score.Segmentations
    update = training.update

    def signalled(self: Any, *rest: Any) -> str | None:
        if self.step == step:
            os.kill(os.getpid(), signal.Signals[f"SIG{name.upper()}"])
        return update(self, *rest)

    with mock.patch.object(training, "update", signalled):
        yield
