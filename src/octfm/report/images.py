"""Pictures of volumes in true proportions (mm): B-scans with tissue band, masks or PCA, and en-face views.

Vitreous is on top in B-scans, superior on top en face.
"""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from PIL import Image

from octfm.display import coded, drawing, readable, stretched
from octfm.tasks.scene import ACROSS, Scene
from octfm.volume.volume import Volume, eight_bit

CONTEXT, TARGET, TISSUE, BAND = (0.34, 0.71, 0.91), (0.90, 0.62, 0.0), (0.0, 0.62, 0.45), (0.94, 0.89, 0.26)
"""Okabe & Ito's sky blue, orange, green and yellow; each has a contrast of 3:1 or more on a dark OCT background."""
WIDTH_PX = 660
"""Width of the picture of a B-scan."""
# White text with a dark rim is readable on tissue, vitreous and PCA colours.
RIM = [withStroke(linewidth=2.5, foreground="black")]


@dataclass(frozen=True)
class Picture:
    """A picture for a page, with its alternative text."""

    src: str
    """data: URI of a PNG."""
    alt: str
    caption: str
    wide: bool
    """A B-scan, not a view from the front."""


@dataclass(frozen=True)
class Example:
    """Pictures of one volume."""

    scanner: str
    detail: str
    pictures: list[Picture]
    masked: bool
    """Whether one of them shows a training mask."""


def example_pictures(scenes: Sequence[Scene]) -> list[Example]:
    """The first volume of each scanner: prepared B-scan, tissue, a training mask, token features, en-face views."""
    examples = []
    for scene in {scene.scanner: scene for scene in reversed(scenes)}.values():
        seen, spacing, k, scanner = scene.as_seen(), scene.spacing_mm, len(scene.voxels) // 2, scene.scanner
        voxels, mask = seen.voxels, _token_slice(scene, "mask", k)
        alt = f"Middle B-scan of a volume, scanner {readable(scanner)}, without overlays"
        pictures = [_bscan(voxels[k], spacing, "Prepared B-scan", alt), tissue_picture(scene)]
        if mask is not None:
            alt = "The same B-scan under one training mask: context blue, target orange, unused dark"
            tint = _tint(mask, {0: CONTEXT, 1: TARGET}, dark=True)
            pictures.append(_bscan(voxels[k], spacing, "Mask: context, target", alt, tint=tint))
        pictures += _pca_pictures(scene, seen.voxels, k)
        alt = f"Tissue brightness seen from the front, {readable(scanner)}"
        if len(voxels) > 1:
            pictures.append(_enface(front(seen), spacing, scene.laterality, "En face", alt))
        eye = {"R": "right eye", "L": "left eye"}.get(scene.laterality or "", "laterality unknown, not mirrored")
        examples.append(Example(scanner, eye, [each for each in pictures if each is not None], mask is not None))
    return examples[::-1]


def tissue_picture(scene: Scene) -> Picture | None:
    """The middle B-scan with its tissue band and tinted tissue tokens; None if the scene has neither."""
    seen, k = scene.as_seen(), len(scene.voxels) // 2
    band, tokens = seen.overlay("band"), _token_slice(scene, "tokens", k)
    if band is None and tokens is None:
        return None
    lines = " between the two yellow surfaces of its tissue band" if band is not None else ""
    tinted = f", tissue tokens tinted green, {np.mean(tokens == 0):.0%} of this slice" if tokens is not None else ""
    return _bscan(
        seen.voxels[k],
        scene.spacing_mm,
        "Tissue band and tokens",
        f"Middle B-scan of a volume{lines}, scanner {readable(scene.scanner)}{tinted}",
        band=None if band is None else band[:, k],
        tint=None if tokens is None else _tint(tokens, {0: TISSUE}),
    )


