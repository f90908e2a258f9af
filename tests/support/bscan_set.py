"""A made set of single B-scans as public ones come: class folders in train and test, patients in the names, repeats."""

from pathlib import Path

import numpy as np
from PIL import Image

from octfm.phantom.native.stream import Stream

CONDITIONS = {"CNV": "neovascular_amd", "DME": "dme", "NORMAL": "healthy"}
PATTERN = "{split}/{label}/*-{participant}-*"


def layered(seed: int, rows: int = 200, columns: int = 120, retina: int = 50) -> np.ndarray:
    """uint8 [rows, columns]: a plain B-scan with a nerve fibre layer, a retina and an RPE, in milliseconds."""
    rng = np.random.default_rng(seed)
    x = np.linspace(-1, 1, columns)
    top = 0.35 * rows + rng.uniform(-5, 5) + 4 * x**2 + rng.uniform(-3, 3) * x
    y = np.arange(rows)[:, None]
    tissue = (y >= top) & (y < top + retina)
    image = 12 + 75.0 * tissue + 60 * ((y >= top) & (y < top + retina / 8))
    image += 130 * ((y >= top + 0.85 * retina) & (y < top + retina))
    image += 60 * np.exp(-(y - top - retina) / (0.6 * retina)) * (y >= top + retina)
    return np.clip(image * rng.gamma(9, 1 / 9, image.shape), 0, 255).astype(np.uint8)


def write_image(path: Path, image: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


def phantom_image(seed: int, place: int, condition: str, size: tuple[int, int] = (512, 496)) -> np.ndarray:
    """A rendered B-scan of an eye with this condition; `size` is (columns, rows)."""
    found = Stream(seed=seed, conditions=(condition,), randomised=0.0)(place)
    return np.asarray(Image.fromarray(found.voxels[0]).resize(size, Image.Resampling.BILINEAR))


def write_set(root: Path, patients: int, draw) -> dict[str, Path]:
    """Two B-scans of each patient of each class in train/ or test/, and what goes wrong in public sets.

    `draw(label, place)` makes an image. Returns the planted files: `copy`, the bytes of another patient's file;
    `resaved`, the same pixels in another format; `both`, a patient of train/CNV in test/NORMAL.
    """
    number, first = 1000, {}
    for label in CONDITIONS:
        for patient in range(patients):
            number += 1
            side = "test" if patient % 3 == 2 else "train"
            for k in (1, 2):
                ending = "jpeg" if k == 1 else "png"
                path = root / side / label / f"{label}-{number}-{k}.{ending}"
                first.setdefault((label, k), write_image(path, draw(label, 2 * patient + k)))
    other = root / "test" / "NORMAL" / "NORMAL-9001-1.jpeg"
    other.parent.mkdir(parents=True, exist_ok=True)
    other.write_bytes(first["CNV", 1].read_bytes())
    png = first["DME", 2]
    owner = first["CNV", 1].stem.split("-")[1]
    return {
        "copy": other,
        "resaved": write_image(png.with_name(f"{png.stem}9.bmp"), np.asarray(Image.open(png))),
        "both": write_image(root / "test" / "NORMAL" / f"NORMAL-{owner}-7.png", draw("NORMAL", 97)),
    }
