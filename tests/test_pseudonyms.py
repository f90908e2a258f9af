"""A pseudonymised catalog and its store tell nothing that the key's holder alone should know, and train exactly like the plain ones."""

import re
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest

from octfm.data.acquisition import Reject
from octfm.data.catalog import Catalog, CatalogError, scan
from octfm.data.phantom import write_phantom
from octfm.data.prepare import prepare
from octfm.data.preprocessing import Preprocessing
from octfm.data.pseudonyms import locate, pseudonymise, read_key
from octfm.data.store import Store
from octfm.errors import StoreError
from test_cli import octfm_command
from test_privacy import everything_in

KEY = b"a key that nobody can guess"
SMALL = Preprocessing(image_size=(8, 64, 48), target_spacing=(0.9, 0.03, 0.15))


@pytest.fixture(scope="module")
def clinic(tmp_path_factory) -> Path:
    return write_phantom(tmp_path_factory.mktemp("geheim") / "cohort", 13, 5, size=(8, 64, 48), defects=1.0, workers=1)


@pytest.fixture(scope="module")
def catalog(clinic) -> Catalog:
    return scan(clinic)


def secrets_of(catalog: Catalog) -> set[str]:
    files = [Path(x.uri) for x in (*catalog.acquisitions, *catalog.rejects, *catalog.skipped)]
    return (
        {catalog.root, Path(catalog.root).parent.name, "structural_oct"}
        | {a.participant for a in catalog.acquisitions}
        | {a.sop_instance_uid for a in catalog.acquisitions}
        | {path.name for path in files}
    )


def test_nothing_of_the_original_ids_uids_paths_and_dates_is_left(clinic, catalog, tmp_path):
    code, out, err = octfm_command("scan", clinic, "--out", "catalog", "--pseudonymise", "key", cwd=tmp_path)
    assert code == 0, err
    command = (
        "prepare",
        "catalog",
        "image_size=[8,64,48]",
        "target_spacing=[0.9,0.03,0.15]",
        "--key",
        "key",
        "--root",
        clinic,
    )
    code, more, err = octfm_command(*command, cwd=tmp_path)
    assert code == 0, err
    hidden, store = Catalog.load(tmp_path / "catalog"), Store.open(tmp_path / "prepared")
    assert len(hidden.acquisitions) == len(catalog.acquisitions) == len(store)
    found = repr(hidden) + repr(store.rows) + repr(store.unprepared()) + out + more + err
    raw = everything_in(tmp_path / "catalog") + everything_in(tmp_path / "prepared")
    for secret in secrets_of(catalog):
        assert secret not in found and secret.encode() not in raw, secret
    key = read_key(tmp_path / "key")
    for a in catalog.acquisitions:  # one by one: a shifted date may be another person's true one
        (own,) = pseudonymise(replace(catalog, acquisitions=(a,)), key).acquisitions
        assert (
            own in hidden.acquisitions
            and own.participant_labels["study_visit_date"] != a.participant_labels["study_visit_date"]
        )
    assert "<img" in (tmp_path / "catalog" / "data_health.html").read_text(), "outliers are found through the key"
    assert (tmp_path / "key").stat().st_mode & 0o077 == 0


def test_everything_else_stays_true(catalog):
    hidden = pseudonymise(catalog, KEY)

    def told(c: Catalog) -> dict:
        return c.summary() | {
            "shapes": sorted((a.shape, a.spacing_mm, a.scanner, a.split, a.flags) for a in c.acquisitions)
        }

    assert told(hidden) == told(catalog)
    assert [a.uri for a in hidden.acquisitions] == sorted(a.uri for a in hidden.acquisitions)
    assert all(re.fullmatch(r"2\.25\.\d{1,39}", a.sop_instance_uid) for a in hidden.acquisitions), "a valid UID"
    assert len({a.sop_instance_uid for a in hidden.acquisitions}) == len(catalog.acquisitions)


def test_layer_heights_stay_linked_to_their_volume_and_name_it_by_its_pseudonym(catalog):
    volume = catalog.acquisitions[0]
    heights = Reject(f"{catalog.root}/heights.dcm", "layer_heights", "", 9, refers_to=volume.sop_instance_uid)
    hidden = pseudonymise(replace(catalog, skipped=(heights,)), KEY)
    (own,) = pseudonymise(replace(catalog, acquisitions=(volume,)), KEY).acquisitions
    assert hidden.layer_heights(own) == (hidden.skipped[0].uri,) and volume.sop_instance_uid not in repr(hidden)