def _pca_pictures(scene: Scene, voxels: np.ndarray, k: int) -> list[Picture]:
    """The first three principal components of tokens as red, green and blue, in B-scan `k` and en face."""
    pca = _tokens(scene, "pca")
    if pca is None:
        return []
    spacing = scene.spacing_mm
    pca = pca[..., :3] / 255 * (pca[..., 3:] > 0)  # tokens outside tissue are black
    token_slice = min(k * len(pca) // len(voxels), len(pca) - 1)
    weight = _token_brightness(voxels, pca.shape[:3])
    enface = (pca * weight[..., None]).sum(1) / weight.sum(1)[..., None]
    depth, height, width = voxels.shape
    alt = "Colours of the tokens of the same B-scan"
    coloured = _bscan(pca[token_slice], spacing, "PCA of its tokens", alt, size=(height, width))
    if depth == 1:
        return [coloured]
    alt = f"Token colours averaged over depth, seen from the front, {readable(scene.scanner)}"
    return [coloured, _enface(enface, spacing, scene.laterality, "PCA en face", alt, size=(depth, width))]


def front(scene: Scene) -> np.ndarray:
    """uint8 [D, W]: mean brightness of the tissue band, or of all depths, stretched so that vessel shadows show."""
    voxels, band = scene.voxels, scene.overlay("band")
    if band is not None and (~np.isfinite(band[0]) & voxels.any(1)).mean() > 0.01:
        band = None  # it covers only a part of the field, and its edge would look like a finding
    mean = np.zeros((voxels.shape[0], voxels.shape[2]), np.float32)
    rows = np.arange(voxels.shape[1])[:, None]
    for d, bscan in enumerate(voxels):
        inside = np.ones(bscan.shape, bool) if band is None else (rows >= band[0, d]) & (rows < band[1, d])
        inside |= ~inside.any(0)  # an A-scan without a band counts whole
        mean[d] = np.where(inside, bscan, 0).sum(0, dtype=np.float32) / inside.sum(0)
    # Padding is black and would determine the lower end.
    return stretched(mean, mean[mean > 0] if (mean > 0).any() else None)


def native_pictures(volume: Volume) -> list[Picture]:
    """Middle B-scan and en-face mean of a volume as it is in its file, without names of its sides."""
    planes = eight_bit(volume)
    voxels = planes if isinstance(planes, np.ndarray) else np.stack(list(planes))
    spacing = shown_spacing(volume.shape, volume.spacing_mm, 2)
    mean = stretched(voxels.mean(1))
    scanner = readable(volume.scanner)
    if len(voxels) == 1:
        return [_bscan(voxels[0], spacing, "B-scan", f"B-scan, {scanner}")]
    return [
        _bscan(voxels[len(voxels) // 2], spacing, "B-scan", f"Middle B-scan of a volume, scanner {scanner}"),
        _enface(mean, spacing, None, "En face", f"Mean over depth, seen from the front, {scanner}", vertical=None),
    ]


def shown_spacing(
    shape: tuple[int, int, int], spacing_mm: tuple[float, float, float], deepest: float
) -> tuple[float, float, float]:
    """Spacing whose proportions fit on a page, because a wrong spacing in a file could make a picture metres high.
    Height is between an eighth of the width and twice the width, the extent across B-scans between an eighth of it and
    `deepest` times it."""
    (d, h, w), (dz, dy, dx) = shape, spacing_mm
    width = w * dx
    across, down = np.clip(d * dz, width / 8, width * deepest), np.clip(h * dy, width / 8, width * 2)
    return float(across) / d, float(down) / h, dx


def prepared_picture(voxels: np.ndarray, spacing: tuple[float, float, float], what: str) -> Picture:
    """Middle B-scan of a prepared volume [D, H, W]; `what` names the volume in its alternative text."""
    return _bscan(voxels[len(voxels) // 2], spacing, "B-scan", f"Middle B-scan of {what}")


def _tokens(scene: Scene, key: str) -> np.ndarray | None:
    """An overlay on the token grid, mirrored back for left eyes as `Scene.as_seen` mirrors voxels."""
    values = scene.overlay(key)
    return values if values is None or not scene.mirrored else values[:, :, ::-1]


def _token_slice(scene: Scene, key: str, bscan: int) -> np.ndarray | None:
    values = _tokens(scene, key)
    return None if values is None else values[min(bscan * len(values) // len(scene.voxels), len(values) - 1)]


@drawing({})
def _bscan(
    image: np.ndarray,
    spacing: tuple[float, float, float],
    caption: str,
    alt: str,
    *,
    band: np.ndarray | None = None,
    tint: np.ndarray | None = None,
    size: tuple[int, ...] | None = None,
) -> Picture:
    """A picture of `image` [H, W] or [H, W, 3]; `size` is its size in voxels if the image is a token grid."""
    rows, columns = size or image.shape[:2]
    height, width = rows * spacing[1], columns * spacing[2]
    figure, axes = _drawn(image, height, width, WIDTH_PX, smooth=size is None)
    if tint is not None:
        axes.imshow(tint, extent=(0, width, height, 0), interpolation="nearest", aspect="auto")
    if band is not None:
        across = (np.arange(columns) + 0.5) * spacing[2]
        # Padded A-scans have no band; both surfaces are stored at the same row.
        for surface in np.where(band[1] > band[0], band, np.nan):
            axes.plot(across, surface * spacing[1], color=BAND, linewidth=1.2)
    _scale_bar(axes, height, width)
    return Picture(to_png(figure), alt, caption, wide=True)


@drawing({})
def _enface(
    image: np.ndarray,
    spacing: tuple[float, float, float],
    laterality: str | None,
    caption: str,
    alt: str,
    *,
    size: tuple[int, int] | None = None,
    vertical: str | None = "SI",
) -> Picture:
    """A picture of `image` [D, W] or [d, w, 3]; temporal and nasal are named only if laterality is known."""
    rows, columns = size or image.shape[:2]
    height, width = rows * spacing[0], columns * spacing[2]
    figure, axes = _drawn(image, height, width, WIDTH_PX * 2 // 3, smooth=size is None)
    _scale_bar(axes, height, width)
    sides = [(vertical[0], 0.5, 0.955), (vertical[1], 0.5, 0.045)] if vertical else []
    if laterality is not None:
        left, right = ACROSS[laterality]
        sides += [(left, 0.04, 0.5), (right, 0.96, 0.5)]
    style = {"transform": axes.transAxes, "color": "white", "fontsize": 12, "ha": "center", "va": "center"}
    for word, x, y in sides:
        axes.text(x, y, word, **style, path_effects=RIM)
    return Picture(to_png(figure), alt, caption, wide=False)


def _drawn(image: np.ndarray, height: float, width: float, width_px: int, *, smooth: bool) -> tuple[Figure, Axes]:
    """A figure of an image without margins, with equal scales in mm along both axes."""
    figure = Figure(figsize=(width_px / 100, width_px / 100 * height / width), dpi=100, facecolor="black")
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_axis_off()
    top = 255 if image.dtype == np.uint8 else 1
    style = {"extent": (0, width, height, 0), "interpolation": "bilinear" if smooth else "nearest", "aspect": "auto"}
    axes.imshow(image, cmap="gray", vmin=0, vmax=top, **style)
    # Whatever is drawn over the image must not widen the axes.
    axes.set_xlim(0, width)
    axes.set_ylim(height, 0)
    return figure, axes


def _scale_bar(axes: Axes, height: float, width: float) -> None:
    left, y = 0.03 * width, height - 0.06 * min(height, width)
    axes.plot([left, left + 1], [y, y], color="white", linewidth=2.2, solid_capstyle="butt", path_effects=RIM)
    axes.text(left, y - 0.02 * min(height, width), "1 mm", color="white", fontsize=12, va="bottom", path_effects=RIM)


def _tint(grid: np.ndarray, colors: dict[int, tuple[float, float, float]], *, dark: bool = False) -> np.ndarray:
    """RGBA [h, w, 4] over a token grid; tokens without a colour stay as they are, or are darkened."""
    rgba = np.zeros((*grid.shape, 4))
    if dark:
        rgba[..., 3] = 0.62
    for value, color in colors.items():
        rgba[grid == value] = (*color, 0.38)
    return rgba


def _token_brightness(voxels: np.ndarray, grid: tuple[int, ...]) -> np.ndarray:
    """[d, h, w]: squared mean brightness of each token, so that tissue outweighs vitreous and choroid en face."""
    d, h, w = grid
    # Voxels beyond the last whole token are cut off.
    D, H, W = (n // g * g for n, g in zip(voxels.shape, grid, strict=True))
    blocks = voxels[:D, :H, :W].astype(np.float32).reshape(d, D // d, h, H // h, w, W // w)
    return blocks.mean((1, 3, 5)) ** 2 + 1e-3


def to_png(figure: Figure, colours: int = 128) -> str:
    """A data: URI of a PNG with a palette of at most 256 colours."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    # 128 colours are enough for an OCT with an overlay, and take a third of the bytes.
    small = Image.open(buffer).convert("RGB").quantize(colours, dither=Image.Dither.NONE)
    return f"data:image/png;base64,{coded(small, format='PNG', optimize=True)}"
