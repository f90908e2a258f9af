"""Scene: a volume with everything that was found in it, as a viewer or a report shows it; numpy only, read from and written to one file."""

import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octfm.errors import EvaluationError
from octfm.io.location import replacing
from octfm.volume.transform import Transform
from octfm.volume.volume import Laterality, Spacing3

Kind = Literal["colours", "classes", "scalar", "lines", "voxels"]
"""What the values of an overlay are:

colours  uint8 [d, h, w, 4], RGBA of every token
classes  uint8 [d, h, w], place in the legend, 255: none
scalar   float32 [d, h, w], NaN: none
lines    float32 [S, D, W], rows of surfaces, one name in the legend for each; NaN: none
voxels   uint8 [D, H, W], 0: none, else place in the legend + 1
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
"""Okabe & Ito's palette and white, in turn."""


@dataclass(frozen=True, eq=False)
class Overlay:
    key: str
    """band, tokens, mask, pca, occlusion, attention, layers, segmentation, lesions."""
    name: str
    kind: Kind
    values: np.ndarray
    legend: tuple[tuple[str, Colour], ...] = ()
    about: str = ""
    """What it means, in a sentence."""
    unit: str = ""

    @property
    def on_tokens(self) -> bool:
        return self.kind in ("colours", "classes", "scalar")


@dataclass(frozen=True)
class Placement:
    """Where a token grid lies in the voxels of a scene, in voxel edges (voxel i reaches from i to i + 1); descending where mirrored."""

    bscans: tuple[float, float]
    columns: tuple[float, float]
    rows: tuple[tuple[float, float], ...]
    """Upper and lower edge in every B-scan: axial motion moves the grid up and down."""

    @staticmethod
    def whole(shape: Sequence[int]) -> "Placement":
        """A grid that tiles the volume."""
        depth, height, width = shape
        return Placement((0.0, float(depth)), (0.0, float(width)), ((0.0, float(height)),) * depth)

    @staticmethod
    def native(transform: Transform) -> "Placement":
        """The grid of a prepared volume in its native frame, superior B-scan first where positions tell (`Volume.superior_to_inferior`)."""
        (z, y, x), (dz, dy, dx) = transform.origin, transform.scale

        def edges(origin: float, scale: float, count: int) -> tuple[float, float]:
            # Prepared voxel i is centred on origin + scale * i, and native voxel j reaches from j - 0.5 to j + 0.5 around its centre.
            return origin - scale / 2 + 0.5, origin + scale * (count - 0.5) + 0.5

        bscans, columns = edges(z, dz, transform.shape[0]), edges(x, dx, transform.shape[2])
        top, bottom = edges(y, dy, transform.shape[1])
        rows = [(top + shift, bottom + shift) for shift in transform.displacement]
        placed = Placement(bscans, columns, tuple(rows))
        return placed.mirrored(transform.native_shape[2]) if transform.mirrored else placed

    def mirrored(self, width: int) -> "Placement":
        return replace(self, columns=(width - self.columns[0], width - self.columns[1]))


@dataclass(frozen=True, eq=False)
class Scene:
    """Voxels lie as they are shown: row 0 is the vitreous side, and the first B-scan is superior where that is known."""

    title: str
    voxels: np.ndarray
    """uint8 [D, H, W]"""
    spacing_mm: Spacing3
    laterality: Laterality | None = None
    """Of the eye."""
    mirrored: bool = False
    """The voxels show a left eye as if it were a right one, as the encoder sees it; `as_seen` undoes that."""
    superior_first: bool = False
    """Whether it is known that the first B-scan is superior."""
    is_raster: bool = True
    """Otherwise B-scans do not lie side by side, and there is no view from the front."""
    scanner: str = "unknown"
    overlays: tuple[Overlay, ...] = ()
    placement: Placement | None = None
    """Of everything on tokens."""
    features: np.ndarray | None = None
    """int8 [d, h, w, K]: token features in a few directions, for similarities; the basis is shared by all scenes of a file."""
    about_features: str = ""

    def overlay(self, key: str) -> np.ndarray | None:
        """The values of one overlay."""
        return next((o.values for o in self.overlays if o.key == key), None)

    def as_seen(self) -> "Scene":
        """Left eyes as left eyes: mirrored back, with everything that lies on the voxels."""
        if not self.mirrored:
            return self
        overlays = tuple(o if o.on_tokens else replace(o, values=o.values[:, :, ::-1]) for o in self.overlays)
        placement = self.placement.mirrored(self.voxels.shape[2]) if self.placement else None
        return replace(self, voxels=self.voxels[:, :, ::-1], overlays=overlays, placement=placement, mirrored=False)


