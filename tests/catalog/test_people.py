"""Whose scan a file is: a guess from folders is right or the scan stops, and a pattern decides."""

import json
import os
import re
import shlex
import shutil
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from octfm.catalog.catalog import Catalog, assign_splits
from octfm.catalog.examination import join_parts
from octfm.catalog.participants.folders import doubts_about_people
from octfm.catalog.participants.patterns import Pattern, PeopleError, Place, eye_in_path
from octfm.catalog.participants.people import AmbiguousPeople, Whose, find_people
from octfm.catalog.participants.pseudonyms import pseudonymise
from octfm.catalog.scan import scan
from octfm.demo import run_demo
from octfm.demo.request import Request
from octfm.errors import ConfigError
from octfm.io import bucket, ranged
from octfm.io.location import write_whole
from octfm.report.data_health import write_data_health
from support.command_line import octfm_here
from support.dicom_files import write_oct_dicom
from support.examples import examples
from support.store_samples import acquisition
from support.vendor_files import write_images

ROOT = Path("/data/clinic")


def found_in(paths, patterns=(), known=None) -> dict[str, Whose]:
    scans = {str(ROOT / path): (known or {}).get(path, "") for path in paths}
    whose = find_people(scans, ROOT, [Pattern.parse(text) for text in patterns])
    return {path: whose[str(ROOT / path)] for path in paths}


def people(paths, patterns=(), known=None) -> list[tuple[str, str]]:
    return [(w.participant, "".join(sorted(w.eyes))) for w in found_in(paths, patterns, known).values()]


def test_letters_before_a_number_may_be_a_person_though_a_folder_of_training_images_ends_in_them():
    paths = [f"TR{i:03}_{eye}.png" for i in range(1, 4) for eye in ("OD", "OS")]
    with pytest.raises(AmbiguousPeople, match=r"'TR001' may be .* --participant-from '\{participant\}_\{eye\}'"):
        people(paths)
    assert people(paths, ["{participant}_{eye}"]) == [(f"TR{i:03}", eye) for i in range(1, 4) for eye in "RL"]
    nnunet = [f"images{part}/p{i}_{eye}.png" for i, part in enumerate(["Tr", "Tr", "Ts"]) for eye in ("OD", "OS")]
    assert {name for name, _ in people(nnunet)} == {"p0", "p1", "p2"}


# ---- any tree: right, or the scan stops
# ---------------------------------------------------------------------------------------------

EYES = [
    ("OD", "OS"), ("R", "L"), ("right", "left"), ("rechts", "links"), ("droit", "gauche"), ("OD", "OG"), ("derecho", "izquierdo"),
    ("RightEye", "LeftEye"), ("re", "le"), ("destro", "sinistro"), ("rechtes Auge", "linkes Auge"), ("œil droit", "œil gauche"),
]  # fmt: skip
NAMES = [
    ["Meyer", "Schulz", "Müller", "Le Gall", "O'Brien", "Rossi"],
    ["p1", "p2", "p3", "p10", "p11", "p12"],
    ["patient_001", "patient_002", "patient_003", "patient_004", "patient_005", "patient_006"],
    ["sub-01", "sub-02", "sub-03", "sub-04", "sub-05", "sub-06"],
    ["1001", "1002", "4011", "7003", "1999", "2003"],
    ["001", "002", "003", "004", "005", "006"],
    ["1", "2", "3", "10", "11", "12"],
    ["AB12345", "AB12346", "CD00017", "XY99120", "XY99121", "CD00018"],
    ["OS", "AB", "DM", "OD", "LR", "GA"],
    ["A12", "A13", "B01", "B02", "V1", "V2"],
    ["AMD1", "AMD2", "DME1", "NORMAL1", "NORMAL2", "CNV7"],
    ["210503", "998877", "120365", "311299", "445566", "010101"],
    ["Meyer_Anna", "Meyer_Otto", "van_der_Berg", "Links_Petra", "May_Li", "Right_Joe"],
    ["20030001", "20030002", "19990101", "20210503", "31415926", "27182818"],
    ["OCT1001", "OCT1002", "OCT1003", "OCT1004", "OCT1005", "OCT1006"],
    ["Patient A", "Patient B", "Patient C", "Patient D", "Patient E", "Patient F"],
    ["R1001", "L1001", "R1002", "L1002", "R1003", "L1003"],
]
VISITS = [
    ["2021-05-03", "2022-06-01"], ["visit1", "visit2"], ["V1", "V2"], ["baseline", "month12"], ["M00", "M12"], ["1", "2"], ["001", "002"],
    ["20210503", "20220601"], ["Besuch 1", "Besuch 2"], ["2021", "2022"], ["exam_10432", "exam_10977"], ["T0", "T1"], ["3May2021", "1Jun2022"],
    ["10432", "10977"], ["ses-01", "ses-02"], ["W4", "W104"], ["03.05.2021", "01.06.2022"], ["FU1", "FU2"], ["screening", "D180"],
]  # fmt: skip
PROTOCOLS = [
    ["macula", "onh"], ["SD_OCT", "SS_OCT"], ["cube512x128", "5line"], ["star", "HRD21"], ["oct", "octa"], ["hr", "hs"],
    ["20x15", "6x6mm"], ["ppol", "Disc"], ["wxyz", "qrst"],
]  # fmt: skip
GROUPS = [
    ["train", "test"],
    ["NORMAL", "AMD"],
    ["Bonn", "Mainz"],
    ["site1", "site2"],
    ["cirrus", "spectralis"],
    ["B1001", "B1002"],
    ["1", "2"],
]


