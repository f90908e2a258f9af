"""How fast prepared volumes come off a warm local disk: `python benchmarks/store_read.py [--threads 2] [--volumes 64]`.

Writes a store of random voxels at full size into a temporary folder, once uncompressed and once zstd, reads it back in random order and
prints volumes per second. Random bytes do not compress, so zstd is also tried on voxels whose noise has 4 bits. The aim (issue C) is
>= 500 volumes/s uncompressed and >= 120 volumes/s zstd on 2 threads. "reused" reads into the same memory, "fresh" into newly allocated
memory, "loader" is `Loader.batches` with reading ahead, "memcpy" is what numpy needs to copy the same bytes in this very run: the ceiling.
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import numpy as np

from octfm.data.loader import Loader
from octfm.data.preprocessing import Prepared, Preprocessing
from octfm.data.store import Arrays, Store, StoreRow
from octfm.data.store_writer import StoreWriter, stage
from octfm.data.transform import Transform


def write(path: Path, volumes: int, compression, bits: int) -> tuple[Store, float]:
    settings = Preprocessing()
    d, h, w = settings.image_size
    rng = np.random.default_rng(0)
    valid = np.stack([np.zeros((d, w), np.int16), np.full((d, w), h, np.int16)])
    band = np.cumsum(rng.standard_normal((2, d, w)), axis=-1).astype(np.float32) / 10 + np.array([100, 200], np.float32)[:, None, None]
    transform = Transform((d, h, w), settings.target_spacing, (d, h, w), (0, 0, 0), (1, 1, 1), (0.0,) * d, False, False)
    spent = 0.0
    with StoreWriter(path, settings, compression) as writer:
        for number in range(volumes):
            voxels = rng.integers(0, 2**bits, (d, h, w), dtype=np.uint8)
            start = time.perf_counter()
            digest = stage(Prepared(voxels, band, valid, True, {}, transform), writer.staging, str(number), writer.compression)
            words = {"uri": "", "eye_id": "", "laterality": None, "scanner": "random", "protocol": "", "split": "train"}
            row = StoreRow(
                index=-1,
                acquisition=str(number),
                participant=str(number),
                participant_labels={},
                flags=(),
                confident=True,
                confidence={},
                transform=transform.to_dict(),
                checksum=digest,
                **words,
            )
            writer.append(row, str(number))
            spent += time.perf_counter() - start
    return Store.open(path), spent / volumes


def rate(read, volumes: int, batch: int, seconds: float) -> tuple[float, float, float]:
    """Volumes per second, mean over the time and of the best pass, and milliseconds of CPU per volume, over all threads."""
    rng = np.random.default_rng(1)
    read(np.arange(batch))
    size = volumes // batch * batch
    passes, began, cpu = [], time.perf_counter(), time.process_time()
    while time.perf_counter() - began < seconds or len(passes) < 2:
        order = rng.permutation(volumes)
        start = time.perf_counter()
        for first in range(0, size, batch):
            read(order[first : first + batch])
        passes.append(time.perf_counter() - start)
    return size / float(np.mean(passes)), size / min(passes), 1000 * (time.process_time() - cpu) / (size * len(passes))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--threads", type=int, default=2)
    options.add_argument("--volumes", type=int, default=64)
    options.add_argument("--batch", type=int, default=8)
    options.add_argument("--seconds", type=float, default=4, help="per figure")
    asked = options.parse_args()
    shape = list(Preprocessing().image_size)
    print(f"{asked.volumes} volumes of {shape} uint8, batches of {asked.batch}, {asked.threads} threads, warm cache")
    print(
        f"{'store':16s}{'way':8s}{'mean':>7s}{'best':>7s}{'CPU ms':>9s}   volumes/s, and CPU per volume, which a busy machine changes less"
    )
    for compression, bits in (("none", 8), ("zstd", 8), ("zstd", 4)):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder) / "store", compression, bits, asked)


def measure(path: Path, compression, bits: int, asked: argparse.Namespace) -> None:
    store, seconds = write(path, asked.volumes, compression, bits)
    store = Store.open(path, threads=asked.threads)
    size = sum(p.stat().st_size for p in (path / "voxels").glob("c.*")) / asked.volumes / np.prod(store.image_size)
    out = Arrays.empty(asked.batch, store.image_size)
    source = np.ones_like(out.voxels)
    steps = itertools.count()
    with Loader(store, range(asked.volumes), asked.batch, seed=0) as loader:
        ways = {
            "memcpy": lambda index: np.copyto(out.voxels, source),
            "reused": lambda index: store.read(index, out=out),
            "fresh": store.read,
            "loader": lambda index: loader.batches(next(steps)),
        }
        for name, read in ways.items():
            mean, best, cpu = rate(read, asked.volumes, asked.batch, asked.seconds)
            print(f"{f'{compression} {bits} bit':16s}{name:8s}{mean:7.0f}{best:7.0f}{cpu:9.2f}", flush=True)
    print(f"{'':16s}written at {1 / seconds:.0f} volumes/s by one process, checksum and fsync included; {size:.2f} of the raw size")


if __name__ == "__main__":
    main()
