"""Is a tested scan in the training data under another name? By fingerprint, then by vectors, and what they suspect by its speckle."""

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
"""Scans nearest to every tested one, by vectors, that are looked at."""
SAME_SPECKLE = 0.3
"""Correlation of fine detail above which two scans are one acquisition. Speckle is drawn anew at every acquisition, and survives
compression and changes of brightness: measured in docs/log."""
STRANGERS = 200
"""Pairs of different people drawn at random from the same two scanners: small or smooth volumes correlate more by chance, and raise the
threshold. Spectralis averages speckle away, and the sharp edges of its layers remain."""
SHIFT = (4, 4)
"""Rows and A-scans that the two may be apart."""


def copies(study: Study, store: Store) -> dict[str, Any]:
    """Pairs of a tested scan and one that was learned from, or of two participants: the same voxels, or the same speckle."""
    data = study.data
    row_of = {row.acquisition: row for row in store.rows}
    rows = [row_of[name] for name in data.acquisition.tolist()]
    exact = _exact(rows, study)
    query, nearest, _ = nearest_scans(study, study.encoders[0], SUSPECTS)
    detail = lru_cache(maxsize=256)(lambda i: _detail(store, rows[i]))
    by_chance = lru_cache(maxsize=None)(lambda a, b: _by_chance(study, detail, a, b))
    near, seen = [], {tuple(sorted(pair["acquisitions"])) for pair in exact}
    strongest, threshold = 0.0, SAME_SPECKLE
    for i, others in zip(query.tolist(), nearest.tolist(), strict=True):
        for j in others:
            if data.participant[i] == data.participant[j]:
                continue  # where everybody is tested, a scan may be its own neighbour
            correlation = same_speckle(detail(i), detail(j))
            limit = SAME_SPECKLE
            if correlation >= limit:
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


def _by_chance(study: Study, detail: Callable[[int], np.ndarray], a: str, b: str) -> float:
    """Above what strangers on these two scanners reach: their 99 % quantile, and half again as far from their median."""
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
    """The same native voxels, or the same prepared volume, in pairs that cross the split or two participants."""
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


def _detail(store: Store, row: StoreRow) -> np.ndarray:
    """float32 [3, H, W]: the middle B-scans without what is smooth, inside the tissue band only."""
    from scipy.ndimage import uniform_filter1d

    arrays = store.read([row.index])
    middle = arrays.voxels.shape[1] // 2
    chosen = slice(max(0, middle - 1), middle + 2)
    voxels = arrays.voxels[0, chosen].astype(np.float32)
    height = np.arange(voxels.shape[1])[None, :, None]
    band = arrays.band[0, :, chosen]
    inside = (height >= band[0][:, None]) & (height < band[1][:, None])
    # Layers are smooth along a B-scan and shadows along an A-scan, in every scan of an eye; speckle is neither.
    rough = voxels - uniform_filter1d(voxels, 7, axis=2)
    rough -= uniform_filter1d(rough, 7, axis=1)
    rough = np.where(inside, rough, 0)
    return rough / max(float(rough.std()), 1e-6)


def same_speckle(one: np.ndarray, other: np.ndarray) -> float:
    """Largest correlation of two details over small shifts and mirroring: about 1 for copies, near 0 for two acquisitions."""
    return max(_peak(one, other), _peak(one, other[:, :, ::-1]))


def _peak(one: np.ndarray, other: np.ndarray) -> float:
    product = np.fft.rfft2(one) * np.conj(np.fft.rfft2(other))
    correlation = np.fft.irfft2(product.sum(0), one.shape[1:])
    rows, columns = SHIFT
    near = np.concatenate([correlation[: rows + 1], correlation[-rows:]])
    near = np.concatenate([near[:, : columns + 1], near[:, -columns:]], axis=1)
    norm = float(np.sqrt((one**2).sum() * (other**2).sum()))
    return float(near.max()) / norm if norm > 0 else 0.0
