"""Render one OCT acquisition of a phantom eye: a Volume and its ground truth (layer surfaces and a lesion mask).

The mean backscattered power of every voxel is computed first: layers, choroid, vessels, lesions. Then the instrument
acts on it: signal strength, roll-off, point-spread function, speckle, detector noise and the display's log compression
(optics.py).
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from octfm.phantom.anatomy import DISC_MM, LAYER, LAYERS, SURFACE, SURFACES
from octfm.phantom.deformation import atrophy, cyst_spans, membrane_um
from octfm.phantom.eye import Eye, central_subfield_um, surfaces_um
from octfm.phantom.optics import blur, detector_noise, log_display, speckle
from octfm.phantom.pathology import LESIONS
from octfm.phantom.scanner import Acquisition, Scanner, acquire
from octfm.phantom.vessels import vessel_profile
from octfm.volume.volume import Shape3, Spacing3, Volume

# Backscatter in dB relative to the RPE, in the order of brightness seen on log displays: RPE and ellipsoid zone, NFL,
# plexiform layers, ganglion cells, nuclear layers. Fluid and vitreous lie below the detector noise.
LAYER_DB = {
    "nfl": -3.0,
    "gcl": -8.5,
    "ipl": -6.5,
    "inl": -11.5,
    "opl": -7.0,
    "onl": -14.5,
    "myoid": -12.0,
    "ellipsoid": -1.5,
    "outer_segment": -7.0,
    "subretinal_fluid": -30.0,
    "rpe": 0.0,
    "drusen": -8.0,
}
VITREOUS_DB, FLUID_DB, ELM_DB, HYALOID_DB, MEMBRANE_DB, OPERCULUM_DB = -34.0, -27.0, -8.5, -19.0, -2.0, -9.0
CHORIOCAPILLARIS_DB, CHOROID_DB, SCLERA_DB = -4.5, -6.0, -11.5
HYPERTRANSMISSION_DB = 5.0
"""Extra signal below Bruch's membrane where the RPE is gone and no longer attenuates the light."""
FWHM = 2.3548
"""Full width at half maximum of a Gaussian, in standard deviations: 2 √(2 ln 2)."""


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """Ground truth of a rendered volume. Row 0 is the centre of the first pixel row; surfaces may leave the frame."""

    participant: str
    laterality: str
    scanner: str
    diagnosis: str
    severity: float
    age: float
    cst_um: float
    """Central subfield thickness of the eye, ILM to BM; the same for every scan of it."""
    surface_names: tuple[str, ...]
    surfaces: np.ndarray
    """float32 [S, D, W]: row of each named surface."""
    lesions: np.ndarray
    """uint8 [D, H, W]: 0 for none, else a value of pathology.LESIONS."""
    spacing_mm: Spacing3

    def surface(self, name: str) -> np.ndarray:
        """float32 [D, W]: rows of one surface."""
        return self.surfaces[self.surface_names.index(name)]


@dataclass(frozen=True, eq=False)
class _Scene:
    """One eye on the grid of one acquisition: where every A-scan falls, and where every surface crosses it."""

    eye: Eye
    scanner: Scanner
    acquisition: Acquisition
    size: Shape3
    spacing_mm: Spacing3
    x_mm: np.ndarray
    """[D, W] anatomical position of every A-scan, nasal of the fovea."""
    y_mm: np.ndarray
    """[D, W] the same, superior of the fovea."""
    depth_um: np.ndarray
    """[S, D, W] depth of every surface below the top of the frame."""
    half_um: np.ndarray
    """[D, W] half height of the vessel at this position, 0 where there is none."""
    shade: np.ndarray
    """[D, W] share of the light that passes the vessels above."""

    @property
    def rows_per_um(self) -> float:
        return 1 / (1000 * self.spacing_mm[1])

    @cached_property
    def edges(self) -> np.ndarray:
        """[S, D, W] `depth_um` in fractional rows."""
        return self.depth_um / (1000 * self.spacing_mm[1])


