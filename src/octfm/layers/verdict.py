"""Whether a segmentation should be believed, and if not, why.

Every threshold below has its reason. benchmarks/segment_verdict.py measures on phantoms how many wrong and how many
correct segmentations they refuse, and prints the distribution of every measure: run it again after new weights.
"""

from dataclasses import dataclass, field, replace

import numpy as np

from octfm.layers.finder import LayerFinder, Layers
from octfm.models.layer_net import MASKS, SURFACES
from octfm.volume.etdrs import Field, sample
from octfm.volume.laterality import disc_side
from octfm.volume.margins import imaged_rows, inside_frame, without_padding
from octfm.volume.tissue import Tissue
from octfm.volume.volume import Spacing3, Volume, eight_bit

SEEN = 0.5
"""Least share of A-scans in which the retina must be found, in a B-scan and in the whole scan."""
SOME = 0.1
"""Least share of A-scans in which the retina must be found for its thickness to be judged."""
BETTER = 0.15
"""If the retina was found in a share of at least SEEN of the A-scans, the scan counts as upside down only if turning it
raises that share by more than this."""
TRIED = 8
"""Number of B-scans that are tried upside down if little retina was found, or much of it is cut off."""
DARK = 0.4
"""A B-scan is dark (a blink) if the standard deviation of its grey levels is below this share of the median over
B-scans."""
LOST = 0.05
"""If a larger share of B-scans is dark or shows no retina, a note says so and volumes of fluid stay blank."""
LEVELS = 8.0
"""Least difference between the 99th and the 1st percentile of brightness, of 255: below it the layers are a few grey
levels apart."""
CONTRAST = 0.75
"""Least difference of mean brightness between retina and vitreous, in standard deviations of the vitreous."""
EDGE_ROWS = 2
"""ILM or BM less than this many rows from the first or last row of the image may continue outside; it is left out
there."""
CLIPPED = 0.2
"""If ILM or BM leaves the frame in a larger share of A-scans (of B-scans that show the retina), a note says so and
volumes of fluid stay blank."""
MOST = 0.5
"""If a larger share of B-scans is lost, or of A-scans clipped, the whole scan is refused. Up to it, only zones that
lose more than a tenth are blank: of 210 phantom zones that are kept by this rule, 4 are wrong by more than 20 µm."""
FIELD_MM = (1.0, 20.0)
"""Width of a B-scan: the shortest in use is about 2 mm, the longest 16 mm."""
WIDE_MM, WIDEST_MM = 10.5, 12.6
"""Between these widths a raster must show the optic disc; wider fields were not tested. 30° are 9 mm. A field that is
truly 12 mm wide reaches the disc; a smaller one with wrong lateral millimetres does not."""
DISC_FROM_FOVEA_MM = (3.2, 5.9)
"""Distances from the middle of a wide field at which the disc is searched: it lies 4 to 5 mm from the fovea, on which
such scans are centred to within a millimetre."""
DISC_SEEN_MM2 = 0.3
"""Least area that looks like the disc at these distances. It is .5 to 3 mm² in 13 of 15 phantoms 12 mm wide. Of 16
phantoms 6 mm wide whose millimetres were doubled, only one has any (.05 mm², neovascular AMD)."""
FRAME_MM = (0.5, 8.0)
"""Height of a B-scan: usually 2 to 3 mm, in wide-field instruments up to 6 mm."""
LONGEST = 1.6
"""Largest ratio of a raster's extent across its B-scans to their width: no instrument scans many short lines."""
THICKNESS_UM = (190.0, 480.0)
"""Plausible medians of retinal thickness over a scan; in phantoms they are 268 to 350 µm. Wrong axial millimetres
change the median by their factor. Extreme swelling of a whole scan, which no phantom has, would change it as well."""
MOST_UM = 100.0
"""Upper limit of each part of the expected error; its value where ILM or BM was not found."""
DISC_MM, DISC_STEP_MM = 0.7, 0.1
"""Signs of the optic disc are averaged over points within this radius, which is less than that of a small disc, and
this far apart."""
DISC_ILM, DISC_OUTER, DISC_PRESENT, DISC_UM = 0.8, 0.72, 0.91, 8.0
"""At an optic disc: least `near` of the ILM, largest mean `near` of EZ and RPE, largest probability of a retina, and
least `disorder_um` (see Layers). Chosen on 37 phantoms of discs, of which two are missed, and 47 of maculae. Real eyes
with oedema reach .76 (EZ and RPE), .78 (retina) and 9 µm."""
WAVE_MM = 1.2
"""Length along a B-scan over which Bruch's membrane should be straight."""
WRINKLE_MM = 0.6
"""Length along a B-scan over which the thickness of the inner retina (ILM to the border of IPL and INL) should be
even."""
MEMBRANE_MM = 2.0
"""Length along a B-scan over which signs of an epiretinal membrane are averaged."""
WRINKLES, WRINKLED_UM, UNSUSPECTED_UM = 5.0, 12.0, 170.0
"""A membrane is suspected where the thickness of the inner retina plus WRINKLES times its unevenness (limited to
WRINKLED_UM) exceeds UNSUSPECTED_UM, which is rare in other eyes. The excess is the expected error of the ILM."""
ATROPHY_MM = 1.0
"""Length along a B-scan over which the thickness of the outer nuclear layer is averaged."""
ATROPHIC_UM, ATROPHY_SHARE = 65.0, 0.4
"""Where the outer nuclear layer (from the OPL to the EZ) is thinner than this, which is rare in eyes without atrophy,
Bruch's membrane may have been placed in the choroid. This share of the missing thickness is its expected error."""
OWN_SHARE, WAVE_SHARE = 1 / 3, 2 / 3
"""Weights, in the expected error, of the error that the network's distribution implies and of the waviness of Bruch's
membrane: on phantom zones the weighted sum is about the mean absolute error."""
ASCAN_UM = 12.0
"""An A-scan is doubtful if the expected error of its thickness is larger."""
ZONE_UM = 12.0
"""A zone is withheld if the mean expected error within it is larger."""
DOUBTFUL = 0.5
"""Largest share of doubtful A-scans in an accepted scan."""
REASONS = {
    "dark": "too dark or too little contrast to tell the layers apart",
    "inverted": "the retina is darker than the vitreous, so most fluid is missed: export it bright on dark",
    "upside_down": "upside down: the vitreous must be at the top",
    "no_retina": "no retina was found in most A-scans",
    "blinked": "{lost} of {bscans} B-scans are dark or show no retina",
    "clipped": "the retina leaves the frame, or touches its first or last rows, in {clipped:.0%} of A-scans",
    "field": "a field {field_mm:.1f} mm wide is implausible: check the lateral millimetres",
    "frame": "a frame {frame_mm:.1f} mm high is implausible: check the axial millimetres",
    "aspect": "a raster {aspect:.1f} times as long across its B-scans as along them is implausible: check the "
    "millimetres",
    "thickness": "a median thickness of {thickness_um:.0f} µm is implausible: check the axial millimetres",
    "wide_field": f"a field {{field_mm:.1f}} mm wide: tested to {WIDEST_MM} mm, and beyond {WIDE_MM} mm only where the "
    "optic disc is seen, as a sign that the lateral millimetres are right",
    "unfamiliar": "unlike the images that the network was trained on: it is unsure of {doubtful:.0%} of A-scans",
}
"""Code → sentence, the most serious first."""
PARTS = ("blinked", "clipped")
"""Reasons that refuse a scan only above MOST; up to it they are notes."""
ANSWERED = frozenset({"dark", "inverted", "no_retina", "blinked", "clipped", "wide_field", "unfamiliar"})
"""Reasons that concern only the network: they are dropped once somebody has drawn or checked all lines."""


