"""An eye, a scanner and an acquisition become a Volume with its ground truth."""

from dataclasses import dataclass

import numpy as np

from octfm.phantom.anatomy import DISC_MM, LAYER, LAYERS, SURFACE, SURFACES
from octfm.phantom.deformation import atrophy, cyst_spans, membrane_um
from octfm.phantom.eye import Eye, central_subfield_um, surfaces_um
from octfm.phantom.optics import blur, detector_noise, log_display, speckle
from octfm.phantom.pathology import LESIONS
from octfm.phantom.scanner import Acquisition, Scanner, acquire
from octfm.phantom.vessels import vessel_profile
from octfm.volume.volume import Shape3, Spacing3, Volume

# Backscatter in dB relative to the RPE, after the order of brightness in log displays: RPE and ellipsoid zone, NFL, plexiform
# layers, ganglion cells, nuclear layers; fluid and vitreous below the detector noise.
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
"""More light below Bruch's membrane where the RPE is gone."""
FWHM = 2.3548


@dataclass(frozen=True, eq=False)
class GroundTruth:
    """What is known because we made it. Rows count pixel centres of the volume's own frame; they may leave it."""

    participant: str
    laterality: str
    scanner: str
    diagnosis: str
    severity: float
    age: float
    cst_um: float
    surface_names: tuple[str, ...]
    surfaces: np.ndarray
    """float32 [S, D, W]: row of each named surface."""
    lesions: np.ndarray
    """uint8 [D, H, W]: 0 or a value of pathology.LESIONS."""
    spacing_mm: Spacing3

    def surface(self, name: str) -> np.ndarray:
        """float32 [D, W]: rows of one surface."""
        return self.surfaces[self.surface_names.index(name)]


def render(eye: Eye, scanner: Scanner, rng: np.random.Generator, size: Shape3) -> tuple[Volume, GroundTruth]:
    """One acquisition of this eye. Axes [D, H, W], vitreous at row 0."""
    frames, height, _ = size
    spacing = scanner.spacing_mm(size)
    acquisition = acquire(rng, scanner, frames)
    x_mm, y_mm = en_face_positions(eye, scanner, acquisition, size)
    depth_um = surfaces_um(eye, x_mm, y_mm)
    depth_um += _placement_um(depth_um, acquisition, scanner, size, x_mm, y_mm)[None]
    edges = depth_um / (1000 * spacing[1])

    half_um, shade = vessel_profile(eye.vessels, x_mm, y_mm)
    power = _layers(eye, edges, shade, acquisition, x_mm, y_mm, spacing, height)
    _add_below_bruch(power, eye, scanner, edges, shade, x_mm, y_mm, spacing[1])
    _paint_vessels(power, depth_um, half_um, spacing[1])
    lesions = _paint_lesions(power, eye, depth_um, edges, x_mm, y_mm, spacing)

    voxels = _expose(power, scanner, acquisition, rng, spacing, x_mm, y_mm)
    volume = Volume(
        voxels=voxels,
        spacing_mm=spacing,
        laterality=eye.laterality,
        scanner=scanner.name,
        protocol=scanner.protocol,
        participant=eye.participant,
        superior_first=scanner.superior_first,
        source=f"phantom {eye.participant} {eye.laterality} {scanner.name}",
    )
    truth = GroundTruth(
        participant=eye.participant,
        laterality=eye.laterality,
        scanner=scanner.name,
        diagnosis=eye.diagnosis,
        severity=eye.severity,
        age=eye.age,
        cst_um=central_subfield_um(eye),
        surface_names=SURFACES,
        surfaces=(edges - 0.5).astype(np.float32),
        lesions=lesions,
        spacing_mm=spacing,
    )
    return volume, truth


