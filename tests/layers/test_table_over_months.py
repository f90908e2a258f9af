"""What a clinic does over months with its scans and their table, in random order, next to a simple model: a table has
the rows that a new one would have, except those that somebody corrected or that a catalog described."""

import csv
import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from octfm.catalog.acquisition import Acquisition
from octfm.display import csv_cell
from octfm.errors import CorrectionsError, EvaluationError, ReadError
from octfm.layers import table
from octfm.layers.axial_lengths import AxialLengths
from octfm.layers.corrections import Corrections
from octfm.layers.rows import COLUMNS, read_table, row_of
from octfm.layers.table import person_of, read_known, state_of, write_table
from octfm.version import __version__
from octfm.volume.pixel_copies import fingerprint
from support.changing_scans import SCANS, ChangingScans
from support.segmented import found_in

pytestmark = pytest.mark.usefixtures("remembered_bscans")

FINDER = SimpleNamespace(model="test 000000000000")
BASE = found_in(3)
ROWS = dict[object, dict[str, str]]()


def quick_segment(volume, *, axial_length_mm=None, finder=None):
    """In place of the network: areas whose sizes tell the voxels."""
    masks = {name: volume.voxels > volume.voxels[0, 0, 0] + 9 * i for i, name in enumerate(BASE.masks)}
    return replace(BASE, volume=volume, spacing_mm=volume.spacing_mm, masks=masks, axial_length_mm=axial_length_mm)


def quick_row_of(found, device=None):
    """The row of a scan, measured once for all files that have it."""
    volume, by_hand = found.volume, found.corrections
    facts = (volume.acquisition, volume.laterality, volume.scanner, volume.spacing_mm, found.axial_length_mm)
    key = (fingerprint(volume.voxels), *facts, by_hand and by_hand.source)
    if key not in ROWS:
        ROWS[key] = row_of(found, device)
    return ROWS[key] | {"source": volume.source}


def corrections_of(scan, size):
    return Corrections(
        fingerprint(SCANS[scan]), FINDER.model, SCANS[scan].shape, "A. Grader", f"P{scan}", "2026-11-29T12:00:00Z",
        "0.1", {}, {0: {"drusen": np.array([[0, size]])}}, frozenset(), f"{scan} {size}.json",
    )  # fmt: skip


def eye_scan_of(row):
    return tuple(row[name] for name in ("acquisition", "scanner", "bscans"))


def gone(row):
    return bool(row["file_state"]) and not Path(row["source"]).exists()


class Stopped(BaseException):
    """In place of KeyboardInterrupt, which ends the test."""


