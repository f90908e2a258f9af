"""Catalog: a row for every accepted acquisition, a reject with a reason for every other file."""

import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from octfm.catalog.acquisition import Acquisition, Reject
from octfm.catalog.inspection import verdicts
from octfm.catalog.participants.ids import may_be_one_person, person_key, under_one_id
from octfm.catalog.participants.splits import FRACTIONS, SPLITS, Split, assign, diagnosis_of, parse_split
from octfm.display import box, brief, counted, data_frame, number, with_labels
from octfm.errors import OctfmError, reason_of
from octfm.formats.reasons import REASONS
from octfm.io.hashing import hash_text
from octfm.io.location import BucketPath, Location, from_json, location, replacing
from octfm.io.parquet import from_parquet, to_parquet
from octfm.volume.volume import Laterality

FORMAT, VERSION = "octfm-catalog", 3
_ADDED = ("layout", "participant_source", "modality")
"""Columns missing in older catalogs of this version."""
DISK_WAITS_S, BUCKET_WAITS_S = (1, 0), (1, 2, 3, 4, 0)
"""Seconds to wait, before reading again, for `Catalog.save` to replace its second file after its first."""


class CatalogError(OctfmError):
    """A root that cannot be scanned; a catalog that is missing, damaged, of another version, or leaks participants."""


class NothingAccepted(CatalogError):
    """A scan without a single acceptable file. `catalog` has the rejects, to save and inspect them."""

    def __init__(self, message: str, catalog: "Catalog"):
        super().__init__(message)
        self.catalog = catalog


class HalfReplaced(CatalogError):
    """Files of two scans, the later of which was stopped while it saved. `catalog` is that of catalog.parquet, which is
    replaced last; what it left out is no longer known."""

    def __init__(self, message: str, catalog: "Catalog"):
        super().__init__(message)
        self.catalog = catalog


