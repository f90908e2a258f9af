"""Runs one of the two programs of `octfm doctor --tpu` as a process of its own, and says in one line how it failed."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from octfm.errors import ConfigError
from octfm.io.isolation import import_path
from octfm.run.memory import host_bytes_available

TASKS = {"tpu_record": "recording the step (torch_xla)", "tpu_compile": "compiling the step (libtpu)"}
OWN_ERROR = re.compile(r"octfm\.errors\.\w+: (.*)")
REASONS = (
    re.compile(r"\w*(Error|Exception)\b|F\d{4} |.*(Check failed|terminate called)"),
    re.compile("Fatal Python error"),
)
"""Lines that tell why a program ended: Python's, abseil's and C++'s own, or else which signal it was. What follows them is where."""
LOST_LIBRARY = re.compile(r"ModuleNotFoundError|ImportError|cannot open shared object")
NO_MEMORY = re.compile(r"\bMemoryError\b|bad_alloc|Cannot allocate memory|can't allocate memory", re.IGNORECASE)
LOCKED = re.compile(r"libtpu_lockfile|already in use by process")


def run(program: str, folder: Path, answer: str, environment: dict[str, str], *words: str) -> str:
    """What a program wrote into the file `answer` of its folder. ConfigError for one that failed, crashed, was killed or had no memory."""
    command = [sys.executable, "-P", "-m", f"octfm.pretraining.preflight.{program}", str(folder), *words]
    # -P and the path: nothing is imported from the current folder. Of a crash in a library, Python says where it was.
    paths = {"PYTHONPATH": os.pathsep.join(import_path()), "PYTHONFAULTHANDLER": "1"}
    environment = os.environ | environment | paths
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
        )
    except OSError as error:
        raise ConfigError(f"--tpu: {TASKS[program]} could not be started: {error}; {_remedy('', str(error))}") from None
    if done.returncode or not (folder / answer).is_file():
        raise failure(program, done.returncode, done.stderr)
    return (folder / answer).read_text()


def failure(program: str, status: int, said: str) -> ConfigError:
    """What to tell of a program that ended with `status` (negative: the signal) and wrote `said` to its standard error, which is kept in a
    file that the error names."""
    lines = said.strip().splitlines()
    own = OWN_ERROR.fullmatch(lines[-1]) if lines else None
    if own:
        return ConfigError(own[1])
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    reasons = (line for reason in REASONS for line in reversed(lines) if reason.match(line))
    why = next(reasons, lines[-1] if lines else "it said nothing")
    with tempfile.NamedTemporaryFile("w", prefix=f"octfm-{program}-", suffix=".log", delete=False) as log:
        log.write(said)
    wording = f"--tpu: {TASKS[program]} ended with {how} and no answer: {why.strip()[:300]}"
    return ConfigError(f"{wording}; {_remedy(how, said)}; all that it said is in {log.name}")


def _remedy(how: str, said: str) -> str:
    if LOCKED.search(said):
        return "another process holds libtpu: wait for it, or delete /tmp/libtpu_lockfile if it was killed"
    if how == "SIGKILL" or NO_MEMORY.search(said):
        free = host_bytes_available() / 1e9
        return f"most likely this machine's memory ran out ({free:.1f} GB are free now): end other programs, or try a smaller slice"
    if LOST_LIBRARY.search(said):
        return "a library is missing or damaged: make the environment anew with `tests/xla/environment.sh .venv-xla`"
    return "try again, and if it ends so again, report it with your config"
