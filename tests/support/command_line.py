"""The octfm command, in this process or in one of its own."""

import io
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import typer.main
import typer.testing

from octfm.cli import main as command_line
from octfm.cli.main import app, main

COMMAND = typer.main.get_command(app)
"""typer makes the verbs and their options anew whenever the app is called, which takes longer than most of the tests."""


def octfm_command(*words, cwd):
    """Run the command in a process of its own, for what depends on one: exit code, stdout, stderr."""
    done = subprocess.run(
        [sys.executable, "-c", "from octfm.cli.main import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    return done.returncode, done.stdout, done.stderr


def invoke(*words: object, **settings: Any) -> Any:
    """As typer's CliRunner, with COMMAND: exit code, output, and the exception itself."""
    with mock.patch.object(typer.testing, "_get_command", lambda _: COMMAND):
        return typer.testing.CliRunner().invoke(app, [*map(str, words)], **settings)


def octfm_here(*words: object, cwd: Path) -> tuple[int, str, str]:
    """Run the command in this process, without the seconds that imports take: exit code, stdout, stderr."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.TextIOWrapper(io.BytesIO(), "utf-8")
    code: Any = 0
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with (
        inside(cwd),
        mock.patch.object(command_line, "app", COMMAND),
        mock.patch.object(sys, "argv", ["octfm", *map(str, words)]),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    for stream in (out, err):
        stream.flush()
    return code, out.buffer.getvalue().decode(), err.buffer.getvalue().decode()


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
