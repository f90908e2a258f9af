"""A file that crashes, hangs or swallows memory costs itself and nothing else; every other comes out as if it had
not been there."""

import copy
import errno
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from octfm.catalog.catalog import Catalog, NothingAccepted
from octfm.catalog.scan import scan
from octfm.errors import ConfigError
from octfm.formats.dicom.geometry import NotRaster
from octfm.formats.reasons import REASONS
from octfm.io import isolation
from octfm.io.isolation import Limits, Lost, each, import_path, release
from octfm.io.spread import spread
from octfm.models.token_map import TooFewTokens
from support.dicom_files import write_oct_dicom
from support.hostile_folder import executed, octfm, plant
from support.misbehaving import children_in_a_worker, fail, misbehave, raise_or_return, run, shout, slowly, spin, who
from support.waiting import wait_until

SHORT = Limits(seconds=2)


@pytest.mark.parametrize(
    ("how", "code", "seen"),
    [
        ("crash", "decoder_crashed", "SIGSEGV"),
        ("abort", "decoder_crashed", "SIGABRT"),
        ("exit", "decoder_crashed", "exit status 3"),
        ("sleep", "decoder_timeout", "1 s"),
        ("spin", "decoder_timeout", "1 s"),
        ("swallow", "decoder_memory", "2 GB"),
        ("answer at length", "decoder_memory", "2 GB"),
        ("swallow natively", "decoder_crashed", "SIGSEGV"),
    ],
)
def test_what_ends_a_child_costs_one_item(how, code, seen):
    before, lost, after = run(misbehave, ["a", how, "b"])
    assert (before, after) == ("A", "B")
    assert lost == Lost(code, lost.what) and seen in lost.what and code in REASONS


def test_children_serve_many_files_with_one_thread_and_without_torch():
    import torch  # noqa: F401  (that the parent has it must not matter)

    found = run(who, range(3)) + run(who, range(3))
    assert len({pid for pid, _, _ in found}) == 1 and found[0][0] != os.getpid()
    assert "torch" not in found[-1][1] and found[0][2] == "1"


def test_requests_with_other_limits_do_not_end_each_others_children():
    limits = [Limits(seconds=60, memory=memory) for memory in (2 * 10**9, 3 * 10**9)] * 2
    pids = [pid for limit in limits for pid, _, _ in each(who, [0], limit, lambda _: 60)]
    assert pids[:2] == pids[2:] and pids[0] != pids[1]


def test_the_child_that_is_kept_is_the_one_used_last():
    """One with limits that nobody needs any more would be kept for good, and every prepare would start a child."""
    other, own = (Limits(seconds=60, memory=memory) for memory in (3 * 10**9, 2 * 10**9))
    _, (before, *_) = (found for limit in (other, own) for found in each(who, [0], limit, lambda _: 60))
    release(keep=1)
    ((after, *_),) = each(who, [0], own, lambda _: 60)
    assert after == before


def test_children_that_ended_while_idle_do_not_stay_as_zombies():
    release()
    at_once = [each(who, range(2), SHORT, lambda _: 60) for _ in range(2)]
    for found in (*zip(*at_once, strict=True),):  # each borrows a child of its own
        assert len(found) == 2
    ended, _ = isolation._idle
    ended.idle_since -= isolation.IDLE_S
    run(who, [0])
    assert ended.ended
    assert ended not in isolation._idle


def test_a_child_learns_what_was_set_after_it_started(monkeypatch):
    """Credentials of a bucket, for one."""
    run(os.getenv, ["OCTFM_TEST"])
    monkeypatch.setenv("OCTFM_TEST", "new")
    assert run(os.getenv, ["OCTFM_TEST"]) == ["new"]


def test_what_decoders_print_does_not_end_among_the_results():
    assert run(shout, ["x" * 100_000, "y"]) == ["x" * 100_000, "y"]


def test_an_uncaught_error_stops_the_run_as_without_children():
    with pytest.raises(KeyError, match="7"):
        run(fail, [7])


