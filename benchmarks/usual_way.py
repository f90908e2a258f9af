"""The common way to load OCT for training: pydicom, then MONAI's Spacingd and Resized, per volume and epoch."""

import importlib.util
import warnings
from pathlib import Path

import numpy as np

from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import Spacing3


def need_monai() -> None:
    """Raises SystemExit if MONAI is not installed; to be called before anything is timed."""
    if importlib.util.find_spec("monai") is None:
        raise SystemExit("the usual way needs MONAI: pip install 'octfm[bench]'")


def usual_way(path: str | Path, spacing_mm: Spacing3, preprocessing: Preprocessing) -> np.ndarray:
    """Resample to the target spacing, then stretch to `image_size`; float32 [1, D, H, W].

    `spacing_mm` is passed in, because pydicom does not derive it.
    """
    import pydicom
    import torch
    from monai.data.meta_tensor import MetaTensor
    from monai.transforms import Compose, Resized, Spacingd

    way = Compose(
        [
            Spacingd(keys="image", pixdim=preprocessing.target_spacing, mode="bilinear"),
            Resized(keys="image", spatial_size=preprocessing.image_size, mode="trilinear"),
        ]
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pixels = pydicom.dcmread(path).pixel_array
        image = MetaTensor(
            torch.from_numpy(pixels.astype(np.float32))[None], affine=torch.diag(torch.tensor([*spacing_mm, 1.0]))
        )
        return np.asarray(way({"image": image})["image"])
