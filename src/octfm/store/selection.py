"""Select rows of a store by split, scanner, layout, modality and number; check that no participant is in two splits."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octfm.catalog.participants.ids import under_one_id
from octfm.errors import ConfigError, Echo, StoreError
from octfm.io.hashing import hash_text
from octfm.io.progress import say
from octfm.store.exclusion import without_excluded
from octfm.store.layout import StoreRow
from octfm.store.store import Store
from octfm.volume.volume import MODALITIES, RASTER_ONLY, STRUCTURE_ONLY, Admissible, Modality


def select(
    store: Store,
    split: str | None,
    scanners: Sequence[str] = (),
    max_samples: int | Sequence[int | None] | None = None,
    leave_out: Sequence[str] = (),
    layouts: Sequence[Admissible] = RASTER_ONLY,
    modalities: Sequence[Modality] = STRUCTURE_ONLY,
    *,
    required: bool = True,
) -> np.ndarray:
    """int64 [n], ascending: the rows that match a split, scanners, layouts and modalities, at most `max_samples`.

    `split` None and empty `scanners` match everything; `leave_out` scanners are removed. `max_samples` as a list limits
    each of `scanners` separately. Samples are the first rows by a hash of the acquisition: they mix scanners and
    participants, and a larger sample contains every smaller one.
    Raises StoreError if a participant is in two splits (F16), ConfigError if nothing matches although it is `required`.
    """
    assert_disjoint_splits(store)
    present = sorted({row.scanner for row in store.rows})
    for key, names in (("data.scanners", scanners), ("data.leave_out_scanners", leave_out)):
        if unknown := [name for name in names if name not in present]:
            raise ConfigError(
                f"{key}: {store.path} has no scanner {unknown[0]!r}; it has {', '.join(present) or 'no volumes'}"
            )
    if both := sorted(set(scanners) & set(leave_out)):
        raise ConfigError(
            f"data.scanners and data.leave_out_scanners: {both[0]!r} is in both; train on it or leave it out"
        )
    limits = _limits(max_samples, scanners)
    allowed = set(scanners or present) - set(leave_out)
    rows = [
        row
        for row in store.rows
        if split in (None, row.split)
        and row.scanner in allowed
        and row.layout in layouts
        and row.modality in modalities
    ]
    if not rows and required:
        named = sorted(allowed) if scanners or leave_out else []
        raise ConfigError(_why_none(store, split, named, layouts, modalities))
    # By hash rather than at random, so that the sample depends on nothing but the acquisitions.
    rows = sorted(rows, key=lambda row: hash_text(row.acquisition))
    chosen = [row for name, limit in limits.items() for row in [r for r in rows if name in (None, r.scanner)][:limit]]
    return np.array(sorted(row.index for row in chosen), dtype=np.int64)


def evenly(rows: np.ndarray, count: int) -> np.ndarray:
    """At most `count` of these rows, int64 [n], evenly spread over them."""
    return rows[np.linspace(0, len(rows) - 1, min(count, len(rows))).astype(int)]


def _limits(max_samples: int | Sequence[int | None] | None, scanners: Sequence[str]) -> dict[str | None, int | None]:
    """Scanner → most samples, None for all; the scanner None stands for all of them together."""
    limits: dict[str | None, int | None]
    if isinstance(max_samples, int | None):
        limits = {None: max_samples}
    elif len(max_samples) == len(scanners):
        limits = dict(zip(scanners, max_samples, strict=True))
    else:
        raise ConfigError(
            f"data.max_samples: expected one limit for each of the {len(scanners)} data.scanners, "
            f"got {len(max_samples)}; null stands for all"
        )
    if wrong := [limit for limit in limits.values() if limit is not None and limit < 1]:
        raise ConfigError(f"data.max_samples: expected at least 1, or null for all, got {wrong[0]}")
    return limits


def _why_none(
    store: Store, split: str | None, scanners: Sequence[str], layouts: Sequence[Admissible], modalities: Sequence[str]
) -> str:
    """The sentence of an error: no row matches."""
    here = store.path
    if {row.layout for row in store.rows} == {"line"} and "line" not in layouts:
        return f"{here}: holds single B-scans, and data.layouts is {list(layouts)}; data.layouts=[line] takes them"
    wanted = [f"of {', '.join(scanners)}"] if scanners else []
    if not all(row.layout in layouts for row in store.rows):
        wanted.append(f"of data.layouts {list(layouts)}")
    if not all(row.modality in modalities for row in store.rows):
        wanted.append(f"of data.modalities {list(modalities)}")
    among = f" {' and '.join(wanted)}" if wanted else ""
    splits = ", ".join(sorted({str(row.split) for row in store.rows})) or "none"
    return f"{here}: no volume{among} is in split {split!r}; splits present: {splits}"


def to_evaluate(
    store: Store,
    exclude: str | Path | None = None,
    modalities: Sequence[Modality] | None = None,
    echo: Echo = say,
) -> Store:
    """The volumes of a store that an evaluation uses: of these modalities, without those listed in `exclude`.

    modalities: those that the encoder was pretrained on; None for structure, or flow if the store holds nothing else.
    `echo` gets a line if the store is unfinished.

    Raises ConfigError if it has no volume of these modalities.
    """
    if unfinished := store.unfinished():
        echo(f"{unfinished}, and only these are used")
    if modalities is None:
        modalities = STRUCTURE_ONLY if any(row.modality == "structure" for row in store.rows) else MODALITIES
    fitting = np.array([row.modality in modalities for row in store.rows], bool)
    if fitting.all():
        return without_excluded(store, exclude, echo)
    if not fitting.any():
        found, wanted = ", ".join(sorted({row.modality for row in store.rows})), " or ".join(modalities)
        raise ConfigError(f"{store.path}: no volume is of modality {wanted}, all are {found}; give another store")
    echo(f"{store.path}: {(~fitting).sum():,} of {len(store):,} volumes are left out, not {' or '.join(modalities)}")
    return without_excluded(store.part(np.flatnonzero(fitting)), exclude, echo)


def assert_disjoint_splits(store: Store) -> None:
    """Raises StoreError if a participant is in two splits, under whatever spelling of the id."""
    first: dict[str, StoreRow] = {}
    for row, person in zip(store.rows, under_one_id([row.participant for row in store.rows]), strict=True):
        one = first.setdefault(person, row)
        if one.split != row.split:
            other = f" as {row.participant}" if row.participant != one.participant else ""
            raise StoreError(
                f"{store.path}: participant {one.participant} is in split {one.split} and{other} in {row.split}, "
                "which would leak test data; run `octfm scan` on all the data and `octfm prepare` again, which updates "
                "the splits and keeps the voxels"
            )