def test_the_key_decides_and_dates_keep_their_intervals(catalog):
    def dated(a, day):
        return replace(
            a,
            participant_labels={
                "visit": day,
                "scan_date": "20240301",
                "note": "seen 3.12.2023",
                "bad": "2024-02-31",
                "hba1c": "6.1",
            },
        )

    first, second = (
        replace(catalog.acquisitions[0], uri=f"{catalog.root}/{i}", sop_instance_uid=f"1.{i}") for i in range(2)
    )
    two = replace(catalog, acquisitions=(dated(first, "2024-03-01"), dated(second, "2024-03-31")))
    one, again, other = pseudonymise(two, KEY), pseudonymise(two, KEY), pseudonymise(two, KEY + b"!")
    assert one == again
    assert {a.participant for a in one.acquisitions}.isdisjoint(a.participant for a in other.acquisitions)
    visits = sorted(date.fromisoformat(a.participant_labels["visit"]) for a in one.acquisitions)
    assert (visits[1] - visits[0]).days == 30 and 0 < (date(2024, 3, 1) - visits[0]).days <= 365
    labels = one.acquisitions[0].participant_labels
    assert labels["scan_date"] == visits[0].strftime("%Y%m%d"), "the same shift for every date of a person"
    assert (labels["note"], labels["bad"], labels["hba1c"]) == ("", "", "6.1"), (
        "unreadable dates are emptied, numbers kept"
    )


def test_files_are_found_again_by_key_and_root_only_even_after_a_move(clinic, catalog, tmp_path):
    hidden = pseudonymise(catalog, KEY)
    moved = tmp_path / "moved"
    moved.symlink_to(clinic)
    for root in (clinic, moved):
        places = locate(hidden, root, KEY)
        assert {Path(place).relative_to(root) for place in places.values()} == {
            Path(a.uri).relative_to(clinic) for a in catalog.acquisitions
        }
    for root, key in ((clinic, KEY + b"!"), (clinic / "retinal_oct", KEY)):
        with pytest.raises(
            CatalogError, match=r"\d+ of \d+ acquisitions of the catalog are not below it under this key"
        ):
            locate(hidden, root, key)


def test_the_store_is_the_same_but_for_the_names(catalog, clinic, tmp_path):
    hidden = pseudonymise(catalog, KEY)
    few = replace(hidden, acquisitions=hidden.acquisitions[:4])
    places = locate(few, clinic, KEY)
    plain = replace(catalog, acquisitions=tuple(a for a in catalog.acquisitions if a.uri in places.values()))
    one = prepare(few, tmp_path / "hidden", SMALL, workers=1, progress=False, locations=places)
    two = prepare(plain, tmp_path / "plain", SMALL, workers=1, progress=False)
    assert sorted(row.checksum for row in one.rows) == sorted(row.checksum for row in two.rows)
    Path(tmp_path / "bad.dcm").write_bytes(b"")
    broken = dict.fromkeys(places, str(tmp_path / "bad.dcm"))
    with pytest.raises(StoreError, match="pseudonym:") as error:
        prepare(few, tmp_path / "third", SMALL, workers=1, progress=False, locations=broken)
    assert "bad.dcm" not in str(error.value)
    with pytest.raises(StoreError, match="names files by pseudonyms; give its key and root"):
        prepare(few, tmp_path / "fourth", SMALL, workers=1, progress=False)


def test_keys_that_can_be_guessed_and_half_given_options_are_refused(clinic, tmp_path):
    (tmp_path / "short").write_text("secret\n")
    with pytest.raises(CatalogError, match="a key of 6 bytes can be guessed"):
        read_key(tmp_path / "short")
    assert read_key(tmp_path / "new") == read_key(tmp_path / "new") and len(read_key(tmp_path / "new")) == 64
    with pytest.raises(CatalogError, match="no such key file"):
        read_key(tmp_path / "absent", make=False)
    code, _, err = octfm_command("scan", clinic, "--pseudonymise", "new", "--extract", "x", cwd=tmp_path)
    assert code == 1 and "archives are read in place" in err and err.count("\n") == 1