@dataclass(frozen=True)
class Catalog:
    """The result of a scan: accepted acquisitions, rejects with their reasons, and what was skipped on purpose."""

    root: str
    acquisitions: tuple[Acquisition, ...]
    rejects: tuple[Reject, ...]
    companions: int = 0
    """Number of tables, documents and ground truth files, and of files of a volume after its first."""
    skipped: tuple[Reject, ...] = ()
    """Recognised and left out on purpose (angiography, photographs, radial scans, ...); not errors."""
    requests: Mapping[str, int] = field(default_factory=dict, compare=False)
    """Requests of a scan in a bucket by kind, and how many had to be repeated."""
    pixels: bool = False
    """Whether pixels were checked (octfm.catalog.inspection). If so, the optic disc of a row without a flag about it
    agrees with the laterality tag."""

    def __len__(self) -> int:
        return len(self.acquisitions)

    def __iter__(self) -> Iterator[Acquisition]:
        return iter(self.acquisitions)

    def __repr__(self) -> str:
        people = number(len(set(self._people())), "participant")
        left_out = f"{number(len(self.rejects), 'file')} rejected, {len(self.skipped):,} skipped"
        return brief("Catalog", f"{number(len(self.acquisitions), 'volume')} of {people}", left_out)

    def _repr_html_(self) -> str:
        facts = self.summary()
        shown = {
            "accepted": f"{number(facts['accepted'], 'volume')} of {number(facts['participants'], 'participant')}",
            "scanners": counted(facts["scanners"]),
            "protocols": counted(facts["protocols"]),
            "layouts": counted(facts["layouts"]) if set(facts["layouts"]) - {"raster"} else "",
            "modalities": counted(facts["modalities"]) if set(facts["modalities"]) - {"structure"} else "",
            "eyes": counted(facts["lateralities"]),
            "participants per split": counted(facts["participants_per_split"]),
            "flags": counted(facts["flags"]),
            "skipped on purpose": counted(facts["skips"]),
        }
        why = [(code, f"{count:,}", REASONS[code].fix) for code, count in facts["rejects"].items()]
        return box("Catalog", shown, table=(("rejected because", "files", "what to do"), why))

    def to_pandas(self, *, rejects: bool = False) -> Any:
        """A DataFrame with one row per accepted volume and a column for every label of its participant; or, with
        `rejects`, one per file that was rejected or skipped, with code, sentence and what to do.

        Raises ConfigError without pandas.
        """
        if rejects:
            return data_frame(self._left_out(), [*Reject.__dataclass_fields__, "fix", "skipped"])
        rows = []
        for a in self.acquisitions:
            own = {name: getattr(a, name) for name in Acquisition.__dataclass_fields__ if name != "participant_labels"}
            rows.append(with_labels(own, a.participant_labels))
        return data_frame(rows)

    def save(self, folder: str | Path | BucketPath) -> Location:
        """Write catalog.parquet and rejects.parquet, each atomically; `load` refuses a pair from two scans."""
        import pyarrow as pa

        folder = location(folder)
        facts = {"format": FORMAT, "version": VERSION, "root": self.root, "companions": self.companions}
        # Both files carry the key, which is how `load` recognises a pair.
        facts |= {"key": self._key(), "requests": dict(self.requests), "pixels": self.pixels}
        staged = []
        for name, table in (("rejects.parquet", self._left_out()), ("catalog.parquet", self._rows())):
            schema = _schema(name).with_metadata({"octfm": json.dumps(facts)})
            staged.append((folder / name, to_parquet(pa.Table.from_pylist(table, schema))))
        # Both are built and written before either is replaced: an error, such as a full disk, must not leave a mixture.
        with ExitStack() as both:
            # An ExitStack leaves in reverse, so that catalog.parquet is replaced last on a disk as well.
            for file, content in reversed(staged) if isinstance(folder, Path) else staged:
                place = both.enter_context(replacing(file)) if isinstance(file, Path) else file
                place.write_bytes(content)
        return folder

    def beside(self, folder: Location) -> Location:
        """A folder next to `folder` for what this catalog accepted: not inside it, since `folder` may be passed on, and
        this catalog may name people. Raises CatalogError for a whole bucket, next to which are only other buckets."""
        whole = Path(os.path.abspath(folder)) if isinstance(folder, Path) else folder  # noqa: PTH100  ("." has no name)
        if not whole.parents:
            raise CatalogError(f"{folder}: expected a folder in it; nothing can be written next to it")
        return whole.with_name(f"{whole.name}_before_{self._accepted()._key()[:8]}")

    @staticmethod
    def load(folder: str | Path | BucketPath) -> "Catalog":
        """Read a saved catalog.

        Raises CatalogError if the pair is missing, damaged or of another version; HalfReplaced if it is from two scans.
        """
        folder = location(folder)
        for patience in DISK_WAITS_S if isinstance(folder, Path) else BUCKET_WAITS_S:
            rows, facts = _read_parquet(folder / "catalog.parquet")
            left_out, other = _read_parquet(folder / "rejects.parquet")
            if facts["key"] == other["key"]:
                break
            time.sleep(patience)  # a scan may be replacing both, one after the other
        if unknown := sorted({row["code"] for row in left_out} - REASONS.keys()):
            raise CatalogError(
                f"{folder}: rejects.parquet has reason {unknown[0]}, which this octfm does not know; use the octfm "
                "that wrote it, or scan again"
            )
        rejects = [Reject(**{name: row[name] for name in Reject.__dataclass_fields__}) for row in left_out]
        catalog = Catalog(
            root=facts["root"],
            acquisitions=tuple(_acquisition(row) for row in rows),
            rejects=tuple(reject for reject in rejects if not reject.expected),
            companions=facts["companions"],
            skipped=tuple(reject for reject in rejects if reject.expected),
            requests=facts.get("requests", {}),
            pixels=facts.get("pixels", False),
        )
        mixed = f"{folder}: catalog.parquet and rejects.parquet are not from one scan, or were edited; scan again"
        if facts["key"] != other["key"]:
            raise HalfReplaced(mixed, catalog._accepted())
        # The key is a hash of both tables. Earlier versions worded some advice otherwise, so that of the file counts.
        if facts["key"] != catalog._key([row["fix"] for row in left_out]):
            raise CatalogError(mixed)
        return catalog

    def layer_heights(self, acquisition: Acquisition) -> tuple[str, ...]:
        """uris of the height maps that refer to this volume; octfm.formats.read_overlay reads them."""
        return self._skipped(acquisition, "layer_heights")

    def voxel_labels(self, acquisition: Acquisition) -> tuple[str, ...]:
        """uris of the DICOM SEG that refer to this volume; octfm.formats.read_overlay reads them."""
        return self._skipped(acquisition, "voxel_labels")

    def _skipped(self, acquisition: Acquisition, code: str) -> tuple[str, ...]:
        about = acquisition.sop_instance_uid
        return tuple(found.uri for found in self.skipped if found.code == code and found.refers_to == about)

    @property
    def reject_share(self) -> float:
        """Rejected files over rejected and accepted ones; skipped files do not count."""
        return len(self.rejects) / max(len(self.rejects) + len(self.acquisitions), 1)

    def expect_few_rejects(self, most: float, advice: str = "see its rejects") -> None:
        """Raises CatalogError if a larger share than `most` is rejected: a pipeline stops before training."""
        if self.reject_share > most:
            codes = ", ".join(f"{n} {code}" for code, n in count_words(reject.code for reject in self.rejects).items())
            total = len(self.rejects) + len(self.acquisitions)
            raise CatalogError(
                f"{self.root}: {len(self.rejects)} of {total} files are rejected ({self.reject_share:.1%}), "
                f"expected at most {most:.1%}: {codes}; {advice}"
            )

    def summary(self) -> dict[str, Any]:
        """Counts for reports and the terminal; rejects most frequent first, splits in participants. Ids that differ in
        spelling only are one participant.

        `disc_sides`, by scanner, only if the scan has checked pixels.
        """
        owned = list(zip(self._people(), self.acquisitions, strict=True))
        participants = {person: a.split for person, a in owned}
        measured: dict[str, Any] = {"bucket": dict(self.requests)} if self.requests else {}
        measured |= {"disc_sides": verdicts(self.acquisitions)} if self.pixels else {}
        return measured | {
            "accepted": len(self.acquisitions),
            "rejected": len(self.rejects),
            "skipped": len(self.skipped),
            "companions": self.companions,
            "participants": len(participants),
            "eyes": len({(person, a.laterality) for person, a in owned if a.laterality}),
            "scanners": count_words(a.scanner for a in self.acquisitions),
            "protocols": count_words(a.protocol for a in self.acquisitions),
            "layouts": count_words(a.layout for a in self.acquisitions),
            "modalities": count_words(a.modality for a in self.acquisitions),
            "participants_found_by": count_words(a.participant_source or "unknown" for a in self.acquisitions),
            "lateralities": count_words(a.laterality or "unknown" for a in self.acquisitions),
            "participants_per_split": {split: n for split in SPLITS if (n := list(participants.values()).count(split))},
            "rejects": count_words(reject.code for reject in self.rejects),
            "skips": count_words(reject.code for reject in self.skipped),
            "flags": count_words(flag for a in self.acquisitions for flag in a.flags),
        }

    def _people(self) -> list[str]:
        """The person of every acquisition, under one id."""
        return under_one_id([a.participant for a in self.acquisitions])

    def _accepted(self) -> "Catalog":
        return replace(self, rejects=(), skipped=())

    def _rows(self) -> list[dict[str, Any]]:
        return [
            asdict(a) | {"participant_labels": json.dumps(a.participant_labels, sort_keys=True), "flags": list(a.flags)}
            for a in self.acquisitions
        ]

    def _left_out(self) -> list[dict[str, Any]]:
        """One row per file that is not in the catalog, with how to get it in."""
        return [
            asdict(reject) | {"fix": reject.fix, "skipped": reject.expected}
            for reject in (*self.rejects, *self.skipped)
        ]

    def _key(self, fixes: Sequence[str] | None = None) -> str:
        """`fixes`: what to do about every file that is left out, as a file words it; default: as this version does."""
        # Added columns with their defaults do not enter the hash: catalogs from before these columns keep their key.
        added = {("layout", "raster"), ("participant_source", ""), ("modality", "structure")}
        rows = [
            {name: value for name, value in row.items() if name not in _ADDED or (name, value) not in added}
            for row in self._rows()
        ]
        left_out = self._left_out()
        if fixes is not None:
            left_out = [row | {"fix": fix} for row, fix in zip(left_out, fixes, strict=True)]
        content = json.dumps([self.root, self.companions, rows, left_out], default=list)
        return hash_text(content)[:16]


