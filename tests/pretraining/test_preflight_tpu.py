"""`octfm doctor --tpu` without its libraries: what is tried after a step that does not fit, and what is said of a
program that crashes. The compiler's answers are invented here; those of libtpu itself are tested in
tests/xla/test_tpu.py."""

import sys
import tempfile
from pathlib import Path
from shlex import quote as quoted

import pytest

from octfm.cli.main import main
from octfm.errors import ConfigError
from octfm.pretraining.preflight import tpu
from octfm.pretraining.settings import PretrainConfig
from octfm.volume.preprocessing import Preprocessing

FITS = tpu.Compiled(arguments=2**30, temporaries=2**31, seconds=60.0)
CONFIG = PretrainConfig.model_validate(
    {
        "data": {"global_batch_size": 96, "per_device_batch_size": 6},
        "model": {"activation_checkpointing": False},
        "masks": {"budget": None},
    }
)
TRIED = [
    "data.per_device_batch_size=3",
    "data.per_device_batch_size=1",
    "data.per_device_batch_size=1 model.activation_checkpointing=true",
    "data.per_device_batch_size=1 model.activation_checkpointing=true masks.budget=3072",
]


@pytest.fixture
def answers(monkeypatch):
    """Answers of the compiler, the configs that it was asked for, and what the user read."""

    def give(*troubles: str | None, config: PretrainConfig = CONFIG):
        left, asked, read = list(troubles), [], []

        def compile_step(config, preprocessing, slice_):
            asked.append(config)
            trouble = left.pop(0)
            return FITS if trouble is None else tpu.Compiled(trouble=trouble)

        monkeypatch.setattr(tpu, "slice_of", tpu.SLICES.__getitem__)
        monkeypatch.setattr(tpu, "compile_step", compile_step)
        found = tpu.examine(config, Preprocessing(), "v4-32", read.append)
        assert left == [], "the search asked for less than it was given"
        return found[-1], asked, read[1:]

    return give


def test_a_step_that_fits_is_the_only_one_that_is_compiled(answers):
    check, asked, read = answers(None)
    assert (
        check.status == "PASS" and check.measured.startswith("3.00 of 30.75 GiB") and asked == [CONFIG] and read == []
    )


def test_the_advice_is_the_first_smaller_step_that_fits(answers):
    check, asked, read = answers("needs 60", "needs 40", "needs 35", None)
    assert (check.status, check.measured) == ("FAIL", "needs 60"), "what is measured is the step that was asked about"
    assert check.advice.startswith(f"{TRIED[2]} fits: 3.00 of 30.75 GiB")
    assert read == [f"needs {n}; trying {words}" for n, words in zip((60, 40, 35), TRIED, strict=False)]
    assert [(c.data.per_device_batch_size, c.model.activation_checkpointing, c.masks.budget) for c in asked] == [
        (6, False, None), (3, False, None), (1, False, None), (1, True, None),
    ]  # fmt: skip


def test_a_search_that_finds_nothing_ends_with_the_last_answer(answers):
    check, asked, read = answers("needs 60", "needs 40", "needs 35", "needs 34", "needs 33")
    assert len(asked) == 5 and asked[-1].masks.budget == tpu.BUDGET and read[-1] == f"needs 34; trying {TRIED[3]}"
    assert (check.status, check.measured) == ("FAIL", "needs 60")
    assert check.advice.startswith(f"nothing tried fits, {TRIED[3]} last (needs 33): choose a smaller model.width")


def test_no_attempt_is_reported_if_nothing_smaller_is_left(answers):
    check, asked, read = answers("needs 60", config=smallest())
    assert len(asked) == 1 and read == [] and check.advice.startswith("choose a smaller model.width")


def smallest() -> PretrainConfig:
    return list(tpu.smaller_steps(CONFIG, Preprocessing()))[-1][1]


def test_whitened_targets_are_refused_with_xla_before_loading_libraries():
    config = PretrainConfig.model_validate({"objective": {"target_norm": "whiten"}})
    with pytest.raises(ConfigError, match=r"xla_spmd compiles every step: .* \(vjepa2: target_norm=layer\)"):
        tpu.examine(config, Preprocessing(), "v4-32", print)


