"""Several ranks on this machine, for tests: `Ranks` talks to one process that has imported everything and forks the
ranks of each job.

Ranks are processes of their own that find each other over loopback as torchrun's do, without torchrun's seconds of
imports. What torchrun itself adds (restarts, nodes that come and go) is tested with torchrun in test_elastic.py.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from support import free_port, support_process
from support.tiny_runs import import_all_of_a_step
from support.waiting import planted_delay

SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "int": signal.SIGINT}


class Ranks:
    """A process that forks jobs; of another environment's `python` where it is named."""

    def __init__(self, python: str = sys.executable) -> None:
        self._server = subprocess.Popen(
            **support_process("ranks", python=python), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def close(self) -> None:
        assert self._server.stdin is not None
        self._server.stdin.close()
        self._server.wait()

    def __call__(self, world: int, store: Path, out: Path, settings: dict[str, Any], **plan: Any) -> list["Ended"]:
        """How each rank ended. `plan` names a fault: `at` a step, `on` a rank; see `misbehave`.

        `to` is the address of a run in a bucket, `out` then names the notes that ranks leave on the disk; `environment`
        is that of all ranks, or a list with one for each. After `kill_after` seconds the ranks of `killed` get a
        SIGKILL, whatever they are at. `preflight` and `override` are as for pretrain. With `command` its words are those
        of octfm, and settings are not used. With `task` the settings are those of finetune or segment, `kill` and `term`
        are the only faults, and with `apart` rank N has <out>-N, as on hosts that share no disk.

        """
        said = out.with_name(f"{out.name}.said-{time.time_ns()}")
        job = {
            "world": world,
            "store": str(store),
            "out": str(out),
            "settings": settings,
            "plan": plan,
            "said": str(said),
        }
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps(job) + "\n")
        self._server.stdin.flush()
        ended = json.loads(self._server.stdout.readline())
        return [Ended(code, cpu_s, Path(f"{said}-{rank}").read_text()) for rank, (code, cpu_s) in enumerate(ended)]


class Ended:
    """Exit code (negative: the signal), seconds of CPU, and everything the rank said, an error last."""

    def __init__(self, code: int, cpu_s: float, said: str):
        self.code, self.cpu_s, self.said = code, cpu_s, said

    def __repr__(self) -> str:
        return f"<ended with {self.code}: {self.said[-1500:]}>"


def serve() -> None:
    # Imported once, before forking: also what only sharded checkpoints and tables need, for which every rank would take
    # a second.
    import pyarrow.parquet  # noqa: F401
    import torch.distributed.checkpoint  # noqa: F401

    with suppress(ImportError):  # by pyarrow, where it is installed
        import pandas  # noqa: F401
    from octfm.pretraining import pretrain  # noqa: F401
    from octfm.store import phantoms  # noqa: F401
    from octfm.tasks import finetune, segment_score  # noqa: F401

    import_all_of_a_step()
    os.fsync = os.fstat  # as in conftest.py
    # A collection in a child would write into every object, and so copy the pages of all that was imported.
    gc.collect()
    gc.freeze()
    for line in sys.stdin:
        job = json.loads(line)
        port = free_port()
        patience, killed = job["plan"].pop("kill_after", None), job["plan"].pop("killed", [])
        children = [_fork(job, rank, port) for rank in range(job["world"])]
        if patience is not None:
            planted_delay(patience)
            for rank in killed:
                os.kill(children[rank], signal.SIGKILL)  # one that has ended already is a zombie until it is waited for
        ended = [os.wait4(pid, 0) for pid in children]
        print(
            json.dumps(
                [(os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime) for _, status, used in ended]
            ),
            flush=True,
        )


