"""Take prepared volumes over from another store, so that a new folder does not cost a second preparation."""

import os
from collections.abc import Collection
from pathlib import Path

from octfm.errors import StoreError
from octfm.formats.declared import DECLARED
from octfm.io.location import Location
from octfm.store.item import StoredVolume
from octfm.store.layout import ARRAYS, StoreRow, shard_key
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from octfm.volume.appearance import UNDOUBTED, native_way_up
from octfm.volume.preprocessing import Preprocessing, differences


def open_other(reuse: Store | str | Location, out: Location, preprocessing: Preprocessing) -> Store:
    """The store to take volumes from. Raises StoreError if it is `out` itself, or has other settings."""
    store = reuse if isinstance(reuse, Store) else Store.open(reuse)
    if store.folder == (out.absolute() if isinstance(out, Path) else out):
        raise StoreError(f"{out}: --reuse and --out are one store; choose a new folder for --out")
    if store.fingerprint != preprocessing.fingerprint():
        what = differences(store.preprocessing.model_dump(mode="json"), preprocessing)
        raise StoreError(
            f"{store.path}: its volumes cannot be reused, since they were prepared differently "
            f"({what or 'by another version of the algorithm'}); leave out --reuse"
        )
    return store


def stage_again(store: Store, row: StoreRow, flags: Collection[str], writer: StoreWriter, name: str) -> None:
    """Stage the volume of a row of `store` for `writer`. `flags`: those that the catalog has for it now. Raises
    StoreError if it is damaged or `_doubtful`."""
    volume = store[row.index]  # compared with its checksum
    if _doubtful(volume, flags):
        raise StoreError(f"{store.path}: volume {row.index} may not be upright; only its file can decide")
    if not _link(store, row.index, writer, name):
        stage(volume, writer.staging, name, writer.compression, writer.crc)


def _doubtful(volume: StoredVolume, flags: Collection[str]) -> bool:
    """Whether a volume might be refused today as upside down or of another order of axes (`doubtful_way_up`): it may
    have been prepared before that was checked, or while a sidecar declared it."""
    row = volume.row
    if row.modality != "structure" or "looks_upside_down" in row.found or not DECLARED.isdisjoint(flags):
        return False
    found = row.confidence.get("ilm_support") or 0.0
    return found < UNDOUBTED and native_way_up(volume.voxels, volume.spacing_mm) != "up"


def _link(store: Store, index: int, writer: StoreWriter, name: str) -> bool:
    """Stage the files themselves, without a second copy of them; False where this is not possible. Two stores may share
    files, since these are replaced and never changed."""
    alike = (store.compression, store.checks_shards) == (writer.compression, writer.crc)
    # The rows of a part are numbered otherwise than its files.
    if not (alike and type(store) is Store and isinstance(store.folder, Path)):
        return False
    staged = {array: writer.staging / f"{name}.{array}" for array in ARRAYS}
    try:
        for array, file in staged.items():
            os.link((store.folder / array / shard_key(index)).resolve(), file)  # never a link to a link
    except OSError:  # another disk, or one without links
        for file in staged.values():
            file.unlink(missing_ok=True)
        return False
    return True