@st.composite
def trees(draw):
    """{path: (person, eye)}: people by eyes, visits, protocols and groups, as folders or in names, in any order."""
    levels = draw(
        st.permutations(
            ["person", *draw(st.sets(st.sampled_from(["eye", "visit", "protocol", "group", "format", "scan"])))]
        )
    )
    in_name = draw(st.integers(0, len(levels)))
    separator = draw(st.sampled_from(["_", "-", " "]))
    words = {"eye": EYES, "visit": VISITS, "protocol": PROTOCOLS, "group": GROUPS}
    chosen = {level: draw(st.sampled_from(options)) for level, options in words.items()}
    names = draw(st.sampled_from(NAMES))
    count, begins_anew = draw(st.integers(1, 6)), draw(st.booleans())
    scan = draw(st.sampled_from(["{}", "img{:03}", "scan_{}", "volume {}", "oct-{}"]))
    tree: dict[str, tuple[int, str]] = {}
    for person in range(count):
        group = person % 2
        # Either every clinic numbers its own people, or numbers are unique.
        anew = (
            begins_anew
            and "group" in levels
            and (levels.index("group") < levels.index("person") or levels.index("person") >= in_name)
        )
        name = names[person // 2] if anew else names[person]
        for eye in draw(st.sampled_from(["RL", "RL", "R", "L"])):
            for visit in range(draw(st.integers(1, 2))):
                protocol = draw(st.integers(0, 1))
                part = {
                    "person": name, "eye": chosen["eye"]["RL".index(eye)], "visit": chosen["visit"][visit], "format": "oct",
                    "protocol": chosen["protocol"][protocol], "group": chosen["group"][group], "scan": scan.format(len(tree) + 1),
                }  # fmt: skip
                parts = [part[level] for level in levels]
                path = "/".join([*parts[:in_name], separator.join(parts[in_name:]) or "volume"])
                if path + ".tif" not in tree:
                    tree[path + ".tif"] = (person, eye)
                elif tree[path + ".tif"][0] != person:
                    return {}  # two people's file of one name is no tree
    return tree


@settings(max_examples=int(os.environ.get("OCTFM_TREES", examples(250))))
@given(trees())
def test_two_people_never_become_one_nor_one_person_two_or_it_stops(tree):
    if not tree:
        return
    try:
        found = found_in(tree)
    except AmbiguousPeople as ambiguous:
        event("stops")
        assert "--participant-from" in str(ambiguous) and "\n" not in str(ambiguous) and ambiguous.guess.table()
        return
    event("is sure")
    pairs = {(found[path].participant, person) for path, (person, _) in tree.items()}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs}), (tree, pairs)
    for path, (_, eye) in tree.items():
        # A person called OS leaves both sides, which is a conflict that is named, and never the wrong one alone.
        assert not found[path].eyes or eye in found[path].eyes, path


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["patient_1/OD/macula.tif", "patient_1/OS/macula.tif", "patient_2/OD/macula.tif"], ["1 R", "1 L", "2 R"]),
        (["1001/OD/macula.tif", "1001/OS/onh.tif", "1002/links/oct.tif"], ["1001 R", "1001 L", "1002 L"]),
        (["OD/1001.tif", "OS/1001.tif"], ["1001 R", "1001 L"]),
        (["1001OD.tif", "1001OS.tif", "1002OD.tif"], ["1001 R", "1001 L", "1002 R"]),
        (["sub-01/ses-01/sub-01_ses-01_R.nii.gz", "sub-02/ses-01/sub-02_ses-01_L.nii.gz"], ["01 R", "02 L"]),
        (["Patienten/007/SD_OCT.tif", "Patienten/008/SD_OCT.tif"], ["007 ", "008 "]),
        (["1001/Macula/rechtes Auge.tif", "1001/Macula/œil gauche.tif"], ["1001 R", "1001 L"]),
        (["P1/2021-05-03/OD/oct.tif", "P1/2022-05-03/OS/oct.tif"], ["P1 R", "P1 L"]),
        (["Meyer/scan.tif"], ["Meyer "]),
    ],
)
def test_trees_that_leave_nothing_open_need_no_pattern(paths, expected):
    assert [f"{person} {eye}" for person, eye in people(paths)] == expected


