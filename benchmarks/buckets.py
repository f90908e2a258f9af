"""Loader throughput from a cold disk and from a bucket: `python benchmarks/buckets.py [--volumes 16]`.

The same zstd store of full-size phantoms lies on the local disk and in an S3 server on loopback, in a separate process
(moto, in `octfm[test]`; written in Python and slower than any real server). Volumes per second through `Loader`: local
warm; local cold (page cache dropped for these files); bucket, first epoch (everything fetched, checked and cached);
bucket, later epochs (from the cache). Compare only ratios within one run.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from contextlib import suppress
from pathlib import Path

from loader import forget, write
from octfm.io import bucket
from octfm.io.location import BucketPath, location
from octfm.phantom import phantom_volume
from octfm.store.loader import Loader
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing

PORT = 5599
BATCH = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--volumes", type=int, default=16, help=f"a multiple of {BATCH}, the volumes of a batch")
    volumes = parser.parse_args().volumes
    if volumes < BATCH or volumes % BATCH:
        parser.error(f"--volumes {volumes}: expected a multiple of {BATCH}, the volumes of a batch")
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {
            "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{PORT}", "OCTFM_CACHE": f"{folder}/cache",
        }  # fmt: skip
        server = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-p", str(PORT)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            phantom = Preprocessing()(phantom_volume(1, scanner="topcon_maestro2", size=(64, 442, 512))[0])
            store = write(Path(folder) / "store", [phantom], volumes, "zstd")
            there = location("s3://bench/store")
            assert isinstance(there, BucketPath)
            _make_bucket()
            for file in sorted((Path(folder) / "store").rglob("*")):
                if file.is_file() and not file.name.startswith("."):
                    bucket.upload(file, str(there / str(file.relative_to(Path(folder) / "store"))))
            _epoch(store, volumes)
            warm = _epoch(store, volumes)
            forget(Path(folder) / "store")
            cold = _epoch(Store.open(store.path), volumes)
            remote = Store.open(there)
            first, later = _epoch(remote, volumes), _epoch(remote, volumes)
            size = sum(found.size for found in bucket.find(str(there / "voxels")).values()) / volumes / 1e6
            print(f"{volumes} volumes of [64, 384, 384], {size:.1f} MB each in zstd; volumes/s (over local warm)")
            for name, rate in (
                ("local, warm", warm),
                ("local, cold", cold),
                ("bucket, first epoch", first),
                ("bucket, later", later),
            ):
                print(f"{name:20} {rate:8.1f}  ({rate / warm:.2f})")
        finally:
            server.terminate()
            server.wait()


def _epoch(store: Store, volumes: int) -> float:
    with Loader(store, range(volumes), BATCH, seed=0) as loader:
        start = time.perf_counter()
        for step in range(volumes // BATCH):
            loader.batches(step)
        return volumes / (time.perf_counter() - start)


def _make_bucket() -> None:
    for _ in range(100):
        with suppress(OSError):
            urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{PORT}/bench", method="PUT"), timeout=5)
            return
        time.sleep(0.5)
    raise SystemExit("the S3 server does not answer")


if __name__ == "__main__":
    main()