def render(eye: Eye, scanner: Scanner, rng: np.random.Generator, size: Shape3) -> tuple[Volume, GroundTruth]:
    """Scan this eye once, on a grid of `size` [D, H, W]; row 0 is on the vitreous side."""
    scene = _place(eye, scanner, acquire(rng, scanner, size[0]), size)
    power = _layers(scene)
    _add_below_bruch(power, scene)
    _paint_vessels(power, scene)
    lesions = _paint_lesions(power, scene)
    volume = volume_of(eye, scanner, _expose(power, scene, rng), scene.spacing_mm)
    surfaces = (scene.edges - 0.5).astype(np.float32)  # from pixel edges to pixel centres
    return volume, truth_of(eye, scanner, SURFACES, surfaces, lesions, scene.spacing_mm)


def volume_of(eye: Eye, scanner: Scanner, voxels: np.ndarray, spacing_mm: Spacing3) -> Volume:
    """The Volume of a rendered scan, uint8 [D, H, W]."""
    return Volume(
        voxels=voxels,
        spacing_mm=spacing_mm,
        laterality=eye.laterality,
        scanner=scanner.name,
        protocol=scanner.protocol,
        participant=eye.participant,
        superior_first=scanner.superior_first,
        source=f"phantom {eye.participant} {eye.laterality} {scanner.name}",
    )


def truth_of(
    eye: Eye,
    scanner: Scanner,
    surface_names: tuple[str, ...],
    surfaces: np.ndarray,
    lesions: np.ndarray,
    spacing_mm: Spacing3,
) -> GroundTruth:
    """The truth of a rendered scan: surfaces float32 [S, D, W] and lesions uint8 [D, H, W]."""
    return GroundTruth(
        participant=eye.participant,
        laterality=eye.laterality,
        scanner=scanner.name,
        diagnosis=eye.diagnosis,
        severity=eye.severity,
        age=eye.age,
        cst_um=central_subfield_um(eye),
        surface_names=surface_names,
        surfaces=surfaces,
        lesions=lesions,
        spacing_mm=spacing_mm,
    )


def _place(eye: Eye, scanner: Scanner, acquisition: Acquisition, size: Shape3) -> _Scene:
    x_mm, y_mm = en_face_positions(eye, scanner, acquisition, size)
    depth_um = surfaces_um(eye, x_mm, y_mm)
    depth_um += _placement_um(depth_um, acquisition, scanner, x_mm, y_mm)[None]
    half_um, shade = vessel_profile(eye.vessels, x_mm, y_mm)
    return _Scene(eye, scanner, acquisition, size, scanner.spacing_mm(size), x_mm, y_mm, depth_um, half_um, shade)


def en_face_positions(
    eye: Eye, scanner: Scanner, acquisition: Acquisition, size: Shape3
) -> tuple[np.ndarray, np.ndarray]:
    """Anatomical position (nasal, superior) of every A-scan in mm, two arrays [D, W].

    The optic disc is nasal: right of the fovea in the image of a right eye, left of it in that of a left eye.
    """
    frames, _, columns = size
    dz, _, dx = scanner.spacing_mm(size)
    y = (np.arange(frames) - (frames - 1) / 2) * dz * (-1 if scanner.superior_first else 1)
    x = (np.arange(columns) - (columns - 1) / 2) * dx
    x = x[None, :] - acquisition.fixation_mm[0] + acquisition.lateral_motion_mm[:, :1]
    y = y[:, None] - acquisition.fixation_mm[1] + acquisition.lateral_motion_mm[:, 1:]
    c, s = np.cos(acquisition.torsion_rad), np.sin(acquisition.torsion_rad)
    x, y = c * x - s * y, s * x + c * y
    return (x if eye.laterality == "R" else -x), y


def _placement_um(
    depth_um: np.ndarray, acquisition: Acquisition, scanner: Scanner, x_mm: np.ndarray, y_mm: np.ndarray
) -> np.ndarray:
    """Depth in µm, [D, W], that position in the frame, tilt and eye motion add to every surface."""
    frame_um = 1000 * scanner.field_mm[1]
    tilt = acquisition.tilt[0] * x_mm + acquisition.tilt[1] * y_mm + acquisition.axial_motion_um[:, None]
    top = float((depth_um[SURFACE["ilm"]] + tilt).min())
    bottom = float((depth_um[SURFACE["bm"]] + tilt).max())
    start = acquisition.position * frame_um
    # The operator keeps the retina inside the frame: 160 µm are left below BM, and, with priority, 60 µm above the ILM.
    start = min(start, frame_um - 160 - bottom)
    start = max(start, 60 - top)
    return tilt + start


