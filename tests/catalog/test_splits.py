"""Participants never straddle splits, and splits are balanced."""

import re
import shutil
import string
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.csgraph import connected_components

from octfm.catalog.acquisition import Reject
from octfm.catalog.catalog import (
    Acquisition,
    Catalog,
    CatalogError,
    _leaders,
    assert_participant_level,
    assign_splits,
)
from octfm.catalog.participants.splits import SPLITS, assign, diagnosis_of, parse_split
from octfm.catalog.scan import scan
from octfm.cli import options
from octfm.cli.data import _about_replaced
from octfm.errors import ConfigError
from octfm.formats.reasons import REASONS
from octfm.io.location import BucketPath
from octfm.store.prepare import prepare
from octfm.volume.preprocessing import Preprocessing
from support.command_line import invoke, octfm_here
from support.dicom_files import write_oct_dicom


def acquisition(
    participant="p1", laterality="R", scanner="zeiss_cirrus", number=0, split=None, **labels
) -> Acquisition:
    uid = f"1.2.{number}"
    return Acquisition(
        f"/data/{uid}.dcm",
        participant,
        laterality,
        scanner,
        "cube",
        (8, 64, 64),
        (0.1, 0.004, 0.012),
        "shared",
        uid,
        split,
        labels,
    )


def cohort(count, **labels) -> list[Acquisition]:
    return [acquisition(f"p{i}", side, number=2 * i + (side == "L"), **labels) for i in range(count) for side in "RL"]


cohorts = st.lists(
    st.builds(
        acquisition,
        participant=st.text(string.ascii_lowercase, min_size=1, max_size=2) | st.sampled_from(["1", "01", "P1", "2"]),
        laterality=st.sampled_from(["R", "L", None]),
        scanner=st.sampled_from(["zeiss_cirrus", "topcon_triton"]),
        recommended_split=st.just(""),
        study_group=st.sampled_from(["healthy", "insulin_dependent"]),
    ),
    min_size=1,
    max_size=60,
)


@settings(max_examples=100)
@given(cohorts, st.integers(0, 2**31))
def test_F16_one_participant_is_never_in_two_splits(acquisitions, seed):
    splits: dict[str, set] = {}
    for placed in assign_splits(acquisitions, seed=seed):
        person = "1" if placed.participant in ("01", "P1") else placed.participant
        splits.setdefault(person, set()).add(placed.split)
    assert all(len(found) == 1 and found <= set(SPLITS) for found in splits.values())


@pytest.mark.parametrize(
    ("count", "fractions", "expected"),
    [
        (2, (0.8, 0.1, 0.1), [2, 0, 0]),
        (3, (0.8, 0.1, 0.1), [1, 1, 1]),
        (4, (0.8, 0.1, 0.1), [2, 1, 1]),
        (9, (0.8, 0.1, 0.1), [7, 1, 1]),
        (20, (0.96, 0.02, 0.02), [18, 1, 1]),
        (3, (0.9, 0.1, 0.0), [2, 1, 0]),
        (20, (0.8, 0.0, 0.2), [16, 0, 4]),
    ],
)
def test_of_three_participants_every_split_with_a_share_gets_one(count, fractions, expected):
    names = [f"p{i}" for i in range(count)]
    placed = assign(dict.fromkeys(names), {}, fractions, 3)
    assert [list(placed.values()).count(split) for split in SPLITS] == expected
    assert placed == assign(dict.fromkeys(reversed(names)), {}, fractions, 3), "whatever the order of the mapping"


def test_F16_a_copy_under_a_spelling_that_no_accepted_file_has_shares_its_persons_split():
    """The copy is left out, so its id is in the pair alone; the person's own files are filed as 1001."""
    rows = [*cohort(20), acquisition("1001", number=99), acquisition("X", number=100)]
    for seed in range(8):
        placed = assign_splits(rows, (0.4, 0.3, 0.3), seed, one_person=[("00001001", "X")])
        split = {a.participant: a.split for a in placed}
        assert split["1001"] == split["X"]


