"""Which volumes a step sees depends on the seed and the step, and on nothing else."""

import re
import threading

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from octfm.config import load
from octfm.errors import ConfigError, StoreError
from octfm.models.token_map import TooFewTokens
from octfm.store.loader import DataConfig, Loader, accumulation, microbatches
from octfm.store.order import Order
from octfm.store.selection import evenly, select, to_evaluate
from octfm.store.store import Store
from support.examples import examples
from support.small_store import edit_rows, small_store
from support.store_samples import SCANNERS, write_store
from support.waiting import planted_delay, wait_until

VOLUMES = 24


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Store:
    return write_store(tmp_path_factory.mktemp("loader") / "store", VOLUMES)


def sequence(store, steps, *, size=6, seed=0, rank=0, world=1, prefetch=2, rows=range(VOLUMES)):
    with Loader(store, rows, size, seed, rank, world, prefetch) as loader:
        return [loader.batches(step) for step in steps]


def indices(batches):
    return [batch.index.tolist() for batch in batches]


def test_a_batch_holds_the_volumes_it_names(store):
    for batch in sequence(store, range(3)):
        wanted = store.read(batch.index)
        for name in ("voxels", "band", "valid"):
            np.testing.assert_array_equal(getattr(batch, name), getattr(wanted, name))
        assert batch.acquisition == tuple(store.rows[i].acquisition for i in batch.index)


@settings(max_examples=examples(15))
@given(seed=st.integers(0, 2**31), prefetch=st.integers(0, 4), steps=st.lists(st.integers(0, 30), max_size=6))
def test_a_step_gives_the_same_batch_however_it_is_reached(store, seed, prefetch, steps):
    """Read ahead or not, resumed, repeated, rolled back: the step alone decides."""
    expected = indices(sequence(store, range(31), seed=seed))
    assert indices(sequence(store, steps, seed=seed, prefetch=prefetch)) == [expected[step] for step in steps]


@settings(max_examples=15)
@given(
    world=st.sampled_from([1, 2, 3, 4, 6]), share=st.integers(1, 4), step=st.integers(0, 20), seed=st.integers(0, 1000)
)
def test_F10_ranks_see_disjoint_data(store, world, share, step, seed):
    """Every rank had rank 0's shard and seed. Here the ranks' positions are disjoint and together are the global
    batch of one process."""
    size = world * share
    whole = sequence(store, [step], size=size, seed=seed)[0]
    parts = [sequence(store, [step], size=size, seed=seed, rank=rank, world=world)[0] for rank in range(world)]
    positions = [set(part.position.tolist()) for part in parts]
    assert all(len(p) == share for p in positions) and len(set.union(*positions)) == size
    assert np.concatenate([part.position for part in parts]).tolist() == whole.position.tolist()
    assert np.concatenate([part.index for part in parts]).tolist() == whole.index.tolist()


@settings(max_examples=20)
@given(count=st.integers(1, VOLUMES), size=st.integers(1, 10), seed=st.integers(0, 100))
def test_every_epoch_covers_every_volume_once(store, count, size, seed):
    rows = np.arange(VOLUMES)[-count:]
    with Loader(store, rows, size, seed) as loader:
        seen = loader.indices(np.arange(3 * count))
        for epoch in range(3):
            assert sorted(seen[epoch * count : (epoch + 1) * count]) == rows.tolist()
        steps = np.concatenate([loader.positions(step) for step in range(5)])
        assert steps.tolist() == list(range(5 * size)), "no position is skipped or repeated between steps"


def test_the_order_is_the_one_it_has_always_been(store):
    """A resumed run, on whatever version of numpy, must continue the same epoch."""
    with Loader(store, range(VOLUMES), 8, seed=42) as loader:
        assert loader.indices(loader.positions(0)).tolist() == [16, 9, 8, 6, 14, 21, 11, 1]
        assert loader.indices(loader.positions(7)).tolist() == [15, 7, 3, 5, 20, 16, 23, 11]


def test_the_order_of_groups_is_the_one_it_has_always_been():
    groups = [np.arange(3), 3 + np.arange(5)]
    assert Order(groups, 42).rows_at(np.arange(12)).tolist() == [4, 1, 3, 0, 5, 2, 1, 6, 0, 7, 2, 6]
    assert Order(groups, 42, (1, 2)).rows_at(np.arange(12)).tolist() == [3, 4, 1, 5, 6, 0, 6, 7, 2, 4, 1, 3]


