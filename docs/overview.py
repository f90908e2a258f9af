"""Makes the README's picture from a finished demonstration: `python docs/overview.py demo/run docs/overview.png`."""

import base64
import io
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
from matplotlib.figure import Figure

from octfm.report.images import example_pictures, pca_pictures
from octfm.tasks.scene import load_scenes


def main(run: Path, out: Path) -> None:
    """One row for each scanner: B-scan, tissue band, one training mask, PCA of tokens."""
    scenes = load_scenes(run / "figures" / "scenes.npz")
    rows = [
        [*shown.pictures[:2], shown.pictures[3], seen.pictures[1]]
        for shown, seen in zip(example_pictures(scenes, 1), pca_pictures(scenes, 1), strict=True)
    ]
    images = [[_decode(picture.src) for picture in row] for row in rows]
    figure = Figure(figsize=(16, 2.5 * len(rows)), dpi=75, layout="constrained")
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for axes_row, image_row, row in zip(grid, images, rows, strict=True):
        for axes, image, picture in zip(axes_row, image_row, row, strict=True):
            axes.imshow(image)
            axes.set_title(picture.caption, fontsize=11)
            axes.axis("off")
    figure.savefig(out)


def _decode(src: str) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(base64.b64decode(src.partition(",")[2])), format="png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
