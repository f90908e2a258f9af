"""Catalog: one row per accepted acquisition, one reject with a reason per other file, and nothing in between."""

import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from octfm.data.aireadi import ManifestRow, Tables, read_tables
from octfm.data.readers import REASONS, Header, read_header
from octfm.data.splits import SPLITS, Split, assign, parse_split
from octfm.data.volume import Laterality, Shape3, Spacing3
from octfm.data.walk import walk
from octfm.errors import OctfmError, ReadError

FORMAT, VERSION = "octfm-catalog", 1

_CHUNK = 32
"""Files per task: a header takes milliseconds, handing one over to a process as long."""


class CatalogError(OctfmError):
    """A root without a usable scan, or a catalog that is missing, damaged, of another version, or leaks participants."""


@dataclass(frozen=True)
class Acquisition:
    """One accepted file. Holds no name, birth date or other direct identifier."""

    uri: str
    """Absolute path."""
    participant: str
    """From the manifest, else PatientID, else the folder."""
    laterality: Laterality | None
    """None where nothing states it and where header and manifest contradict each other."""
    scanner: str
    """heidelberg_spectralis, topcon_maestro2, topcon_triton, zeiss_cirrus, else manufacturer_model."""
    protocol: str
    shape: Shape3
    """(D, H, W)."""
    spacing_mm: Spacing3
    """(dz, dy, dx)."""
    spacing_source: str
    sop_instance_uid: str
    split: Split | None = None
    participant_labels: dict[str, str] = field(default_factory=dict)
    """Columns of participants.tsv, without direct identifiers."""
    flags: tuple[str, ...] = ()
    """What is doubtful but no reason to reject: laterality_conflict, slice_thickness_corrected, not_in_manifest, ..."""

    @property
    def eye_id(self) -> str:
        return f"{self.participant}_{self.laterality or 'unknown'}"


@dataclass(frozen=True)
class Reject:
    uri: str
    code: str
    """One of octfm.data.readers.REASONS."""
    sentence: str
    bytes: int


