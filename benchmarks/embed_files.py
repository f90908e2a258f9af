"""What a file costs in `octfm embed --files`, in CPU seconds of reading and of encoding, which other processes leave alone.

    python benchmarks/embed_files.py --files 1000 [--server] [--config demo]

Writes phantom DICOM of 16 x 256 x 192 voxels (0.8 MB), embeds them, then calls again, when all is done; with --server from moto's S3 on
loopback. Peak memory is that of this process, which holds what waits for the encoder.
"""

import argparse
import json
import os
import resource
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from bucket_servers import BUCKET, s3_server
from dicom_files import write_oct_dicom
from octfm.data.location import location
from octfm.data.phantom import phantom_volume
from octfm.data.preprocessing import Preprocessing
from octfm.evaluation.embed_files import embed_files
from octfm.evaluation.encoder import assemble
from octfm.evaluation.export import settings_of, tensors_of, write_files
from octfm.training.inputs import build_objective, frozen_encoder
from octfm.training.settings import load_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--config", default="demo")
    parser.add_argument("--image-size", type=int, nargs=3, default=(16, 128, 128))
    parser.add_argument("--server", action="store_true", help="read from an S3 server instead of a folder")
    parser.add_argument("--workers", type=int, default=2)
    asked = parser.parse_args()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = untrained(asked.config, tuple(asked.image_size), folder / "model")
        files = write(folder / "files", asked.files)
        source: str | Path = folder / "files"
        if asked.server:
            os.environ |= {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_ENDPOINT_URL": stack.enter_context(s3_server())}
            source = f"s3://{BUCKET}/files"
            for file in files:
                (location(source) / file.parent.name / file.name).write_bytes(file.read_bytes())
        rows = [measure(model, source, folder / "out", asked.workers), measure(model, source, folder / "out", asked.workers)]
    first, again = rows
    per_file = {name: round(value / asked.files, 4) for name, value in first.items() if name.endswith("_s")}
    print(json.dumps({"files": asked.files, "first": first, "again": again, "per_file": per_file}, indent=1))


def measure(model: Path, source: str | Path, out: Path, workers: int) -> dict[str, float]:
    start, own, children = time.perf_counter(), os.times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    done = embed_files(model, source, out, workers=workers)
    from octfm.data.isolation import release

    release()  # children count once they have ended
    now, after = os.times(), resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "embedded": done["embedded"],
        "wall_s": time.perf_counter() - start,
        "this_process_cpu_s": now.user + now.system - own.user - own.system,
        "children_cpu_s": after.ru_utime + after.ru_stime - children.ru_utime - children.ru_stime,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }


def untrained(name: str, image_size: tuple[int, ...], folder: Path) -> Path:
    """An export of the config's network at its initial weights."""
    config = load_config(name)
    preprocessing = Preprocessing(image_size=image_size, target_spacing=(0.375, 0.0156, 0.047))  # pyright: ignore[reportArgumentType]
    network = frozen_encoder(config, build_objective(config, preprocessing))
    encoder = assemble(network, config, preprocessing, name, preprocessing.fingerprint(), "cpu")
    write_files(folder, settings_of(encoder), tensors_of(encoder), [])
    return folder


def write(folder: Path, count: int) -> list[Path]:
    """Twenty different eyes under `count` identities."""
    eyes = [phantom_volume(seed, size=(16, 256, 192))[0] for seed in range(20)]
    files = []
    for n in range(count):
        eye, path = eyes[n % len(eyes)], folder / f"p{n:05d}" / "eye.dcm"
        path.parent.mkdir(parents=True)
        files.append(write_oct_dicom(path, eye.voxels, eye.spacing_mm, participant=f"p{n:05d}", sop_instance_uid=f"1.2.{n + 1}"))
    return files


if __name__ == "__main__":
    main()