@pytest.mark.parametrize(
    ("paths", "guess", "participants"),
    [
        (["OD/a.tif", "OS/a.tif", "OD/b.tif"], ["{eye}/{participant}"], 2),
        (["OD/oct.tif", "OS/oct.tif"], [], 0),
        (["SD_OCT/1.tif", "SD_OCT/2.tif"], ["*/{participant}"], 2),
        (["001/OD.tif", "001/OS.tif", "002/OD.tif"], ["{participant}/{eye}"], 2),
        (["scan_001.tif", "scan_002.tif"], ["{participant}"], 2),
        (["NORMAL/1.tif", "DME/1.tif"], ["{label+participant}/{participant}"], 2),
        (["train/p1.tif", "test/p1.tif"], ["{split}/{participant}"], 1),
        (["train/CNV/CNV-12345-1.npz", "test/DME/DME-777-1.npz"], ["{split}/{label}/*-{participant}-*"], 2),
        (["Meyer_Anna/OD.tif", "Meyer_Anna/OS.tif", "Schulz/OD.tif"], ["{participant}/{eye}"], 2),
        (["p1/OD.tif", "P01/OS.tif"], ["{participant}/{eye}"], 2),
        (["OS_R.tif"], ["{eye}_{participant}"], 1),
        (["Macula/1001.tif", "OD/1001.tif"], ["*/{participant}"], 1),
        (["Bonn/1001/OD.tif", "Bonn/1001/OS.tif", "Mainz/1001/OD.tif"], ["{participant}/{participant}/{eye}"], 2),
    ],
)
def test_an_ambiguous_tree_stops_and_its_guess_can_be_accepted(paths, guess, participants):
    with pytest.raises(AmbiguousPeople) as stopped:
        people(paths)
    assert stopped.value.guess.patterns == guess and stopped.value.guess.participants == participants
    assert all(f"--participant-from '{pattern}'" in str(stopped.value) for pattern in guess)
    assert paths[0] in stopped.value.guess.table()
    if guess:
        assert len({person for person, _ in people(paths, guess)}) == participants


def test_a_guess_on_the_terminal_cannot_command_it():
    with pytest.raises(AmbiguousPeople) as stopped:
        people(["a\x1b[2J\n1 participants/1.tif", "b/1.tif"])
    table = stopped.value.guess.table()
    assert r"a\x1b[2J\n1 participants" in table and "\x1b" not in table


@pytest.mark.parametrize(
    ("paths", "known"),
    [
        (["patient_1/OD.tif", "patient_1/OS.tif", "scan.tif"], {}),
        (["a/1.dcm", "b/2.dcm", "scan.tif"], {"a/1.dcm": "17", "b/2.dcm": "18"}),
        (["scan.tif"], {}),
    ],
)
def test_a_file_that_no_pattern_can_help_is_named_with_what_can(paths, known):
    with pytest.raises(AmbiguousPeople, match=r"scan\.tif: name the participant in a sidecar") as stopped:
        people(paths, known=known)
    assert stopped.value.guess.without_person == ("scan.tif",) and "accept the guess" not in str(stopped.value)


def test_folders_below_the_scanned_one_may_look_like_addresses():
    paths = [f"{folder}/1001/{eye}.tif" for folder in ("Study:/a@b", "s3:") for eye in ("OD", "OS")]
    assert people(paths, ["*/*/{participant}/{eye}", "*/{participant}/{eye}"]) == [("1001", "R"), ("1001", "L")] * 2


def test_an_optic_disc_is_no_right_eye():
    with pytest.raises(AmbiguousPeople) as stopped:
        people(["1001/OD.tif", "1001/macula.tif", "1002/OD.tif"])
    assert all(line.right == 0 for line in stopped.value.guess.lines)


@pytest.mark.parametrize(
    ("pattern", "path", "expected"),
    [
        ("{participant}/{eye}/*", "Meyer/OD/deep/er/x.tif", ("Meyer", "R")),
        ("{participant}_{eye}_*.png", "van_der_Berg_OS_2.png", ("van_der_Berg", "L")),
        ("{participant}_{eye}", "van_der_Berg_OS.tif", ("van_der_Berg", "L")),
        ("*/{visit}/{participant}_*", "oct/2021/12_x.npz", ("12", "")),
        ("{participant}/{participant}/{eye}", "Bonn/1/OG.nii.gz", ("Bonn/1", "L")),
        ("./{participant}\\{eye}\\*", "Meyer/links/x.tif", ("Meyer", "L")),
        ("{eye}/{participant}", "œil gauche/1.tif", ("1", "L")),
        ("**/{participant}_{eye}", "a/b/c/7_R.tif", ("7", "R")),
        ("Patient {participant}/*", "patient Meyer, Anna/x.tif", ("Meyer, Anna", "")),
    ],
)
def test_a_pattern_decides(pattern, path, expected):
    assert people([path], [pattern]) == [expected]


@pytest.mark.parametrize(
    ("pattern", "hint"),
    [
        ("{patient}/*", r"unknown \{patient\}; did you mean \{participant\}\?"),
        ("*/*", r"expected \{participant\}"),
        ("{participant}{visit}", "nothing separates"),
        ("{participant/{eye}", "unknown|brace"),
        ("*{participant}*_*_*_*_*_*", "more than 6"),
        ("{participant}/{", "brace"),
    ],
)
def test_a_pattern_that_cannot_be_meant_is_refused(pattern, hint):
    with pytest.raises(ConfigError, match=hint):
        Pattern.parse(pattern)


@pytest.mark.parametrize("parts", [60, 127])
def test_a_long_name_that_fits_no_pattern_is_given_up_at_once(parts):
    """Six wildcards among 126 underscores could be placed in 250 million ways, which took two minutes for each file."""
    name = "_".join("a" * parts)
    pattern, start = Pattern.parse("{participant}_*_*_*_*_*x"), time.process_time()
    assert pattern.match(Place((name,), (name,))) is None
    assert time.process_time() - start < 0.5
    assert pattern.match(Place((name + "x",), (name + "x",))) == ("a", frozenset(), {})


def test_files_that_no_pattern_fits_are_named_and_words_are_no_people():
    with pytest.raises(PeopleError, match=r"1 of 2 files .* for example stray\.tif; give the option once more"):
        people(["Meyer/OD.tif", "stray.tif"], ["{participant}/{eye}"])
    assert people(["Meyer/OD.tif", "stray.tif"], ["{participant}/{eye}", "{participant}"])[1] == ("stray", "")
    with pytest.raises(PeopleError, match="gives OD, OS as participants, which are words for eyes"):
        people(["OD/a.tif", "OS/b.tif"], ["{participant}/*"])