@dataclass(frozen=True)
class Measures:
    """What a verdict depends on; see the thresholds."""

    seen: float
    """Share of A-scans in which the retina was found."""
    bscans: int
    lost: int
    """B-scans that are dark or show no retina."""
    clipped: float
    """Share of A-scans where ILM or BM is not in the image or touches its edge, among B-scans that are not lost."""
    levels: float
    """Difference of the 99th and the 1st percentile of grey values, on a scale of 0 to 255."""
    contrast: float
    """Mean of the retina minus that of the vitreous, in standard deviations of the vitreous; negative if the retina is
    darker."""
    field_mm: float
    """Width of a B-scan; of a circle its diameter."""
    frame_mm: float
    aspect: float
    """Extent across B-scans over their width; 0 if it has no meaning."""
    thickness_um: float
    """Median; NaN if nothing was found."""
    doubtful: float
    """Share of A-scans that are doubtful, signs of membranes and atrophy not counted, among B-scans that are not
    lost."""
    spread_um: float
    """Median over A-scans of `Layers.spread_um`, the larger one of ILM and BM; infinite if nothing was found."""
    turned: float = 0.0
    """Share of A-scans in which the retina was found after B-scans were turned upside down; 0 if that was not tried."""
    disc: bool = True
    """Whether a wide field shows the optic disc, as a field around the fovea must. True where this is not checked: in
    fields that are not from WIDE_MM to WIDEST_MM wide, and in scans that are no rasters and have no zones."""


