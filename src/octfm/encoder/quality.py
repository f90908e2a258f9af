"""Image quality of prepared volumes in four numbers: what a label may correlate with before any anatomy is seen."""

import numpy as np

from octfm.store.layout import Arrays

QUALITY = ("signal", "noise", "contrast", "saturated")
"""Signal: 99th percentile of the grey levels less their median in the vitreous. Noise: standard deviation in the
vitreous. Contrast: signal over noise. Saturated: share of the image at the highest grey level."""
ABOVE = 8
"""Rows above the tissue band that still count as tissue: the band's upper surface may lie a little too deep."""


def image_quality(arrays: Arrays) -> np.ndarray:
    """float32 [B, 4], see QUALITY, of image voxels (`Arrays.valid`); without vitreous, all of them stand for it."""
    rows = np.arange(arrays.voxels.shape[2])[:, None]
    found = []
    for voxels, band, valid in zip(arrays.voxels, arrays.band, arrays.valid, strict=True):
        image = (rows >= valid[0][:, None, :]) & (rows < valid[1][:, None, :])
        vitreous = image & (rows < band[0][:, None, :] - ABOVE)
        grey = voxels[image].astype(np.float32)
        dark = voxels[vitreous].astype(np.float32) if vitreous.any() else grey
        if not grey.size:
            found.append(np.zeros(len(QUALITY)))
            continue
        signal, noise = np.percentile(grey, 99) - np.median(dark), max(float(dark.std()), 1.0)
        found.append([signal, noise, signal / noise, np.mean(grey == 255)])
    return np.array(found, np.float32)