@pytest.mark.parametrize("how", ["raise", "raise in parts", "yield"])
def test_a_child_whose_function_raised_answers_the_next_request_with_its_own_results(how):
    """A refused file costs no new process, which takes half a second."""
    (_, pid) = run(raise_or_return, ["a"])[0]
    with pytest.raises((KeyError, RuntimeError)):
        run(raise_or_return, ["b", how, "c", "d"])
    assert run(raise_or_return, ["e", "f"]) == [("e", pid), ("f", pid)]


def test_a_second_ctrl_c_does_not_leave_a_child_at_work_to_answer_the_next_request(monkeypatch):
    def press(child):
        raise KeyboardInterrupt

    answers = each(slowly, range(4), SHORT, lambda _: 60)
    next(answers)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(isolation._Child, "kill", press)
        answers.throw(KeyboardInterrupt)
    assert run(str.upper, ["a", "b"]) == ["A", "B"]


@pytest.mark.parametrize(
    ("ends", "said"),
    [
        ("os.kill(os.getpid(), 9)", "memory runs out; free memory"),
        ("os._exit(3)", "exit status 3; see the lines above"),
    ],
)
def test_a_child_that_ends_as_it_starts_is_named_with_advice_that_helps(monkeypatch, ends, said):
    """One that was killed has printed nothing, and there were no lines above."""
    monkeypatch.setattr(isolation, "_START", f"import os; {ends}")
    with pytest.raises(ConfigError, match=said):
        isolation._Child(2**30)


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (errno.EAGAIN, "ulimit -u"),
        (errno.EMFILE, "ulimit -n"),
        (errno.ENOMEM, "; free memory"),
        (errno.ENOENT, "reinst"),
    ],
)
def test_a_child_that_the_system_refuses_is_not_taken_for_an_error_of_writing(monkeypatch, number, said):
    """octfm prepare said that writing the store had failed."""

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(subprocess, "Popen", refuse)
    with pytest.raises(ConfigError, match=f"did not start: {os.strerror(number)}.*{said}"):
        isolation._Child(2**30)


def test_a_child_that_may_start_no_thread_says_so_without_a_traceback(monkeypatch, capfd):
    refused = 'import threading\ndef refuse(*_): raise RuntimeError("can\'t start new thread")\n'
    refused += "threading._start_new_thread = refuse"
    monkeypatch.setattr(isolation, "_START", f"{refused}\n{isolation._START}")
    with pytest.raises(ConfigError, match="did not start: can't start new thread; raise the limit"):
        isolation._Child(2**30)
    assert not capfd.readouterr().err


def test_a_child_leaves_it_to_its_parent_what_a_signal_to_the_whole_group_ends():
    """As when a terminal is closed, or a scheduler ends a job: files at work became rejects of a decoder that crashed."""
    assert run(signal.raise_signal, [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]) == [None] * 3


def test_ctrl_c_while_a_child_starts_prints_no_traceback(monkeypatch, capfd):
    release()  # idle children of other tests have started already
    # The handler of a terminal: in a job of the background children inherit that SIGINT is ignored.
    pressed = "import os, signal as s; s.signal(s.SIGINT, s.default_int_handler); os.kill(os.getpid(), s.SIGINT)"
    monkeypatch.setattr(isolation, "_START", f"{pressed}\n{isolation._START}")
    assert run(str.upper, ["a"]) == ["A"]
    assert "Traceback" not in capfd.readouterr().err
    release()


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_results_come_in_the_order_of_the_items(workers):
    assert list(spread(slowly, range(8), lambda item, lost: -1, workers=workers, chunk=1)) == list(range(8))


@pytest.mark.parametrize("workers", [-1, 1.5, float("nan"), "2"])
def test_workers_that_are_no_number_of_processes_are_refused(workers):
    with pytest.raises(ConfigError, match="workers: expected a whole number, 0 to work in this process, or None"):
        next(spread(slowly, range(8), lambda item, lost: -1, workers=workers))


