"""Find the ILM and Bruch's membrane (BM) of a volume without labels; the tissue band lies between them.

Steps: average to coarse voxels, register the B-scans, normalise brightness, then search the ILM and, below it, the RPE
as the best paths through scores made for them. Shares of A-scans on which the result looks right decide whether it is
trusted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np

from octfm.volume.registration import register_bscans
from octfm.volume.surface import (
    at_rows,
    best_path,
    between_bscans,
    bowl,
    envelope,
    median_of_bscans,
    near,
    refine,
    running_sum,
    smooth,
    window_sum,
)
from octfm.volume.volume import Planes, Spacing3, memory_order

MARGIN_MM = 0.05
"""The band starts this far above the estimated ILM and ends this far below the estimated BM."""

COARSE_MM = (0.008, 0.06)
"""Surfaces are searched on block means of this size (axial, lateral): finer than the margin, speckle averages out."""

BSCANS_MM, NEIGHBOURS_MM = 0.11, 0.06
"""With B-scans closer than the first distance some are searched, averaged with neighbours within the second."""

THRESHOLD = 0.2
"""Signal level that separates vitreous from retina, on the scale of `_normalise`."""

THINNEST_MM = 0.11
"""No retina is thinner (a fovea has 0.15 mm or more): where ILM and BM are closer there is a full-thickness hole."""

DEEPEST_PIT_MM = 0.2
"""No foveal pit is deeper below its rim; a deeper one is a hole, or the cup of the optic disc."""

RPE_TO_BM_MM = 0.01
"""Distance from the brightest row of the RPE, which the path follows, to Bruch's membrane, its lower edge."""

FLOORS = {
    "contrast": 0.04,
    "contrast_to_noise": 2.0,
    "unsaturated": 0.5,
    "ilm_support": 0.75,
    "retina_support": 0.85,
    "rpe_support": 0.6,
    "smoothness": 0.88,
    "thickness": 0.9,
    "bm_not_lifted": 0.99,
}
"""Smallest value of each confidence measurement at which the surfaces are trusted."""


@dataclass(frozen=True, eq=False)
class Tissue:
    """Result of the search, in native rows of a volume whose B-scan order and laterality are canonical already."""

    ilm: np.ndarray
    """float32 [D, W], inner limiting membrane, bridged from rim to rim over full-thickness holes. May leave the
    frame."""
    bm: np.ndarray
    """float32 [D, W], Bruch's membrane. May leave the frame."""
    fovea: tuple[float, float] | None
    """(B-scan, A-scan) index of the foveal pit; None if no pit stands out."""
    displacement: np.ndarray
    """float64 [D], axial displacement of each B-scan by eye motion."""
    confident: bool
    """Whether the surfaces are trusted; if not, every row is kept."""
    confidence: dict[str, float]
    """The measurements behind `confident`, each with its floor in `FLOORS`."""
    located: bool
    """Whether the retina was found, even if Bruch's membrane may be deeper than estimated."""


class BandFinder(Protocol):
    """What finds a learned band; passed in by the caller, since this folder knows no network."""

    @property
    def network(self) -> str:
        """Name and SHA-256 of the network, as in `Preprocessing.band_network`."""
        ...

    @property
    def memory(self) -> int:
        """Bytes that it takes in a worker."""
        ...

    @property
    def seconds_per_megabyte(self) -> float:
        """Seconds that a worker may take for it, per million voxels."""
        ...

    def __call__(self, voxels_DHW: np.ndarray | Planes, spacing_mm: Spacing3, classic: Tissue) -> Tissue:
        """The retina in a volume in which `find_tissue` has found `classic`: not confident where it is unsure."""
        ...


