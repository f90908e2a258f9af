"""Axial registration: eye motion displaces neighbouring B-scans by 10-60 µm, and interpolation would blur layers."""

import numpy as np

SIMILAR = 0.15
"""Neighbours with a smaller correlation are not registered: noise reaches 0.04, a faint retina 0.3, a good one 0.9."""
REACH_MM = 0.35
"""Greatest motion from one B-scan to the next, or from the mean of a star."""


def register_bscans(coarse_DWH: np.ndarray, spacing_mm: tuple[float, float, float]) -> np.ndarray:
    """Axial displacement of every B-scan in rows of `coarse_DWH`, float64 [D], positive downwards.

    Neighbours are compared by cross-correlation summed over A-scans; blank B-scans are interpolated. Slow drift cannot
    be distinguished from the shape of the eye, so the best-fitting quadratic in the B-scan position is left in place as
    anatomy (curvature and tilt), and the rest is motion.
    """
    used = np.flatnonzero(coarse_DWH.max(axis=(1, 2)) > coarse_DWH.min(axis=(1, 2)))
    displacement = np.zeros(len(coarse_DWH))
    if len(used) < 2:
        return displacement
    # A retina is smooth over 0.15 mm, so A-scans are averaged in groups, which is as accurate and faster.
    width = coarse_DWH.shape[1]
    group = min(max(1, round(0.15 / spacing_mm[2])), width)
    alike = coarse_DWH if len(used) == len(coarse_DWH) else coarse_DWH[used]
    calm = alike[:, : width // group * group : group].copy()
    for column in range(1, group):
        calm += alike[:, column : width // group * group : group]
    calm /= np.float32(group)
    path = np.concatenate([[0.0], np.cumsum(_neighbour_shifts(calm, reach=max(2, round(REACH_MM / spacing_mm[1]))))])
    motion = path - robust_quadratic(used.astype(float), path)
    displacement[:] = np.interp(np.arange(len(displacement)), used, motion)
    return displacement


def register_star(crossing_JH: np.ndarray, dy: float) -> np.ndarray:
    """Axial displacement of every B-scan of a star in rows, float64 [J], positive downwards, relative to their median.

    `crossing_JH` is each B-scan's mean A-scan where all of them cross. As all show the same tissue there, each is
    compared with the mean of all: no error accumulates from one to the next, and all drift is motion.
    """
    rows = np.arange(crossing_JH.shape[1])
    motion = np.zeros(len(crossing_JH))
    for _ in range(3):  # repeated, because the first mean is blurred by the motion itself
        aligned = [np.interp(rows + shift, rows, ascan) for ascan, shift in zip(crossing_JH, motion, strict=True)]
        mean = np.mean(aligned, axis=0)
        pairs = (np.stack([mean, ascan])[:, None].astype(np.float32) for ascan in crossing_JH)
        motion = np.array([_neighbour_shifts(pair, reach=max(2, round(REACH_MM / dy)))[0] for pair in pairs])
        motion -= np.median(motion)
    return motion


def _neighbour_shifts(planes_DWH: np.ndarray, reach: int) -> np.ndarray:
    """Shift of each B-scan relative to the one before, in fractional rows, [D - 1]; 0 where the two are not similar."""
    height = planes_DWH.shape[2]
    reach = max(1, min(reach, height // 2))
    # Zero padding keeps the circular correlation from wrapping a retina at the bottom onto the top.
    length = -(-(height + reach) // 64) * 64  # a product of small primes for every size that occurs
    contrast = planes_DWH - planes_DWH.mean(axis=2, keepdims=True)
    spectra = np.fft.rfft(contrast, length, axis=2)
    correlation = np.fft.irfft((np.conj(spectra[:-1]) * spectra[1:]).sum(axis=1), length, axis=1)
    lags = np.arange(-reach, reach + 1)
    # Negative lags are counted from the end, where a circular correlation has them.
    near = correlation[:, lags]
    best = near.argmax(axis=1)
    inner = np.clip(best, 1, len(lags) - 2)
    pairs = np.arange(len(near))
    below, peak, above = near[pairs, inner - 1], near[pairs, inner], near[pairs, inner + 1]
    curvature = below - 2 * peak + above
    # The vertex of the parabola through the peak and its neighbours gives the fraction of a row.
    parabola = np.divide(below - above, 2 * curvature, out=np.zeros_like(peak), where=curvature < 0)
    shift = lags[best] + np.where(best == inner, np.clip(parabola, -0.5, 0.5), 0.0)
    energy = np.sqrt(np.square(contrast).sum(axis=(1, 2)))
    return np.where(near[pairs, best] > SIMILAR * energy[:-1] * energy[1:], shift, 0.0)


def robust_quadratic(position: np.ndarray, path: np.ndarray) -> np.ndarray:
    """Quadratic fit, iteratively reweighted towards the median: a saccade in a few B-scans hardly changes it."""
    # Through a few points a quadratic would take motion for anatomy.
    degree = 2 if len(path) >= 8 else 0
    basis = np.vander((position - position.mean()) / max(np.ptp(position), 1), degree + 1)
    weights = np.ones(len(path))
    fit = path
    for _ in range(5):
        fit = basis @ np.linalg.lstsq(basis * weights[:, None], path * weights, rcond=None)[0]
        residual = np.abs(path - fit)
        # Without the lower limit a few points that fit by chance would get all the weight.
        weights = 1 / np.sqrt(np.maximum(residual, max(np.median(residual), 0.25)))
    return fit
