"""Pictures of one segmented scan: the thickness map with its ETDRS grid, and the B-scan that says most."""

import io
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Circle

from octfm.report.images import RIM, Picture, to_png
from octfm.volume.etdrs import RINGS_MM, SIDES, EtdrsGrid, field_of_volume, sample
from octfm.volume.planes import eight_bit

if TYPE_CHECKING:
    from octfm.layers.segment import ScanSegmentation

RANGE_UM = (150, 500)
"""Colours of the thickness map: from an atrophic retina to oedema."""
HALF_MM, STEP_MM = 3.4, 0.02
"""Half side of the map, and distance of its points."""
LINES = {"ilm": (255, 90, 90), "rpe_peak": (90, 255, 120), "bm": (255, 90, 220)}
AREAS = {
    "intraretinal_fluid": (70, 110, 255),
    "subretinal_fluid": (0, 200, 255),
    "drusen": (255, 150, 0),
    "detachment": (255, 230, 60),
}
THUMBNAIL = (320, 180)
"""Width and height in pixels of a picture of the contact sheet."""


def thickness_pictures(found: "ScanSegmentation") -> list[Picture]:
    """The thickness map of a scan that has zones and is believed, else nothing."""
    from octfm.layers.zones import grid_of

    grid = grid_of(found)
    return [] if grid is None else [thickness_picture(found, grid)]


def thickness_picture(found: "ScanSegmentation", grid: EtdrsGrid) -> Picture:
    """ILM to BM over the fundus, with the grid's circles, its mean in every zone, and nothing where nothing was
    measured."""
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
    centre = {"pit": "the foveal pit", "device": "the device's centre", "scan": "the middle of the scan"}[grid.centre]
    zones = ", ".join(f"{zone} {mean:.0f}" for zone, mean in grid.mean_um.items() if mean is not None)
    return Picture(
        to_png(figure, 256),
        f"Map of retinal thickness with the ETDRS grid around {centre}; means in µm: {zones}",
        f"Retinal thickness (ILM to BM) in µm, with the means of the ETDRS zones around {centre}",
        wide=False,
    )


def facts_of(found: "ScanSegmentation") -> list[tuple[str, str]]:
    """(name, value) for the page of one scan: verdict, volumes of fluid, network and what it is not for."""
    from octfm.layers.table import ACCEPTED
    from octfm.weights.packaged import NOTE

    amounts = {name: found.volume_nl(name) for name in found.masks} if found.verdict.accepted else {}
    length = found.axial_length_mm
    return [
        ("Verdict", "; ".join(found.verdict.reasons) or ACCEPTED),
        *((("Note", found.note_on_scan),) if found.note_on_scan else ()),
        ("Doubtful A-scans", f"{found.doubtful.mean():.0%}"),
        *(
            (f"{name.replace('_', ' ').capitalize()}, as found", f"{nl:.1f} nl")
            for name, nl in amounts.items()
            if nl is not None
        ),
        *((("Lateral millimetres", f"for an axial length of {length:g} mm"),) if length is not None else ()),
        ("Found by", f"{found.model}; {NOTE}"),
    ]


def bscan_picture(found: "ScanSegmentation") -> bytes:
    """PNG of the B-scan that says most: through the most fluid, else the middle one; lines and areas drawn in."""
    volume = found.volume
    most = [sum(int(mask[d].sum()) for mask in found.masks.values()) for d in range(volume.shape[0])]
    d = int(np.argmax(most)) if max(most, default=0) >= 50 else volume.shape[0] // 2
    bscan = np.asarray(list(eight_bit(volume))[d])
    picture = np.repeat(bscan[..., None], 3, axis=2)
    for name, mask in found.masks.items():
        picture[mask[d]] = picture[mask[d]] // 2 + np.array(AREAS[name], np.uint8) // 2
    for name, colour in LINES.items():
        row = found.surfaces[name][d]
        columns = np.nonzero(np.isfinite(row))[0]
        at = np.rint(row[columns]).astype(int)
        for thick in (0, 1):
            picture[np.clip(at + thick, 0, len(bscan) - 1), columns] = colour
    return _thumbnail(picture, _around(found.surfaces, d, len(bscan)))


def _around(surfaces: dict[str, np.ndarray], d: int, height: int) -> slice:
    """Rows of the retina in a B-scan with a margin, all rows if it was not found."""
    ilm, bm = surfaces["ilm"][d], surfaces["bm"][d]
    if not (np.isfinite(ilm).any() and np.isfinite(bm).any()):
        return slice(0, height)
    # In different A-scans, the ILM found may lie below the BM found.
    both, margin = np.concatenate([ilm, bm]), 0.15 * height
    return slice(max(0, int(np.nanmin(both) - margin)), min(height, int(np.nanmax(both) + margin) + 1))


def _thumbnail(picture: np.ndarray, rows: slice) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    small = Image.fromarray(np.ascontiguousarray(picture[rows])).resize(THUMBNAIL, Image.Resampling.BOX)
    small.quantize(96).save(buffer, "PNG", optimize=True)
    return buffer.getvalue()