def test_files_that_name_their_participant_name_that_of_their_folder():
    known = {"Meyer/b.dcm": "1001"}
    assert people(["Meyer/a.tif", "Meyer/b.dcm", "Li/c.tif"], ["{participant}/*"], known) == [("1001", "")] * 2 + [
        ("Li", "")
    ]
    assert people(["p1/a.tif", "p1/b.dcm"], known={"p1/b.dcm": "1001"}) == [("1001", "")] * 2
    for paths, known in (
        (["p1/a.tif", "p1/b.dcm", "p1/c.dcm"], {"p1/b.dcm": "1001", "p1/c.dcm": "1002"}),
        (["p1/a.tif", "p1/b.dcm", "p2/a.tif", "p2/b.dcm"], {"p1/b.dcm": "1001", "p2/b.dcm": "1001"}),
    ):
        with pytest.raises(AmbiguousPeople):
            people(paths, known=known)
        with pytest.raises(PeopleError, match="name these files in a table"):
            people(paths, ["{participant}/*"], known)


def test_an_archive_is_a_folder_of_its_name():
    found = found_in(
        ["site.zip!/p1/OD.tif", "p2/OS.e2e!/series_1_2_3"], ["site/{participant}/*", "{participant}/{eye}"]
    )
    assert [(w.participant, *w.eyes) for w in found.values()] == [("p1", "R"), ("p2", "L")]


# ---- through a scan
# -----------------------------------------------------------------------------------------------------------------


def write_tree(root: Path, paths) -> Path:
    for number, path in enumerate(paths):
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        voxels = np.random.default_rng(number).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        np.savez(root / path, volume=voxels, spacing_mm=np.array([0.12, 0.0039, 0.0115]))
    return root


def test_eyes_of_folders_reach_the_catalog_and_how_people_were_found(tmp_path):
    root = write_tree(tmp_path / "clinic", ["Meyer/OD/a.npz", "Meyer/OS/b.npz", "Schulz/OD/c.npz"])
    write_oct_dicom(
        root / "Li" / "d.dcm",
        np.arange(4 * 32 * 36, dtype=np.uint32).reshape(4, 32, 36).astype(np.uint8),
        (0.12, 0.0039, 0.0115),
        participant="77",
        laterality=None,
    )
    with pytest.raises(AmbiguousPeople, match="whose eyes 3 of 4 scans show"):
        scan(root, workers=0)
    catalog = scan(root, workers=0, participant_from="{participant}/{eye}/*")
    assert [(a.participant, a.laterality, a.participant_source) for a in catalog.acquisitions] == [
        ("77", None, "header"), ("Meyer", "R", "pattern"), ("Meyer", "L", "pattern"), ("Schulz", "R", "pattern")
    ]  # fmt: skip
    assert {"participant_from_pattern", "laterality_from_path"} <= set(catalog.acquisitions[1].flags)
    assert Catalog.load(catalog.save(tmp_path / "catalog")) == catalog
    assert catalog.summary()["participants_found_by"] == {"pattern": 3, "header": 1}
    shutil.make_archive(str(tmp_path / "zipped" / "all"), "zip", root)
    for zipped in (
        scan(tmp_path / "zipped", workers=0, participant_from="all/{participant}/{eye}/*"),
        scan(tmp_path / "zipped", workers=0, participant_from="all/{participant}/{eye}/*", extract=tmp_path / "out"),
    ):
        assert [a.eye_id for a in zipped.acquisitions] == [a.eye_id for a in catalog.acquisitions]


def test_a_folder_of_the_other_eye_makes_the_eye_unknown(tmp_path):
    """Whichever of the two is wrong, a guess would mirror a right eye, and give it the labels of the left."""
    for uri, eye in (("OD/a.dcm", "R"), ("OS/b.dcm", "L"), ("OS/c.dcm", "R"), ("OD and OS/d.dcm", "R")):
        voxels = np.random.default_rng(ord(uri[-5])).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        write_oct_dicom(tmp_path / uri, voxels, (0.12, 0.0039, 0.0115), participant=uri[-5], laterality=eye)
    found = {a.participant: a for a in scan(tmp_path, workers=0).acquisitions}
    assert {name: a.laterality for name, a in found.items()} == {"a": "R", "b": "L", "c": None, "d": "R"}
    assert [name for name, a in found.items() if "laterality_conflict" in a.flags] == ["c"]


@pytest.mark.slow
@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_a_bucket_is_a_tree_like_any_other(place, tmp_path):
    root = write_tree(tmp_path / "clinic", ["Meyer/OD/a.npz", "Meyer/OS/b.npz"])
    shutil.make_archive(str(tmp_path / "all"), "zip", root)
    for path in (*root.rglob("*.npz"), tmp_path / "all.zip"):
        name = path.relative_to(root) if path.is_relative_to(root) else path.name
        write_whole(place / str(name), path.read_bytes())
    with pytest.raises(AmbiguousPeople, match="Meyer"):
        scan(place, workers=0)
    patterns = ["all/{participant}/{eye}/*", "{participant}/{eye}/*"]
    assert [a.eye_id for a in scan(place, workers=0, participant_from=patterns).acquisitions] == ["Meyer_R", "Meyer_L"]