def lines(key: str, name: str, names: Sequence[str], rows: np.ndarray, about: str) -> Overlay:
    """Surfaces, rows [S, D, W] of the scene."""
    return Overlay(
        key,
        name,
        "lines",
        rows.astype(np.float32),
        tuple((n, COLOURS[i % len(COLOURS)]) for i, n in enumerate(names)),
        about,
    )


def found_overlays(surfaces: Mapping[str, np.ndarray], masks: Mapping[str, np.ndarray]) -> list[Overlay]:
    """What a segmenter found: rows [D, W] of each surface and voxels bool [D, H, W] of each area, as the scene has them."""
    said, overlays = "Found by octfm segment; not checked by anyone.", []
    if surfaces:
        rows = np.stack(list(surfaces.values()))
        overlays.append(lines("segmentation", "Segmentation: layers", tuple(surfaces), rows, said))
    if masks:
        place = np.zeros(next(iter(masks.values())).shape, np.uint8)
        for i, mask in enumerate(masks.values(), 1):
            place[mask] = i
        legend = tuple((name, COLOURS[(i + 4) % len(COLOURS)]) for i, name in enumerate(masks))
        overlays.append(Overlay("lesions", "Segmentation: areas", "voxels", place, legend, said))
    return overlays


def save_scenes(scenes: Sequence[Scene], path: Path) -> Path:
    """One .npz, whole or not at all."""
    arrays: dict[str, np.ndarray] = {}
    facts = []
    for i, scene in enumerate(scenes):
        arrays[f"{i}.voxels"] = scene.voxels
        if scene.features is not None:
            arrays[f"{i}.features"] = scene.features
        for overlay in scene.overlays:
            arrays[f"{i}.{overlay.key}"] = overlay.values
        names = (
            "title",
            "spacing_mm",
            "laterality",
            "mirrored",
            "superior_first",
            "is_raster",
            "scanner",
            "about_features",
        )
        own: dict[str, Any] = {name: getattr(scene, name) for name in names}
        own["overlays"] = [
            {n: getattr(o, n) for n in ("key", "name", "kind", "legend", "about", "unit")} for o in scene.overlays
        ]
        own["placement"] = (
            [scene.placement.bscans, scene.placement.columns, scene.placement.rows] if scene.placement else None
        )
        facts.append(own)
    with replacing(path) as partial, partial.open("wb") as file:
        np.savez_compressed(file, scenes=np.array(json.dumps(facts)), **arrays)  # type: ignore[arg-type]
    return path


def load_scenes(path: Path) -> tuple[Scene, ...]:
    """Raises EvaluationError where the file is damaged or of another kind."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return tuple(_scene(i, facts, file) for i, facts in enumerate(json.loads(str(file["scenes"]))))
    except (ValueError, EOFError, KeyError, TypeError, zipfile.BadZipFile) as error:
        reason = " ".join(str(error).split())[:100]
        raise EvaluationError(
            f"{path}: damaged, or of another octfm ({reason}); delete it and embed again (octfm embed)"
        ) from None


def _scene(i: int, facts: dict[str, Any], file: Any) -> Scene:
    overlays = tuple(
        Overlay(
            **(o | {"legend": tuple((name, tuple(colour)) for name, colour in o["legend"])}),
            values=file[f"{i}.{o['key']}"],
        )
        for o in facts.pop("overlays")
    )
    where, spacing = facts.pop("placement"), facts.pop("spacing_mm")
    placement = Placement(tuple(where[0]), tuple(where[1]), tuple((a, b) for a, b in where[2])) if where else None
    features = file[f"{i}.features"] if f"{i}.features" in file.files else None
    return Scene(
        voxels=file[f"{i}.voxels"],
        spacing_mm=tuple(spacing),
        overlays=overlays,
        placement=placement,
        features=features,
        **facts,
    )