@dataclass(frozen=True)
class Verdict:
    """Whether to believe a segmentation: `reasons` says why not, and is empty if it is accepted."""

    reasons: tuple[str, ...] = ()
    """Short sentences, the most serious first."""
    doubt: float = 0.0
    """For sorting scans, the most doubtful first: at least 1 if there is a reason, otherwise below 1."""
    codes: tuple[str, ...] = ()
    """Keys of REASONS."""
    parts: tuple[str, ...] = ()
    """Sentences on what is missing in parts of an accepted scan; zones there and volumes of fluid are blank."""
    measures: Measures | None = field(default=None, repr=False)

    @property
    def accepted(self) -> bool:
        return not self.reasons


def judge(volume: Volume, found: Layers, finder: LayerFinder) -> Verdict:
    """Judge what was found in a volume, within its frame if it has one. If much of the retina is missing or cut off,
    some B-scans are also tried upside down."""
    if (inner := inside_frame(volume.voxels, volume.white)) is not None:
        volume, found = replace(volume, voxels=volume.voxels[:, *inner]), found.taken(inner)
    measures = measure(volume, found)
    if measures.seen < SEEN or measures.clipped > CLIPPED:
        depth = len(volume.voxels)
        some = np.unique(np.linspace(0, depth - 1, min(TRIED, depth)).round().astype(int))
        turned = finder.find(replace(volume, voxels=volume.voxels[some, ::-1], lines=None))
        measures = replace(measures, turned=float((turned.present > 0.5).mean()))
    return decide(measures)


def decide(measures: Measures) -> Verdict:
    """Compare measures with the thresholds."""
    m = measures
    wrong = {
        "dark": m.levels < LEVELS or (m.seen >= SEEN and abs(m.contrast) < CONTRAST),
        "inverted": m.levels >= LEVELS and m.seen >= SEEN and m.contrast <= -CONTRAST,
        "upside_down": m.turned >= SEEN and (m.seen < SEEN or m.turned > m.seen + BETTER),
        "no_retina": m.seen < SEEN and m.turned < SEEN,
        "blinked": m.seen >= SEEN and m.lost > MOST * m.bscans,
        "clipped": m.seen >= SEEN and m.clipped > MOST,
        "field": not FIELD_MM[0] <= m.field_mm <= FIELD_MM[1],
        "frame": not FRAME_MM[0] <= m.frame_mm <= FRAME_MM[1],
        "aspect": m.aspect > LONGEST,
        "thickness": m.seen >= SOME and not THICKNESS_UM[0] <= m.thickness_um <= THICKNESS_UM[1],
        "wide_field": WIDE_MM < m.field_mm <= FIELD_MM[1] and not (m.field_mm <= WIDEST_MM and m.disc),
        "unfamiliar": m.seen >= SEEN and m.doubtful > DOUBTFUL,
    }
    if wrong["field"] or wrong["frame"]:
        wrong["no_retina"] = False  # a consequence of the wrong millimetres, not a second reason
    codes = tuple(code for code in REASONS if wrong[code])
    doubt = 1 - m.seen + m.doubtful + min(m.spread_um, 1000) / 100
    noted = {"blinked": m.lost > LOST * m.bscans, "clipped": m.clipped > CLIPPED}
    parts = tuple(code for code in PARTS if noted[code] and not codes)
    reasons, notes = (tuple(REASONS[code].format(**vars(m)) for code in each) for each in (codes, parts))
    return Verdict(reasons, 1 + doubt if codes else min(doubt, 0.99), codes, notes, m)


def expected_error_um(found: Layers, spacing_mm: Spacing3, upper: str = "ilm", lower: str = "bm") -> np.ndarray:
    """float32 [D, W]: expected absolute error, in µm, of the thickness between two surfaces.

    The sum of what the network's own distribution implies, of the waviness of Bruch's membrane and signs of atrophy if
    `lower` is "bm", and of signs of an epiretinal membrane if `upper` is "ilm". The signs are needed because a network
    that has taken another line for ILM or BM can be confident. The weights were chosen for ILM to BM only.
    """
    error = _strangeness_um(found, spacing_mm, upper, lower)
    if upper == "ilm":
        error = error + membrane_um(found, spacing_mm)
    if lower == "bm":
        error = error + atrophy_um(found, spacing_mm)
    return error.astype(np.float32)