def assign_splits(
    acquisitions: Sequence[Acquisition],
    fractions: tuple[float, float, float] = FRACTIONS,
    seed: int = 0,
    one_person: Iterable[tuple[str, str]] = (),
    kept: Callable[[str], Split | None] = lambda _: None,
) -> tuple[Acquisition, ...]:
    """Assign splits: that of `kept` where it has one for the participant, else recommended_split where participants.tsv
    has one, else stratified by participant.

    Strata are by scanners, diagnosis (`diagnosis_of`) and number of eyes. `one_person`: pairs of participants that may
    be one person, because both ids have the same voxels; so may ids of `may_be_one_person`, such as 1001 and 00001001.
    They get the same split; if several are kept or recommended, train goes first: nobody in the test split may have
    been seen in training.
    """
    pairs = [*one_person]
    # Ids of pairs as well: a copy that was left out may be filed under a spelling that no accepted file has.
    ids = {a.participant for a in acquisitions}.union(*pairs)
    same = _leaders([*pairs, *may_be_one_person(ids)])
    recommended: dict[str, Split] = {}
    several: set[str] = set()
    scanners: dict[str, set[str]] = {}
    eyes: dict[str, set[Laterality | None]] = {}
    for a in acquisitions:
        person = same.get(a.participant, a.participant)
        scanners.setdefault(person, set()).add(a.scanner)
        eyes.setdefault(person, set()).add(a.laterality)
        if split := kept(a.participant) or parse_split(a.participant_labels.get("recommended_split", "")):
            # SPLITS is in this order: train before val before test.
            earlier = recommended.get(person, split)
            several |= {person} if earlier != split else set()
            recommended[person] = split if SPLITS.index(split) < SPLITS.index(earlier) else earlier
    diagnosis = {a.participant: diagnosis_of(a.participant_labels) or "" for a in acquisitions}
    strata = {p: (sorted(scanners[p]), diagnosis.get(p, ""), len(eyes[p])) for p in scanners}
    splits = assign(strata, recommended, fractions, seed)
    placed = []
    for a in acquisitions:
        flags = a.flags
        person = same.get(a.participant, a.participant)
        for flag, applies in (("split_with_another_id", a.participant in same), ("several_splits", person in several)):
            flags = (*flags, flag) if applies and flag not in flags else flags
        placed.append(replace(a, split=splits[person], flags=flags))
    assert_participant_level(placed)
    return tuple(placed)


