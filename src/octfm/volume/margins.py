"""Find and remove what is not image around and on B-scans: padding, bars and frames, burnt-in marks."""

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from octfm.volume.volume import Volume

MOST_PADDING, MOST_BESIDE_DARK = 0.2, 0.5
"""Largest share of a B-scan that is taken for padding; more of one that is dark elsewhere (DARK)."""
DARK = 1 / 3
"""Median of the rest of a B-scan, as a share of white: above it the export may be dark on bright."""
NEARLY_WHITE = 0.96
"""Share of white from which a voxel may be padding: JPEG does not keep white exactly."""
LEAST_PADDING = 25
"""White voxels at a border that are padding; fewer are a bright spot."""
RINGING = 5
"""Voxels, either way, over whose mean JPEG keeps white."""
TOLERANT = 0.93
"""Share of white that the mean of padding reaches, also under noise."""
HALF_WHITE = 0.4
"""Share of white from which a voxel beside the dark image may be half padding."""
RARE = 0.05
"""Share of A-scans in which padding with a sharp edge may end early by chance."""
DIP = 17
"""Narrower notches in the edge of padding, as wide as two blocks of JPEG, belong to it."""
MOST_RIM, RIM_FALLS, RIM_FALLS_LEVELS = 12, 1.2, 4
"""Most rows of a rim, and by how much the median of a row exceeds that of the next one, in it: by this factor and this
many grey levels of 255."""
BORDER_ROWS, NO_BRIGHTER = 8, 40
"""Rows of the image whose median stands for what padding hides, and the percentile of the whole image that it does not
exceed: in exports whose vitreous was made black these rows are nerve fibres, and the search would lose the ILM."""
FLAT, FLAT_EXCEPT = (0.06, 0.016, 0.0), 0.1
"""In a bar or a frame around the image, most difference of grey levels, as a share of white, and the share of voxels
that may differ by more. JPEG does not keep one value; a smaller difference tells a black bar from a dark vitreous."""
BEGINS, WITHIN = 0.5, 2
"""At least this share of voxels differs from a bar so many lines behind it, and from padding behind it. A dark vitreous
is of one value, too, but no edge."""
DIMMEST = 0.8
"""Largest brightness of the image's border, as a share of its mean, at a darker bar or padding above or below: in an
image flattened at the ILM, or without its vitreous, that is the vitreous, and the border as bright as nerve fibres."""
MOSTLY = 0.5
"""Share of A-scans in which the border at padding is brighter, from which it is no padding."""
LEAST_FLAT, LEAST_WEDGE = 8, 200
"""Rows of exactly one grey level at a border that make an A-scan padded, and voxels of them that neighbouring A-scans
have together."""
FIRST_ROWS = 32
"""Rows that are searched first for a second grey level; only an A-scan without one there is searched whole."""
BLOCK, NEAR_LEVEL = 8, 0.06
"""Rows behind them to which JPEG may have given other values, and how far these lie from grey, as a share of white."""
ENOUGH = 8
"""About so many B-scans of a volume, and every fourth voxel of a line, show whether there are bars; one in so many
voxels, how bright an image is."""
LEAST_BLANK = 8
"""Fewer A-scans of one value at a side are no bar: instruments leave one or two blank."""
LEAST_LEFT = 0.25
"""Least share of rows, and of A-scans, that a bar or a frame leaves."""
BAR, BAR_LEVEL, THIN = 14, 0.5, 3
"""Least voxels of a straight burnt-in line, its least share of white, and how far aside it is at most half as bright.
The icon of Cirrus has lines of 64 voxels and, above and below its arrow, 31; scale bars of Spectralis have 17 and 52,
for 200 µm. No speckle, reflex or vessel is that straight both ways."""

ACROSS = 0.7
"""Least share of the A-scans in which one row is such a line where it crosses the whole B-scan, as of a reflection in
the instrument. In 1,360 B-scans the row of most has .1, of an icon; a retina flattened at the RPE has up to .46, at 15
µm to the row."""