def test_an_excluded_volume_is_replaced_by_the_next_of_its_epoch():
    order, every = Order([np.arange(6)], 42), np.arange(12)
    assert order.rows_at(every).tolist() == [1, 5, 0, 4, 2, 3, 5, 4, 1, 0, 2, 3]
    assert order.rows_at(every, frozenset({1, 4})).tolist() == [5, 5, 0, 2, 2, 3, 5, 0, 0, 0, 2, 3]


def test_all_volumes_are_equally_likely_first(store):
    first = []
    for seed in range(2400):
        loader = Loader(store, range(VOLUMES), 1, seed, prefetch=0)
        first.append(int(loader.indices(loader.positions(0))[0]))
        loader.close()
    counts = np.bincount(first, minlength=VOLUMES)
    assert counts.min() > 50 and counts.max() < 150


class Broken:
    """A store whose volume 3 cannot be read."""

    def __init__(self, store):
        self.path, self.rows, self.image_size, self._store = store.path, store.rows, store.image_size, store
        self.turns, self.reads_at_once = store.turns, store.reads_at_once

    def read(self, index, out):
        if 3 in index:
            raise OSError("disk on fire")
        return self._store.read(index, out)


def test_an_error_of_the_reading_thread_surfaces_with_its_cause(store):
    with Loader(Broken(store), range(VOLUMES), 1, 0) as loader:
        bad = int(np.flatnonzero(loader.indices(np.arange(VOLUMES)) == 3)[0])
        for step in range(bad):
            loader.batches(step)
        for _ in range(2):
            with pytest.raises(StoreError, match=f"step {bad} failed: disk on fire") as caught:
                loader.batches(bad)
            assert isinstance(caught.value.__cause__, OSError)
        assert len(loader.batches(bad + 1)) == 1, "the next step is readable, and is read"


def test_an_error_of_drawing_surfaces_as_it_is(store):
    """It is no error of reading: the volume is named, with what to do about it."""

    def draw(batch):
        if batch.position[0] == 2:
            raise TooFewTokens("none").naming(batch.acquisition)
        return batch.position

    with Loader(store, range(VOLUMES), 1, 0, draw=draw) as loader:
        assert [loader.batches(step).drawn for step in range(2)] == [0, 1]
        for _ in range(2):
            with pytest.raises(TooFewTokens, match=r"^acquisition \S+: expected two or more tokens that hold image"):
                loader.batches(2)
        assert loader.batches(3).drawn == 3


@pytest.mark.parametrize("prefetch", [0, 3])
def test_what_is_drawn_belongs_to_its_batch_through_jumps_and_exclusions(store, prefetch):
    """Slow drawing, so that threads are at work whenever the caller goes elsewhere, excludes a volume or stops."""

    def draw(batch):
        planted_delay(0.01)
        return batch.voxels.sum((1, 2, 3)), batch.index.copy()

    with Loader(store, range(VOLUMES), 3, 0, prefetch=prefetch, draw=draw) as loader:
        for turn, step in enumerate((0, 1, 2, 3, 9, 10, 4, 5, 0, 1, 2, 3, 20, 21)):
            if turn in (4, 6, 9):
                loader.exclude([0, turn])
            batch = loader.batches(step)
            sums, index = batch.drawn
            np.testing.assert_array_equal(index, batch.index)
            np.testing.assert_array_equal(sums, store.read(batch.index).voxels.sum((1, 2, 3)))
            assert turn < 4 or 0 not in batch.index
    assert not [t for t in threading.enumerate() if t.name.startswith(("octfm-loader", "octfm-draw"))]


class Slow(Broken):
    reads = 0

    def read(self, index, out):
        planted_delay(0.2)
        found = self._store.read(index, out)
        self.reads += 1
        return found


def test_waiting_is_measured_and_reading_ahead_hides_it(store):
    slow = Slow(store)
    with Loader(slow, range(VOLUMES), 2, 0, prefetch=2) as loader:
        assert loader.batches(0).wait_s >= 0.2
        wait_until(lambda: slow.reads >= 3, "two batches read ahead")
        assert loader.batches(1).wait_s < 0.1


