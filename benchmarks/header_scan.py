"""Headers per second of files with per-frame positions: octfm's parsing of functional groups compared with pydicom's.

    python benchmarks/header_scan.py [--repeats 5]

Both derive the same geometry afterwards. CPU time of one process, warm cache, median of the repeats.
"""

import argparse
import statistics
import tempfile
import time
from io import BytesIO
from pathlib import Path

import numpy as np
from pydicom import dcmread

from octfm.formats import read_header
from octfm.formats.dicom.geometry import read_geometry
from octfm.phantom import SCANNERS
from octfm.phantom.cohort import draw_cohort
from octfm.phantom.dicom import to_dataset
from octfm.volume.volume import Volume


def file_of(frames: int, undefined: bool) -> bytes:
    scanner = SCANNERS["topcon_triton"]
    voxels = np.random.default_rng(0).integers(0, 255, (frames, 64, 64), np.uint8)
    volume = Volume(voxels, (7 / frames, 0.0026, 0.0137), "R", scanner.name, scanner.protocol, "1001", "1.2.3.4", True)
    dataset = to_dataset(
        volume,
        scanner,
        draw_cohort(1, 0, scanners=[scanner.name], second_scanner=0, fractions=(0.8, 0.1, 0.1))[0],
        "benchmark",
        rle=False,
    )
    if undefined:
        _undefine(dataset)
    buffer = BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def _undefine(dataset) -> None:
    for element in dataset:
        if element.VR == "SQ":
            element.is_undefined_length = True
            for item in element.value:
                item.is_undefined_length_sequence_item = True
                _undefine(item)


def with_pydicom(path: Path) -> None:
    dataset = dcmread(path, stop_before_pixels=True)
    read_geometry(dataset, (dataset.NumberOfFrames, dataset.Rows, dataset.Columns), "topcon_triton", str(path))


def cpu_seconds(function, path: Path, repeats: int) -> float:
    function(path)
    times = []
    for _ in range(repeats):
        start = time.process_time()
        function(path)
        times.append(time.process_time() - start)
    return statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    print("| frames | lengths | octfm, headers/s | pydicom, headers/s | ratio |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.dcm"
        for frames in (61, 128, 600):
            for undefined in (False, True):
                path.write_bytes(file_of(frames, undefined))
                ours, theirs = (cpu_seconds(function, path, repeats) for function in (read_header, with_pydicom))
                words = "undefined" if undefined else "stated"
                print(f"| {frames} | {words} | {1 / ours:.0f} | {1 / theirs:.0f} | {theirs / ours:.1f} |", flush=True)


if __name__ == "__main__":
    main()