def _leaders(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Participant in a pair -> the first by name of all participants that pairs link it to."""
    groups: dict[str, set[str]] = {}
    for a, b in pairs:
        # All members of a group share one set, so that chains of pairs end up in one group.
        joined = groups.get(a, {a}) | groups.get(b, {b})
        groups |= dict.fromkeys(joined, joined)
    return {participant: min(group) for participant, group in groups.items()}


def assert_participant_level(acquisitions: Iterable[Acquisition]) -> None:
    """Raises CatalogError if a participant is in two splits: training would see the fellow eye of a test eye."""
    splits: dict[str, Split | None] = {}
    for a in acquisitions:
        if (split := splits.setdefault(person_key(a.participant), a.split)) != a.split:
            raise CatalogError(
                f"{a.uri}: participant {a.participant} is in {split} and in {a.split}; assign splits by participant"
            )


def count_words(words: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(words).items(), key=lambda item: (-item[1], item[0])))


def _schema(name: str):
    import pyarrow as pa

    if name == "rejects.parquet":
        text = {name: pa.string() for name in ("uri", "code", "sentence", "fix", "refers_to")}
        return pa.schema(text | {"bytes": pa.int64(), "skipped": pa.bool_()})
    text = ("uri", "participant", "laterality", "scanner", "protocol", "spacing_source", "sop_instance_uid", "split")
    return pa.schema(
        {name: pa.string() for name in (*text, "participant_labels", *_ADDED)}
        | {"shape": pa.list_(pa.int64(), 3), "spacing_mm": pa.list_(pa.float64(), 3), "flags": pa.list_(pa.string())}
    )


def _read_parquet(path: Location) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    import pyarrow as pa

    try:
        table = from_parquet(path)
    except FileNotFoundError:
        raise CatalogError(f"{path}: no such file; make it with: octfm scan FOLDER") from None
    except PermissionError:  # of a colleague's catalog, which is whole
        raise
    except (OSError, pa.ArrowException) as error:
        raise CatalogError(f"{path}: damaged ({reason_of(error, 120)}); scan again") from error
    facts = from_json((table.schema.metadata or {}).get(b"octfm", b"{}"))
    if facts.get("format") != FORMAT or facts.get("version") != VERSION:
        found = f"{facts.get('format', 'another parquet file')} version {facts.get('version', '?')}"
        raise CatalogError(f"{path}: expected {FORMAT} version {VERSION}, got {found}; scan again with this octfm")
    return table.to_pylist(), facts


def _acquisition(row: dict[str, Any]) -> Acquisition:
    d, h, w = row.pop("shape")
    z, y, x = row.pop("spacing_mm")
    labels, flags = from_json(row.pop("participant_labels")), tuple(row.pop("flags"))
    return Acquisition(shape=(d, h, w), spacing_mm=(z, y, x), participant_labels=labels, flags=flags, **row)
