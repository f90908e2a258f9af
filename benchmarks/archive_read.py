"""ZIP archives read in place compared with the unpacked tree: CPU time of scanning and reading, as ratios of one run.

    python benchmarks/archive_read.py [--participants 4] [--size 64x496x384] [--repeats 3]

The same phantom files as a tree, stored in one archive per scanner, and deflated in one archive per scanner. Median of
the repeats in one process. The file cache is warm, so that only the cost of the archive shows.
"""

import argparse
import shutil
import statistics
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from octfm.catalog.scan import scan
from octfm.formats import read_volume
from octfm.phantom import write_phantom


def deflated(root: Path, out: Path) -> Path:
    shutil.copytree(root, out)
    for path in out.rglob("*.zip"):
        with (
            zipfile.ZipFile(path) as source,
            zipfile.ZipFile(path.with_suffix(".new"), "w", zipfile.ZIP_DEFLATED) as target,
        ):
            for name in source.namelist():
                target.writestr(name, source.read(name))
        path.with_suffix(".new").replace(path)
    return out


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--participants", type=int, default=4)
    parser.add_argument("--size", default="64x496x384")
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    d, h, w = (int(n) for n in options.size.split("x"))
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        tree = write_phantom(base / "tree", options.participants, 60, size=(d, h, w))
        stored = write_phantom(base / "stored", options.participants, 60, size=(d, h, w), zipped=True)
        roots = {"tree": tree, "stored": stored, "deflated": deflated(stored, base / "deflated")}
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in roots}
        for _ in range(options.repeats + 1):  # the first warms caches and imports
            for name, root in roots.items():
                uris = [a.uri for a in scan(root, workers=1).acquisitions]
                scanning = cpu_seconds(lambda root=root: scan(root, workers=1))
                reading = cpu_seconds(lambda uris=uris: [read_volume(uri) for uri in uris])
                times[name].append((1000 * scanning / len(uris), 1000 * reading / len(uris)))
        medians = {
            name: [statistics.median(column) for column in zip(*rows[1:], strict=True)] for name, rows in times.items()
        }
        for name, (scanning, reading) in medians.items():
            megabytes = (
                sum(path.stat().st_size for path in roots[name].rglob("*") if path.suffix in (".dcm", ".zip")) / 1e6
            )
            ratios = f"{scanning / medians['tree'][0]:.2f} and {reading / medians['tree'][1]:.2f} times the tree"
            print(f"{name:9} scan {scanning:6.1f} ms/file, read {reading:6.1f} ms/file: {ratios}; {megabytes:.0f} MB")


if __name__ == "__main__":
    main()
