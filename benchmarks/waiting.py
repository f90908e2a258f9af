"""Wall time of verbs by how their threads wait for each other: `python benchmarks/waiting.py`.

Whole commands on a packaged sample and on streamed phantoms, with as many threads as torch takes: first with the cores
to themselves, then beside one process that is always busy. In the order of the list in every round, so that a machine
that slows down slows each of them. 3000 is what octfm sets (cli/main.py); libgomp's own is 300,000.
"""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator

WAYS = {
    "libgomp's own": {"GOMP_SPINCOUNT": "300000"},
    "3000": {"GOMP_SPINCOUNT": "3000"},
    "passive": {"OMP_WAIT_POLICY": "PASSIVE"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
VERBS = {
    "segment --sample": ["segment", "--sample", "--out", "{out}/table.csv"],
    "pretrain dense": ["pretrain", "dense", "--steps", "12", "--out", "{out}/run"],
}


@contextlib.contextmanager
def neighbour(wanted: bool) -> Iterator[None]:
    """One busy process beside, if wanted."""
    if not wanted:
        yield
        return
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        try:
            yield
        finally:
            busy.kill()


def seconds(words: list[str], way: dict[str, str]) -> float:
    with tempfile.TemporaryDirectory() as out:
        start = time.perf_counter()
        subprocess.run(
            [sys.executable, "-m", "octfm", *(word.format(out=out) for word in words)],
            env={**os.environ, **way},
            check=True,
            capture_output=True,
        )
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    print("| | | " + " | ".join(WAYS) + " |\n| --- | --- |" + " --- |" * len(WAYS))
    for name, words in VERBS.items():
        for busy in (False, True):
            took: dict[str, list[float]] = {way: [] for way in WAYS}
            with neighbour(busy):
                for _ in range(rounds):
                    for way, setting in WAYS.items():
                        took[way].append(seconds(words, setting))
            cells = (f"{statistics.median(each):.1f} ({min(each):.1f} to {max(each):.1f})" for each in took.values())
            print(f"| {name} | {'beside one busy process' if busy else 'idle'} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
