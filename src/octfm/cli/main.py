"""The octfm command: its list of verbs, and how errors become one line and an exit code."""

import atexit
import errno
import io
import locale
import os
import re
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from octfm.addresses import mask
from octfm.cli.data import phantom, prepare, scan
from octfm.cli.evaluation import finetune, leaderboard, probe, trust
from octfm.cli.layers import agree, models, segment
from octfm.cli.options import Alone, Verb, Verbs
from octfm.cli.report import card, compare, report, view
from octfm.cli.training import bench, demo, doctor, plan, pretrain, watch
from octfm.cli.use import embed, export
from octfm.errors import ConfigError, OctfmError, Preempted, one_line, shown
from octfm.io.cores import available_cores, bound_cores
from octfm.io.ranks import rank
from octfm.version import __version__

# Some versions of typer contain a copy of click, others import click; the base class of BadParameter is right for both.
UsageError: Any = typer.BadParameter.__bases__[0]

app = typer.Typer(
    name="octfm",
    cls=Verbs,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="Self-supervised pretraining on 3-D retinal OCT: from DICOM, vendor and image files to an evaluated encoder. "
    "To begin: octfm segment --sample, then octfm demo --quick.",
)
# In the order of `octfm --help`. Verbs import what they call inside the function, so that the help appears at once.
VERBS = (
    *(demo, phantom, scan, prepare),
    *(plan, doctor, pretrain, bench, watch),
    *(embed, export),
    *(probe, finetune, leaderboard, trust, segment, models, agree),
    *(report, compare, view, card),
)
REPEATS_AFTER_S = 10.0
"""Seconds after which other ranks of a host report an error, in case only they have it."""
SPINS = "3000"
"""How often a thread of torch looks for work before it sleeps. libgomp's default of 300,000 occupies a core that
another process could use: next to a busy process `octfm segment` took 35 s with it instead of 25, alone 14 instead of
15 (benchmarks/waiting.py)."""
REPEATED_S = 1.0
"""A signal that follows another one so soon is most likely the same one, passed on by a shell, make or systemd."""
RAISE_LIMIT = (
    "raise the limit of processes or files (ulimit -u, ulimit -n, or that of the container), or choose fewer workers, "
    "and run the same command again"
)
USE_LESS = "choose smaller sizes or fewer workers"
RANKED = (pretrain, finetune)
"""Verbs whose ranks share the work."""
for verb in VERBS:
    app.command(cls=Verb if verb in RANKED else Alone)(verb)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"octfm {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of octfm itself."""


def main() -> None:
    """Run the command line. Exits with 0, or with a code and one line on stderr.

    1: a problem the user can act on; 2: wrong usage; 75: a run that was stopped and has saved; 130: interrupted. Any
    other exception is a bug of octfm and keeps its traceback.

    torchrun turns every exit code but 0 into 1. Therefore one rank per host also writes 75 to the file that
    OCTFM_EXIT_FILE names. Under launch/torchrun.sh it writes the code of a mistake in the settings as well, and ranks
    then exit with 0, because torchrun would otherwise start them again (--max-restarts), to the same error.
    """
    _open_streams()
    if not sys.flags.utf8_mode and locale.getencoding().lower() != "utf-8":
        # Start again as in a UTF-8 locale; in others, file names that are not ASCII would be decoded wrongly.
        os.environ["PYTHONUTF8"] = "1"
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    # Processes started by libraries must not import modules from the current folder, which may hold anyone's files.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    if "OMP_WAIT_POLICY" not in os.environ:  # read by libgomp when torch is imported
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    if (cores := available_cores()) < bound_cores():
        # torch starts a thread per core that it may run on, though a container may have the time of fewer: all of its
        # threads then pause until the next period.
        os.environ.setdefault("OMP_NUM_THREADS", str(cores))
    first, exit_file = os.environ.get("LOCAL_RANK", "0") == "0", os.environ.get("OCTFM_EXIT_FILE")
    if first and exit_file:
        Path(exit_file).unlink(missing_ok=True)
    by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    _heed_signals(by_torchrun)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # file names need not be valid text
    code, message = _run()
    if message and code in (1, 2) and by_torchrun and not first:
        # The first rank of this host most likely reports the same; torchrun then ends this rank before it repeats it.
        last = time.monotonic() + REPEATS_AFTER_S
        while time.monotonic() < last and not _is_settled(exit_file):
            time.sleep(0.1)
    if code == 75 and first and exit_file:
        Path(exit_file).write_text("75\n", "utf-8")
    if _is_settled(exit_file):
        code, message = 0, message if first else ""
    if message:
        with suppress(BrokenPipeError):
            sys.stderr.write(f"octfm: {one_line(mask(message))}\n")
    for number, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except BrokenPipeError:  # Python would try again as it ends, and then change the exit code
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
    sys.exit(code)


