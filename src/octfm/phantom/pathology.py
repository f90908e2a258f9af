"""Draw the lesions of an eye: position, size and number by diagnosis and severity.

Sizes and frequencies follow the literature; none was tuned to what an encoder can recognise. Severity in [0, 1] scales
number and size. Below about 0.2 a lesion may be smaller than the distance between B-scans, and layers stay within
normal variation: early disease is meant to be hard to detect. deformation.py applies the lesions to the layers.
"""

from dataclasses import dataclass, field

import numpy as np

from octfm.phantom.anatomy import LAYER, Waves, waves

DIAGNOSES = ("healthy", "drusen", "geographic_atrophy", "dme", "epiretinal_membrane", "macular_hole", "glaucoma")
"""`drusen` is intermediate age-related macular degeneration, `dme` diabetic macular oedema."""
LESIONS = {"intraretinal_fluid": 1, "subretinal_fluid": 2, "drusen": 3, "atrophy": 4, "membrane": 5, "hole": 6}
"""Lesion -> value in the lesion mask, where 0 is none. Atrophy is marked from the outer plexiform layer to Bruch's
membrane. Membrane and hole lie above the ILM: the membrane upon it, the hole between its rims. Glaucoma marks nothing;
it only thins layers."""


def _none() -> np.ndarray:
    return np.zeros((0, 4))


@dataclass(frozen=True, eq=False)
class Lesions:
    """All lesions of one eye. Positions and radii in mm, heights in µm; an empty array means none."""

    drusen: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius, height of the RPE elevation."""
    swelling: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, Gaussian radius, thickening at its centre."""
    cysts: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, lateral radius, half height."""
    cyst_layer: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))
    """[N]: index of the layer that each cyst is centred in."""
    subretinal: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius, height of fluid between photoreceptors and RPE."""
    foci: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius, depth from IPL (0) to ELM (1) of a hyperreflective focus."""
    atrophy: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius, completeness of the loss of RPE and photoreceptors in [0, 1]."""
    membrane: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius, thickness of an epiretinal membrane."""
    traction: float = 0.0
    """Contraction of the membrane: 0 leaves the foveal pit normal, 1 has drawn the inner layers across the fovea."""
    outline: Waves | None = None
    """Irregularity of the borders of atrophy and membrane."""
    wrinkles: Waves | None = None
    """Folds of the inner retina under a contracting membrane."""
    hole: np.ndarray = field(default_factory=_none)
    """[N, 4]: x, y, radius of the gap, radius of the detached cuff around it."""
    roof: bool = False
    """Stage 1: only the outer retina has a gap, and the inner layers still bridge it."""
    operculum: bool = False
    """The torn-off roof floats above the hole."""
    bundles: np.ndarray = field(default_factory=_none)
    """[N, 4]: hemifield (1 superior, -1 inferior), height and width of a nerve fibre bundle's arc, share of it lost."""
    diffuse_loss: float = 0.0
    """Share of nerve fibres lost at every position alike."""


def sample_lesions(rng: np.random.Generator, diagnosis: str, severity: float, age: float) -> Lesions:
    """Draw the lesions of an eye with this diagnosis; drupelets come with age in every eye. Raises ValueError."""
    if diagnosis not in DIAGNOSES:
        raise ValueError(f"unknown diagnosis {diagnosis!r}, expected one of {', '.join(DIAGNOSES)}")
    drupelets = _drupelets(rng, age)
    match diagnosis:
        case "drusen":
            return Lesions(drusen=np.concatenate([drupelets, _drusen(rng, severity)]))
        case "geographic_atrophy":
            return _geographic_atrophy(rng, severity, drupelets)
        case "dme":
            return _diabetic_oedema(rng, severity, drupelets)
        case "epiretinal_membrane":
            return _epiretinal_membrane(rng, severity, drupelets)
        case "macular_hole":
            return _macular_hole(rng, severity, drupelets)
        case "glaucoma":
            return _glaucoma(rng, severity, drupelets)
        case _:
            return Lesions(drusen=drupelets)


