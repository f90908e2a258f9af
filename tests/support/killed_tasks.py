"""One fine-tuning or segmentation that sends itself a signal; `python -m support.killed_tasks finetune|segment SETTINGS
OUT STEP` kills it before that update."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from octfm.tasks import finetune as tuning
from octfm.tasks import segment_score
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.segment_settings import SegmentConfig


@contextmanager
def signal_in(verb: str, name: str, step: int) -> Iterator[None]:
    """This process sends itself that signal before that update of the verb."""
    training: Any = tuning.FineTuning if verb == "finetune" else segment_score.Segmentations
    update = training.update

    def signalled(self: Any, *rest: Any) -> str | None:
        if self.step == step:
            os.kill(os.getpid(), signal.Signals[name])
        return update(self, *rest)

    with mock.patch.object(training, "update", signalled):
        yield


def main() -> None:
    verb, settings, out, step = sys.argv[1:]
    with signal_in(verb, "SIGKILL", int(step)):
        if verb == "finetune":
            tuning.finetune(FinetuneConfig(**json.loads(settings)), out, "cpu", echo=print)
        else:
            segment_score.segment(SegmentConfig(**json.loads(settings)), out, "cpu", echo=print)


if __name__ == "__main__":
    main()
