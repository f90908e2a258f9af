"""A cohort over months: files come, move, change and break between scans and prepares, and a simple model says what
catalog and store hold after each."""

import os
import shutil
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.participants.ids import person_key
from octfm.catalog.scan import scan
from octfm.errors import StoreError
from octfm.store import prepare as prepare_module
from octfm.store import reuse as reuse_module
from octfm.store.prepare import prepare
from octfm.store.selection import assert_disjoint_splits
from octfm.store.store import Store
from octfm.volume import preprocessing as preprocessing_module
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Volume
from support.store_samples import content

TINY = Preprocessing(image_size=(4, 32, 32))
SPACING_MM = (0.12, 0.0039, 0.0115)
PEOPLE = ["1001", "00001001", "Meyer", "1-11", "11-1", "7"]
PLACES = [f"{person}/{eye}/{name}.npz" for person in PEOPLE for eye in "RL" for name in "ab"]
CHANGES = ["add", "add", "move", "copy", "delete", "damage", "repair", "resave", "replace"]


@dataclass(frozen=True)
class File:
    seed: int
    resaved: bool = False
    """The same voxels in other bytes."""
    damaged: bool = False


Row = tuple[File, str | None]
"""A file and its eye."""


def person_of(place: str) -> str:
    return person_key(place.split("/")[0])


def voxels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (4, 32, 36), dtype=np.uint8)


@cache
def prepared(seed: int, eye: str | None):
    return TINY(Volume(voxels(seed), SPACING_MM, laterality=eye))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """The search for tissue takes most of the time, and is not what is tested here."""
    found = {}

    def once(voxels, spacing_mm):
        key = voxels.tobytes()
        if key not in found:
            found[key] = find_tissue(voxels, spacing_mm)
        return found[key]

    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(prepare_module, "doubtful_way_up", lambda *_: ())
    monkeypatch.setattr(reuse_module, "native_way_up", lambda *_: "up")
    monkeypatch.setattr(preprocessing_module, "find_tissue", once)


