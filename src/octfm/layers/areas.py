"""Rules that decide which areas of the network are reported as fluid, drusen and detachments.

Every rule looks at one B-scan at a time. Without them, too many areas are false in eyes without lesions: shadows of
vessels look like cysts, and noise and the rim of the optic disc like drusen.

Shape suffixes: B B-scans, M masks, S surfaces, H rows, W A-scans. `lesions_BHW` is uint8: 0, or 1 + index in MASKS;
`logit_BHW` and `logit_BMHW` are the network's log-odds; `rows_SBW` the rows of SURFACES, NaN where not found.
"""

import numpy as np

from octfm.models.layer_net import MASKS, SURFACES

LOWEST_DRUSE_UM = 20.0
"""Deposits under the RPE that are lower than this are not reported as drusen: nearly every eye above the age of 60 has
some."""
DRUSE_SURE = 1.8
"""Least mean log-odds over an area of drusen, a probability of .86."""
DRUSE_RAISED_UM = 40.0
"""Least distance of the RPE's inner edge from Bruch's membrane somewhere in an area of drusen; without drusen it is 24
to 32 µm."""
DRUSE_WIDTH_UM = 63.0
"""Least width of an area of drusen; smaller ones are drupelets, which are normal ageing (Ferris et al. 2013). These
three thresholds lower the mean volume found on phantoms without drusen from 267 to 47 nl and raise Dice on all phantoms
from .42 to .49, but miss more low drusen."""
SHADE, SHADE_UM, BESIDE_UM = 0.9, 250.0, 250.0
"""Intraretinal fluid narrower than SHADE_UM is a shadow if the RPE below it is darker than SHADE times the RPE within
BESIDE_UM on either side (both minus the brightness of the vitreous), because a cyst lets light pass."""
DETACHED_UM = 150.0
"""Where RPE and Bruch's membrane are farther apart, the space between them is a detachment, unless drusen fill more
than half of it."""
DRUSEN = slice(MASKS.index("drusen"), MASKS.index("drusen") + 1)
FLUID = slice(MASKS.index("intraretinal_fluid"), MASKS.index("subretinal_fluid") + 1)
DETACHMENT = slice(MASKS.index("detachment"), MASKS.index("detachment") + 1)
FLUID_SURE, FLUID_SUREST, FLUID_GROWS = 2.0, 4.0, 1.7
"""An area of fluid begins where the probability is above .88 (a logit of FLUID_SURE) and extends to where it falls to
.15 (a logit of −FLUID_GROWS). With .5 for both, areas in real eyes are a third as large as the graders'; with these
thresholds they are four fifths. On phantoms alone a FLUID_GROWS of 1.4 is better (docs/log). An area smaller than
SMALL_FLUID_MM2 needs FLUID_SUREST. The same holds for detachments."""
SMALL_FLUID_MM2 = 0.02
LEAST_FLUID_MM2 = 0.0015
"""Smallest area of fluid in a B-scan, such as 50 µm by 30 µm: shadows below vessels give smaller ones."""
IN_THE_IMAGE = 0.6
"""Least probability that the retina is in the image, averaged over the A-scans of an area. Inside the optic disc and
under dense shadows the network finds areas of all kinds, nearly all of them false."""
ROOF, ROOF_UM, OPEN_UM, SUBRETINAL = 0.25, 300.0, 150.0, 0.25
"""An area of fluid is the opening of a hole if a share of at least SUBRETINAL is subretinal, and if over a width of at
least OPEN_UM there is no tissue within ROOF_UM above it. Tissue exceeds the brightness of the vitreous by at least ROOF
times as much as the retina does. The width without tissue is 150 to 700 µm in a real hole, 250 to 500 µm in phantoms
with holes, 0 in central serous phantoms, and at most 100 µm in five real eyes with diabetic oedema."""


def keep_plausible(lesions_BHW: np.ndarray, rows_SBW: np.ndarray, row_um: float) -> None:
    """Clear, in place, all areas above the ILM or below Bruch's membrane, and drusen where they are lower than
    LOWEST_DRUSE_UM."""
    row = np.arange(lesions_BHW.shape[1])[None, :, None]
    # Comparisons with NaN are false: nothing is cleared where a surface was not found.
    outside = (row < rows_SBW[0][:, None] - 0.5) | (row > rows_SBW[-1][:, None] + 0.5)
    lesions_BHW[outside] = 0
    drusen = _is(lesions_BHW, DRUSEN)
    drusen &= (drusen.sum(axis=1) * row_um < LOWEST_DRUSE_UM)[:, None]
    lesions_BHW[drusen] = 0