def test_F16_a_participant_in_two_splits_is_refused_by_name():
    with pytest.raises(CatalogError, match="participant p7 is in train and in test"):
        assert_participant_level([acquisition("p7", "R", split="train"), acquisition("p7", "L", split="test")])
    with pytest.raises(CatalogError, match="participant P-07 is in train and in test"):
        assert_participant_level([acquisition("p7", "R", split="train"), acquisition("P-07", "L", split="test")])


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.sampled_from("abcdefgh")), max_size=10))
def test_ids_that_pairs_link_in_whatever_order_follow_the_first_of_them(pairs):
    graph = np.zeros((8, 8))
    for one, other in pairs:
        graph[ord(one) - ord("a"), ord(other) - ord("a")] = 1
    group = connected_components(graph, directed=False)[1]
    assert _leaders(pairs) == {
        name: next(first for first in "abcdefgh" if group[ord(first) - ord("a")] == group[ord(name) - ord("a")])
        for name in {*"".join(map("".join, pairs))}
    }


@settings(max_examples=50)
@given(cohorts, st.integers(0, 2**31), st.randoms())
def test_splits_depend_on_the_seed_and_on_nothing_else(acquisitions, seed, random):
    def by_participant(rows):
        return {placed.participant: placed.split for placed in assign_splits(rows, seed=seed)}

    # A participant's labels come from one table row, so they agree between acquisitions.
    group = {a.participant: a.participant_labels for a in acquisitions}
    acquisitions = [acquisition(a.participant, a.laterality, a.scanner, **group[a.participant]) for a in acquisitions]
    shuffled = random.sample(acquisitions, len(acquisitions))
    assert by_participant(acquisitions) == by_participant(shuffled)


def test_another_seed_gives_another_split():
    assert assign_splits(cohort(40), seed=0) != assign_splits(cohort(40), seed=1)


def test_recommended_split_wins():
    rows = [*cohort(30), *(acquisition("x", side, recommended_split="validation", number=900) for side in "RL")]
    placed = assign_splits(rows, seed=3)
    assert {a.split for a in placed if a.participant == "x"} == {"val"}
    assert {a.split for a in placed} == set(SPLITS)


def test_a_split_is_balanced_by_the_diagnosis_before_the_group_of_a_study():
    labels = {"label": "c", "study_group": "b", "diagnosis": "a"}
    assert [diagnosis_of(dict(list(labels.items())[:n])) for n in range(4)] == [None, "c", "b", "a"]
    assert diagnosis_of(labels | {"diagnosis": ""}) == "b"


def test_only_known_words_name_a_split():
    words = ("train", " Val ", "TEST", "training", "validation", "valid", "dev", "Testing", "", "excluded", "n/a")
    assert [parse_split(word) for word in words] == [
        "train", "val", "test", "train", "val", "val", "val", "test", None, None, None,
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(5))
def test_scanners_diagnoses_and_eye_counts_have_their_share_of_splits(seed):
    rows = []
    for i in range(400):
        scanner = "zeiss_cirrus" if i % 4 else "topcon_triton"
        group = "healthy" if i % 10 < 7 else "insulin_dependent"
        rows += [acquisition(f"p{i}", side, scanner, study_group=group, number=i) for side in ("RL" if i % 3 else "R")]
    placed = {a.participant: a for a in assign_splits(rows, seed=seed)}
    eyes = Counter(a.participant for a in rows)
    for part in ("zeiss_cirrus", "topcon_triton", "healthy", "insulin_dependent", 1, 2):
        members = [
            a for a in placed.values() if part in (a.scanner, a.participant_labels["study_group"], eyes[a.participant])
        ]
        for split, share in zip(SPLITS, (0.8, 0.1, 0.1), strict=True):
            got = sum(a.split == split for a in members) / len(members)
            assert abs(got - share) < 0.03, f"{part}: {split} has {got:.0%} of {len(members)}"


@pytest.mark.parametrize("count", [3, 4, 5, 9, 10, 11, 100])
def test_no_split_is_empty_once_there_are_three_participants(count):
    assert {a.split for a in assign_splits(cohort(count))} == set(SPLITS)