def _fork(job: dict[str, Any], rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        sys.stdin.close()
        said = os.open(f"{job['said']}-{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(said, 1)
        os.dup2(said, 2)
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": job["world"], "LOCAL_WORLD_SIZE": job["world"]}
        own = job["plan"].pop("environment", {})
        os.environ.update(own[rank] if isinstance(own, list) else own)
        if job["world"] > 1:
            os.environ.update(
                {name: str(value) for name, value in names.items()}
                | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            )
        code = _ended(job, rank)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def _ended(job: dict[str, Any], rank: int) -> int:
    from octfm.errors import OctfmError, Preempted

    try:
        (_task if "task" in job["plan"] else _pretrain)(job, rank)
    except Preempted as error:
        print(error)
        return 75
    except OctfmError as error:
        print(f"{type(error).__name__}: {error}{' (elsewhere)' if error.elsewhere else ''}")
        return 1
    return 0


def _pretrain(job: dict[str, Any], rank: int) -> None:
    from octfm.pretraining import pretrain as loop
    from octfm.pretraining.settings import PretrainConfig
    from octfm.store.store import Store

    if not job["plan"].pop("preflight", False):
        loop.preflight.checks = lambda *_, **__: []  # what the doctor says of these runs is tested elsewhere
    plan = job["plan"]
    override, to, command = plan.pop("override", False), plan.pop("to", job["out"]), plan.pop("command", None)
    misbehave(rank, Path(job["out"]), **plan)
    if command:
        from octfm.cli.main import main

        sys.argv = ["octfm", *command]
        main()
    settings, store = PretrainConfig.model_validate(job["settings"]), Store.open(job["store"])
    loop.pretrain(settings, store, to, "cpu", echo=print, override=override)


def _task(job: dict[str, Any], rank: int) -> None:
    from octfm.tasks.finetune import finetune
    from octfm.tasks.finetune_settings import FinetuneConfig
    from octfm.tasks.segment_score import segment
    from octfm.tasks.segment_settings import SegmentConfig
    from support.signals import signal_in

    plan = job["plan"]
    config, do = (FinetuneConfig, finetune) if plan["task"] == "finetune" else (SegmentConfig, segment)
    settings, out = config.model_validate(job["settings"]), f"{job['out']}-{rank}" if plan.get("apart") else job["out"]
    with signal_in(plan["task"], plan["fault"], plan["at"]) if plan.get("on") == rank else nullcontext():
        do(settings, out, "cpu", echo=print)


def misbehave(
    rank: int,
    out: Path,
    fault: str | None = None,
    at: int = 0,
    on: int = 0,
    until: int | None = None,
    nap: float = 600,
    most: int = 1,
) -> None:
    """Plant a fault in step `at` of rank `on`: kill, kill-all, term, int, sleep, inf, nan, drift, wrong-rank, other-order or
    other-store.

    memory: from that step on, there is some for `most` volumes at a time. kill-saving: at the operation number `at`
    of saving.
    """
    from octfm.pretraining import pretrain as loop
    from octfm.pretraining import step as passes
    from octfm.store.loader import Loader

    accumulate, make_inputs, positions = loop.accumulate, passes.make_inputs, Loader.positions
    failed: list[int] = []

    def faulty(learner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        step = learner.step + learner.state.offset
        with Path(f"{out}.positions-{rank}").open("a") as file:
            file.write(json.dumps([learner.step, batch.position.tolist(), batch.index.tolist()]) + "\n")
        here = rank == on and (step == at or (until is not None and at <= step < until))
        if (here and fault in SIGNALS) or (fault == "kill-all" and step == at):
            os.kill(os.getpid(), SIGNALS.get(fault, signal.SIGKILL))
        if here and fault == "sleep":
            planted_delay(nap)
        done = accumulate(learner, batch, *args, **kwargs)
        if here and fault == "inf":
            learner.runtime.local(learner.decayed[1].grad).view(-1)[:1] = float("inf")
        if here and fault == "drift":
            learner.decayed[1].data.view(-1)[0] += 1.0
        return done

    def short(config: Any, preprocessing: Any, runtime: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = make_inputs(config, preprocessing, runtime, batch, *args, **kwargs)
        if (
            fault == "memory"
            and rank == on
            and len(batch) > most
            and int(batch.position[0]) >= at * config.data.global_batch_size
        ):
            raise MemoryError("no more memory on this rank")
        if (
            fault == "nan"
            and int(batch.position[0]) // config.data.global_batch_size in range(at, until or at + 1)
            and rank == on
            and not failed
        ):
            failed.append(1)
            view = inputs.views[0]
            view.patches_BKP[0, 0] = view.target_patches_BKP[0, 0] = float("nan")
        return inputs

    loop.accumulate, passes.make_inputs = faulty, short
    if fault == "kill-saving" and rank == on:
        die_while_saving(at)
    if fault == "wrong-rank":
        Loader.positions = lambda self, step: (
            positions(self, step) % (self.global_batch_size // self.world) + step * self.global_batch_size
        )
    if fault == "other-order" and rank == on:
        indices = Loader.indices
        Loader.indices = lambda self, places: indices(
            self, places + (places >= at * self.global_batch_size) * len(self.rows)
        )
    if fault == "other-store" and rank == on:
        loop.volumes_digest = lambda store, rows: "f" * 64


def die_while_saving(operation: int) -> None:
    """SIGKILL at the n-th write, flush to disk, hash or renaming of saving, sharded or not, counted over this
    process and its threads."""
    from torch.distributed.checkpoint import filesystem

    from octfm.run import shards, weights_file

    left = [operation]

    def fatal(function):
        def counted(*args, **kwargs):
            left[0] -= 1
            if left[0] <= 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*args, **kwargs)

        return counted

    weights_file.Sink.write = fatal(weights_file.Sink.write)
    filesystem._write_item = fatal(filesystem._write_item)
    shards.hash_file, shards.shutil.rmtree = fatal(shards.hash_file), fatal(shards.shutil.rmtree)
    os.fsync = fatal(os.fsync)


def codes(ended):
    return [rank.code for rank in ended]


if __name__ == "__main__":
    serve()
