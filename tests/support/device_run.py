"""A tiny pretraining run on a device, as torchrun's rank: `python -m support.device_run STORE OUT DEVICE kill|none`.

With `kill` the first attempt ends by SIGKILL in its fifth step.
"""

import os
import sys
from pathlib import Path

import torch

from octfm.store.store import Store
from support.ranks import misbehave
from support.tiny_runs import config, quick_pretrain


def main() -> None:
    store, out, device, fault = sys.argv[1:]
    torch.use_deterministic_algorithms(True)
    if fault == "kill" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        misbehave(0, Path(out), "kill", at=4)
    quick_pretrain(config(), Store.open(store), out, device)


if __name__ == "__main__":
    main()
