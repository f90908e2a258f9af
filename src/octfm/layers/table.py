"""A table of many scans: one row per eye scan with ETDRS zones, fluid and verdict; the same call resumes."""

import csv
import functools
import io
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from octfm.catalog.acquisition import Acquisition
from octfm.display import csv_cell, from_csv_cell, number
from octfm.errors import BAD_INPUT, BucketError, CorrectionsError, Echo, EvaluationError, ReadError
from octfm.formats import read_volume
from octfm.formats.declared import sidecars
from octfm.formats.heyex_xml import DeviceGrid
from octfm.formats.image_folder import SUFFIXES
from octfm.formats.reasons import REASONS
from octfm.io.archive import file_size, list_folder
from octfm.io.hashing import hash_text
from octfm.io.isolation import Limits, Lost
from octfm.io.lease import Lease
from octfm.io.location import BucketPath, Location, is_remote, lock, write_whole
from octfm.io.spread import spread
from octfm.io.versions import GONE, versions
from octfm.layers.axial_lengths import AxialLengths, read_axial_lengths
from octfm.layers.corrections import Corrections
from octfm.layers.finder import LayerFinder, load_finder
from octfm.layers.segment import ScanSegmentation, segment
from octfm.layers.zones import (
    DEVICE_COLUMNS,
    RANGE_COLUMNS,
    ZONE_COLUMNS,
    device_cells,
    device_grid_of,
    grid_of,
    range_cells,
    zone_cells,
    zone_lines,
)
from octfm.models.layer_net import MASKS
from octfm.run.memory import ran_out_of_memory
from octfm.version import __version__
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.volume import Laterality, Volume
from octfm.weights.packaged import NOTE

CHILD_MEMORY, CHILD_SECONDS = 2 * 10**9, 120.0
"""Of a child process, beyond what reading may take: bytes for PyTorch and the network (with 49 B-scans of 496 x 512 it
holds .6 GB), and seconds per file and per megabyte of it, of which a core needs one, or ten if they are compressed."""
ACCEPTED = "nothing speaks against it"
"""The verdict on a scan without a reason to doubt it."""
COLUMNS = (
    *("source", "participant", "acquisition", "laterality", "scanner", "bscans", *ZONE_COLUMNS),
    *(f"{name}_nl" for name in MASKS),
    *("verdict", "doubt", "doubtful_ascans", "model", "note", "problem"),
    *("corrected_bscans", "checked_bscans", "corrected_participant"),
    *RANGE_COLUMNS,
    *DEVICE_COLUMNS,
    *("retina_rows", *(f"{name}_pixels" for name in MASKS)),
    *("axial_length_mm", "octfm", "file_state"),
)
"""`participant` is that of a catalog, else empty; `axial_length_mm` is empty where lateral millimetres are nominal;
`octfm` is the version that wrote the row."""
OF_A_SCAN = (*SUFFIXES, ".xml")
"""Endings of the files in a folder that are its scan; others may be this table."""
_OF_AN_ACQUISITION = ("acquisition", "scanner", "bscans")
"""Columns that are the same wherever the file of a scan lies."""
_CORRECTED_BEFORE = (
    "has changed since somebody corrected it, or has another axial length or other facts in a catalog now, and its row "
    "is left as it was; give --apply-corrections with its corrections, or another --out"
)


Known = Laterality | Acquisition | None
"""What is known of a scan apart from its file: its row in a catalog, or the eye that its path names."""
KnownScans = Mapping[str, Known]
Item = tuple[str, Known]


def read_known(source: str, known: Known, limits: Limits | None = None, *, raster_only: bool = False) -> Volume:
    """The scan with all that the row of a catalog says of it, or with the eye that its path names (see
    Volume.with_eye). Raises ReadError."""
    if isinstance(known, Acquisition):
        volume = read_volume(source, spacing_mm=known.spacing_mm, raster_only=raster_only, limits=limits)
        return known.apply_to(volume)
    return read_volume(source, raster_only=raster_only, limits=limits).with_eye(known)


