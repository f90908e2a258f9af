"""The tissue band: two surfaces per A-scan around everything between ILM and Bruch's membrane (BM), found without labels."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from octfm.volume.planes import Planes, memory_order
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
from octfm.volume.volume import Spacing3

MARGIN_MM = 0.05
"""The band starts this far above the estimated ILM and ends this far below the estimated BM (DESIGN §5)."""

COARSE_MM = (0.008, 0.06)
"""The surfaces are searched on block means of about this size (axial, lateral): fine against the margin, and speckle averages out."""

BSCANS_MM, NEIGHBOURS_MM = 0.11, 0.06
"""B-scans that lie closer are not all searched; each that is, is averaged with its neighbours within the second distance."""

THRESHOLD = 0.2
"""Signal between vitreous and retina, on the scale of `_normalise`."""

THINNEST_MM = 0.11
"""No retina is thinner (a fovea keeps 0.15); less than this between ILM and BM is a full-thickness hole."""

DEEPEST_PIT_MM = 0.2
"""No fovea is deeper below its rim; what is deeper is a hole, or the cup of the optic disc."""

RPE_TO_BM_MM = 0.01
"""The path follows the brightest row of the RPE; Bruch's membrane is its lower edge."""

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
"""Smallest value of each confidence measurement that is still trusted."""


@dataclass(frozen=True, eq=False)
class Tissue:
    """What the search found, in native rows of a volume whose B-scan order and laterality are already canonical."""

    ilm: np.ndarray
    """[D, W] float32, estimated inner limiting membrane; a full-thickness hole is bridged from rim to rim. May leave the frame."""
    bm: np.ndarray
    """[D, W] float32, estimated Bruch's membrane. May leave the frame."""
    fovea: tuple[float, float] | None
    """(B-scan, A-scan) index of the foveal pit, None where no pit stands out."""
    displacement: np.ndarray
    """[D] float64, axial displacement of each B-scan by eye motion."""
    confident: bool
    """False: do not trust the surfaces, keep every row."""
    confidence: dict[str, float]
    """The measurements behind `confident`, each with its floor in `FLOORS`."""

    @property
    def located(self) -> bool:
        """The retina was found, even if Bruch's membrane may lie below what was taken for it."""
        return _above_floors(self.confidence, except_for="bm_not_lifted")


def find_tissue(voxels_DHW: np.ndarray | Planes, spacing_mm: Spacing3) -> Tissue:
    """Register the B-scans, find the ILM, then the RPE below it, each as the best path per B-scan with its neighbours as referees."""
    coarse, block = _block_means(voxels_DHW, spacing_mm)
    dy, dx = spacing_mm[1] * block[0], spacing_mm[2] * block[1]
    displacement = register_bscans(coarse, (spacing_mm[0], dy, dx))
    blank = _blank(coarse)
    low, contrast, contrast_to_noise = _levels(coarse, blank)
    pad = int(np.ceil(np.abs(displacement).max() + 0.3 / dy))
    searched = _searched(len(coarse), spacing_mm[0])
    dz = spacing_mm[0] * (searched[1] - searched[0] if len(searched) > 1 else 1)
    signal, seen = _align(coarse, blank, displacement, searched, int(NEIGHBOURS_MM / spacing_mm[0]), pad)
    _normalise(signal, seen, low, contrast)

    ilm_score = _by_bscan(partial(_ilm_score, dy=dy), signal, seen)
    ilm = median_of_bscans(best_path(ilm_score, jump=max(1, round(1.5 * dx / dy)), penalty=0.05), dz)
    del ilm_score
    # Pits and holes in the ILM must not forbid the RPE below them.
    rim = envelope(ilm, (dz, dx), -1)
    top = int(np.clip(np.floor((rim + 0.1 / dy).min()), 0, signal.shape[2] - 1))
    rpe_score = _by_bscan(partial(_rpe_score, dy=dy, top=top), signal, seen, rim, rows=signal.shape[2] - top)
    scale = np.float32(1 / max(float(np.median(rpe_score.max(axis=2))), 1e-6))
    for score, shown in zip(rpe_score, seen[:, :, top:], strict=True):
        score *= scale
        # Out of the frame, where it is 0, nothing speaks for or against, so a tilted RPE may leave it.
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
    fovea = _find_fovea((bm - ilm) * dy, (dz, dx))
    return Tissue(
        ilm=ilm_native,
        bm=bm_native,
        fovea=fovea
        and (float(np.interp(fovea[0], np.arange(len(searched)), searched)), (fovea[1] + 0.5) * block[1] - 0.5),
        displacement=displacement * block[0],
        confident=_above_floors(confidence),
        confidence=confidence,
    )