class Cohort(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.root, self.out = self.folder / "clinic", self.folder / "store"
        self.files: dict[str, File] = {}
        self.catalog: Catalog | None = None
        self.rows: dict[str, Row] = {}
        """File and eye of the rows of the store by UID, in their order."""
        self.old: Path | None = None
        self.old_rows: dict[str, Row] = {}
        """The store before this one, whose volumes are reused, and its rows."""

    def teardown(self):
        shutil.rmtree(self.folder)

    def write(self, place: str, file: File | None) -> None:
        path = self.root / place
        path.parent.mkdir(parents=True, exist_ok=True)
        self.files.pop(place, None)
        path.unlink(missing_ok=True)
        if file is not None:
            self.files[place] = file
            np.savez(path, volume=voxels(file.seed), spacing_mm=SPACING_MM, **({"note": 1} if file.resaved else {}))
            if file.damaged:
                path.write_bytes(path.read_bytes()[:-2000])

    @initialize(places=st.lists(st.sampled_from(PLACES), min_size=4, max_size=8, unique=True))
    def begin(self, places):
        for seed, place in enumerate(places):
            self.write(place, File(seed))

    @rule(what=st.sampled_from(CHANGES), which=st.integers(0, 9), to=st.sampled_from(PLACES), seed=st.integers(0, 19))
    def change(self, what, which, to, seed):
        place = sorted(self.files)[which % len(self.files)] if self.files else to
        file = self.files.get(place, File(seed))
        if what == "add":
            self.write(to, File(seed))
        elif what in ("move", "copy") and to != place:
            self.write(to, file)
            self.write(place, None if what == "move" else file)
        elif what == "delete":
            self.write(place, None)
        else:
            other = {"damage": {"damaged": True}, "repair": {"damaged": False}, "resave": {"resaved": True}}
            self.write(place, replace(file, **other.get(what, {"seed": 20 + seed})))

    def expected(self) -> tuple[dict[str, Row], list[tuple[str, str]]]:
        """Rows of a catalog by place, and pairs of persons with the same file. A file in the folders of both eyes is of
        neither."""
        first: dict[File, str] = {}
        readable = {place: file for place, file in sorted(self.files.items()) if not file.damaged}
        pairs = [(person_of(place), person_of(first.setdefault(file, place))) for place, file in readable.items()]
        eyes = {file: {place.split("/")[1] for place in readable if readable[place] == file} for file in first}
        eye = {file: found.pop() if len(found) == 1 else None for file, found in eyes.items()}
        return {place: (file, eye[file]) for file, place in first.items()}, pairs

    @rule(
        keep=st.sampled_from(["", "catalog", "store"]),
        seed=st.integers(0, 3),
        kill=st.none() | st.integers(1, 20),
        anew=st.sampled_from([False, False, False, True]),
    )
    def scan_and_prepare(self, keep, seed, kill, anew):
        rows, pairs = self.expected()
        placed = {"catalog": self.catalog or (), "store": Store.open(self.out).rows if self.rows else ()}.get(keep, ())
        before = {person_key(row.participant): row.split for row in placed}
        options = {"participant_from": "{participant}/{eye}/*", "fractions": (0.4, 0.3, 0.3), "workers": 0}
        if not rows or (before and before.keys().isdisjoint(map(person_of, rows))):
            with pytest.raises(CatalogError, match=r"acceptable|no such folder|no image files|none of the"):
                scan(self.root, splits_of=placed, seed=seed, **options)
            return
        self.catalog = catalog = scan(self.root, splits_of=placed, seed=seed, **options)
        # Every file is a row or a reject, and rows are those of the model.
        seen = [found.uri for found in (*catalog.acquisitions, *catalog.rejects, *catalog.skipped)]
        assert sorted(seen) == sorted(str(self.root / place) for place in self.files)
        wanted = [(str(self.root / place), place.split("/")[0], eye) for place, (_, eye) in rows.items()]
        assert [(a.uri, a.participant, a.laterality) for a in catalog] == wanted
        # Nobody is in two splits, under no spelling and no id with the same images, nor in another than before.
        split = {person_key(a.participant): a.split for a in catalog}
        assert all(split[person_key(a.participant)] == a.split for a in catalog)
        assert all(split[a] == split[b] for a, b in pairs if a in split and b in split)
        alone = split.keys() - {person for pair in pairs if len({*pair}) > 1 for person in pair}
        assert all(split[person] == before[person] for person in alone & before.keys())
        assert Catalog.load(catalog.save(self.folder / "catalog")) == catalog
        self.prepare({a.sop_instance_uid: row for a, row in zip(catalog, rows.values(), strict=True)}, kill, anew)

    def prepare(self, scanned: dict[str, Row], kill: int | None, anew: bool) -> None:
        def preparing():
            reuse = self.old if self.old_rows.items() & scanned.items() else None
            return prepare(self.catalog, self.out, TINY, workers=0, progress=False, reuse=reuse)

        if not anew and any(self.rows[uid] != scanned[uid] for uid in self.rows.keys() & scanned.keys()):
            with pytest.raises(StoreError, match="prepared with laterality"):
                preparing()
            self.check(self.rows)
            anew = True
        if anew and self.rows:
            self.old, self.old_rows = self.out, self.rows
            self.rows, self.out = {}, self.out.with_name(f"{self.out.name}+")
        rows = {**self.rows}
        for uid, (file, eye) in scanned.items():
            if file.seed not in {row[0].seed for row in rows.values()}:
                rows[uid] = file, eye
        if kill is not None and self.killed(kill, preparing):
            if (self.out / "store.json").exists():
                done = [row.acquisition for row in Store.open(self.out).rows]
                assert done == [*rows][: len(done)] and len(done) >= len(self.rows)
                self.rows = {uid: rows[uid] for uid in done}
                self.check(self.rows)
            return
        store = preparing()
        assert {u.acquisition for u in store.unprepared()} & scanned.keys() == scanned.keys() - rows.keys()
        self.rows = rows
        self.check(rows)
        assert_disjoint_splits(store)
        known = {a.sop_instance_uid: (a.uri, a.participant, a.split) for a in self.catalog or ()}
        for row in store.rows:
            found = (row.uri, row.participant, row.split)
            assert found == known.get(row.acquisition, found)
        before = content(self.out)
        preparing()
        assert content(self.out) == before

    def check(self, rows: dict[str, Row]) -> None:
        """The store has these rows in this order, and the voxels of each are those of its file."""
        store = Store.open(self.out)
        assert [row.acquisition for row in store.rows] == [*rows] and store.verify() == len(rows)
        for index, (file, eye) in enumerate(rows.values()):
            np.testing.assert_array_equal(store.read([index]).voxels[0], prepared(file.seed, eye).voxels)

    def killed(self, at: int, preparing) -> bool:
        """Prepare, and leave behind what kill -9 leaves at this write; False if there are fewer."""
        left, writes = self.folder / "left", iter(range(at + 1))

        def one_more(*_):
            write = next(writes, None)  # None: a thread that takes volumes over writes although all is over
            if write == at:
                shutil.copytree(self.out, left)
            if write in (at, None):
                raise SystemExit

        with patch.object(os, "fsync", one_more):
            try:
                preparing()
            except SystemExit:
                shutil.rmtree(self.out)
                left.rename(self.out)
                return True
        return False


Cohort.TestCase.settings = settings(max_examples=settings().max_examples // 4, stateful_step_count=12)
test_growing_cohort = Cohort.TestCase
