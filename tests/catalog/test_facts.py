"""Which of header, table, path and option is believed about a scan, and what is flagged where they differ."""

from dataclasses import replace

import pytest

from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.agreement import accept, with_person
from octfm.catalog.participants.ids import person_key
from octfm.catalog.participants.people import Whose
from octfm.catalog.tables import ManifestRow, Tables
from octfm.formats.bscans import MEAN_EYE
from octfm.formats.reasons import Header

STATED, LISTED, NOMINAL, ESTIMATED = (0.12, 0.0039, 0.0115), (0.1, 0.0035, 0.012), (0.2, 0.004, 0.01), {496: 0.0037}
HEADER = Header("a.dcm", (49, 496, 512), STATED, "top_level", "R", "zeiss_cirrus", "macula", "P1", "1.2", True)


def row(spacing_mm=None, **facts) -> ManifestRow:
    if spacing_mm:
        facts |= {"slice_thickness_mm": spacing_mm[0], "in_plane_mm": spacing_mm[1:]}
    return ManifestRow(**facts)


def accepted(header: Header, listed: ManifestRow | None = None, nominal_mm=None) -> Acquisition:
    found = accept(header, Tables(by_path={header.uri: listed} if listed else {}), nominal_mm, ESTIMATED)
    assert isinstance(found, Acquisition), found
    return found


@pytest.mark.parametrize("listed", [None, LISTED])
@pytest.mark.parametrize("nominal", [None, NOMINAL])
@pytest.mark.parametrize("layout", ["raster", "line"])
@pytest.mark.parametrize("states", ["all", "nothing", "degrees"])
def test_millimetres_are_the_files_else_the_tables_else_nominal_else_estimated(states, layout, nominal, listed):
    """Those of a mean eye give way to a table; only those of a single B-scan are estimated."""
    shape = (1, 496, 512) if layout == "line" else HEADER.shape
    header = replace(HEADER, layout=layout, shape=shape, spacing_mm=None if states == "nothing" else STATED)
    header = replace(header, flags=(MEAN_EYE,) if states == "degrees" else ())
    found = accept(header, Tables(by_path={header.uri: row(listed)} if listed else {}), nominal, ESTIMATED)
    if states == "all" or (states == "degrees" and not listed):
        expected = STATED, "top_level"
    elif listed:
        expected = LISTED, "table"
    elif nominal:
        expected = NOMINAL, "nominal"
    elif layout == "line":
        expected = None, "estimated"
    else:
        assert isinstance(found, Reject)
        return
    assert isinstance(found, Acquisition) and found.spacing_source == expected[1]
    assert found.spacing_mm == expected[0] or (expected[0] is None and found.spacing_mm[1] == ESTIMATED[496])
    flags = {"nominal": "nominal_spacing", "estimated": "estimated_spacing"}
    assert {*found.flags} & {*flags.values(), MEAN_EYE} == (
        {flags[expected[1]]} if expected[1] in flags else {MEAN_EYE} if (states, listed) == ("degrees", None) else set()
    )
    # Of a line the distance of B-scans means nothing; LISTED differs from STATED in it and in the axial one.
    assert ("spacing_conflict" in found.flags) == (states == "all" and listed is not None)


@pytest.mark.parametrize("layout", ["raster", "line"])
@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize(("off", "conflict"), [(1.04, False), (1.06, True), (0.93, True)])
def test_millimetres_conflict_from_a_twentieth_on_in_every_axis_that_has_a_meaning(axis, off, conflict, layout):
    other = tuple(mm * (off if i == axis else 1) for i, mm in enumerate(STATED))
    found = accepted(replace(HEADER, layout=layout), row(other))
    assert ("spacing_conflict" in found.flags) == (conflict and (axis > 0 or layout == "raster"))
    assert found.spacing_mm == STATED


@pytest.mark.parametrize(
    ("header", "listed", "participant", "laterality", "flags"),
    [
        ({}, {"participant": "P1", "laterality": "OD"}, "P1", "R", set()),
        ({}, {"participant": "p-01", "laterality": "right"}, "p-01", "R", set()),
        ({}, {"participant": "P2", "laterality": "OS"}, "P2", None, {"participant_conflict", "laterality_conflict"}),
        ({"participant": None}, {"participant": "P2"}, "P2", "R", set()),
        ({"participant": "anonymous"}, {}, "", "R", set()),
        ({"laterality": None, "flags": ("laterality_unknown",)}, {"laterality": "L"}, "P1", "L", {"laterality_from_manifest"}),
        ({"laterality": None, "flags": ("laterality_conflict",)}, {"laterality": "L"}, "P1", None, {"laterality_conflict"}),
        ({}, {"shape": (49, 496, 384)}, "P1", "R", {"shape_conflict"}),
        ({}, {"manufacturer": "Topcon", "model": "Triton"}, "P1", "R", {"scanner_conflict"}),
        ({}, {"manufacturer": "Zeiss", "model": "Cirrus"}, "P1", "R", set()),
        ({}, {"sop_instance_uid": "1.3"}, "P1", "R", {"sop_uid_conflict"}),
    ],
)  # fmt: skip
def test_the_table_is_believed_about_the_person_and_nobody_about_an_eye_in_dispute(
    header, listed, participant, laterality, flags
):
    found = accepted(replace(HEADER, **header), row(**listed))
    assert (found.participant, found.laterality) == (participant, laterality) and {*found.flags} == flags
    assert (found.scanner, found.shape) == ("zeiss_cirrus", HEADER.shape)


def test_a_label_of_the_file_comes_before_that_of_its_path_and_both_before_the_persons():
    labels = {name: f"of the {name}" for name in ("file", "path", "person")}
    tables = Tables(
        by_path={"a.dcm": row(labels={"diagnosis": labels["file"]})},
        participants={person_key("P1"): dict.fromkeys(("diagnosis", "label", "age"), labels["person"])},
    )
    a = accept(HEADER, tables)
    assert isinstance(a, Acquisition)
    of_path = dict.fromkeys(("diagnosis", "label"), labels["path"])
    found = with_person(a, {"a.dcm": Whose("", "", frozenset({"R"}), of_path)}, tables)
    assert found.participant_labels == {"diagnosis": labels["file"], "label": labels["path"], "age": labels["person"]}
    assert (found.participant, found.laterality) == ("P1", "R")
    other = with_person(a, {"a.dcm": Whose("", "", frozenset({"L"}))}, tables)
    assert other.laterality is None and "laterality_conflict" in other.flags
    both = with_person(a, {"a.dcm": Whose("", "", frozenset({"L", "R"}))}, tables)
    assert both.laterality == "R" and both.flags == a.flags
