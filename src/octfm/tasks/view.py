"""A scene of one volume in its native frame, with what the file, an encoder or a segmenter has to say about it."""

from typing import TYPE_CHECKING

import numpy as np

from octfm.errors import EvaluationError
from octfm.store.layout import Arrays
from octfm.tasks.scene import Overlay, Scene, found_overlays, lines
from octfm.volume.radial import to_raster
from octfm.volume.volume import Surfaces, Volume

if TYPE_CHECKING:
    from octfm.encoder.encoder import Encoder
    from octfm.encoder.trained_head import TrainedHead
    from octfm.tasks.segment import Segmenter


def scene_of(
    volume: Volume,
    *,
    surfaces: Surfaces | None = None,
    encoder: "Encoder | None" = None,
    head: "TrainedHead | None" = None,
    segmenter: "Segmenter | None" = None,
) -> Scene:
    """What octfm view shows: superior B-scan first where positions tell, left eyes as left eyes, spacing as the file states it.

    Where an encoder or a segmenter is asked for, a star is shown as the raster that it gets. Raises EvaluationError for lines and circles
    there, ReadError for a star of too few lines.
    """
    if (encoder is not None or segmenter is not None) and volume.layout == "radial":
        volume, surfaces = to_raster(volume), None  # whose layers lie on the B-scans of the star
    reverse = volume.superior_first is False
    overlays: list[Overlay] = []
    if surfaces is not None:
        if surfaces.heights_px.shape[1:] != (volume.shape[0], volume.shape[2]):
            raise EvaluationError(
                f"{surfaces.source}: surfaces of {surfaces.heights_px.shape[1:]} A-scans do not fit {volume.shape}"
            )
        rows = surfaces.heights_px[:, :: -1 if reverse else 1]
        overlays.append(lines("layers", "Layers of the file", surfaces.names, rows, "As the instrument drew them."))
    placement = features = None
    about = ""
    if (encoder is not None or segmenter is not None) and volume.layout != "raster":
        raise EvaluationError(
            f"{volume.source}: a {volume.layout} scan, neither raster nor star; leave --run and --segment out"
        )
    if encoder is not None:
        from octfm.tasks import maps
        from octfm.tasks.scene import Placement

        prepared = encoder.preprocess(volume)
        arrays = Arrays(prepared.voxels[None], prepared.band[None], prepared.valid[None])
        tokens, kinds = maps.encode(encoder, arrays), maps.token_maps(encoder, arrays)
        basis = maps.fit_basis(encoder, tokens, kinds)
        band = np.stack([prepared.transform.rows_to_native(surface) for surface in maps.drawn(prepared.band)])
        overlays += [
            maps.band(band[:, ::-1] if reverse else band, encoder.preprocessing.margin_mm),
            *maps.masks_of(encoder, kinds[0], 0),
        ]
        overlays += maps.token_overlays(encoder, arrays, tokens[0], kinds[0], basis, head)
        placement, features = Placement.native(prepared.transform), maps.reduced(tokens[0], basis)
        about = maps.about_features(basis, tokens, kinds)
    if segmenter is not None:
        found = segmenter.segment(volume)
        order = slice(None, None, -1 if reverse else 1)
        surfaces_found = {name: rows[order] for name, rows in found.surfaces.items()}
        overlays += found_overlays(surfaces_found, {name: mask[order] for name, mask in found.masks.items()})
    return Scene(
        title=" ".join(part.replace("_", " ") for part in (volume.scanner, volume.protocol) if part != "unknown")
        or "OCT volume",
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


def _eight_bit(voxels: np.ndarray) -> np.ndarray:
    """For the eye only: 16 bit are stretched to their own brightest hundredth of a per cent."""
    if voxels.dtype == np.uint8:
        return voxels
    top = max(1.0, float(np.percentile(voxels[:: max(1, len(voxels) // 8)], 99.99)))
    return np.stack([np.clip(bscan * (255 / top) + 0.5, 0, 255).astype(np.uint8) for bscan in voxels])
