"""Cost of verifying volumes as they are read, as a share of a vit_s step: `python benchmarks/verification.py`.

Run it with OMP_NUM_THREADS=1. Full-size phantoms, uncompressed and zstd, read warm into the same memory: without
verification; with the checksums in the shards (crc32c); and with SHA-256 against rows.jsonl, as for stores from before
shards had checksums, or when a process first reads a volume. The step is a complete one of config vit_s (forward,
backward, update) on one of these volumes. One process, CPU time of all threads, which other load changes least. Aim: at
most 2 % of a step.
"""

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from loader import rate, write
from octfm.phantom import phantom_volume
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors.limits import limits
from octfm.pretraining.monitors.measure import update
from octfm.pretraining.settings import load_config
from octfm.pretraining.step import accumulate, judge
from octfm.run.runtime import start
from octfm.store.layout import SHARD_CHECKSUM, Arrays
from octfm.store.loader import Batch
from octfm.store.store import Store
from octfm.store.writer import StoreWriter
from octfm.volume.preprocessing import Preprocessing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--volumes", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=4, help="per way of reading")
    parser.add_argument("--steps", type=int, default=2)
    chosen = parser.parse_args()
    preprocessing = Preprocessing()
    prepared = [
        preprocessing(phantom_volume(seed, scanner="topcon_maestro2", size=(64, 442, 512))[0]) for seed in (1, 2)
    ]
    found: dict[str, float] = {}
    for compression in ("none", "zstd"):
        for crc in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "store"
                if not crc:
                    make_old(path, compression)
                store = write(path, prepared, chosen.volumes, compression)
                assert store.checks_shards == crc
                found |= {f"{compression} {way}": ms for way, ms in measure(store, chosen).items()}
                sample = store.read([0])
    seconds = step_seconds(sample, preprocessing, chosen.steps)
    print(f"a step of vit_s on one volume: {seconds:.2f} s of CPU")
    for way, ms in found.items():
        compression, _, how = way.partition(" ")
        plain = found[f"{compression} unverified"]
        share = (
            "" if how == "unverified" else f"   +{ms - plain:.2f} ms, {(ms - plain) / 1000 / seconds:.3%} of the step"
        )
        print(f"{way:16s}{ms:8.2f} ms of CPU per volume{share}")


def make_old(path: Path, compression) -> None:
    """Create an empty store of the kind from before shards had checksums."""
    with StoreWriter(path, Preprocessing(), compression):
        pass
    header = json.loads((path / "store.json").read_text())
    (path / "store.json").write_text(
        json.dumps({k: v for k, v in header.items() if k not in (SHARD_CHECKSUM, "digest")})
    )


def measure(store: Store, chosen: argparse.Namespace) -> dict[str, float]:
    """CPU milliseconds per volume for each way of reading."""
    out = Arrays.empty(4, store.image_size)

    def read(index: np.ndarray) -> None:
        store.read(index, out=out)

    if store.checks_shards:
        return {"crc32c": rate(read, chosen.volumes, 4, chosen.seconds)[2]}
    sha256 = rate(read, chosen.volumes, 4, chosen.seconds)[2]
    # Without verification: as if shards had checksums and had already covered every row.
    store.checks_shards = True
    store._compared[:] = True
    return {"unverified": rate(read, chosen.volumes, 4, chosen.seconds)[2], "sha256": sha256}


def step_seconds(sample: Arrays, preprocessing: Preprocessing, steps: int) -> float:
    """Median CPU seconds."""
    config = load_config("vit_s", ("data.global_batch_size=1", "data.per_device_batch_size=1"))
    learner = Learner(config, preprocessing, start(config.precision, "cpu"))
    place = np.zeros(1, np.int64)
    batch = Batch(sample.voxels, sample.band, sample.valid, index=place, position=place)
    times = []
    for _ in range(steps + 1):
        begun = time.process_time()
        learner.set_rates(1e-4, 0.05, 0.999)
        done = accumulate(learner, batch, 0.5, everything=False)
        norm = learner.runtime.clip(learner.trained, config.clip_grad_norm)
        update(learner, judge(learner, done, norm, limits(config.health, learner.state)).made, inspect=False)
        times.append(time.process_time() - begun)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()
