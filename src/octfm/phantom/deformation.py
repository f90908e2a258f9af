"""Effects of lesions on layer thickness (deform), and the position of those that are painted: membranes and cysts.

All positions are in the eye's own frame (anatomy.py): mm from the fovea, x nasal, y superior.
"""

import numpy as np

from octfm.phantom.anatomy import DISC_MM, LAYER
from octfm.phantom.pathology import Lesions

_NEUROSENSORY = ("nfl", "gcl", "ipl", "inl", "opl", "onl", "myoid", "ellipsoid", "outer_segment")
# Share of each layer's thickness lost per share of nerve fibres lost. The IPL also holds processes of other cells.
_NERVE = {"nfl": 1.15, "gcl": 1.0, "ipl": 0.7}
# µm that a membrane at full traction adds at the fovea: ectopic inner layers and a stretched outer nuclear layer.
_ECTOPIC_UM = {"nfl": 8.0, "gcl": 26.0, "ipl": 26.0, "inl": 40.0, "opl": 14.0, "onl": 50.0}
_RIM_MM = 0.24
"""Width over which the edge of a hole is rounded."""
_CUFF_UM = 125.0
"""Height of the detached edge of a hole above the RPE."""


def deform(lesions: Lesions, thickness_um: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Layer thickness [L, ...] after all lesions of the eye have thickened, compressed or destroyed layers."""
    layers = thickness_um.copy()
    lost = nerve_loss(lesions, x_mm, y_mm)
    for name, share in _NERVE.items():
        layers[LAYER[name]] *= 1 - np.minimum(share * lost, 0.7)

    atrophic = atrophy(lesions, x_mm, y_mm)
    layers[LAYER["drusen"]] += _domes(lesions.drusen, x_mm, y_mm) * (1 - atrophic)
    # Drusen compress the photoreceptors above them, so little of their height reaches the inner retina.
    compressed = np.minimum(0.85 * layers[LAYER["drusen"]], 0.6 * layers[LAYER["onl"]])
    layers[LAYER["onl"]] -= compressed
    layers[LAYER["outer_segment"]] *= np.exp(-layers[LAYER["drusen"]] / 120)
    _atrophy_outer_retina(lesions, layers, atrophic, x_mm, y_mm)

    swelling = np.zeros(x_mm.shape)
    for x, y, width, peak in lesions.swelling:
        swelling += peak * np.exp(-((x_mm - x) ** 2 + (y_mm - y) ** 2) / (2 * width**2))
    for name, share in (("inl", 0.35), ("opl", 0.2), ("onl", 0.45)):
        layers[LAYER[name]] += share * swelling
    # Cysts push their layer apart; where several overlap, by the largest, not by the sum of their heights.
    for index in np.unique(lesions.cyst_layer).astype(int):
        room = np.zeros(x_mm.shape)
        for x, y, radius, half_height in lesions.cysts[lesions.cyst_layer == index]:
            width = 1.5 * radius + 0.11
            room = np.maximum(room, half_height * np.exp(-((x_mm - x) ** 2 + (y_mm - y) ** 2) / (2 * width**2)))
        layers[index] += room
    layers[LAYER["subretinal_fluid"]] += _domes(lesions.subretinal, x_mm, y_mm)
    _contract_membrane(lesions, layers, x_mm, y_mm)
    _open_hole(lesions, layers, x_mm, y_mm)
    return layers


def nerve_loss(lesions: Lesions, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Share of nerve fibres lost at each position, in [0, 1).

    Bundles leave the disc steeply, arch around the fovea and end at the horizontal raphe, which none crosses, as traced
    by Jansonius et al. 2009 (PMC2848177). The vessel arcades (vessels.py) follow the same curves. A bundle is
    identified by the height of its arc.
    """
    lost = np.full(x_mm.shape, lesions.diffuse_loss)
    if len(lesions.bundles) == 0:
        return lost
    t = np.clip((DISC_MM[0] - x_mm) / 8.0, 0.01, 1.1) ** (1 / 1.15)
    above = y_mm - DISC_MM[1] * np.clip(x_mm / DISC_MM[0], 0, 1)
    # Height of the arc through each position: the curve of a vessel arcade with a reach of 8 mm, solved for its height
    # above a base line that descends from the disc to the raphe.
    height = np.abs(above) / ((1 - np.exp(-t / 0.13)) * (1 - 0.3 * t**2))
    for hemifield, arc, width, share in lesions.bundles:
        within = 0.5 * (1 + np.tanh(hemifield * above / 0.06))
        lost = lost + share * within * np.exp(-(((height - arc) / width) ** 2))
    return lost


def atrophy(lesions: Lesions, x_mm: np.ndarray, y_mm: np.ndarray, border_mm: float = 0.06) -> np.ndarray:
    """Completeness in [0, 1] of the loss of RPE and photoreceptors at each position; it falls to 0 over `border_mm`."""
    lost = np.zeros(x_mm.shape)
    if len(lesions.atrophy) == 0 or lesions.outline is None:
        return lost
    irregularity = lesions.outline(x_mm, y_mm)
    for x, y, radius, complete in lesions.atrophy:
        inside = radius + min(0.2 * radius, 0.09) * irregularity - np.hypot(x_mm - x, y_mm - y)
        lost = np.maximum(lost, complete * np.clip(inside / border_mm + 0.5, 0, 1))
    return lost


def _atrophy_outer_retina(
    lesions: Lesions, layers: np.ndarray, atrophic: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray
) -> None:
    """Remove RPE and photoreceptors within the atrophy, whose border is 60 µm wide.

    The layers above sink in over a border fifteen times as wide; the outer nuclear layer makes up the difference.
    """
    if len(lesions.atrophy) == 0:
        return
    wide = atrophy(lesions, x_mm, y_mm, 0.9)
    onl = layers[LAYER["onl"]].copy()
    whole, gone = 0.72 * onl, np.zeros(x_mm.shape)
    for name, share in (("myoid", 1.0), ("ellipsoid", 1.0), ("outer_segment", 1.0), ("rpe", 0.85)):
        whole = whole + share * layers[LAYER[name]]
        gone += share * atrophic * layers[LAYER[name]]
        layers[LAYER[name]] *= 1 - share * atrophic
    layers[LAYER["onl"]] = np.maximum(onl + gone - wide * wide * (3 - 2 * wide) * whole, 0.12 * onl)


def membrane_um(lesions: Lesions, x_mm: np.ndarray, y_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Thickness of the epiretinal membrane and width of the gap between it and the ILM, in µm; 0 where there is none.

    A taut membrane rests on the crests of the folds and bridges the troughs.
    """
    thickness, gap = np.zeros(x_mm.shape), np.zeros(x_mm.shape)
    if len(lesions.membrane) == 0 or lesions.outline is None or lesions.wrinkles is None:
        return thickness, gap
    for x, y, radius, um in lesions.membrane:
        inside = radius * (1 + 0.18 * lesions.outline(x_mm, y_mm)) - np.hypot(x_mm - x, y_mm - y)
        thickness = np.maximum(thickness, np.where(inside > 0, um * np.clip(inside / 0.2, 0.4, 1), 0))
    gap = np.where(thickness > 0, 14 * lesions.traction * np.clip(0.4 - lesions.wrinkles(x_mm, y_mm), 0, 1.6), 0)
    return thickness, gap


def _contract_membrane(lesions: Lesions, layers: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray) -> None:
    """Fold and thicken the retina under a contracting membrane, and draw inner layers across the fovea."""
    if len(lesions.membrane) == 0 or lesions.wrinkles is None:
        return
    folds = np.clip(lesions.wrinkles(x_mm, y_mm), -1.8, 1.8)
    r = np.hypot(x_mm, y_mm)
    for x, y, radius, _ in lesions.membrane:
        under = np.exp(-((np.hypot(x_mm - x, y_mm - y) / radius) ** 4))
        # The pit is lost first, as the outer nuclear layer stretches (stage 2); ectopic inner layers follow (stage 3).
        early, late = np.clip(2 * lesions.traction, 0, 1), np.clip(1.6 * lesions.traction - 0.6, 0, 1)
        for name, um in _ECTOPIC_UM.items():
            amount = early if name == "onl" else 0.35 * early + 0.65 * late
            layers[LAYER[name]] += amount * um * np.exp(-((r / 0.75) ** 2)) * under
        for name, um in (("gcl", 12.0), ("ipl", 12.0), ("inl", 22.0), ("onl", 12.0)):
            layers[LAYER[name]] += lesions.traction * um * under
        for name in ("nfl", "gcl", "ipl"):
            layers[LAYER[name]] *= 1 + (0.05 + 0.13 * lesions.traction) * folds * under


def _open_hole(lesions: Lesions, layers: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray) -> None:
    """Open a hole with rounded rims in the neurosensory retina, its edge lifted from the RPE by a cuff of fluid.

    In stage 1 (`lesions.roof`) only the photoreceptors are missing.
    """
    for x, y, gap, cuff in lesions.hole:
        r = np.hypot(x_mm - x, y_mm - y)
        if lesions.roof:
            for name in ("myoid", "ellipsoid", "outer_segment"):
                layers[LAYER[name]] *= np.clip((r - gap) / 0.04 + 0.5, 0, 1)
            continue
        # The wall is a quarter circle: steep at the gap, level at the rim.
        t = np.clip((r - gap) / _RIM_MM, 0, 1)
        present = np.sqrt(1 - (1 - t) ** 2)
        for name in _NEUROSENSORY:
            layers[LAYER[name]] *= present
        lifted = np.clip(1 - (r - gap) / (cuff - gap), 0, 1)
        layers[LAYER["subretinal_fluid"]] += np.where(r > gap, _CUFF_UM * lifted**1.5, 0)


def _domes(table: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Height in µm of rounded elevations; where they overlap the higher one counts, so confluent drusen stay low."""
    height = np.zeros(x_mm.shape)
    for x, y, radius, peak in table:
        inside = np.clip(1 - ((x_mm - x) ** 2 + (y_mm - y) ** 2) / radius**2, 0, 1)
        np.maximum(height, peak * np.sqrt(inside) * inside**0.25, out=height)
    return height


def cyst_spans(
    lesions: Lesions, surfaces_um: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray
) -> list[tuple[np.ndarray, ...]]:
    """For each cyst, index arrays (d, w) of the A-scans through it, and the depth in µm of its top and bottom there.

    A cyst is an ellipsoid around the middle of its layer, clipped to lie between IPL and ELM.
    """
    spans = []
    inner, outer = surfaces_um[LAYER["ipl"] + 1] + 3, surfaces_um[LAYER["onl"] + 1] - 3
    for (x, y, radius, half_height), layer in zip(lesions.cysts, lesions.cyst_layer, strict=True):
        inside = 1 - ((x_mm - x) ** 2 + (y_mm - y) ** 2) / radius**2
        d, w = np.nonzero(inside > 0)
        middle = 0.5 * (surfaces_um[int(layer), d, w] + surfaces_um[int(layer) + 1, d, w])
        half = half_height * np.sqrt(inside[d, w])
        top, bottom = np.maximum(middle - half, inner[d, w]), np.minimum(middle + half, outer[d, w])
        keep = bottom > top
        spans.append((d[keep], w[keep], top[keep], bottom[keep]))
    return spans
