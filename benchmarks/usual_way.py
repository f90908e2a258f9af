"""What most people write to get OCT into a network: pydicom, then MONAI's Spacingd and Resized, for every volume in every epoch."""

import warnings
from pathlib import Path

import numpy as np

from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import Spacing3


def usual_way(path: str | Path, spacing_mm: Spacing3, preprocessing: Preprocessing) -> np.ndarray:
    """float32 [1, D, H, W] of `image_size`, at the target spacing and then stretched to it. pydicom alone would not know
    `spacing_mm`."""
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