def _heed_signals(by_torchrun: bool) -> None:
    """Let Ctrl-C, SIGTERM and SIGHUP (the terminal is gone) end a verb alike, with nothing half-written; a training
    notes the signal instead, and saves. Later signals do not disturb that, unless a person loses patience."""
    # torchrun sends SIGTERM to the other ranks when one fails; they have nothing to add.
    heeded = (signal.SIGINT,) if by_torchrun else (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    first: list[float] = []

    def interrupt(number: int, _: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            raise KeyboardInterrupt
        if number != signal.SIGHUP and time.monotonic() - first[0] > REPEATED_S:
            os._exit(130)

    for number in heeded:
        if signal.getsignal(number) != signal.SIG_IGN:  # as SIGHUP is under nohup
            signal.signal(number, interrupt)
            # Python ends with the system's handlers, which would change the exit code. Registered first, it runs last.
            atexit.register(signal.signal, number, signal.SIG_IGN)


def _open_streams() -> None:
    """Put the null device where a process was started without stdin, stdout or stderr (`2>&-`). Else the next file that
    is opened gets that number, and what a library prints goes into it; and children do not start. A terminal
    may be closed later (`_Terminal`)."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free, which is this one.
            null = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "w" if number else "r", encoding="utf-8", closefd=False))
        stream = getattr(sys, name)
        if number and isinstance(stream, io.TextIOWrapper) and stream.isatty():
            terminal, at_once = _Terminal(number, "w", closefd=False), stream.write_through  # python -u
            output: Any = terminal if at_once else io.BufferedWriter(terminal)
            lines = io.TextIOWrapper(output, stream.encoding, line_buffering=True, write_through=at_once)
            setattr(sys, name, lines)


class _Terminal(io.FileIO):
    """A terminal. If it is closed while the command goes on in the background (`disown`), further lines are lost."""

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            return memoryview(data).nbytes


def _settle(code: int) -> int:
    """Pass the code of a mistake in the settings to the launcher; only on a single host, because others may not have
    it."""
    # Only to launch/torchrun.sh: another launcher would take the run for finished.
    exit_file = os.environ.get("OCTFM_EXIT_FILE") if "OCTFM_LAUNCHER" in os.environ else None
    if exit_file and os.environ.get("LOCAL_RANK") == "0" and os.environ.get("GROUP_WORLD_SIZE") == "1":
        Path(exit_file).write_text(f"{code}\n", "utf-8")
    return code


def _is_settled(exit_file: str | None) -> bool:
    with suppress(OSError):
        return exit_file is not None and Path(exit_file).read_text("utf-8").strip() in ("1", "2")
    return False


def _system_error(error: OSError) -> str:
    # Files are written under a temporary name; users know only the final one.
    temporary = r"(^|/)\.([^/]+?)((\.\d+\.[0-9a-f]{8})?\.partial|\.lock)(?=/|$)"
    name = re.sub(temporary, r"\1\2", str(error.filename or ""))
    path = f"{name}: " if name else ""
    if isinstance(error, FileNotFoundError):
        if not name and error.strerror and "temporary directory" in error.strerror:  # Python's words; torch needs one
            return f"{error.strerror}; free space in one, or name a writable folder in TMPDIR"
        if not name and not _has_current_folder():
            return "the current folder has been deleted; cd into another one, and run the same command again"
        return f"{path}no such file or folder; check the path"
    if isinstance(error, PermissionError):
        return f"{path}permission denied; change the permissions, or choose another path"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return f"{path}expected a folder, got a file; choose another path"
    if error.errno == errno.ENOSPC:
        return f"{path}no space left on this disk; free some or choose another --out, and run the same command again"
    if error.errno == errno.ENOMEM:
        return f"{path}out of memory: {error.strerror}; {USE_LESS}"
    if error.errno in (errno.EAGAIN, errno.EMFILE, errno.ENFILE):
        return f"{path}{error.strerror}; {RAISE_LIMIT}"
    return f"{path}{error.strerror or error}; fix this, or choose another path, and run the same command again"


def _has_current_folder() -> bool:
    """Whether the current folder exists."""
    with suppress(FileNotFoundError):
        return Path.cwd().exists()
    return False


def _run() -> tuple[int, str]:
    """Exit code and the last line for stderr, empty if there is nothing to add or another rank prints it."""
    try:
        code = app(prog_name="octfm", standalone_mode=False) or 0
        return code, "interrupted; the same command continues" if code == 130 else ""
    except UsageError as error:
        if not sys.argv[1:]:
            error.show()  # plain `octfm` prints the help; there is no mistake to explain
            return 2, ""
        verb = sys.argv[1] if sys.argv[1] in {verb.__name__ for verb in VERBS} else ""
        # For a wrong choice, typer prints the class of the error.
        reason = error.format_message().rstrip(".?").replace("Value error, ", "")
        if setting := re.match(r"No such option:? '?--(\w+(\.\w+)+)", reason):
            reason = f"--{setting[1]} is no option; settings are written {setting[1]}=VALUE"
        return _settle(2), f"{verb}: {reason}; try octfm {verb} --help" if verb else f"{reason}; try octfm --help"
    except SystemExit as end:
        if not isinstance(end.__context__, BrokenPipeError):  # typer ends with that in silence
            raise
        return 1, "stopped, as its output is read no further; send it to a file, and run the same command again"
    except Preempted as error:
        return 75, str(error) if rank() == 0 else ""
    except ConfigError as error:
        return _settle(1), "" if error.elsewhere else str(error)
    except OctfmError as error:
        return 1, "" if error.elsewhere else str(error)
    except OSError as error:
        # A full disk, a folder without permission, a file in place of a folder: the system names the path and reason.
        return 1, _system_error(error)
    except UnicodeEncodeError as error:
        return 1, f"{shown(error.object)}: expected text, got bytes that are not UTF-8 ({error.reason}); rename it"
    except MemoryError as error:
        return 1, f"out of memory: {str(error) or 'the system refused more'}; {USE_LESS}"
    except (KeyboardInterrupt, typer.Abort):  # the second is a RuntimeError
        return 130, "interrupted; the same command continues"
    except RuntimeError as error:
        if str(error) == "can't start new thread":  # Python's words where a system has no more processes to give
            return 1, f"the system starts no further thread; {RAISE_LIMIT}"
        from octfm.run.memory import ran_out_of_memory

        if not ran_out_of_memory(error):
            raise
        return 1, f"out of memory: {str(error).rstrip('.')}; {USE_LESS}"