SCRIPT = """
import os, sys
from octfm.io.isolation import Limits, each
def pid(_):  # a function of the script itself, which has no main guard
    return os.getpid()
print(*each(pid, [1, 2], Limits(), lambda _: 10.0), flush=True)
import signal
signal.pause()
"""


def test_a_script_without_a_main_guard_and_its_death(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    with subprocess.Popen([sys.executable, tmp_path / "script.py"], stdout=subprocess.PIPE, text=True) as process:
        one, other = map(int, process.stdout.readline().split())
        assert one == other != process.pid
        process.send_signal(signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{one}").exists(), "a child does not outlive its parent", 20)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_workers_of_any_start_method_may_have_children(method):
    """As the workers of a cluster do: daemons, which multiprocessing forbids children."""
    import multiprocessing

    with multiprocessing.get_context(method).Pool(1) as pool:
        before, lost, after = pool.apply(children_in_a_worker)
    assert (before, lost.code, after) == ("A", "decoder_crashed", "B")


HOOK = """
import ctypes, signal
import octfm.formats as readers
from octfm.formats import detect
def spoil(honest):
    def read(uri, *args, **settings):
        if "crash" in str(uri):
            ctypes.string_at(0)
        if "hang" in str(uri):
            signal.pause()
        return honest(uri, *args, **settings)
    return read
for place, name in ((detect, "examine"), (readers, "read_header"), (readers, "read_volume")):
    setattr(place, name, spoil(getattr(place, name)))
"""


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_scan_survives_a_reader_that_crashes_and_names_the_file(tmp_path, monkeypatch, workers):
    """The reader crashes for real, in the child only: the interpreter of the child runs this hook when it starts."""
    for name in ("a", "crash", "hang", "z"):
        write_oct_dicom(
            tmp_path / "tree" / f"{name}.dcm",
            np.random.default_rng(0).integers(0, 255, (4, 64, 48), np.uint8),
            (0.5, 0.01, 0.1),
        )
    (tmp_path / "hook").mkdir()
    (tmp_path / "hook" / "sitecustomize.py").write_text(HOOK)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'hook'}:{os.environ.get('PYTHONPATH', '')}")
    catalog = scan(tmp_path / "tree", workers=workers, limits=SHORT)
    assert [Path(a.uri).stem for a in catalog.acquisitions] == ["a", "z"]
    assert {(Path(r.uri).stem, r.code) for r in catalog.rejects} == {
        ("crash", "decoder_crashed"),
        ("hang", "decoder_timeout"),
    }
    assert all(r.uri in r.sentence and r.bytes > 0 and r.fix for r in catalog.rejects)
    # A file that is accepted by its header and crashes when it is decoded costs its picture on the page.
    from octfm.report.data_health import _pictures

    assert list(
        spread(
            _pictures, [("crash.dcm", (0.5, 0.01, 0.1), "zeiss_cirrus")], lambda _, lost: lost.code, workers=1, chunk=1
        )
    ) == ["decoder_crashed"]


def test_a_large_volume_has_more_time_and_a_bucket_too():
    limits = Limits()
    assert limits.deadline(0) == 10 and limits.deadline(512 * 1024 * 512) > 250
    assert limits.deadline(0, "s3://clinic/a.dcm") > limits.deadline(0, "/clinic/a.dcm")


def test_waiting_for_a_core_is_no_fault_of_the_file():
    """More children than cores, each busy for most of its limit: on a crowded machine they would all be late by the
    clock."""
    busy = 3 * (os.cpu_count() or 1)
    results = list(
        spread(spin, [0.3] * busy, lambda item, lost: lost.code, workers=busy, limits=Limits(seconds=0.8), chunk=1)
    )
    assert results == ["done"] * busy


def test_released_children_are_gone():
    (pid, _, _), *_ = run(who, [1])
    release()
    assert not Path(f"/proc/{pid}").exists()


def test_the_command_runs_no_module_that_lies_beside_the_scans(tmp_path):
    """One of every name that Python, octfm or a library imports, in the current folder and in that of the scans."""
    folder = plant(tmp_path / "hostile")
    scans = plant(folder / "scans")
    voxels, spacing_mm = np.random.default_rng(0).integers(0, 255, (8, 64, 48), dtype=np.uint8), (0.12, 0.0039, 0.0115)
    write_oct_dicom(scans / "a.dcm", voxels, spacing_mm)
    for words in (
        ("scan", "scans", "--pixels"),
        ("view", "scans/a.dcm"),
    ):
        done = octfm(folder, *words)
        assert done.returncode == 0, done.stderr
    assert executed(folder) == executed(scans) == []


@pytest.mark.parametrize("entry", ["", ".", "scans/.."])
def test_an_entry_of_PYTHONPATH_that_means_here_is_not_for_children(tmp_path, monkeypatch, entry):
    monkeypatch.chdir(plant(tmp_path / "hostile"))
    monkeypatch.setenv("PYTHONPATH", f"{entry}:{tmp_path}")
    monkeypatch.setattr(sys, "path", ["", entry, str(Path.cwd()), *sys.path])
    assert run(misbehave, ["a"]) == ["A"] and executed(Path.cwd()) == []
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))
    assert str(Path.cwd()) in import_path(), "named in full, it is meant"


