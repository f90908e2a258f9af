"""A table of many scans: one row per eye scan with ETDRS zones, fluid and verdict; the same call resumes."""

import functools
import itertools
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from octfm.catalog.acquisition import Acquisition
from octfm.errors import BAD_INPUT, BucketError, ConfigError, CorrectionsError, Echo, EvaluationError, ReadError
from octfm.formats import read_volume
from octfm.formats.declared import sidecars
from octfm.formats.image_folder import SUFFIXES
from octfm.formats.reasons import REASONS
from octfm.io.archive import file_size, list_folder
from octfm.io.hashing import hash_text
from octfm.io.isolation import Limits, Lost
from octfm.io.lease import only_one
from octfm.io.location import BucketPath, Location, is_remote, write_whole
from octfm.io.spread import spread
from octfm.io.versions import GONE, versions
from octfm.layers.axial_lengths import AxialLengths, read_axial_lengths
from octfm.layers.corrections import Corrections
from octfm.layers.finder import LayerFinder, load_finder
from octfm.layers.rows import blank_row, cell_of, facts_of, read_table, row_of, save_table, scan_of
from octfm.layers.segment import ScanSegmentation, segment
from octfm.layers.zones import device_grid_of
from octfm.run.memory import ran_out_of_memory
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.volume import Laterality, Volume

CHILD_MEMORY, CHILD_SECONDS = 2 * 10**9, 120.0
"""What a child process may use beyond the limits of reading: bytes for PyTorch and the network (it holds .6 GB with 49
B-scans of 496 x 512), and seconds, per file and again per megabyte (one core needs 1 s, or 10 s for compressed
data)."""
OF_A_SCAN = (*SUFFIXES, ".xml")
"""Endings of the files that make up a scan in a folder; other files there may be this table."""
_CORRECTED_BEFORE = (
    "has changed since somebody corrected it, or has another axial length or other facts in a catalog now, and its row "
    "is left as it was; give --apply-corrections with its corrections, or another --out"
)
_OF_A_CATALOG = (
    "has changed, or has another axial length or corrections now, and its row is left as it was, because it has what a "
    "catalog says about the scan; give that catalog instead of the file, or another --out"
)


Known = Laterality | Acquisition | None
"""What is known about a scan besides its file: its row in a catalog, or the eye that its path names."""
KnownScans = Mapping[str, Known]
Item = tuple[str, Known]


def read_known(source: str, known: Known, limits: Limits | None = None, *, raster_only: bool = False) -> Volume:
    """The scan with what its row in a catalog says, or with the eye that its path names (see Volume.with_eye). Raises
    ReadError."""
    if isinstance(known, Acquisition):
        volume = read_volume(source, spacing_mm=known.spacing_mm, raster_only=raster_only, limits=limits)
        return known.apply_to(volume)
    return read_volume(source, raster_only=raster_only, limits=limits).with_eye(known)


def name_of(given: str | Volume) -> str:
    """The file of a scan, or what a volume states as its source."""
    return given.source if isinstance(given, Volume) else given