class Trimmed(NamedTuple):
    """B-scans without frame, marks and padding."""

    bscans: np.ndarray
    """[B, h, w]: inside a frame and without burnt-in marks, those given if there is neither; padding is still there."""
    inner: tuple[slice, slice] | None
    """Where they lie among the rows and A-scans that were given; None: everywhere."""
    image: np.ndarray | None
    """int64 [2, B, w], as of `imaged_rows`."""


def trimmed(bscans: np.ndarray, white: int) -> Trimmed:
    """Find frame, marks and padding of B-scans [B, H, W]; `white` is the grey level of white."""
    inner = inside_frame(bscans, white)
    within = without_marks(bscans if inner is None else bscans[:, *inner], white)
    return Trimmed(within, inner, imaged_rows(within, white))


def searchable(volume: Volume) -> Volume:
    """The volume with its B-scans `ready_for_search`; itself if they are so already."""
    voxels = ready_for_search(volume.voxels, volume.white)
    return volume if voxels is volume.voxels else replace(volume, voxels=voxels)


def ready_for_search(bscans: np.ndarray, white: int) -> np.ndarray:
    """B-scans [B, H, W] for a search of the retina in native millimetres: without a frame around them, which makes
    them smaller, without burnt-in marks, and with padding `levelled`; themselves if they have none of these."""
    found = trimmed(bscans, white)
    return found.bscans if found.image is None else levelled(found.bscans, found.image)


def levelled(bscans: np.ndarray, image: np.ndarray) -> np.ndarray:
    """B-scans [B, H, W] in which what lies outside of the rows `image` [2, B, W] has about the grey level of the
    image's own border there: a search for borders finds none."""
    found, row = bscans.copy(), np.arange(bscans.shape[1])[:, None]
    for own, inside, (first, past) in zip(found, _within(image, bscans.shape[1]), image.swapaxes(0, 1), strict=True):
        most = np.percentile(own[inside][::ENOUGH], NO_BRIGHTER) if inside.any() else 0
        for outside, border in ((row < first, row - first), (row >= past, past - 1 - row)):
            beside = own[(border >= 0) & (border < BORDER_ROWS) & (first < past)]
            own[outside] = min(np.median(beside), most) if beside.size else 0
    return found


def darkened(bscans: np.ndarray, image: np.ndarray) -> np.ndarray:
    """B-scans [B, H, W], outside of the rows `image` [2, B, W] of `imaged_rows` as dark as the darkest voxel inside:
    black but in exports of reduced contrast."""
    inside = _within(image, bscans.shape[1])
    brightest = bscans.max(initial=0)
    darkest = np.where(inside, bscans, brightest).min(axis=(1, 2), keepdims=True)
    return np.where(inside, bscans, darkest)


def without_padding(bscans: np.ndarray, white: int) -> np.ndarray:
    """B-scans [B, H, W] with padding (`imaged_rows`) as dark as in training; themselves if there is none."""
    image = imaged_rows(bscans, white)
    return bscans if image is None else darkened(bscans, image)


def imaged_rows(bscans: np.ndarray, white: int) -> np.ndarray | None:
    """Rows [first, past) of every A-scan without padding above and below, int64 [2, D, W]; None if there is none.

    Where A-scans were shifted, to average frames or to align B-scans, exported images are white (Spectralis), black or
    of another grey. Compression and other sizes leave a bright rim around white, which goes with it. B-scans of which
    more than a fifth would be padding have none, unless the rest is dark: they are dark-on-bright exports with a
    saturated vitreous.
    """
    depth, height, width = bscans.shape
    found, flat = None, (_flat_rows(bscans, white), _flat_rows(bscans[:, ::-1], white))
    for d, bscan in enumerate(bscans):
        top, bottom = (np.maximum(_white_rows(b, white), f[d]) for b, f in zip((bscan, bscan[::-1]), flat, strict=True))
        rows = np.minimum(top + bottom, height)
        share = rows.sum() / (height * width)
        if not 0 < share <= MOST_BESIDE_DARK:
            continue
        own = np.where(rows < height, [top, height - bottom], 0)
        if share > MOST_PADDING and np.median(bscan[_within(own, height)]) > DARK * white:
            continue
        if found is None:
            found = np.stack([np.zeros((depth, width), np.int64), np.full((depth, width), height)])
        found[:, d] = own
    return found