def _above_floors(confidence: dict[str, float], except_for: str = "") -> bool:
    return all(confidence[name] >= floor for name, floor in FLOORS.items() if name != except_for)


def _block_means(voxels: np.ndarray | Planes, spacing_mm: Spacing3) -> tuple[np.ndarray, tuple[int, int]]:
    """Means over (rows, A-scans) blocks, float32 [D, W, H]; a remainder at the far border is dropped."""
    depth, height, width = voxels.shape
    rows = min(max(1, round(COARSE_MM[0] / spacing_mm[1])), height)
    columns = min(max(1, round(COARSE_MM[1] / spacing_mm[2])), width)
    h, w = height // rows, width // columns
    means = np.empty((depth, w, h), np.float32)
    exact = np.uint16 if rows * columns * 255 < 2**16 else np.uint32
    for bscan, mean in zip(voxels, means, strict=True):
        step = memory_order(bscan)
        bscan = bscan[: h * rows, : w * columns][:, ::step]
        total = bscan[::rows].astype(exact)
        for row in range(1, rows):
            total += bscan[row::rows]
        # All rows as one: sums that reach into the next row are not among those that are taken.
        sums = window_sum(total.reshape(-1), columns)[::columns].reshape(h, w)
        np.divide(sums.T[::step], np.float32(rows * columns), out=mean)
    return means, (rows, columns)