def person_of(known: Known) -> str:
    """The participant in the catalog. An id that only the file states may be a hospital's number, and is left out."""
    return known.participant if isinstance(known, Acquisition) else ""


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
    moved: Callable[[str, str], None] | None = None,
    workers: int = 0,
    progress: Callable[[Iterable[str | Volume]], Iterable[str | Volume]] = iter,
    echo: Echo = print,
) -> int:
    """Segment each source that `out` does not hold yet, and add its row; the file is replaced whole.

    A file that cannot be read or segmented gets a row with its problem, and is tried again by the next call. A source
    that is named twice has one row. If a file on a disk or its sidecar has changed, it is segmented again: `file_state`
    in its row is a hash of their sizes and dates. A corrected row is kept, and `echo` says so, unless `corrections` has
    the scan; so is a row with what a catalog says about the scan, unless `known` says that again. If the file of a row
    is gone, as after a folder was renamed, the row passes to the same acquisition's new place.

    finder, device: as for `segment`.
    corrections: fingerprint of a scan → what somebody has corrected in it; its row is written again, marked as
    corrected.
    only_corrected: read every scan, but segment and add only those with corrections. A file that cannot be read gets no
    row; `echo` gets its problem.
    known: source → what is known about the scan besides its file; see `read_known`.
    axial_lengths: rescale lateral millimetres. Every scan is then read, and segmented again if its row was measured
    with another length. Scans without a length in the table keep nominal millimetres.
    also: called with each source and what was found in it, before its row is written.
    moved: called with the old and the new file of a row that passes to another file and stays as it is, before it is
    written.
    workers: child processes of one thread each that read and segment files with the packaged network; 0: this process
    alone. Volumes, and everything if there are `corrections`, are segmented in this process.
    progress: wraps the loop over the sources.

    Returns the number of new or changed rows. Raises EvaluationError if `out` is no such table, is being written by
    another process, or has rows of another network, rows measured with axial lengths if none are given now or, with
    `only_corrected`, rows of scans that nobody has corrected. Raises CorrectionsError if `corrections` do not fit a
    scan, or fit none of them.
    """
    finder, corrections, known = finder or load_finder(device=device), corrections or {}, known or {}
    done = set[str]()
    with only_writer(out), closing(_Table(out, moved, echo)) as table:
        table.expect(finder.model, only_corrected, axial_lengths is not None)
        here = _InThisProcess(table, limits, finder, corrections, only_corrected, known, axial_lengths, also, echo)
        new: list[str] = []
        if workers and not (corrections or only_corrected):
            # A scan whose row stays is not segmented again, so that its picture stays.
            files = [s for s in dict.fromkeys(sources) if isinstance(s, str) and not table.stays(s, known.get(s))]
            new = [s for s in files if not table.has(s, state_of(s, known.get(s)))]
        by_hand = table.corrected_and_gone if new else ()
        from_children = _rows_of(new, known, axial_lengths, device, also, limits or Limits(), workers, by_hand)
        waiting = set(new)
        for given in progress(sources):
            source = name_of(given)
            if source in done:
                continue
            if source in waiting and isinstance(given, str):
                row = next(from_children)
                if not row["problem"] and table.keeps(row, source, echo):
                    row = None
            else:
                row = here.row(given)
            if isinstance(given, str):  # volumes in memory may share a source
                done.add(source)
            if row is None:
                table.put_kept()
            else:
                table.put(row, echo)
    _report_unused(corrections, here.used, echo)
    return table.changed