GOOD = {
    "tpu_record": "write('arguments.json', '{}')",
    "tpu_compile": 'write(\'compiled.json\', \'{"arguments": 1, "temporaries": 2, "results": 3, "seconds": 4.0}\')',
}
KILLED = "print('E1122 warm.cc:7] slow', file=sys.stderr, flush=True); os.kill(os.getpid(), 9)"
ABORTED = "print('F1122 10:00 plan.cc:7] Check failed: n > 0\\n@ 0x7f libtpu.so', file=sys.stderr); os.abort()"
CRASHES = {
    "killed": (KILLED, ("SIGKILL", "memory ran out", "GB are free now")),
    "no memory": ("bytearray(10**18)", ("exit status 1", "MemoryError", "memory ran out")),
    "no library": (
        "import libtpu_of_another_world",
        ("No module named 'libtpu_of_another_world'", "tests/xla/environment.sh .venv-xla"),
    ),
    "locked": (
        "raise RuntimeError('The TPU is already in use by process 7')",
        ("in use by process 7", "delete /tmp/libtpu_lockfile"),
    ),
    "segmentation fault": (
        "import signal; os.kill(os.getpid(), signal.SIGSEGV)",
        ("SIGSEGV", "Fatal Python error: Segmentation fault"),
    ),
    "aborted": (ABORTED, ("SIGABRT", "plan.cc:7] Check failed: n > 0", "try again")),
    "no such operator": ("raise KeyError('aten::new')", ("exit status 1", "KeyError: 'aten::new'", "report it")),
    "silent": ("os._exit(3)", ("exit status 3", "it printed nothing")),
    "no answer": ("print('{}')", ("exit status 0 and no result",)),
}


@pytest.fixture
def programs(monkeypatch, tmp_path):
    """Programs that take the place of the two that need libraries: this Python code, with `write` for an answer."""

    def give(**codes: str) -> None:
        script = "#!/bin/sh\n" + "".join(
            f"case $3 in *.{name}) code={quoted(code)};; esac\n" for name, code in (GOOD | codes).items()
        )
        start = "import os, sys; from pathlib import Path; write = lambda name, text: (Path(sys.argv[1]) / name).write_text(text)\n"
        (tmp_path / "python").write_text(script + f'exec {sys.executable} -c {quoted(start)}"$code" "$4"\n')
        (tmp_path / "python").chmod(0o755)
        monkeypatch.setattr(tpu.sys, "executable", str(tmp_path / "python"))
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    return give


def compile_step() -> tpu.Compiled:
    return tpu.compile_step(CONFIG, Preprocessing(), tpu.SLICES["v4-32"])


def test_answers_go_from_the_programs_to_the_doctor(programs):
    programs()
    assert compile_step() == tpu.Compiled(1, 2, 3, 4.0)


@pytest.mark.parametrize("crash, program", [("killed", "tpu_record"), *((crash, "tpu_compile") for crash in CRASHES)])
def test_a_program_that_crashes_is_one_line_with_what_to_do(programs, tmp_path, program, crash):
    code, words = CRASHES[crash]
    programs(**{program: code})
    with pytest.raises(ConfigError) as caught:
        compile_step()
    told = str(caught.value)
    task = {"tpu_record": "recording the step (torch_xla)", "tpu_compile": "compiling the step (libtpu)"}[program]
    assert (
        "\n" not in told
        and "Traceback" not in told
        and told.startswith(f"--tpu: {task} ")
        and all(word in told for word in words)
    )
    log = Path(told.rpartition(" is in ")[2])
    assert log.parent == tmp_path and not list(tmp_path.glob("octfm-tpu-*")), (
        "what the program said is kept, its working folder is not"
    )
    assert bool(log.read_text()) == (crash not in ("silent", "no answer"))


def test_an_error_of_octfm_itself_is_told_as_it_is(programs):
    programs(
        tpu_record="from octfm.errors import ConfigError; raise ConfigError('masks.budget: expected 8 or more, got 3; raise it')"
    )
    with pytest.raises(ConfigError, match=r"^masks.budget: expected 8 or more, got 3; raise it$"):
        compile_step()


def test_a_program_that_cannot_be_started_is_one_line(monkeypatch, tmp_path):
    monkeypatch.setattr(tpu.sys, "executable", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match=r"recording the step .* could not be started: .*No such file"):
        compile_step()


def test_the_command_line_says_it_without_a_traceback(monkeypatch, programs, capsys):
    programs(tpu_compile=KILLED)
    monkeypatch.setattr(tpu, "slice_of", tpu.SLICES.__getitem__)
    monkeypatch.setattr("sys.argv", ["octfm", "doctor", "vit_s", "data.per_device_batch_size=1", "--tpu", "v4-32"])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr().err
    assert ended.value.code == 1 and told.count("\n") == 1
    assert told.startswith("octfm: --tpu: compiling the step (libtpu) ended with SIGKILL and no result")
