"""`python -m octfm` and `torchrun -m octfm`."""

import os
import sys
from contextlib import suppress

# Python has put the current folder first, where modules of strangers may lie; the command `octfm` never has it there.
with suppress(FileNotFoundError):  # the current folder has been deleted; Python has then put none first
    if not sys.flags.safe_path and sys.path[:1] == [os.getcwd()]:  # noqa: PTH109
        del sys.path[0]

from octfm.cli import run

run()
