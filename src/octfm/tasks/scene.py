"""Scene: a volume with its overlays, as the viewer and the report show it, and the file that stores scenes."""

import json
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octfm.errors import EvaluationError, reason_of
from octfm.io.location import from_json, replacing
from octfm.volume.segmentation import words_of
from octfm.volume.transform import Transform
from octfm.volume.volume import Fundus, Laterality, Spacing3

Kind = Literal["colours", "classes", "scalar", "lines", "voxels"]
"""Meaning of the values of an overlay; [d, h, w] is the token grid, [D, H, W] the voxel grid:

colours  uint8 [d, h, w, 4], RGBA of every token
classes  uint8 [d, h, w], index in the legend, 255: none
scalar   float32 [d, h, w], NaN: none
lines    float32 [S, D, W], row of each of S surfaces, named by the legend; NaN: none
voxels   uint8 [D, H, W], 0: none, else index in the legend + 1
"""
NONE = 255
Colour = tuple[int, int, int]
COLOURS: tuple[Colour, ...] = (
    (86, 180, 233),
    (230, 159, 0),
    (0, 158, 115),
    (240, 228, 66),
    (213, 94, 0),
    (204, 121, 167),
    (255, 255, 255),
)
"""The colour-blind-safe palette of Okabe & Ito, and white; used in turn."""


FOUND_COLOURS: dict[str, Colour] = {
    "ilm": (250, 90, 102),
    "nfl_gcl": (215, 130, 0),
    "ipl_inl": (255, 245, 40),
    "inl_opl": (70, 200, 190),
    "opl_onl": (140, 170, 255),
    "ez": (115, 105, 255),
    "rpe_inner": (255, 255, 255),
    "rpe_peak": (90, 255, 120),
    "bm": (240, 70, 205),
    "intraretinal_fluid": (30, 60, 255),
    "subretinal_fluid": (0, 200, 255),
    "drusen": (225, 130, 0),
    "detachment": (255, 245, 40),
}
"""Surfaces and areas of the packaged network, the same in viewer and contact sheet. Neighbours differ clearly for
protanopes and deuteranopes as well."""

ACROSS = {"R": ("T", "N"), "L": ("N", "T")}
"""Letters of the left and the right end of a horizontal B-scan, by eye."""
BESIDE = "beside-"
"""Prefix of the keys of overlays from separate files."""


@dataclass(frozen=True, eq=False)
class Overlay:
    """One map on a scene, such as a segmentation or the attention of a probe."""

    key: str
    """band, tokens, mask, pca, occlusion, attention, layers, segmentation, lesions, beside-0 and so on."""
    name: str
    kind: Kind
    values: np.ndarray
    legend: tuple[tuple[str, Colour], ...] = ()
    about: str = ""
    """Explanation for the reader, in a sentence or two."""
    unit: str = ""

    @property
    def on_tokens(self) -> bool:
        return self.kind in ("colours", "classes", "scalar")


@dataclass(frozen=True)
class Placement:
    """Position of the token grid in the voxels of a scene, in voxel edges (voxel i spans i to i + 1).

    Pairs descend along an axis that is mirrored.
    """

    bscans: tuple[float, float]
    columns: tuple[float, float]
    rows: tuple[tuple[float, float], ...]
    """Upper and lower edge in every B-scan; correction of axial motion shifts the grid between B-scans."""

    @staticmethod
    def whole(shape: Sequence[int]) -> "Placement":
        """A grid that tiles the volume."""
        depth, height, width = shape
        return Placement((0.0, float(depth)), (0.0, float(width)), ((0.0, float(height)),) * depth)

    @staticmethod
    def native(transform: Transform, reversed_bscans: bool) -> "Placement":
        """The grid of a prepared volume in its native frame, or in that frame with its B-scans reversed."""
        (z, y, x), (dz, dy, dx) = transform.origin, transform.scale

        def edges(origin: float, scale: float, count: int) -> tuple[float, float]:
            # Prepared voxel i has its centre at origin + scale * i, where native voxel j spans j - 0.5 to j + 0.5.
            # Adding 0.5 turns centres into edges.
            return origin - scale / 2 + 0.5, origin + scale * (count - 0.5) + 0.5

        bscans, columns = edges(z, dz, transform.shape[0]), edges(x, dx, transform.shape[2])
        top, bottom = edges(y, dy, transform.shape[1])
        rows = [(top + shift, bottom + shift) for shift in transform.displacement]
        if transform.reversed_bscans != reversed_bscans:
            count = transform.native_shape[0]
            bscans, rows = (count - bscans[0], count - bscans[1]), rows[::-1]
        placed = Placement(bscans, columns, tuple(rows))
        return placed.mirrored(transform.native_shape[2]) if transform.mirrored else placed

    def mirrored(self, width: int) -> "Placement":
        return replace(self, columns=(width - self.columns[0], width - self.columns[1]))