def _blank(coarse: np.ndarray) -> np.ndarray:
    """bool [D, W]: A-scans of one value. Two rows tell nearly every other one."""
    height = coarse.shape[2]
    blank = coarse[:, :, height // 2] == coarse[:, :, height // 3]
    doubtful = coarse[blank]
    blank[blank] = doubtful.max(axis=1) == doubtful.min(axis=1) if len(doubtful) else True
    return blank


def _levels(coarse: np.ndarray, blank: np.ndarray) -> tuple[float, float, float]:
    """Noise floor; the step from it to the brightest layers in grey levels, and the same step in standard deviations of the speckle that
    is left. Told by every second B-scan, or by fewer where there are many."""
    some = slice(None, None, max(2, len(coarse) // 16))
    sample, blank = coarse[some], blank[some]
    # The floor is the level of the noise, not its darkest speckle: look at means over many blocks.
    calm = _moving_mean(_moving_mean(sample, 3, 1, step=3), 3, 2, step=3)[~blank[:, ::3]]
    if not calm.size:
        return 0.0, 0.0, 0.0
    low = float(np.percentile(calm, 10))
    contrast = max(float(np.percentile(_moving_mean(sample, 1, 1)[~blank], 99)) - low, 1e-3)
    noise = float(np.abs(sample[:, ::2, 2::2] - sample[:, ::2, :-2:2]).sum()) / max(sample[:, ::2, 2::2].size, 1) + 1e-3
    return low, contrast, contrast / noise


def _searched(depth: int, dz: float) -> np.ndarray:
    """int64: the B-scans whose surfaces are searched, about 0.1 mm apart: registered neighbours that lie closer show the same retina."""
    step = max(1, int(BSCANS_MM / dz))
    return np.arange((depth - 1) % step // 2, depth, step)


def _align(
    coarse: np.ndarray, blank: np.ndarray, displacement: np.ndarray, searched: np.ndarray, reach: int, pad: int
) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the B-scans within ± `reach` of each of `searched`, shifted by minus their displacements (linear), with `pad` rows more
    on both sides: float32 [S, W, H + 2 pad] of what was seen, 0 elsewhere; and which voxels were seen at all."""
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
            total[:, at][:, -1] += share[:, -1]
            count[:, at] += shown[:, None]
        np.greater(count, 0, out=where)
        if reach:
            total /= count.clip(1, np.inf)
    return out, seen


def _normalise(means: np.ndarray, seen: np.ndarray, low: float, contrast: float) -> None:
    """In place: brightness with the noise floor at 0 and the brightest layers near 1, 0 where nothing was seen."""
    if not contrast:
        means[:] = 0
    for signal, shown in zip(
        means[:, None], seen[:, None], strict=True
    ):  # one by one: a B-scan stays in the processor's cache
        signal -= np.float32(low)
        signal *= shown
        signal[:] = _moving_mean(signal, 1, 1)
        signal *= shown
        signal /= np.float32(contrast or 1)
        # Shadows, vignetting and fading dim whole A-scans: bring the brightest layer near 1 on each, but do not raise noise.
        three_rows = signal[:, :, :-2] + signal[:, :, 1:-1]
        three_rows += signal[:, :, 2:]
        peak = _moving_mean(three_rows.max(axis=2, keepdims=True) / np.float32(3), 6, 1)
        signal /= peak.clip(np.float32(0.35), np.inf)


def _by_bscan(function: Callable[..., np.ndarray], *arrays: np.ndarray, rows: int | None = None) -> np.ndarray:
    """`function` of a few B-scans at a time, float32 [D, W, rows] (None: as the first array): they stay in the processor's cache, and what
    it needs besides stays small."""
    depth, width, height = arrays[0].shape
    out = np.empty((depth, width, rows or height), np.float32)
    few = max(1, 2**15 // (width * height))
    for start in range(0, depth, few):
        part = slice(start, start + few)
        out[part] = function(*(array[part] for array in arrays))
    return out


def _moving_mean(array: np.ndarray, reach: int, axis: int, step: int = 1) -> np.ndarray:
    """Mean over ± `reach` along an axis, the border repeated, at every `step`-th place."""
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
    """Score of placing the ILM at each row: bright below it and dark above it count. Dark counts little, so that a cyst does not cut
    the retina in two; what is bright over less than 0.04 mm is not retina but a hyaloid or a floater, and counts as dark."""
    gain = _opened(signal, max(1, round(0.04 / dy)))
    gain -= np.float32(THRESHOLD)
    gain *= seen
    np.maximum(gain, np.float32(0.15) * gain, out=gain)
    gain = gain.clip(-np.inf, np.float32(0.5), out=gain)
    # What is below a row is what there is in all, the same for every row of an A-scan, less what is above it.
    gain -= running_sum(gain)
    return gain


def _opened(signal: np.ndarray, rows: int) -> np.ndarray:
    """Morphological opening along A-scans: bright runs shorter than `rows` disappear, every other edge stays where it is."""
    # All A-scans as one: windows that reach into the next one begin in the last rows, which are then set below all others.
    wide = np.full(signal.size + rows - 1, -1, np.float32)
    low = wide[rows - 1 :]
    low[: signal.size - rows + 1] = _over_window(np.minimum, signal.reshape(-1), rows)
    low.reshape(signal.shape)[:, :, signal.shape[2] - rows + 1 :] = -1
    return _over_window(np.maximum, wide, rows).reshape(signal.shape)


def _over_window(function: np.ufunc, values: np.ndarray, rows: int) -> np.ndarray:
    """Smallest or largest of each `rows` successive values; the window doubles instead of being walked."""
    done = 1
    while done < rows:
        step = min(done, rows - done)
        values = function(values[step:], values[:-step])
        done += step
    return values


def _rpe_score(signal: np.ndarray, seen: np.ndarray, rim: np.ndarray, dy: float, top: int) -> np.ndarray:
    """Score of placing the RPE at each row from `top` on; the nerve fibre layer can be as bright, so nothing near the ILM counts."""
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
    """How strongly each voxel attenuates, 0 to 1: bright, with little energy left below it, as in Vermeer et al., Biomed. Opt.
    Express 5:322, 2014. The nerve fibre layer may be as bright as the RPE but has the whole retina below."""
    energy = np.square(bright)
    above_and_here = running_sum(energy)
    # The choroid goes on below the frame; without a guess of it the last row would look like the end of all tissue.
    last = bright.shape[2] - 1 - seen[:, :, ::-1].argmax(axis=2)
    few = max(1, round(0.05 / dy))
    tail = (above_and_here[:, :, -1] - at_rows(above_and_here, last - few)) * np.float32(0.15 / few)
    above_and_here *= np.float32(dy)
    # 40 times the energy below, and a little that keeps noise from counting, in one pass.
    rest = np.multiply(above_and_here, np.float32(-40), out=above_and_here)
    rest += (np.float32(40) * tail + np.float32(0.05) - above_and_here[:, :, -1])[:, :, None]
    rest += energy
    return np.divide(energy, rest, out=rest)


def _brighter_than_above(bright: np.ndarray, here: np.ndarray, first: int, past: int) -> np.ndarray:
    """`here`, which begins at row `past` of `bright`, less the mean of `first` to `past` - 1 rows (0.05 to 0.15 mm) above,
    0 to 1: outer retina or fluid over the RPE, but choroid over the bottom of the choroid."""
    window, rows = past - first, here.shape[2]
    # All A-scans as one: what reaches into the next one is dropped.
    sums = np.empty(bright.shape, np.float32)
    sums.reshape(-1)[: bright.size - window + 1] = window_sum(bright.reshape(-1), window)
    difference = sums[:, :, 1 : rows + 1] * np.float32(-1 / window)
    difference += here
    return difference.clip(0, 1, out=difference)


def _bridge_holes(ilm: np.ndarray, hole: np.ndarray, reach: int) -> np.ndarray:
    """The ILM with holes bridged from rim to rim, starting `reach` A-scans and one B-scan outside, where the rim is at full height."""
    gap = near(near(hole, reach, axis=1), 1, axis=0)
    out = ilm.copy()
    x = np.arange(ilm.shape[1])
    for d in np.flatnonzero(gap.any(axis=1) & ~gap.all(axis=1)):
        out[d, gap[d]] = np.minimum(ilm[d, gap[d]], np.interp(x[gap[d]], x[~gap[d]], ilm[d, ~gap[d]]))
    return out


def _find_fovea(thickness_mm: np.ndarray, spacing_mm: tuple[float, float]) -> tuple[float, float] | None:
    """The deepest pit of the middle half of the field, the more central one if in doubt. A pit is thinner by at least 0.03 mm than
    what lies 0.9 mm away in every direction: beside a swelling, one side is thicker and the other is not."""
    local = smooth(thickness_mm, spacing_mm, 0.2)
    rows, columns = (np.arange(n) for n in local.shape)
    depth = np.full(local.shape, np.inf)
    for angle in np.arange(8) * np.pi / 4:
        there = np.clip(rows + round(0.9 * np.sin(angle) / spacing_mm[0]), 0, len(rows) - 1)
        across = np.clip(columns + round(0.9 * np.cos(angle) / spacing_mm[1]), 0, len(columns) - 1)
        depth = np.minimum(depth, local[there][:, across] - local)
    d, w = ((index - (len(index) - 1) / 2) * mm for index, mm in zip((rows, columns), spacing_mm, strict=True))
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
    """Shares of A-scans (0 to 1) on which the surfaces look like an ILM and an RPE, whose score [D, W] is given."""
    dz, dy, _ = spacing_mm
    n = max(1, round(0.05 / dy))
    step = np.mean([at_rows(signal, ilm + i) - at_rows(signal, ilm - i - 2) for i in range(n)], axis=0)
    filled = np.mean([at_rows(signal, ilm + i) > THRESHOLD for i in range(3 * n)], axis=0)
    ilm_seen = at_rows(seen, ilm + n) & at_rows(seen, ilm - n - 1)
    rpe_seen = at_rows(seen, rpe)
    jumps = (np.abs(np.diff(ilm, axis=0)) + np.abs(np.diff(rpe, axis=0))) * dy
    thickness = (bm - ilm) * dy
    # Bruch's membrane bows smoothly: where it seems to stand above the bowl of the rest, the RPE is lifted and BM may lie deeper.
    # Not at the disc, where there is no RPE and the path runs through nerve fibres, right below the ILM.
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