@dataclass(frozen=True)
class _InThisProcess:
    """What makes rows of a table in this process; the fields are parameters of `write_table`."""

    table: "_Table"
    limits: Limits | None
    finder: LayerFinder
    corrections: Mapping[str, Corrections]
    only_corrected: bool
    known: KnownScans
    axial_lengths: AxialLengths | None
    also: Callable[[str, ScanSegmentation], None] | None
    echo: Echo
    used: set[str] = field(default_factory=set)
    """Files of the corrections that fitted a scan."""

    def row(self, given: str | Volume) -> dict[str, str] | None:
        """The new row of a scan; None if the table needs none, because it has this row or keeps another one."""
        source = name_of(given)
        own = self.known.get(source)
        state = "" if isinstance(given, Volume) else state_of(source, own)
        has_row = self.table.has(source, state)
        is_done = has_row and not self.table.inherits(source, own)
        if is_done and not self.corrections and self.axial_lengths is None:
            return None
        try:
            if (found := self._found(given, own, state, is_done)) is None:
                return None
            grid = None if isinstance(given, Volume) else device_grid_of(given, self.limits)
            row = row_of(found, grid) | {"source": source, "file_state": state, "participant": person_of(own)}
        except (BucketError, CorrectionsError):
            raise  # neither an unreachable bucket nor a wrong file of corrections says anything about the scan
        except BAD_INPUT as error:
            if has_row and isinstance(error, ReadError):  # it was read before; a network drive may be away
                return None
            problem = _problem(source, error)  # it may name a sidecar instead
            if self.table.stays(source, own):
                self.echo(f"{source}: its row is left as it was: {problem}")
                return None
            if self.only_corrected:
                self.echo(f"{source}: {problem}")
                return None
            return blank_row(source) | {"problem": problem}
        if self.also:
            self.also(source, found)
        return row

    def _found(self, given: str | Volume, own: Known, state: str, is_done: bool) -> ScanSegmentation | None:
        """Read and segment a scan; None if its row stays as it is, or is not wanted."""
        volume = given if isinstance(given, Volume) else read_known(given, own, self.limits)
        source = name_of(given)
        by_hand = self.corrections.get(fingerprint(volume.voxels)) if self.corrections else None
        if by_hand is not None:
            self.used.add(by_hand.source)
        length = self.axial_lengths.of(volume) if self.axial_lengths else None
        same_length = self.axial_lengths is None or self.table.row(source)["axial_length_mm"] == cell_of(length)
        if is_done and same_length and by_hand is None:
            return None
        facts = facts_of(volume, state) | {"axial_length_mm": cell_of(length), "participant": person_of(own)}
        if self.table.keeps(facts, source, self.echo, despite=by_hand) or (self.only_corrected and by_hand is None):
            return None
        found = segment(volume, axial_length_mm=length, finder=self.finder)
        return found if by_hand is None else found.corrected(by_hand)


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
    """The rows of these files, in their order, made in child processes. `by_hand`: scans of `corrected_and_gone`."""
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
        return blank_row(source) | {"problem": _problem(source, error)}
    if also and scan_of(row) not in by_hand:
        also(source, found)
    return row


@functools.lru_cache(maxsize=1)
def _read_once(lengths: Path, state: str) -> AxialLengths:  # noqa: ARG001
    """`state` is part of the key, because the file may change between two calls in one process."""
    return read_axial_lengths(lengths)


def _lost(item: Item, what: Lost) -> dict[str, str]:
    source, _ = item
    problem = f"{what.code}: {source}: the process that segmented it {what.what}; {REASONS[what.code].fix}"
    return blank_row(source) | {"problem": problem}


def _deadline(limits: Limits, item: Item) -> float:
    source, _ = item
    size = file_size(source)
    return limits.deadline(size, source) + CHILD_SECONDS * (1 + size / 1e6)


def _problem(source: str, error: Exception) -> str:
    if isinstance(error, ReadError):
        return f"{error.code}: {error}"
    if ran_out_of_memory(error):
        return f"decoder_memory: {source}: memory ran out while it was segmented; {REASONS['decoder_memory'].fix}"
    if isinstance(error, ConfigError):  # such as a child that did not start
        return f"segmentation_failed: {source}: {error}"
    # One scan must not stop a table of thousands. The message may hold anything, so only the error's type is kept.
    return f"segmentation_failed: {source}: {type(error).__name__}; please report it with the file's format"


