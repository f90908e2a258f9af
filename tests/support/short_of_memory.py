"""Trains under an allocation limit: `python -m support.short_of_memory STORE OUT [BYTES]`, for tests/pretraining/test_memory.py.

From the first step on the process may allocate BYTES more than it has (RLIMIT_AS, so malloc itself fails). Without
BYTES there is no limit, and what the steps needed is printed.

The passes of every size are made once before: oneDNN keeps the code that it compiles for each shape, 30 MB for each
size of micro-batch on a processor with AVX-512, and ends the process where it finds no room for it.
"""

import resource
import sys
from dataclasses import replace
from pathlib import Path

from octfm.pretraining import pretrain as loop
from octfm.pretraining.settings import PretrainConfig
from octfm.store.store import Store
from support.tiny_runs import TINY

SETTINGS = {
    "steps": 2,
    "data": {"global_batch_size": 32, "per_device_batch_size": 32, "prefetch": 0},
    "model": {"patch_size": [2, 8, 8], "width": 192, "depth": 4, "heads": 3},
    "masks": {"budget": 128},
    "ckpt_every_steps": 100,
}


def size(name: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def main() -> None:
    store, out, allowed = sys.argv[1], sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else None
    accumulate, before = loop.accumulate, []

    def limited(learner, *args, **kwargs):
        if not before:
            state = learner.state
            for volumes in (1, 2, 4, 8, 16, 32):
                learner.state = replace(state, micro_batch=volumes)
                accumulate(learner, *args, **kwargs)
            learner.state = state
            before.append(size("VmSize"))
            if allowed is not None:
                resource.setrlimit(resource.RLIMIT_AS, (before[0] + allowed, resource.getrlimit(resource.RLIMIT_AS)[1]))
        return accumulate(learner, *args, **kwargs)

    loop.accumulate = limited
    loop.pretrain(PretrainConfig.model_validate(TINY | SETTINGS), Store.open(store), out, "cpu")
    print("needed", size("VmPeak") - before[0])


if __name__ == "__main__":
    main()