def decibels(level: float | np.ndarray) -> np.ndarray:
    """Power ratio of a level in decibels."""
    return np.power(10.0, np.asarray(level) / 10)


class Steps:
    """Piecewise constant A-scans [D, H, W] built from steps at fractional rows.

    A layer is a step up at its upper edge and a step down at its lower one, so a volume costs one cumulative sum,
    however many layers it has. A step at row e changes row floor(e) by the fraction of that row below e (antialiasing).
    """

    def __init__(self, frames: int, height: int, columns: int):
        self.height = height
        self.steps = np.zeros((frames, height + 2, columns), np.float32)
        self.d, self.w = (axis.astype(np.int64) for axis in np.ogrid[:frames, :columns])

    def add(
        self, edges: np.ndarray, step: np.ndarray | float, d: np.ndarray | None = None, w: np.ndarray | None = None
    ) -> None:
        """Add `step` to all rows from `edges` on, in all A-scans or in those at (d, w), each at most once per call."""
        d, w = self.d if d is None else d, self.w if w is None else w
        edges = np.clip(edges, 0, self.height)
        row = edges.astype(np.int64)
        fraction = edges - row
        self.steps[d, row, w] += step * (1 - fraction)
        self.steps[d, row + 1, w] += step * fraction

    def total(self) -> np.ndarray:
        # Row by row, all A-scans at once: np.cumsum would walk down one A-scan after the other, missing the cache.
        for row in range(1, self.height):
            self.steps[:, row] += self.steps[:, row - 1]
        return self.steps[:, : self.height]


def _layers(scene: _Scene) -> np.ndarray:
    """Mean backscattered power of vitreous and retina, float32 [D, H, W]."""
    eye, edges, shade, x_mm, y_mm = scene.eye, scene.edges, scene.shade, scene.x_mm, scene.y_mm
    rows_per_um = scene.rows_per_um
    steps = Steps(*scene.size)
    above = np.full(x_mm.shape, decibels(VITREOUS_DB))
    steps.add(np.zeros(x_mm.shape), above)
    thickness = np.diff(edges, axis=0) / rows_per_um
    for name in LAYERS[: LAYER["choroid"]]:
        index = LAYER[name]
        level = np.broadcast_to(decibels(LAYER_DB[name]), x_mm.shape)
        texture = eye.anatomy.texture.get(name)
        if texture is not None:
            level = level * decibels(0.7 * texture(1.7 * x_mm + 5, 1.7 * y_mm))
        if name == "nfl":
            # Thick bundles reflect most; where the layer is thin it is only a faint line.
            level = level * (0.35 + 0.65 * np.clip(thickness[index] / 22, 0, 1))
        if name in ("ellipsoid", "outer_segment"):
            level = level * np.exp(-thickness[LAYER["drusen"]] / 70)
        if index > LAYER["gcl"]:
            level = level * shade
        steps.add(edges[index], level - above)
        above = level
    steps.add(edges[SURFACE["bm"]], -above)
    elm = decibels(ELM_DB) * shade * np.clip(thickness[LAYER["myoid"]] / 10, 0, 1)
    steps.add(edges[SURFACE["elm"]] - 3 * rows_per_um, elm)
    steps.add(edges[SURFACE["elm"]] + 3 * rows_per_um, -elm)
    if eye.anatomy.hyaloid_um > 0:
        # A partly detached hyaloid is still attached at fovea and disc: the line leaves the ILM around them.
        off_fovea, off_disc = x_mm**2 + y_mm**2, (x_mm - DISC_MM[0]) ** 2 + (y_mm - DISC_MM[1]) ** 2
        free = (1 - np.exp(-off_fovea / 2.2**2)) * (1 - np.exp(-off_disc / 1.4**2))
        lift = eye.anatomy.hyaloid_um * free + 4 * eye.anatomy.texture["bm"](x_mm, y_mm)
        line = edges[SURFACE["ilm"]] - np.maximum(lift, 0) * rows_per_um
        seen = decibels(HYALOID_DB) * np.clip(lift / 25 - 0.5, 0, 1)
        steps.add(line - 8 * rows_per_um, seen)
        steps.add(line, -seen)
    return steps.total()