# Of 9 participants the shares are 4.5, 2.7 and 1.8: the two largest remainders get one more each.
@pytest.mark.parametrize("fractions, counts", [((0.5, 0.2, 0.3), (50, 20, 30)), ((0.5, 0.3, 0.2), (4, 3, 2))])
def test_shares_are_respected_as_exactly_as_whole_participants_allow(fractions, counts):
    placed = {a.participant: a.split for a in assign_splits(cohort(sum(counts)), fractions=fractions)}
    assert Counter(placed.values()) == dict(zip(SPLITS, counts, strict=True))


@pytest.mark.parametrize("fractions", [(0.8, 0.1, 0.2), (1.1, -0.1, 0.0), (0.5, 0.5), (float("nan"), 0.5, 0.5), 0.8])
def test_shares_that_are_no_shares_are_refused_before_files_are_read(tmp_path, fractions):
    with pytest.raises(ConfigError, match="sum to 1"):
        assign_splits(cohort(3), fractions=fractions)
    with pytest.raises(ConfigError, match="sum to 1"):
        scan(tmp_path / "absent", fractions=fractions)


def test_a_scan_draws_the_shares_that_are_asked_for(tmp_path):
    for person in range(10):
        voxels = np.random.default_rng(person).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        write_oct_dicom(tmp_path / "trial" / f"{person}.dcm", voxels, (0.12, 0.0039, 0.0115), participant=f"P{person}")
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "catalog.parquet").write_bytes(b"of another version")
    code, said, err = octfm_here("scan", "trial", "--fractions", "0.5,0.2,0.3", "--workers", "0", cwd=tmp_path)
    assert code == 0, err
    assert "catalog that this scan replaces cannot be read, so whether participants" in said
    found = Catalog.load(tmp_path / "catalog").acquisitions
    assert Counter(a.split for a in found) == {"train": 5, "val": 2, "test": 3}
    for text in ("0.5,0.5", "half,some,rest", "50,20,30"):
        code, _, err = octfm_here("scan", "trial", "--fractions", text, cwd=tmp_path)
        assert code == 1 and err.count("\n") == 1 and "shares for train, val and test" in err, err


