"""One phantom eye (anatomy, vessels, lesions) and its true measurements, which do not depend on the scanner."""

from dataclasses import dataclass

import numpy as np

from octfm.phantom.anatomy import LAYER, Anatomy, Waves, bruch_um, sample_anatomy, thickness_um, waves
from octfm.phantom.deformation import deform
from octfm.phantom.pathology import Lesions, sample_lesions
from octfm.phantom.vessels import Vessels, sample_vessels
from octfm.volume.volume import Laterality


@dataclass(frozen=True, eq=False)
class Eye:
    """Everything about one eye that a scan can show."""

    participant: str
    laterality: Laterality
    age: float
    diagnosis: str
    severity: float
    """In [0, 1]; 0 for a healthy eye."""
    anatomy: Anatomy
    vessels: Vessels
    lesions: Lesions
    choroid_texture: tuple[Waves, np.ndarray]
    """Plane waves across the choroid, and their angular wave numbers in depth, per mm: together a 3-D texture."""


def sample_eye(
    seed: tuple[int, ...], laterality: Laterality, *, participant: str, age: float, diagnosis: str, severity: float
) -> Eye:
    """Draw one eye of the participant identified by `seed`. Both eyes share the participant's traits."""
    side = 0 if laterality == "R" else 1
    # Separate generators, so that the same seed has the same anatomy and vessels whatever its disease.
    shared = np.random.default_rng([*seed, 0])
    own = np.random.default_rng([*seed, 1 + side])
    disease = np.random.default_rng([*seed, 11 + side])
    return Eye(
        participant=participant,
        laterality=laterality,
        age=age,
        diagnosis=diagnosis,
        severity=severity if diagnosis != "healthy" else 0.0,
        anatomy=sample_anatomy(shared, own, age),
        vessels=sample_vessels(own),
        choroid_texture=(waves(own, (0.18, 1.2), 24), own.choice([-1, 1], 24) * 2 * np.pi / own.uniform(0.1, 0.5, 24)),
        lesions=sample_lesions(disease, diagnosis, severity, age),
    )


def layers_um(eye: Eye, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Thickness of every layer, [len(LAYERS), *x_mm.shape], disease included."""
    return deform(eye.lesions, thickness_um(eye.anatomy, x_mm, y_mm), x_mm, y_mm)


def surfaces_um(eye: Eye, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Depth of every surface in µm, [len(SURFACES), *x_mm.shape]: 0 is BM at the fovea, the vitreous is negative."""
    layers = layers_um(eye, x_mm, y_mm)
    bm = bruch_um(eye.anatomy, x_mm, y_mm)
    retina = layers[: LAYER["choroid"]]
    # The retina is stacked on Bruch's membrane: each surface lies above it by the layers between them.
    above = np.cumsum(retina[::-1], axis=0)[::-1]
    return np.concatenate([bm - above, bm[None], (bm + layers[LAYER["choroid"]])[None]])


def sector_um(eye: Eye, inner_mm: float, outer_mm: float) -> np.ndarray:
    """Mean thickness of every layer, [len(LAYERS)], over the ring between two radii around the fovea (ETDRS grid)."""
    count = 12
    # Radii of rings of equal area, so that the plain mean is the mean over the surface.
    r = np.sqrt((np.arange(count) + 0.5) / count * (outer_mm**2 - inner_mm**2) + inner_mm**2)
    angle = (np.arange(24) + 0.5) / 24 * 2 * np.pi
    x, y = np.outer(r, np.cos(angle)), np.outer(r, np.sin(angle))
    return layers_um(eye, x, y).mean(axis=(1, 2))


def central_subfield_um(eye: Eye) -> float:
    """Central subfield thickness (CST): ILM to BM, mean over the central 1 mm, without any scanner's sampling."""
    return float(sector_um(eye, 0.0, 0.5)[: LAYER["choroid"]].sum())