def en_face_positions(
    eye: Eye, scanner: Scanner, acquisition: Acquisition, size: Shape3
) -> tuple[np.ndarray, np.ndarray]:
    """[D, W] each: anatomical position (nasal, superior) in mm of every A-scan.

    The disc is nasal: to the right of the fovea in a right eye's image, to the left in a left eye's.
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
    depth_um: np.ndarray, acquisition: Acquisition, scanner: Scanner, size: Shape3, x_mm: np.ndarray, y_mm: np.ndarray
) -> np.ndarray:
    """[D, W]: what position, tilt and motion add to every depth; the operator keeps the retina inside the frame."""
    frame_um = 1000 * scanner.field_mm[1]
    tilt = acquisition.tilt[0] * x_mm + acquisition.tilt[1] * y_mm + acquisition.axial_motion_um[:, None]
    top = float((depth_um[SURFACE["ilm"]] + tilt).min())
    bottom = float((depth_um[SURFACE["bm"]] + tilt).max())
    start = acquisition.position * frame_um
    start = min(start, frame_um - 160 - bottom)
    start = max(start, 60 - top)
    return tilt + start


def _db(level: float | np.ndarray) -> np.ndarray:
    """Power ratio of a level in decibels."""
    return np.power(10.0, np.asarray(level) / 10)


class _Steps:
    """Sums of steps along the axial axis, antialiased: what starts at depth e fills row floor(e) by the remaining fraction.

    Every layer, span or line is two steps, so a volume costs one cumulative sum however much is in it.
    """

    def __init__(self, frames: int, height: int, columns: int):
        self.height = height
        self.steps = np.zeros((frames, height + 2, columns), np.float32)
        self.d, self.w = (axis.astype(np.int64) for axis in np.ogrid[:frames, :columns])

    def add(
        self, edges: np.ndarray, step: np.ndarray | float, d: np.ndarray | None = None, w: np.ndarray | None = None
    ) -> None:
        """Add `step` to all rows from `edges` on; each A-scan (d, w) at most once per call."""
        d, w = self.d if d is None else d, self.w if w is None else w
        edges = np.clip(edges, 0, self.height)
        row = edges.astype(np.int64)
        fraction = edges - row
        self.steps[d, row, w] += step * (1 - fraction)
        self.steps[d, row + 1, w] += step * fraction

    def total(self) -> np.ndarray:
        # Row by row, all A-scans at once: np.cumsum would walk down one A-scan after the other.
        for row in range(1, self.height):
            self.steps[:, row] += self.steps[:, row - 1]
        return self.steps[:, : self.height]


def _layers(
    eye: Eye,
    edges: np.ndarray,
    shade: np.ndarray,
    acquisition: Acquisition,
    x_mm: np.ndarray,
    y_mm: np.ndarray,
    spacing: Spacing3,
    height: int,
) -> np.ndarray:
    """Mean backscatter of vitreous and retina, float32 [D, H, W]."""
    rows_per_um = 1 / (1000 * spacing[1])
    steps = _Steps(edges.shape[1], height, edges.shape[2])
    above = np.full(x_mm.shape, _db(VITREOUS_DB))
    steps.add(np.zeros(x_mm.shape), above)
    thickness = np.diff(edges, axis=0) / rows_per_um
    for name in LAYERS[: LAYER["choroid"]]:
        index = LAYER[name]
        level = np.broadcast_to(_db(LAYER_DB[name]), x_mm.shape)
        texture = eye.anatomy.texture.get(name)
        if texture is not None:
            level = level * _db(0.7 * texture(1.7 * x_mm + 5, 1.7 * y_mm))
        if name == "nfl":
            # Fibres reflect most where the bundle is thick and faces the beam; a thin layer is a faint line.
            level = level * (0.35 + 0.65 * np.clip(thickness[index] / 22, 0, 1))
        if name in ("ellipsoid", "outer_segment"):
            level = level * np.exp(-thickness[LAYER["drusen"]] / 70)
        if index > LAYER["gcl"]:
            level = level * shade
        steps.add(edges[index], level - above)
        above = level
    steps.add(edges[SURFACE["bm"]], -above)
    elm = _db(ELM_DB) * shade * np.clip(thickness[LAYER["myoid"]] / 10, 0, 1)
    steps.add(edges[SURFACE["elm"]] - 3 * rows_per_um, elm)
    steps.add(edges[SURFACE["elm"]] + 3 * rows_per_um, -elm)
    if eye.anatomy.hyaloid_um > 0:
        # Still attached at fovea and disc, so the line rises from the ILM around them.
        off_fovea, off_disc = x_mm**2 + y_mm**2, (x_mm - DISC_MM[0]) ** 2 + (y_mm - DISC_MM[1]) ** 2
        free = (1 - np.exp(-off_fovea / 2.2**2)) * (1 - np.exp(-off_disc / 1.4**2))
        lift = eye.anatomy.hyaloid_um * free + 4 * eye.anatomy.texture["bm"](x_mm, y_mm)
        line = edges[SURFACE["ilm"]] - np.maximum(lift, 0) * rows_per_um
        seen = _db(HYALOID_DB) * np.clip(lift / 25 - 0.5, 0, 1)
        steps.add(line - 8 * rows_per_um, seen)
        steps.add(line, -seen)
    return steps.total()


def _add_below_bruch(
    power: np.ndarray,
    eye: Eye,
    scanner: Scanner,
    edges: np.ndarray,
    shade: np.ndarray,
    x_mm: np.ndarray,
    y_mm: np.ndarray,
    dy_mm: float,
) -> None:
    """Choriocapillaris, choroid with dark vessel lumina in bright stroma, then sclera, all fading with depth."""
    bm, csi = edges[SURFACE["bm"]], edges[SURFACE["csi"]]
    first = int(np.clip(np.floor(bm.min()), 0, power.shape[1] - 1))
    rows = np.arange(first, power.shape[1])
    z = (rows + 0.5) * dy_mm
    # cos(a(d,w) + k z(h)) splits into two products, so the 3-D texture is one matrix product per B-scan. The factors are
    # rounded to 1/256: sums of such products are exact in float32, in whatever order a BLAS adds them.
    plane, kz = eye.choroid_texture
    waves = zip(plane.k_per_mm, plane.phase, kz, strict=True)
    phase = np.stack([kx * x_mm + ky * y_mm + p - k * dy_mm * bm for (kx, ky), p, k in waves], axis=1)
    along = np.concatenate([np.cos(np.outer(z, kz)), -np.sin(np.outer(z, kz))], axis=1)
    across = np.concatenate([np.cos(phase), np.sin(phase)], axis=1)
    along, across = ((np.round(factor * 256) / 256).astype(np.float32) for factor in (along, across))
    # exp(-(z - bm) / decay) as a product of a row and an en-face factor, both small enough for float32.
    middle = float(bm.mean()) * dy_mm
    fading = np.exp(-np.clip(z - middle, -1.5, 3) / scanner.choroid_decay_mm).astype(np.float32)[:, None]
    window = _db(HYPERTRANSMISSION_DB * atrophy(eye.lesions, x_mm, y_mm))
    light = (shade * window * np.exp((bm * dy_mm - middle) / scanner.choroid_decay_mm)).astype(np.float32)
    for d, below in enumerate(power[:, first:]):  # B-scan by B-scan: one stays in the processor's cache
        tissue = along @ across[d]
        tissue *= np.float32(0.42 * np.sqrt(2 / len(kz)))
        tissue += np.float32(0.62)
        np.clip(tissue, 0.18, 1.1, out=tissue)
        tissue *= np.float32(_db(CHOROID_DB))
        # The choroid's texture gives way to an even bright sheet below Bruch's membrane and to the sclera behind.
        for edge, level, sense in ((bm[d] + 0.02 / dy_mm, CHORIOCAPILLARIS_DB, -1), (csi[d], SCLERA_DB, 1)):
            share = _share_below(edge, rows)
            if sense < 0:
                share = 1 - share
            tissue += share * (np.float32(_db(level)) - tissue)
        tissue *= _share_below(bm[d], rows)
        tissue *= fading
        tissue *= light[d]
        below += tissue


def _share_below(edge: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """[len(rows), W]: share of each pixel of a B-scan that lies below `edge`."""
    share = (rows + 1).astype(np.float32)[:, None] - edge.astype(np.float32)
    return np.clip(share, 0, 1, out=share)


def _paint_vessels(power: np.ndarray, depth_um: np.ndarray, half_um: np.ndarray, dy_mm: float) -> None:
    """Lumina in the nerve fibre and ganglion cell layers: a bright anterior wall over a darker body."""
    d, w = np.nonzero(half_um > 4)
    if len(d) == 0:
        return
    half = half_um[d, w]
    centre = depth_um[SURFACE["ilm"], d, w] + np.maximum(0.9 * half, 12)
    height = power.shape[1]
    rows = np.arange(int(np.ceil(2 * half.max() / (1000 * dy_mm))) + 1)
    row = np.floor((centre - half) / (1000 * dy_mm)).astype(np.int64)[:, None] + rows
    position = ((row + 0.5) * 1000 * dy_mm - centre[:, None]) / half[:, None]
    inside = (np.abs(position) <= 1) & (row >= 0) & (row < height)
    k, _ = np.nonzero(inside)
    at = row[inside]
    level = _db(np.where(position[inside] < 0.1, -3.5, -9.0))
    power[d[k], at, w[k]] = level


def _paint_lesions(
    power: np.ndarray,
    eye: Eye,
    depth_um: np.ndarray,
    edges: np.ndarray,
    x_mm: np.ndarray,
    y_mm: np.ndarray,
    spacing: Spacing3,
) -> np.ndarray:
    """Cysts and hyperreflective foci into `power`; returns the lesion mask uint8 [D, H, W]."""
    frames, height, columns = power.shape
    lesions = np.zeros(power.shape, np.uint8)
    rows_per_um = 1 / (1000 * spacing[1])
    if len(eye.lesions.cysts):
        steps = _Steps(frames, height, columns)
        for d, w, top, bottom in cyst_spans(eye.lesions, depth_um, x_mm, y_mm):
            steps.add(top * rows_per_um, 1.0, d, w)
            steps.add(bottom * rows_per_um, -1.0, d, w)
        fluid = np.minimum(steps.total(), 1)
        power += fluid * (np.float32(_db(FLUID_DB)) - power)
        lesions[fluid > 0.5] = LESIONS["intraretinal_fluid"]
    for layer, lesion in (("subretinal_fluid", "subretinal_fluid"), ("drusen", "drusen")):
        top, bottom = edges[LAYER[layer]], edges[LAYER[layer] + 1]
        for d, w in zip(*np.nonzero(bottom - top > 0.5), strict=True):
            lesions[d, max(round(float(top[d, w])), 0) : max(round(float(bottom[d, w])), 0), w] = LESIONS[lesion]
    for x, y, radius, position in eye.lesions.foci:
        d, w = np.nonzero((x_mm - x) ** 2 + (y_mm - y) ** 2 < radius**2)
        inner, outer = edges[SURFACE["ipl_inl"], d, w], edges[SURFACE["elm"], d, w]
        row = (inner + position * (outer - inner)).astype(np.int64)
        for offset in range(max(1, round(1000 * radius * rows_per_um))):
            inside = (row + offset >= 0) & (row + offset < height)
            power[d[inside], row[inside] + offset, w[inside]] = _db(-2.0)
    atrophic = atrophy(eye.lesions, x_mm, y_mm) > 0.5
    _fill(lesions, edges[SURFACE["opl_onl"]], edges[SURFACE["bm"]], atrophic, LESIONS["atrophy"])
    _paint_membrane(power, lesions, eye, edges, x_mm, y_mm, rows_per_um)
    _paint_hole(power, lesions, eye, edges, x_mm, y_mm, rows_per_um)
    return lesions


def _fill(lesions: np.ndarray, top: np.ndarray, bottom: np.ndarray, where: np.ndarray, value: int) -> None:
    """Mark the voxels whose centre lies between two surfaces [D, W], at least one per A-scan."""
    height = lesions.shape[1]
    for d, w in zip(*np.nonzero(where), strict=True):
        first = min(max(round(float(top[d, w])), 0), height - 1)
        lesions[d, first : max(round(float(bottom[d, w])), first + 1), w] = value


def _blend(power: np.ndarray, top: np.ndarray, bottom: np.ndarray, where: np.ndarray, level: float) -> None:
    """Antialiased tissue of one level between two surfaces [D, W], over what was there."""
    d, w = np.nonzero(where)
    if len(d) == 0:
        return
    top, bottom = top[d, w], bottom[d, w]
    first = np.floor(top).astype(np.int64)
    for offset in range(int(np.ceil((bottom - top).max())) + 1):
        row = first + offset
        share = np.clip(np.minimum(bottom, row + 1) - np.maximum(top, row), 0, 1)
        inside = (share > 0) & (row >= 0) & (row < power.shape[1])
        at = d[inside], row[inside], w[inside]
        power[at] += share[inside] * (level - power[at])


def _paint_membrane(
    power: np.ndarray,
    lesions: np.ndarray,
    eye: Eye,
    edges: np.ndarray,
    x_mm: np.ndarray,
    y_mm: np.ndarray,
    rows_per_um: float,
) -> None:
    """A bright line on the folds of the ILM, with dark pockets under it in the troughs."""
    thickness, gap = membrane_um(eye.lesions, x_mm, y_mm)
    bottom = edges[SURFACE["ilm"]] - gap * rows_per_um
    top = bottom - thickness * rows_per_um
    _blend(power, top, bottom, thickness > 0, float(_db(MEMBRANE_DB)))
    _fill(lesions, top, bottom, thickness > 0, LESIONS["membrane"])


def _paint_hole(
    power: np.ndarray,
    lesions: np.ndarray,
    eye: Eye,
    edges: np.ndarray,
    x_mm: np.ndarray,
    y_mm: np.ndarray,
    rows_per_um: float,
) -> None:
    """The gap belongs to the mask from the height of its rims down; a torn-off roof floats above it."""
    if eye.lesions.roof:
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
            _blend(power, middle - half, middle + half, inside > 0, float(_db(OPERCULUM_DB)))


def _expose(
    power: np.ndarray,
    scanner: Scanner,
    acquisition: Acquisition,
    rng: np.random.Generator,
    spacing: Spacing3,
    x_mm: np.ndarray,
    y_mm: np.ndarray,
) -> np.ndarray:
    """Signal strength, roll-off, point spread, speckle, noise and display: uint8 [D, H, W]."""
    _, dy, dx = spacing
    z_mm = (np.arange(power.shape[1]) + 0.5) * dy
    per_ascan = acquisition.signal_db[:, None] + acquisition.vignetting_db * acquisition.vignetting(x_mm, y_mm)
    power *= _db(-scanner.roll_off_db_per_mm * z_mm).astype(np.float32)[None, :, None]
    power *= _db(per_ascan).astype(np.float32)[:, None, :]
    axial = scanner.axial_psf_um / FWHM / (1000 * dy)
    lateral = scanner.lateral_psf_um * acquisition.defocus / FWHM / (1000 * dx)
    power = blur(power, (axial, lateral))
    # The field is wider than its intensity by √2.
    looks = scanner.looks(power.shape)
    power *= speckle(rng, power.shape, (axial * 2**0.5, lateral * 2**0.5), looks)
    noise = detector_noise(rng, power.shape, looks)
    noise *= np.float32(_db(acquisition.noise_db))
    power += noise
    return log_display(power, acquisition.black_db, acquisition.range_db, scanner.gamma)
