"""What is rotten in a store, and which of it can be prepared again: `octfm prepare --verify`."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octfm.errors import BucketError, Echo, StoreError
from octfm.io import bucket
from octfm.io.lease import Lease
from octfm.io.location import Location, listed, write_whole
from octfm.store.layout import ARRAYS, shard_key
from octfm.store.store import Store
from octfm.store.writer import array_metadata, locked

if TYPE_CHECKING:
    from octfm.catalog.catalog import Acquisition

AT_ONCE = 256
"""Volumes between two reports of progress."""
MOST = 0.5
"""Where a larger share of the volumes differs, the volumes are not what is rotten."""


@dataclass(frozen=True)
class Verified:
    """What `verify` found."""

    volumes: int
    damaged: Mapping[int, str]
    """Row -> what is wrong."""
    to_prepare: tuple[int, ...]
    """Damaged rows whose shards were deleted, so that the next `octfm prepare` makes them again."""
    metadata: tuple[str, ...] = ()
    """zarr.json files that were wrong, and written anew."""


def verify(
    path: str | Location,
    acquisitions: Sequence["Acquisition"],
    locations: Mapping[str, str] | None = None,
    echo: Echo = print,
) -> Verified:
    """Read everything in a store and name what is not as it was written.

    Damaged volumes whose source is there (an acquisition of the catalog, its file at `locations` or its uri) are set to be prepared again.
    Raises StoreError where the header or the rows are damaged: nothing tells then what the volumes should be.
    """
    store = Store.open(path)
    metadata = _metadata(store, echo)
    damaged: dict[int, str] = {}
    for first in range(0, len(store), AT_ONCE):
        damaged |= store.damaged(range(first, min(first + AT_ONCE, len(store))))
        if len(store) > AT_ONCE:
            echo(f"{min(first + AT_ONCE, len(store)):,} of {len(store):,} volumes read, {len(damaged):,} damaged")
    # Once more, with nothing kept from before: a bad read is no bad file.
    damaged = Store.open(store.path).damaged(list(damaged)) if damaged else {}
    for sentence in damaged.values():
        echo(sentence)
    if len(damaged) > max(1, MOST * len(store)):
        return Verified(len(store), damaged, (), metadata)
    there = {a.sop_instance_uid: (locations or {}).get(a.uri, a.uri) for a in acquisitions}
    found = [row for row in damaged if _is_there(there.get(store.rows[row].acquisition))]
    _delete(store, found)
    return Verified(len(store), damaged, tuple(found), metadata)


def require_whole(verified: Verified, path: str | Location) -> None:
    """Raises StoreError, saying how to repair, unless everything was as it was written."""
    damaged, again = len(verified.damaged), len(verified.to_prepare)
    if damaged:
        left = damaged - again
        remedy = [f"run `octfm prepare CATALOG --out {path}`, which makes {again} of them again"] if again else []
        if left and not again and damaged > max(1, MOST * verified.volumes):
            remedy = [
                "so many are hardly rotten one by one: nothing was deleted; test the disk and the memory, restore the store from a copy"
            ]
        elif left:
            remedy.append(
                f"the source of {left} is not at hand: restore these files from a copy, or bring the source and verify again"
            )
        raise StoreError(f"{path}: {damaged} of {verified.volumes} volumes are damaged; {'; '.join(remedy)}")
    if verified.metadata:
        raise StoreError(
            f"{', '.join(verified.metadata)}: damaged, written anew; all {verified.volumes} volumes are whole"
        )


def _metadata(store: Store, echo: Echo) -> tuple[str, ...]:
    """Damaged zarr.json files of a local store, repaired: they follow from header and rows. A reader of a bucket makes its own."""
    wrong = []
    for name in ARRAYS if isinstance(store.path, Path) else ():
        file = store.path / name / "zarr.json"
        wanted = array_metadata(name, len(store), store.image_size, store.compression, store.checks_shards)
        try:
            found = json.loads(file.read_text())
            # A writer that was killed has announced one volume more than there are rows.
            whole = found["shape"][0] >= len(store) and found | {"shape": wanted["shape"]} == wanted
        except (OSError, ValueError, LookupError, TypeError):
            whole = False
        if not whole:
            with locked(store.path):
                write_whole(file, json.dumps(wanted).encode())
            echo(f"{file}: damaged, written anew")
            wrong.append(str(file))
    return tuple(wrong)


def _is_there(where: str | None) -> bool:
    """Whether a source, or the archive it is a member of, exists."""
    if where is None:
        return False
    try:
        return listed(where.split("!/")[0]).exists()
    except (BucketError, OSError):
        return False


def _delete(store: Store, rows: Sequence[int]) -> None:
    if not rows:
        return
    files = [store.path / name / shard_key(row) for row in rows for name in ARRAYS]
    if isinstance(store.path, Path):
        with locked(store.path):
            for file in files:
                Path(str(file)).unlink(missing_ok=True)
    else:
        with Lease(store.path / "writer.lock", "preparing this store"):
            for file in files:
                bucket.delete(str(file))
