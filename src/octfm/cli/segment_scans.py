"""`octfm segment` on scans: into a table, or scan by scan to the terminal and a folder."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from octfm.addresses import refuse_windows
from octfm.catalog.acquisition import Acquisition
from octfm.catalog.catalog import Catalog
from octfm.catalog.columns import composed
from octfm.catalog.participants.pseudonyms import is_pseudonymous
from octfm.cli.options import echo_line, is_named_as_file
from octfm.display import number
from octfm.errors import ConfigError, CorrectionsError, ExportError, ReadError
from octfm.io.hashing import hash_text
from octfm.io.heap import keep_freed_memory
from octfm.io.isolation import Limits
from octfm.io.location import location
from octfm.io.progress import Progress
from octfm.layers.axial_lengths import AxialLengths, read_axial_lengths
from octfm.layers.calibrate import calibrate_rows, expect_enough
from octfm.layers.corrections import Corrections, find_corrections
from octfm.layers.export import expect_writable_for, stem_of, write_files
from octfm.layers.rows import describe, read_table, save_table
from octfm.layers.sample import Sample, samples
from octfm.layers.segment import ScanSegmentation
from octfm.layers.segment import segment as segment_scan
from octfm.layers.table import KnownScans, is_of, name_of, only_writer, person_of, read_known, write_table
from octfm.layers.zones import device_grid_of
from octfm.report.segmented.contact_sheet import ContactSheet
from octfm.tasks.segment import load_segmenter
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.segmentation import Segmentation
from octfm.volume.volume import Volume


def in_catalogs(words: Iterable[str], raster_only: bool = False) -> tuple[list[str], dict[str, Acquisition]]:
    """The words that do not name a catalog, and the scans of those that do, without angiography.

    Raises ConfigError for a pseudonymised catalog, which does not say where its files are, and if there is no scan at
    all; CatalogError for a damaged catalog.
    """
    others, found = [], dict[str, Acquisition]()
    for word in words:
        refuse_windows(word)
        place = location(word)
        if not (place / "catalog.parquet").is_file():
            others.append(word)
            continue
        catalog = Catalog.load(place)
        if is_pseudonymous(catalog):
            raise ConfigError(f"{word}: a pseudonymised catalog does not say where its files are; give their folder")
        taken = [
            a for a in catalog.acquisitions if a.modality == "structure" and (a.layout == "raster" or not raster_only)
        ]
        if left_out := len(catalog.acquisitions) - len(taken):
            kind = "rasters of structural OCT" if raster_only else "structural OCT"
            echo_line(f"{word}: {number(left_out, 'scan')} left out: only {kind} can be segmented")
        found |= {a.uri: a for a in taken}
    if not others and not found:
        raise ConfigError(f"{', '.join(words)}: no scan to segment in it; see octfm scan")
    return others, found


@dataclass(frozen=True)
class Scans:
    """The options of `octfm segment` for scans, and what it does with them."""

    out: Path | None
    """A table FILE.csv, a folder for NIfTI and DICOM, or None: only the terminal."""
    limits: Limits
    device: str | None
    apply: str | None = None
    """A finished training, used instead of the packaged network."""
    dicom: bool = False
    calibrate: Path | None = None
    corrections: Path | None = None
    only_corrected: bool = False
    axial_length: float | Path | None = None
    """Axial length of the only eye, in mm, or a table of many."""
    workers: int = 0
    """Child processes that segment scans for a table; see `write_table`."""

    def __post_init__(self) -> None:
        """Raises ConfigError for options that need another one, or contradict it."""
        if self.only_corrected and (self.corrections is None or not self.table):
            raise ConfigError(
                "--only-corrected: limits a table to corrected scans; add --apply-corrections FOLDER and --out FILE.csv"
            )
        if self.workers and (self.corrections is not None or not self.table):
            raise ConfigError("--workers: segments scans for a table; add --out FILE.csv, without --apply-corrections")
        if self.out is not None and not self.table and (self.out.is_file() or is_named_as_file(self.out)):
            raise ConfigError(f"--out {self.out}: expected a folder or a table FILE.csv, got another file; choose one")
        if self.apply is not None and self.table:
            raise ConfigError("--apply: writes files into a folder; give --out FOLDER")
        if self.dicom and (self.out is None or self.table):
            raise ConfigError("--dicom: writes files into a folder; add --out FOLDER")
        if self.calibrate is not None and not self.table:
            raise ConfigError("--calibrate: scales the ranges of a table; add --out FILE.csv")

    @property
    def table(self) -> Path | None:
        return self.out if self.out is not None and self.out.suffix.lower() == ".csv" else None

    def segment_samples(self, names: list[str]) -> None:
        """Segment synthetic scans, and print the true thickness next to the one found."""
        made = samples(names)
        for each in made:
            true = f"a true central thickness of {each.centre_um:.1f} µm around its pit"
            echo_line(f"{each.volume.source}: synthetic, with {true}")
        self.segment([each.volume for each in made], truth=made)

    def segment(
        self,
        sources: Sequence[str | Volume],
        known: KnownScans | None = None,
        truth: Sequence[Sample] = (),
    ) -> None:
        """Segment files or volumes. `known`: see `read_known`; `truth`: the samples of volumes, whose true thickness is
        printed."""
        keep_freed_memory()
        if isinstance(self.axial_length, float) and (self.table or len(sources) > 1):
            raise ConfigError(
                f"--axial-length {self.axial_length:g}: belongs to one eye; give its scan without a table, or a CSV "
                "with the axial length of each"
            )
        if self.calibrate is not None and self.table is not None:
            before = read_table(self.table) if self.table.exists() else []
            named = {*map(name_of, sources), *(row["source"] for row in before)}
            expect_enough(self.calibrate, named)  # before hours of work
        by_hand = find_corrections(self.corrections) if self.corrections is not None else {}
        lengths = read_axial_lengths(self.axial_length) if isinstance(self.axial_length, Path) else None
        people = {name_of(source): person_of((known or {}).get(name_of(source))) for source in sources}
        if lengths is not None and lengths.names_none(people):  # before hours of work
            raise _names_none(lengths, name_of(sources[0]))
        if self.table is not None:
            self._into_table(self.table, sources, by_hand, known or {}, lengths)
        else:
            self._one_by_one(sources, by_hand, known or {}, lengths, truth)

    def _into_table(
        self,
        table: Path,
        sources: Sequence[str | Volume],
        by_hand: dict[str, Corrections],
        known: KnownScans,
        lengths: AxialLengths | None,
    ) -> None:
        sheet = ContactSheet(table)
        _expect_short(sheet.page.name, f"--out {table}")
        if len(sources) == 1 and isinstance(sources[0], str):
            self._volume(sources[0], known)  # an error, not a table of one problem
        sources, known = _as_in_table(table, sources, known)
        with only_writer(table):
            sheet.keep_only(read_table(table) if table.exists() else [])
        with Progress("segment", len(sources), "scans") as progress:
            added = write_table(
                sources,
                table,
                limits=self.limits,
                device=self.device,
                corrections=by_hand,
                only_corrected=self.only_corrected,
                known=known,
                axial_lengths=lengths,
                also=sheet.add,
                moved=sheet.move,
                workers=self.workers,
                progress=progress.over,
                echo=echo_line,
            )
        named = {*map(name_of, sources)}
        rows = [row for row in read_table(table) if row["source"] in named]
        failed = sum(bool(row["problem"]) for row in rows)
        problems = f"; {failed} could not be read or segmented, see the column problem" if failed else ""
        echo_line(f"{table}: {added} new of {len(sources)} scans{problems}")
        if self.calibrate is not None:
            with only_writer(table):
                calibrated, summary = calibrate_rows(read_table(table), self.calibrate)
                save_table(calibrated, table)
            echo_line(*summary)
        echo_line(sheet.write(read_table(table)))
        if lengths is not None:
            _report_nominal(lengths, {row["source"]: row["axial_length_mm"] for row in rows if not row["problem"]})
        if failed == len(sources):
            raise typer.Exit(1)

    def _one_by_one(
        self,
        sources: Sequence[str | Volume],
        by_hand: dict[str, Corrections],
        known: KnownScans,
        lengths: AxialLengths | None,
        truth: Sequence[Sample],
    ) -> None:
        stems = stems_of(name_of(source) for source in sources)
        if self.out is not None:
            for name, stem in stems.items():
                _expect_short(f"{stem}_heights_rows.nii.gz", name)
        failed, used = 0, 0
        measured_by: dict[str, float | None] = {}

        def find(volume: Volume) -> Segmentation:
            length = self.axial_length if isinstance(self.axial_length, float) else lengths and lengths.of(volume)
            measured_by[volume.source] = length
            return segment_scan(volume, axial_length_mm=length, device=self.device)

        trained = load_segmenter(self.apply, self.device).segment if self.apply is not None else None
        with Progress("segment", len(sources), "scans") as progress:
            for source in progress.over(sources):
                try:
                    volume = self._volume(source, known)
                    own = by_hand.get(fingerprint(volume.voxels)) if by_hand else None
                    if own is None and len(by_hand) == len(sources) == 1:
                        next(iter(by_hand.values())).require(volume, "")  # says which scan it is of, before segmenting
                    name = name_of(source)
                    if self.out is not None:
                        expect_writable_for(volume, self.out, stems[name], dicom=self.dicom, limits=self.limits)
                    found = (trained or find)(volume)
                    if not isinstance(found, ScanSegmentation):
                        echo_line(name)
                    else:
                        if own is not None:
                            found = found.corrected(own)
                            used += 1
                        grid = None if isinstance(source, Volume) else device_grid_of(source, self.limits)
                        echo_line(*describe(found, grid).splitlines())
                        _tell_truth(found, truth, volume)
                    if self.out is not None:
                        echo_line(
                            *write_files(found, volume, self.out, stems[name], dicom=self.dicom, limits=self.limits)
                        )
                except (ReadError, ExportError) as error:
                    if len(sources) == 1:
                        raise
                    echo_line(error, err=True)
                    failed += 1
        if by_hand and not used:
            raise CorrectionsError(
                f"{self.corrections}: corrections of none of these scans; give the scan that was corrected"
            )
        if lengths is not None:
            _report_nominal(lengths, measured_by)
        if failed:
            echo_line(f"{failed} of {len(sources)} scans could not be read or written", err=True)
            raise typer.Exit(1)

    def _volume(self, source: str | Volume, known: KnownScans) -> Volume:
        if isinstance(source, Volume):
            return source
        return read_known(source, known.get(source), self.limits, raster_only=self.apply is not None)


def _report_nominal(lengths: AxialLengths, measured_by: Mapping[str, object]) -> None:
    """Name a scan without an axial length; raise ConfigError if no scan has one. `measured_by`: scan → its length,
    empty or None if its millimetres are nominal."""
    nominal = [scan for scan, length in measured_by.items() if not length]
    if nominal and len(nominal) == len(measured_by):
        raise _names_none(lengths, nominal[0])
    if nominal:
        scans = number(len(measured_by), "scan")
        echo_line(f"{lengths.path}: no axial length for {len(nominal)} of {scans}, such as {nominal[0]}")


def _names_none(lengths: AxialLengths, scan: str) -> ConfigError:
    return ConfigError(
        f"{lengths.path}: names none of these scans ({lengths.example} there, {scan} here), so all millimetres are "
        "nominal; name scans as in the column source, or people as the scans do"
    )


def _expect_short(result: str, source: str) -> None:
    """Raise ConfigError, before hours of work, if the longest name of the results is too long for a file system."""
    if (length := len(os.fsencode(result))) > 255:
        raise ConfigError(
            f"{source}: a result would have a name of {length} bytes, {result[:20]}…{result[-20:]}, expected at most "
            "255; give it a shorter name"
        )


def _as_in_table(
    table: Path, sources: Sequence[str | Volume], known: KnownScans
) -> tuple[list[str | Volume], KnownScans]:
    """Sources and what is known about them, each file once and under the name that its row has: a folder gives full
    paths, while the same file may be given by a relative one."""
    rows = read_table(table) if table.exists() else []
    # A relative path may have been written in another folder, where it names another scan.
    here = [n for row in rows if os.path.isabs(n := row["source"]) or is_of(row, n)]  # noqa: PTH117
    names = {os.path.abspath(name): name for name in here}  # noqa: PTH100
    named = {s: s if isinstance(s, Volume) else names.setdefault(os.path.abspath(s), s) for s in sources}  # noqa: PTH100
    most_last = sorted(known.items(), key=lambda item: (isinstance(item[1], Acquisition), item[1] is not None))
    return list(dict.fromkeys(named.values())), {str(named[source]): facts for source, facts in most_last}


def _tell_truth(found: ScanSegmentation, truth: Sequence[Sample], volume: Volume) -> None:
    sample = next((each for each in truth if each.volume is volume), None)
    if sample is not None and found.verdict.accepted:
        true = sample.centre_at(found.etdrs().centre_mm)
        echo_line(f"  true central thickness where the zones lie: {true:.1f} µm")


def stems_of(sources: Iterable[str]) -> dict[str, str]:
    """Source → the stem of its results. If files in several folders share a name, or have names that differ only in
    case or in the encoding of an umlaut (one name on macOS), a part of the path's hash is appended, so that none
    overwrites another."""
    stems = {source: stem_of(source) for source in sources}
    same = {source: composed(stem).casefold() for source, stem in stems.items()}
    count = Counter(same.values())
    return {
        source: stem if count[same[source]] == 1 else f"{stem}-{hash_text(source)[:8]}"
        for source, stem in stems.items()
    }
