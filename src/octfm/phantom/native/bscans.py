"""Render B-scans of phantom version 4: realistic outer retina and choroid, any look, any placement, and the truth.

Where render.py draws cohorts whose bytes must never change, this one is made for training segmentation: its looks and
accidents vary more than those of any clinic, and every image comes with surfaces and lesion masks.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from scipy.ndimage import gaussian_filter, gaussian_filter1d

from octfm.phantom.anatomy import DISC_MM, LAYER, LAYERS, SURFACE, bruch_um
from octfm.phantom.deformation import atrophy, cyst_spans, membrane_um
from octfm.phantom.eye import Eye, layers_um
from octfm.phantom.native.look import ABSENT_DB, Look
from octfm.phantom.native.outer_retina import DETACHMENT, MATERIAL, OuterLesions, OuterRetina, raise_outer_retina
from octfm.phantom.optics import detector_noise, log_display, speckle
from octfm.phantom.pathology import LESIONS
from octfm.phantom.render import (
    FWHM,
    HYPERTRANSMISSION_DB,
    MEMBRANE_DB,
    VITREOUS_DB,
    Steps,
    blend,
    decibels,
    en_face_positions,
)
from octfm.phantom.scanner import Acquisition, Scanner
from octfm.phantom.vessels import vessel_profile
from octfm.volume.volume import Shape3, Spacing3

SURFACES = (
    "ilm",
    "nfl_gcl",
    "gcl_ipl",
    "ipl_inl",
    "inl_opl",
    "opl_onl",
    "elm",
    "ez",
    "photoreceptor_tips",
    "rpe_inner",
    "rpe_peak",
    "bm",
)
"""From the vitreous outwards. `rpe_inner` is the inner edge of the RPE's bright band, `rpe_peak` its brightest line,
`bm` its outer edge."""
Accident = Literal["none", "clipped", "blink", "upside_down", "wrapped"]
"""Faults of an image: retina outside the frame, no signal, rows reversed, or folded back at the frame's top."""
_BASE = {name: SURFACE["rpe" if name == "rpe_inner" else name] for name in SURFACES if name != "rpe_peak"}


@dataclass(frozen=True, eq=False)
class Placement:
    """How the retina lies in the frame."""

    tilt_deg: tuple[float, float]
    """Tilt along a B-scan and from B-scan to B-scan."""
    curvature_um_per_mm2: float
    """Added to the eye's own curvature; large in high myopia."""
    staphyloma: np.ndarray
    """[4]: x, y, radius in mm and depth in µm of an outpouching of the eye wall; depth 0 for none."""
    depth: float
    """Position of the retina in the frame: 0 as high as it fits, 1 as low."""
    outside: float
    """Share of the retina beyond the frame in a clipped or wrapped image: above it if negative, else below."""
    jitter_um: float
    """Amplitude of motion within a B-scan."""
    accident: Accident


def sample_placement(rng: np.random.Generator) -> Placement:
    """Draw a placement: tilts have standard deviations of 5° and 3°, one eye in ten is highly myopic, one image in
    eight has an accident."""
    myopic = rng.random() < 0.1
    extra, bulge = rng.uniform(0, 25), np.array([*rng.normal(0, 1.5, 2), rng.uniform(1, 2.5), rng.uniform(50, 400)])
    drawn = rng.random()
    accidents: dict[Accident, float] = {"clipped": 0.06, "blink": 0.08, "upside_down": 0.1, "wrapped": 0.12}
    spoilt: list[Accident] = [accident for accident, share in accidents.items() if drawn < share]
    accident = spoilt[0] if spoilt else "none"
    depth, side, outside = rng.uniform(0, 1), rng.choice([-1, 1]), rng.uniform(0.1, 0.6)
    return Placement(
        tilt_deg=(float(rng.normal(0, 5)), float(rng.normal(0, 3))),
        curvature_um_per_mm2=float(extra if myopic else 0.0),
        staphyloma=bulge * (1, 1, 1, float(myopic and rng.random() < 0.5)),
        depth=float(depth),
        outside=float(outside * (side if accident == "clipped" else -1)),
        jitter_um=float(rng.uniform(0, 8) if rng.random() < 0.3 else 0.0),
        accident=accident,
    )