def _add_below_bruch(power: np.ndarray, scene: _Scene) -> None:
    """Add choriocapillaris, choroid (dark vessel lumina in bright stroma) and sclera, all fading with depth."""
    eye, scanner, x_mm, y_mm, dy_mm = scene.eye, scene.scanner, scene.x_mm, scene.y_mm, scene.spacing_mm[1]
    bm, csi = scene.edges[SURFACE["bm"]], scene.edges[SURFACE["csi"]]
    first = int(np.clip(np.floor(bm.min()), 0, power.shape[1] - 1))
    rows = np.arange(first, power.shape[1])
    z = (rows + 0.5) * dy_mm
    # cos(a(d, w) + k z(h)) = cos a cos kz - sin a sin kz, so the 3-D texture is one matrix product per B-scan. The
    # factors are rounded to 1/256: sums of such products are exact in float32, so every BLAS gives the same bytes.
    plane, kz = eye.choroid_texture
    waves = zip(plane.k_per_mm, plane.phase, kz, strict=True)
    phase = np.stack([kx * x_mm + ky * y_mm + p - k * dy_mm * bm for (kx, ky), p, k in waves], axis=1)
    along = np.concatenate([np.cos(np.outer(z, kz)), -np.sin(np.outer(z, kz))], axis=1)
    across = np.concatenate([np.cos(phase), np.sin(phase)], axis=1)
    along, across = ((np.round(factor * 256) / 256).astype(np.float32) for factor in (along, across))
    # exp(-(z - bm) / decay) as the product of an axial and an en-face factor; measuring both from the mean depth of BM
    # keeps them within float32.
    middle = float(bm.mean()) * dy_mm
    fading = np.exp(-np.clip(z - middle, -1.5, 3) / scanner.choroid_decay_mm).astype(np.float32)[:, None]
    window = decibels(HYPERTRANSMISSION_DB * atrophy(eye.lesions, x_mm, y_mm))
    light = (scene.shade * window * np.exp((bm * dy_mm - middle) / scanner.choroid_decay_mm)).astype(np.float32)
    for d, below in enumerate(power[:, first:]):  # one B-scan at a time fits into the processor's cache
        tissue = along @ across[d]
        tissue *= np.float32(0.42 * np.sqrt(2 / len(kz)))
        tissue += np.float32(0.62)
        np.clip(tissue, 0.18, 1.1, out=tissue)
        tissue *= np.float32(decibels(CHOROID_DB))
        # The first 20 µm below Bruch's membrane are the even choriocapillaris; below the choroid lies the even sclera.
        choriocapillaris = 1 - _share_below(bm[d] + 0.02 / dy_mm, rows)
        sclera = _share_below(csi[d], rows)
        for share, level in ((choriocapillaris, CHORIOCAPILLARIS_DB), (sclera, SCLERA_DB)):
            tissue += share * (np.float32(decibels(level)) - tissue)
        tissue *= _share_below(bm[d], rows)
        tissue *= fading
        tissue *= light[d]
        below += tissue