def keep_sure_drusen(
    lesions_BHW: np.ndarray, logit_BHW: np.ndarray, rows_SBW: np.ndarray, row_um: float, ascan_um: float
) -> None:
    """Clear, in place, connected areas of drusen that are narrow or unsure, or above which the RPE is not raised."""
    from scipy import ndimage

    inner, bm = (rows_SBW[SURFACES.index(name)] for name in ("rpe_inner", "bm"))
    for bscan, logit, raised_um in zip(lesions_BHW, logit_BHW, (bm - inner) * row_um, strict=True):
        drusen = _is(bscan, DRUSEN)
        areas, count = _connected(drusen, np.ones((3, 3)))
        if count:
            means = ndimage.mean(logit, areas, np.arange(count + 1))
            kept = np.zeros(count + 1, bool)
            for i, (_, columns) in enumerate(ndimage.find_objects(areas), 1):
                width_um = (columns.stop - columns.start) * ascan_um
                # A comparison with NaN is false: where a surface was not found, the RPE does not count as raised.
                raised = (raised_um[columns] >= DRUSE_RAISED_UM).any()
                kept[i] = means[i] >= DRUSE_SURE and width_um >= DRUSE_WIDTH_UM and raised
            bscan[drusen & ~kept[areas]] = 0


def clear_shadows(lesions_BHW: np.ndarray, bscans_BHW: np.ndarray, rows_SBW: np.ndarray, ascan_um: float) -> None:
    """Clear, in place, narrow areas of intraretinal fluid that shade the RPE, as vessels and hyperreflective foci do
    and cysts do not."""
    from scipy import ndimage

    row, beside = np.arange(lesions_BHW.shape[1])[:, None], max(1, round(BESIDE_UM / ascan_um))
    ilm, inner, bm = (rows_SBW[SURFACES.index(name)] for name in ("ilm", "rpe_inner", "bm"))
    for d, (bscan, image) in enumerate(zip(lesions_BHW, bscans_BHW, strict=True)):
        cysts = bscan == 1 + FLUID.start
        areas, count = _connected(cysts)
        if not count:
            continue
        above = image[row < ilm[d] - 3]
        rpe = (row >= inner[d] - 1) & (row <= bm[d])
        # NaN where the RPE was not found; areas that cannot be compared are kept.
        bright = np.where(rpe, image, 0).sum(axis=0) / np.where(rpe.any(axis=0), rpe.sum(axis=0), np.nan)
        bright = bright - (above.mean() if above.size else 0)
        kept = np.ones(count + 1, bool)
        for i, (_, columns) in enumerate(ndimage.find_objects(areas), 1):
            first, last = columns.start, columns.stop
            near = np.r_[bright[max(0, first - beside) : first], bright[last : last + beside]]
            own, near = bright[columns], near[np.isfinite(near)]
            if (last - first) * ascan_um < SHADE_UM and np.isfinite(own).any() and near.size and near.mean():
                kept[i] = np.nanmean(own) / near.mean() >= SHADE
        bscan[cysts & ~kept[areas]] = 0


def fill_detachments(lesions_BHW: np.ndarray, rows_SBW: np.ndarray, row_um: float) -> None:
    """Mark detachments in place, as the surfaces show them: fluid below the RPE, and everything between RPE and Bruch's
    membrane where they are more than DETACHED_UM apart and drusen fill at most half of the space."""
    row = np.arange(lesions_BHW.shape[1])[None, :, None]
    inner, peak, bm = (rows_SBW[SURFACES.index(name)][:, None] for name in ("rpe_inner", "rpe_peak", "bm"))
    drusen = _is(lesions_BHW, DRUSEN)
    fluid = _is(lesions_BHW, FLUID)
    apart = bm - peak
    raised = (apart * row_um > DETACHED_UM) & (drusen.sum(axis=1, keepdims=True) <= apart / 2)
    below = fluid & (row > inner + 1) & (row <= bm)
    between = raised & (row > peak) & (row < bm - 0.5) & ~drusen
    lesions_BHW[below | between] = 1 + MASKS.index("detachment")


def one_kind_of_fluid(lesions_BHW: np.ndarray, logit_BMHW: np.ndarray) -> None:
    """Turn, in place, a detachment that touches a larger area of intraretinal or subretinal fluid into the more
    probable of these two.

    Under a cyst the network often takes the lower part of the same dark space for a detachment.
    """
    from scipy import ndimage

    for bscan, logit in zip(lesions_BHW, logit_BMHW, strict=True):
        fluid, detached = _is(bscan, FLUID), _is(bscan, DETACHMENT)
        areas, count = _connected(fluid | detached)
        if count:
            sums = [ndimage.sum_labels(mask, areas, np.arange(count + 1)) for mask in (fluid, detached)]
            turned = detached & (sums[0] > sums[1])[areas]
            bscan[turned] = 1 + FLUID.start + logit[FLUID].argmax(axis=0)[turned]


