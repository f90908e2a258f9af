"""A pseudonymised catalog and its store tell nothing that the key's holder alone should know, and train exactly like
the plain ones."""

import errno
import os
import re
from dataclasses import asdict, replace
from datetime import date
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from octfm.catalog.acquisition import Reject
from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.participants import pseudonyms
from octfm.catalog.participants.pseudonyms import locate, pseudonymise, read_key, withheld
from octfm.catalog.participants.safe_values import is_known_protocol, is_known_scanner
from octfm.catalog.scan import scan
from octfm.errors import ConfigError, ReadError, StoreError
from octfm.formats.names import slugify
from octfm.io.location import write_whole
from octfm.phantom import write_phantom
from octfm.store.prepare import prepare
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing
from support.bscan_set import layered, write_image
from support.canaries import everything_in
from support.command_line import octfm_here

KEY = b"a key that nobody can guess"
SMALL = Preprocessing(image_size=(8, 64, 48), target_spacing=(0.9, 0.03, 0.15))


@pytest.fixture(scope="module")
def clinic(tmp_path_factory) -> Path:
    return write_phantom(tmp_path_factory.mktemp("geheim") / "cohort", 13, 5, size=(8, 64, 48), defects=1.0, workers=1)


@pytest.fixture(scope="module")
def catalog(clinic) -> Catalog:
    return scan(clinic, workers=0)


def secrets_of(catalog: Catalog) -> set[str]:
    files = [Path(x.uri) for x in (*catalog.acquisitions, *catalog.rejects, *catalog.skipped)]
    return (
        {catalog.root, Path(catalog.root).parent.name, "structural_oct"}
        | {a.participant for a in catalog.acquisitions}
        | {a.sop_instance_uid for a in catalog.acquisitions}
        | {path.name for path in files}
    )


def test_nothing_of_the_original_ids_uids_paths_and_dates_is_left(clinic, catalog, tmp_path, capfd):
    one = ("--workers", "1")
    code, out, err = octfm_here("scan", clinic, "--out", "catalog", "--pseudonymise", "key", *one, cwd=tmp_path)
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
    code, more, err = octfm_here(*command, *one, cwd=tmp_path)
    assert code == 0, err
    hidden, store = Catalog.load(tmp_path / "catalog"), Store.open(tmp_path / "prepared")
    assert len(hidden.acquisitions) == len(catalog.acquisitions) == len(store)
    found = str(asdict(hidden)) + str([asdict(row) for row in store.rows]) + repr(store.unprepared()) + out + more + err
    found += "".join(capfd.readouterr())  # of the children that read files
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


def test_a_key_that_others_may_read_is_named(tmp_path, monkeypatch, capsys):
    """On exFAT, NTFS and a Windows disk in WSL every file has mode 777, whatever is asked for."""
    monkeypatch.setattr(Path, "touch", lambda self, mode, **_: (self.write_bytes(b""), self.chmod(0o777)))
    key = read_key(tmp_path / "key")
    assert "key: this disk keeps no permissions, so others may read the key" in capsys.readouterr().err
    assert read_key(tmp_path / "key") == key and not capsys.readouterr().err, "only when it is made"
    write_whole(tmp_path / "exported.key", b"key", private=True)
    assert "exported.key: this disk keeps no permissions" in capsys.readouterr().err


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


def test_layer_heights_stay_linked_to_their_volume_by_pseudonym(catalog):
    volume = catalog.acquisitions[0]
    heights = Reject(f"{catalog.root}/heights.dcm", "layer_heights", "", 9, refers_to=volume.sop_instance_uid)
    hidden = pseudonymise(replace(catalog, skipped=(heights,)), KEY)
    (own,) = pseudonymise(replace(catalog, acquisitions=(volume,)), KEY).acquisitions
    assert hidden.layer_heights(own) == (hidden.skipped[0].uri,) and volume.sop_instance_uid not in str(asdict(hidden))