@settings(max_examples=examples(15))
@given(
    held=st.lists(st.sampled_from(["batch", "slice", "tensor", "nothing"]), min_size=6, max_size=20),
    prefetch=st.integers(0, 3),
    dropped_after=st.integers(1, 6),
)
def test_no_batch_changes_while_anything_of_it_is_held(store, held, prefetch, dropped_after):
    """Memory is used again, but never under the hands of somebody who kept a batch, a slice of it, or a tensor made
    from it."""
    import torch

    keep = {
        "batch": lambda v: v,
        "slice": lambda v: v[1:, ::2, 3:],
        "tensor": lambda v: torch.from_numpy(v)[1:].view(-1),
        "nothing": None,
    }
    with Loader(store, range(VOLUMES), 3, 0, prefetch=prefetch) as loader:
        held_now = []
        for step, what in enumerate(held):
            batch = loader.batches(step)
            np.testing.assert_array_equal(batch.voxels, store.read(batch.index).voxels)
            if keep[what]:
                part = keep[what](batch.voxels)
                held_now.append((step, part, np.array(np.asarray(part))))
            del batch
            held_now = [(at, part, copy) for at, part, copy in held_now if step - at < dropped_after]
            for _, part, copy in held_now:
                np.testing.assert_array_equal(part, copy)


def test_a_loop_that_lets_go_of_its_batches_reads_into_the_same_memory(store):
    """Fresh pages would cost as much as the reading. What a hoarder drops does not stay either."""
    with Loader(store, range(VOLUMES), 3, 0, prefetch=1) as loader:
        places = [loader.batches(step).voxels.ctypes.data for step in range(40)]
        assert len(set(places)) <= 4
        hoard = [loader.batches(step) for step in range(20)]
        assert len({batch.voxels.ctypes.data for batch in hoard}) == 20
        del hoard
        assert sum(len(idle) for idle in loader._memory._idle.values()) <= 3 * loader._memory._spare


def test_batches_are_read_into_memory_that_the_caller_allocates(store):
    """With CUDA that is page-locked, so that copies to the device need not wait."""
    given: list[np.ndarray] = []

    def allocate(size: int) -> np.ndarray:
        given.append(np.empty(size, np.uint8))
        return given[-1]

    with Loader(store, range(len(store)), 2, 0, prefetch=0, allocate=allocate) as loader:
        batch = loader.batches(0)
    for array in (batch.voxels, batch.band, batch.valid):
        assert any(np.shares_memory(array, memory) for memory in given)


def test_close_joins_the_thread(store):
    loader = Loader(store, range(VOLUMES), 2, 0)
    loader.batches(0)
    loader.close()
    loader.close()
    assert not [t for t in threading.enumerate() if t.name.startswith("octfm-loader")]
    with pytest.raises(RuntimeError, match="closed"):
        loader.batches(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 2, "world": 2}, "rank must be in 0 … 1"),
        ({"size": 6, "world": 4}, "6 is not a multiple of .* 4 ranks"),
        ({"rows": []}, "no rows to draw"),
        ({"prefetch": -1}, "data.prefetch"),
    ],
)
def test_impossible_settings_are_refused(store, change, message):
    with pytest.raises(ConfigError, match=message):
        sequence(store, [0], **change)


def test_microbatches_are_the_batch_in_order(store):
    batch = sequence(store, [1])[0]
    parts = list(microbatches(batch, 2))
    assert np.concatenate([p.index for p in parts]).tolist() == batch.index.tolist()
    assert np.concatenate([p.voxels for p in parts]).tobytes() == batch.voxels.tobytes()
    assert sum((p.acquisition for p in parts), ()) == batch.acquisition
    assert sum(p.wait_s for p in parts) == batch.wait_s
    with pytest.raises(ConfigError, match="4 does not divide the 6"):
        list(microbatches(batch, 4))


def test_F7_accumulation_must_divide():
    """Global batch size and image size never change silently: what does not divide is refused, with what would."""
    assert accumulation(32, 1, 16) == 2
    assert accumulation(32, 8, 1) == 4
    with pytest.raises(
        ConfigError,
        match=r"global_batch_size 30 .*4 × 2 ranks = 8.*global_batch_size=24 or 32.*per_device_batch_size=3 or 5",
    ):
        accumulation(30, 4, 2)
    with pytest.raises(ConfigError, match=r"global_batch_size=8, or data.per_device_batch_size=3"):
        accumulation(3, 8, 1)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        accumulation(0, 1, 1)


@settings(max_examples=200)
@given(size=st.integers(1, 200), per_device=st.integers(1, 40), world=st.integers(1, 16))
def test_F7_what_the_refusal_proposes_works(size, per_device, world):
    assume(size % (per_device * world))
    with pytest.raises(ConfigError) as caught:
        accumulation(size, per_device, world)
    remedy = str(caught.value).split("nearest that work:")[1]
    for key, values in re.findall(r"data\.(\w+)=(\d+(?: or \d+)?)", remedy):
        for value in map(int, values.split(" or ")):
            changed = {"global_batch_size": size, "per_device_batch_size": per_device, key: value}
            assert accumulation(**changed, world=world) >= 1