@pytest.mark.parametrize("place", ["s3"], indirect=True)
def test_whose_eyes_they_are_costs_no_request_per_file(place, tmp_path, monkeypatch):
    for path in (root := write_tree(tmp_path / "clinic", ["Meyer/OD/a.npz", "Meyer/OS/b.npz"])).rglob("*.npz"):
        write_whole(place / str(path.relative_to(root)), path.read_bytes())
    asked: list[str] = []

    def after_a_long_night(*given):
        ranged._KNOWN.clear()  # what the listing said is no longer trusted
        monkeypatch.setattr(bucket, "stat", lambda uri: asked.append(uri) or stat(uri))
        return join_parts(*given)

    stat = bucket.stat
    monkeypatch.setattr("octfm.catalog.scan.join_parts", after_a_long_night)
    assert len(scan(place, workers=1, participant_from="{participant}/{eye}/*").acquisitions) == 2
    assert not asked


def test_a_folder_of_images_fits_as_the_images_in_it_do(tmp_path):
    for seed, name in enumerate(("Meyer/OD", "Meyer/OS")):
        voxels = np.random.default_rng(seed).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        write_images(tmp_path / name, voxels)
        (tmp_path / f"{name}.json").unlink()
    options = {"workers": 0, "nominal_spacing_mm": (0.12, 0.0039, 0.0115)}
    for pattern in ("{participant}/{eye}/*", "{participant}/{eye}/*.png", "{participant}/{eye}"):
        found = scan(tmp_path, participant_from=pattern, **options).acquisitions
        assert [a.eye_id for a in found] == ["Meyer_R", "Meyer_L"], pattern


@pytest.mark.parametrize("kind", ["identical", "of equal pixels"])
def test_F16_images_of_two_participants_are_named_and_share_a_split(tmp_path, kind):
    names = [f"p{person}/{eye}.npz" for person in range(1, 13) for eye in ("OD", "OS")]
    root = write_tree(tmp_path / "clinic", names)
    if kind == "identical":
        shutil.copy(root / "p1/OD.npz", root / "p2/extra.npz")
    else:
        with np.load(root / "p1/OD.npz") as file:
            np.savez_compressed(root / "p2/extra.npz", **file)
    options = {"workers": 0, "pixels": kind != "identical", "keep_upside_down": True}  # noise has no vitreous
    for seed in range(4):
        catalog = scan(root, seed=seed, **options)
        split = {a.participant: a.split for a in catalog.acquisitions}
        assert split["p1"] == split["p2"] and len(set(split.values())) == 3
    (reject,) = catalog.rejects
    assert reject.code == "pixels_of_two_participants"
    for word in ("p1/OD.npz", "p2/extra.npz", "participant p1's", "not p2's", "two ids of one person, or a copy"):
        assert word in reject.sentence
    flagged = {a.uri for a in catalog.acquisitions if "pixels_of_two_participants" in a.flags}
    assert flagged == {str(root / "p1/OD.npz")}
    assert {a.participant for a in catalog.acquisitions if "split_with_another_id" in a.flags} == {"p1", "p2"}
    page = write_data_health(catalog, tmp_path / "page.html", images=False).read_text()
    row = [a.uri for a in catalog.acquisitions].index(str(root / "p1/OD.npz"))
    assert "under two participants" in page and f"{row} and 0" in page
    hidden = pseudonymise(catalog, b"0123456789abcdef")
    assert "under two participants" in write_data_health(hidden, tmp_path / "hidden.html", images=False).read_text()