def test_a_scan_of_a_folder_that_grew_says_who_changed_the_split_and_how_to_keep_it(tmp_path, monkeypatch):
    """A second scanner in a later visit deals splits anew, and those who were trained on would be tested."""

    def arrive(visit, maker, people):
        (tmp_path / "trial" / visit).mkdir(parents=True)
        for person in people:
            voxels = np.random.default_rng([person, len(visit)]).integers(0, 255, (4, 32, 36), dtype=np.uint8)
            place = tmp_path / "trial" / visit / f"{person}.dcm"
            write_oct_dicom(place, voxels, (0.12, 0.0039, 0.0115), participant=f"10{person}", manufacturer=maker)

    def scanned(*options):
        done = invoke("scan", tmp_path / "trial", "--out", tmp_path / "catalog", "--workers", "0", *options)
        assert done.exit_code == 0, done.output
        rows = Catalog.load(tmp_path / "catalog").to_pandas()
        return " ".join(done.output.split()), rows[["participant", "split"]].drop_duplicates()

    arrive("baseline", "Topcon", range(10, 40))
    said, before = scanned()
    assert "another split" not in said and "another split" not in scanned()[0]
    arrive("month6", "Zeiss", range(10, 42, 3))
    old = (tmp_path / "catalog" / "catalog.parquet").read_bytes()
    said, after = scanned()
    # As if it was killed after the first of two files: the next scan says the same.
    (tmp_path / "catalog" / "catalog.parquet").write_bytes(old)
    assert scanned()[0] == said
    (tmp_path / "catalog" / "catalog.parquet").write_bytes(old)
    told, kept = scanned("--splits-of", tmp_path / "catalog")
    assert "splits are those of catalog.parquet" in told
    assert kept.set_index("participant").split[before.participant].tolist() == before.split.tolist()
    # Saved also where the remark goes into a pipe that nobody reads any more.
    with monkeypatch.context() as closed:
        closed.setattr(options, "echo_line", Mock(side_effect=BrokenPipeError))
        (tmp_path / "catalog" / "data_health.html").unlink()
        assert invoke("scan", tmp_path / "trial", "--out", tmp_path / "catalog", "--workers", "0").exit_code
    assert (tmp_path / "catalog" / "data_health.html").is_file()
    rows = Catalog.load(tmp_path / "catalog").to_pandas()
    assert rows[["participant", "split"]].drop_duplicates().equals(after)
    moved = sum(before.set_index("participant").split != after.set_index("participant").split[before.participant])
    assert moved and f"in another split than before: {moved} participants" in said
    aside = re.search(r"--splits-of (\S+),", said)[1]
    said, kept = scanned("--splits-of", aside)
    of = kept.set_index("participant").split
    assert len(of) == 31 and "another split" not in said
    assert of[before.participant].tolist() == before.split.tolist()
    # A disk that is not there for once must not cost the split of those on it.
    (tmp_path / "trial" / "baseline").rename(tmp_path / "baseline")
    said, _ = scanned("--splits-of", tmp_path / "catalog")
    assert "without a scan now: 20 participants" in said
    aside = re.search(r"--splits-of (\S+),", said)[1]
    (tmp_path / "baseline").rename(tmp_path / "trial" / "baseline")
    said, again = scanned("--splits-of", aside)
    assert sorted(again.to_numpy().tolist()) == sorted(kept.to_numpy().tolist()) and "without a scan" not in said
    # Where nothing can be written next to the catalog, the new one is saved nevertheless.
    shutil.rmtree(aside)
    Path(aside).write_bytes(b"")
    said, again = scanned()
    assert "--splits-of and the store prepared from the old catalog, which could not be kept: " in said
    assert again.equals(after)
    # A scan that accepts no file at all must not cost it either.
    for place in (tmp_path / "trial").rglob("*.dcm"):
        place.write_bytes(b"")
    done = invoke("scan", tmp_path / "trial", "--out", tmp_path / "catalog", "--workers", "0")
    said = " ".join(done.output.split())
    assert done.exit_code == 1 and "without a scan now: 31 participants" in said
    rows = Catalog.load(re.search(r"--splits-of (\S+),", said)[1]).to_pandas()
    assert rows[["participant", "split"]].drop_duplicates().equals(after)


@pytest.mark.parametrize("kept", [True, False])
def test_a_catalog_of_an_older_octfm_is_compared_after_a_kill(kept, tmp_path, monkeypatch):
    """Its key differs, since that octfm worded its advice otherwise; or nothing was kept, as nobody had moved."""
    reject = Reject("/data/a.dcm", "empty_file", "a.dcm: no bytes", 1)
    before = Catalog("trial", assign_splits(cohort(30)), (reject,))
    now, out = replace(before, acquisitions=assign_splits(cohort(30), seed=1)), tmp_path / "catalog"
    with monkeypatch.context() as earlier:
        earlier.setitem(REASONS, "empty_file", replace(REASONS["empty_file"], fix="as an earlier version worded it"))
        old = (before.save(out) / "catalog.parquet").read_bytes()
    if kept:
        told = _about_replaced(out, now, splits_kept=False)
        assert told
    now.save(out)
    (out / "catalog.parquet").write_bytes(old)
    monkeypatch.setattr("time.sleep", lambda _: None)
    again = _about_replaced(out, now, splits_kept=False)
    said = " ".join(again)
    assert "cannot be read" not in said and ("compared with those of catalog.parquet" in said) != kept
    aside = Catalog.load(re.search(r"--splits-of (\S+),", again[-1])[1])
    assert aside.acquisitions == before.acquisitions and (not kept or (again == told and aside == before))


@pytest.mark.parametrize("whole", [BucketPath.of("s3://eyes"), Path("/")])
def test_nothing_is_kept_beside_a_whole_bucket(whole):
    """It would be written into another bucket, which may be anyone's."""
    with pytest.raises(CatalogError, match="next to it"):
        Catalog(root="trial", acquisitions=(), rejects=(), companions=0).beside(whole)


