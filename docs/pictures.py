"""Makes the guide's pictures of real output from a finished demonstration: `python docs/pictures.py demo docs`.

viewer.webp: its first picture, a synthetic scan with layers. report.webp: the first screen of its report. sheet.webp:
the contact sheet of the three packaged samples. overview.webp: B-scans, tissue band, masks and features of its volumes.
Needs Chromium. Everything shown is synthetic.
"""

import base64
import io
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib.image
import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from octfm.layers.rows import read_table
from octfm.layers.sample import samples
from octfm.layers.table import write_table
from octfm.report.images import example_pictures
from octfm.report.segmented.contact_sheet import ContactSheet
from octfm.tasks.scene import load_scenes

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
MOST_BYTES = 120_000


def main(demo: Path, docs: Path) -> None:
    screen(demo / "first_scan.html", docs / "viewer.webp", (1280, 1000))
    screen(demo / "report.html", docs / "report.webp", (1280, 1180))
    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "eyes.csv"
        sheet = ContactSheet(table)
        write_table([each.volume for each in samples()], table, also=sheet.add)
        screen(sheet.write(read_table(table)), docs / "sheet.webp", (1280, 640))
    overview(demo / "run", docs / "overview.webp")


def screen(page: Path, out: Path, size: tuple[int, int]) -> None:
    """The first screen of a page, in a window of this width and height."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "shot.png"
        window = f"--window-size={size[0]},{size[1]}"
        flags = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}/profile",
        ]
        subprocess.run(
            [str(CHROMIUM), *flags, window, f"--screenshot={shot}", page.resolve().as_uri()],
            check=True,
            capture_output=True,
        )
        save(Image.open(shot), out)


def overview(run: Path, out: Path) -> None:
    """One row for each scanner: B-scan, tissue band, one training mask, PCA of tokens."""
    scenes = load_scenes(run / "figures" / "scenes.npz")
    rows = [example.pictures[:4] for example in example_pictures(scenes)]
    images = [[_decode(picture.src) for picture in row] for row in rows]
    figure = Figure(figsize=(16, 2.5 * len(rows)), dpi=75, layout="constrained")
    grid = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for axes_row, image_row, row in zip(grid, images, rows, strict=True):
        for axes, image, picture in zip(axes_row, image_row, row, strict=True):
            axes.imshow(image)
            axes.set_title(picture.caption, fontsize=11)
            axes.axis("off")
    drawn = io.BytesIO()
    figure.savefig(drawn)
    save(Image.open(drawn), out)


def save(picture: Image.Image, out: Path) -> None:
    """As WebP, of the best quality that stays below MOST_BYTES."""
    for quality in range(90, 30, -5):
        coded = io.BytesIO()
        picture.convert("RGB").save(coded, "webp", quality=quality, method=6)
        if len(coded.getvalue()) <= MOST_BYTES:
            out.write_bytes(coded.getvalue())
            return
    raise SystemExit(f"{out}: above {MOST_BYTES:,} bytes at any quality; show less of it")


def _decode(src: str) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(base64.b64decode(src.partition(",")[2])), format="png")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