def _share_below(edge: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Share of each pixel of a B-scan, [len(rows), W], that lies below `edge` [W]."""
    share = (rows + 1).astype(np.float32)[:, None] - edge.astype(np.float32)
    return np.clip(share, 0, 1, out=share)


def _paint_vessels(power: np.ndarray, scene: _Scene) -> None:
    """Paint vessels in the nerve fibre and ganglion cell layers: a bright anterior wall over a darker lumen."""
    d, w = np.nonzero(scene.half_um > 4)
    if len(d) == 0:
        return
    dy_mm = scene.spacing_mm[1]
    half = scene.half_um[d, w]
    centre = scene.depth_um[SURFACE["ilm"], d, w] + np.maximum(0.9 * half, 12)
    height = power.shape[1]
    rows = np.arange(int(np.ceil(2 * half.max() / (1000 * dy_mm))) + 1)
    row = np.floor((centre - half) / (1000 * dy_mm)).astype(np.int64)[:, None] + rows
    position = ((row + 0.5) * 1000 * dy_mm - centre[:, None]) / half[:, None]
    inside = (np.abs(position) <= 1) & (row >= 0) & (row < height)
    k, _ = np.nonzero(inside)
    at = row[inside]
    level = decibels(np.where(position[inside] < 0.1, -3.5, -9.0))
    power[d[k], at, w[k]] = level


def _paint_lesions(power: np.ndarray, scene: _Scene) -> np.ndarray:
    """Paint what is not a layer (cysts, foci, membrane, operculum); return the lesion mask uint8 [D, H, W].

    The other lesions are in `power` already, as layers that they thicken, thin or add.
    """
    eye, edges, x_mm, y_mm, rows_per_um = scene.eye, scene.edges, scene.x_mm, scene.y_mm, scene.rows_per_um
    lesions = np.zeros(power.shape, np.uint8)
    if len(eye.lesions.cysts):
        steps = Steps(*scene.size)
        for d, w, top, bottom in cyst_spans(eye.lesions, scene.depth_um, x_mm, y_mm):
            steps.add(top * rows_per_um, 1.0, d, w)
            steps.add(bottom * rows_per_um, -1.0, d, w)
        fluid = np.minimum(steps.total(), 1)  # cysts overlap
        power += fluid * (np.float32(decibels(FLUID_DB)) - power)
        lesions[fluid > 0.5] = LESIONS["intraretinal_fluid"]
    for name in ("subretinal_fluid", "drusen"):
        top, bottom = edges[LAYER[name]], edges[LAYER[name] + 1]
        _fill(lesions, top, bottom, bottom - top > 0.5, LESIONS[name], least=0)
    for x, y, radius, position in eye.lesions.foci:
        d, w = np.nonzero((x_mm - x) ** 2 + (y_mm - y) ** 2 < radius**2)
        inner, outer = edges[SURFACE["ipl_inl"], d, w], edges[SURFACE["elm"], d, w]
        row = (inner + position * (outer - inner)).astype(np.int64)
        for offset in range(max(1, round(1000 * radius * rows_per_um))):
            inside = (row + offset >= 0) & (row + offset < power.shape[1])
            power[d[inside], row[inside] + offset, w[inside]] = decibels(-2.0)
    atrophic = atrophy(eye.lesions, x_mm, y_mm) > 0.5
    _fill(lesions, edges[SURFACE["opl_onl"]], edges[SURFACE["bm"]], atrophic, LESIONS["atrophy"])
    _paint_membrane(power, lesions, scene)
    _paint_hole(power, lesions, scene)
    return lesions


def _fill(
    lesions: np.ndarray, top: np.ndarray, bottom: np.ndarray, where: np.ndarray, value: int, least: int = 1
) -> None:
    """Mark the voxels whose centre lies between two surfaces [D, W], `least` or more in every A-scan of `where`."""
    height = lesions.shape[1]
    first = np.clip(np.rint(top), 0, height - least)
    past = np.maximum(np.rint(bottom), first + least)
    rows = np.arange(height)[:, None]
    for d in np.flatnonzero(where.any(axis=1)):
        lesions[d][where[d] & (rows >= first[d]) & (rows < past[d])] = value


def blend(
    power: np.ndarray,
    where: tuple[np.ndarray, np.ndarray],
    top: np.ndarray,
    bottom: np.ndarray,
    level: float,
    share: float = 1,
) -> tuple:
    """Mix a level into A-scans (d, w) between fractional rows, antialiased; returns voxels filled by over a half."""
    d, w = where
    filled = []
    first = np.floor(top).astype(np.int64)
    for offset in range(int(np.ceil((bottom - top).max(initial=0))) + 1 if len(d) else 0):
        row = first + offset
        covered = np.clip(np.minimum(bottom, row + 1) - np.maximum(top, row), 0, 1)
        inside = (covered > 0) & (row >= 0) & (row < power.shape[1])
        at = d[inside], row[inside], w[inside]
        power[at] += share * covered[inside] * (level - power[at])
        most = covered[inside] > 0.5
        filled.append(np.stack(at)[:, most])
    return tuple(np.concatenate(filled, axis=1)) if filled else (np.zeros(0, np.int64),) * 3


def _paint_membrane(power: np.ndarray, lesions: np.ndarray, scene: _Scene) -> None:
    """Paint an epiretinal membrane: a bright line on the folds of the ILM, dark pockets under it in the troughs."""
    thickness, gap = membrane_um(scene.eye.lesions, scene.x_mm, scene.y_mm)
    bottom = scene.edges[SURFACE["ilm"]] - gap * scene.rows_per_um
    top = bottom - thickness * scene.rows_per_um
    d, w = np.nonzero(thickness > 0)
    blend(power, (d, w), top[d, w], bottom[d, w], float(decibels(MEMBRANE_DB)))
    _fill(lesions, top, bottom, thickness > 0, LESIONS["membrane"])


def _paint_hole(power: np.ndarray, lesions: np.ndarray, scene: _Scene) -> None:
    """Mark the gap of a macular hole from the height of its rims down, and paint the operculum floating above it."""
    eye, edges, x_mm, y_mm, rows_per_um = scene.eye, scene.edges, scene.x_mm, scene.y_mm, scene.rows_per_um
    if eye.lesions.roof:  # stage 1: not open towards the vitreous
        return
    for x, y, gap, _ in eye.lesions.hole:
        angle = np.arange(16) / 16 * 2 * np.pi
        rim = surfaces_um(eye, x + (gap + 0.2) * np.cos(angle), y + (gap + 0.2) * np.sin(angle))
        rim_rows = float((rim[SURFACE["bm"]] - rim[SURFACE["ilm"]]).mean()) * rows_per_um
        r = np.hypot(x_mm - x, y_mm - y)
        top, floor = edges[SURFACE["bm"]] - rim_rows, edges[SURFACE["ilm"]]
        _fill(lesions, top, floor, r < gap, LESIONS["hole"])
        if eye.lesions.operculum:
            inside = 1 - (r / (0.6 * gap + 0.04)) ** 2
            half = 22 * rows_per_um * np.sqrt(np.clip(inside, 0, 1))
            middle = top - 140 * rows_per_um
            d, w = np.nonzero(inside > 0)
            upper, lower = (middle - half)[d, w], (middle + half)[d, w]
            blend(power, (d, w), upper, lower, float(decibels(OPERCULUM_DB)))


def _expose(power: np.ndarray, scene: _Scene, rng: np.random.Generator) -> np.ndarray:
    """The image that the instrument makes of this backscattered power: uint8 [D, H, W]. `power` is overwritten."""
    scanner, acquisition, (_, dy, dx) = scene.scanner, scene.acquisition, scene.spacing_mm
    z_mm = (np.arange(power.shape[1]) + 0.5) * dy
    vignetting_db = acquisition.vignetting_db * acquisition.vignetting(scene.x_mm, scene.y_mm)
    per_ascan = acquisition.signal_db[:, None] + vignetting_db
    power *= decibels(-scanner.roll_off_db_per_mm * z_mm).astype(np.float32)[None, :, None]
    power *= decibels(per_ascan).astype(np.float32)[:, None, :]
    axial = scanner.axial_psf_um / FWHM / (1000 * dy)
    lateral = scanner.lateral_psf_um * acquisition.defocus / FWHM / (1000 * dx)
    power = blur(power, (axial, lateral))
    # The point-spread function is that of intensity; the complex field, whose square it is, is wider by √2.
    looks = scanner.looks(power.shape)
    power *= speckle(rng, power.shape, (axial * 2**0.5, lateral * 2**0.5), looks)
    noise = detector_noise(rng, power.shape, looks)
    noise *= np.float32(decibels(acquisition.noise_db))
    power += noise
    return log_display(power, acquisition.black_db, acquisition.range_db, scanner.gamma)