def test_F16_recommended_splits_of_one_person_with_two_ids_become_one():
    rows = [
        acquisition(n, participant_labels={"recommended_split": ("train", "val", "test", "test")[n // 2]})
        for n in range(8)
    ]
    placed = assign_splits(rows, one_person=[("P000", "P002"), ("P002", "P001")])
    assert {a.participant: a.split for a in placed} == {
        "P000": "train",
        "P001": "train",
        "P002": "train",
        "P003": "test",
    }


def test_the_command_shows_its_guess_and_how_to_accept_it(tmp_path):
    write_tree(tmp_path / "clinic", ["Meyer/OD.npz", "Meyer/OS.npz", "Schulz/OD.npz"])
    code, out, err = octfm_here("scan", "clinic", "--workers", "0", cwd=tmp_path)
    assert code == 1 and err.count("\n") == 1 and not (tmp_path / "catalog").exists()
    assert "octfm scan" not in err, "a command without the options that were given"
    assert "Meyer/OD.npz -> participant Meyer, right eye" in out and "2 participants in all" in out
    accept = next(line for line in out.splitlines() if line.startswith("if the guess is right: "))
    assert accept.endswith("octfm scan clinic --workers 0 --participant-from '{participant}/{eye}'")
    code, out, _ = octfm_here(*shlex.split(accept.partition("octfm ")[2]), cwd=tmp_path)
    assert code == 0 and "participants found by: pattern 3" in out


@pytest.mark.slow
def test_the_demonstration_takes_the_pattern_that_its_own_scans_need(tmp_path):
    root = write_tree(tmp_path / "clinic", ["Meyer/OD/a.npz", "Meyer/OS/b.npz"])
    with pytest.raises(AmbiguousPeople, match="octfm demo --data takes the same --participant-from"):
        run_demo(tmp_path / "out", data=root, echo=lambda line: None)
    patterns = ["{participant}/{eye}/*", "{participant}"]
    command, *_ = Request(tmp_path, root, participant_from=tuple(patterns)).commands(None, "auto")
    assert all(f"--participant-from '{pattern}'" in command for pattern in patterns)
    alone = Request(tmp_path, root).commands(None, "auto", pretrains=False)
    assert len(alone) == 1, "no other verb repeats what is measured without pretraining"


def test_F16_the_demonstration_keeps_ids_with_the_same_images_in_one_split(tmp_path):
    root = write_tree(tmp_path / "clinic", [f"p{person:02}/{eye}.npz" for person in range(24) for eye in ("OD", "OS")])
    pairs = [(f"p{person:02}", f"p{person + 1:02}") for person in range(0, 24, 2)]
    for one, other in pairs:
        shutil.copy(root / one / "OD.npz", root / other / "extra.npz")
    (tmp_path / "labels.csv").write_text("participant_id,ill\n" + "".join(f"p{n:02},{n % 2}\n" for n in range(24)))

    def until_the_scan_is_done(line: str) -> None:
        if " picture: " in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "out", data=root, labels=tmp_path / "labels.csv", echo=until_the_scan_is_done)
    rows = Catalog.load(tmp_path / "out" / "catalog").acquisitions
    split = {a.participant: a.split for a in rows}
    assert [(split[one], one) for one, other in pairs if split[one] != split[other]] == []
    assert Counter(split.values()) == {"train": 12, "val": 2, "test": 10}
    assert all("split_with_another_id" in a.flags for a in rows)


def test_ids_that_differ_in_zeros_or_case_are_in_one_split(tmp_path):
    """Scanners of one clinic write one person's id as 1001 and as 00001001: in two splits it would leak."""
    for number, participant in enumerate(["1001", "00001001", "MRN-7a", "mrn7A", *map(str, range(2000, 2016))]):
        voxels = np.random.default_rng(number).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        write_oct_dicom(tmp_path / f"{number}.dcm", voxels, (0.12, 0.0039, 0.0115), participant=participant)
    for seed in range(4):
        catalog = scan(tmp_path, workers=0, seed=seed)
        split = {a.participant: a.split for a in catalog.acquisitions}
        assert split["1001"] == split["00001001"] and split["MRN-7a"] == split["mrn7A"] and len(split) == 20
    flagged = {a.participant for a in catalog.acquisitions if "split_with_another_id" in a.flags}
    assert flagged == {"1001", "00001001", "MRN-7a", "mrn7A"}


def test_spellings_that_headers_state_are_no_doubt_about_a_guess():
    """Two scanners write 1001 and 00001001, which is one person by the rule; what folders hold is another question."""
    paths = [f"{person}/{eye}.npz" for person in ("P2001", "P2002") for eye in ("OD", "OS")]
    known = {"a/1.npz": "1001", "b/2.npz": "00001001"}
    assert people([*paths, *known], known=known) == [
        *[(p, e) for p in ("P2001", "P2002") for e in "RL"],
        ("1001", ""),
        ("00001001", ""),
    ]
    with pytest.raises(AmbiguousPeople, match="'002001' and 'P2001' may be one person"):
        people([*paths, *known], known=known | {"b/2.npz": "002001"})


def test_F16_a_copy_shows_whose_images_it_has_even_where_its_millimetres_are_stated_elsewhere(tmp_path):
    """Only the first has a sidecar: the copy is no scan of its own, but both ids have the same images all the same."""
    root = write_tree(tmp_path / "clinic", [f"{person}/OD/a.npz" for person in range(2000, 2020)])
    for person in ("2003", "2017"):
        (root / person / "OS").mkdir()
        np.save(root / person / "OS" / "b.npy", np.random.default_rng(99).integers(0, 255, (4, 32, 36), dtype=np.uint8))
    write_whole(root / "2017" / "OS" / "b.json", b'{"spacing_mm": [0.12, 0.0039, 0.0115]}')
    for seed in range(4):
        options = {"participant_from": "{participant}/{eye}/*", "fractions": (0.4, 0.3, 0.3)}
        catalog = scan(root, workers=0, seed=seed, **options)
        split = {a.participant: a.split for a in catalog.acquisitions}
        assert split["2003"] == split["2017"] and len(split) == 20
    (copy,) = catalog.rejects
    assert copy.code == "pixels_of_two_participants" and copy.uri == str(root / "2003" / "OS" / "b.npy")


@pytest.mark.parametrize("names", ["ab", "ba"])
@pytest.mark.parametrize(
    ("places", "sidecars", "said", "flag"),
    [
        (("OD/{}", "OS/{}"), ({}, {}), "eye (L instead of R|R instead of L)", "laterality_conflict"),
        (("amd/{}", "dme/{}"), ({}, {}), "label (dme instead of amd|amd instead of dme)", "label_conflict"),
        (
            ("OD/{}", "OD/{}"),
            ({}, {"spacing_mm": [0.12, 0.0039, 0.02]}),
            "0.0(2|115) mm per column",
            "copy_contradicts",
        ),
        (("OD/{}", "OD/{}"), ({"superior_first": True}, {"superior_first": False}), "in the other", "copy_contradicts"),
    ],
)
def test_what_copies_contradict_does_not_depend_on_their_names_in_silence(
    tmp_path, names, places, sidecars, said, flag
):
    write_tree(tmp_path, [f"{person}/{place.format('a')}.npz" for person in range(2000, 2004) for place in {*places}])
    voxels = np.random.default_rng(99).integers(0, 255, (4, 32, 36), dtype=np.uint8)
    for name, place, sidecar in zip(names, places, sidecars, strict=True):
        path = tmp_path / "1001" / f"{place.format(name)}.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, voxels)
        facts = {"spacing_mm": [0.12, 0.0039, 0.0115], **sidecar}
        write_whole(path.with_suffix(".json"), json.dumps(facts).encode())
    what = "label" if flag == "label_conflict" else "eye"
    catalog = scan(tmp_path, workers=0, participant_from=f"{{participant}}/{{{what}}}/*")
    (kept,), (copy,) = [a for a in catalog if a.participant == "1001"], catalog.rejects
    assert kept.flags.count(flag) == 1 and copy.code == "duplicate_sop_uid"
    assert re.search(f"with .*{said}.*; find out which is right, and remove the other file", copy.sentence)
    if flag == "laterality_conflict":
        assert kept.laterality is None and "laterality_from_path" not in kept.flags
    assert ("label" in kept.participant_labels) == (what == "label" and flag != "label_conflict")
    assert all(not {flag, "copy_contradicts"} & {*a.flags} for a in catalog if a is not kept)


@pytest.mark.parametrize("names", [("1001/OD", "1002/OS"), ("1002/OD", "1001/OS")])
def test_the_eye_of_a_scan_filed_under_two_ids_as_two_eyes_is_unknown(tmp_path, names):
    write_tree(tmp_path, [f"{person}/{side}/a.npz" for person in range(2000, 2004) for side in ("OD", "OS")])
    for name in names:
        (tmp_path / name).mkdir(parents=True)
        write_whole(tmp_path / name / "a.npz", (tmp_path / "2000" / "OD" / "a.npz").read_bytes())
    (tmp_path / "2000" / "OD" / "a.npz").unlink()
    catalog = scan(tmp_path, workers=0, participant_from="{participant}/{eye}/*")
    (kept,), (copy,) = [a for a in catalog if a.participant == "1001"], catalog.rejects
    assert copy.code == "pixels_of_two_participants" and kept.laterality is None
    assert {"laterality_conflict", "pixels_of_two_participants"} <= {*kept.flags}
    assert re.search("and not 1002's, but with eye [RL] instead of [RL]; two ids", copy.sentence)


@pytest.mark.parametrize("names", ["abc", "bac", "bca"])
def test_what_a_table_says_of_copies_does_not_depend_on_their_names_in_silence(tmp_path, names):
    for number in range(4):
        voxels = np.random.default_rng(number).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        for name in names if number == 0 else [str(number)]:
            write_oct_dicom(
                tmp_path / "scans" / f"{name}.dcm", voxels, (0.12, 0.0039, 0.0115),
                participant=f"100{number}", sop_instance_uid=f"1.2.{number}", laterality="R",
            )  # fmt: skip
    rows = [f"{names[0]}.dcm,R,AMD", f"{names[1]}.dcm,L,DME", f"{names[2]}.dcm,,n/a", "1.dcm,R,AMD"]
    write_whole(tmp_path / "table.csv", "\n".join(["file,laterality,diagnosis", *rows]).encode())
    catalog = scan(tmp_path / "scans", table=tmp_path / "table.csv", workers=0)
    (kept,) = [a for a in catalog if a.participant == "1000"]
    assert (kept.laterality, kept.participant_labels.get("diagnosis", "n/a")) == (None, "n/a")
    assert "laterality_conflict" in kept.flags and (Path(kept.uri).stem == names[2] or "label_conflict" in kept.flags)
    advice = {Path(reject.uri).stem: reject.sentence.split("; ")[-1] for reject in catalog.rejects}
    assert advice.get(names[2], "remove it") == "remove it"
    assert all(
        (a.laterality, a.participant_labels["diagnosis"]) == ("R", "AMD") for a in catalog if a.uri.endswith("1.dcm")
    )


@pytest.mark.parametrize("names", ["ab", "ba"])
def test_other_millimetres_that_only_a_table_states_of_a_copy_are_said(tmp_path, names):
    for name in "abc":
        voxels = np.random.default_rng(name == "c").integers(0, 255, (4, 32, 36), dtype=np.uint8)
        np.save(tmp_path / f"{name}.npy", voxels)
    rows = [f"{names[0]}.npy,1,0.12 0.0039 0.0115", f"{names[1]}.npy,1,0.12 0.0039 0.02", "c.npy,2,0.12 0.0039 0.0115"]
    write_whole(tmp_path / "table.csv", "\n".join(["file,participant,spacing_mm", *rows]).encode())
    catalog = scan(tmp_path, table=tmp_path / "table.csv", workers=0)
    (copy,) = catalog.rejects
    assert re.search("but with 0.0(2|115) mm per column instead of 0.0(2|115); find out which is right", copy.sentence)
    assert [a.uri for a in catalog if "copy_contradicts" in a.flags] == [str(tmp_path / "a.npy")]


def test_other_millimetres_under_another_uid_are_said_when_pixels_are_read(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 255, (4, 32, 36), dtype=np.uint8)
    for name, dx in (("a", 0.0115), ("b", 0.02)):
        file = tmp_path / f"{name}.dcm"
        write_oct_dicom(file, voxels, (0.12, 0.0039, dx), participant="1001", sop_instance_uid=f"1.2.{dx}")
    catalog = scan(tmp_path, workers=0, pixels=True)
    (kept,), (copy,) = catalog.acquisitions, catalog.rejects
    assert copy.code == "duplicate_pixels" and "copy_contradicts" in kept.flags
    assert "but with 0.02 mm per column instead of 0.0115; find out which is right" in copy.sentence


def test_every_copy_that_contradicts_says_so(tmp_path):
    write_tree(tmp_path, [f"{person}/{label}/a.npz" for person in range(2000, 2004) for label in ("amd", "cnv", "dme")])
    for label in ("cnv", "dme"):
        shutil.copy(tmp_path / "2000" / "amd" / "a.npz", tmp_path / "2000" / label / "a.npz")
    copies = scan(tmp_path, workers=0, participant_from="{participant}/{label}/*").rejects
    assert ["but with label cnv instead of amd" in copies[0].sentence, "label dme instead of amd" in copies[1].sentence]
    assert all("find out which is right" in copy.sentence for copy in copies)


def test_copies_whose_labels_differ_in_capitals_only_agree(tmp_path):
    write_tree(tmp_path, [f"{person}/{label}/a.npz" for person in (2000, 2001) for label in ("AMD", "Amd", "dme")])
    shutil.copy(tmp_path / "2000" / "AMD" / "a.npz", tmp_path / "2000" / "Amd" / "a.npz")
    catalog = scan(tmp_path, workers=0, participant_from="{participant}/{label}/*")
    (copy,) = catalog.rejects
    assert copy.sentence.endswith("with the same voxels; remove it")
    assert len(catalog) == 5 and not any("label_conflict" in a.flags for a in catalog)


def test_ids_that_may_be_one_person_share_a_split_and_are_named(tmp_path):
    """A scanner that takes no hyphen: in two splits the person would leak, and nothing else would show it."""
    for number, participant in enumerate(["01-0234", "010234", "1-235", *map(str, range(2000, 2016))]):
        voxels = np.random.default_rng(number).integers(0, 255, (4, 32, 36), dtype=np.uint8)
        write_oct_dicom(tmp_path / f"{number}.dcm", voxels, (0.12, 0.0039, 0.0115), participant=participant)
    for seed in range(4):
        catalog = scan(tmp_path, workers=0, seed=seed)
        split = {a.participant: a.split for a in catalog.acquisitions}
        assert split["01-0234"] == split["010234"] and catalog.summary()["participants"] == 19
    assert {a.participant for a in catalog.acquisitions if "split_with_another_id" in a.flags} == {"01-0234", "010234"}
    (doubt,) = doubts_about_people(catalog.acquisitions)
    assert doubt.startswith("1 pair of ids such as 010234 and 01-0234 count as two people; if they are one, write")


def test_a_copy_with_the_same_uid_under_another_spelling_is_a_copy_of_one_person(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 255, (4, 32, 36), dtype=np.uint8)
    for name, participant in (("a", "1001"), ("b", "P-00001001"), ("c", "10010")):
        write_oct_dicom(
            tmp_path / f"{name}.dcm", voxels, (0.12, 0.0039, 0.0115), participant=participant, sop_instance_uid="1.2.3"
        )
    codes = {Path(r.uri).name: r.code for r in scan(tmp_path, workers=0).rejects}
    assert codes == {"b.dcm": "duplicate_sop_uid", "c.dcm": "pixels_of_two_participants"}


def test_a_doubt_between_two_names_shows_a_path_in_which_they_differ():
    """`'1' or '1'` is a riddle."""
    with pytest.raises(AmbiguousPeople, match=r"in 2/1_OD the person may be '2' or '1'"):
        people(["1/1_OD.npz", "1/1_OS.npz", "2/1_OD.npz", "2/2_OS.npz"])


@pytest.mark.parametrize(
    ("path", "neighbours", "eye"),
    [
        ("os/clinic/1001/right/scan.npz", [], "R"),  # os: a disk
        ("1001/left/visit2/scan.npz", [], "L"),
        ("1001/R/scan.npz", ["1001/L/scan.npz"], "R"),
        ("1001/R/scan.npz", [], None),
        ("1001/macula_OD.npz", [], None),
        ("1001/macula_OD.npz", ["1001/macula_OS.npz"], "R"),
        ("left/right.npz", [], None),
        ("export.zip!/1001/right/scan.npz", [], "R"),
    ],
)
def test_the_path_of_one_file_names_its_eye_as_if_its_folder_were_given(tmp_path, path, neighbours, eye):
    for place in (tmp_path / name for name in [path, *neighbours]):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.touch()
    assert eye_in_path(tmp_path / path) == eye


def test_a_folder_is_listed_once_however_many_of_its_files_are_named(tmp_path, monkeypatch):
    """Listed for each, 10,000 files of one folder took ten minutes before the first was read."""
    for name in (files := [f"p{n}_{eye}.npz" for n in range(20) for eye in ("OD", "OS")]):
        (tmp_path / name).touch()
    listed = []
    monkeypatch.setattr(Path, "iterdir", lambda path, own=Path.iterdir: (listed.append(path), own(path))[1])
    assert [eye_in_path(tmp_path / name) for name in files] == ["R", "L"] * 20
    assert listed in ([tmp_path, tmp_path.parent], [tmp_path]), "an earlier test may have listed the parent"
