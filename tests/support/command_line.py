"""The octfm command in a process of its own."""

import subprocess
import sys


def octfm_command(*words, cwd):
    done = subprocess.run(
        [sys.executable, "-c", "from octfm.cli.main import main; main()", *map(str, words)],
        capture_output=True,
        text=True,
        cwd=cwd,
    )
    return done.returncode, done.stdout, done.stderr
