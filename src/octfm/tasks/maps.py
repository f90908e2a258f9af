"""Maps of single volumes by an encoder: masks, PCA of tokens, occlusion, attention, and features for similarities."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from octfm.catalog.participants.ids import person_key
from octfm.display import readable
from octfm.encoder.encoder import Encoder
from octfm.encoder.tuned import TunedModel
from octfm.models.token_map import PADDING, TISSUE
from octfm.pretraining.masks import sample_masks
from octfm.store.layout import Arrays
from octfm.store.store import Store
from octfm.tasks.scene import COLOURS, NONE, Overlay, Placement, Scene, found_overlays, save_scenes
from octfm.tasks.segment import Segmenter
from octfm.volume.estimated import FLAG

PER_SCANNER = 2
"""Volumes shown per scanner."""
FEATURE_BYTES, DIRECTIONS = 300_000, (16, 64)
"""Size of the token features kept per volume for similarities, and limits of their number of directions."""
ROUNDING = 1e-4
"""Vectors closer than this share of their length are considered equal; such a distance is no yardstick."""
BLOCKS = 32
"""Approximate number of blocks hidden one after the other for an occlusion map."""
UNSEEN = "Tissue without a colour was beyond the encoder's budget of tokens."
CONTEXT, TARGET, GREEN, YELLOW = COLOURS[:4]
"""Okabe & Ito's sky blue, orange, green and yellow; each has a contrast of at least 3:1 on a dark OCT background."""


@dataclass(frozen=True, eq=False)
class Basis:
    """Principal components of the tissue tokens of several volumes that are shown together."""

    mean: np.ndarray
    """[width]"""
    axes: np.ndarray
    """[K, width], orthonormal, in order of explained variance."""
    explained: float
    """Share of the variance of tissue tokens in the K directions."""
    low: np.ndarray
    high: np.ndarray
    """[3] percentiles of the first three components, drawn as 0 and 255."""
    step: float
    """Quantisation step of int8 scores, the same for all directions so that angles are kept."""
    spread: float
    """Median distance between the vectors of two volumes; NaN for one volume, or if they differ only by rounding."""


def save_pictures(
    encoder: Encoder, store: Store, out: Path, head: TunedModel | None = None, segmenter: Segmenter | None = None
) -> Path:
    """Write `<out>/scenes.npz`: a few volumes of each scanner with maps of the encoder, head and segmenter."""
    chosen = some_of_each_scanner(store)
    arrays = store.read(chosen)
    tokens = encode(encoder, arrays)
    maps = encoder.token_maps(arrays)
    basis = fit_basis(encoder, tokens, maps)
    about = about_features(basis, tokens, maps)
    # Occlusion maps need one forward pass per block, so there is one per scanner.
    scenes, occluded = [], set()
    for i, index in enumerate(chosen):
        row = store.rows[index]
        one = arrays.one(i)
        overlays = [band(one.band[0], encoder.preprocessing.margin_mm), *masks_of(encoder, maps[i], i)]
        overlays += token_overlays(encoder, one, tokens[i], maps[i], basis, head, occlude=row.scanner not in occluded)
        occluded.add(row.scanner)
        if segmenter is not None:
            overlays += found_overlays(*segmenter.in_prepared(one))
        scenes.append(
            Scene(
                title=f"{readable(row.scanner)}, volume {sum(s.scanner == row.scanner for s in scenes) + 1}",
                voxels=one.voxels[0],
                spacing_mm=store.preprocessing.target_spacing,
                laterality=row.laterality,  # type: ignore[arg-type]
                mirrored=row.transform.get("mirrored", row.laterality == "L"),
                superior_first=True,
                scanner=row.scanner,
                overlays=tuple(overlays),
                has_mm=FLAG not in row.flags,
                placement=Placement.whole(one.voxels[0].shape),
                features=reduced(tokens[i], basis),
                about_features=about,
            )
        )
    return save_scenes(scenes, out / "scenes.npz")


