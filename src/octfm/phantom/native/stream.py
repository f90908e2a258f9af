"""An endless sequence of labelled phantom images without files: place in the sequence → image and truth.

Each is a pure function of (seed, place), so training resumes exactly and any number of ranks can share the sequence.
"""

from dataclasses import dataclass, fields, replace

import numpy as np

from octfm.phantom.anatomy import LAYER
from octfm.phantom.eye import Eye, sample_eye
from octfm.phantom.native.bscans import Labelled, Shot, render_native, sample_placement, single_bscan
from octfm.phantom.native.look import WIDE, sample_look
from octfm.phantom.native.outer_retina import OuterLesions, sample_outer_lesions
from octfm.phantom.pathology import DIAGNOSES, Lesions
from octfm.phantom.scanner import DEFAULT_SCANNERS, SCANNERS, Scanner, acquire
from octfm.volume.volume import Laterality, Shape3

CONDITIONS = (
    *DIAGNOSES,
    "detachment",
    "neovascular_amd",
    "reticular_drusen",
    "central_serous",
    "vein_occlusion",
    "mixed",
    "traction",
)
"""Conditions of the eyes in the stream, each equally often."""


@dataclass(frozen=True)
class Stream:
    """Single native B-scans, or volumes if `bscans` is more than 1, of phantom version 4."""

    seed: int
    bscans: int = 1
    randomised: float = 0.35
    """Share of images whose look lies far beyond what exists."""
    through_lesions: float = 0.6
    """Share of single B-scans through a lesion, among eyes with lesions."""
    scanners: tuple[str, ...] = DEFAULT_SCANNERS
    conditions: tuple[str, ...] = CONDITIONS
    row_um: float | None = 3.9
    """Axial distance of rows, ± 5 %; None for the instrument's own."""
    ascan_um: tuple[float, float] = (11.5, 24.0)
    """Range of the distance of A-scans."""
    size: Shape3 | None = None
    """Render on this grid [D, H, W] over the instrument's field, whatever `bscans`, `row_um` and `ascan_um` say."""

    def __call__(self, place: int) -> Labelled:
        """The image at this place of the sequence."""
        shot, size, rng = self.shot(place)
        return render_native(shot, rng, size)

    def shot(self, place: int) -> tuple[Shot, Shape3, np.random.Generator]:
        """What the image at this place shows, its size, and the generator that its noise is drawn from."""
        rng = np.random.default_rng([self.seed, 4, place])
        condition = str(rng.choice(self.conditions))
        eye = eye_of_stream(rng, (self.seed, 4, place), condition)
        lesions = sample_outer_lesions(
            rng,
            detached=condition in ("detachment", "central_serous"),
            neovascular=condition == "neovascular_amd" or (condition == "mixed" and rng.random() < 0.4),
            reticular=condition == "reticular_drusen" or rng.random() < 0.1,
        )
        wide = rng.random() < self.randomised
        # A randomised image borrows any geometry, also that of the instrument that is held out of cohorts.
        scanner = SCANNERS[str(rng.choice(tuple(SCANNERS) if wide else self.scanners))]
        count = self.size[0] if self.size else self.bscans
        acquisition = acquire(rng, scanner, count)
        if count == 1:
            scanner, acquisition = single_bscan(scanner, acquisition, float(rng.uniform(-2.8, 2.8)))
            places = _lesion_positions(eye.lesions, lesions)
            # Lesions are small: a B-scan anywhere would miss most of them.
            if len(places) and rng.random() < self.through_lesions:
                fixation = acquisition.fixation_mm[0], -float(rng.choice(places))
                acquisition = replace(acquisition, fixation_mm=fixation)
        if rng.random() < 0.05:  # centred on the disc
            side = 1.0 if eye.laterality == "R" else -1.0
            acquisition = replace(acquisition, fixation_mm=(-4.2 * side, acquisition.fixation_mm[1]))
        look = sample_look(rng, scanner, WIDE if wide else 1.0)
        size = self.size or self._size(rng, scanner)
        return Shot(eye, lesions, scanner, look, acquisition, sample_placement(rng)), size, rng

    def condition(self, place: int) -> str:
        """The condition of the eye at this place, without rendering it."""
        return str(np.random.default_rng([self.seed, 4, place]).choice(self.conditions))

    def _size(self, rng: np.random.Generator, scanner: Scanner) -> Shape3:
        _, axial_mm, lateral_mm = scanner.field_mm
        stretch, ascan_um = rng.uniform(0.95, 1.05), rng.uniform(*self.ascan_um)
        rows = scanner.vendor_size[1] if self.row_um is None else round(1000 * axial_mm / self.row_um * stretch)
        return self.bscans, rows, round(1000 * lateral_mm / ascan_um)