@dataclass(frozen=True, eq=False)
class Labelled:
    """Images with their truth."""

    voxels: np.ndarray
    """uint8 [D, H, W]"""
    surfaces: np.ndarray
    """float32 [S, D, W]: row of each of SURFACES, 0 at the first row's centre; NaN where it is not in the image."""
    lesions: np.ndarray
    """uint8 [D, H, W]: 0, a value of pathology.LESIONS, DETACHMENT or MATERIAL."""
    spacing_mm: Spacing3
    accident: Accident


@dataclass(frozen=True, eq=False)
class Scene:
    """One eye on the grid of one acquisition."""

    eye: Eye
    outer: OuterRetina
    scanner: Scanner
    look: Look
    spacing_mm: Spacing3
    x_mm: np.ndarray
    y_mm: np.ndarray
    depth_um: np.ndarray
    """[S, D, W] of anatomy.SURFACES, below the top of the frame."""
    half_um: np.ndarray
    shade: np.ndarray

    @property
    def rows_per_um(self) -> float:
        return 1 / (1000 * self.spacing_mm[1])

    @property
    def edges(self) -> np.ndarray:
        """[S, D, W] in fractional rows."""
        return self.depth_um * self.rows_per_um

    def edge(self, surface: str) -> np.ndarray:
        return self.depth_um[SURFACE[surface]] * self.rows_per_um

    def thickness(self, layer: str) -> np.ndarray:
        """[D, W] µm."""
        return self.depth_um[LAYER[layer] + 1] - self.depth_um[LAYER[layer]]

    @property
    def peak(self) -> np.ndarray:
        """[D, W] row of the brightest line of the RPE band."""
        share = self.look.peak_at
        return (1 - share) * self.edge("rpe") + share * self.edge("rpe_bottom")


@dataclass(frozen=True, eq=False)
class Shot:
    """All that one acquisition depends on but its noise."""

    eye: Eye
    lesions: OuterLesions
    scanner: Scanner
    look: Look
    acquisition: Acquisition
    placement: Placement


