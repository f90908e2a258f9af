"""Cost per file of `octfm embed --files`, in CPU seconds of reading and of encoding, which other load hardly affects.

    python benchmarks/embed_files.py --files 1000 [--server] [--config demo]
    python benchmarks/embed_files.py --files 10000 --voxels 6 64 48 --image-size 8 64 64 --server --kill-after 100

Writes phantom DICOM files of 16 x 256 x 192 voxels (0.8 MB), embeds them, and calls the command again when all is done.
With --server, files and vectors lie in moto's S3 on loopback, in a separate process. With --kill-after N, the first
attempt gets a SIGKILL once N parts are written, a second one continues, and its vectors are compared with those of an
undisturbed job on disk. Peak memory is that of this process, including volumes that wait for the encoder.
"""

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from octfm.encoder.embed_files import embed_files
from octfm.encoder.embeddings import read_embeddings
from octfm.encoder.encoder import assemble
from octfm.encoder.export import settings_of, tensors_of, write_files
from octfm.io.location import BucketPath, Location, location
from octfm.phantom import phantom_volume
from octfm.pretraining.learner import build_objective
from octfm.pretraining.settings import load_config
from octfm.run.runtime import start
from octfm.volume.preprocessing import Preprocessing
from support.bucket_servers import BUCKET, free_port
from support.dicom_files import write_oct_dicom


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--config", default="demo")
    parser.add_argument("--image-size", type=int, nargs=3, default=(16, 128, 128))
    parser.add_argument("--voxels", type=int, nargs=3, default=(16, 256, 192))
    parser.add_argument(
        "--server", action="store_true", help="read from and write into an S3 server instead of folders"
    )
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--kill-after", type=int, help="SIGKILL the first attempt once so many parts are there")
    asked = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = untrained(asked.config, tuple(asked.image_size), folder / "model")
        files = write(folder / "files", asked.files, tuple(asked.voxels))
        source, out = location(folder / "files"), location(folder / "out")
        if asked.server:
            stack.enter_context(server())
            source, out = location(f"s3://{BUCKET}/files"), location(f"s3://{BUCKET}/vectors")
            for file in files:
                (source / file.parent.name / file.name).write_bytes(file.read_bytes())
        told: dict[str, object] = {"files": asked.files}
        if asked.kill_after:
            told["killed"] = kill(model, source, out, asked.workers, asked.kill_after)
        first, again = (measure(model, source, out, asked.workers) for _ in range(2))
        told |= {"first": first, "again": again}
        if asked.kill_after:
            told["undisturbed"] = measure(model, folder / "files", folder / "undisturbed", asked.workers)
            ours, theirs = (read_embeddings(where / "pretrained.parquet") for where in (out, folder / "undisturbed"))
            told["equal"] = np.array_equal(ours.acquisition, theirs.acquisition) and np.array_equal(
                ours.vectors, theirs.vectors
            )
            told["different_vectors"] = len(np.unique(ours.vectors, axis=0))
        else:
            told["per_file"] = {
                name: round(value / asked.files, 4) for name, value in first.items() if name.endswith("_s")
            }
    print(json.dumps(told, indent=1))


@contextmanager
def server() -> Iterator[None]:
    """Run moto's S3 in a separate process, and set the environment of its clients."""
    port = free_port()
    endpoint = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": endpoint}
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while subprocess.run(
            ["curl", "-s", "-f", "-X", "PUT", f"{endpoint}/{BUCKET}"], stdout=subprocess.DEVNULL
        ).returncode:
            time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait()


def kill(model: Path, source: Location, out: Location, workers: int, parts: int) -> dict[str, float]:
    """Run one attempt and kill it by SIGKILL once `parts` shards are written."""
    start = time.perf_counter()
    words = ["embed", str(model), "--files", str(source), "--out", str(out), "--workers", str(workers)]
    process = subprocess.Popen([sys.executable, "-m", "octfm", *words], stdout=sys.stderr, start_new_session=True)
    while (there := _parts(out)) < parts:
        if process.poll() is not None:
            raise SystemExit(f"the attempt ended by itself after {there} parts; --kill-after fewer")
        time.sleep(1)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    if isinstance(out, BucketPath):
        (out / "job.lease").unlink()  # of the killed attempt; otherwise the next one is refused for three minutes
    return {"parts": there, "wall_s": time.perf_counter() - start}


def _parts(out: Location) -> int:
    try:
        return sum(path.suffix == ".parquet" for path in (out / "parts").iterdir())
    except FileNotFoundError:
        return 0


def measure(model: Path, source: Location, out: Location, workers: int) -> dict[str, float]:
    start, own, children = time.perf_counter(), os.times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = embed_files(model, source, out, workers=workers)
    from octfm.io.isolation import release

    release()  # resource usage includes children only after they have ended
    now, after = os.times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "embedded": done["embedded"],
        "wall_s": time.perf_counter() - start,
        "this_process_cpu_s": now.user + now.system - own.user - own.system,
        "children_cpu_s": after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def untrained(name: str, image_size: tuple[int, ...], folder: Path) -> Path:
    """Export the config's network with its initial weights."""
    config = load_config(name)
    preprocessing = Preprocessing(image_size=image_size, target_spacing=(0.375, 0.0156, 0.047))  # pyright: ignore[reportArgumentType]
    network = build_objective(config, preprocessing).frozen_encoder(config.objective.frozen)
    encoder = assemble(network, config, preprocessing, name, preprocessing.fingerprint(), start("fp32", "cpu"))
    write_files(folder, settings_of(encoder), tensors_of(encoder), [])
    return folder


def write(folder: Path, count: int, voxels: tuple[int, int, int]) -> list[Path]:
    """Write `count` files of twenty different eyes, each shifted sideways and darkened differently."""
    eyes = [phantom_volume(seed, size=voxels)[0] for seed in range(20)]
    files = []
    for n in range(count):
        eye, path, turn = eyes[n % len(eyes)], folder / f"p{n:05d}" / "eye.dcm", n // len(eyes)
        path.parent.mkdir(parents=True)
        own = np.roll(eye.voxels, turn % voxels[2], axis=2)
        own -= np.minimum(own, turn // voxels[2])
        files.append(
            write_oct_dicom(path, own, eye.spacing_mm, participant=f"p{n:05d}", sop_instance_uid=f"1.2.{n + 1}")
        )
    return files


if __name__ == "__main__":
    main()