def person_of(known: Known) -> str:
    """The participant in the catalog. An id that only the file states may be a hospital's number, and is left out."""
    return known.participant if isinstance(known, Acquisition) else ""


def row_of(found: ScanSegmentation, device: DeviceGrid | str | None = None) -> dict[str, str]:
    """One row of the table; what the scan does not allow stays empty. `device`: see `device_grid_of`."""
    volume = found.volume
    row = (
        _row(volume.source)
        | _facts(volume, "")
        | {
            "verdict": "; ".join(found.verdict.reasons) or ACCEPTED,
            "doubt": f"{found.verdict.doubt:.3f}",
            "doubtful_ascans": f"{found.doubtful.mean():.3f}",
            "model": found.model,
            "note": NOTE,
            "axial_length_mm": cell_of(found.axial_length_mm),
        }
    )
    if found.corrections is not None:
        row["corrected_bscans"] = str(len(found.corrections.touched))
        # Zones are a person's only where somebody has looked at both of their lines.
        row["checked_bscans"] = str(found.corrections.trusted("ilm", "bm").sum())
        row["corrected_participant"] = found.corrections.participant
    for name in MASKS:
        # What makes zones doubtful, wrong millimetres above all, makes volumes wrong.
        amount = found.volume_nl(name) if found.verdict.accepted else None
        row[f"{name}_nl"] = "" if amount is None else f"{amount:.1f}"
    if found.why_no_um:
        row["retina_rows"] = "" if found.retina_rows is None else f"{found.retina_rows:.1f}"
        # As with volumes, what the verdict refuses, or what was not seen in full, is not given.
        if found.verdict.accepted and not found.verdict.parts:
            row |= {f"{name}_pixels": str(mask.sum()) for name, mask in found.masks.items()}
    grid = grid_of(found)
    return row | zone_cells(found, grid) | range_cells(found, grid) | device_cells(device, found, grid)


def cell_of(axial_length_mm: float | None) -> str:
    """The cell `axial_length_mm`; empty where millimetres are nominal."""
    return "" if axial_length_mm is None else f"{axial_length_mm:g}"