def around_the_fovea(rng: np.random.Generator, radius_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x and y of points at these distances from the fovea, in random directions."""
    angle = rng.uniform(0, 2 * np.pi, len(radius_mm))
    return radius_mm * np.cos(angle), radius_mm * np.sin(angle)


def _table(*columns: np.ndarray) -> np.ndarray:
    return np.stack(columns, axis=1)


def _drupelets(rng: np.random.Generator, age: float) -> np.ndarray:
    """Draw deposits below 63 µm, which are normal ageing (Ferris et al. 2013), for every diagnosis."""
    count = rng.poisson(max(0.0, (age - 45) / 12))
    x, y = around_the_fovea(rng, rng.uniform(0.2, 3.0, count))
    return _table(x, y, rng.uniform(0.015, 0.031, count), rng.uniform(4, 12, count))


def _drusen(rng: np.random.Generator, severity: float) -> np.ndarray:
    """Draw drusen of 63 to 500 µm diameter and 20 to 150 µm height, larger and more numerous with severity."""
    count = 5 + rng.poisson(55 * severity)
    # Drusen cluster, densest near the fovea: offspring around four parents.
    px, py = around_the_fovea(rng, np.abs(rng.normal(0, 1.0, 4)))
    parent = rng.integers(0, 4, count)
    x = px[parent] + rng.normal(0, 0.55, count)
    y = py[parent] + rng.normal(0, 0.55, count)
    largest = 0.045 + 0.205 * severity
    radius = 0.032 + (largest - 0.032) * rng.beta(1.2, 2.5, count)
    height = np.clip(1000 * radius * rng.uniform(0.35, 0.75, count), 20, 150)
    return _table(x, y, radius, height)


def _geographic_atrophy(rng: np.random.Generator, severity: float, drupelets: np.ndarray) -> Lesions:
    """Draw geographic atrophy of about 0.1 to 14 mm² in all.

    Complete atrophy is at least 250 µm wide (Sadda et al. 2018, PMC11366072). Published areas at presentation are 7.3 ±
    6.6 mm², two thirds of them multifocal, with the fovea involved in 41 % (Monés & Biarnés 2018, doi
    10.1167/tvst.7.6.40).
    """
    count = 1 if rng.random() < 0.33 else 2 + int(rng.poisson(1.5))
    area = 0.06 + 13 * severity**1.8 * np.exp(rng.normal(0, 0.2))
    share = rng.dirichlet(np.full(count, 2.0))
    radius = np.sqrt(np.maximum(share * area, 0.05) / np.pi)
    # Atrophy begins around the fovea and spares its centre for a long time.
    x, y = around_the_fovea(rng, np.abs(rng.normal(0.9, 0.45, count)) + 0.25 * radius)
    complete = np.clip(0.55 + 0.9 * severity + rng.normal(0, 0.1, count), 0.4, 1.0)
    return Lesions(
        drusen=np.concatenate([drupelets, _drusen(rng, rng.uniform(0.2, 0.6))]),
        atrophy=_table(x, y, radius, complete),
        outline=waves(rng, (0.5, 1.6)),
    )


def _diabetic_oedema(rng: np.random.Generator, severity: float, drupelets: np.ndarray) -> Lesions:
    """Draw diabetic macular oedema: leaks with swelling, cysts and bright foci around them, subretinal fluid."""
    leaks = 1 + rng.poisson(2.0 * severity)
    # Leaking microaneurysms lie anywhere in the macula; the more severe, the more often the centre is involved.
    fx, fy = around_the_fovea(rng, rng.uniform(0.0, 2.0 - 1.1 * severity, leaks))
    width = rng.uniform(0.45, 0.9, leaks)
    # Divided, so that many leaks together do not swell the retina beyond what one severe leak does.
    peak = (8 + 120 * severity * rng.uniform(0.5, 1.2, leaks)) / leaks**0.5
    swelling = _table(fx, fy, width, peak)

    count = 3 + rng.poisson(45 * severity**1.2)
    leak = rng.integers(0, leaks, count)
    cx = fx[leak] + rng.normal(0, 0.75, count) * width[leak]
    cy = fy[leak] + rng.normal(0, 0.75, count) * width[leak]
    radius = 0.025 + (0.015 + 0.16 * severity) * rng.beta(1.2, 2.4, count)
    half_height = 1000 * radius * rng.uniform(0.45, 1.1, count)
    # Most cysts lie in the inner nuclear and Henle's fibre layer (`onl`); in the latter they are taller.
    layer = rng.choice([LAYER["inl"], LAYER["opl"], LAYER["onl"]], count, p=[0.45, 0.2, 0.35])
    half_height = np.where(layer == LAYER["onl"], 1.25, 1.0) * half_height
    cysts = _table(cx, cy, radius, np.clip(half_height, 12, 150))

    subretinal = _none()
    # Never in mild oedema, and in three of four of the most severe eyes.
    if rng.random() < 1.1 * (severity - 0.3):
        sx, sy = around_the_fovea(rng, np.abs(rng.normal(0, 0.35, 1)))
        subretinal = _table(sx, sy, rng.uniform(0.5, 1.1, 1), 25 + 130 * severity * rng.uniform(0.4, 1.0, 1))

    spots = rng.poisson(4 + 25 * severity)
    near = rng.integers(0, leaks, spots)
    hx, hy = fx[near] + rng.normal(0, 0.6, spots), fy[near] + rng.normal(0, 0.6, spots)
    foci = _table(hx, hy, rng.uniform(0.012, 0.03, spots), rng.uniform(0, 1, spots))
    return Lesions(drupelets, swelling, cysts, layer.astype(np.int64), subretinal, foci)


def _epiretinal_membrane(rng: np.random.Generator, severity: float, drupelets: np.ndarray) -> Lesions:
    """Draw an epiretinal membrane; with severity it passes the four stages of Govetto et al. 2017.

    Foveal pit kept; pit lost and outer nuclear layer stretched; inner layers across the fovea; layers disrupted, here
    by cysts (doi 10.1016/j.ajo.2016.12.006). The retina folds across the direction of contraction.
    """
    x, y = around_the_fovea(rng, np.abs(rng.normal(0, 0.5, 1)))
    traction = float(np.clip(1.15 * severity - 0.08 + rng.normal(0, 0.05), 0.03, 1.0))
    across = rng.uniform(0, np.pi)
    k = 2 * np.pi / rng.uniform(0.22, 0.6, 6)
    angle = across + rng.normal(0, 0.4, 6)
    count = int(rng.poisson(max(0.0, 18 * (severity - 0.65))))
    cx, cy = around_the_fovea(rng, np.abs(rng.normal(0, 0.5, count)))
    radius = rng.uniform(0.03, 0.09, count)
    return Lesions(
        drusen=drupelets,
        cysts=_table(x[0] + cx, y[0] + cy, radius, 1000 * radius * rng.uniform(0.4, 0.8, count)),
        cyst_layer=np.full(count, LAYER["inl"]),
        membrane=_table(
            x, y, rng.uniform(1.1, 1.6, 1) + 1.2 * severity * rng.uniform(0.5, 1.0, 1), 5 + 10 * severity * np.ones(1)
        ),
        traction=traction,
        outline=waves(rng, (0.8, 2.5)),
        wrinkles=Waves(np.stack([k * np.cos(angle), k * np.sin(angle)], axis=1), rng.uniform(0, 2 * np.pi, 6)),
    )


def _macular_hole(rng: np.random.Generator, severity: float, drupelets: np.ndarray) -> Lesions:
    """Draw a macular hole in the stages of Gass; below a severity of 0.3 a foveal pseudocyst over an outer gap.

    The published minimum width of open holes is 400 ± 156 µm over 1,483 operations (Steel et al. 2021, BEAVRS
    database), and about twice that at the RPE.
    """
    x, y = rng.normal(0, 0.05, 1), rng.normal(0, 0.05, 1)
    if severity < 0.3:
        foveal = np.array([0.06 + 0.3 * severity * rng.uniform(0.8, 1.2)])
        gap = np.array([0.02 + 0.25 * severity * rng.uniform(0.7, 1.1)])
        return Lesions(
            drusen=drupelets,
            swelling=_table(x, y, np.full(1, 0.3), np.array([40 + 150 * severity])),
            cysts=_table(x, y, foveal, 45 + 120 * severity * np.ones(1)),
            cyst_layer=np.array([LAYER["onl"]]),
            hole=_table(x, y, gap, gap),
            roof=True,
        )
    gap = np.clip(0.5 * (0.19 + 0.42 * (severity - 0.3) / 0.7) * np.exp(rng.normal(0, 0.12, 1)), 0.09, 0.32)
    count = 10 + int(rng.poisson(16))
    away = gap + 0.1 + np.abs(rng.normal(0, 0.35, count))
    cx, cy = around_the_fovea(rng, away)
    radius = rng.uniform(0.03, 0.10, count)
    layer = rng.choice([LAYER["inl"], LAYER["onl"]], count, p=[0.55, 0.45])
    return Lesions(
        drusen=drupelets,
        swelling=_table(x, y, gap + 0.45, rng.uniform(50, 110, 1)),
        cysts=_table(x + cx, y + cy, radius, np.clip(1000 * radius * rng.uniform(0.45, 0.9, count), 15, 80)),
        cyst_layer=layer.astype(np.int64),
        hole=_table(x, y, gap, gap * rng.uniform(1.6, 2.3, 1)),
        operculum=bool(rng.random() < 0.5),
    )


def _glaucoma(rng: np.random.Generator, severity: float, drupelets: np.ndarray) -> Lesions:
    """Draw glaucoma: arcuate loss of nerve fibres in one hemifield, later in the other, and some diffuse loss.

    The inferior hemifield is affected more often (macular vulnerability zone, Hood et al. 2013). Ganglion cells keep a
    residual thickness even in severe loss (de A Moura et al. 2012, PMC3443822).
    """
    side = -1.0 if rng.random() < 0.62 else 1.0
    loss = np.clip((0.10 + 0.45 * severity) * rng.uniform(0.85, 1.15), 0.08, 0.6)
    other = loss * np.clip((severity - 0.3) / 0.7, 0, 1) * rng.uniform(0.2, 1.0)
    height = rng.uniform(0.6, 2.0, 2)
    width = rng.uniform(0.35, 0.6, 2) + 0.7 * severity
    return Lesions(
        drusen=drupelets,
        bundles=_table(np.array([side, -side]), height, width, np.array([loss, other])),
        diffuse_loss=float(0.02 + 0.10 * severity * rng.uniform(0.5, 1.5)),
    )
