"""Copies of tested scans among training data: by fingerprint, then nearest vectors confirmed by their speckle."""

from collections import defaultdict
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from octfm.store.layout import StoreRow
from octfm.store.store import Store
from octfm.trust.neighbours import nearest_scans
from octfm.trust.study import Study

SUSPECTS = 3
"""Number of nearest scans, by vectors, that are compared with each tested scan."""
SAME_SPECKLE = 0.3
"""Correlation of fine detail above which two scans are the same acquisition. Every acquisition has its own speckle,
which survives compression and changes of brightness (docs/log)."""
STRANGERS = 200
"""Number of random pairs of different participants on the same two scanners, whose correlations can raise the
threshold: small or smooth volumes correlate more by chance. Spectralis averages speckle away and leaves sharp edges of
layers."""
SHIFT = (4, 4)
"""Largest offset between two copies, in rows and A-scans."""


def copies(study: Study, store: Store) -> dict[str, Any]:
    """Find pairs with the same voxels or speckle that cross the split or belong to two participants."""
    study = study.by_person()
    data = study.data
    row_of = {row.acquisition: row for row in store.rows}
    rows = [row_of[name] for name in data.acquisition.tolist()]
    exact = _exact(rows, study)
    query, nearest, _ = nearest_scans(study, study.encoders[0], SUSPECTS)
    # A scan is often a suspect of several others, and reading it is slow.
    detail = lru_cache(maxsize=256)(lambda i: _fine_detail(store, rows[i]))
    by_chance = lru_cache(maxsize=None)(lambda a, b: _chance_threshold(study, detail, a, b))
    near, seen = [], {tuple(sorted(pair["acquisitions"])) for pair in exact}
    strongest, threshold = 0.0, SAME_SPECKLE
    for i, others in zip(query.tolist(), nearest.tolist(), strict=True):
        for j in others:
            if data.participant[i] == data.participant[j]:
                continue  # also the scan itself, which is in the gallery if everybody is tested
            correlation = same_speckle(detail(i), detail(j))
            limit = SAME_SPECKLE
            if correlation >= limit:
                # Only now, because the chance threshold reads up to 400 volumes per pair of scanners.
                limit = max(limit, by_chance(*sorted((str(data.scanner[i]), str(data.scanner[j])))))
            if correlation > strongest:
                strongest, threshold = correlation, limit
            pair: dict[str, Any] = _pair(data, i, j) | {"correlation": round(correlation, 3)}
            both = tuple(sorted(pair["acquisitions"]))
            if correlation >= limit and both not in seen:
                seen.add(both)
                near.append(pair)
    return {
        "fingerprints": sum(bool(row.pixels) for row in rows),
        "exact": exact,
        "near": near,
        "looked_at": int(nearest.size),
        "highest_correlation": round(strongest, 3),
        "threshold": round(threshold, 3),
        "tested": int(study.tested.sum()),
    }


def _chance_threshold(study: Study, detail: Callable[[int], np.ndarray], a: str, b: str) -> float:
    """A threshold above correlations by chance on two scanners: q99 + 1.5 (q99 − median) over pairs of different
    people; 0 without such pairs."""
    rng, people = np.random.default_rng((study.seed, 4)), study.data.participant
    drawn = np.stack(
        [rng.choice(np.flatnonzero(study.data.scanner == scanner), STRANGERS) for scanner in (a, b)], axis=1
    ).tolist()
    found = [same_speckle(detail(i), detail(j)) for i, j in drawn if people[i] != people[j]]
    if not found:
        return 0.0
    middle, high = np.quantile(found, (0.5, 0.99))
    return float(high + 1.5 * (high - middle))


def _exact(rows: list[StoreRow], study: Study) -> list[dict[str, Any]]:
    """Pairs with identical native voxels or prepared volumes that cross the split or belong to two participants."""
    found, known = [], set()
    for key in ("pixels", "checksum"):
        groups: dict[str, list[int]] = defaultdict(list)
        for i, row in enumerate(rows):
            if getattr(row, key):
                groups[getattr(row, key)].append(i)
        for own in groups.values():
            for n, i in enumerate(own):
                for j in own[n + 1 :]:
                    crosses = study.tested[i] != study.tested[j]
                    two = study.data.participant[i] != study.data.participant[j]
                    if (crosses or two) and (study.tested[i] or study.tested[j]) and (i, j) not in known:
                        known.add((i, j))
                        found.append(
                            _pair(study.data, i, j)
                            | {"by": {"pixels": "native voxels", "checksum": "prepared volume"}[key]}
                        )
    return found


def _pair(data: Any, i: int, j: int) -> dict[str, Any]:
    splits = [data.split[i], data.split[j]]
    return {
        "acquisitions": [str(data.acquisition[i]), str(data.acquisition[j])],
        "splits": splits,
        "same_participant": bool(data.participant[i] == data.participant[j]),
        "scanners": [str(data.scanner[i]), str(data.scanner[j])],
    }


def _fine_detail(store: Store, row: StoreRow) -> np.ndarray:
    """High-pass of the three middle B-scans inside the tissue band, float32 [3, H, W]."""
    from scipy.ndimage import uniform_filter1d

    arrays = store.read([row.index])
    middle = arrays.voxels.shape[1] // 2
    chosen = slice(max(0, middle - 1), middle + 2)
    voxels = arrays.voxels[0, chosen].astype(np.float32)
    height = np.arange(voxels.shape[1])[None, :, None]
    band = arrays.band[0, :, chosen]
    inside = (height >= band[0][:, None]) & (height < band[1][:, None])
    # Remove what all scans of an eye share: layers, smooth along B-scans, and shadows, smooth along A-scans.
    rough = voxels - uniform_filter1d(voxels, 7, axis=2)
    rough -= uniform_filter1d(rough, 7, axis=1)
    rough = np.where(inside, rough, 0)
    return rough / max(float(rough.std()), 1e-6)


def same_speckle(one: np.ndarray, other: np.ndarray) -> float:
    """Largest correlation over small shifts and mirroring: about 1 for copies, near 0 for two acquisitions."""
    return max(_peak(one, other), _peak(one, other[:, :, ::-1]))


def _peak(one: np.ndarray, other: np.ndarray) -> float:
    """Largest correlation over shifts up to SHIFT, from the cross-correlation by FFT."""
    product = np.fft.rfft2(one) * np.conj(np.fft.rfft2(other))
    correlation = np.fft.irfft2(product.sum(0), one.shape[1:])
    # The FFT correlates circularly, so negative shifts are at the far end of each axis.
    rows, columns = SHIFT
    near = np.concatenate([correlation[: rows + 1], correlation[-rows:]])
    near = np.concatenate([near[:, : columns + 1], near[:, -columns:]], axis=1)
    norm = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float(near.max()) / norm if norm > 0 else 0.0