def _within(image: np.ndarray, height: int) -> np.ndarray:
    """bool [..., H, W]: the rows [first, past) of A-scans, int64 [2, ..., W]."""
    row = np.arange(height)[:, None]
    return (row >= image[0][..., None, :]) & (row < image[1][..., None, :])


def _white_rows(bscan: np.ndarray, white: int) -> np.ndarray:
    """int64 [W]: rows at the top of each A-scan that are white padding or its rim."""
    height, level = len(bscan), NEARLY_WHITE * white
    strips = _half_white_strips(bscan, white)
    if not strips and not (bscan[0] >= level).any():
        return np.zeros(bscan.shape[1], np.int64)
    from scipy.ndimage import grey_closing, maximum_filter1d, uniform_filter

    exact = np.logical_and.accumulate(bscan >= level, axis=0).sum(axis=0)
    for column, rows in strips.items():
        exact[column] = max(exact[column], rows)
    # Ringing of JPEG darkens single voxels of the padding, and hardly their mean.
    mean = uniform_filter(bscan.astype(np.float32), RINGING, mode="nearest")
    tolerant = np.logical_and.accumulate(mean >= TOLERANT * white, axis=0).sum(axis=0)
    edge = np.maximum(exact, np.where(tolerant > 0, tolerant + RINGING // 2, 0))
    edge = np.minimum(grey_closing(_in_parts(edge, LEAST_PADDING), DIP), height)
    if not (columns := np.flatnonzero((edge > 0) & (edge + MOST_RIM < height))).size:
        return edge
    # Behind a sharp edge the image begins at once: its rows are alike.
    behind = np.array([bscan[edge[columns] + row, columns] for row in range(MOST_RIM + 1)])
    profile = np.median(behind, axis=1)
    falls = profile[:-1] > RIM_FALLS * profile[1:] + RIM_FALLS_LEVELS * white / 255
    rim = int(np.logical_and.accumulate(falls).sum())
    edge[columns] += rim
    if (exact < edge)[columns].mean() > RARE:  # JPEG also leaves bright voxels in a dark vitreous
        bright = (behind >= white / 2) & (profile < white / 4)[:, None] & (behind[-1] < white / 4)
        last = np.where(bright.any(axis=0), MOST_RIM + 1 - bright[::-1].argmax(axis=0), 0)
        edge[columns] += np.maximum(last - rim, 0)
    elif not rim:  # in a smaller picture, a row that was half padding in some A-scans
        edge[columns] += (behind[0] >= HALF_WHITE * white) & (behind[1] < white / 4)
    return np.minimum(maximum_filter1d(edge, 2 * rim + 1), height) if rim else edge


def _flat_rows(bscans: np.ndarray, white: int) -> np.ndarray:
    """int64 [B, W]: rows at the top of each A-scan that are padding of one grey level."""
    count, height, width = bscans.shape
    found, levels = np.zeros((count, width), np.int64), bscans[:, 0]
    # The first rows rule out most B-scans.
    some = np.flatnonzero((bscans[:, :LEAST_FLAT] == levels[:, None]).all(axis=1).any(axis=1))
    if height <= LEAST_FLAT or not some.size:
        return found
    from scipy.ndimage import maximum_filter1d, minimum_filter1d

    levels = levels[some]
    exact = np.stack([_flat_above(bscans[b], level) for b, level in zip(some, levels, strict=True)])
    for flat in np.unique(levels[exact >= LEAST_FLAT]):
        rows = np.where(levels == flat, exact, 0)
        long = np.flatnonzero((rows >= LEAST_FLAT).any(axis=1))
        # Runs in a dark vitreous have neighbours without any. The edge of padding goes on where the B-scan ends.
        beyond = np.pad(rows[long], ((0, 0), (DIP, DIP)), mode="reflect", reflect_type="odd")
        opened = np.maximum(maximum_filter1d(minimum_filter1d(beyond, DIP), DIP)[:, DIP:-DIP], 0)
        wedges = opened.sum(axis=1) >= LEAST_WEDGE
        for b, core in zip(some[long[wedges]], opened[wedges], strict=True):
            found[b] = np.maximum(found[b], _rows_of_level(bscans[b], _in_parts(core, LEAST_WEDGE), flat, white))
    return found


def _flat_above(bscan: np.ndarray, level: np.ndarray) -> np.ndarray:
    """int64 [W]: rows at the top of each A-scan that have its `level`; 0 in A-scans of one value."""
    differs = bscan[:FIRST_ROWS] != level
    exact, longer = differs.argmax(axis=0), np.flatnonzero(~differs.any(axis=0))
    exact[longer] = (bscan[:, longer] != level[longer]).argmax(axis=0)
    return exact


def _rows_of_level(bscan: np.ndarray, core: np.ndarray, flat: int, white: int) -> np.ndarray:
    """int64 [W]: rows of padding of the grey level `flat`, of which `core` rows have exactly this level; 0 if what is
    behind them tells that it is no padding."""
    columns = np.flatnonzero((core > 0) & (core + BLOCK < len(bscan)))
    behind = np.array([bscan[core[columns] + row, columns] for row in range(BLOCK)])
    if not columns.size or (behind != flat).mean() < BEGINS:
        return np.zeros_like(core)
    # Behind a vitreous made black lie nerve fibres, behind a margin that cuts the retina off only here and there.
    darker = flat < behind.mean()
    if darker and (behind.mean(axis=0) > DIMMEST * bscan[bscan > flat].mean()).mean() >= MOSTLY:
        return np.zeros_like(core)
    off = NEAR_LEVEL * white if flat else 0
    near = ((bscan < flat - off) | (bscan > flat + off)).argmax(axis=0)
    return np.where(core > 0, np.minimum(near, core + BLOCK), 0)


def _in_parts(edge: np.ndarray, least: int) -> np.ndarray:
    """`edge`, int64 [W], or 0 where neighbouring A-scans that have any together have fewer than `least`."""
    parts = np.cumsum(np.diff(edge > 0, prepend=False) != 0)
    return np.where((np.bincount(parts, edge) >= least)[parts], edge, 0)


def _half_white_strips(bscan: np.ndarray, white: int) -> dict[int, int]:
    """Outermost A-scan, 0 or -1 → rows at its top that smaller pictures have where it was half padding."""
    strips = {}
    for column, beside in ((0, 1), (-1, -2)) if bscan.shape[1] > 1 else ():
        dark_or_padding = (bscan[:, beside] < white / 4) | (bscan[:, beside] >= NEARLY_WHITE * white)
        strip = (bscan[:, column] >= HALF_WHITE * white) & dark_or_padding
        if (rows := int(np.logical_and.accumulate(strip).sum())) >= LEAST_PADDING:
            strips[column] = rows
    return strips


def inside_frame(bscans: np.ndarray, white: int) -> tuple[slice, slice] | None:
    """Rows and A-scans inside bars of one grey level around all B-scans [B, H, W], as of a figure or of a picture made
    square; None if there are none. A black vitreous is not one: behind a bar the image begins at once."""
    rows = _between_bars(bscans, white, DIMMEST)
    columns = _between_bars(bscans.swapaxes(1, 2), white, np.inf)
    columns = slice(
        columns.start if columns.start >= LEAST_BLANK else 0,
        columns.stop if bscans.shape[2] - columns.stop >= LEAST_BLANK else bscans.shape[2],
    )
    whole = (rows.start, columns.start, rows.stop, columns.stop) == (0, 0, *bscans.shape[1:])
    small = any(s.stop - s.start < LEAST_LEFT * n for s, n in zip((rows, columns), bscans.shape[1:], strict=True))
    if whole or small:
        return None
    # Broad bars on two sides hide those on the others.
    deeper = inside_frame(bscans[:, rows, columns], white)
    return (rows, columns) if deeper is None else (_of(rows, deeper[0]), _of(columns, deeper[1]))


def _of(outer: slice, inner: slice) -> slice:
    return slice(outer.start + inner.start, outer.start + inner.stop)


def _between_bars(lines: np.ndarray, white: int, dimmest: float) -> slice:
    """Lines, along axis 1 of [B, L, N], between bars at either end; `dimmest` as DIMMEST."""
    count, some = lines.shape[1], slice(None, None, max(1, len(lines) // ENOUGH))
    first, last = (_bar(lines[some, ::step, ::4], white, dimmest) for step in (1, -1))
    return slice(first, max(first, count - last))


def _bar(lines: np.ndarray, white: int, dimmest: float) -> int:
    """Number of lines at the start, along axis 1 of [B, L, N], that are a bar; `dimmest` as DIMMEST."""
    count, level = lines.shape[1], float(lines[0, 0, 0])

    def differs(line: int, most: float) -> float:
        return float(((lines[:, line] > level + most) | (lines[:, line] < level - most)).mean())

    for flat in FLAT:
        past, most = 0, flat * white
        while past < (1 - LEAST_LEFT) * count and differs(past, most) <= FLAT_EXCEPT:
            past += 1
        if past and past + WITHIN < count and differs(past + WITHIN, most) >= BEGINS:
            image = lines[:, past:]
            border, brighter = float(image[:, WITHIN].mean()), image[image > level + most]
            return past if border <= level or border <= dimmest * float(brighter.mean()) else 0
    return 0


def without_marks(bscans: np.ndarray, white: int) -> np.ndarray:
    """B-scans [B, H, W] without burnt-in scale bars and icons, which have straight lines both ways, and without bright
    rows across; themselves if there are none."""
    found, bright = None, math.ceil(BAR_LEVEL * white)
    for d, bscan in enumerate(bscans):
        if (level := _lines(bscan.T, bright)) is None:
            continue
        rows, boxes = np.flatnonzero(level.mean(axis=0) >= ACROSS), _marks(bscan, level.T, bright)
        if not rows.size and not boxes:
            continue
        found = bscans.copy() if found is None else found
        for row in rows:
            found[d, row - 1 : row + 2] = bscan[row - THIN] / 2 + bscan[row + THIN] / 2
        for mark in boxes:
            box = found[d, *mark]
            box[_near_bright(box, bright)] = np.median(box)
    return bscans if found is None else found


def _near_bright(box: np.ndarray, level: int) -> np.ndarray:
    """Voxels above a level, and their neighbours, in which JPEG leaves a shade of them."""
    from scipy.ndimage import maximum_filter

    return maximum_filter(box, THIN) >= level


def _marks(bscan: np.ndarray, level: np.ndarray, bright: int) -> list[tuple[slice, slice]]:
    """Boxes (rows, A-scans) of a B-scan that hold marks, burnt in at or above `bright`; `level` are its straight lines
    along rows."""
    from scipy import ndimage

    if (upright := _lines(bscan, bright)) is None:
        return []
    # Lines end a little before they cross: there neither is thin.
    wide = [np.asarray(ndimage.maximum_filter(lines, 2 * THIN + 1), bool) for lines in (upright, level)]
    parts = np.empty(bscan.shape, np.int32)
    ndimage.label(np.logical_or(*wide), np.ones((3, 3)), output=parts)
    boxes = ndimage.find_objects(parts)
    return [boxes[part - 1] for part in np.unique(parts[np.logical_and(*wide)])]


def _lines(bscan: np.ndarray, level: int) -> np.ndarray | None:
    """bool [H, W]: straight thin lines along A-scans at or above a grey level; None if there are none."""
    # A line shows in every fourth row, which rules out nearly all B-scans.
    some = _thin(bscan[::4], level)
    if not (some[2:] & some[1:-1] & some[:-2]).any():
        return None
    from scipy import ndimage

    lines = np.asarray(ndimage.binary_opening(_thin(bscan, level), np.ones((BAR, 1))))
    return np.pad(lines, ((0, 0), (THIN, THIN))) if lines.any() else None


def _thin(bscan: np.ndarray, level: int) -> np.ndarray:
    """bool [H, W - 2 THIN]: voxels at or above a grey level that are at least twice as bright as those THIN A-scans
    aside."""
    own = bscan[:, THIN:-THIN]
    return (own >= level) & (np.maximum(bscan[:, : -2 * THIN], bscan[:, 2 * THIN :]) <= own >> 1)