def render_native(shot: Shot, rng: np.random.Generator, size: Shape3) -> Labelled:
    """B-scans of `size` [D, H, W] over the scanner's field."""
    placement, frame = shot.placement, size
    if placement.accident == "wrapped":
        # Rendered with as much again above the frame; what lies there is folded back below.
        dz, axial, dx = shot.scanner.field_mm
        shot = replace(shot, scanner=replace(shot.scanner, field_mm=(dz, 2 * axial, dx)))
        frame = size[0], 2 * size[1], size[2]
    scene = _place(shot, rng, frame)
    power, peak = _retina(scene, rng, frame), scene.peak
    _add_choroid(power, scene, rng)
    _paint_vessels(power, scene)
    mask = _paint_lesions(power, scene, rng)
    edges = scene.edges
    surfaces = np.stack([peak if name == "rpe_peak" else edges[_BASE[name]] for name in SURFACES]) - 0.5
    if placement.accident == "wrapped":
        power, surfaces = fold(power), surfaces - size[1]
        # Where the ILM has left the frame, two images of the retina overlap: no surface is to be found.
        gone = surfaces[0] < -0.5
        surfaces[:, gone] = np.nan
        mask = mask[:, size[1] :] * ~gone[:, None]
        scene = replace(scene, scanner=replace(scene.scanner, field_mm=(dz, axial, dx)))
    surfaces[(surfaces < -0.5) | (surfaces > size[1] - 0.5)] = np.nan
    if placement.accident == "blink":
        first = int(rng.integers(size[0]))
        dark = slice(first, first + max(1, size[0] // 3))
        power[dark] *= 1e-4
        surfaces[:, dark], mask[dark] = np.nan, 0
    voxels = _expose(power, scene, shot.acquisition, rng)
    if placement.accident == "upside_down":
        voxels, mask, surfaces = voxels[:, ::-1], mask[:, ::-1], np.full_like(surfaces, np.nan)
    return Labelled(
        np.ascontiguousarray(voxels),
        surfaces.astype(np.float32),
        np.ascontiguousarray(mask),
        scene.spacing_mm,
        placement.accident,
    )


def fold(power: np.ndarray) -> np.ndarray:
    """[D, 2H, W] → [D, H, W]: the lower half with the upper half mirrored onto it, as spectra fold at zero delay."""
    half = power.shape[1] // 2
    return power[:, half:] + power[:, half - 1 :: -1]


def layers_of(shot: Shot, x_mm: np.ndarray, y_mm: np.ndarray, ascan_mm: float) -> tuple[np.ndarray, OuterRetina]:
    """Thickness in µm of anatomy.LAYERS, [L, D, W], x nasal and y superior of the fovea, and the outer retina there."""
    layers = layers_um(shot.eye, x_mm, y_mm)
    outer = raise_outer_retina(shot.lesions, layers, x_mm, y_mm, ascan_mm)
    # No band where there is no RPE: in the disc, in atrophy.
    # Where the RPE is raised, what made the flat band thicker than the RPE stays below: the material takes its place.
    extra = shot.look.band_um * np.clip(layers[LAYER["rpe"]] / 15, 0, 1) * np.exp(-outer.raised_um / 12)
    layers[LAYER["rpe"]] = np.maximum(layers[LAYER["rpe"]] + extra, 0)
    return layers, outer


def _place(shot: Shot, rng: np.random.Generator, size: Shape3) -> Scene:
    eye, scanner, look, acquisition, placement = shot.eye, shot.scanner, shot.look, shot.acquisition, shot.placement
    x, y = en_face_positions(eye, scanner, acquisition, size)
    spacing = scanner.spacing_mm(size)
    layers, outer = layers_of(shot, x, y, spacing[2])
    retina = layers[: LAYER["choroid"]]
    bm = bruch_um(eye.anatomy, x, y) - placement.curvature_um_per_mm2 * (x**2 + y**2)
    px, py, radius, deep = placement.staphyloma
    bm = bm + deep * np.exp(-((x - px) ** 2 + (y - py) ** 2) / radius**2)
    above = np.cumsum(retina[::-1], axis=0)[::-1]
    depth = np.concatenate([bm - above, bm[None], (bm + layers[LAYER["choroid"]])[None]])

    slope = 1000 * np.tan(np.radians(placement.tilt_deg))
    shift = slope[0] * (x - x.mean()) + slope[1] * (y - y.mean()) + acquisition.axial_motion_um[:, None]
    if placement.jitter_um:
        time = np.arange(size[2]) / size[2]
        shift = shift + placement.jitter_um * np.sin(2 * np.pi * (rng.uniform(0.5, 4) * time + rng.random()))
    depth += shift
    frame = 1000 * scanner.field_mm[1]
    top, bottom = float(depth[SURFACE["ilm"]].min()), float(depth[SURFACE["bm"]].max())
    first, last = 40 - top, frame - 100 - bottom
    beyond = placement.outside * (bottom - top)
    if placement.accident == "wrapped":
        depth += frame / 2 + beyond - top
    elif placement.accident == "clipped":
        depth += beyond - top if placement.outside < 0 else frame + beyond - bottom
    else:
        depth += first + placement.depth * max(last - first, 0)
    half, shade = vessel_profile(eye.vessels, x, y)
    return Scene(eye, outer, scanner, look, spacing, x, y, depth, half, shade**look.vessel_shadow)


def _retina(scene: Scene, rng: np.random.Generator, size: Shape3) -> np.ndarray:
    """Mean backscattered power of vitreous and retina, float32 [D, H, W], texture included."""
    look, outer, edges, shade, rows_per_um = scene.look, scene.outer, scene.edges, scene.shade, scene.rows_per_um
    x, y, raised = scene.x_mm, scene.y_mm, scene.outer.raised_um
    # Smooth patches from 0 to 1 of some tenths of a millimetre, in which drusen differ.
    patch = np.clip(0.5 + scene.eye.anatomy.texture["csi"](3 * x + 9, 3 * y), 0, 1)
    faded = decibels(look.raised_rpe_db * np.clip(raised / 40, 0, 1) * patch)
    degrees = np.degrees(np.arctan(np.gradient(scene.depth_um[0], axis=1) / (1000 * scene.spacing_mm[2])))
    steps = Steps(*size)
    above = np.full(x.shape, decibels(VITREOUS_DB))
    steps.add(np.zeros(x.shape), above)
    for name in LAYERS[: LAYER["choroid"]]:
        level = np.broadcast_to(decibels(look.layer_db[name]), x.shape)
        if (wave := scene.eye.anatomy.texture.get(name)) is not None:
            level = level * decibels(0.8 * wave(1.7 * x + 5, 1.7 * y))
        match name:
            case "nfl":
                level = level * (0.35 + 0.65 * np.clip(scene.thickness("nfl") / 22, 0, 1))
                level = level * decibels(-look.oblique_db * np.abs(degrees))
            case "ellipsoid" | "outer_segment":
                level = level * np.exp(-raised / look.ellipsoid_loss_um)
            case "subretinal_fluid" if outer.material_um.any() or outer.reticular_um.any():
                solid = np.where(outer.reticular_um > outer.material_um, decibels(-3.5), decibels(look.fill_db + 2))
                level = np.where(np.maximum(outer.material_um, outer.reticular_um) > 0, solid, level)
            case "rpe":
                level = level * faded
            case "drusen":
                clots = decibels(look.fill_db + 0.5 * look.fill_sd_db * scene.eye.anatomy.texture["csi"](5 * x, 5 * y))
                level = np.exp((1 - outer.serous) * np.log(clots) + outer.serous * np.log(decibels(-24)))
        if LAYER[name] > LAYER["gcl"]:
            level = level * shade
        steps.add(edges[LAYER[name]], level - above)
        above = level
        if name == "drusen":
            # Solid material fades towards Bruch's membrane, here in three steps.
            solid_fall = look.fill_fall_db * (1 - outer.serous)
            for part in (1 / 3, 2 / 3):
                lower = level * decibels(-1.5 * part * solid_fall)
                steps.add((1 - part) * edges[LAYER[name]] + part * edges[LAYER[name] + 1], lower - above)
                above = lower
    steps.add(scene.edge("bm"), -above)

    def line(at: np.ndarray, um: float, level: np.ndarray) -> None:
        steps.add(at - um / 2 * rows_per_um, level)
        steps.add(at + um / 2 * rows_per_um, -level)

    line(scene.edge("elm"), 6, decibels(look.elm_db) * shade * np.clip(scene.thickness("myoid") / 10, 0, 1))
    tips = decibels(look.interdigitation_db) * shade * np.clip(scene.thickness("outer_segment") / 15, 0, 1)
    line(scene.edge("photoreceptor_tips"), look.interdigitation_um, tips * np.exp(-raised / look.ellipsoid_loss_um))
    line(scene.peak, 6, decibels(look.peak_db) * shade * faded * np.clip(scene.thickness("rpe") / 8, 0, 1))
    if look.base_db > ABSENT_DB:
        on_base = np.clip(raised / 25 - 0.4, 0, 1) * (1 - outer.serous) * np.clip(2 - 3 * patch, 0, 1)
        line(scene.edge("bm") - 8 * rows_per_um, 14, decibels(look.base_db) * shade * on_base)
    line(scene.edge("bm"), 5, decibels(look.bruch_db) * shade * np.clip(raised / 30, 0, 1))
    if look.ilm_db > ABSENT_DB:
        # The ILM reflects like a mirror: only where it faces the beam, and in patches.
        patches = np.clip(scene.eye.anatomy.texture["nfl"](0.7 * x, 0.7 * y) + 0.5, 0, 1)
        line(scene.edge("ilm") + 2 * rows_per_um, 5, decibels(look.ilm_db) * np.exp(-((degrees / 6) ** 2)) * patches)
    if scene.eye.anatomy.hyaloid_um > 0:
        off_fovea, off_disc = x**2 + y**2, (x - DISC_MM[0]) ** 2 + (y - DISC_MM[1]) ** 2
        free = (1 - np.exp(-off_fovea / 2.2**2)) * (1 - np.exp(-off_disc / 1.4**2))
        lift = np.maximum(scene.eye.anatomy.hyaloid_um * free + 4 * scene.eye.anatomy.texture["bm"](x, y), 0)
        line(scene.edge("ilm") - (lift + 4) * rows_per_um, 8, decibels(-19) * np.clip(lift / 25 - 0.5, 0, 1))
    power = steps.total()
    axial, lateral = look.texture_um
    sigma = (axial / (1000 * scene.spacing_mm[1]), lateral / (1000 * scene.spacing_mm[2]))
    for bscan in power:
        grain = gaussian_filter(rng.standard_normal(bscan.shape, dtype=np.float32), sigma, truncate=2.5)
        # ln(10) / 10 = 0.23026 turns dB into an exponent; the root restores the deviation that the filter took.
        grain *= np.float32(look.texture_db * 0.23026 * 2 * np.sqrt(np.pi * max(sigma[0], 0.3) * max(sigma[1], 0.3)))
        bscan *= np.exp(grain, out=grain)
    return power


class _Texture:
    """Smooth noise of unit variance in (B-scan, axial, lateral), of one scale, made B-scan by B-scan."""

    def __init__(self, rng: np.random.Generator, scale_mm: float, shape: tuple[int, int], spacing: Spacing3):
        """For B-scans of `shape` (rows, columns)."""
        self.seed = int(rng.integers(2**32))
        self.between = scale_mm / 2
        self.steps = [max(scale_mm / 2, mm) for mm in spacing[1:]]
        self.shape, self.spacing = shape, spacing
        self.known: dict[int, np.ndarray] = {}

    def plane(self, bscan: int) -> np.ndarray:
        """float32 [rows, columns], linear between planes half the scale apart."""
        near, part = divmod(bscan * self.spacing[0] / self.between, 1)
        plane = (1 - part) * self._noise(int(near)) + part * self._noise(int(near) + 1)
        plane *= np.float32(1 / np.hypot(1 - part, part))
        for axis, step in enumerate(self.steps):
            position = np.arange(self.shape[axis], dtype=np.float32) * np.float32(self.spacing[axis + 1] / step)
            low = position.astype(np.int64)
            share = (position - low)[:, None] if axis == 0 else position - low
            plane = plane.take(low, axis) * (1 - share) + plane.take(low + 1, axis) * share
        return plane

    def _noise(self, number: int) -> np.ndarray:
        if number not in self.known:
            self.known = {n: kept for n, kept in self.known.items() if n == number - 1}
            count = [
                int(n * mm / step) + 3 for n, mm, step in zip(self.shape, self.spacing[1:], self.steps, strict=True)
            ]
            noise = np.random.default_rng([self.seed, number]).standard_normal(count, dtype=np.float32)
            # The factor restores unit variance after the filter.
            self.known[number] = gaussian_filter(noise, 0.9) * np.float32(3.2)
        return self.known[number]


def _add_choroid(power: np.ndarray, scene: Scene, rng: np.random.Generator) -> None:
    """Choriocapillaris, Sattler's small and Haller's large vessels (dark in bright stroma), sclera; all fade."""
    look, spacing = scene.look, scene.spacing_mm
    dy = spacing[1]
    bm, csi = scene.edge("bm").astype(np.float32), scene.edge("csi").astype(np.float32)
    first = int(np.clip(np.floor(bm.min()), 0, power.shape[1] - 1))
    rows = np.arange(first, power.shape[1], dtype=np.float32)[:, None]
    shape = len(rows), power.shape[2]
    capillary, sattler, haller = (_Texture(rng, scale, shape, spacing) for scale in (0.035, 0.09, 0.22))
    window = decibels(HYPERTRANSMISSION_DB * atrophy(scene.eye.lesions, scene.x_mm, scene.y_mm))
    light = (window * decibels(2 * scene.outer.serous) * scene.shade).astype(np.float32)
    for d, bscan in enumerate(power[:, first:]):
        below_mm = (rows - bm[d]) * np.float32(dy)
        deep = np.clip(below_mm / np.float32(0.12), 0, 1)
        large = 0.45 * sattler.plane(d) + 0.9 * haller.plane(d)
        vessels = (1 - deep) * capillary.plane(d) + deep * large
        vessels = np.tanh(1.6 * vessels + 0.2) * np.float32(look.choroid_contrast)
        tissue = np.float32(decibels(look.choroid_db)) * (1 + vessels)
        sheet = np.clip((np.float32(look.choriocapillaris_um / 1000) - below_mm) / np.float32(0.012) + 1, 0, 1)
        tissue += sheet * (np.float32(decibels(look.choriocapillaris_db)) * (1 + np.float32(0.3) * vessels) - tissue)
        sclera = np.clip((rows - csi[d]) * np.float32(dy / 0.06) + np.float32(0.5), 0, 1)
        sclera = sclera * sclera * (3 - 2 * sclera)
        tissue += sclera * (np.float32(decibels(look.sclera_db)) - tissue)
        tissue *= np.exp(-np.clip(below_mm, 0, 3) / np.float32(look.choroid_decay_mm))
        tissue *= np.clip(rows + 1 - bm[d], 0, 1) * light[d]
        bscan += tissue


def _paint_vessels(power: np.ndarray, scene: Scene) -> None:
    """Paint each vessel as a forward-scattering body below a bright wall."""
    d, w = np.nonzero(scene.half_um > 4)
    half = scene.half_um[d, w]
    centre = scene.depth_um[SURFACE["gcl_ipl"], d, w] - 0.4 * half
    top, bottom = (centre - half) * scene.rows_per_um, (centre + half) * scene.rows_per_um
    blend(power, (d, w), top, bottom, float(decibels(-5.0)), 0.75)
    blend(power, (d, w), top, top + 6 * scene.rows_per_um, float(decibels(-1.0)), 0.6)


def _paint_lesions(power: np.ndarray, scene: Scene, rng: np.random.Generator) -> np.ndarray:
    """Paint cysts, foci with their shadows and membranes into the power; returns the mask uint8 [D, H, W]."""
    mask, lesions, outer = np.zeros(power.shape, np.uint8), scene.eye.lesions, scene.outer
    x, y, rows_per_um = scene.x_mm, scene.y_mm, scene.rows_per_um
    fluid_db = float(rng.uniform(-28, -12))
    for d, w, top, bottom in cyst_spans(lesions, scene.depth_um, x, y):
        mask[blend(power, (d, w), top * rows_per_um, bottom * rows_per_um, float(decibels(fluid_db)))] = LESIONS[
            "intraretinal_fluid"
        ]
    solid = np.maximum(outer.material_um, outer.reticular_um) > 0
    under = outer.detachment_um > outer.drusen_um
    for layer, where, value in (
        ("subretinal_fluid", ~solid & (scene.thickness("subretinal_fluid") > 2), LESIONS["subretinal_fluid"]),
        ("subretinal_fluid", solid, MATERIAL),
        ("drusen", ~under & (outer.drusen_um > 2), LESIONS["drusen"]),
        ("drusen", under, DETACHMENT),
    ):
        _fill(mask, scene.edges[LAYER[layer]], scene.edges[LAYER[layer] + 1], where, value)
    for fx, fy, radius, position in lesions.foci:
        r = np.hypot(x - fx, y - fy)
        d, w = np.nonzero(r < radius)
        if not len(d):
            continue
        inner, outermost = scene.edge("ipl_inl")[d, w], scene.edge("elm")[d, w]
        middle = inner + position * (outermost - inner)
        half = 1000 * radius * rows_per_um * np.sqrt(1 - (r[d, w] / radius) ** 2)
        below = np.ceil(middle + half).astype(np.int64)
        shadow = np.float32(rng.uniform(0.4, 0.95))
        for bscan, ascan, row in zip(d, w, below, strict=True):
            power[bscan, max(row, 0) :, ascan] *= shadow
        blend(power, (d, w), middle - half, middle + half, float(decibels(rng.uniform(-3, 2))))
    thickness, gap = membrane_um(lesions, x, y)
    d, w = np.nonzero(thickness > 0)
    bottom = scene.edge("ilm")[d, w] - gap[d, w] * rows_per_um
    mask[blend(power, (d, w), bottom - thickness[d, w] * rows_per_um, bottom, float(decibels(MEMBRANE_DB)))] = LESIONS[
        "membrane"
    ]
    return mask


def _fill(mask: np.ndarray, top: np.ndarray, bottom: np.ndarray, where: np.ndarray, value: int) -> None:
    rows = np.arange(mask.shape[1])[:, None] + 0.5
    for d in np.nonzero(where.any(axis=1))[0]:
        mask[d][(rows >= top[d]) & (rows < bottom[d]) & where[d]] = value


def _expose(power: np.ndarray, scene: Scene, acquisition: Acquisition, rng: np.random.Generator) -> np.ndarray:
    """Apply roll-off, signal strength, point-spread function, speckle, noise and display: uint8 [D, H, W]."""
    look, (_, dy, dx) = scene.look, scene.spacing_mm
    z_mm = (np.arange(power.shape[1]) + 0.5) * dy
    power *= decibels(-scene.scanner.roll_off_db_per_mm * z_mm).astype(np.float32)[None, :, None]
    signal = acquisition.signal_db[:, None] + acquisition.vignetting_db * acquisition.vignetting(scene.x_mm, scene.y_mm)
    power *= decibels(signal).astype(np.float32)[:, None]
    sigma = look.axial_um / FWHM / (1000 * dy), look.lateral_um / FWHM / (1000 * dx)
    for axis, s in zip((1, 2), sigma, strict=True):
        power = gaussian_filter1d(power, max(s, 0.25), axis=axis, mode="nearest", truncate=3)
    cells = max(1.0, 1000 * dy / look.axial_um) * max(1.0, 1000 * dx / look.lateral_um)
    looks = max(1, round(look.frames_averaged * cells))
    # The field is wider than its intensity by √2.
    power *= speckle(rng, power.shape, (sigma[0] * 2**0.5, sigma[1] * 2**0.5), looks)
    power += detector_noise(rng, power.shape, looks) * np.float32(decibels(look.noise_db))
    if look.linear:
        white = np.float32(decibels(look.black_db + look.range_db)) ** 0.25
        # Sums of single-precision steps can be a hair below 0.
        voxels = np.clip(255 * np.maximum(power, 0) ** 0.25 / white, 0, 255).astype(np.uint8)
    else:
        voxels = log_display(power, look.black_db, look.range_db, look.gamma)
    if any(look.smoothing_px):
        voxels = np.rint(gaussian_filter(voxels.astype(np.float32), (0, *look.smoothing_px))).astype(np.uint8)
    return 255 - voxels if look.inverted else voxels


def single_bscan(scanner: Scanner, acquisition: Acquisition, height_mm: float) -> tuple[Scanner, Acquisition]:
    """The same instrument and acquisition, for one B-scan `height_mm` above the scan's centre."""
    _, axial, lateral = scanner.field_mm
    x, y = acquisition.fixation_mm
    return replace(scanner, field_mm=(0.06, axial, lateral)), replace(acquisition, fixation_mm=(x, y - height_mm))