class _Table:
    """The rows of a table, whose file is written again as rows change, and always at the end. A large table, which
    takes long to write, is written less often."""

    WAIT = 30
    """Time between two writes, in multiples of what a write takes; a killed process loses at most the work of that
    time."""

    def __init__(self, out: Location, moved: Callable[[str, str], None] | None, echo: Echo):
        self.out, self.changed, self._on_move, self._echo = out, 0, moved, echo
        self._unsaved, self._next = False, 0.0
        self._version = _version_of(out)
        self.rows = read_table(out) if out.exists() else []
        # Files that could not be read are tried again: a network drive may have been away.
        self._states = {row["source"]: row["file_state"] for row in self.rows if not row["problem"]}
        self._places = {row["source"]: i for i, row in enumerate(self.rows)}
        self._replaced: dict[str, int] = {}
        self._kept: tuple[str, dict[str, str]] | None = None
        self._same_scan = defaultdict[tuple[str, ...], list[int]](list)
        for i, row in enumerate(self.rows):
            self._same_scan[scan_of(row)].append(i)

    def expect(self, model: str, only_corrected: bool, by_lengths: bool) -> None:
        """Raise EvaluationError for rows of another network, with `only_corrected` for rows that nobody has corrected,
        and unless `by_lengths` for rows measured with axial lengths."""
        if others := {row["model"] for row in self.rows} - {"", model}:
            raise EvaluationError(
                f"{self.out}: has rows of another network ({', '.join(sorted(others))}; this is {model}), whose "
                "numbers must not be mixed with these; choose another --out"
            )
        if only_corrected and any(not row["problem"] and not row["corrected_bscans"] for row in self.rows):
            raise EvaluationError(f"{self.out}: has rows of scans that nobody has corrected; choose another --out")
        # A corrected row may have the axial length of the page on which it was corrected.
        if not by_lengths and any(row["axial_length_mm"] and not row["corrected_bscans"] for row in self.rows):
            raise EvaluationError(
                f"{self.out}: has rows measured with axial lengths, which must not be mixed with nominal millimetres; "
                "give --axial-length with their table again, or another --out"
            )

    def has(self, source: str, state: str) -> bool:
        """Whether the table had a row of this source, without a problem, and its file has not changed since."""
        before = self._states.get(source)
        if before is None:
            return False
        # Without the catalog of its row, only the files can be compared.
        return not state or state in (before, before.partition("-")[0]) or not (before or is_remote(source))

    def row(self, source: str) -> dict[str, str]:
        place = self._places.get(source)
        return blank_row(source) if place is None else self.rows[place]

    def stays(self, source: str, known: Known) -> bool:
        """Whether the row of this scan must not get automatic lines, because somebody corrected it, or what a file
        alone says, because a catalog said more."""
        return _must_stay(self.row(source), person_of(known))

    def inherits(self, source: str, known: Known) -> bool:
        """Whether a corrected row of the same scan, whose file is gone, is to pass to this source."""
        return scan_of(self.row(source)) in self.corrected_and_gone and not self.stays(source, known)

    @functools.cached_property
    def corrected_and_gone(self) -> set[tuple[str, ...]]:
        """Corrected scans whose file is gone. If it turns up elsewhere, its row must not get automatic lines."""
        corrected = [row for row in self.rows if row and row["corrected_bscans"] and row["acquisition"]]
        return {scan_of(row) for row in corrected if _has_gone(row)}

    def keeps(self, facts: Mapping[str, str], source: str, echo: Echo, despite: Corrections | None = None) -> bool:
        """Whether the row of this scan stays as it is: because somebody corrected it, unless `despite` has new
        corrections, or because it has what a catalog says, which is not given now. `facts`: cells of its new row.
        First, a row of the same acquisition whose file is gone passes to `source`. `put_kept` then writes it."""
        if old := self._move(facts, source):
            echo(f"{old}: is no longer there; its row is now that of {source}")
        before = self.row(source)
        # Without a length now, the row may have that of the page on which it was corrected.
        length = facts["axial_length_mm"] or before["axial_length_mm"]
        if before["participant"] and not facts["participant"]:
            now = facts["file_state"] or before["file_state"], length
            if despite or now != (before["file_state"].partition("-")[0], before["axial_length_mm"]):
                echo(f"{source}: {_OF_A_CATALOG}")
        elif despite is None and before["corrected_bscans"]:
            now = facts["file_state"], facts["laterality"], length
            if now != (before["file_state"], before["laterality"], before["axial_length_mm"]):
                echo(f"{source}: {_CORRECTED_BEFORE}")
        else:
            return False
        self._kept = old, before | {"source": source}
        return True

    def put_kept(self) -> None:
        """Write what `keeps` kept last, if anything: apart from it, since a full disk is no problem of the scan."""
        if self._kept is None:
            return
        (old, row), self._kept = self._kept, None
        if old and self._on_move:
            self._on_move(old, row["source"])
        self.put(row)

    def _move(self, facts: Mapping[str, str], source: str) -> str:
        """If the file of this acquisition's row is gone, as after a folder was renamed, give the row to `source`, in
        place of a row of a problem or of another scan, which the file has replaced; a corrected row also in place of
        one of this scan, as of a copy. Returns the old source, empty if there is no such row."""
        before = self.row(source)
        if _must_stay(before, facts["participant"]) or not facts["acquisition"]:
            return ""
        is_copy = facts["acquisition"] == before["acquisition"]
        for place in self._same_scan.get(scan_of(facts), ()):
            row = self.rows[place]
            old = row.get("source", "")
            if old and (row["corrected_bscans"] or not is_copy) and _has_gone(row):
                if (replaced := self._places.get(source)) is not None:
                    self._replaced[source] = replaced
                self._places.pop(old, None)
                self._places[source] = place
                return old
        return ""

    def put(self, row: dict[str, str], echo: Echo | None = None) -> None:
        """Replace the row of this source, or add one; if it is new or changed, `echo` gets its problem or verdict."""
        if (replaced := self._replaced.pop(row["source"], None)) is not None:
            self.rows[replaced] = {}  # not removed, since rows are known by their places
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
        """Write the table if its file lacks changes."""
        if self._unsaved:
            begun = time.monotonic()
            self._keep_edited()
            try:
                save_table([row for row in self.rows if row], self.out)
            finally:  # it may be replaced already when an error comes, as of flushing its folder
                self._version = _version_of(self.out)
            self._unsaved, self._next = False, time.monotonic() + self.WAIT * (time.monotonic() - begun)

    def _keep_edited(self) -> None:
        """Copy a table that somebody else has saved meanwhile, as from a spreadsheet, before it is replaced."""
        if isinstance(self.out, BucketPath) or _version_of(self.out) in (None, self._version):
            return
        free = (self.out.with_name(f"{self.out.stem}.edited{n}{self.out.suffix}") for n in itertools.count(1))
        aside = next(path for path in free if not path.exists())
        write_whole(aside, self.out.read_bytes())
        self._echo(
            f"{self.out}: another program saved it while it was being written; that version is in {aside}, and the "
            "table is written without its changes: make them again once this is done"
        )


