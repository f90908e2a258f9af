"""A healthy eye as functions of en-face position: thickness of retinal layers and choroid, shape of Bruch's membrane.

Coordinates are millimetres from the foveal centre, x nasal (towards the optic disc), y superior, in right and left eyes
alike: the left eye is mirrored only when it is scanned (render.en_face_positions). As everything is a function of
position, one eye can be scanned on any grid. It is computed in float64 and rounded to float32 at the end, so that CPUs
whose vector units differ in the last bit give the same bytes.
"""

from dataclasses import dataclass

import numpy as np

LAYERS = (
    "nfl",
    "gcl",
    "ipl",
    "inl",
    "opl",
    "onl",
    "myoid",
    "ellipsoid",
    "outer_segment",
    "subretinal_fluid",
    "rpe",
    "drusen",
    "choroid",
)
"""From the vitreous outwards. `onl` includes Henle's fibres; `subretinal_fluid` and `drusen` are 0 µm in health."""
SURFACES = (
    "ilm",
    "nfl_gcl",
    "gcl_ipl",
    "ipl_inl",
    "inl_opl",
    "opl_onl",
    "elm",
    "ez",
    "ez_os",
    "photoreceptor_tips",
    "rpe",
    "rpe_bottom",
    "bm",
    "csi",
)
"""Surface i is the upper boundary of layer i; the last one is the choroid-sclera interface."""
LAYER = {name: i for i, name in enumerate(LAYERS)}
SURFACE = {name: i for i, name in enumerate(SURFACES)}
DISC_MM = (4.5, 0.35)
"""Centre (x, y) of the optic disc: about 15 degrees nasal of the fovea and slightly superior."""
DISC_RADIUS_MM = (0.82, 0.92)
"""Horizontal and vertical radius of a disc of mean area, 2.4 mm²."""

# (floor, rim, periphery) of each inner layer in µm, the parameters of `pit`. They are set so that the ETDRS means of a
# normal eye match those published for Spectralis: central 1 mm 278 (NFL 12.6, GCL 17.6, IPL 22.0; Nieves-Moreno et al.
# 2017, PMC5498048, 297 eyes), rings 326 and 282 in older women (CAREDS2, PMC7910637). Other layers have approximate
# literature values. tests/phantom/test_phantom.py checks the result against normative.py.
_PIT = {"gcl": (2.0, 84.0, 36.0), "ipl": (9.0, 56.0, 24.0), "inl": (8.0, 44.0, 26.0), "opl": (17.0, 29.0, 12.0)}
# Layers whose thickness varies irregularly across the macula.
_WAVY = ("nfl", "gcl", "ipl", "inl", "opl", "onl", "outer_segment", "choroid")
# Normally distributed traits of an eye, in the order drawn: adding or moving one changes every phantom.
_TRAITS = (
    "size",
    "pit_radius",
    "pit_shape",
    "pit_floor",
    "arcuate",
    "curvature",
    "oblateness",
    "choroid",
    "choroid_decay",
    "hyaloid",
    *LAYERS,
)


@dataclass(frozen=True, eq=False)
class Waves:
    """A smooth random field of unit variance: a sum of plane waves, which can be evaluated at any position."""

    k_per_mm: np.ndarray
    """[K, 2] angular wave vectors."""
    phase: np.ndarray
    """[K] radians."""

    def __call__(self, x: np.ndarray, y: np.ndarray) -> np.ndarray:
        total = np.zeros(np.broadcast(x, y).shape)
        for (kx, ky), phase in zip(self.k_per_mm, self.phase, strict=True):
            total += np.cos(kx * x + ky * y + phase)
        return total * np.sqrt(2 / len(self.phase))


def waves(rng: np.random.Generator, wavelength_mm: tuple[float, float], count: int = 6) -> Waves:
    """Draw `count` plane waves in random directions, with wavelengths in this range."""
    k = 2 * np.pi / rng.uniform(*wavelength_mm, count)
    angle = rng.uniform(0, 2 * np.pi, count)
    k_xy = np.stack([k * np.cos(angle), k * np.sin(angle)], axis=1)
    return Waves(k_xy, rng.uniform(0, 2 * np.pi, count))


