"""Loader throughput of a prepared store: `OMP_NUM_THREADS=1 python benchmarks/loader.py [--threads 2] [--usual]`.

Full-size phantoms in an uncompressed and a zstd store. Aims, warm, on 2 threads: at least 500 volumes/s uncompressed
and 120 volumes/s zstd, and 20 times the usual way (usual_way.py; `--usual`, needs `pip install octfm[bench]`), which is
timed in the same run, in one process, on uncompressed DICOM files of a Cirrus cube.

loader: `Loader.batches` with reading ahead. reused: reads into the same memory. cold: reads after the store's pages
were dropped from the file cache. memcpy: numpy copying the same number of bytes. CPU time per volume, over all threads,
is reported because load on the machine changes it less.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

from octfm.store.layout import Arrays, StoreRow
from octfm.store.loader import Loader
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from octfm.volume.preprocessing import Prepared, Preprocessing

WORDS = {"uri": "", "eye_id": "", "laterality": None, "scanner": "phantom", "protocol": "", "split": "train"}


def write(
    path: Path, prepared: list[Prepared], volumes: int, compression, preprocessing: Preprocessing | None = None
) -> Store:
    with StoreWriter(path, preprocessing or Preprocessing(), compression) as writer:
        for number in range(volumes):
            one = prepared[number % len(prepared)]
            # A few phantoms, each shifted differently, so that no two volumes are identical.
            digest = stage(
                replace(one, voxels=np.roll(one.voxels, number, axis=2)),
                writer.staging,
                str(number),
                writer.compression,
                writer.crc,
            )
            row = StoreRow(
                index=-1,
                acquisition=str(number),
                participant=str(number),
                participant_labels={},
                flags=(),
                confident=True,
                confidence={},
                transform=one.transform.to_dict(),
                checksum=digest,
                **WORDS,
            )
            writer.append(row, str(number))
    return Store.open(path)


def rate(read, volumes: int, batch: int, seconds: float, before=lambda: None) -> tuple[float, float, float]:
    """Volumes/s (median and best of the passes) and CPU ms per volume over all threads; `before` is not timed."""
    rng = np.random.default_rng(1)
    read(np.arange(batch))
    size = volumes // batch * batch
    passes, cpu, began = [], [], time.perf_counter()
    while time.perf_counter() - began < seconds or len(passes) < 3:
        order = rng.permutation(volumes)
        before()
        start, used = time.perf_counter(), time.process_time()
        for first in range(0, size, batch):
            read(order[first : first + batch])
        passes.append(time.perf_counter() - start)
        cpu.append(time.process_time() - used)
    return size / statistics.median(passes), size / min(passes), 1000 * statistics.median(cpu) / size


def forget(path: Path) -> None:
    """Drop the store's pages from the file cache; its writer has synced them to disk."""
    for file in (path / "voxels").iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--volumes", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=4, help="per figure")
    parser.add_argument("--usual", action="store_true", help="compare with the usual way, too")
    asked = parser.parse_args()
    from octfm.phantom import phantom_volume
    from usual_way import need_monai

    if asked.usual:
        need_monai()
    preprocessing = Preprocessing()
    prepared = [
        preprocessing(phantom_volume(seed, scanner="topcon_maestro2", size=(64, 442, 512))[0]) for seed in (1, 2)
    ]
    usual = usual_seconds(preprocessing) if asked.usual else None
    print(
        f"{asked.volumes} volumes of {list(preprocessing.image_size)} uint8, batches of {asked.batch}, "
        f"{asked.threads} threads"
    )
    print(f"{'store':10s}{'way':8s}{'median':>8s}{'best':>7s}{'CPU ms':>9s}")
    for compression in ("none", "zstd"):
        with tempfile.TemporaryDirectory() as folder:
            measure(Path(folder) / "store", prepared, compression, asked, usual)


def usual_seconds(preprocessing: Preprocessing) -> tuple[float, float]:
    """Wall and CPU seconds per volume, median of three."""
    from octfm.phantom import phantom_volume
    from prepare import save
    from usual_way import usual_way

    volume = phantom_volume(3, scanner="zeiss_cirrus", size=(128, 1024, 512))[0]
    times = []
    with tempfile.TemporaryDirectory() as folder:
        path = save(Path(folder) / "cirrus.dcm", volume)
        for _ in range(4):
            wall, cpu = time.perf_counter(), time.process_time()
            usual_way(path, volume.spacing_mm, preprocessing)
            times.append((time.perf_counter() - wall, time.process_time() - cpu))
    wall, cpu = (statistics.median(column) for column in zip(*times[1:], strict=True))
    print(f"the usual way: {1 / wall:.2f} volumes/s by one process, {1000 * cpu:.0f} ms of CPU per volume")
    return wall, cpu


def measure(
    path: Path, prepared: list[Prepared], compression, asked: argparse.Namespace, usual: tuple[float, float] | None
) -> None:
    write(path, prepared, asked.volumes, compression)
    store = Store.open(path, threads=asked.threads)
    size = sum(p.stat().st_size for p in (path / "voxels").glob("c.*")) / asked.volumes / np.prod(store.image_size)
    out = Arrays.empty(asked.batch, store.image_size)
    source = np.ones_like(out.voxels)
    steps = itertools.count()
    with Loader(store, range(asked.volumes), asked.batch, seed=0) as loader:
        ways = {
            "memcpy": (lambda index: np.copyto(out.voxels, source), lambda: None),
            "reused": (lambda index: store.read(index, out=out), lambda: None),
            "loader": (lambda index: loader.batches(next(steps)), lambda: None),
            "cold": (lambda index: store.read(index, out=out), lambda: forget(path)),
        }
        for name, (read, before) in ways.items():
            median, best, cpu = rate(read, asked.volumes, asked.batch, asked.seconds, before)
            ratio = (
                f"   {median * usual[0]:.0f} times the usual way, {1000 * usual[1] / cpu:.0f} by CPU time"
                if usual
                else ""
            )
            ratio = ratio if name in ("loader", "cold") else ""
            print(f"{compression:10s}{name:8s}{median:8.0f}{best:7.0f}{cpu:9.2f}{ratio}", flush=True)
    print(f"{'':18s}{size:.2f} of the raw size")


if __name__ == "__main__":
    main()
