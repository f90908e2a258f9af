"""Pictures of one segmented scan: the thickness map with its ETDRS grid, and the B-scan with the most lesions."""

import io
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Circle
from PIL import Image

from octfm.display import drawing
from octfm.report.images import RIM, Picture, to_png
from octfm.tasks.scene import FOUND_COLOURS
from octfm.volume.etdrs import CENTRES, RINGS_MM, SIDES, field_of_volume, sample
from octfm.volume.volume import eight_bit

if TYPE_CHECKING:
    from octfm.layers.segment import ScanSegmentation

RANGE_UM = (150, 500)
"""Colours of the thickness map: from an atrophic retina to oedema."""
HALF_MM, STEP_MM = 3.4, 0.02
"""Half side of the map, and distance of its points."""
LINES = ("ilm", "rpe_peak", "bm")
"""Surfaces on pictures of the contact sheet: all nine would cover the retina at this size."""
LEAST_MM2 = 0.002
"""Least area of lesions for which a B-scan is shown instead of the middle one; the smallest fluid is .0015 mm²."""
THUMBNAIL = (320, 180)
"""Width and height in pixels of a picture of the contact sheet."""


@drawing({})
def thickness_pictures(found: "ScanSegmentation") -> list[Picture]:
    """Thickness from ILM to BM over the fundus, where it was measured, with the ETDRS grid and the mean of every zone;
    nothing for a scan that has no zones or is not accepted."""
    from octfm.layers.zones import grid_of

    if (grid := grid_of(found)) is None:
        return []
    axis = np.arange(-HALF_MM, HALF_MM + STEP_MM / 2, STEP_MM)
    x, y = np.meshgrid(axis, axis)
    field = field_of_volume(found.volume, found.axial_length_mm)
    values = sample(found.thickness_um("ilm", "bm"), field, grid.centre_mm[0] + x, grid.centre_mm[1] + y)
    figure = Figure(figsize=(5.4, 4.4), dpi=100, facecolor="black")
    axes = figure.add_axes((0.01, 0.01, 0.8, 0.98))
    axes.set_axis_off()
    shown = axes.imshow(
        values, cmap="viridis", norm=Normalize(*RANGE_UM), extent=(-HALF_MM, HALF_MM, HALF_MM, -HALF_MM)
    )
    for radius in RINGS_MM:
        axes.add_patch(Circle((0, 0), radius, fill=False, color="white", linewidth=1))
    for sign in (1, -1):
        inner, outer = RINGS_MM[0] / 2**0.5, RINGS_MM[-1] / 2**0.5
        for side in (1, -1):
            axes.plot([side * inner, side * outer], [sign * inner, sign * outer], color="white", linewidth=0.8)
    style = {"color": "white", "ha": "center", "va": "center", "path_effects": RIM}
    right, left = SIDES[found.volume.laterality]
    places = {"superior": (0, -1), "inferior": (0, 1), right: (1, 0), left: (-1, 0)}
    for zone, mean in grid.mean_um.items():
        ring, _, side = zone.partition(" ")
        radius = {"inner": (RINGS_MM[0] + RINGS_MM[1]) / 2, "outer": (RINGS_MM[1] + RINGS_MM[2]) / 2}.get(ring, 0.0)
        dx, dy = places.get(side, (0, 0))
        axes.text(radius * dx, radius * dy, "–" if mean is None else f"{mean:.0f}", fontsize=13, **style)
    for side, (dx, dy) in places.items():
        if dy == 0 or field.upright:
            axes.text(
                3.2 * dx, 3.2 * dy, side[0].upper() if side not in ("left", "right") else side, fontsize=11, **style
            )
    bar = figure.colorbar(shown, cax=figure.add_axes((0.84, 0.1, 0.03, 0.8)))
    bar.set_label("ILM to BM, µm", color="white")
    bar.ax.tick_params(colors="white")
    centre = CENTRES[grid.centre]
    zones = ", ".join(f"{zone} {mean:.0f}" for zone, mean in grid.mean_um.items() if mean is not None)
    alt = f"Map of retinal thickness with the ETDRS grid around {centre}; means in µm: {zones}"
    caption = f"Retinal thickness (ILM to BM) in µm, with the means of the ETDRS zones around {centre}"
    return [Picture(to_png(figure, 256), alt, caption, wide=False)]