def test_phantoms_are_rendered_without_modules_of_the_current_folder(tmp_path, monkeypatch):
    from octfm.phantom import write_phantom

    monkeypatch.chdir(plant(tmp_path / "hostile"))
    write_phantom(tmp_path / "clinic", 2, 0, size=(4, 64, 32), workers=2)
    assert executed(Path.cwd()) == []


@pytest.mark.slow
def test_the_tpu_programs_import_nothing_from_the_current_folder(tmp_path, monkeypatch):
    from octfm.pretraining.preflight import tpu

    monkeypatch.chdir(plant(tmp_path / "hostile"))
    with pytest.raises(ConfigError):
        tpu.run("tpu_record", tmp_path, "answer", {})  # it is given nothing to do
    assert executed(Path.cwd()) == []


def test_a_function_of_a_module_that_lies_here_is_named(tmp_path, monkeypatch):
    """As of a notebook, whose folder children do not import from."""
    (tmp_path / "my_own_reader.py").write_text("def read(item):\n    return item\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend("")
    import my_own_reader  # pyright: ignore[reportMissingImports]

    with pytest.raises(ConfigError, match=r"my_own_reader.*PYTHONPATH"):
        run(my_own_reader.read, [1])
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert run(my_own_reader.read, [1]) == [1]


@pytest.mark.slow
def test_no_verb_that_starts_children_runs_a_module_beside_the_scans(tmp_path):
    folder = plant(tmp_path / "hostile")
    verbs = (
        ("phantom", "clinic", "--participants", "6", "--size", "8x64x48", "--workers", "2"),
        ("scan", "clinic", "--workers", "2", "--pixels"),
        ("prepare", "catalog", "image_size=[16,128,128]", "target_spacing=[0.375,0.0156,0.047]", "--workers", "2"),
        ("pretrain", "smoke_test", "data.store=prepared", "--smoke", "--device", "cpu"),
        ("embed", "runs/run", "--files", "clinic", "--out", "vectors", "--device", "cpu"),
        ("report", "runs/run", "--catalog", "catalog"),
    )
    for words in verbs:
        done = octfm(folder, *words)
        assert done.returncode == 0, (words, done.stderr)
        assert executed(folder) == [], words


@pytest.mark.parametrize(
    "error", [NotRaster("line", "a line"), NothingAccepted("none", Catalog("", (), ())), TooFewTokens("3 tokens")]
)
def test_errors_with_facts_of_their_own_travel_between_processes(error):
    """A pool in which users read or scan was broken by them, and nobody learned why."""
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error) and str(other) == str(error) and vars(other) == vars(error)
