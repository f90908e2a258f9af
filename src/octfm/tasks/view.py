"""Scene of one volume in its native frame, with layers of its file and maps of an encoder or segmenter."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from octfm.display import readable
from octfm.errors import EvaluationError
from octfm.store.layout import Arrays
from octfm.tasks.scene import ACROSS, BESIDE, COLOURS, Overlay, Scene, found_overlays, lines
from octfm.volume.etdrs import lateral_scale
from octfm.volume.radial import to_raster
from octfm.volume.segmentation import Segmentation
from octfm.volume.volume import Fundus, Labels, Surfaces, Volume

if TYPE_CHECKING:
    from octfm.encoder.encoder import Encoder
    from octfm.encoder.tuned import TunedModel
    from octfm.tasks.segment import Segmenter


def scene_of(
    volume: Volume,
    *,
    surfaces: Surfaces | None = None,
    encoder: "Encoder | None" = None,
    head: "TunedModel | None" = None,
    segmenter: "Segmenter | None" = None,
    found: Segmentation | None = None,
    fundus: Fundus | None = None,
    beside: Sequence[Surfaces | Labels] = (),
) -> Scene:
    """The scene of octfm view: superior B-scan first if positions show it, left eyes not mirrored, spacing of the file,
    rescaled if `found` has an axial length.

    found: what the packaged network found in the volume as it is in its file, of any layout.
    beside: lines and labels in files of their own (octfm.formats.read_overlay).
    With an encoder or segmenter, a radial scan is shown as the raster that it is resampled to. Raises EvaluationError
    for line and circle scans in this case, and ReadError for a radial scan of too few lines.
    """
    if (encoder is not None or segmenter is not None) and volume.layout == "radial":
        if found is not None or beside:
            raise EvaluationError(
                f"{volume.source}: --layers and --overlay show a radial scan as it is, --run the raster made of it; "
                "give one of them"
            )
        volume, surfaces = to_raster(volume), None  # the file's layers belong to the radial B-scans
        fundus = fundus and replace(fundus, lines=None)
    order = slice(None, None, -1 if volume.superior_first is False else 1)
    # A page that measures zones in one kind of lateral millimetres must not have a ruler of the other.
    scale = lateral_scale(getattr(found, "axial_length_mm", None))
    dz, dy, dx = volume.spacing_mm
    overlays: list[Overlay] = []
    if surfaces is not None:
        if surfaces.heights_px.shape[1:] != (volume.shape[0], volume.shape[2]):
            raise EvaluationError(
                f"{surfaces.source}: surfaces of {surfaces.heights_px.shape[1:]} A-scans do not fit a volume of "
                f"{volume.shape}"
            )
        rows = surfaces.heights_px[:, order]
        overlays.append(lines("layers", "Layers of the file", surfaces.names, rows, "As the instrument drew them."))
    overlays += [_beside(number, drawn, order) for number, drawn in enumerate(beside)]
    if (encoder is not None or segmenter is not None) and volume.layout != "raster":
        raise EvaluationError(
            f"{volume.source}: --run and --segment need a raster or radial scan, this is a {volume.layout} scan; "
            "leave them out"
        )
    on_tokens, tokens = _of_tokens(volume, encoder, head, order) if encoder is not None else ([], {})
    overlays += on_tokens
    found = segmenter.segment(volume) if segmenter is not None else found
    if found is not None:
        surfaces_found = {name: rows[order] for name, rows in found.surfaces.items()}
        overlays += found_overlays(surfaces_found, {name: mask[order] for name, mask in found.masks.items()})
    known = [readable(part) for part in (volume.scanner, volume.protocol) if part != "unknown"]
    return Scene(
        title=" ".join(known) or ("OCT volume" if volume.shape[0] > 1 else "B-scan"),
        voxels=_eight_bit(volume.voxels)[order],
        spacing_mm=(dz * scale, dy, dx * scale),
        laterality=volume.laterality,
        superior_first=volume.superior_first is not None,
        is_raster=volume.layout == "raster",
        turned=not volume.left_to_right,
        **(_sides_of_turned(volume) if volume.layout == "raster" else _sides_of_lines(volume, fundus)),
        has_mm=not volume.spacing_estimated,
        scanner=volume.scanner,
        overlays=tuple(overlays),
        **tokens,
        fundus=fundus.reversed() if fundus is not None and volume.superior_first is False else fundus,
    )


def _of_tokens(
    volume: Volume, encoder: "Encoder", head: "TunedModel | None", order: slice
) -> tuple[list[Overlay], dict[str, Any]]:
    """Overlays of an encoder's tokens, and `Scene.placement`, `features` and `about_features`."""
    from octfm.tasks import maps
    from octfm.tasks.scene import Placement

    prepared = encoder.preprocess(volume)
    arrays = Arrays.of(prepared)
    tokens, kinds = maps.encode(encoder, arrays), encoder.token_maps(arrays)
    basis = maps.fit_basis(encoder, tokens, kinds)
    band = np.stack([prepared.transform.rows_to_native(surface) for surface in maps.drawn(prepared.band)])
    overlays = [maps.band(band[:, order], encoder.preprocessing.margin_mm), *maps.masks_of(encoder, kinds[0], 0)]
    overlays += maps.token_overlays(encoder, arrays, tokens[0], kinds[0], basis, head)
    return overlays, {
        "placement": Placement.native(prepared.transform, reversed_bscans=volume.superior_first is False),
        "features": maps.reduced(tokens[0], basis),
        "about_features": maps.about_features(basis, tokens, kinds),
    }