def keep_visible(lesions_BHW: np.ndarray, present_BW: np.ndarray) -> None:
    """Clear, in place, connected areas of any kind where the retina is probably not in the image (IN_THE_IMAGE)."""
    from scipy import ndimage

    for bscan, present in zip(lesions_BHW, present_BW, strict=True):
        for kind in range(1, 1 + len(MASKS)):
            own = bscan == kind
            areas, _ = _connected(own)
            for i, (rows, columns) in enumerate(ndimage.find_objects(areas), 1):
                area = areas[rows, columns] == i
                if present[columns][area.any(axis=0)].mean() < IN_THE_IMAGE:
                    bscan[rows, columns][area] = 0


def keep_sure(lesions_BHW: np.ndarray, logit_BHW: np.ndarray, kinds: slice, pixel_mm2: float) -> None:
    """Clear, in place, connected areas of these kinds, taken together, whose largest log-odds are below FLUID_SURE, or
    below FLUID_SUREST if they are smaller than SMALL_FLUID_MM2, and areas smaller than LEAST_FLUID_MM2."""
    for bscan, logit in zip(lesions_BHW, logit_BHW, strict=True):
        fluid = _is(bscan, kinds)
        areas, count = _connected(fluid)
        if count:
            sizes = np.bincount(areas.ravel()) * pixel_mm2
            needed = np.where(sizes < SMALL_FLUID_MM2, FLUID_SUREST, FLUID_SURE)
            most = np.full(count + 1, -np.inf)
            np.maximum.at(most, areas[fluid], logit[fluid])
            kept = (sizes >= LEAST_FLUID_MM2) & (most > needed)
            bscan[fluid & ~kept[areas]] = 0


def clear_openings(
    lesions_BHW: np.ndarray, bscans_BHW: np.ndarray, rows_SBW: np.ndarray, row_um: float, ascan_um: float
) -> np.ndarray:
    """Clear, in place, areas of fluid that are open to the vitreous: openings of full-thickness macular holes.

    Returns bool [B]: the B-scans that had any.
    """
    from scipy import ndimage

    row, subretinal = np.arange(lesions_BHW.shape[1])[:, None], 1 + MASKS.index("subretinal_fluid")
    opened = np.zeros(len(lesions_BHW), bool)
    for d in np.flatnonzero((lesions_BHW == subretinal).any(axis=(1, 2))):
        bscan, image, ilm, bm = lesions_BHW[d], bscans_BHW[d], rows_SBW[0, d], rows_SBW[-1, d]
        retina = image[(row > ilm) & (row < bm) & (bscan == 0)]
        vitreous = image[(row < ilm - 3) & (row > ilm - len(row) // 4)]
        if not (retina.size and vitreous.size):
            continue
        dark, bright = float(np.median(vitreous)), float(np.median(retina))
        # 0 in the vitreous and 1 in the retina, in images of inverted grey levels as well.
        smooth = ndimage.gaussian_filter(image.astype(np.float32), (8 / row_um, 12 / ascan_um))
        roof = (smooth - dark) / ((bright - dark) or np.inf)
        areas, count = _connected(_is(bscan, FLUID))
        for i in range(1, count + 1):
            area = areas == i
            tops = area.argmax(axis=0)[None]
            above = (row < tops - 8 / row_um) & (row >= tops - ROOF_UM / row_um)
            bare = area.any(axis=0) & (np.where(above, roof, -np.inf).max(axis=0) < ROOF)
            bare &= tops[0] * row_um >= ROOF_UM  # else a roof may lie outside the image
            if bare.sum() * ascan_um >= OPEN_UM and (bscan[area] == subretinal).mean() >= SUBRETINAL:
                bscan[area], opened[d] = 0, True
    return opened


def _is(lesions: np.ndarray, kinds: slice) -> np.ndarray:
    """Which pixels are of these kinds, a slice of MASKS; bool of the same shape."""
    return (lesions > kinds.start) & (lesions <= kinds.stop)


def _connected(mask_HW: np.ndarray, neighbours: np.ndarray | None = None) -> tuple[np.ndarray, int]:
    """int32 [H, W] with the number of each pixel's connected area, 0 outside, and how many there are."""
    from scipy import ndimage

    areas = np.empty(mask_HW.shape, np.int32)
    ndimage.label(mask_HW, neighbours, output=areas)
    return areas, int(areas.max(initial=0))