@pytest.mark.parametrize("source", ["catalog", "store"])
def test_people_keep_their_split_through_pseudonyms_and_another_spelling(tmp_path, source):
    trial, key = tmp_path / "trial", ("--pseudonymise", tmp_path / "key")

    def arrive(visit, people):
        (trial / visit).mkdir(parents=True)
        for person in people:
            voxels = np.random.default_rng([int(person), len(visit)]).integers(0, 255, (4, 32, 36), dtype=np.uint8)
            write_oct_dicom(trial / visit / f"{person}.dcm", voxels, (0.12, 0.0039, 0.0115), participant=person)

    def scanned(out, *options):
        done = invoke("scan", trial, "--out", tmp_path / out, "--workers", "0", *options)
        return " ".join((done.output + str(done.exception)).split()), done.exit_code

    def splits(out):
        return {a.participant: a.split for a in Catalog.load(tmp_path / out)}

    arrive("baseline", map(str, range(110, 120)))
    assert scanned("catalog", *key)[1] == 0
    before = splits("catalog")
    if source == "store":
        options = (
            "--key",
            tmp_path / "key",
            "--root",
            trial,
            "image_size=[4,32,32]",
            "--keep-upside-down",
            "--workers",
            "0",
        )
        assert invoke("prepare", tmp_path / "catalog", "--out", tmp_path / "store", *options).exit_code == 0
    arrive("month6", [*map(str, range(310, 330)), *(f"00{person}" for person in range(110, 120))])
    assert scanned("later", *key, "--splits-of", tmp_path / source)[1] == 0
    assert len(splits("later")) == 30 and before.items() <= splits("later").items()
    # Without the key nobody is found; a folder of neither is no catalog.
    said, code = scanned("named", "--splits-of", tmp_path / source)
    assert code == 1 and "none of the 10 participants whose splits are to be kept" in said and "--pseudonymise" in said
    said, code = scanned("named", "--splits-of", trial)
    assert code == 1 and "expected the folder of a catalog or of a store" in said
    assert not (tmp_path / "named").exists()


def test_in_python_a_store_names_the_splits_to_keep_and_a_path_is_refused_before_the_work(tmp_path):
    for person in range(110, 120):
        voxels = np.random.default_rng(person).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        place = tmp_path / "trial" / f"{person}.dcm"
        place.parent.mkdir(exist_ok=True)
        write_oct_dicom(place, voxels, (0.12, 0.0039, 0.0115), participant=str(person))
    first = scan(tmp_path / "trial", seed=1, workers=0)
    before = {a.participant: a.split for a in first}
    settings = Preprocessing(image_size=(4, 32, 32))
    store = prepare(first, tmp_path / "store", settings, workers=0, keep_upside_down=True)
    for known in (first, store, store.rows):
        assert {a.participant: a.split for a in scan(tmp_path / "trial", splits_of=known, workers=0)} == before
    # An earlier version could split two spellings of an id. Whoever was trained on is not tested.
    two = [SimpleNamespace(participant=name, split=split) for name, split in (("110", "train"), ("00110", "test"))]
    for known in (two, two[::-1]):
        again = scan(tmp_path / "trial", splits_of=known, workers=0)
        assert {a.participant: a.split for a in again}["110"] == "train"
    for wrong in (str(store.path), store.path):
        with pytest.raises(TypeError, match=r"splits_of: expected a Catalog or a Store, got .*octfm.Store.open"):
            scan(tmp_path / "absent", splits_of=wrong)


@given(
    st.lists(st.sampled_from(SPLITS), min_size=1, max_size=12), st.integers(0, 12), st.integers(0, 50), st.booleans()
)
def test_kept_splits_stay_whatever_else_is_drawn(given_splits, new, seed, recommends):
    kept = {f"p{i}": split for i, split in enumerate(given_splits)}
    labels = {"recommended_split": "train"} if recommends else {}
    placed = assign_splits(cohort(len(kept) + new, **labels), seed=seed, kept=kept.get)
    splits = {a.participant: a.split for a in placed}
    assert kept.items() <= splits.items() and len(splits) == len(kept) + new
    if not recommends and new >= 3:
        assert {splits[p] for p in splits.keys() - kept.keys()} == set(SPLITS)
