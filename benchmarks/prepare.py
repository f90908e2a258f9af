"""Cost of octfm prepare relative to decoding.

    OMP_NUM_THREADS=1 python benchmarks/prepare.py [--scanners zeiss_cirrus]

Phantoms of each scanner's native size, written as JPEG 2000, JPEG-LS and uncompressed. Three things alternate, timed in
CPU seconds of one thread (less affected by load than wall time), medians: decoding the compressed frames alone; all
that a worker of `prepare` does with the file (reading, preprocessing, checksum, fingerprint, durable writing); and the
usual way (usual_way.py; needs `pip install octfm[bench]`). Aims: prepare takes at most 1.25 times decoding for JPEG
2000 and 2 times for JPEG-LS, and is at least 3 times as fast as the usual way for uncompressed files. --memory measures
the peak memory of a 512 x 1024 x 512 volume, which should be at most 1 GB.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from pydicom import dcmread, dcmwrite, uid
from pydicom.encaps import encapsulate, generate_frames

from octfm.formats import read_volume
from octfm.formats.dicom.codecs import FrameFormat, decode_frame, find_decoders
from octfm.io.heap import keep_freed_memory
from octfm.io.isolation import Limits, each
from octfm.phantom import DEFAULT_SCANNERS, PHANTOM_VERSION, SCANNERS, phantom_volume
from octfm.phantom.dicom import to_bytes, to_dataset
from octfm.store.writer import stage
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import Spacing3, Volume
from usual_way import need_monai, usual_way

SYNTAXES = {
    "JPEG 2000": uid.JPEG2000Lossless,
    "JPEG-LS": uid.JPEGLSLossless,
    "uncompressed": uid.ExplicitVRLittleEndian,
}


def compressed(path: Path, syntax: str) -> Path:
    dataset = dcmread(path)
    if syntax == uid.ExplicitVRLittleEndian:
        return path
    import imagecodecs

    encode = {
        uid.JPEG2000Lossless: lambda frame: imagecodecs.jpeg2k_encode(frame, reversible=True, codecformat="j2k"),
        uid.JPEGLSLossless: imagecodecs.jpegls_encode,
    }[syntax]
    dataset.PixelData = encapsulate([encode(frame) for frame in dataset.pixel_array])
    dataset["PixelData"].is_undefined_length = True
    dataset["PixelData"].VR = "OB"
    dataset.file_meta.TransferSyntaxUID = syntax
    out = path.with_name(f"{syntax}.dcm")
    dcmwrite(out, dataset)
    return out


def decode_only(path: Path) -> Callable[[], None]:
    dataset = dcmread(path)
    syntax = str(dataset.file_meta.TransferSyntaxUID)
    if syntax == uid.ExplicitVRLittleEndian:
        return lambda: np.frombuffer(dcmread(path).PixelData, np.uint8).copy()
    frames = [
        bytes(frame) for frame in generate_frames(dataset.PixelData, number_of_frames=int(dataset.NumberOfFrames))
    ]
    form = FrameFormat(dataset.Rows, dataset.Columns, dataset.BitsAllocated)
    _, decoders = find_decoders(syntax, str(path))
    return lambda: [decode_frame(frame, form, decoders) for frame in frames] and None


def prepare_one(path: Path, preprocessing: Preprocessing, staging: Path) -> None:
    volume = read_volume(path)
    stage(preprocessing(volume), staging, "volume", "none")
    fingerprint(volume.voxels)


def cpu_seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scanners", nargs="+", default=DEFAULT_SCANNERS, choices=list(SCANNERS))
    parser.add_argument("--syntaxes", nargs="+", default=list(SYNTAXES), choices=list(SYNTAXES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--memory", action="store_true", help="only the peak memory of a 512 x 1024 x 512 volume")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("set OMP_NUM_THREADS=1: workers compute with one thread each")
    if "uncompressed" in options.syntaxes and not options.memory:
        need_monai()
    keep_freed_memory()  # as the children of prepare do
    preprocessing = Preprocessing()
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder)
        if options.memory:
            print(f"512 x 1024 x 512: {peak_gb(base, preprocessing):.2f} GB at most in the child, interpreter included")
            return
        for scanner in options.scanners:
            volume = phantom_volume(3, scanner=scanner, size=SCANNERS[scanner].vendor_size)[0]
            plain = save(base / f"{scanner}.dcm", volume)
            for name in options.syntaxes:
                compare(
                    f"{scanner} {' x '.join(map(str, volume.shape))} {name}",
                    plain,
                    volume.spacing_mm,
                    name,
                    preprocessing,
                    options.repeats,
                )


def compare(
    title: str, plain: Path, spacing_mm: Spacing3, name: str, preprocessing: Preprocessing, repeats: int
) -> None:
    path = compressed(plain, SYNTAXES[name])
    ways = {"decode": decode_only(path), "prepare": lambda: prepare_one(path, preprocessing, plain.parent)}
    if name == "uncompressed":
        ways["usual"] = lambda: usual_way(path, spacing_mm, preprocessing)
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(repeats + 1):  # the first warms caches and imports
        for way, work in ways.items():
            times[way].append(cpu_seconds(work))
    median = {way: statistics.median(values[1:]) for way, values in times.items()}
    line = f"{title}: prepare {median['prepare']:.2f} s CPU"
    if "usual" in median:
        print(
            f"{line}, the usual way {median['usual']:.2f}: {median['usual'] / median['prepare']:.1f} times as fast",
            flush=True,
        )
    else:
        print(f"{line}, decoding {median['decode']:.2f}: {median['prepare'] / median['decode']:.2f} times", flush=True)


def save(path: Path, volume: Volume) -> Path:
    person = SimpleNamespace(participant="phantom3", study_date="20240101")
    dataset = to_dataset(
        replace(volume, acquisition="1.2.3"), SCANNERS[volume.scanner], person, str(PHANTOM_VERSION), rle=False
    )  # type: ignore[arg-type]
    path.write_bytes(to_bytes(dataset))
    return path


def peak_gb(base: Path, preprocessing: Preprocessing) -> float:
    tile = phantom_volume(3, scanner="zeiss_cirrus", size=(64, 1024, 512))[0]
    voxels = np.concatenate([tile.voxels, tile.voxels[::-1]] * 4)
    path = save(base / "large.dcm", replace(tile, voxels=voxels, spacing_mm=(6 / 512, *tile.spacing_mm[1:])))
    del voxels, tile
    (peak,) = each(_peak, [(path, preprocessing, base)], Limits(), lambda _: 600.0)
    return peak


def _peak(task: tuple[Path, Preprocessing, Path]) -> float:
    prepare_one(*task)
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1e6


if __name__ == "__main__":
    main()