@dataclass(frozen=True)
class Catalog:
    root: str
    acquisitions: tuple[Acquisition, ...]
    rejects: tuple[Reject, ...]
    companions: int = 0
    """Tables, documents and ground truth beside the images: neither accepted nor rejected."""

    def save(self, folder: str | Path) -> Path:
        """Write catalog.parquet and rejects.parquet. Each appears complete or not at all, and a mixed pair is refused by `load`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        facts = {"format": FORMAT, "version": VERSION, "root": self.root, "companions": self.companions, "key": self._key()}
        staged = []
        for name, table in (("catalog.parquet", self._rows()), ("rejects.parquet", [asdict(reject) for reject in self.rejects])):
            schema = _schema(name).with_metadata({"octfm": json.dumps(facts)})
            partial = folder / f".{name}.{os.getpid()}"
            pq.write_table(pa.Table.from_pylist(table, schema), partial, compression="zstd")
            staged.append((partial, folder / name))
        for partial, final in staged:
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.replace(final)
        return folder

    @staticmethod
    def load(folder: str | Path) -> "Catalog":
        """Raises CatalogError where the pair is missing, damaged, of another version or from two different scans."""
        folder = Path(folder)
        rows, facts = _read_parquet(folder / "catalog.parquet")
        rejects, other = _read_parquet(folder / "rejects.parquet")
        catalog = Catalog(
            root=facts["root"],
            acquisitions=tuple(_acquisition(row) for row in rows),
            rejects=tuple(Reject(**row) for row in rejects),
            companions=facts["companions"],
        )
        if not facts["key"] == other["key"] == catalog._key():
            raise CatalogError(f"{folder}: catalog.parquet and rejects.parquet are not from one scan, or were edited; scan again")
        return catalog

    def summary(self) -> dict[str, Any]:
        """Counts that a report or a terminal shows; rejects most frequent first, splits in participants."""
        participants = {a.participant: a.split for a in self.acquisitions}
        return {
            "accepted": len(self.acquisitions),
            "rejected": len(self.rejects),
            "companions": self.companions,
            "participants": len(participants),
            "eyes": len({a.eye_id for a in self.acquisitions}),
            "scanners": _count(a.scanner for a in self.acquisitions),
            "protocols": _count(a.protocol for a in self.acquisitions),
            "lateralities": _count(a.laterality or "unknown" for a in self.acquisitions),
            "participants_per_split": {split: n for split in SPLITS if (n := list(participants.values()).count(split))},
            "rejects": _count(reject.code for reject in self.rejects),
            "flags": _count(flag for a in self.acquisitions for flag in a.flags),
        }

    def _rows(self) -> list[dict[str, Any]]:
        return [
            asdict(a) | {"participant_labels": json.dumps(a.participant_labels, sort_keys=True), "flags": list(a.flags)}
            for a in self.acquisitions
        ]

    def _key(self) -> str:
        content = json.dumps([self.root, self.companions, self._rows(), [asdict(reject) for reject in self.rejects]], default=list)
        return hashlib.sha256(content.encode("utf-8", "surrogateescape")).hexdigest()[:16]


def scan(root: str | Path, *, seed: int = 0, workers: int | None = None, progress: Callable[[int, int], None] | None = None) -> Catalog:
    """Look at every file below `root` (AI-READI layout or any tree), without decoding, and assign participant-level splits.

    The result does not depend on `workers` (processes; default one per core). `progress(done, total)` counts files.
    Raises CatalogError for a root that is missing or has no acceptable file, TableError for a contradictory participants.tsv.
    """
    folder = _existing(root)
    found = walk(folder)
    if not found.files and not found.unreadable:
        others = f"{len(found.companions)} other files" if found.companions else "it is empty"
        raise CatalogError(f"{folder}: no image files below it ({others}); point at the folder that holds the DICOM files")
    tables = read_tables(folder, found.companions)
    rejects = [Reject(uri, "unreadable", sentence, 0) for uri, sentence in found.unreadable]
    headers: list[Header] = []
    for outcome in _examine_all(found.files, workers, progress):
        if isinstance(outcome, Header):
            headers.append(outcome)
        else:
            rejects.append(outcome)
    headers, duplicates = _without_duplicates(headers, tables)
    rejects += duplicates
    acquisitions = [_accept(header, tables) for header in headers]
    if not acquisitions:
        counts = ", ".join(f"{n} {code} ({REASONS[code]})" for code, n in _count(reject.code for reject in rejects).items())
        raise CatalogError(f"{folder}: none of {len(rejects)} files is an acceptable OCT volume: {counts}")
    return Catalog(
        root=str(folder),
        acquisitions=assign_splits(acquisitions, seed=seed),
        rejects=tuple(sorted(rejects, key=lambda reject: reject.uri)),
        companions=len(found.companions),
    )


def assign_splits(
    acquisitions: Sequence[Acquisition],
    diagnosis: Mapping[str, str] | None = None,
    fractions: tuple[float, float, float] = (0.8, 0.1, 0.1),
    seed: int = 0,
) -> tuple[Acquisition, ...]:
    """The acquisitions with their split: recommended_split where participants.tsv has one, else stratified by participant.

    `diagnosis` by participant; by default the column diagnosis, else study_group.
    """
    recommended: dict[str, Split] = {}
    scanners: dict[str, set[str]] = {}
    eyes: dict[str, set[str]] = {}
    for a in acquisitions:
        scanners.setdefault(a.participant, set()).add(a.scanner)
        eyes.setdefault(a.participant, set()).add(a.eye_id)
        if split := parse_split(a.participant_labels.get("recommended_split", "")):
            recommended[a.participant] = split
    if diagnosis is None:
        labels = {a.participant: a.participant_labels for a in acquisitions}
        diagnosis = {p: columns.get("diagnosis") or columns.get("study_group", "") for p, columns in labels.items()}
    strata = {p: (sorted(scanners[p]), diagnosis.get(p, ""), len(eyes[p])) for p in scanners}
    splits = assign(strata, recommended, fractions, seed)
    placed = tuple(replace(a, split=splits[a.participant]) for a in acquisitions)
    assert_participant_level(placed)
    return placed


def assert_participant_level(acquisitions: Iterable[Acquisition]) -> None:
    """Raises CatalogError if anyone is in two splits: their second eye would be known before the test."""
    splits: dict[str, Split | None] = {}
    for a in acquisitions:
        if splits.setdefault(a.participant, a.split) != a.split:
            raise CatalogError(
                f"{a.uri}: participant {a.participant} is in {splits[a.participant]} and in {a.split}; assign splits by participant"
            )


def _existing(root: str | Path) -> Path:
    if "://" in str(root):
        raise CatalogError(f"{root}: only local folders can be scanned; copy it to a local disk first")
    folder = Path(os.path.abspath(root))  # noqa: PTH100  (not resolve: a linked data set keeps the name that the user knows)
    if not folder.exists():
        raise CatalogError(f"{folder}: no such folder; check the path")
    if not folder.is_dir():
        raise CatalogError(f"{folder}: expected a folder, got a file; give the folder it is in, or open it with octfm.read_volume")
    return folder


def _examine_all(files: list[Path], workers: int | None, progress: Callable[[int, int], None] | None) -> Iterable[Header | Reject]:
    """In the order of `files`, whichever worker is faster."""
    chunks = [files[i : i + _CHUNK] for i in range(0, len(files), _CHUNK)]
    # Fewer files are done before the processes have started.
    workers = 1 if len(files) < 8 * _CHUNK else workers or os.cpu_count() or 1
    if workers == 1:
        results: Iterable[list[Header | Reject]] = map(_examine, chunks)
    else:
        from joblib import Parallel, delayed

        results = cast(Any, Parallel(n_jobs=workers, return_as="generator")(delayed(_examine)(chunk) for chunk in chunks))
    done = 0
    for found in results:
        done += len(found)
        if progress:
            progress(done, len(files))
        yield from found


def _examine(paths: list[Path]) -> list[Header | Reject]:
    found: list[Header | Reject] = []
    for path in paths:
        try:
            found.append(read_header(path))
        except ReadError as error:
            found.append(Reject(str(path), error.code, str(error), path.stat().st_size if path.exists() else 0))
    return found


def _without_duplicates(headers: list[Header], tables: Tables) -> tuple[list[Header], list[Reject]]:
    """One file per SOP Instance UID: the one that the manifest lists, else the first by path."""
    kept: dict[str, Header] = {}
    for header in sorted(headers, key=lambda header: (header.uri not in tables.by_path, header.uri)):
        kept.setdefault(header.sop_instance_uid, header)
    rejects = [
        Reject(
            header.uri,
            "duplicate_sop_uid",
            f"{header.uri}: the same SOP Instance UID as {kept[header.sop_instance_uid].uri}; remove the copy",
            Path(header.uri).stat().st_size,
        )
        for header in headers
        if kept[header.sop_instance_uid] is not header
    ]
    return [header for header in headers if kept[header.sop_instance_uid] is header], rejects


def _accept(header: Header, tables: Tables) -> Acquisition:
    """Header and manifest side by side; every contradiction becomes a flag."""
    from octfm.data.readers.dicom import lateralities, scanner_slug, slugify

    row = tables.find(header.uri, header.sop_instance_uid)
    flags = [*header.flags]
    if row is None:
        flags += ["not_in_manifest"] if tables.by_path or tables.by_uid else []
        row = ManifestRow()
    flags += _contradictions(header, row)

    laterality = header.laterality
    stated, _ = lateralities([row.laterality])
    if stated and laterality and stated != laterality:
        laterality = None  # mirrored or not would be a guess
        flags.append("laterality_conflict")
    elif stated and not laterality and "laterality_conflict" not in flags:
        laterality = stated
        flags[flags.index("laterality_unknown")] = "laterality_from_manifest"

    participant = row.participant or header.participant
    if participant is None:
        participant = Path(header.uri).parent.name
        flags.append("participant_from_folder")
    scanner = scanner_slug(row.manufacturer, row.model) if header.scanner == "unknown" else header.scanner
    return Acquisition(
        uri=header.uri,
        participant=participant,
        laterality=laterality,
        scanner=scanner,
        protocol=header.protocol if header.protocol != "unknown" else slugify(row.region) or "unknown",
        shape=header.shape,
        spacing_mm=header.spacing_mm,
        spacing_source=header.spacing_source,
        sop_instance_uid=header.sop_instance_uid,
        participant_labels=tables.participants.get(participant, {}),
        flags=tuple(flags),
    )


def _contradictions(header: Header, row: ManifestRow) -> list[str]:
    from octfm.data.readers.dicom import scanner_slug

    flags = []
    if row.participant and header.participant and row.participant != header.participant:
        flags.append("participant_conflict")
    listed = scanner_slug(row.manufacturer, row.model)
    if "unknown" not in (listed, header.scanner) and listed != header.scanner:
        flags.append("scanner_conflict")
    if row.sop_instance_uid and row.sop_instance_uid != header.sop_instance_uid:
        flags.append("sop_uid_conflict")
    if row.shape and row.shape != header.shape:
        flags.append("shape_conflict")
    pairs = [*zip(row.in_plane_mm or (), header.spacing_mm[1:], strict=False), (row.slice_thickness_mm, header.spacing_mm[0])]
    if any(mm is not None and abs(mm / header_mm - 1) > 0.05 for mm, header_mm in pairs):
        flags.append("spacing_conflict")
    return flags


def _count(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))


def _schema(name: str):
    import pyarrow as pa

    if name == "rejects.parquet":
        return pa.schema({"uri": pa.string(), "code": pa.string(), "sentence": pa.string(), "bytes": pa.int64()})
    text = ("uri", "participant", "laterality", "scanner", "protocol", "spacing_source", "sop_instance_uid", "split", "participant_labels")
    return pa.schema(
        {name: pa.string() for name in text}
        | {"shape": pa.list_(pa.int64(), 3), "spacing_mm": pa.list_(pa.float64(), 3), "flags": pa.list_(pa.string())}
    )


def _read_parquet(path: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(path)
    except FileNotFoundError:
        raise CatalogError(f"{path}: no such file; make it with: octfm scan ROOT") from None
    except (OSError, pa.ArrowException) as error:
        raise CatalogError(f"{path}: damaged ({' '.join(str(error).split())[:120]}); scan again") from error
    facts = json.loads((table.schema.metadata or {}).get(b"octfm", b"{}"))
    if facts.get("format") != FORMAT or facts.get("version") != VERSION:
        found = f"{facts.get('format', 'another parquet file')} version {facts.get('version', '?')}"
        raise CatalogError(f"{path}: expected {FORMAT} version {VERSION}, got {found}; scan again with this octfm")
    return table.to_pylist(), facts


def _acquisition(row: dict[str, Any]) -> Acquisition:
    d, h, w = row.pop("shape")
    z, y, x = row.pop("spacing_mm")
    labels, flags = json.loads(row.pop("participant_labels")), tuple(row.pop("flags"))
    return Acquisition(shape=(d, h, w), spacing_mm=(z, y, x), participant_labels=labels, flags=flags, **row)
