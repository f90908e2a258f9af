"""Token maps: which tokens of a volume hold tissue, background or padding; tissue beyond a budget."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from octfm.errors import StoreError
from octfm.volume.volume import Shape3

PADDING, BACKGROUND, TISSUE = 0, 1, 2
"""Values of a token map."""
TISSUE_SHARE = np.float32(0.25)
"""Least share of a token's voxels in the tissue band for the token to count as tissue."""


class TooFewTokens(StoreError):
    """A volume with fewer than two tokens of image: masking needs one to see and one to predict."""

    def __init__(self, found: str, place: int = 0, who: str = "a volume"):
        super().__init__(
            f"{who}: expected two or more tokens that hold image, found {found}; leave it out (write its acquisition "
            "into a file and name that file as data.exclude or --exclude), prepare with a finer target_spacing, or "
            "choose a smaller model.patch_size"
        )
        self.found, self.place = found, place
        """What was found, and the volume's place in the batch."""

    def naming(self, acquisitions: Sequence[str]) -> "TooFewTokens":
        """The same error with the name of its volume."""
        if self.place >= len(acquisitions):
            return self
        return TooFewTokens(self.found, self.place, f"acquisition {acquisitions[self.place]}")


def token_grid(image_size: Shape3, patch_size: Shape3) -> Shape3:
    """Tokens per axis (d, h, w). Raises ValueError unless patches tile the volume."""
    if any(n % p for n, p in zip(image_size, patch_size, strict=True)):
        raise ValueError(
            f"image_size {tuple(image_size)} is not divisible by patch_size {tuple(patch_size)}; change one of them"
        )
    d, h, w = (n // p for n, p in zip(image_size, patch_size, strict=True))
    return d, h, w


def token_map(band: np.ndarray, valid: np.ndarray, image_size: Shape3, patch_size: Shape3) -> np.ndarray:
    """Padding, background or tissue for every token: uint8 [..., d, h, w].

    band: [..., 2, D, W] upper and lower surface of the tissue band in rows, of which row r covers r to r + 1; valid:
    [..., 2, D, W] first row that holds image and one past the last. A token is tissue when at least TISSUE_SHARE of its
    voxels lie in the band, and padding when fewer than half of them hold image. If that leaves a narrow scan, such as
    five B-scans 0.05 mm apart, fewer than two tokens that are not padding, those that hold at least half as much image
    as the fullest one count as image, so that the run does not stop. Recompute the map after every crop or shift of
    the voxels, from shifted surfaces. Raises ValueError unless patches tile the volume.
    """
    d, h, w = token_grid(image_size, patch_size)
    pd, ph, pw = patch_size
    first, last = valid[..., 0, :, :].astype(np.float32), valid[..., 1, :, :].astype(np.float32)
    upper, lower = np.maximum(band[..., 0, :, :], first), np.minimum(band[..., 1, :, :], last)
    edges = np.arange(h + 1, dtype=np.float32)[:, None, None] * ph
    around = np.empty((h + 1, d * pd, w * pw), np.float32)

    def share(start: np.ndarray, stop: np.ndarray) -> np.ndarray:
        """Share of each token's voxels between two surfaces."""
        above = np.empty((*start.shape[:-2], d, h + 1, w))
        # Volume by volume, so that intermediate arrays stay in the processor's cache.
        for place in np.ndindex(start.shape[:-2]):
            if start[place].min() == start[place].max() and stop[place].min() == stop[place].max():
                # The same rows in every A-scan; in most scans these are all rows.
                above[place] = pd * pw * np.clip(edges[..., 0], start[place].flat[0], stop[place].flat[0])
                continue
            # Edges between tokens, clipped to the rows of each A-scan; differences of successive edges give the rows of
            # each token.
            # np.clip with two arrays takes twice as long.
            np.minimum(np.maximum(edges, start[place], out=around), stop[place], out=around)
            # In float64 these sums of float32 are exact, so that a share of exactly TISSUE_SHARE is not rounded below.
            slabs = around.reshape(h + 1, d, pd, w * pw).sum(2, dtype=np.float64)
            above[place] = slabs.reshape(h + 1, d, w, pw).sum(-1).swapaxes(0, 1)
        return np.diff(above, axis=-2) / (pd * ph * pw)

    tissue, held, grid = share(upper, lower), share(first, last), (-3, -2, -1)
    image, least = held >= 0.5, TISSUE_SHARE
    if (few := image.sum(grid, keepdims=True) < 2).any():
        image |= few & (held > 0) & (held >= held.max(grid, keepdims=True) / 2)
        # Such tokens are mostly padding: tissue is measured against their image instead of all their voxels.
        least = np.where(few, held * least, least)
    tokens = np.where(tissue >= least, np.uint8(TISSUE), np.uint8(BACKGROUND))
    tokens[~image] = PADDING
    return tokens


def tissue_index(tokens: np.ndarray, acquisition: Sequence[str] = ()) -> np.ndarray:
    """int64 [M]: flat indices of all tissue tokens of one token map [d, h, w]; of its image tokens if it has no tissue.

    Raises TooFewTokens if it has neither, with the name in `acquisition`.
    """
    flat = tokens.ravel()
    for kind in (flat == TISSUE, flat != PADDING):
        if kind.any():
            return np.flatnonzero(kind)
    raise TooFewTokens("none").naming(acquisition)


def tissue_dropped(tokens: np.ndarray, budget: int) -> np.ndarray:
    """float [n]: share of the tissue tokens of each token map [n, d, h, w] that does not fit into the budget."""
    tissue = (tokens == TISSUE).reshape(len(tokens), -1).sum(1)
    return 1 - np.minimum(tissue, budget) / np.maximum(1, tissue)


def left_out(share: float) -> str:
    """`all tissue is among them`, or how much tissue the budget leaves out; the end of a sentence about tokens."""
    return "all tissue is among them" if share == 0 else f"{percent(share)} of the tissue is left out"


def percent(share: float) -> str:
    """`0.2 %`; a share above 0 never reads as 0."""
    return "less than 0.1\u00a0%" if 0 < share < 0.0005 else f"{100 * share:.1f}\u00a0%"


class Dropped(NamedTuple):
    """Share of a group's tissue tokens that do not fit into the budget."""

    volumes: int
    mean: float
    """Over the volumes of the group, 0 to 1."""
    most: float


def dropped_by(group: Sequence[str | None], dropped: np.ndarray) -> dict[str, Dropped]:
    """Summarise `dropped` [n], shares of `tissue_dropped`, by group; volumes without a group's name are left out."""
    names = np.array([name or "" for name in group])
    found = {}
    for name in sorted(set(names.tolist()) - {""}):
        own = dropped[names == name]
        found[name] = Dropped(len(own), float(own.mean()), float(own.max()))
    return found