def token_overlays(
    encoder: Encoder,
    arrays: Arrays,
    tokens: np.ndarray,
    maps: np.ndarray,
    basis: Basis,
    head: TunedModel | None,
    *,
    occlude: bool = True,
) -> list[Overlay]:
    """Overlays of one volume: PCA, attention (of a head that has it), occlusion."""
    overlays = [colours(tokens, maps, basis)]
    if head is not None and (weights := attention(encoder, arrays, head)) is not None:
        about = (
            f"Where the pooling probe for {head.answer.target} looks; 1 is as much as an even look at all its tokens. "
            "Not why it answers."
        )
        overlays.append(Overlay("attention", "Attention of the probe", "scalar", weights, about=about, unit="× even"))
    if occlude:
        overlays.append(occlusion(encoder, arrays, basis, head))
    return overlays


def encode(encoder: Encoder, arrays: Arrays) -> np.ndarray:
    """Token features, float32 [B, d, h, w, width]; one volume at a time, for memory."""
    return np.stack([encoder.encode_grid(voxels[None])[0] for voxels in arrays.voxels])


def fit_basis(encoder: Encoder, tokens: np.ndarray, maps: np.ndarray, directions: int | None = None) -> Basis:
    """Fit a Basis to the tissue tokens of `tokens` [B, d, h, w, width] with token maps `maps` [B, d, h, w]."""
    directions = directions or int(np.clip(FEATURE_BYTES // maps[0].size, *DIRECTIONS))
    # Only tissue: over all tokens, the first components would just separate tissue from background.
    tissue = _tissue(maps)
    own = tokens[tissue].astype(np.float64)
    mean = own.mean(0)
    # bias=True divides by N, not N - 1, so that a single token works; only ratios of the variances are used.
    values, vectors = np.linalg.eigh(np.cov(own - mean, rowvar=False, bias=True))
    order = values.argsort()[::-1][:directions]
    axes = vectors[:, order].T
    scores = (own - mean) @ axes.T
    low, high = np.percentile(scores[:, :3], (1, 99), axis=0)
    volumes = [
        encoder.vector_of(t[m], np.ones(m.sum(), bool), np.flatnonzero(m))
        for t, m in zip(tokens, tissue, strict=True)
        if m.any()
    ]
    apart = [float(np.linalg.norm(a - b)) for i, a in enumerate(volumes) for b in volumes[:i]]
    return Basis(
        mean=mean.astype(np.float32),
        axes=axes.astype(np.float32),
        explained=float(values[order].sum() / max(values.sum(), 1e-12)),
        low=low,
        high=high,
        # Not the maximum: a single outlier would leave few of the 255 levels to all other tokens.
        step=float(np.percentile(np.abs(scores), 99.9)) / 127 or 1.0,
        spread=_yardstick(float(np.median(apart)) if apart else 0.0, volumes) or float("nan"),
    )


def _yardstick(distance: float, vectors: Sequence[np.ndarray]) -> float:
    """The distance, or 0 if it is only rounding: dividing by it would make every change look large."""
    return distance if distance > ROUNDING * max((float(np.linalg.norm(v)) for v in vectors), default=0.0) else 0.0


def _tissue(maps: np.ndarray) -> np.ndarray:
    """bool: tissue tokens; if there are none at all, every token that is not padding."""
    return maps == TISSUE if (maps == TISSUE).any() else maps != PADDING


def reduced(tokens: np.ndarray, basis: Basis) -> np.ndarray:
    """Scores of tokens in the directions of the basis, relative to the mean tissue token, int8 [..., K]."""
    return np.clip(np.round((tokens - basis.mean) @ basis.axes.T / basis.step), -127, 127).astype(np.int8)


def similarity_error(tokens: np.ndarray, basis: Basis) -> tuple[float, float]:
    """Mean and 95th percentile of the error of cosine similarities after `reduced`, over 2,000 random token pairs."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(0, len(tokens), 2000) for _ in range(2))
    small = reduced(tokens, basis).astype(np.float32)
    error = np.abs(_cosine(small[a], small[b]) - _cosine(tokens[a] - basis.mean, tokens[b] - basis.mean))
    return float(error.mean()), float(np.percentile(error, 95))


def colours(tokens: np.ndarray, maps: np.ndarray, basis: Basis) -> Overlay:
    """Overlay of the first three components of tissue tokens as red, green and blue."""
    scores = (tokens - basis.mean) @ basis.axes[:3].T
    rgb = np.clip((scores - basis.low) / np.maximum(basis.high - basis.low, 1e-6), 0, 1)
    values = np.zeros((*maps.shape, 4), np.uint8)
    values[..., : rgb.shape[-1]] = np.round(255 * rgb)
    values[..., 3] = np.where(_tissue(maps), 255, 0)
    about = (
        "The three directions in which tissue tokens differ most, as red, green and blue; "
        "equal colours are equal features in all volumes."
    )
    return Overlay("pca", "PCA of tokens", "colours", values, about=about)


def attention(encoder: Encoder, arrays: Arrays, head: TunedModel) -> np.ndarray | None:
    """Attention relative to uniform, float32 [d, h, w], NaN on unseen tokens; None for heads that average tokens."""
    chosen, _ = encoder.select(arrays)
    tokens, counts = encoder.tissue_tokens(arrays)
    weights = head.attention(tokens, counts)
    if weights is None:
        return None
    values = np.full(encoder.network.grid.size, np.nan, np.float32)
    # Even attention becomes 1.
    values[chosen[0][counts[0]]] = weights[0][counts[0]] * counts[0].sum()
    return values.reshape(encoder.network.grid.shape)


def occlusion(
    encoder: Encoder, arrays: Arrays, basis: Basis, head: TunedModel | None = None, blocks: int = BLOCKS
) -> Overlay:
    """Overlay of the change when a block of tissue tokens is hidden: of the head's output, or else of the vector.

    Hidden tokens are omitted, not set to black: the encoder accepts any subset of tokens, whereas a black box would be
    an image unlike any it was trained on.
    """
    chosen, counts = (part[0] for part in encoder.select(arrays))
    place = np.stack(np.unravel_index(chosen, encoder.network.grid.shape), axis=1)
    sizes = block_sizes(place[counts], blocks)
    block = np.where(counts, np.ravel_multi_index((place // sizes).T, tuple((place // sizes).max(0) + 1)), -1)

    def encode_only(kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return encoder.some_tokens(arrays.voxels, chosen[kept][None]), counts[kept][None]

    everything = encode_only(np.ones(len(chosen), bool))
    values = np.full(encoder.network.grid.size, np.nan, np.float32)
    whole = encoder.vector_of(everything[0][0], everything[1][0], chosen)
    answer = None if head is None else head.outputs(*everything)[0]
    # The vector's change is relative to the distance between volumes; for one volume, to that from the mean token.
    size = basis.spread
    if not np.isfinite(size):
        average = encoder.vector_of(basis.mean[None], np.ones(1, bool), chosen[:1])
        size = _yardstick(float(np.linalg.norm(whole - average)), [whole]) or 1.0
    for name in np.unique(block[block >= 0]):
        hidden = block == name
        if not counts[~hidden].any():
            continue  # no tissue would remain
        rest = encode_only(~hidden)
        if head is None:
            change = float(np.linalg.norm(encoder.vector_of(rest[0][0], rest[1][0], chosen[~hidden]) - whole)) / size
        else:
            assert answer is not None
            change = head.lost(answer, head.outputs(*rest)[0])
        values[chosen[hidden]] = change
    if head is None:
        single = not np.isfinite(basis.spread)
        share = "its distance from the mean token" if single else "the median distance between two volumes"
        about = f"How far the vector of the volume moves when the encoder never sees a block, as a share of {share}."
        name, unit = "Occlusion: the volume's vector", "of that distance"
    else:
        about = (
            f"What the answer for {head.answer.target} loses when the encoder never sees a block ({head.loss_unit}); "
            "below 0 it gains."
        )
        name, unit = f"Occlusion: {head.answer.target}", head.loss_unit
    values = values.reshape(encoder.network.grid.shape)
    return Overlay("occlusion", name, "scalar", values, about=f"{about} {UNSEEN}", unit=unit)


def block_sizes(place: np.ndarray, blocks: int) -> np.ndarray:
    """Block size in tokens per axis, so that at most `blocks` blocks cover these tokens [M, 3].

    Grows step by step along the axis with most blocks.
    """
    sizes = np.ones(3, int)
    while len(np.unique(place // sizes, axis=0)) > blocks:
        sizes[int(((place.max(0) + sizes) // sizes).argmax())] += 1
    return sizes


def band(surfaces: np.ndarray, margin_mm: float) -> Overlay:
    """Overlay of the tissue band, `surfaces` float [2, D, W] in rows of the scene."""
    about = (
        f"What counts as tissue: from {1000 * margin_mm:g} µm above the inner limiting membrane "
        "to as much below Bruch's membrane."
    )
    return Overlay("band", "Tissue band", "lines", drawn(surfaces), (("upper", YELLOW), ("lower", YELLOW)), about)


def some_of_each_scanner(store: Store) -> np.ndarray:
    """Store rows of PER_SCANNER volumes per scanner, of different participants, with both eye sides if possible."""
    chosen: dict[str, dict[str, int]] = {}
    # A right eye, a left eye, then any others, up to PER_SCANNER.
    for wanted in ("R", "L", None):
        for i, row in enumerate(store.rows):
            own = chosen.setdefault(row.scanner, {})
            sides = {store.rows[j].laterality for j in own.values()}
            if len(own) < PER_SCANNER and (wanted is None or (row.laterality == wanted and wanted not in sides)):
                own.setdefault(person_key(row.participant), i)
    return np.array([i for own in chosen.values() for i in own.values()])


def masks_of(encoder: Encoder, maps: np.ndarray, seed: int) -> list[Overlay]:
    """Overlays of the tissue tokens and, if the encoder's objective hid tokens, of one random training mask."""
    tissue = np.where(maps == TISSUE, 0, NONE).astype(np.uint8)
    about_tissue = "Tokens that carry the features of the volume."
    tokens = Overlay("tokens", "Tissue tokens", "classes", tissue, (("tissue", GREEN),), about_tissue)
    if not encoder.config.objective.hides_tokens:
        return [tokens]
    masks = sample_masks(encoder.config.masks, maps[None], [np.random.default_rng(seed)])
    mask = np.full(maps.size, NONE, np.uint8)
    mask[masks.context[0]], mask[masks.target[0]] = 0, 1
    about_mask = "In training the encoder sees the context and must predict the target; other tokens are not used."
    legend = (("context", CONTEXT), ("target", TARGET))
    return [tokens, Overlay("mask", "One training mask", "classes", mask.reshape(maps.shape), legend, about_mask)]


def drawn(surfaces: np.ndarray) -> np.ndarray:
    """The surfaces with NaN on padded A-scans, which have no band and store both surfaces at the same row."""
    return np.where(surfaces[1] > surfaces[0], surfaces, np.nan).astype(np.float32)


def about_features(basis: Basis, tokens: np.ndarray, maps: np.ndarray) -> str:
    """Sentences on what similarities are computed from, and how exact they are."""
    mean, high = similarity_error(tokens[_tissue(maps)], basis)
    return (
        f"Cosine of token features, less the mean tissue token, in {len(basis.axes)} of {len(basis.mean)} directions "
        f"that keep {basis.explained:.1%} of their variance. Against all directions, similarities are off by "
        f"{mean:.3f} on average, {high:.3f} at the 95th percentile."
    )


def _cosine(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a * b).sum(-1) / np.maximum(np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1), 1e-9)