class Clinic(ChangingScans):
    def __init__(self):
        super().__init__()
        self.out, self.rows = self.folder / "table.csv", list[dict[str, str]]()

    @rule(data=st.data())
    def delete_a_row_in_a_spreadsheet(self, data):
        if self.rows:
            self.rows.pop(data.draw(st.integers(0, len(self.rows) - 1)))
            with self.out.open("w", newline="", encoding="utf-8-sig") as file:
                writer = csv.DictWriter(file, COLUMNS, quoting=csv.QUOTE_ALL)
                writer.writeheader()
                writer.writerows({name: csv_cell(cell) for name, cell in row.items()} for row in self.rows)

    def catalog(self, eye):
        """What a catalog says about the scans that can be read."""
        known = {}
        for source in self.sources():
            try:
                found = read_known(source, None)
            except ReadError:
                continue
            facts = ("p1", eye, "zeiss_cirrus", "macula", found.shape, (0.2, 0.004, 0.04), "table", found.acquisition)
            known[source] = Acquisition(source, *facts)
        return known

    def fresh(self, source, own, lengths, hand):
        """The row that a new table would have, and whether it has corrections."""
        try:
            volume = read_known(source, own)
        except ReadError as error:
            facts = {"source": source, "octfm": __version__, "problem": f"{error.code}: {error}"}
            return dict.fromkeys(COLUMNS, "") | facts, False
        found = quick_segment(volume, axial_length_mm=lengths and lengths.of(volume))
        if by_hand := hand.get(fingerprint(volume.voxels)):
            found = found.corrected(by_hand)
        facts = {"source": source, "file_state": state_of(source, own), "participant": person_of(own)}
        return quick_row_of(found) | facts, by_hand is not None

    def after(self, rows, source, own, lengths, hand):
        """The model: the rows of the table after this source."""
        if not Path(source).exists() and any(row["source"] == source and not row["problem"] for row in self.rows):
            return rows  # a network drive may be away
        new, by_hand = self.fresh(source, own, lengths, hand)
        at = next((i for i, row in enumerate(rows) if row["source"] == source), None)
        old = rows[at] if at is not None else dict.fromkeys(COLUMNS, "")
        must_stay = old["corrected_bscans"] or (old["participant"] and own is None)
        if not (new["problem"] or must_stay):
            is_copy = old["acquisition"] == new["acquisition"]
            same = [i for i, row in enumerate(rows) if gone(row) and eye_scan_of(row) == eye_scan_of(new)]
            passed = next((i for i in same if rows[i]["corrected_bscans"] or not is_copy), None)
            if passed is not None:
                old = rows[passed] | {"source": source}
                rows = [row for i, row in enumerate(rows) if i != at]
                at = passed - (at is not None and at < passed)
        stays = (old["corrected_bscans"] and not by_hand) or (old["participant"] and own is None)
        return [*rows, new] if at is None else [*rows[:at], old if stays else new, *rows[at + 1 :]]

    @rule(
        data=st.data(),
        eye=st.sampled_from([None, None, "R", "L"]),
        measured=st.sampled_from([None, None, None, (24.0, 24.0), (24.0, 26.0)]),
        corrected=st.sampled_from([{}, {}, {0: 5}, {0: 7, 1: 3}, {2: 4}]),
        in_children=st.booleans(),
        stop=st.sampled_from([None, None, 0, 1]),
    )
    def segment(self, data, eye, measured, corrected, in_children, stop):
        """With a catalog if there is an `eye`; interrupted after `stop` scans."""
        before, said, done = self.rows, list[str](), itertools.count()
        away = [row["source"] for row in before if gone(row)][:1]
        sources = data.draw(st.permutations(self.sources() + away))[data.draw(st.sampled_from([0, 0, 1])) :]
        known = self.catalog(eye) if eye else {}
        hand = {each.scan: each for each in (corrections_of(*item) for item in corrected.items())}
        lengths = None
        if measured:
            by_source = dict(zip(self.sources(), measured, strict=False))
            lengths = AxialLengths(Path("eyes.csv"), by_source=by_source or {"none": 24.0})

        def also(source, found):
            with pytest.raises(EvaluationError, match=r"another process .* is writing"):
                write_table(sources, self.out, finder=FINDER)
            if next(done) == stop:
                raise Stopped

        def run():
            workers = 2 if in_children and lengths is None else 0  # children would read eyes.csv
            return write_table(
                sources, self.out, finder=FINDER, corrections=hand, known=known, axial_lengths=lengths, also=also,
                workers=workers, echo=said.append,
            )  # fmt: skip

        if lengths is None and any(row["axial_length_mm"] and not row["corrected_bscans"] for row in before):
            with pytest.raises(EvaluationError, match="measured with axial lengths"):
                run()
            return
        states = [before]
        for source in sources:
            states.append(self.after(states[-1], source, known.get(source), lengths, hand))
        changed = None
        try:
            changed = run()
        except Stopped:
            self.rows = read_table(self.out) if self.out.exists() else []
            assert self.rows in states
            return
        except CorrectionsError:
            assert not any(self.fresh(source, known.get(source), lengths, hand)[1] for source in sources)
        self.rows = read_table(self.out) if self.out.exists() else []
        assert self.rows == states[-1], said
        assert len({row["source"] for row in self.rows}) == len(self.rows)
        assert changed in (None, sum(row not in before for row in self.rows)), said
        for row in self.rows:
            is_old = not row["problem"] and row["file_state"].partition("-")[0] != state_of(row["source"])
            if row["source"] in sources and is_old and Path(row["source"]).exists():
                assert any(row["source"] in line for line in said), "rows that are kept are named"

    @rule(data=st.data())
    def segment_the_folder(self, data):
        self.segment(data, None, None, {}, False, None)

    @rule(data=st.data(), scan=st.integers(0, 2))
    def correct(self, data, scan):
        self.segment(data, None, None, {scan: 9}, False, None)


def test_a_table_has_the_rows_of_a_new_one_whatever_happened_before(monkeypatch):
    for name, quick in (("segment", quick_segment), ("row_of", quick_row_of), ("load_finder", lambda **_: FINDER)):
        monkeypatch.setattr(table, name, quick)
    monkeypatch.setattr("octfm.io.location.flush", lambda _: None)  # waiting for the disk takes most of the time
    # What children do, in this process.
    monkeypatch.setattr(table, "spread", lambda makes, items, *_, **__: map(makes, items))
    few = settings(max_examples=settings().max_examples // 3, stateful_step_count=16)
    run_state_machine_as_test(Clinic, settings=few)