def _strangeness_um(found: Layers, spacing_mm: Spacing3, upper: str = "ilm", lower: str = "bm") -> np.ndarray:
    """The expected error without signs of membranes and atrophy, which do not make a whole image unfamiliar."""
    error = OWN_SHARE * own_error_um(found, upper, lower)
    if lower == "bm":
        error = error + WAVE_SHARE * waviness_um(found.rows[SURFACES.index(lower)], spacing_mm)
    return error


def own_error_um(found: Layers, upper: str = "ilm", lower: str = "bm") -> np.ndarray:
    """float32 [D, W]: error of the thickness between two surfaces, in µm, that the network's own distribution implies.

    If a share q of a distribution lies at a distance L from the chosen row, its standard deviation is L √q and the
    expected error L q. The result is the sum over both surfaces and the distance by which surfaces were out of order,
    limited to MOST_UM; it is MOST_UM where a surface is not in the image.
    """
    pair = [SURFACES.index(name) for name in (upper, lower)]
    own = (found.spread_um[pair] * np.sqrt(np.clip(1 - found.near[pair], 0, 1))).sum(axis=0) + found.disorder_um
    missing = np.isnan(found.rows[pair]).any(axis=0)
    return np.where(missing, MOST_UM, np.minimum(own, MOST_UM)).astype(np.float32)


def membrane_um(found: Layers, spacing_mm: Spacing3) -> np.ndarray:
    """float [D, W]: expected error of the ILM, in µm, because it may lie on an epiretinal membrane; at most MOST_UM.

    A contracting membrane folds and thickens the inner retina, while oedema thickens the layers below it. A-scans with
    intraretinal fluid do not count, since cysts displace the inner layers.
    """
    inner = found.rows[SURFACES.index("ipl_inl")] - found.rows[SURFACES.index("ilm")]
    uneven_um = np.minimum(waviness_um(inner, spacing_mm, WRINKLE_MM), WRINKLED_UM)
    dry = ~(found.lesions == 1 + MASKS.index("intraretinal_fluid")).any(axis=1)
    signs_um = dry * (_depth_um(inner, spacing_mm) + WRINKLES * uneven_um)
    return np.clip(_mean_over(signs_um, MEMBRANE_MM, spacing_mm) - UNSUSPECTED_UM, 0, MOST_UM)


def atrophy_um(found: Layers, spacing_mm: Spacing3) -> np.ndarray:
    """float [D, W]: expected error of Bruch's membrane, in µm, because the layers above it may have atrophied."""
    nuclear = found.rows[SURFACES.index("ez")] - found.rows[SURFACES.index("opl_onl")]
    thin_um = ATROPHIC_UM - _mean_over(_depth_um(nuclear, spacing_mm), ATROPHY_MM, spacing_mm)
    return ATROPHY_SHARE * np.clip(thin_um, 0, None)


def shows_disc(found: Layers, place: Field, centre_mm: tuple[float, float], dark: np.ndarray) -> bool:
    """Whether the optic disc lies at a place (x, y) on the fundus where the fovea is expected.

    EZ and RPE end at the rim of the disc, the ILM does not. So within DISC_MM the network is sure of the ILM, but not
    of EZ and RPE, whose order is wrong, nor whether there is a retina. It may say the same of a blink, so B-scans that
    are `dark` (bool [D]) do not count.
    """
    axis = np.arange(-DISC_MM, DISC_MM + DISC_STEP_MM / 2, DISC_STEP_MM)
    x, y = np.meshgrid(axis, axis)
    inside = np.hypot(x, y) <= DISC_MM

    def mean(values_DW: np.ndarray) -> np.ndarray:
        seen_DW = np.where(dark[:, None], np.nan, values_DW)
        values = sample(seen_DW, place, centre_mm[0] + x[inside], centre_mm[1] + y[inside])
        return np.asarray(np.nanmean(values) if np.isfinite(values).any() else np.nan)

    return bool(_is_disc(*map(mean, _disc_signs(found))))