def eye_of_stream(rng: np.random.Generator, seed: tuple[int, ...], condition: str) -> Eye:
    """An eye with one of CONDITIONS; `seed` identifies its participant."""
    laterality: Laterality = "R" if rng.random() < 0.5 else "L"
    age, severity, second = float(rng.uniform(20, 90)), float(rng.uniform(0.05, 1)), str(rng.choice(DIAGNOSES))
    diagnosis = {
        "detachment": "drusen" if rng.random() < 0.6 else "healthy",
        "neovascular_amd": "drusen",
        "reticular_drusen": "drusen" if rng.random() < 0.5 else "healthy",
        "central_serous": "healthy",
        "vein_occlusion": "dme",
        "mixed": "drusen",
        "traction": "healthy",
    }.get(condition, condition)

    def sample(name: str) -> Eye:
        return sample_eye(seed, laterality, participant="stream", age=age, diagnosis=name, severity=severity)

    eye = sample(diagnosis)
    if condition == "central_serous":
        x, y = rng.normal(0, 0.6, 2)
        eye = replace(
            eye,
            lesions=replace(eye.lesions, subretinal=np.array([[x, y, rng.uniform(0.6, 2.2), rng.uniform(60, 350)]])),
        )
    if condition == "mixed":
        eye = replace(eye, lesions=_both(eye.lesions, sample(second).lesions))
    if condition == "traction":
        eye = _under_traction(rng, eye)
    if condition in ("dme", "vein_occlusion") and rng.random() < 0.75:
        eye = replace(eye, lesions=_both(eye.lesions, _cystoid_oedema(rng, eye.lesions)))
    if condition == "vein_occlusion":
        eye = replace(eye, lesions=_one_half(eye.lesions, 1.0 if rng.random() < 0.5 else -1.0))
    return eye


def _under_traction(rng: np.random.Generator, eye: Eye) -> Eye:
    """The vitreous, detached around it, pulls the fovea up by 40 to 250 µm, with cysts below in most eyes."""
    x, y = rng.normal(0, 0.1, 2)
    height, width = rng.uniform(40, 250), rng.uniform(0.15, 0.5)
    count = int(rng.poisson(2.5))
    radius = rng.uniform(0.04, 0.2, count)
    half_height = np.minimum(1000 * radius * rng.uniform(0.5, 1.2, count), 0.4 * height + 20)
    cysts = np.stack([x + rng.normal(0, 0.15, count), y + rng.normal(0, 0.15, count), radius, half_height], axis=1)
    layer = rng.choice([LAYER["inl"], LAYER["onl"]], count, p=[0.3, 0.7]).astype(np.int64)
    pulled = Lesions(swelling=np.array([[x, y, width, height]]), cysts=cysts, cyst_layer=layer)
    return replace(
        eye,
        lesions=_both(eye.lesions, pulled),
        anatomy=replace(eye.anatomy, hyaloid_um=float(rng.uniform(80, 450))),
    )


def _cystoid_oedema(rng: np.random.Generator, lesions: Lesions) -> Lesions:
    """Cysts of 60 to 900 µm width close together, and the swelling that makes room for them: oedema beyond that of
    pathology.py, whose cysts remain below 380 µm."""
    x, y = lesions.swelling[int(rng.integers(len(lesions.swelling))), :2] if len(lesions.swelling) else (0.0, 0.0)
    count, spread = 3 + int(rng.poisson(rng.uniform(0, 30))), rng.uniform(0.25, 0.9)
    radius = np.exp(rng.uniform(np.log(0.03), np.log(rng.uniform(0.08, 0.45)), count))
    half_height = np.clip(1000 * radius * rng.uniform(0.5, 1.3, count), 15, 260)
    px, py = x + rng.normal(0, spread, count), y + rng.normal(0, spread, count)
    layer = rng.choice([LAYER["inl"], LAYER["opl"], LAYER["onl"]], count, p=[0.4, 0.15, 0.45])
    swollen = np.array([[x, y, max(spread, 0.4), rng.uniform(0.4, 1.3) * 2 * np.quantile(half_height, 0.8)]])
    cysts = np.stack([px, py, radius, half_height], axis=1)
    return Lesions(swelling=swollen, cysts=cysts, cyst_layer=layer.astype(np.int64))


def _lesion_positions(lesions: Lesions, outer: OuterLesions) -> np.ndarray:
    """y in mm, the direction across horizontal B-scans, of up to eight lesions of each kind, the widest first."""
    tables = (lesions.cysts, lesions.subretinal, lesions.drusen, outer.detachments, outer.material)
    return np.concatenate([table[np.argsort(-table[:, 2])[:8], 1] for table in tables])


def _one_half(lesions: Lesions, side: float) -> Lesions:
    """Oedema above or below the raphe only, as behind an occluded branch vein."""
    cysts = side * lesions.cysts[:, 1] > -0.15
    kept = {name: getattr(lesions, name)[side * getattr(lesions, name)[:, 1] > -0.15] for name in ("swelling", "foci")}
    return replace(lesions, cysts=lesions.cysts[cysts], cyst_layer=lesions.cyst_layer[cysts], **kept)


def _both(one: Lesions, other: Lesions) -> Lesions:
    """Two diseases in one eye: lists of lesions are joined; of other values the second's wins, if it has one."""
    values = {}
    for item in fields(Lesions):
        first, second = getattr(one, item.name), getattr(other, item.name)
        values[item.name] = np.concatenate([first, second]) if isinstance(first, np.ndarray) else second or first
    return Lesions(**values)