def test_the_prototypes_settings_are_accepted():
    config = load(
        DataConfig,
        {"global_batch_size": 32, "per_device_batch_size": 1, "scanners": ["topcon_triton"], "max_samples": None},
    )
    assert (
        config.scanners == ("topcon_triton",)
        and accumulation(config.global_batch_size, config.per_device_batch_size, world=16) == 2
    )


@pytest.mark.parametrize("scanners", [(), SCANNERS[:1], SCANNERS[1:]])
@pytest.mark.parametrize("split", ["train", "val", "test", None])
def test_selection_is_what_was_asked(store, split, scanners):
    chosen = select(store, split, scanners)
    wanted = [r.index for r in store.rows if split in (None, r.split) and (not scanners or r.scanner in scanners)]
    assert chosen.tolist() == wanted


def test_a_smaller_sample_is_part_of_a_larger_one(store):
    samples = [set(select(store, "train", max_samples=n).tolist()) for n in (1, 4, 9, 1000)]
    assert [len(s) for s in samples] == [1, 4, 9, 12]
    assert samples[0] < samples[1] < samples[2] < samples[3]


def test_unknown_names_are_refused_with_those_present(store):
    with pytest.raises(
        ConfigError, match=r"no scanner 'topcon_tritan'; it has heidelberg_spectralis, topcon_triton, zeiss_cirrus"
    ):
        select(store, "train", ["topcon_tritan"])
    with pytest.raises(ConfigError, match=r"split 'training'; splits present: test, train, val"):
        select(store, "training")
    with pytest.raises(ConfigError, match="max_samples"):
        select(store, "train", max_samples=0)


def test_F16_participants_are_disjoint_between_splits(tmp_path):
    """One eye in training, the other in validation: refused, whichever split is asked for."""
    store = write_store(tmp_path / "leaky", 4, change=lambda n: {"split": "val" if n == 1 else "train"})
    for split in ("train", "val", None):
        with pytest.raises(StoreError, match="participant P000 is in split train and in val"):
            select(store, split)


def test_F16_a_participant_whose_id_two_scanners_spell_differently_is_in_one_split(tmp_path):
    """As in a store that was prepared from two catalogs, one of each scanner."""
    spelt = ("1001", "00001001", "1002", "1003")
    store = write_store(
        tmp_path / "leaky", 4, change=lambda n: {"participant": spelt[n], "split": ("train", "test", "val", "val")[n]}
    )
    for split in ("train", "val", "test", None):
        with pytest.raises(StoreError, match="participant 1001 is in split train and as 00001001 in test"):
            select(store, split)


def test_balanced_scanners_are_seen_equally_often_and_each_volume_in_turn(tmp_path):
    """Twelve, six and two volumes: a third of every run each, and a scanner's volumes once per walk through them."""
    sizes = {"a": 12, "b": 6, "c": 2}
    names = [name for name, size in sizes.items() for _ in range(size)]
    store = write_store(tmp_path / "store", 20, change=lambda n: {"scanner": names[n], "split": "train"})
    with Loader(store, range(20), 6, seed=3, balance=True) as loader:
        index = np.concatenate([loader.indices(loader.positions(step)) for step in range(12)])
        seen = [names[i] for i in index]
        for start in range(0, 72, 3):
            assert sorted(seen[start : start + 3]) == ["a", "b", "c"], (
                "balanced within every three volumes, so within every batch"
            )
        assert len({tuple(seen[start : start + 3]) for start in range(0, 72, 3)}) > 3, "in an order drawn anew"
        for name, size in sizes.items():
            mine = [i for i in index if names[i] == name]
            for start in range(0, len(mine), size):
                assert len(set(mine[start : start + size])) == size
        loader.exclude([12])
        without = np.concatenate([loader.indices(loader.positions(step)) for step in range(12)])
        assert 12 not in without and (without != index).sum() == (index == 12).sum()
        with pytest.raises(ConfigError, match="every volume of c is excluded"):
            loader.exclude([18, 19])


@settings(max_examples=10)
@given(world=st.sampled_from([1, 2, 3]), seed=st.integers(0, 100), balance=st.booleans())
def test_F10_sequence_of_volumes_is_independent_of_the_number_of_ranks(store, world, seed, balance):
    def run(world):
        loaders = [Loader(store, range(VOLUMES), 6, seed, rank, world, 0, balance) for rank in range(world)]
        found = [
            np.concatenate([loader.indices(loader.positions(step)) for loader in loaders]).tolist() for step in range(9)
        ]
        for loader in loaders:
            loader.close()
        return found

    assert run(world) == run(1)


