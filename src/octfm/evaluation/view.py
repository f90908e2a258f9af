"""A scene of one volume in its native frame, with what the file, an encoder or a segmenter has to say about it."""

from typing import TYPE_CHECKING

import numpy as np

from octfm.data.store import Arrays
from octfm.data.volume import Surfaces, Volume
from octfm.errors import EvaluationError
from octfm.evaluation.scene import Colour, Overlay, Scene

if TYPE_CHECKING:
    from octfm.evaluation.encoder import Encoder
    from octfm.evaluation.segment import Segmenter
    from octfm.evaluation.trained_head import TrainedHead

COLOURS: tuple[Colour, ...] = ((86, 180, 233), (230, 159, 0), (0, 158, 115), (240, 228, 66), (213, 94, 0), (204, 121, 167), (255, 255, 255))
"""Okabe & Ito's palette and white, in turn."""


def scene_of(
    volume: Volume,
    *,
    surfaces: Surfaces | None = None,
    encoder: "Encoder | None" = None,
    head: "TrainedHead | None" = None,
    segmenter: "Segmenter | None" = None,
) -> Scene:
    """What octfm view shows: superior B-scan first where positions tell, left eyes as left eyes, spacing as the file states it.

    Raises EvaluationError for scans that are no raster where an encoder or a segmenter is asked for.
    """
    reverse = volume.superior_first is False
    overlays: list[Overlay] = []
    if surfaces is not None:
        if surfaces.heights_px.shape[1:] != (volume.shape[0], volume.shape[2]):
            raise EvaluationError(f"{surfaces.source}: surfaces of {surfaces.heights_px.shape[1:]} A-scans do not fit {volume.shape}")
        overlays.append(
            _lines("layers", "Layers of the file", surfaces.names, surfaces.heights_px, reverse, "As the instrument drew them.")
        )
    placement = features = None
    about = ""
    if (encoder is not None or segmenter is not None) and volume.layout != "raster":
        raise EvaluationError(f"{volume.source}: a {volume.layout} scan; an encoder needs a raster, leave --run and --segment out")
    if encoder is not None:
        from octfm.evaluation import maps
        from octfm.evaluation.scene import Placement

        prepared = encoder.preprocess(volume)
        arrays = Arrays(prepared.voxels[None], prepared.band[None], prepared.valid[None])
        tokens, kinds = maps.encode(encoder, arrays), maps.token_maps(encoder, arrays)
        basis = maps.fit_basis(tokens, kinds)
        lines = np.stack([prepared.transform.rows_to_native(surface) for surface in maps.drawn(prepared.band)])
        overlays += [maps.band(lines[:, ::-1] if reverse else lines, encoder.preprocessing.margin_mm), *maps.masks_of(encoder, kinds[0], 0)]
        overlays += maps.token_overlays(encoder, arrays, tokens[0], kinds[0], basis, head)
        placement, features = Placement.native(prepared.transform), maps.reduced(tokens[0], basis)
        about = maps.about_features(basis, tokens, kinds)
    if segmenter is not None:
        found = segmenter.segment(volume)
        said = "Found by octfm segment; not checked by anyone."
        if found.surfaces:
            names = tuple(found.surfaces)
            overlays.append(_lines("segmentation", "Segmentation: layers", names, np.stack(list(found.surfaces.values())), reverse, said))
        if found.masks:
            place = np.zeros(volume.shape, np.uint8)
            for i, mask in enumerate(found.masks.values(), 1):
                place[mask] = i
            legend = tuple((name, COLOURS[(i + 4) % len(COLOURS)]) for i, name in enumerate(found.masks))
            overlays.append(Overlay("lesions", "Segmentation: areas", "voxels", place[:: -1 if reverse else 1], legend, said))
    return Scene(
        title=" ".join(part.replace("_", " ") for part in (volume.scanner, volume.protocol) if part != "unknown") or "OCT volume",
        voxels=_eight_bit(volume.voxels)[:: -1 if reverse else 1],
        spacing_mm=volume.spacing_mm,
        laterality=volume.laterality,
        superior_first=volume.superior_first is not None,
        is_raster=volume.layout == "raster",
        scanner=volume.scanner,
        overlays=tuple(overlays),
        placement=placement,
        features=features,
        about_features=about,
    )


def _lines(key: str, name: str, names: tuple[str, ...], rows: np.ndarray, reverse: bool, about: str) -> Overlay:
    legend = tuple((n, COLOURS[i % len(COLOURS)]) for i, n in enumerate(names))
    return Overlay(key, name, "lines", rows[:, :: -1 if reverse else 1].astype(np.float32), legend, about)


def _eight_bit(voxels: np.ndarray) -> np.ndarray:
    """For the eye only: 16 bit are stretched to their own brightest hundredth of a per cent."""
    if voxels.dtype == np.uint8:
        return voxels
    top = max(1.0, float(np.percentile(voxels[:: max(1, len(voxels) // 8)], 99.99)))
    return np.stack([np.clip(bscan * (255 / top) + 0.5, 0, 255).astype(np.uint8) for bscan in voxels])