@dataclass(frozen=True, eq=False)
class Anatomy:
    """One eye without disease."""

    scale: dict[str, float]
    """Layer -> multiple of its normal thickness."""
    pit_radius_mm: float
    pit_shape: float
    """Exponent of the foveal pit model: 2 is parabolic, larger is flat-bottomed with steep walls."""
    pit_floor: float
    """Multiple of the inner layers' normal thickness at the foveal centre: 0 is a deep pit, 2 a shallow one."""
    arcuate_um: float
    """Thickness of the arcuate nerve fibre bundles at the disc margin."""
    curvature_um_per_mm2: float
    """Rise of Bruch's membrane towards the vitreous with squared distance from the fovea."""
    choroid_um: float
    """Subfoveal thickness."""
    choroid_nasal_loss: float
    """Share of choroidal thickness lost per mm towards the disc."""
    hyaloid_um: float
    """Distance of a partly detached posterior hyaloid from the ILM outside the fovea; 0 is attached."""
    texture: dict[str, Waves]
    """Irregularity of each layer's thickness, and of the depth of BM (`bm`) and CSI (`csi`)."""


def sample_anatomy(shared: np.random.Generator, own: np.random.Generator, age: float) -> Anatomy:
    """Draw an eye of this age. `shared` is the participant's generator, in the same state for both eyes.

    Traits of fellow eyes correlate with r about 0.9, as measured for macular thickness.
    """
    z_shared, z_own = shared.standard_normal(len(_TRAITS)), own.standard_normal(len(_TRAITS))
    z = dict(zip(_TRAITS, np.clip(0.95 * z_shared + 0.31 * z_own, -2.5, 2.5), strict=True))
    # Change per year of age relative to 60: inner layers lose 0.1-0.3 % (significant in GCL and IPL: PMC5963176), the
    # choroid about 1.5 µm (Margolis & Spaide 2009).
    aging = {"nfl": -0.002, "gcl": -0.003, "ipl": -0.002, "inl": -0.001}
    spread = {"nfl": 0.10, "gcl": 0.07, "ipl": 0.06, "inl": 0.06, "opl": 0.09, "onl": 0.08, "outer_segment": 0.06}
    scale = {
        name: float(
            np.exp(0.05 * z["size"] + spread.get(name, 0.05) * z[name]) * (1 + aging.get(name, 0.0) * (age - 60))
        )
        for name in LAYERS
    }
    return Anatomy(
        scale=scale,
        pit_radius_mm=float(0.80 + 0.08 * z["pit_radius"]),
        pit_shape=float(2.3 + 0.3 * z["pit_shape"]),
        pit_floor=float(np.exp(0.5 * z["pit_floor"])),
        arcuate_um=float(80 + 12 * z["arcuate"]),
        curvature_um_per_mm2=float(8 + 5 * z["curvature"]),
        choroid_um=float(np.clip(270 + 65 * z["choroid"] - 1.5 * (age - 60), 110, 460)),
        choroid_nasal_loss=float(np.clip(0.12 + 0.03 * z["choroid_decay"], 0.04, 0.2)),
        # Partial detachment is common from middle age on. The hyaloid is a decoy: a line that is not the ILM.
        hyaloid_um=float(150 + 70 * abs(z["hyaloid"])) if z["hyaloid"] > 0.6 else 0.0,
        texture={name: waves(own, (0.5, 3.0)) for name in (*_WAVY, "bm", "csi")},
    )


def pit(r_mm: np.ndarray, anatomy: Anatomy, floor: float, rim: float, periphery: float) -> np.ndarray:
    """Thickness in µm of an inner layer at distance r from the foveal centre.

    The radial model of Scheibe et al. 2014 (Exp Eye Res 119:19-26), µ σ² r^γ exp(-µ r^γ) + α (1 - exp(-µ r^γ)), applied
    to each inner layer instead of the whole retina: `rim` is σ², `periphery` is α, and u = µ r^γ is 1 at the pit
    radius.
    """
    u = (r_mm / anatomy.pit_radius_mm) ** anatomy.pit_shape
    decay = np.exp(-u)
    return floor + rim * u * decay + periphery * (1 - decay)


