"""One fine-tuning or segmentation that sends itself a signal: `python -m support.stopped_tasks finetune|segment
SETTINGS OUT SIGNAL STEP`.

Exits like the command: 0, or 75 after a signal that was obeyed.
"""

import json
import os
import signal
import sys
from typing import Any

from octfm.errors import Preempted
from octfm.tasks import finetune as tuning
from octfm.tasks import segment_score
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.segment_settings import SegmentConfig


def main() -> None:
    verb, settings, out, name, step = sys.argv[1:]
    training: Any = tuning.FineTuning if verb == "finetune" else segment_score.Segmentations
    update = training.update

    def signalled(self: Any, *rest: Any) -> str | None:
        if self.step == int(step):
            os.kill(os.getpid(), signal.Signals[name])
        return update(self, *rest)

    training.update = signalled
    try:
        if verb == "finetune":
            tuning.finetune(FinetuneConfig(**json.loads(settings)), out, "cpu", echo=print)
        else:
            segment_score.segment(SegmentConfig(**json.loads(settings)), out, "cpu", echo=print)
    except Preempted as error:
        print(error)
        sys.exit(75)


if __name__ == "__main__":
    main()
