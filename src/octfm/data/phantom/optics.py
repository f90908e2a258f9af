"""What the instrument's light does to a reflectivity: point-spread function, speckle, detector noise, log compression."""

import numpy as np
from scipy.ndimage import gaussian_filter1d


def speckle(rng: np.random.Generator, shape: tuple[int, int, int], sigma: tuple[float, float], looks: int) -> np.ndarray:
    """Fully developed speckle [D, H, W] with mean 1 and contrast 1/√looks, correlated over the point-spread function.

    One look is |a complex Gaussian field|², so intensity is exponential (Goodman 2007, Speckle Phenomena in Optics); `looks`
    averaged frames are Gamma distributed, drawn by Wilson and Hilferty's cube-root-normal approximation from one field.
    `sigma` is (axial, lateral) in pixels, of the field. B-scans are independent: their distance exceeds the beam.
    """
    if looks == 1:
        real, imaginary = _field(rng, shape, sigma), _field(rng, shape, sigma)
        real *= real
        imaginary *= imaginary
        real += imaginary
        real *= np.float32(0.5)
        return real
    cube_root = _field(rng, shape, sigma)
    cube_root *= np.float32(1 / (3 * np.sqrt(looks)))
    cube_root += np.float32(1 - 1 / (9 * looks))
    np.maximum(cube_root, np.float32(0.02), out=cube_root)
    return cube_root * cube_root * cube_root


def _field(rng: np.random.Generator, shape: tuple[int, int, int], sigma: tuple[float, float]) -> np.ndarray:
    """Gaussian field of unit variance."""
    field = rng.standard_normal(shape, dtype=np.float32)
    for axis, s in zip((1, 2), sigma, strict=True):
        if s > 0.2:
            field = gaussian_filter1d(field, s, axis=axis, mode="wrap", truncate=3)
            field *= np.float32(1 / _gain(s))
    return field


def _gain(sigma: float) -> float:
    """Root of the summed squares of the filter's weights: what it does to the standard deviation of white noise."""
    radius = int(3 * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return float(np.sqrt(np.sum((weights / weights.sum()) ** 2)))


def blur(power: np.ndarray, sigma: tuple[float, float]) -> np.ndarray:
    """Mean backscattered power seen through the (axial, lateral) point-spread function, sigma in pixels."""
    for axis, s in zip((1, 2), sigma, strict=True):
        if s > 0.2:
            power = gaussian_filter1d(power, s, axis=axis, mode="nearest", truncate=3)
    return power


def detector_noise(rng: np.random.Generator, shape: tuple[int, int, int], looks: int) -> np.ndarray:
    """Shot noise after averaging: white, mean 1, with the same statistics as speckle of as many looks."""
    if looks == 1:
        return rng.standard_exponential(shape, dtype=np.float32)
    return speckle(rng, shape, (0.0, 0.0), looks)


def log_display(power: np.ndarray, black_db: float, range_db: float) -> np.ndarray:
    """uint8: `black_db` and below is 0, `range_db` above it is 255."""
    display = np.log(np.maximum(power, np.float32(1e-9)))
    display *= np.float32(10 / np.log(10) * 255 / range_db)
    display += np.float32(0.5 - black_db * 255 / range_db)
    np.clip(display, 0, 255, out=display)
    return display.astype(np.uint8)