def find_tissue(voxels_DHW: np.ndarray | Planes, spacing_mm: Spacing3) -> Tissue:
    """Register B-scans, then find ILM and RPE below it: best path per B-scan, median over neighbouring ones."""
    coarse, block = _block_means(voxels_DHW, spacing_mm)
    dy, dx = spacing_mm[1] * block[0], spacing_mm[2] * block[1]
    displacement = register_bscans(coarse, (spacing_mm[0], dy, dx))
    blank = _blank(coarse)
    low, contrast, contrast_to_noise = _levels(coarse, blank)
    # Room for every displacement, and for surfaces that leave the frame by up to 0.3 mm.
    pad = int(np.ceil(np.abs(displacement).max() + 0.3 / dy))
    searched = searched_bscans(len(coarse), spacing_mm[0], BSCANS_MM)
    dz = spacing_mm[0] * (searched[1] - searched[0] if len(searched) > 1 else 1)
    signal, seen = _align(coarse, blank, displacement, searched, int(NEIGHBOURS_MM / spacing_mm[0]), pad)
    _normalise(signal, seen, low, contrast)

    ilm_score = _by_bscan(partial(_ilm_score, dy=dy), signal, seen)
    # `jump` limits the slope of a path, in rows per A-scan: 1.5 mm per mm here, 1 mm per mm for the RPE.
    ilm = median_of_bscans(best_path(ilm_score, jump=max(1, round(1.5 * dx / dy)), penalty=0.05), dz)
    # It is as large as the averaged volume, and so is the next score.
    del ilm_score
    # Pits and holes in the ILM must not forbid the RPE below them.
    rim = envelope(ilm, (dz, dx), -1)
    top = int(np.clip(np.floor((rim + 0.1 / dy).min()), 0, signal.shape[2] - 1))
    rpe_score = _by_bscan(partial(_rpe_score, dy=dy, top=top), signal, seen, rim, rows=signal.shape[2] - top)
    scale = np.float32(1 / max(float(np.median(rpe_score.max(axis=2))), 1e-6))
    for score, shown in zip(rpe_score, seen[:, :, top:], strict=True):
        score *= scale
        # Outside the frame the score would be 0; a neutral value lets the path of a tilted RPE leave the frame.
        score += np.float32(0.25) * ~shown
    rpe = median_of_bscans(best_path(rpe_score, jump=max(1, round(dx / dy)), penalty=0.06), dz) + np.float32(top)
    bm = envelope(rpe, (dz, dx), 1) + np.float32(RPE_TO_BM_MM / dy)
    ilm = _bridge_holes(ilm, (bm - ilm < THINNEST_MM / dy) | (ilm - rim > DEEPEST_PIT_MM / dy), round(0.25 / dx))

    confidence = {
        "contrast": contrast / 255,
        "contrast_to_noise": contrast_to_noise,
        "unsaturated": 1 - min(1.0, float(np.count_nonzero(coarse[searched] >= 254) / max((bm - ilm).sum(), 1))),
        **_support(signal, seen, at_rows(rpe_score, rpe - top), ilm, rpe, bm, (dz, dy, dx)),
    }
    width = voxels_DHW.shape[2]
    ilm_native, bm_native = (
        refine(between_bscans(surface, searched, displacement) - pad, block, width) for surface in (ilm, bm)
    )
    fovea = find_fovea((bm - ilm) * dy, (dz, dx))
    return Tissue(
        ilm=ilm_native,
        bm=bm_native,
        fovea=fovea
        and (float(np.interp(fovea[0], np.arange(len(searched)), searched)), (fovea[1] + 0.5) * block[1] - 0.5),
        displacement=displacement * block[0],
        confident=_above_floors(confidence),
        confidence=confidence,
        located=_above_floors(confidence, except_for="bm_not_lifted"),
    )


def _above_floors(confidence: dict[str, float], except_for: str = "") -> bool:
    """Whether all measurements but one reach their floors."""
    return all(confidence[name] >= floor for name, floor in FLOORS.items() if name != except_for)