def _row(source: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | {"source": source, "octfm": __version__}


def write_table(
    sources: Sequence[str | Volume],
    out: Location,
    *,
    limits: Limits | None = None,
    finder: LayerFinder | None = None,
    device: str | None = None,
    corrections: Mapping[str, Corrections] | None = None,
    only_corrected: bool = False,
    known: KnownScans | None = None,
    axial_lengths: AxialLengths | None = None,
    also: Callable[[str, ScanSegmentation], None] | None = None,
    workers: int = 0,
    progress: Callable[[Iterable[str | Volume]], Iterable[str | Volume]] = iter,
    echo: Echo = print,
) -> int:
    """Segment each source that `out` does not hold yet, and add its row; the file is replaced whole.

    A file that cannot be read or segmented gets a row with its problem, and is tried again by the next call; one that
    is named twice has one row. A scan on a disk that has changed since, or whose sidecar has, is segmented again:
    `file_state` in its row is a hash of their sizes and dates. A row that somebody corrected is kept, and `echo` says
    so, unless `corrections` has the scan. A row whose file has gone becomes that of the same acquisition elsewhere, as
    after a folder was renamed. `finder` and `device` are those of `segment`. `also` is called with each source and what
    was found in it, before its row is written.
    corrections: fingerprint of a scan → what somebody has corrected in it; its row is written anew, marked as
    corrected.
    known: scan → what is known of it apart from its file; see `read_known`.
    axial_lengths: rescale lateral millimetres; then every scan is read, and segmented again where its row goes by
    another length. Scans that the table does not name keep nominal millimetres.
    workers: child processes of one thread each that read and segment files with the packaged network, 0 for this
    process alone. Volumes, and everything where there are `corrections`, are segmented in this process.
    progress: wraps the loop over the sources.
    only_corrected: read every scan, but segment and add only those with corrections; `echo` gets the problem of a file
    that cannot be read, which gets no row. Returns the number of new or changed rows. Raises EvaluationError if `out`
    is something else than such a table, has rows of another network, of axial lengths that are not given now or, with
    `only_corrected`, of scans that nobody has corrected, or is being written by another process, and CorrectionsError
    if `corrections` do not fit a scan, or fit none of them.
    """
    finder, corrections, known = finder or load_finder(device=device), corrections or {}, known or {}
    done: set[str] = set()
    used: set[str] = set()
    with only_writer(out), closing(_Table(out)) as table:
        table.expect(finder.model, only_corrected, axial_lengths is not None)
        new: list[str] = []
        if workers and not (corrections or only_corrected):
            # Where somebody corrected a row, the scan is not segmented, and its picture stays.
            files = [s for s in dict.fromkeys(sources) if isinstance(s, str) and not table.row(s)["corrected_bscans"]]
            new = [s for s in files if not table.has(s, state_of(s, known.get(s)))]
        from_children = _rows_of(
            new,
            known,
            axial_lengths,
            device,
            also,
            limits or Limits(),
            workers,
            table.corrected_and_gone() if new else (),
        )
        waiting = set(new)
        for given in progress(sources):
            source = given.source if isinstance(given, Volume) else given
            if source in done:
                continue
            if source in waiting:
                done.add(source)
                row = next(from_children)
                if row["problem"] or not table.keeps(row, source, echo):
                    table.put(row, echo)
                continue
            own = known.get(source)
            state = "" if isinstance(given, Volume) else state_of(source, own)
            has_row = table.has(source, state)
            if has_row and not corrections and axial_lengths is None:
                continue
            try:
                volume = given
                if not isinstance(volume, Volume):
                    volume = read_known(volume, own, limits)
                by_hand = corrections.get(fingerprint(volume.voxels)) if corrections else None
                length = axial_lengths.of(volume) if axial_lengths else None
                as_before = has_row and (
                    axial_lengths is None or table.row(source)["axial_length_mm"] == cell_of(length)
                )
                if by_hand is None and (as_before or only_corrected):
                    continue
                facts = _facts(volume, state) | {"axial_length_mm": cell_of(length)}
                if table.keeps(facts, source, echo, despite=by_hand):
                    done.add(source)
                    continue
                found = segment(volume, axial_length_mm=length, finder=finder)
                if by_hand is not None:
                    used.add(by_hand.source)
                    found = found.corrected(by_hand)
                grid = None if isinstance(given, Volume) else device_grid_of(given, limits)
                row = row_of(found, grid) | {"source": source, "file_state": state, "participant": person_of(own)}
            except (BucketError, CorrectionsError):
                raise  # neither an unreachable bucket nor a wrong file of corrections says anything about the scan
            except BAD_INPUT as error:
                if has_row and isinstance(error, ReadError):  # it was read once; a share may be away
                    continue
                row = _row(source) | {"problem": _problem(source, error)}
            else:
                if also:
                    also(source, found)
            if not isinstance(given, Volume):  # volumes in memory may share a source
                done.add(source)
            if row["problem"] and (only_corrected or table.row(source)["corrected_bscans"]):
                echo(row["problem"])
                continue
            table.put(row, echo)
    _report_unused(corrections, used, echo)
    return table.changed


def _rows_of(
    sources: Sequence[str],
    known: KnownScans,
    axial_lengths: AxialLengths | None,
    device: str | None,
    also: Callable[[str, ScanSegmentation], None] | None,
    limits: Limits,
    workers: int,
    by_hand: Collection[tuple[str, ...]],
) -> Iterator[dict[str, str]]:
    """The rows of these files, in their order, made in child processes. `by_hand`: see `corrected_and_gone`."""
    lengths = axial_lengths.path if axial_lengths else None  # not the lengths: they would be sent with every scan
    makes = functools.partial(_row_in_child, lengths=lengths, device=device, also=also, by_hand=by_hand)
    within = replace(limits, memory=limits.memory + CHILD_MEMORY)
    items: list[Item] = [(source, known.get(source)) for source in sources]
    return spread(makes, items, _lost, workers=workers, limits=within, deadline=_deadline, chunk=1)


def _row_in_child(
    item: Item,
    lengths: Path | None,
    device: str | None,
    also: Callable[[str, ScanSegmentation], None] | None,
    by_hand: Collection[tuple[str, ...]],
) -> dict[str, str]:
    source, own = item
    state = state_of(source, own)
    try:
        volume = read_known(source, own)
        length = _read_once(lengths, state_of(str(lengths))).of(volume) if lengths else None
        found = segment(volume, axial_length_mm=length, finder=load_finder(device=device))
        row = row_of(found, device_grid_of(source))
        row |= {"source": source, "file_state": state, "participant": person_of(own)}
    except BucketError:
        raise
    except BAD_INPUT as error:
        return _row(source) | {"problem": _problem(source, error)}
    if also and _scan_of(row) not in by_hand:
        also(source, found)
    return row


@functools.lru_cache(maxsize=1)
def _read_once(lengths: Path, state: str) -> AxialLengths:
    """`state`: that of the file, which may change between two tables of one process."""
    return read_axial_lengths(lengths)


def _lost(item: Item, what: Lost) -> dict[str, str]:
    source, _ = item
    problem = f"{what.code}: {source}: the process that segmented it {what.what}; {REASONS[what.code].fix}"
    return _row(source) | {"problem": problem}


def _deadline(limits: Limits, item: Item) -> float:
    source, _ = item
    size = file_size(source)
    return limits.deadline(size, source) + CHILD_SECONDS * (1 + size / 1e6)


def _problem(source: str, error: Exception) -> str:
    if isinstance(error, ReadError):
        return f"{error.code}: {error}"
    if ran_out_of_memory(error):
        return f"decoder_memory: {source}: memory ran out while it was segmented; {REASONS['decoder_memory'].fix}"
    # One scan must not end a table of thousands; the message may hold anything, so only its kind is kept.
    return f"segmentation_failed: {source}: {type(error).__name__}; please report it with the file's format"


def _facts(volume: Volume, state: str) -> dict[str, str]:
    """The cells of a row that are known before anything is measured."""
    return {
        # Labels are joined by it: octfm finetune and octfm probe take the table as it is.
        "acquisition": "" if volume.acquisition == "unknown" else volume.acquisition,
        "laterality": volume.laterality or "",
        "scanner": volume.scanner,
        "bscans": str(volume.shape[0]),
        "file_state": state,
    }


def _scan_of(facts: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(facts[name] for name in _OF_AN_ACQUISITION)


class _Table:
    """The rows of a table, which is written again as they change, and always at the end. A large one, which takes long
    to write, waits for several rows: a kill loses work of at most WAIT times what writing takes."""

    WAIT = 30

    def __init__(self, out: Location):
        self.out, self.changed = out, 0
        self._unsaved, self._next = False, 0.0
        self.rows = read_table(out) if out.exists() else []
        # What could not be read is tried again: a share may have been away.
        self._states = {row["source"]: row["file_state"] for row in self.rows if not row["problem"]}
        self._places = {row["source"]: i for i, row in enumerate(self.rows)}
        self._same_scan = defaultdict[tuple[str, ...], list[int]](list)
        for i, row in enumerate(self.rows):
            self._same_scan[_scan_of(row)].append(i)

    def expect(self, model: str, only_corrected: bool, by_lengths: bool) -> None:
        """Raises EvaluationError for rows of another network, of scans that nobody has corrected, and by axial lengths
        that are not given now."""
        if others := {row["model"] for row in self.rows} - {"", model}:
            raise EvaluationError(
                f"{self.out}: has rows of another network ({', '.join(sorted(others))}; this is {model}), whose "
                "numbers must not be mixed with these; choose another --out"
            )
        if only_corrected and any(not row["problem"] and not row["corrected_bscans"] for row in self.rows):
            raise EvaluationError(f"{self.out}: has rows of scans that nobody has corrected; choose another --out")
        # A row of corrections may go by the length of their page.
        if not by_lengths and any(row["axial_length_mm"] and not row["corrected_bscans"] for row in self.rows):
            raise EvaluationError(
                f"{self.out}: has rows by axial lengths, which nominal millimetres must not be mixed with; give "
                "--axial-length with their table again, or another --out"
            )

    def has(self, source: str, state: str) -> bool:
        """Whether the table was read with a row of this source, whose file has not changed since."""
        before = self._states.get(source)
        return before is not None and (not state or before == state or not (before or is_remote(source)))

    def row(self, source: str) -> dict[str, str]:
        place = self._places.get(source)
        return _row(source) if place is None else self.rows[place]

    def corrected_and_gone(self) -> set[tuple[str, ...]]:
        """Scans that somebody corrected and whose file has gone: where it is now, automatic lines are not theirs."""
        corrected = [row for row in self.rows if row["corrected_bscans"] and row["acquisition"]]
        return {_scan_of(row) for row in corrected if _has_gone(row)}

    def keeps(self, facts: Mapping[str, str], source: str, echo: Echo, despite: Corrections | None = None) -> bool:
        """Whether the row of this scan stays as it is, since somebody corrected it, `despite` being new corrections.
        `facts`: cells of its new row. A row of the same acquisition whose file has gone becomes that of `source`."""
        if old := self._move(facts, source):
            echo(f"{old}: is not there any more, and its row is that of {source} now")
        before = self.row(source)
        if despite is not None or not before["corrected_bscans"]:
            return False
        # Without a length now, the row may go by that of the page where it was corrected.
        length = facts["axial_length_mm"] or before["axial_length_mm"]
        now = facts["file_state"], facts["laterality"], length
        if now != (before["file_state"], before["laterality"], before["axial_length_mm"]):
            echo(f"{source}: {_CORRECTED_BEFORE}")
        self.put(before | {"source": source})
        return True

    def _move(self, facts: Mapping[str, str], source: str) -> str:
        """If the row of this acquisition has lost its file, as after a folder was renamed, make it that of `source`;
        returns the old source, empty if there is no such row."""
        if source in self._places or not facts["acquisition"]:
            return ""
        for place in self._same_scan.get(_scan_of(facts), ()):
            old = self.rows[place]["source"]
            if _has_gone(self.rows[place]):
                self._places.pop(old, None)
                self._places[source] = place
                return old
        return ""

    def put(self, row: dict[str, str], echo: Echo | None = None) -> None:
        """Set a row in place of the one that the table had of its source; if they differ, `echo` gets what it says."""
        if (place := self._places.pop(row["source"], None)) is None:
            self.rows.append(row)
        elif self.rows[place] == row:
            return
        else:
            self.rows[place] = row
        self.changed += 1
        self._unsaved = True
        if time.monotonic() >= self._next:
            self.close()
        if echo is not None:
            echo(f"{row['source']}: {row['problem'] or row['verdict']}")

    def close(self) -> None:
        """Write the rows that the file lacks."""
        if self._unsaved:
            begun = time.monotonic()
            save_table(self.rows, self.out)
            self._unsaved, self._next = False, time.monotonic() + self.WAIT * (time.monotonic() - begun)


def _report_unused(corrections: Mapping[str, Corrections], used: set[str], echo: Echo) -> None:
    """Name files of corrections that fit none of the scans; raises CorrectionsError if none was used."""
    if unused := {each.source for each in corrections.values()} - used:
        problem = f"{min(unused)}: corrections of none of these scans"
        if not used:
            raise CorrectionsError(f"{problem}; give the scan that was corrected, read with the same options")
        echo(f"{problem}; {len(unused)} such files were not used" if len(unused) > 1 else problem)


def state_of(source: str, known: Known = None) -> str:
    """A hash of the sizes and dates of a file, or of the images in a folder, and of its sidecars, then one of what the
    row of a catalog changes in it. The first is empty for a file in a bucket; both are, if it is not there."""
    state = "" if is_remote(source) else _state_of_files(source)
    if isinstance(known, Acquisition) and (state or is_remote(source)):
        facts = (known.participant, known.laterality, known.scanner, *known.spacing_mm)
        return f"{state}-{hash_text(' '.join(map(str, facts)))[:8]}".lstrip("-")
    return state


def _state_of_files(source: str) -> str:
    own = [source]
    if Path(source).is_dir():
        try:
            own = [file for file in list_folder(source) if Path(file).suffix.lower() in OF_A_SCAN]
        except (OSError, ReadError):
            return ""
    version_of = versions({})
    found = [version_of(file) for file in own]
    if not found or GONE in found:
        return ""
    found += [version_of(str(place)) for place in sidecars(source)]
    return hash_text(" ".join(found))[:16]


def _has_gone(row: Mapping[str, str]) -> bool:
    """Whether the file of a row was on this disk, and is not there any more."""
    return bool(row["file_state"]) and not is_remote(row["source"]) and not state_of(row["source"])


def is_of(row: Mapping[str, str], source: str) -> bool:
    """Whether a row was made from this file as it is now, whatever a catalog says of it."""
    return row["file_state"].partition("-")[0] == state_of(source)


@contextmanager
def only_writer(table: Location) -> Iterator[None]:
    """Hold off other writers of this table: two processes that each replace the whole file would lose each other's
    rows.

    Raises EvaluationError if another process is writing it, BucketError in a bucket.
    """
    name = f".{table.name}.lock"
    if isinstance(table, BucketPath):
        with Lease(table.parent / name, "writing this table"):
            yield
        return
    table.parent.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(table.parent / name)
    except BlockingIOError:
        raise EvaluationError(
            f"{table}: another process is writing this table; wait for it, or choose another --out"
        ) from None
    with held:
        yield


def save_table(rows: Iterable[dict[str, str]], out: Location) -> None:
    """Write rows of COLUMNS, the file replaced whole."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, COLUMNS)
    writer.writeheader()
    writer.writerows({name: csv_cell(cell) for name, cell in row.items()} for row in rows)
    # Names of files that are not valid UTF-8 keep their bytes.
    write_whole(out, text.getvalue().encode("utf-8", "surrogateescape"))


def read_table(path: Location) -> list[dict[str, str]]:
    """The rows of a table. Raises EvaluationError if it has other columns, or a row is damaged."""
    reader = csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8", "surrogateescape"), newline=""))
    rows = []
    try:
        if tuple(reader.fieldnames or ()) != COLUMNS:
            raise EvaluationError(f"{path}: not a table of octfm segment of this version; choose another --out")
        for row in reader:
            if None in row or None in row.values():
                raise EvaluationError(
                    f"{path}: line {reader.line_num}: expected {len(COLUMNS)} columns as in the header; fix or delete "
                    "the row"
                )
            rows.append({name: from_csv_cell(cell) for name, cell in row.items()})
    except csv.Error as error:
        raise EvaluationError(
            f"{path}: after line {reader.line_num}: {error}; fix it, or choose another --out"
        ) from None
    return rows


def describe(found: ScanSegmentation, device: DeviceGrid | str | None = None) -> str:
    """A few lines for a terminal. `device`: see `device_grid_of`."""
    row, volume = row_of(found, device), found.volume
    bscans, scanner = number(volume.shape[0], "B-scan"), volume.scanner.replace("unknown", "scanner unknown")
    lines = [f"{volume.source}: {bscans}, {scanner}, eye {volume.laterality or 'unknown'}"]
    lines += zone_lines(row)
    amounts = [f"{name.replace('_', ' ')} {row[f'{name}_nl']} nl" for name in MASKS if row[f"{name}_nl"]]
    areas = [f"{name.replace('_', ' ')} {row[f'{name}_pixels']} pixels" for name in MASKS if row[f"{name}_pixels"]]
    if row["retina_rows"]:
        areas.insert(0, f"retina {row['retina_rows']} rows (median)")
    for found_here in (amounts, areas):
        if found_here:
            lines.append("  " + ", ".join(found_here))
    share = f"{found.doubtful.mean():.0%} of A-scans are doubtful"
    if row["corrected_bscans"]:
        and_fovea = found.corrections.and_fovea if found.corrections else ""
        lines.append(f"  corrected by hand: {row['corrected_bscans']} of {row['bscans']} B-scans{and_fovea}")
    return "\n".join([*lines, f"  verdict: {row['verdict']}; {share}", f"  {found.model}; {NOTE}"])