def thickness_um(anatomy: Anatomy, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Thickness of every layer without disease, [len(LAYERS), *x_mm.shape]."""
    x, y = np.broadcast_arrays(x_mm, y_mm)
    r = np.hypot(x, y)
    layers = np.zeros((len(LAYERS), *x.shape))
    layers[LAYER["nfl"]] = _nerve_fibre_layer(anatomy, x, y, r)
    for name, (floor, rim, periphery) in _PIT.items():
        # The pit displaces GCL, IPL and INL; the OPL passes below it, so the pit's depth does not scale its floor.
        layers[LAYER[name]] = pit(r, anatomy, floor * (1 if name == "opl" else anatomy.pit_floor), rim, periphery)
    # Inner layers thin from the parafovea to the arcades, faster on the temporal side.
    eccentric = np.clip(r - 1.4, 0, None) * (1 - 0.15 * np.tanh(x / 2))
    for name in ("gcl", "ipl", "inl"):
        layers[LAYER[name]] *= 1 - 0.09 * np.clip(eccentric, 0, 4)
    layers[LAYER["onl"]] = 55 + 10 * np.exp(-((r / 2.2) ** 2)) + 42 * np.exp(-((r / 0.6) ** 2))
    layers[LAYER["myoid"]] = 22
    layers[LAYER["ellipsoid"]] = 12
    layers[LAYER["outer_segment"]] = 25 + 14 * np.exp(-((r / 0.5) ** 2))
    layers[LAYER["rpe"]] = 19
    # The choroid is thickest below the fovea and thinnest towards the disc.
    towards_disc = np.clip(x, 0, 5)
    layers[LAYER["choroid"]] = (
        anatomy.choroid_um * (1 - anatomy.choroid_nasal_loss * towards_disc) * (1 - 0.012 * r * r)
    )
    for name in LAYERS:
        layers[LAYER[name]] *= anatomy.scale[name]
    for name in _WAVY:
        depth = 0.10 if name == "choroid" else 0.04
        layers[LAYER[name]] *= 1 + depth * anatomy.texture[name](x, y)
    _add_disc(layers, x, y)
    return np.maximum(layers, 0)


def _add_disc(layers: np.ndarray, x: np.ndarray, y: np.ndarray) -> None:
    """Add the optic disc, which wide scans reach: every layer but the nerve fibres ends at its margin.

    The nerve fibres form the neuroretinal rim around the cup.
    """
    off_centre = np.hypot((x - DISC_MM[0]) / DISC_RADIUS_MM[0], (y - DISC_MM[1]) / DISC_RADIUS_MM[1])
    inside = np.clip((1.12 - off_centre) / 0.24, 0, 1)
    if not inside.any():
        return
    inside = inside * inside * (3 - 2 * inside)  # smoothstep
    rim = 45 + 285 * np.clip((off_centre - 0.3) / 0.7, 0, 1) ** 0.8
    layers *= 1 - inside
    layers[LAYER["nfl"]] += inside * rim


def _nerve_fibre_layer(anatomy: Anatomy, x: np.ndarray, y: np.ndarray, r: np.ndarray) -> np.ndarray:
    """NFL thickness in µm: thin at the fovea and along the temporal raphe, growing along the arcuate bundles.

    It reaches about 100 µm at the disc margin.
    """
    dx, dy = DISC_MM[0] - x, y - DISC_MM[1]
    to_disc = np.maximum(np.hypot(dx, dy), 0.9)
    angle = np.degrees(np.arctan2(np.abs(dy), dx))
    bundle = 0.48 + np.exp(-(((angle - 62) / 28) ** 2))
    arcuate = np.exp(-(((np.abs(y) - 2.3) / 1.2) ** 2)) / (1 + np.exp(-(x + 2.0)))
    radial = anatomy.arcuate_um * bundle * (1.75 / np.maximum(to_disc, 1.75)) ** 1.3
    return (8 + radial + 14 * arcuate) * (1 - 0.75 * np.exp(-((r / 0.55) ** 2)))


def bruch_um(anatomy: Anatomy, x_mm: np.ndarray, y_mm: np.ndarray) -> np.ndarray:
    """Depth in µm of Bruch's membrane relative to the fovea; in the curved globe negative (anterior) further out."""
    bowl = -anatomy.curvature_um_per_mm2 * (x_mm**2 + y_mm**2)
    return bowl + 4 * anatomy.texture["bm"](x_mm, y_mm)
