"""Image formation of an OCT instrument: point-spread function, speckle, detector noise and log compression."""

from functools import cache
from itertools import pairwise
from math import exp

import numpy as np
from scipy.ndimage import gaussian_filter1d


def speckle(
    rng: np.random.Generator, shape: tuple[int, int, int], sigma: tuple[float, float], looks: int
) -> np.ndarray:
    """Fully developed speckle [D, H, W] with mean 1 and contrast 1/√looks, correlated over the point-spread function.

    The intensity of one look is the squared modulus of a complex Gaussian field, so it is exponentially distributed
    (Goodman 2007, Speckle Phenomena in Optics). The mean of several looks is Gamma distributed; it is drawn from one
    real field by Wilson and Hilferty's approximation, by which the cube root of a Gamma variable is nearly normal.

    `sigma` is the (axial, lateral) width of the complex field in pixels. The covariance of intensity is that of the
    field squared, exp(-d² / 2σ²) at a distance of d pixels, for any number of looks. B-scans are independent, as the
    distance between them exceeds the beam.
    """
    if looks == 1:
        real, imaginary = _field(rng, shape, sigma), _field(rng, shape, sigma)
        real *= real
        imaginary *= imaginary
        real += imaginary
        real *= np.float32(0.5)
        return real
    cube_root = _field(rng, shape, (_narrower(sigma[0]), _narrower(sigma[1])))
    cube_root *= np.float32(1 / (3 * np.sqrt(looks)))
    cube_root += np.float32(1 - 1 / (9 * looks))
    # A normal variable has a lower tail below 0, which a Gamma variable does not have.
    np.maximum(cube_root, np.float32(0.02), out=cube_root)
    return cube_root * cube_root * cube_root


def _field(rng: np.random.Generator, shape: tuple[int, int, int], sigma: tuple[float, float]) -> np.ndarray:
    """Gaussian field of unit variance, correlated by a Gaussian filter of width `sigma` along the last two axes."""
    field = rng.standard_normal(shape, dtype=np.float32)
    for axis, s in zip((1, 2), sigma, strict=True):
        if s > 0.2:
            field = gaussian_filter1d(field, s, axis=axis, mode="wrap", truncate=3)
            field *= np.float32(1 / _gain(s))
    return field


@cache
def _narrower(sigma: float) -> float:
    """Width of the filter that gives a real field the covariance exp(-d² / 2σ²) at d = 1.

    That is the covariance of intensity for a complex field of width σ. The width is σ/√2 for wide filters, but a
    sampled Gaussian narrower than a pixel decorrelates faster, so it is found by bisection. It is rounded, so that any
    libm gives the same bytes.
    """
    if not 0.2 < sigma < 2:
        return round(sigma / 2**0.5, 3)
    target, low, high = exp(-0.5 / sigma**2), 0.0, sigma
    for _ in range(40):
        middle = 0.5 * (low + high)
        weights = [exp(-0.5 * (k / middle) ** 2) for k in range(-8, 9)] if middle > 0.05 else [1.0]
        covariance = sum(a * b for a, b in pairwise(weights)) / sum(w * w for w in weights)
        low, high = (middle, high) if covariance < target else (low, middle)
    return round(high, 3)


def _gain(sigma: float) -> float:
    """Standard deviation of unit white noise after the Gaussian filter: root of the summed squares of its weights."""
    radius = int(3 * sigma + 0.5)
    weights = np.exp(-0.5 * (np.arange(-radius, radius + 1) / sigma) ** 2)
    return float(np.sqrt(np.sum((weights / weights.sum()) ** 2)))


def blur(power: np.ndarray, sigma: tuple[float, float]) -> np.ndarray:
    """Blur power [D, H, W] by the (axial, lateral) point-spread function, `sigma` in pixels."""
    for axis, s in zip((1, 2), sigma, strict=True):
        if s > 0.2:
            power = gaussian_filter1d(power, s, axis=axis, mode="nearest", truncate=3)
    return power


def detector_noise(rng: np.random.Generator, shape: tuple[int, int, int], looks: int) -> np.ndarray:
    """White shot noise of mean 1 after averaging, with the same distribution as speckle of as many looks."""
    if looks == 1:
        return rng.standard_exponential(shape, dtype=np.float32)
    return speckle(rng, shape, (0.0, 0.0), looks)


def log_display(power: np.ndarray, black_db: float, range_db: float, gamma: float = 1.0) -> np.ndarray:
    """Log-compress power to uint8: `black_db` is 0, `range_db` above it is 255, with a `gamma` curve in between.

    A table is indexed by the leading bits of the float32 power (sign, exponent and 10 bits of the mantissa, 0.004 dB).
    This is fast, and free of the last bit of a logarithm, which differs between vector units.
    """
    dropped = 13
    first, last = np.array([1e-6, 1e4], np.float32).view(np.uint32) >> dropped
    # All powers with the same leading bits get the level of the one in the middle.
    middle = (np.arange(first, last, dtype=np.uint32) << dropped) | (1 << (dropped - 1))
    centre = middle.view(np.float32).astype(np.float64)
    table = np.zeros(1 << (32 - dropped), np.uint8)
    level = np.clip((10 * np.log10(centre) - black_db) / range_db, 0, 1)
    table[first:last] = np.rint(255 * level**gamma)
    table[last : len(table) // 2] = 255  # the upper half, with the sign bit set, is negative power: black
    return table[power.view(np.uint32) >> dropped]