def looks_like_other_eye(
    volume: Volume, ilm_DW: np.ndarray, bm_DW: np.ndarray, place: Field, pit_mm: tuple[float, float]
) -> bool:
    """Whether nerve fibres are thicker and brighter on the temporal side, if the eye is the one that the volume states.

    ilm_DW, bm_DW: rows, NaN where not found. False if the image is not clear about it (octfm.volume.laterality).
    """
    bscan, ascan = (float(index[0]) for index in place.to_index(*np.array(pit_mm)[:, None]))
    seen = np.flatnonzero(np.isfinite(ilm_DW).any(axis=1) & np.isfinite(bm_DW).any(axis=1))
    if volume.laterality is None or not seen.size or not np.isfinite([bscan, ascan]).all():
        return False
    fovea = float(np.interp(bscan, seen, np.arange(len(seen)))), ascan
    ilm, bm = (_bridged(rows[seen]) for rows in (ilm_DW, bm_DW))
    tissue = Tissue(ilm, bm, fovea, np.zeros(len(seen)), confident=True, confidence={}, located=True)
    shown = eight_bit(replace(volume, voxels=volume.voxels[seen], lines=None))
    found = disc_side(shown, volume.spacing_mm, tissue, volume.left_to_right)
    return found.contradicts(volume.laterality)


def _disc_beside_middle(found: Layers, spacing_mm: Spacing3) -> bool:
    """Whether a raster shows the optic disc DISC_FROM_FOVEA_MM from its middle, in any direction."""
    from scipy.ndimage import uniform_filter1d

    (depth, width), (dz, _, dx) = found.present.shape, spacing_mm
    along_bscans = (_mean_over(values, 2 * DISC_MM, spacing_mm) for values in _disc_signs(found))
    bscans = max(1, round(2 * DISC_MM / dz))
    means = [uniform_filter1d(values, bscans, axis=0, mode="nearest") for values in along_bscans]
    across, along = ((np.arange(n) - (n - 1) / 2) * mm for n, mm in ((depth, dz), (width, dx)))
    distance = np.hypot(across[:, None], along)
    ring = (distance >= DISC_FROM_FOVEA_MM[0]) & (distance <= DISC_FROM_FOVEA_MM[1])
    return bool((_is_disc(*means) & ring).sum() * dz * dx >= DISC_SEEN_MM2)


def _disc_signs(found: Layers) -> tuple[np.ndarray, ...]:
    """`near` of the ILM, mean `near` of EZ and RPE, `present` and `disorder_um` of Layers, [D, W] each."""
    outer = found.near[[SURFACES.index(name) for name in ("ez", "rpe_inner", "rpe_peak")]]
    return found.near[SURFACES.index("ilm")], outer.mean(axis=0), found.present, found.disorder_um


def _is_disc(ilm: np.ndarray, outer: np.ndarray, present: np.ndarray, disorder_um: np.ndarray) -> np.ndarray:
    """bool: where means of `_disc_signs` are those of an optic disc."""
    return (ilm >= DISC_ILM) & (outer <= DISC_OUTER) & (present <= DISC_PRESENT) & (disorder_um >= DISC_UM)


def _mean_over(values_DW: np.ndarray, length_mm: float, spacing_mm: Spacing3) -> np.ndarray:
    """Mean over this length along the B-scans."""
    from scipy.ndimage import uniform_filter1d

    return uniform_filter1d(values_DW, max(1, round(length_mm / spacing_mm[2])), axis=1, mode="nearest")


def waviness_um(rows_DW: np.ndarray, spacing_mm: Spacing3, over_mm: float = WAVE_MM) -> np.ndarray:
    """float [D, W]: distance in µm of a surface from its mean over `over_mm` along the B-scan, at most MOST_UM.

    Rows that are NaN are interpolated. Lines continue beyond the ends of a B-scan with their slope, so that a tilted
    line does not count as wavy. 0 in B-scans that are too narrow.
    """
    from scipy.ndimage import uniform_filter1d

    width = rows_DW.shape[1]
    reach = max(1, round(over_mm / spacing_mm[2] / 2))
    if width <= reach + 1:
        return np.zeros(rows_DW.shape)
    depth_um = _depth_um(rows_DW, spacing_mm)
    beyond = np.pad(depth_um, ((0, 0), (reach, reach)), mode="reflect", reflect_type="odd")
    mean = uniform_filter1d(beyond, 2 * reach + 1, axis=1)[:, reach:-reach]
    return np.minimum(np.abs(depth_um - mean), MOST_UM)


