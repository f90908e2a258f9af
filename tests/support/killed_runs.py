"""A run that is killed again and again: `python -m support.killed_runs STORE OUT STEPS KILLS SAVES SEED`, for
tests/test_exact_resume.py.

Every attempt is a process of its own that trains into OUT and gets a SIGKILL: from outside after a random time, or,
for SAVES of them, from inside at a random write, flush or rename of a checkpoint. The last attempt may finish.
Prints how each attempt ended. Processes are forked from one that has imported everything but started no thread, so
that fifty of them take a minute.
"""

import os
import random
import signal
import sys
import time

from octfm.pretraining.settings import PretrainConfig
from octfm.run import shards, weights_file
from octfm.store.store import Store
from support.tiny_runs import TINY, import_all_of_a_step, quick_pretrain
from support.waiting import planted_delay


def main() -> None:
    store, out, (steps, kills, saves, seed) = sys.argv[1], sys.argv[2], map(int, sys.argv[3:])
    SETTINGS["steps"] = steps
    rng = random.Random(seed)
    plan = ["save"] * saves + ["time"] * (kills - saves)
    rng.shuffle(plan)
    import_all_of_a_step()
    start = time.perf_counter()
    os.waitpid(attempt_in_child(store, f"{out}.first", None), 0)
    # Long enough to get somewhere at times, short enough that the run is not finished before its last kill.
    patience = 2.5 * (time.perf_counter() - start) / max(2, kills)
    for kind in plan:
        pid = attempt_in_child(store, out, rng.randrange(1, 150) if kind == "save" else None)
        if kind == "time":
            planted_delay(rng.uniform(0, 0.5 + patience))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        print(
            kind, "killed" if os.WIFSIGNALED(status) else f"ended with {os.waitstatus_to_exitcode(status)}", flush=True
        )
    pid = attempt_in_child(store, out, None)
    print("last", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


def attempt_in_child(store: str, out: str, fatal_operation: int | None) -> int:
    pid = os.fork()
    if pid:
        return pid
    if fatal_operation is not None:
        die_while_saving(fatal_operation)
    try:
        settings = PretrainConfig.model_validate(TINY | SETTINGS)
        quick_pretrain(settings, Store.open(store), out, "cpu", echo=lambda _: None)
    except BaseException as error:
        print("error", type(error).__name__, error, flush=True)
        os._exit(1)
    os._exit(0)


SETTINGS = {
    "steps": 30,
    "ckpt_every_steps": 3,
    "validate_every_steps": 10,
    "model": {**TINY["model"], "width": 24, "heads": 2},
}


def die_while_saving(operation: int) -> None:
    """SIGKILL at the n-th write, flush to disk, hash or renaming of saving, sharded or not, counted over this
    process and its threads."""
    left = [operation]

    def fatal(function):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    from torch.distributed.checkpoint import filesystem

    weights_file.Sink.write = fatal(weights_file.Sink.write)
    filesystem._write_item = fatal(filesystem._write_item)
    shards.hash_file, shards.shutil.rmtree = fatal(shards.hash_file), fatal(shards.shutil.rmtree)
    os.fsync = fatal(os.fsync)


if __name__ == "__main__":
    main()
