"""Disease as things with a place and a size in the eye: drusen, and the swelling, cysts and subretinal fluid of diabetic oedema.

Severity in [0, 1] scales number and size; below about 0.2 a lesion may be smaller than the distance between B-scans, and the
layers it changes stay within normal variation, so early disease is hard on purpose.
"""

from dataclasses import dataclass, field

import numpy as np

from octfm.data.phantom.anatomy import LAYER

DIAGNOSES = ("healthy", "drusen", "dme")
LESIONS = {"intraretinal_fluid": 1, "subretinal_fluid": 2, "drusen": 3}
"""Values of the lesion mask; 0 is none."""


def _none() -> np.ndarray:
    return np.zeros((0, 4))


@dataclass(frozen=True, eq=False)
class Lesions:
    """Positions and radii in mm, heights in µm; an empty array means none."""

    drusen: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius, height of the RPE elevation."""
    swelling: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, Gaussian radius, thickening at its centre."""
    cysts: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, lateral radius, half height."""
    cyst_layer: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[N]: index of the layer whose middle the cyst sits in."""
    subretinal: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius, height of the fluid between photoreceptors and RPE."""
    foci: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius, position between IPL (0) and ELM (1) of a hyperreflective focus."""


def sample_lesions(rng: np.random.Generator, diagnosis: str, severity: float, age: float) -> Lesions:
    if diagnosis == "healthy":
        return Lesions(drusen=_drupelets(rng, age))
    if diagnosis == "drusen":
        return Lesions(drusen=np.concatenate([_drupelets(rng, age), _drusen(rng, severity)]))
    if diagnosis == "dme":
        return _diabetic_oedema(rng, severity, age)
    raise ValueError(f"diagnosis {diagnosis!r}: the phantom knows {', '.join(DIAGNOSES)}")