def verdict_of(found: "ScanSegmentation") -> list[tuple[str, str, str]]:
    """(class, word, sentence) for the top of the page of one scan: whether to believe it, and what it does not show."""
    from octfm.layers.rows import ACCEPTED

    first = ("ok", "accepted", f"{ACCEPTED}; {found.doubtful.mean():.0%} of A-scans are doubtful")
    if not found.verdict.accepted:
        first = ("bad", "do not believe it", "; ".join(found.verdict.reasons))
    missing = found.why_no_grid if found.verdict.accepted else ""
    notes = (found.note_on_scan, missing.removeprefix("no zones: "))
    return [first, *(("watch", word, note) for word, note in zip(("note", "no zones"), notes, strict=True) if note)]


def volumes_of(found: "ScanSegmentation") -> list[tuple[str, str]]:
    """(name, value) of volumes of fluid for a page whose viewer has no table of them; empty if the verdict refuses."""
    amounts = {name: found.volume_nl(name) for name in found.masks} if found.verdict.accepted else {}
    return [(name.replace("_", " ").capitalize(), f"{nl:.1f} nl") for name, nl in amounts.items() if nl is not None]


def facts_of(found: "ScanSegmentation") -> list[tuple[str, str]]:
    """(name, value) for the page of one scan: the axial length, if one is known, and the network with its limits of
    use."""
    from octfm.weights.packaged import NOTE

    length = found.axial_length_mm
    return [
        *((("Lateral millimetres", f"for an axial length of {length:g} mm"),) if length is not None else ()),
        ("Found by", f"{found.model}; {NOTE}"),
    ]


def bscan_picture(found: "ScanSegmentation") -> bytes:
    """PNG of the B-scan with the largest area of lesions, or of the middle one if there are hardly any; with lines and
    areas."""
    volume = found.volume
    most = [sum(int(mask[d].sum()) for mask in found.masks.values()) for d in range(volume.shape[0])]
    shown_mm2 = max(most, default=0) * volume.spacing_mm[1] * volume.spacing_mm[2]
    d = int(np.argmax(most)) if shown_mm2 >= LEAST_MM2 else volume.shape[0] // 2
    bscan = np.asarray(list(eight_bit(volume))[d])
    picture = np.repeat(bscan[..., None], 3, axis=2)
    for name, mask in found.masks.items():
        picture[mask[d]] = picture[mask[d]] // 2 + np.array(FOUND_COLOURS[name], np.uint8) // 2
    rows = _around(found.surfaces, d, len(bscan))
    small = np.array(Image.fromarray(picture[rows]).resize(THUMBNAIL, Image.Resampling.BOX))
    # Drawn into the small picture, because reducing the large one would blur lines.
    (width, height), columns = THUMBNAIL, np.arange(THUMBNAIL[0])
    for name in LINES:
        row = found.surfaces[name][d][((columns + 0.5) / width * bscan.shape[1]).astype(int)]
        at = (row - rows.start + 0.5) * height / (rows.stop - rows.start)
        inside = np.isfinite(at) & (at >= 0) & (at < height)
        for thick in (0, 1):
            small[np.minimum(at[inside].astype(int) + thick, height - 1), columns[inside]] = FOUND_COLOURS[name]
    return _png(small)


def _around(surfaces: dict[str, np.ndarray], d: int, height: int) -> slice:
    """Rows of the retina in a B-scan with a margin, all rows if it was not found."""
    ilm, bm = surfaces["ilm"][d], surfaces["bm"][d]
    if not (np.isfinite(ilm).any() and np.isfinite(bm).any()):
        return slice(0, height)
    # The ILM of one A-scan may lie below the BM of another.
    both, margin = np.concatenate([ilm, bm]), 0.15 * height
    return slice(max(0, int(np.nanmin(both) - margin)), min(height, int(np.nanmax(both) + margin) + 1))


def _png(picture: np.ndarray) -> bytes:
    # A palette chosen from the pixels would have no colour for a druse of a few pixels.
    palette = Image.new("P", (1, 1))
    palette.putpalette(_palette().ravel().tolist())
    buffer = io.BytesIO()
    own = Image.fromarray(picture).quantize(palette=palette, dither=Image.Dither.NONE)
    own.save(buffer, "PNG", optimize=True)
    return buffer.getvalue()


@cache
def _palette() -> np.ndarray:
    """uint8 [N, 3]: greys, lines, and areas over grey."""
    from octfm.models.layer_net import MASKS

    grey = np.linspace(0, 255, 48).astype(np.uint8)
    over = grey[::5, None] // 2
    areas = [over + np.array(FOUND_COLOURS[name], np.uint8) // 2 for name in MASKS]
    lines = np.array([FOUND_COLOURS[name] for name in LINES], np.uint8)
    return np.concatenate([np.repeat(grey[:, None], 3, axis=1), lines, *areas])