@dataclass(frozen=True, eq=False)
class Scene:
    """A volume as shown: row 0 is the vitreous side, and the first B-scan is superior if `superior_first`."""

    title: str
    voxels: np.ndarray
    """uint8 [D, H, W]"""
    spacing_mm: Spacing3
    laterality: Laterality | None = None
    mirrored: bool = False
    """True if the voxels are a left eye mirrored to a right one, as the encoder sees it; `as_seen` undoes this."""
    superior_first: bool = False
    """True if the first B-scan is known to be superior."""
    is_raster: bool = True
    """False if B-scans are not parallel, so that there is no en-face view."""
    scanner: str = "unknown"
    overlays: tuple[Overlay, ...] = ()
    placement: Placement | None = None
    """Position of the token grid; None if the scene has no overlays on tokens."""
    features: np.ndarray | None = None
    """int8 [d, h, w, K]: token features reduced to K directions, for similarities between all scenes of a file."""
    about_features: str = ""
    turned: bool = False
    """True if B-scans do not run from left to right over the fundus; `ends` and `edges` then name their sides."""
    ends: tuple[str, str] | None = None
    """Letters of the sides at which B-scans of a turned raster or of lines begin and end; None if not known."""
    edges: tuple[str, str] | None = None
    """Letters of the sides of its first and last B-scan."""
    fundus: Fundus | None = None
    """The picture of the fundus that came with the scan, its lines in the order of the voxels; not saved."""
    has_mm: bool = True
    """False if its millimetres are only estimated: it is then shown without scales and rulers."""

    def overlay(self, key: str) -> np.ndarray | None:
        """The values of one overlay."""
        return next((o.values for o in self.overlays if o.key == key), None)

    def as_seen(self) -> "Scene":
        """Undo the mirroring of a left eye, for voxels and everything on them."""
        if not self.mirrored:
            return self
        # Overlays on tokens stay: their placement is mirrored instead.
        overlays = tuple(o if o.on_tokens else replace(o, values=o.values[:, :, ::-1]) for o in self.overlays)
        placement = self.placement.mirrored(self.voxels.shape[2]) if self.placement else None
        return replace(self, voxels=self.voxels[:, :, ::-1], overlays=overlays, placement=placement, mirrored=False)


def lines(key: str, name: str, names: Sequence[str], rows: np.ndarray, about: str) -> Overlay:
    """An overlay of surfaces, `rows` [S, D, W]."""
    legend = tuple((n, COLOURS[i % len(COLOURS)]) for i, n in enumerate(names))
    return Overlay(key, name, "lines", rows.astype(np.float32), legend, about)


def _legend_of(names: Iterable[str], first: int) -> tuple[tuple[str, Colour], ...]:
    """Names for readers with their colours; others than the packaged network's take turns from `first` in COLOURS."""
    turns = (COLOURS[(first + i) % len(COLOURS)] for i in count())
    return tuple((words_of(name), FOUND_COLOURS.get(name, colour)) for name, colour in zip(names, turns, strict=False))


def found_overlays(surfaces: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]) -> list[Overlay]:
    """Overlays of a segmentation: rows [D, W] of each surface, and bool [D, H, W] of each area."""
    about, overlays = "Found by octfm segment; not checked by anyone.", []
    if surfaces:
        rows = np.stack(list(surfaces.values()))
        legend = _legend_of(surfaces, 0)
        overlays.append(
            Overlay("segmentation", "Segmentation: layers", "lines", rows.astype(np.float32), legend, about)
        )
    if masks:
        place = np.zeros(next(iter(masks.values())).shape, np.uint8)
        for i, mask in enumerate(masks.values(), 1):
            place[mask] = i
        overlays.append(Overlay("lesions", "Segmentation: areas", "voxels", place, _legend_of(masks, 4), about))
    return overlays


SAVED = (
    "title",
    "spacing_mm",
    "laterality",
    "mirrored",
    "superior_first",
    "is_raster",
    "scanner",
    "about_features",
    "has_mm",
)
SAVED_OF_OVERLAY = ("key", "name", "kind", "legend", "about", "unit")


def save_scenes(scenes: Sequence[Scene], path: Path) -> Path:
    """Write scenes to one .npz file, atomically."""
    arrays: dict[str, np.ndarray] = {}
    facts = []
    for i, scene in enumerate(scenes):
        arrays[f"{i}.voxels"] = scene.voxels
        if scene.features is not None:
            arrays[f"{i}.features"] = scene.features
        for overlay in scene.overlays:
            arrays[f"{i}.{overlay.key}"] = overlay.values
        own: dict[str, Any] = {name: getattr(scene, name) for name in SAVED}
        own["overlays"] = [{name: getattr(o, name) for name in SAVED_OF_OVERLAY} for o in scene.overlays]
        place = scene.placement
        own["placement"] = [place.bscans, place.columns, place.rows] if place else None
        facts.append(own)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, scenes=np.array(json.dumps(facts)), **arrays)  # type: ignore[arg-type]
    return path


def load_scenes(path: Path) -> tuple[Scene, ...]:
    """Read what `save_scenes` wrote. Raises EvaluationError for a damaged or different file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return tuple(_scene(i, facts, file) for i, facts in enumerate(from_json(str(file["scenes"]))))
    except (ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile) as error:
        reason = reason_of(error, 100)
        raise EvaluationError(
            f"{path}: damaged, or written by another version ({reason}); delete it and run octfm embed again"
        ) from None


def _scene(i: int, facts: dict[str, Any], file: Any) -> Scene:
    overlays = []
    for saved in facts.pop("overlays"):
        legend = tuple((name, tuple(colour)) for name, colour in saved.pop("legend"))  # JSON has no tuples
        overlays.append(Overlay(**saved, legend=legend, values=file[f"{i}.{saved['key']}"]))
    where, spacing = facts.pop("placement"), facts.pop("spacing_mm")
    placement = Placement(tuple(where[0]), tuple(where[1]), tuple((a, b) for a, b in where[2])) if where else None
    features = file[f"{i}.features"] if f"{i}.features" in file.files else None
    return Scene(
        voxels=file[f"{i}.voxels"],
        spacing_mm=tuple(spacing),
        overlays=tuple(overlays),
        placement=placement,
        features=features,
        **facts,
    )
