"""Find damaged volumes in a store and delete those that can be prepared again: `octfm prepare --verify`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from octfm.catalog.acquisition import Acquisition
from octfm.errors import BucketError, Echo, StoreError
from octfm.io.archive import MEMBER, split_uri
from octfm.io.location import Location, from_json, is_remote, listed, write_whole
from octfm.store.layout import ARRAYS, array_metadata, shard_key
from octfm.store.store import Store
from octfm.store.writer import exclusive

AT_ONCE = 256
"""Volumes between two progress messages."""
MOST = 0.5
"""If a larger share of the volumes appears damaged, suspect the disk or the memory and delete nothing."""


@dataclass(frozen=True)
class Verified:
    """Result of `verify`."""

    volumes: int
    damaged: Mapping[int, str]
    """Row -> what is wrong."""
    to_prepare: tuple[int, ...]
    """Damaged rows whose shards were deleted, so that the next `octfm prepare` prepares them again."""
    metadata: tuple[str, ...] = ()
    """zarr.json files that were wrong and have been rewritten."""


def verify(
    path: str | Location,
    acquisitions: Sequence[Acquisition],
    locations: Mapping[str, str] | None = None,
    echo: Echo = print,
) -> Verified:
    """Read a whole store and report what differs from its checksums.

    Shards of a damaged volume are deleted, so that `octfm prepare` makes them again, but only if its file still exists
    at the uri in the catalog, or at `locations[uri]`. Raises StoreError if the header or the rows are damaged, because
    it is then unknown what the volumes should be.
    """
    store = Store.open(path)
    metadata = _repair_metadata(store, echo)
    damaged: dict[int, str] = {}
    for first in range(0, len(store), AT_ONCE):
        damaged |= store.damaged(range(first, min(first + AT_ONCE, len(store))))
        if len(store) > AT_ONCE:
            echo(f"{min(first + AT_ONCE, len(store)):,} of {len(store):,} volumes read, {len(damaged):,} damaged")
    # A second look with a fresh store and empty caches: one bad read does not make a bad file.
    damaged = Store.open(store.path).damaged(list(damaged)) if damaged else {}
    for sentence in damaged.values():
        echo(sentence)
    if len(damaged) > max(1, MOST * len(store)):
        return Verified(len(store), damaged, (), metadata)
    source = {a.sop_instance_uid: (locations or {}).get(a.uri, a.uri) for a in acquisitions}
    repairable = [row for row in damaged if _exists(source.get(store.rows[row].acquisition))]
    if repairable:
        with exclusive(store.path):
            for row in repairable:
                for name in ARRAYS:
                    (store.path / name / shard_key(row)).unlink(missing_ok=True)
    return Verified(len(store), damaged, tuple(repairable), metadata)


def require_whole(verified: Verified, path: str | Location) -> None:
    """Raises StoreError, with the way to repair it, unless the store was intact and has volumes."""
    if not verified.volumes:
        raise StoreError(
            f"{path}: holds no volume; run the `octfm prepare` that began it again, or restore rows.jsonl from a copy "
            "if it has listed any"
        )
    damaged, again = len(verified.damaged), len(verified.to_prepare)
    if damaged:
        left = damaged - again
        remedy = [f"run the `octfm prepare` that made {path}, which prepares {again} of them again"] if again else []
        if left and not again and damaged > max(1, MOST * verified.volumes):
            remedy = [
                "with so many, the disk or the memory is suspect, so nothing was deleted; test both, "
                "and restore the store from a copy"
            ]
        elif left:
            remedy.append(
                f"the source of {left} was not found: restore these shards from a copy, or make the source available "
                "and verify again"
            )
        raise StoreError(f"{path}: {damaged} of {verified.volumes} volumes are damaged; {'; '.join(remedy)}")
    if verified.metadata:
        raise StoreError(
            f"{', '.join(verified.metadata)}: damaged and rewritten; all {verified.volumes} volumes are intact"
        )


def _repair_metadata(store: Store, echo: Echo) -> tuple[str, ...]:
    """Rewrite damaged zarr.json files of a local store, which follow from header and rows; returns their paths."""
    wrong = []
    # Readers of a bucket generate these files locally, so there they cannot do harm.
    # A writer that was killed before its first volume may not have written them yet.
    for name in ARRAYS if isinstance(store.path, Path) and len(store) else ():
        file = store.path / name / "zarr.json"
        expected = array_metadata(name, len(store), store.image_size, store.compression, store.checks_shards)
        try:
            found = from_json(file.read_text("utf-8"))
            # Longer is fine: a writer killed before it added the row has already announced that volume.
            intact = found["shape"][0] >= len(store) and found | {"shape": expected["shape"]} == expected
        except (OSError, ValueError, LookupError, TypeError):
            intact = False
        if not intact:
            with exclusive(store.path):
                write_whole(file, json.dumps(expected).encode())
            echo(f"{file}: damaged and rewritten")
            wrong.append(str(file))
    return tuple(wrong)


def _exists(where: str | None) -> bool:
    """Whether a source, or the archive that contains it, exists."""
    if where is None:
        return False
    try:
        if is_remote(where):
            return listed(where.partition(MEMBER)[0]).exists()
        return Path(where).exists() or split_uri(where) is not None
    except (BucketError, OSError):
        return False
