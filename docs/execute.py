"""Runs the commands of a page and puts what they print under them: `python docs/execute.py docs/guide/tour.md`.

In a page, ```console blocks hold lines that begin with "$ " (commands) and what they printed; ```python blocks with
title="NAME" are files that the commands use. Everything runs in one new folder, in order; a command that fails stops
the page.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRESS = re.compile(r"[\d,]+ of [\d,]+ \w+, .* min left")
"""Lines whose number depends on how busy the machine is; left out."""
FORECAST = re.compile(r"^preflight(?: WARN)?: forecast: .*\n", re.M)
"""The doctor warns, with other words and before the checks that passed, where reading happens to be slower than the
forecast step: both are timed, for milliseconds."""
BLOCK = re.compile(r"^```(console|python title=\"(?P<name>[\w.]+)\")\n(?P<body>.*?)^```$", re.S | re.M)


def execute(text: str, folder: Path) -> str:
    """The page with what its commands print now."""

    def run(block: re.Match) -> str:
        if block["name"]:
            (folder / block["name"]).write_text(block["body"])
            return block[0]
        commands = [line[2:] for line in block["body"].splitlines() if line.startswith("$ ")]
        return "```console\n" + "".join(f"$ {command}\n{printed(command, folder)}" for command in commands) + "```"

    return BLOCK.sub(run, text)


def printed(command: str, folder: Path) -> str:
    """What a command prints, on both streams, without the folder's own name and progress. Raises RuntimeError where it
    fails."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    source = str(Path(__file__).parent.parent / "src")
    environment = os.environ | {"PATH": path, "PYTHONPATH": source, "COLUMNS": "120", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"$ {command}\n{done.stdout}")
    lines = done.stdout.replace(f"{folder}/", "").replace(str(folder), ".").rstrip().splitlines()
    return "".join(f"{line.rstrip()}\n" for line in lines if not PROGRESS.search(line))


def shape(text: str) -> str:
    """A page without its numbers, units of time and the forecast, which differ between machines."""
    plain = re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?", "N", FORECAST.sub("", text))
    return re.sub(r" +", " ", re.sub(r"\bN (ms|s|min)\b", "N s", plain))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("page", type=Path)
    page = parser.parse_args().page
    with tempfile.TemporaryDirectory() as temporary:
        page.write_text(execute(page.read_text(), Path(temporary)))