def _polar(rng: np.random.Generator, radius_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    angle = rng.uniform(0, 2 * np.pi, len(radius_mm))
    return radius_mm * np.cos(angle), radius_mm * np.sin(angle)


def _table(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, axis=1)


def _drupelets(rng: np.random.Generator, age: float) -> np.ndarray:
    """Deposits below 63 µm are normal ageing (Ferris et al. 2013), whatever the diagnosis."""
    count = rng.poisson(max(0.0, (age - 45) / 12))
    x, y = _polar(rng, rng.uniform(0.2, 3.0, count))
    return _table(x, y, rng.uniform(0.015, 0.031, count), rng.uniform(4, 12, count))


def _drusen(rng: np.random.Generator, severity: float) -> np.ndarray:
    """Diameters from 63 to 500 µm, heights 20 to 150 µm; larger and more numerous with severity, densest near the fovea."""
    count = 5 + rng.poisson(55 * severity)
    # Drusen cluster: offspring around a few parents.
    px, py = _polar(rng, np.abs(rng.normal(0, 1.0, 4)))
    parent = rng.integers(0, 4, count)
    x = px[parent] + rng.normal(0, 0.55, count)
    y = py[parent] + rng.normal(0, 0.55, count)
    largest = 0.045 + 0.205 * severity
    radius = 0.032 + (largest - 0.032) * rng.beta(1.2, 2.5, count)
    height = np.clip(1000 * radius * rng.uniform(0.35, 0.75, count), 20, 150)
    return _table(x, y, radius, height)


def _diabetic_oedema(rng: np.random.Generator, severity: float, age: float) -> Lesions:
    leaks = 1 + rng.poisson(2.0 * severity)
    # Leaking microaneurysms lie anywhere in the macula; the more severe, the more often the centre is involved.
    fx, fy = _polar(rng, rng.uniform(0.0, 2.0 - 1.1 * severity, leaks))
    width = rng.uniform(0.35, 0.8, leaks)
    peak = (8 + 120 * severity * rng.uniform(0.5, 1.2, leaks)) / leaks**0.5
    swelling = _table(fx, fy, width, peak)

    count = 3 + rng.poisson(45 * severity**1.2)
    leak = rng.integers(0, leaks, count)
    cx = fx[leak] + rng.normal(0, 0.75, count) * width[leak]
    cy = fy[leak] + rng.normal(0, 0.75, count) * width[leak]
    radius = 0.025 + (0.015 + 0.16 * severity) * rng.beta(1.2, 2.4, count)
    half_height = 1000 * radius * rng.uniform(0.45, 1.1, count)
    # Inner nuclear and Henle's fibre layer hold most cysts; in the outer one they stand upright and grow larger.
    layer = rng.choice([LAYER["inl"], LAYER["opl"], LAYER["onl"]], count, p=[0.45, 0.2, 0.35])
    half_height = np.where(layer == LAYER["onl"], 1.25, 1.0) * half_height
    cysts = _table(cx, cy, radius, np.clip(half_height, 12, 150))

    subretinal = _none()
    if rng.random() < 1.1 * (severity - 0.3):
        sx, sy = _polar(rng, np.abs(rng.normal(0, 0.35, 1)))
        subretinal = _table(sx, sy, rng.uniform(0.4, 1.0, 1), 25 + 130 * severity * rng.uniform(0.4, 1.0, 1))

    spots = rng.poisson(4 + 25 * severity)
    near = rng.integers(0, leaks, spots)
    hx, hy = fx[near] + rng.normal(0, 0.6, spots), fy[near] + rng.normal(0, 0.6, spots)
    foci = _table(hx, hy, rng.uniform(0.012, 0.03, spots), rng.uniform(0, 1, spots))
    return Lesions(_drupelets(rng, age), swelling, cysts, layer.astype(np.int64), subretinal, foci)


def deform(lesions: Lesions, thickness_um: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """The layers [L, ...] with what the lesions add to or press out of them."""
    layers = thickness_um.copy()
    layers[LAYER["drusen"]] += _domes(lesions.drusen, x_mm, y_mm)
    # Photoreceptors over a druse are compressed: about half of its height reaches the inner retina.
    compressed = np.minimum(0.5 * layers[LAYER["drusen"]], 0.55 * layers[LAYER["onl"]])
    layers[LAYER["onl"]] -= compressed
    layers[LAYER["outer_segment"]] *= np.exp(-layers[LAYER["drusen"]] / 120)

    swelling = np.zeros(x_mm.shape)
    for x, y, width, peak in lesions.swelling:
        swelling += peak * np.exp(-((x_mm - x) ** 2 + (y_mm - y) ** 2) / (2 * width**2))
    for name, share in (("inl", 0.35), ("opl", 0.2), ("onl", 0.45)):
        layers[LAYER[name]] += share * swelling
    # A cyst makes its own room; together they push the layer apart, but less than the sum of their heights.
    for index in np.unique(lesions.cyst_layer).astype(int):
        room = np.zeros(x_mm.shape)
        for x, y, radius, half_height in lesions.cysts[lesions.cyst_layer == index]:
            room = np.maximum(room, 1.1 * half_height * np.exp(-((x_mm - x) ** 2 + (y_mm - y) ** 2) / (2 * (1.5 * radius + 0.06) ** 2)))
        layers[index] += room
    layers[LAYER["subretinal_fluid"]] += _domes(lesions.subretinal, x_mm, y_mm)
    return layers


def _domes(table: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Height in µm of rounded elevations; where they overlap the higher one counts, so confluent drusen do not tower."""
    height = np.zeros(x_mm.shape)
    for x, y, radius, peak in table:
        inside = np.clip(1 - ((x_mm - x) ** 2 + (y_mm - y) ** 2) / radius**2, 0, 1)
        np.maximum(height, peak * np.sqrt(inside) * inside**0.25, out=height)
    return height


def cyst_spans(lesions: Lesions, surfaces_um: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray) -> list[tuple[np.ndarray, ...]]:
    """Per cyst: the en-face index arrays (d, w) of its footprint, and top and bottom depth in µm there.

    A cyst is an ellipsoid around the middle of its layer, kept between IPL and ELM.
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