def _version_of(out: Location) -> tuple[int, ...] | None:
    """What differs once a file on a disk was saved again; None without one."""
    if isinstance(out, BucketPath) or not out.is_file():
        return None
    facts = out.stat()
    return facts.st_ino, facts.st_size, facts.st_mtime_ns


def _must_stay(row: Mapping[str, str], participant: str) -> bool:
    """Whether a row is corrected, or is of a catalog while now no catalog names a participant."""
    return bool(row["corrected_bscans"] or (row["participant"] and not participant))


def _report_unused(corrections: Mapping[str, Corrections], used: set[str], echo: Echo) -> None:
    """Tell `echo` which files of corrections fit none of the scans; raise CorrectionsError if none was used."""
    if unused := {each.source for each in corrections.values()} - used:
        problem = f"{min(unused)}: corrections of none of these scans"
        if not used:
            raise CorrectionsError(f"{problem}; give the scan that was corrected, read with the same options")
        echo(f"{problem}; {len(unused)} such files were not used" if len(unused) > 1 else problem)


def state_of(source: str, known: Known = None) -> str:
    """A hash of the sizes and dates of a file (or of the images in a folder) and of its sidecars, then, if `known` is a
    catalog's row, a hash of what the row changes in the scan. The first is empty for a file in a bucket; both are empty
    if a file on a disk is not there."""
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
    """Whether the file of a row was on this disk and is gone."""
    return bool(row["file_state"]) and not is_remote(row["source"]) and not state_of(row["source"])


def is_of(row: Mapping[str, str], source: str) -> bool:
    """Whether a row was made from this file in its present state, whatever a catalog says about it."""
    return row["file_state"].partition("-")[0] == state_of(source)


def only_writer(table: Location) -> AbstractContextManager[Any]:
    """Keep other processes from writing this table: two that each replace the whole file would lose each other's rows.

    Raises EvaluationError if another process is writing it, BucketError in a bucket.
    """
    table.parent.mkdir(parents=True, exist_ok=True)
    return only_one(table, table.parent / f".{table.name}.lock", "writing this table", EvaluationError)