def test_the_key_decides_and_dates_keep_their_intervals(catalog):
    def dated(a, day):
        return replace(
            a,
            participant_labels={
                "visit": day,
                "scan_date": "20240301",
                "note": "seen 3.12.2023",
                "exam_date": "2024-02-31",
                "baseline_date": "1-Mar-2024",
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
    assert labels.keys() == {"visit", "scan_date", "hba1c"}, "dates that cannot be read do not pass"
    assert labels["hba1c"] == "6.1"


def test_an_id_in_two_spellings_has_one_pseudonym_and_every_other_id_keeps_its_own(catalog):
    """Under two, nothing would show that folds test a person whom they have learned from."""

    def pseudonyms(*ids):
        """By place of the file: rows of a pseudonymous catalog are in another order."""
        labels = {"visit": "2024-03-01"}
        rows = [
            replace(
                catalog.acquisitions[0], uri=name, sop_instance_uid=name, participant=name, participant_labels=labels
            )
            for name in ids
        ]
        hidden = pseudonymise(replace(catalog, acquisitions=tuple(rows)), KEY).acquisitions
        places = {pseudonymise(replace(catalog, acquisitions=(row,)), KEY).acquisitions[0].uri: row.uri for row in rows}
        return {places[a.uri]: (a.participant, a.participant_labels["visit"]) for a in hidden}

    alone = {name: pseudonyms(name)[name] for name in ("1001", "MRN-12", "P0007", "1-11", "11-1")}
    found = pseudonyms(*alone)
    assert found == alone and len(set(found.values())) == 5
    found = pseudonyms(*alone, "00001001", "mrn_0012")
    assert found == alone | {"00001001": alone["1001"], "mrn_0012": alone["MRN-12"]}


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
            CatalogError, match=r"none of the \d+ acquisitions of the catalog is below it under this key"
        ):
            locate(hidden, root, key)


@pytest.mark.slow
def test_single_bscans_of_one_folder_are_found_again(tmp_path, monkeypatch):
    images = [write_image(tmp_path / "set" / f"P{n // 2}" / f"{n % 2}.png", layered(n)) for n in range(4)]
    plain = scan(tmp_path / "set", layouts=("line",), participant_from="{participant}/*")
    hidden = pseudonymise(plain, KEY)
    places = locate(hidden, tmp_path / "set", KEY)
    assert sorted(places.values()) == sorted(map(str, images))
    store = prepare(hidden, tmp_path / "store", SMALL, locations=places, progress=False)
    assert {row.layout for row in store.rows} == {"line"} and len(store) == 4
    (tmp_path / "set" / "broken.e2e").write_bytes(b"CMDb" + bytes(40))
    with pytest.raises(CatalogError, match="none of the 4 acquisitions of the catalog is below it"):
        locate(hidden, tmp_path / "set", KEY + b"!")
    # A file that was deleted stopped everything, where a catalog with paths names it and goes on.
    Path(images[0]).unlink()
    opened, volumes_in = list[str](), pseudonyms.volumes_in
    monkeypatch.setattr(pseudonyms, "volumes_in", lambda uri, *_: opened.append(uri) or volumes_in(uri))
    found = locate(hidden, tmp_path / "set", KEY)
    assert [Path(uri).name for uri in opened] == ["broken.e2e"], "for a clinic, opening each file takes hours"
    assert sorted(found.values()) == sorted(map(str, images[1:]))
    assert len(prepare(hidden, tmp_path / "store", SMALL, locations=found, progress=False)) == 4
    rest = prepare(hidden, tmp_path / "later", SMALL, locations=found, progress=False)
    (lost,) = rest.unprepared()
    assert len(rest) == 3 and lost.code == "unreadable"


@pytest.mark.slow
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
    new = tmp_path / "keys" / "new"
    assert read_key(new) == read_key(new) and len(read_key(new)) == 64
    with pytest.raises(CatalogError, match="no such key file"):
        read_key(tmp_path / "absent", make=False)
    code, _, err = octfm_here("scan", tmp_path / "absent", "--pseudonymise", "short", cwd=tmp_path)
    assert code == 1 and "a key of 6 bytes can be guessed" in err, "before a scan of hours"
    code, _, err = octfm_here("scan", clinic, "--pseudonymise", new, "--extract", "x", cwd=tmp_path)
    assert code == 1 and "read the archives without unpacking" in err and err.count("\n") == 1


def labelled(catalog: Catalog, *people: dict[str, str]) -> Catalog:
    """A catalog of one acquisition of each of these people, with these columns."""
    first = catalog.acquisitions[0]
    return replace(
        catalog,
        acquisitions=tuple(
            replace(
                first, uri=f"{catalog.root}/{i}", sop_instance_uid=f"1.{i}", participant=f"{i}", participant_labels=own
            )
            for i, own in enumerate(people)
        ),
        rejects=(),
        skipped=(),
    )


def labels_of(catalog: Catalog, own: dict[str, str], keep: tuple[str, ...] = ()) -> dict[str, str]:
    return pseudonymise(labelled(catalog, own), KEY, keep).acquisitions[0].participant_labels


@pytest.mark.parametrize(
    ("column", "value"),
    [
        *(
            (name, "Geheim")
            for name in ("Patient", "vorname", "nachname", "initials", "remarks", "city", "diagnosis", "sex")
        ),
        *(
            (name, "4711")
            for name in ("patient_id", "medical_record_number", "nhs_number", "mobile", "age", "visit_date")
        ),
        *((name, "12-Mar-1958") for name in ("date_of_birth", "age", "diagnosis", "visit_date", "hba1c", "severity")),
        ("diagnosis", "AMD, referred by Dr Geheim"),
        ("diagnosis", "A.B."),
        *((name, "李明") for name in ("diagnosis", "sex", "race", "age")),
        ("diagnosis", "dme Ø"),
        ("age", "121"),
        ("diagnosis", "03 12 58"),
        ("diagnosis", "aged 95"),
        ("diagnosis", "dme 0045"),
        ("diagnosis", "Patient 12"),
        ("case", "17"),
        ("diabetes_duration", "95"),
        ("study_group", "group 12031958"),
        ("recommended_split", "excluded by Geheim"),
        ("hypertension", "see letter"),
        ("race", "Geheim"),
        ("cst_um", "1958.0312"),
        ("clinical_site", "Geheim hospital"),
    ],
)
def test_what_is_not_known_to_be_safe_does_not_pass(catalog, column, value):
    passed = labels_of(catalog, {column: value})
    assert value not in repr(passed) and "Geheim" not in repr(passed)
    assert labels_of(catalog, {column: value}, (column,)) in ({column: value}, {}), (
        "kept as it is where the user says so"
    )


@pytest.mark.parametrize(
    ("column", "value", "passes_as"),
    [
        ("age", "71", "71"),
        ("age", "71.9", "71"),
        ("Age", "90", "90"),
        ("age", "104", "90"),
        ("sex", "Female", "Female"),
        ("diagnosis", "geographic_atrophy", "geographic_atrophy"),
        ("diagnosis", "drusen;dme", "drusen;dme"),
        ("diagnosis", "H35.3", "H35.3"),
        ("diagnosis", "Proliferative diabetic retinopathy (left eye)", "Proliferative diabetic retinopathy (left eye)"),
        ("study_group", "pre_diabetes_lifestyle_controlled", "pre_diabetes_lifestyle_controlled"),
        ("dr_grade", "3", "3"),
        ("laterality", "L", "L"),
        ("laterality", "R", "R"),
        ("study_arm", "B", "B"),
        ("study_arm", "placebo", "placebo"),
        ("diagnosis", "nAMD", "nAMD"),
        ("cst_um", "287.5", "287.5"),
        ("recommended_split", "training", "train"),
        ("retinal_oct", "TRUE", "TRUE"),
        ("clinical_site", "UAB", "UAB"),
        ("race", "Black or African American", "Black or African American"),
    ],
)
def test_numbers_and_categories_of_known_meaning_pass(catalog, column, value, passes_as):
    assert labels_of(catalog, {column: value}) == {column: passes_as}


KNOWN = (
    "age",
    "sex",
    "race",
    "diagnosis",
    "study_group",
    "clinical_site",
    "recommended_split",
    "hba1c",
    "visit_date",
    "smoking",
)


COLUMN_NAMES = st.sampled_from(KNOWN) | st.text(min_size=1, max_size=12)
CELLS = st.text(max_size=30) | st.from_regex(r"[A-Z][a-z]{2,9}( [A-Z][a-z]+)?|\d{1,9}", fullmatch=True)


@given(own=st.dictionaries(COLUMN_NAMES, CELLS))
def test_only_known_columns_with_safe_values_are_written(catalog, own):
    """Whatever a column is called and holds: it passes as a safe value of a known column, or nothing of it does."""
    from octfm.catalog.participants.safe_values import is_known, safe_value

    passed = labels_of(catalog, own)
    for column, value in passed.items():
        assert is_known(column)
        assert value == safe_value(column, own[column]) or re.fullmatch(r"site_[0-9a-f]{8}", value) or "date" in column


def test_a_new_key_is_on_the_disk_before_anything_depends_on_it(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    key = tmp_path / "key"
    assert read_key(key) and synced == [key.stat().st_ino]


def test_the_disk_is_full_while_a_key_is_made(tmp_path, monkeypatch):
    """An empty file stayed, and the same command, with room again, refused it as a key that can be guessed."""
    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            read_key(tmp_path / "key")
    assert len(read_key(tmp_path / "key")) == 64


def test_words_of_headers_become_codes_that_keep_groups_apart(catalog):
    first, *_ = catalog.acquisitions
    named = [
        replace(first, scanner=s, protocol=p) for s, p in (("geheim_oct", "geheim_cube"), ("topcon_triton", "line_5"))
    ]
    two = replace(catalog, acquisitions=tuple(replace(a, uri=f"{catalog.root}/{i}") for i, a in enumerate(named)))
    hidden = pseudonymise(two, KEY)
    assert "geheim" not in str(asdict(hidden))
    names = {a.scanner for a in hidden.acquisitions}
    assert "topcon_triton" in names and any(re.fullmatch(r"scanner_[0-9a-f]{8}", name) for name in names)
    assert "line_5" in {a.protocol for a in hidden.acquisitions}
    assert {a.scanner for a in pseudonymise(two, KEY + b"!").acquisitions} != names, "nobody can guess the code"


@pytest.mark.parametrize(
    "model", ["topcon_3doct_2000", "heidelberg_spectralis_flex", "zeiss_cirrus_photo_800", "tomey_ss_1000_casia2"]
)
def test_scanners_of_the_market_are_known(model):
    assert is_known_scanner(model)


@pytest.mark.parametrize(
    "name", ["3D Macula(6.0x6.0mm)", "3D(H) Wide 12x9mm", "Volume 20x15deg", "Spectralis, PPoL, Mac, HR"]
)
def test_protocols_as_vendors_write_them_are_known(name):
    assert is_known_protocol(slugify(name))
    assert not is_known_protocol(slugify(f"{name} Geheim"))


def test_what_is_withheld_is_counted_by_column(catalog):
    three = labelled(
        catalog,
        {"age": "60", "Patient": "Geheim", "diagnosis": "healthy", "visus": "0.8"},
        {"age": "n/a", "Patient": "", "diagnosis": "seen by Geheim", "visus": "0.7"},
        {"age": "61", "Patient": "Secret", "diagnosis": "dme", "visus": ""},
    )
    assert withheld(three) == {"Patient": (2, 2), "diagnosis": (1, 3), "visus": (2, 2)}
    assert withheld(three, ["visus"]) == {"Patient": (2, 2), "diagnosis": (1, 3)}
    with pytest.raises(ConfigError, match=r"--keep-columns visis: no participant has such a column"):
        withheld(three, ["visis"])
    assert withheld(replace(three, acquisitions=()), ["visus"]) == {}, "where nothing is accepted, that is the error"


@pytest.mark.parametrize(
    "written",
    [
        "17 May 2023", "May 17, 2023", "17-May-2023", "3. Dezember 1957", "born Dec 1957", "Dec-57", "2023-05", "05/2023",
        "2023 05 17", "12 03 1957", "2023‑05‑17", "20230517101112.123", "1957年12月3日",
        "1957_12_03", "3_12_1957", "born 19571203", "December 3rd, 1957", "3 de diciembre de 1957", "3 décembre 1957",
        "3 gennaio 1957", "1957 Dec", "12.1957", "12. 1957", "1957.12", "3 grudnia 1957", "3. декабря 1957", "3.XII.1957",
        "XII 1957", "Q4 1957", "1957-Q4", "1957-W49", "1957W49", "1957-337", "昭和32年", "1957년 12월",
    ],
)  # fmt: skip
def test_a_kept_column_passes_no_date_that_cannot_be_shifted(catalog, written):
    assert labels_of(catalog, {"seen": written}, ("seen",)) == {}
    assert withheld(labelled(catalog, {"seen": written}), ["seen"]) == {"seen": (1, 1)}


@pytest.mark.parametrize(
    "value",
    [
        "20/40",
        "20/2000",
        "1957",
        "3D OCT-2000",
        "-1.25 -0.50 180",
        "12.2034",
        "SN60WF 20.5",
        "1 of 4",
        "12.5",
        "12.19",
        "13.1957",
        "250.12",
        "1957.5",
        "12.19571",
        "Cirrus 5000",
        "6 mm",
        "IV 20",
        "OCT Cirrus 4000",
        "2019.25",
    ],
)
def test_a_kept_column_passes_what_is_no_date(catalog, value):
    assert labels_of(catalog, {"seen": value}, ("seen",)) == {"seen": value}


def test_a_kept_column_of_measurements_loses_no_number_that_could_be_a_month(catalog):
    """1.3 % of numbers of four decimals look like 7.1957."""
    measured = [f"{n / 1000 + 5.0003:.4f}" for n in range(0, 3000, 100)]
    months = [f"{n % 12 + 1}.{1930 + n}" for n in range(30)]
    few, among_words = measured[:18], [*measured, *(f"{n} mm" for n in range(12))]
    mixed = ["12/2019", "5.57", "2019", "n/a"] * 8
    for column, passes in ((measured, True), (months, False), (mixed, False), (few, False), (among_words, False)):
        rows = labelled(catalog, *({"seen": value} for value in ["7.1957", *column]))
        shown = [a.participant_labels.get("seen") for a in pseudonymise(rows, KEY, ("seen",)).acquisitions]
        assert ("7.1957" in shown) == passes
        assert ("7.1957" not in str(withheld(rows, ["seen"]))) and ("seen" in withheld(rows, ["seen"])) != passes
    remark = labelled(catalog, *({"seen": value} for value in ["5.0003, born 3.12.1957", *measured]))
    assert withheld(remark, ["seen"]) == {"seen": (1, 31)}, "a number with a date behind it is no measurement"


def test_what_only_some_files_of_a_person_state_is_kept_and_counted(catalog):
    """Tables give labels to files; the last file of each person has none."""
    first, *_ = labelled(catalog, {"label": "Meier's"}).acquisitions
    last = replace(first, uri=f"{first.uri}2", sop_instance_uid="1.9", participant_labels={})
    of_files = replace(catalog, acquisitions=(first, last))
    assert withheld(of_files, ["label"]) == {} and withheld(of_files) == {"label": (1, 1)}


def test_a_key_inside_the_catalog_that_it_hides_is_refused(clinic, tmp_path):
    for key in ("catalog/key", "catalog/../catalog/sub/key"):
        code, _, err = octfm_here("scan", clinic, "--out", "catalog", "--pseudonymise", key, cwd=tmp_path)
        assert code == 1 and "would get its key with it" in err and err.count("\n") == 1
    assert not (tmp_path / "catalog").exists()


def test_a_store_holds_either_names_or_pseudonyms(catalog, tmp_path):
    few = replace(catalog, acquisitions=catalog.acquisitions[:2])
    hidden = pseudonymise(few, KEY)
    places = locate(hidden, catalog.root, KEY)
    prepare(few, tmp_path / "named", SMALL, workers=0, progress=False)
    prepare(hidden, tmp_path / "hidden", SMALL, workers=0, progress=False, locations=places)
    with pytest.raises(StoreError, match="the store has names and paths, the catalog pseudonyms"):
        prepare(hidden, tmp_path / "named", SMALL, workers=0, progress=False, locations=places)
    with pytest.raises(StoreError, match="the store has pseudonyms, the catalog names and paths"):
        prepare(few, tmp_path / "hidden", SMALL, workers=0, progress=False)
    assert "pseudonym:" not in (tmp_path / "named" / "rows.jsonl").read_text()
    again = prepare(hidden, tmp_path / "hidden", SMALL, workers=0, progress=False, locations=places)
    assert len(again) == 2, "the same catalog goes on"


def test_a_store_keeps_its_key(catalog, tmp_path):
    """Under another key a person who comes again would be somebody else, perhaps in another split."""
    few = replace(catalog, acquisitions=catalog.acquisitions[:2])

    def preparing(key: bytes) -> Store:
        hidden = pseudonymise(few, key)
        places = locate(hidden, catalog.root, key)
        return prepare(hidden, tmp_path / "store", SMALL, workers=0, progress=False, locations=places, key=key)

    preparing(KEY)
    rows = (tmp_path / "store" / "rows.jsonl").read_bytes()
    with pytest.raises(StoreError, match=r"its pseudonyms were made with another key .* prepare into a new folder"):
        preparing(b"another key of the clinic")
    assert (tmp_path / "store" / "rows.jsonl").read_bytes() == rows
    assert KEY not in (tmp_path / "store" / "store.json").read_bytes()
    assert len(preparing(KEY)) == 2


def test_a_key_that_is_not_that_of_the_catalog_is_named_as_a_cause(catalog, tmp_path):
    hidden = pseudonymise(replace(catalog, acquisitions=catalog.acquisitions[:2]), KEY)
    places = locate(hidden, catalog.root, KEY)
    with pytest.raises(
        StoreError, match=r"2 with changed_since_scan, .*; or the key is not that of the catalog's pseudo"
    ):
        prepare(hidden, tmp_path / "store", SMALL, workers=0, progress=False, locations=places, key=KEY[:-1])


def test_kept_columns_pass_and_withheld_ones_are_named_on_the_terminal(clinic, tmp_path):
    people = (clinic / "participants.tsv").read_text().splitlines()
    table = [
        f"{people[0]}\tvisus\tremarks_of_eye",
        *(f"{line}\t0.{i}\tGeheim{i}" for i, line in enumerate(people[1:], 1)),
    ]
    (tmp_path / "people.tsv").write_text("\n".join(table) + "\n")
    command = ("scan", clinic, "--out", "catalog", "--participants", "people.tsv", "--no-images", "--workers", 1)
    code, out, err = octfm_here(*command, "--pseudonymise", "key", "--keep-columns", "visus", cwd=tmp_path)
    assert code == 0 and re.search(
        r"withheld values that are not known to be safe, in 1 columns: 'remarks_of_eye' \(\d+ of \d+ ", err
    ), err
    assert "Geheim" not in out + err
    columns = {c for a in Catalog.load(tmp_path / "catalog").acquisitions for c in a.participant_labels}
    assert {"visus", "age", "study_group"} <= columns and "remarks_of_eye" not in columns
    code, _, err = octfm_here(*command, "--keep-columns", "visus", cwd=tmp_path)
    assert code == 1 and "--keep-columns: only applies with --pseudonymise" in err


def test_quarantine_of_a_pseudonymous_catalog_quotes_no_file(catalog, tmp_path):
    hidden = pseudonymise(catalog, KEY)
    few = replace(hidden, acquisitions=hidden.acquisitions[:2])

    def read(uri):
        raise ReadError("decoder_crashed", f"{tmp_path}/geheim.zip!/anna/geheim.dcm: geheim.json says Geheim") from None

    with pytest.raises(StoreError) as error:
        prepare(few, tmp_path / "store", SMALL, workers=0, progress=False, read=read)
    written = (tmp_path / "store" / "unprepared.jsonl").read_text()
    assert "eheim" not in str(error.value) + written and written.count("decoder_crashed") == 2
