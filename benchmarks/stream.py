"""CPU seconds that one labelled phantom image of the stream costs, for the sizes that training uses.

python benchmarks/stream.py                      # one process, one thread
python benchmarks/stream.py --picture out.png    # 24 of them with their surfaces, to look at
"""

import argparse
import time

import numpy as np
from PIL import Image

from octfm.phantom.native.bscans import SURFACES
from octfm.phantom.native.stream import Stream

COLOURS = {"ilm": (255, 60, 60), "ez": (255, 255, 0), "rpe_peak": (0, 255, 0), "bm": (80, 160, 255)}
CASES = {
    "B-scan 496 x 512": Stream(1, size=(1, 496, 512)),
    "B-scan, rows of 3.9 µm": Stream(1),
    "volume 16 x 192 x 128": Stream(1, size=(16, 192, 128)),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--picture")
    arguments = parser.parse_args()
    for name, stream in CASES.items():
        stream(0)
        start = time.process_time()
        for place in range(arguments.count):
            stream(place)
        print(f"{name:24}  {(time.process_time() - start) / arguments.count:.3f} CPU-s")
    if arguments.picture:
        images = [overlay(Stream(1), place) for place in range(24)]
        rows = [np.concatenate(images[i : i + 6], axis=1) for i in range(0, 24, 6)]
        Image.fromarray(np.concatenate(rows)).save(arguments.picture)


def overlay(stream: Stream, place: int) -> np.ndarray:
    """uint8 [500, 260, 3]: the upper left corner of an image with its surfaces."""
    image, (height, width) = stream(place), (500, 260)
    picture = np.zeros((height, width, 3), np.uint8)
    part = image.voxels[0, :height, :width]
    picture[: part.shape[0], : part.shape[1]] = part[..., None]
    for name, colour in COLOURS.items():
        row = image.surfaces[SURFACES.index(name), 0, :width]
        columns = np.nonzero(row < height - 0.5)[0]
        picture[np.rint(row[columns]).astype(int), columns] = colour
    return picture


if __name__ == "__main__":
    main()