def test_a_scanner_is_left_out(store):
    chosen = select(store, "train", leave_out=SCANNERS[:1])
    assert {store.rows[i].scanner for i in chosen} == set(SCANNERS[1:])
    with pytest.raises(ConfigError, match=r"leave_out_scanners: .* has no scanner 'topcon'"):
        select(store, "train", leave_out=["topcon"])
    with pytest.raises(ConfigError, match="is in both"):
        select(store, "train", SCANNERS, leave_out=SCANNERS[:1])
    with pytest.raises(ConfigError, match="no volume"):
        select(store, "train", leave_out=SCANNERS)


def test_a_list_of_limits_has_one_for_each_scanner(store):
    chosen = select(store, "train", SCANNERS[:2], (1, 3))
    counts = [sum(store.rows[i].scanner == name for i in chosen) for name in SCANNERS]
    assert counts == [1, 3, 0]
    assert set(chosen) <= set(select(store, "train", SCANNERS[:2], (None, 3)))
    with pytest.raises(ConfigError, match=r"one limit for each of the 2 data\.scanners, got 1"):
        select(store, "train", SCANNERS[:2], (1,))
    config = load(
        DataConfig, {"scanners": list(SCANNERS[:2]), "max_samples": [5, None], "leave_out_scanners": [SCANNERS[2]]}
    )
    assert config.max_samples == (5, None)


def batch_of(loader_and_step) -> tuple[list[int], int]:
    store, rank, step = loader_and_step
    with Loader(store, range(VOLUMES), 6, 0, rank, 2) as loader:
        batch = loader.batches(step)
        return batch.index.tolist(), int(batch.voxels.sum())


@pytest.mark.slow
def test_a_store_travels_to_spawned_workers(store):
    """Workers of the spawn start method get the store as its path and read the batches that this process reads."""
    import multiprocessing

    tasks = [(store, rank, step) for rank in (0, 1) for step in (0, 3)]
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(batch_of, tasks) == [batch_of(task) for task in tasks]


def test_a_sample_is_of_the_same_acquisitions_in_whatever_order_a_store_was_prepared(tmp_path):
    stores = [small_store(tmp_path / str(backwards), backwards=backwards) for backwards in (False, True)]
    for most in (3, 7, (2, 1)):
        scanners = SCANNERS[:2] if isinstance(most, tuple) else ()
        chosen = [select(store, None, scanners, most) for store in stores]
        names = [{store.rows[i].acquisition for i in rows} for store, rows in zip(stores, chosen, strict=True)]
        assert names[0] == names[1] != {row.acquisition for row in stores[0].rows[: len(names[0])]}
        assert all((np.diff(rows) > 0).all() for rows in chosen)


def test_only_rasters_of_structure_are_taken_unless_others_are_asked_for(tmp_path):
    kinds = [(layout, modality) for layout in ("raster", "radial", "line") for modality in ("structure", "octa")]
    small_store(tmp_path)
    edit_rows(tmp_path, lambda row: dict(zip(("layout", "modality"), kinds[row.index % 6], strict=True)))
    store = Store.open(tmp_path)
    assert {kinds[i % 6] for i in select(store, None)} == {("raster", "structure")}
    for layouts, modalities in ((("raster", "radial"), ("structure",)), (("line",), ("structure", "octa"))):
        chosen = select(store, None, layouts=layouts, modalities=modalities)
        assert chosen.tolist() == [i for i in range(24) if kinds[i % 6][0] in layouts and kinds[i % 6][1] in modalities]
    assert {row.modality for row in to_evaluate(store, echo=lambda _: None).rows} == {"structure"}
    octa = to_evaluate(store, None, ("octa",), lambda _: None)
    assert {row.modality for row in octa.rows} == {"octa"}
    exclude = tmp_path / "exclude.txt"
    exclude.write_text(octa.rows[0].participant)
    left = {row.participant for row in to_evaluate(store, exclude, ("octa",), lambda _: None).rows}
    assert left == {row.participant for row in octa.rows} - {octa.rows[0].participant}


def test_rows_are_taken_evenly_from_the_first_to_the_last():
    rows = np.arange(100, 160)
    assert evenly(rows, 4).tolist() == [100, 119, 139, 159] and np.array_equal(evenly(rows, 99), rows)