def _block_means(voxels: np.ndarray | Planes, spacing_mm: Spacing3) -> tuple[np.ndarray, tuple[int, int]]:
    """Means over (rows, A-scans) blocks, float32 [D, W, H]; a remainder at the far border is dropped."""
    depth, height, width = voxels.shape
    rows = min(max(1, round(COARSE_MM[0] / spacing_mm[1])), height)
    columns = min(max(1, round(COARSE_MM[1] / spacing_mm[2])), width)
    h, w = height // rows, width // columns
    means = np.empty((depth, w, h), np.float32)
    # Where the sum of a block fits into 16 bits, half as many bytes have to be moved.
    exact = np.uint16 if rows * columns * 255 < 2**16 else np.uint32
    for bscan, mean in zip(voxels, means, strict=True):
        step = memory_order(bscan)
        bscan = bscan[: h * rows, : w * columns][:, ::step]
        total = bscan[::rows].astype(exact)
        for row in range(1, rows):
            total += bscan[row::rows]
        # Sum along all rows joined into one; the sums that reach into the next row are skipped by the stride.
        sums = window_sum(total.reshape(-1), columns)[::columns].reshape(h, w)
        np.divide(sums.T[::step], np.float32(rows * columns), out=mean)
    return means, (rows, columns)


def _blank(coarse: np.ndarray) -> np.ndarray:
    """Which A-scans are constant, bool [D, W]. Comparing two rows rules out nearly all others."""
    height = coarse.shape[2]
    blank = coarse[:, :, height // 2] == coarse[:, :, height // 3]
    doubtful = coarse[blank]
    blank[blank] = doubtful.max(axis=1) == doubtful.min(axis=1) if len(doubtful) else True
    return blank


def _levels(coarse: np.ndarray, blank: np.ndarray) -> tuple[float, float, float]:
    """(noise floor and contrast to the brightest layers in grey levels, contrast to noise) of coarse voxels.

    Noise is the remaining speckle. Measured on every second B-scan, or on fewer if there are many.
    """
    some = slice(None, None, max(2, len(coarse) // 16))
    sample, blank = coarse[some], blank[some]
    # The floor is the mean level of the noise, not its darkest speckle, so it is taken from means over many blocks.
    calm = _moving_mean(_moving_mean(sample, 3, 1, step=3), 3, 2, step=3)[~blank[:, ::3]]
    if not calm.size:
        return 0.0, 0.0, 0.0
    low = float(np.percentile(calm, 10))
    contrast = max(float(np.percentile(_moving_mean(sample, 1, 1)[~blank], 99)) - low, 1e-3)
    noise = float(np.abs(sample[:, ::2, 2::2] - sample[:, ::2, :-2:2]).sum()) / max(sample[:, ::2, 2::2].size, 1) + 1e-3
    return low, contrast, contrast / noise


def searched_bscans(depth: int, dz: float, apart_mm: float) -> np.ndarray:
    """Indices of the B-scans to search, about `apart_mm` apart: closer neighbours show the same retina."""
    step = max(1, int(apart_mm / dz))
    return np.arange((depth - 1) % step // 2, depth, step)


def _align(
    coarse: np.ndarray, blank: np.ndarray, displacement: np.ndarray, searched: np.ndarray, reach: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """Registered mean of the B-scans within ± `reach` of each of `searched`, and which of its voxels were imaged.

    Both [S, W, H + 2 pad], with `pad` more rows above and below; the mean is over B-scans that are not blank, and 0
    where nothing was imaged. Displacements are undone with linear interpolation.
    """
    depth, width, height = coarse.shape
    reach = min(reach, (depth - 1) // 2)
    out = np.zeros((len(searched), width, height + 2 * pad), np.float32)
    seen = np.zeros(out.shape, bool)
    count = np.empty(out.shape[1:], np.float32)
    share = np.empty((width, height), np.float32)
    for middle, total, where in zip(searched, out, seen, strict=True):
        count.fill(0)
        for bscan in range(max(0, middle - reach), min(depth, middle + reach + 1)):
            whole = int(np.floor(displacement[bscan]))
            part = np.float32(displacement[bscan] - whole)
            at, plane, shown = slice(pad - whole, pad - whole + height), coarse[bscan], ~blank[bscan]
            if not shown.all():
                plane = plane * shown[:, None]
            total[:, at] += np.multiply(plane, 1 - part, out=share)
            np.multiply(plane, part, out=share)
            total[:, at][:, :-1] += share[:, 1:]
            # The last row has none below it to interpolate with.
            total[:, at][:, -1] += share[:, -1]
            count[:, at] += shown[:, None]
        np.greater(count, 0, out=where)
        if reach:
            total /= count.clip(1, np.inf)
    return out, seen


def _normalise(means: np.ndarray, seen: np.ndarray, low: float, contrast: float) -> None:
    """Scale brightness in place: noise floor at 0, brightest layers near 1, and 0 where nothing was imaged."""
    if not contrast:
        means[:] = 0
    # One B-scan at a time fits into the processor's cache.
    for signal, shown in zip(means[:, None], seen[:, None], strict=True):
        signal -= np.float32(low)
        signal *= shown
        signal[:] = _moving_mean(signal, 1, 1)
        signal *= shown
        signal /= np.float32(contrast or 1)
        # Shadows and vignetting dim whole A-scans: scale the brightest layer of each to about 1, within limits, so that
        # A-scans of noise are not amplified.
        three_rows = signal[:, :, :-2] + signal[:, :, 1:-1]
        three_rows += signal[:, :, 2:]
        peak = _moving_mean(three_rows.max(axis=2, keepdims=True) / np.float32(3), 6, 1)
        signal /= peak.clip(np.float32(0.35), np.inf)


def _by_bscan(function: Callable[..., np.ndarray], *arrays: np.ndarray, rows: int | None = None) -> np.ndarray:
    """Apply `function` to a few B-scans at a time, which fit into the processor's cache, with little scratch memory.

    Returns float32 [D, W, rows]; `rows` is None for the height of the first array.
    """
    depth, width, height = arrays[0].shape
    out = np.empty((depth, width, rows or height), np.float32)
    few = max(1, 2**15 // (width * height))
    for start in range(0, depth, few):
        part = slice(start, start + few)
        out[part] = function(*(array[part] for array in arrays))
    return out


def _moving_mean(array: np.ndarray, reach: int, axis: int, step: int = 1) -> np.ndarray:
    """Mean over ± `reach` along axis 1 or 2, at every `step`-th place; the border is repeated."""
    padded = np.concatenate([array.take([0] * reach, axis), array, array.take([-1] * reach, axis)], axis)
    n = array.shape[axis]
    shifted = [
        padded[:, i : i + n : step] if axis == 1 else padded[:, :, i : i + n : step] for i in range(2 * reach + 1)
    ]
    total = shifted[0] + shifted[1]
    for values in shifted[2:]:
        total += values
    total /= np.float32(2 * reach + 1)
    return total


def _ilm_score(signal: np.ndarray, seen: np.ndarray, dy: float) -> np.ndarray:
    """Score of placing the ILM at each row: the sum of the signal above THRESHOLD below it.

    Dark voxels count little, so that a cyst does not split the retina. Bright runs shorter than 0.04 mm are not retina
    but hyaloid or floaters, and count as dark.
    """
    gain = _opened(signal, max(1, round(0.04 / dy)))
    gain -= np.float32(THRESHOLD)
    gain *= seen
    np.maximum(gain, np.float32(0.15) * gain, out=gain)
    gain = gain.clip(-np.inf, np.float32(0.5), out=gain)
    # The sum below a row is the total of its A-scan, a constant that does not affect the path, less the sum down to it.
    gain -= running_sum(gain)
    return gain


def _opened(signal: np.ndarray, rows: int) -> np.ndarray:
    """Morphological opening along A-scans: removes bright runs shorter than `rows`, leaves other edges in place."""
    # All A-scans are joined into one. Windows that reach into the next A-scan start in the last rows, which are then
    # set to -1, below all signal.
    wide = np.full(signal.size + rows - 1, -1, np.float32)
    low = wide[rows - 1 :]
    low[: signal.size - rows + 1] = _over_window(np.minimum, signal.reshape(-1), rows)
    low.reshape(signal.shape)[:, :, signal.shape[2] - rows + 1 :] = -1
    return _over_window(np.maximum, wide, rows).reshape(signal.shape)


def _over_window(function: np.ufunc, values: np.ndarray, rows: int) -> np.ndarray:
    """Minimum or maximum of each `rows` successive values, by doubling the window."""
    covered = 1
    while covered < rows:
        step = min(covered, rows - covered)
        values = function(values[step:], values[:-step])
        covered += step
    return values


def _rpe_score(signal: np.ndarray, seen: np.ndarray, rim: np.ndarray, dy: float, top: int) -> np.ndarray:
    """Score of placing the RPE at each row from `top` on; 0 near the ILM, as the nerve fibre layer can be as bright."""
    past = round(0.15 / dy) + 1
    bright = signal[:, :, max(0, top - past) :].clip(0, np.inf)
    if top < past:
        bright = np.concatenate([np.zeros((*bright.shape[:2], past - top), np.float32), bright], axis=2)
    here = bright[:, :, past:]
    score = _attenuation(here, seen[:, :, top:], dy)
    score *= _brighter_than_above(bright, here, round(0.05 / dy), past)
    lowest = rim[:, :, None] + np.float32(0.1 / dy)
    upper = np.arange(top, min(max(int(lowest.max()) + 1, top), signal.shape[2]))
    score[:, :, : len(upper)] *= upper >= lowest
    return score


def _attenuation(bright: np.ndarray, seen: np.ndarray, dy: float) -> np.ndarray:
    """Attenuation of each voxel, 0 to 1: its energy relative to all energy below it.

    After the depth-resolved attenuation of Vermeer et al., Biomed. Opt. Express 5:322, 2014. The nerve fibre layer may
    be as bright as the RPE, but has the whole retina below.
    """
    energy = np.square(bright)
    above_and_here = running_sum(energy)
    # The choroid continues below the frame; without an estimate of its energy the last row would seem to attenuate all.
    last = bright.shape[2] - 1 - seen[:, :, ::-1].argmax(axis=2)
    few = max(1, round(0.05 / dy))
    tail = (above_and_here[:, :, -1] - at_rows(above_and_here, last - few)) * np.float32(0.15 / few)
    above_and_here *= np.float32(dy)
    # 40 times the energy below, plus 0.05, which keeps noise from scoring, plus the voxel's own energy.
    rest = np.multiply(above_and_here, np.float32(-40), out=above_and_here)
    rest += (np.float32(40) * tail + np.float32(0.05) - above_and_here[:, :, -1])[:, :, None]
    rest += energy
    return np.divide(energy, rest, out=rest)


def _brighter_than_above(bright: np.ndarray, here: np.ndarray, first: int, past: int) -> np.ndarray:
    """`here` less the mean brightness 0.05 to 0.15 mm (`first` to `past` - 1 rows) above it, clipped to 0 to 1.

    `here` begins at row `past` of `bright`. Above the RPE is the darker outer retina or fluid; above the lower border
    of the choroid is choroid as bright.
    """
    window, rows = past - first, here.shape[2]
    # All A-scans are joined into one; sums that reach into the next one are dropped.
    sums = np.empty(bright.shape, np.float32)
    sums.reshape(-1)[: bright.size - window + 1] = window_sum(bright.reshape(-1), window)
    difference = sums[:, :, 1 : rows + 1] * np.float32(-1 / window)
    difference += here
    return difference.clip(0, 1, out=difference)


def _bridge_holes(ilm: np.ndarray, hole: np.ndarray, reach: int) -> np.ndarray:
    """Bridge holes in the ILM from `reach` A-scans and one B-scan outside, where the rim has full height."""
    gap = near(near(hole, reach, axis=1), 1, axis=0)
    out = ilm.copy()
    x = np.arange(ilm.shape[1])
    for d in np.flatnonzero(gap.any(axis=1) & ~gap.all(axis=1)):
        out[d, gap[d]] = np.minimum(ilm[d, gap[d]], np.interp(x[gap[d]], x[~gap[d]], ilm[d, ~gap[d]]))
    return out


def find_fovea(thickness_mm: np.ndarray, spacing_mm: tuple[float, float]) -> tuple[float, float] | None:
    """Index of the deepest pit in the middle half of the field; None if there is none.

    A pit is at least 0.03 mm thinner than the retina 0.9 mm away in every direction, which excludes places next to a
    swelling. Of similar pits the more central one is taken.
    """
    local = smooth(thickness_mm, spacing_mm, 0.2)
    rows, columns = (np.arange(n) for n in local.shape)
    depth = np.full(local.shape, np.inf)
    for angle in np.arange(8) * np.pi / 4:
        there = np.clip(rows + round(0.9 * np.sin(angle) / spacing_mm[0]), 0, len(rows) - 1)
        across = np.clip(columns + round(0.9 * np.cos(angle) / spacing_mm[1]), 0, len(columns) - 1)
        # The direction with the least rise decides.
        depth = np.minimum(depth, local[there][:, across] - local)
    d, w = ((index - (len(index) - 1) / 2) * mm for index, mm in zip((rows, columns), spacing_mm, strict=True))
    # Pits are looked for in the middle half: a disc, or the edge of the field, lies further out.
    central = (np.abs(d) <= len(d) * spacing_mm[0] / 4)[:, None] & (np.abs(w) <= len(w) * spacing_mm[1] / 4)
    score = np.where(central, depth - 0.02 * np.hypot(d[:, None], w[None]), -np.inf)
    best = np.unravel_index(score.argmax(), score.shape)
    return (float(best[0]), float(best[1])) if depth[best] >= 0.03 else None


def _support(
    signal: np.ndarray,
    seen: np.ndarray,
    score: np.ndarray,
    ilm: np.ndarray,
    rpe: np.ndarray,
    bm: np.ndarray,
    spacing_mm: Spacing3,
) -> dict[str, float]:
    """Shares of A-scans on which the surfaces look like an ILM and an RPE; `score` [D, W] is the RPE's."""
    dz, dy, _ = spacing_mm
    n = max(1, round(0.05 / dy))
    step = np.mean([at_rows(signal, ilm + i) - at_rows(signal, ilm - i - 2) for i in range(n)], axis=0)
    filled = np.mean([at_rows(signal, ilm + i) > THRESHOLD for i in range(3 * n)], axis=0)
    ilm_seen = at_rows(seen, ilm + n) & at_rows(seen, ilm - n - 1)
    rpe_seen = at_rows(seen, rpe)
    jumps = (np.abs(np.diff(ilm, axis=0)) + np.abs(np.diff(rpe, axis=0))) * dy
    thickness = (bm - ilm) * dy
    # Bruch's membrane is smooth: where it seems to rise above the bowl fitted to the rest, the RPE is lifted and BM may
    # be deeper. The disc is excluded: there is no RPE, and the path runs through nerve fibres right below the ILM.
    bottom = bowl(rpe, rpe_seen)
    lifted = ((bottom - bm) * dy > MARGIN_MM) & at_rows(seen, bottom)
    lifted &= (score > 0.3) & ((rpe - ilm) * dy > THINNEST_MM)
    return {
        "ilm_support": float((step[ilm_seen] > 0.15).mean()) if ilm_seen.any() else 0.0,
        "retina_support": float((filled[ilm_seen] > 0.5).mean()) if ilm_seen.any() else 0.0,
        "rpe_support": float((score[rpe_seen] > 0.3).mean()) if rpe_seen.any() else 0.0,
        "smoothness": float((jumps < 0.06 + 0.25 * dz).mean()) if jumps.size else 1.0,
        "thickness": float(((thickness > 0.1) & (thickness < 1.0)).mean()),
        "bm_not_lifted": 1 - float(lifted[rpe_seen].mean()) if rpe_seen.any() else 0.0,
    }
