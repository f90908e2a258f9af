"""What several test files share: sample files, stores, runs, ranks, servers. Test files never import each other."""

import os
import socket
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
FIXTURES = TESTS / "fixtures"
BENCHMARKS = ROOT / "benchmarks"


def support_process(module: str, *words: object, python: str = sys.executable) -> dict:
    """Arguments for subprocess that run `support.<module>` as a program, on one thread."""
    paths = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    return {"args": [python, "-m", f"support.{module}", *map(str, words)], "env": environment}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