def _depth_um(rows_DW: np.ndarray, spacing_mm: Spacing3) -> np.ndarray:
    """Rows [D, W] in µm; NaN is interpolated as in `_bridged`."""
    return _bridged(rows_DW) * 1000 * spacing_mm[1]


def _bridged(rows_DW: np.ndarray) -> np.ndarray:
    """Rows [D, W] in which NaN is interpolated along the B-scan; 0 in B-scans that have only NaN."""
    found, ascan = np.zeros(rows_DW.shape), np.arange(rows_DW.shape[1])
    for line, rows in zip(found, rows_DW, strict=True):
        known = np.isfinite(rows)
        if known.any():
            line[:] = np.interp(ascan, ascan[known], rows[known])
    return found


def measure(volume: Volume, found: Layers) -> Measures:
    """The measures of a volume and of what was found in it, except `turned`."""
    depth, white = len(volume.voxels), volume.white
    ilm, bm = (found.rows[SURFACES.index(name)] for name in ("ilm", "bm"))
    here = found.present > 0.5
    voxels = without_padding(volume.voxels, white)  # as the network saw them
    low, high = np.percentile(voxels[:, ::3, ::3], (1, 99))
    lost = (here.mean(axis=1) < SEEN) | dark_bscans(volume)
    kept = ~lost if not lost.all() else np.ones(depth, bool)
    both = np.isfinite(ilm) & np.isfinite(bm)
    first, last = believed_rows(volume)
    outside = ~both | (ilm < first) | (bm > last)
    thickness = (bm - ilm)[both & kept[:, None]] * 1000 * volume.spacing_mm[1]
    spread = np.maximum(found.spread_um[SURFACES.index("ilm")], found.spread_um[SURFACES.index("bm")])[both]
    raster = volume.layout == "raster" and depth > 2
    z, y, x = volume.extent_mm
    wide = raster and WIDE_MM < x <= WIDEST_MM
    return Measures(
        seen=float(here.mean()),
        bscans=depth,
        lost=int(lost.sum()),
        clipped=float(outside[kept].mean()),
        levels=float(high - low) * 255 / white,
        contrast=_contrast(voxels, ilm, bm),
        field_mm=x / np.pi if volume.layout == "circle" else x,
        frame_mm=y,
        aspect=z / x if raster else 0.0,
        thickness_um=float(np.median(thickness)) if len(thickness) else float("nan"),
        doubtful=float((_strangeness_um(found, volume.spacing_mm) > ASCAN_UM)[kept].mean()),
        spread_um=float(np.median(spread)) if len(spread) else float("inf"),
        disc=not wide or _disc_beside_middle(found, volume.spacing_mm),
    )


def believed_rows(volume: Volume) -> tuple[np.ndarray, np.ndarray]:
    """int64 [D, W] each: first row at which an ILM, and last row at which a BM is believed, EDGE_ROWS within the image
    without its margins."""
    depth, height, width = volume.shape
    image = imaged_rows(volume.voxels, volume.white)
    first, past = np.broadcast_to([[[0]], [[height]]], (2, depth, width)) if image is None else image
    return first + EDGE_ROWS, past - 1 - EDGE_ROWS


def dark_bscans(volume: Volume) -> np.ndarray:
    """bool [D]: B-scans that are dark, as in a blink; padding does not make one dark."""
    varied = without_padding(volume.voxels[:, :, ::3], volume.white)[:, ::3].std(axis=(1, 2), dtype=np.float64)
    return varied < DARK * np.median(varied)


def _contrast(voxels: np.ndarray, ilm: np.ndarray, bm: np.ndarray) -> float:
    """Mean of the retina less that of the vitreous within a quarter of the frame above it, in standard deviations of
    the vitreous; infinite if nothing was found, negative in images of inverted grey levels."""
    reach = voxels.shape[1] // 4
    row = np.arange(voxels.shape[1])[:, None]
    inner, outer = [], []
    for bscan, top, bottom in zip(voxels[:, :, ::4], ilm[:, ::4], bm[:, ::4], strict=True):
        inner.append(bscan[(row > top) & (row < bottom)])
        outer.append(bscan[(row < top - 3) & (row > top - reach)])
    retina, vitreous = np.concatenate(inner).astype(np.float32), np.concatenate(outer).astype(np.float32)
    if not len(retina) or not len(vitreous):
        return float("inf")
    return float((retina.mean() - vitreous.mean()) / max(vitreous.std(), 1.0))