def _sides_of_turned(volume: Volume) -> dict[str, Any]:
    """`Scene.ends` and `Scene.edges` of a raster whose B-scans do not run from left to right over the fundus."""
    if volume.left_to_right or volume.lines is None:
        return {}
    across = ACROSS.get(volume.laterality or "")
    backwards = None if across is None else (across[1], across[0])
    if not volume.vertical:
        return {"ends": backwards}
    along = np.nan_to_num(volume.lines.end - volume.lines.start)[:, 1].mean()
    middle = ((volume.lines.start + volume.lines.end) / 2)[:, 0]
    shown = middle[::-1] if volume.superior_first is False else middle
    to_the_right = np.nanmean(np.diff(shown)) >= 0 if len(shown) > 1 else True
    return {"ends": ("S", "I") if along > 0 else ("I", "S"), "edges": across if to_the_right else backwards}


def _sides_of_lines(volume: Volume, fundus: Fundus | None) -> dict[str, Any]:
    """`Scene.ends` of line scans that all run the same way over the picture of the fundus."""
    if volume.layout != "line" or fundus is None or fundus.lines is None:
        return {}
    x, y = (fundus.lines.end - fundus.lines.start).T
    for along, aside, letters in ((x, y, ACROSS.get(volume.laterality or "")), (y, x, ("S", "I"))):
        if (np.abs(along) > np.abs(aside)).all() and (along > 0).all():
            return {"ends": letters}
        if (np.abs(along) > np.abs(aside)).all() and (along < 0).all():
            return {"ends": letters and letters[::-1]}
    return {}


def _beside(number: int, drawn: Surfaces | Labels, order: slice) -> Overlay:
    """The overlay of a file, named by it."""
    name, about = PurePath(drawn.source).name[:60], "From a file of its own; who drew it, that file says."
    if isinstance(drawn, Surfaces):
        return lines(f"{BESIDE}{number}", f"{name}: layers", drawn.names, drawn.heights_px[:, order], about)
    legend = tuple((own, COLOURS[i % len(COLOURS)]) for i, own in enumerate(drawn.names.values()))
    place = np.zeros(256, np.uint8)
    place[list(drawn.names)] = np.arange(1, len(legend) + 1)
    return Overlay(f"{BESIDE}{number}", f"{name}: labels", "voxels", place[drawn.values[order]], legend, about)


def _eight_bit(voxels: np.ndarray) -> np.ndarray:
    """Voxels for display; 16-bit volumes are scaled so that their 99.99th percentile becomes 255."""
    if voxels.dtype == np.uint8:
        return voxels
    top = max(1.0, float(np.percentile(voxels[:: max(1, len(voxels) // 8)], 99.99)))
    # One B-scan at a time: a float copy of the whole volume would take several times its memory.
    return np.stack([np.clip(bscan * (255 / top) + 0.5, 0, 255).astype(np.uint8) for bscan in voxels])
