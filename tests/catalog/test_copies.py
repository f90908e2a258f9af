"""What copies of a scan contradict is doubted, whichever of them says it, and what they agree on is kept."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog import duplicates
from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.duplicates import OF_TWO, compare_copies, without_duplicates, without_lost_originals
from octfm.catalog.tables import ManifestRow, Tables
from octfm.formats.reasons import Header
from support.examples import examples
from support.vendor_files import write_npy

SPACING_MM = (0.12, 0.004, 0.011)
FIRST = Acquisition("0.dcm", "p1", "R", "zeiss_cirrus", "macula", (4, 32, 36), SPACING_MM, "top_level", "1.2", None,
                    {"diagnosis": "dme", "age": "61"}, ("laterality_from_path",))  # fmt: skip
HEADER = Header("0.dcm", (4, 32, 36), SPACING_MM, "top_level", "R", "zeiss_cirrus", "macula", "p1", "1.2", True)
STATED = st.fixed_dictionaries(
    {
        "eye": st.sampled_from(["R", "L", None]),
        "diagnosis": st.sampled_from(["dme", "amd", "", None]),
        "who": st.sampled_from(["p1", "P-001", "p2"]),
        "scale": st.sampled_from([1.0, 1.005, 0.9]),
        "superior_first": st.sampled_from([True, False, None]),
        "unclear": st.booleans(),
    }
)


@settings(max_examples=examples(80))
@given(st.lists(STATED, min_size=1, max_size=3))
def test_an_eye_a_label_or_millimetres_that_any_copy_contradicts_are_doubted_once(stated):
    copies, headers, duplicates = [], [HEADER], []
    for place, own in enumerate(stated, 1):
        uri, labels = (
            f"{place}.dcm",
            {"age": "50"} | ({} if own["diagnosis"] is None else {"diagnosis": own["diagnosis"]}),
        )
        flags = ("laterality_conflict",) if own["unclear"] and own["eye"] is None else ()
        spacing_mm = (SPACING_MM[0], SPACING_MM[1] * own["scale"], SPACING_MM[2])
        copies.append(replace(FIRST, uri=uri, participant=own["who"], laterality=own["eye"], spacing_mm=spacing_mm, participant_labels=labels, flags=flags))  # fmt: skip
        headers.append(replace(HEADER, uri=uri, spacing_mm=spacing_mm, superior_first=own["superior_first"]))
        duplicates.append((headers[-1], Reject(uri, "duplicate_sop_uid", f"{uri}: a copy", 1)))
    (kept,), rejects, pairs = compare_copies([FIRST], copies, headers[:1], duplicates)
    other_eye = any(own["eye"] == "L" or (own["eye"] is None and own["unclear"]) for own in stated)
    assert (kept.laterality is None) == other_eye == ("laterality_conflict" in kept.flags)
    assert ("laterality_from_path" in kept.flags) == (not other_eye)
    other_label = any(own["diagnosis"] == "amd" for own in stated)
    assert kept.participant_labels == ({"age": "61"} if other_label else {"age": "61", "diagnosis": "dme"})
    assert kept.flags.count("label_conflict") == other_label
    described = any(own["scale"] == 0.9 or own["superior_first"] is False for own in stated)
    assert kept.flags.count("copy_contradicts") == described
    strangers = {f"{place}.dcm": ("p2", "p1") for place, own in enumerate(stated, 1) if own["who"] == "p2"}
    assert pairs == strangers and kept.flags.count(OF_TWO) == bool(strangers)
    assert [r.code for r in rejects] == [OF_TWO if r.uri in strangers else "duplicate_sop_uid" for r in rejects]
    # An image that is no scan is no evidence that two ids are one person, and its copies say the same of themselves.
    empty = Reject("0.dcm", "no_contrast", "0.dcm: no scan", 1)
    left, who = without_lost_originals(rejects, pairs, headers[:1], duplicates, [empty])
    assert {r.code for r in left} == {"no_contrast"} and who == []
    copied = replace(empty, code="duplicate_pixels")
    assert without_lost_originals(rejects, pairs, headers[:1], duplicates, [copied]) == (rejects, [*pairs.values()])


@pytest.mark.parametrize("same", [True, False])
def test_of_files_with_one_uid_the_one_that_states_more_is_kept_and_a_reused_uid_is_flagged(tmp_path, same):
    """Then the file before a link to it, and the first by name; a table that lists a path comes before all that."""
    voxels = np.random.default_rng(0).integers(0, 255, (4, 32, 36), dtype=np.uint8)
    for name in "abc":
        write_npy(tmp_path / f"{name}.npy", voxels if same or name != "b" else voxels[::-1])
    (tmp_path / "a-link.npy").symlink_to(tmp_path / "c.npy")
    a, b, c, link = (replace(HEADER, uri=str(tmp_path / f"{name}.npy")) for name in ("a", "b", "c", "a-link"))

    def kept(*headers, listed=""):
        tables = SimpleNamespace(at_path=lambda uri: ManifestRow() if uri == listed else None)
        found, rejects = without_duplicates(headers, cast(Tables, tables), lambda f, pairs, *_, **__: map(f, pairs))
        assert len(found) == 1 and {r.code for _, r in rejects} == {"duplicate_sop_uid" if same else "reused_sop_uid"}
        assert ("reused_sop_uid" in found[0].flags) != same
        return found[0].uri

    assert kept(b, a) == a.uri
    assert kept(replace(a, laterality=None), b) == b.uri and kept(replace(a, spacing_mm=None), b) == b.uri
    assert kept(replace(a, laterality=None), b, listed=a.uri) == a.uri
    if same:
        assert kept(link, c) == c.uri


def test_scans_in_several_files_are_no_copies_because_their_first_files_are_alike(tmp_path, monkeypatch):
    voxels = {}
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        uri = str(write_npy(tmp_path / f"{name}.npy", np.zeros((1, 2))))
        voxels[uri] = np.random.default_rng(seed).integers(0, 255, (4, 32, 36), dtype=np.uint8)
    monkeypatch.setattr(duplicates, "_voxels", lambda header, readers: voxels[header.uri])
    a, b, c = (replace(HEADER, uri=uri, flags=("several_files",)) for uri in voxels)
    for other, code in ((b, "duplicate_sop_uid"), (c, "reused_sop_uid")):
        _, rejects = without_duplicates([a, other], Tables(), lambda f, pairs, *_, **__: map(f, pairs))
        assert [r.code for _, r in rejects] == [code]
