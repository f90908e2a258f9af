"""Write a phantom cohort to disk in the layout of AI-READI, plus a folder of ground truth.

retinal_oct/manifest.tsv, participants.tsv and retinal_oct/structural_oct/SCANNER/PARTICIPANT/*.dcm are as in AI-READI.
ground_truth/ has labels.tsv, defects.tsv, phantom.json (settings) and an .npz of surfaces and lesions for every volume.
"""

import csv
import json
import math
import shutil
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from octfm.errors import OctfmError
from octfm.io.isolation import UNLIMITED, Lost
from octfm.io.location import local_path, lock
from octfm.io.spread import spread
from octfm.phantom.cohort import Participant, draw_cohort, eye_of
from octfm.phantom.defects import DEFECTS, Defect, spoil
from octfm.phantom.dicom import to_bytes, to_dataset, uid
from octfm.phantom.native.eye import render_eye
from octfm.phantom.pathology import DIAGNOSES, LESIONS
from octfm.phantom.render import GroundTruth, render
from octfm.phantom.scanner import DEFAULT_SCANNERS, SCANNERS, Scanner
from octfm.volume.volume import Laterality, Shape3, Volume

PHANTOM_VERSION = "3"
"""Increased by every change that alters bytes; reports of results state it."""
VERSIONS = (PHANTOM_VERSION, "4")
"""Of cohorts that can be written: 4 has the outer retina, choroid and looks of the streamed phantoms."""
MAX_SIDE, MAX_VOXELS = 8192, 5 * 10**8
"""Limits of one scan; a native Triton volume has 1.3e8 voxels."""

SIDES: tuple[Laterality, ...] = ("R", "L")
_MODALITIES = (
    "cardiac_ecg",
    "clinical_data",
    "environment",
    "retinal_flio",
    "retinal_oct",
    "retinal_octa",
    "retinal_photography",
)
LOCK = ".lock"
_Row = dict[str, Any]
_Rows = tuple[list[_Row], list[_Row], list[_Row]]
"""One participant's rows of manifest.tsv, labels.tsv and defects.tsv."""


@dataclass(frozen=True)
class _Job:
    """One participant to write."""

    out: Path
    person: Participant
    seed: int
    size: Shape3 | None
    defects: dict[tuple[str, Laterality], Defect]
    """(scanner, eye) -> defect of the extra, defective file written for that acquisition."""
    effect: bool
    version: str
    truth: bool


def write_phantom(
    out: str | Path,
    participants: int,
    seed: int,
    *,
    size: Shape3 | None = (32, 256, 192),
    scanners: Sequence[str] = DEFAULT_SCANNERS,
    diagnoses: Sequence[str] = DIAGNOSES,
    second_scanner: float = 0.25,
    fractions: tuple[float, float, float] = (0.7, 0.15, 0.15),
    defects: float = 0.0,
    zipped: bool = False,
    effect: bool = True,
    version: str = PHANTOM_VERSION,
    only: Sequence[str] | None = None,
    truth: bool = True,
    workers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Write a cohort: both eyes of every participant, of a share `second_scanner` of them on two instruments.

    size: (B-scans, rows, columns); None for the size that each instrument has in AI-READI.
    fractions: shares of train, val and test in the column recommended_split.
    defects: number of defective files added per good file; no good file is replaced.
    zipped: put the files of each scanner into one ZIP archive, structural_oct/SCANNER.zip, as AI-READI also ships.
    effect: False renders every eye healthy under the same labels; in such a null cohort nothing may predict them.
    version: one of VERSIONS; participants, eyes and lesions are the same, images differ.
    only: write the part of the cohort that these of `scanners` scanned, with the bytes that it has in the whole.
    truth: False leaves out the .npz of surfaces and lesions.
    workers: processes, None for one per core; the bytes do not depend on it.
    progress: called with (done, total) participants.

    The folder appears when it is complete. Raises OctfmError for impossible arguments, or if `out` exists.
    """
    out = local_path(out)
    shares = {"defects": defects, "second_scanner": second_scanner}
    _check(out, participants, seed, size, scanners, only, diagnoses, shares, fractions, version)
    people = draw_cohort(
        participants, seed, scanners=scanners, second_scanner=second_scanner, fractions=fractions, diagnoses=diagnoses
    )
    plan = _plan_defects(people, seed, defects)
    if only is not None:
        people = [replace(p, scanners=own) for p in people if (own := tuple(s for s in p.scanners if s in only))]
        if not people:
            raise OctfmError(
                f"phantom cohort: none of {participants} participants is scanned on {', '.join(only)}; draw more"
            )
    with _new_folder(out) as partial:
        manifest: list[_Row] = []
        labels: list[_Row] = []
        planted: list[_Row] = []
        jobs = [_Job(partial, person, seed, size, plan[person.index], effect, version, truth) for person in people]
        count = 0 if workers == 1 else workers  # a single worker is this process
        written = spread(_write_participant, jobs, _not_written, workers=count, limits=UNLIMITED, chunk=1)
        for done, (rows, truths, spoilt) in enumerate(written, 1):
            manifest += rows
            labels += truths
            planted += spoilt
            if progress:
                progress(done, len(people))
        if zipped:
            for folder in sorted((partial / "retinal_oct" / "structural_oct").iterdir()):
                _zip(folder)
        _write_tsv(partial / "retinal_oct" / "manifest.tsv", manifest)
        _write_tsv(partial / "participants.tsv", [_participant_row(person) for person in people])
        _write_tsv(partial / "ground_truth" / "labels.tsv", labels)
        columns = ("filepath", "kind", "code", "outcome", "participant_id")  # of a table that may have no rows
        _write_tsv(partial / "ground_truth" / "defects.tsv", planted, columns)
        settings = {
            "phantom_version": version,
            "participants": participants,
            "seed": seed,
            "size": size,
            "scanners": list(scanners),
            "second_scanner": second_scanner,
            "fractions": fractions,
            "defects": defects,
            **({"zipped": True} if zipped else {}),
            **({"only": list(only)} if only is not None else {}),
            "diagnoses": list(diagnoses),
            "effect": effect,
            "lesions": LESIONS,
            "volumes": len(labels),
            "synthetic": True,
        }
        (partial / "ground_truth" / "phantom.json").write_text(json.dumps(settings, indent=1) + "\n", "utf-8")
    return out


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """The folder that becomes `out`, empty and locked while it is written; a killed process may have left one.

    Raises OctfmError if another process is writing it, or has finished since `_check`, and for a folder of that name
    that is none of ours.
    """
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    if any(partial.iterdir()) and not (partial / LOCK).exists():
        raise OctfmError(f"{partial}: would be emptied, and is not of octfm phantom; name another folder")
    try:
        held = lock(partial / LOCK)
    except BlockingIOError:
        raise OctfmError(f"{out}: another process is writing this cohort; wait for it, or name another") from None
    with held:
        _expect_new(out)
        for left in partial.iterdir():
            if left.is_dir():
                shutil.rmtree(left)
            elif left.name != LOCK:
                left.unlink()
        yield partial
        partial.rename(out)
        (out / LOCK).unlink(missing_ok=True)  # not before: another process could take a new one, and begin


def _expect_new(out: Path) -> None:
    if out.exists():
        raise OctfmError(
            f"{out}: already exists; a phantom cohort is written to a new folder: remove this one or name another"
        )


def _check(
    out: Path,
    count: int,
    seed: int,
    size: Shape3 | None,
    scanners: Sequence[str],
    only: Sequence[str] | None,
    diagnoses: Sequence[str],
    shares: Mapping[str, float],
    fractions: tuple[float, float, float],
    version: str,
) -> None:
    _expect_new(out)
    if count < 1:
        raise OctfmError(f"phantom cohort: expected at least 1 participant, got {count}")
    if seed < 0:
        raise OctfmError(f"phantom cohort: expected a seed of 0 or more, got {seed}")
    if size is not None and (len(size) != 3 or size[0] < 4 or size[1] < 64 or size[2] < 32):
        raise OctfmError(f"phantom cohort: expected a size of at least 4 B-scans x 64 rows x 32 columns, got {size}")
    if size is not None and (max(size) > MAX_SIDE or math.prod(size) > MAX_VOXELS):
        voxels, taken = " x ".join(f"{n:,}" for n in size), math.prod(size) / 1e9
        raise OctfmError(
            f"phantom cohort: {voxels} voxels per scan take {taken:,.1f} GB; "
            f"at most {MAX_VOXELS / 1e9:g} GB and {MAX_SIDE:,} voxels along an axis are allowed"
        )
    for what, names, known in (("scanner", scanners, SCANNERS), ("diagnosis", diagnoses, DIAGNOSES)):
        unknown = [name for name in names if name not in known]
        if unknown or not names:
            raise OctfmError(
                f"phantom cohort: unknown {what} {', '.join(unknown) or '(none given)'}; known: {', '.join(known)}"
            )
    if len(fractions) != 3 or min(fractions) < 0 or abs(sum(fractions) - 1) > 1e-6:
        raise OctfmError(f"phantom cohort: train, val and test shares must be 3 numbers that sum to 1, got {fractions}")
    if repeated := [name for name in scanners if list(scanners).count(name) > 1]:
        raise OctfmError(f"phantom cohort: scanner {repeated[0]} is named twice; name each once")
    if absent := [name for name in only or () if name not in scanners]:
        raise OctfmError(f"phantom cohort: only {absent[0]}: expected some of {', '.join(scanners)}")
    if version not in VERSIONS:
        raise OctfmError(f"phantom cohort: expected version {' or '.join(VERSIONS)}, got {version}")
    for what, share in shares.items():
        if not 0 <= share <= 1:
            raise OctfmError(f"phantom cohort: {what} is a share; expected 0 to 1, got {share}")


def _not_written(job: _Job, lost: Lost) -> _Rows:
    advice = "free memory, or use fewer --workers, and run the same command again"
    raise OctfmError(f"{job.out}: the process that rendered participant {job.person.index} {lost.what}; {advice}")


def _write_participant(job: _Job) -> _Rows:
    manifest, labels, planted = [], [], []
    for name in job.person.scanners:
        scanner = SCANNERS[name]
        for laterality in SIDES:
            volume, truth = _acquire(job, scanner, laterality)
            path = _path(volume, scanner)
            _write(job.out / path.lstrip("/"), to_bytes(to_dataset(volume, scanner, job.person, job.version)))
            if job.truth:
                _write_truth(job.out / "ground_truth" / f"{volume.acquisition}.npz", truth)
            manifest.append(_manifest_row(volume, scanner, path))
            labels.append(_label_row(volume, truth, job, path))
            if defect := job.defects.get((name, laterality)):
                rng = np.random.default_rng(
                    [job.seed, 10, job.person.index, list(SCANNERS).index(name), SIDES.index(laterality)]
                )
                rows, spoilt = _plant(job, volume, scanner, defect, rng)
                manifest += rows
                planted.append(spoilt)
    return manifest, labels, planted


def _acquire(job: _Job, scanner: Scanner, laterality: Laterality, *, again: bool = False) -> tuple[Volume, GroundTruth]:
    """Scan one eye; `again` for a second scan of it, with different noise and motion."""
    # A random stream for each scan: its bytes depend neither on the order of scans nor on which others are written.
    # Nothing is appended for the first scan, so that its bytes are the same with and without defective files.
    stream = [job.seed, 11, job.person.index, list(SCANNERS).index(scanner.name), SIDES.index(laterality), *[1] * again]
    eye = eye_of(job.person, laterality, job.seed, effect=job.effect)
    scanned = render if job.version == PHANTOM_VERSION else render_eye
    volume, truth = scanned(eye, scanner, np.random.default_rng(stream), job.size or scanner.vendor_size)
    identity = uid("instance", job.version, job.seed, job.person.participant, laterality, scanner.name, volume.shape)
    return replace(volume, acquisition=identity), truth


def _plan_defects(people: Sequence[Participant], seed: int, share: float) -> list[dict[tuple[str, Laterality], Defect]]:
    """For each participant, (scanner, eye) -> defect of an extra file. Kinds take turns, so a large cohort has all."""
    files = [(person.index, name, side) for person in people for name in person.scanners for side in SIDES]
    plan: list[dict[tuple[str, Laterality], Defect]] = [{} for _ in people]
    chosen = np.random.default_rng([seed, 12]).permutation(len(files))[: math.ceil(share * len(files))]
    for turn, file in enumerate(chosen):
        index, name, side = files[file]
        plan[index][name, side] = DEFECTS[turn % len(DEFECTS)]
    return plan


def _plant(
    job: _Job, volume: Volume, scanner: Scanner, defect: Defect, rng: np.random.Generator
) -> tuple[list[_Row], _Row]:
    """Write a defective extra file; return its rows of the manifest (none for a stray copy) and of defects.tsv."""
    assert volume.laterality is not None
    spoilt = _acquire(job, scanner, volume.laterality, again=True)[0] if defect.rescanned else volume
    # Under a UID of its own, an extra file is rejected or flagged for its defect, not as a copy of the good one.
    spoilt = replace(spoilt, acquisition=volume.acquisition if defect.same_uid else uid("spoilt", volume.acquisition))
    path = _path(spoilt, scanner)
    if defect.same_uid:
        # Sorts before the good file, so that only the manifest shows which of the two is meant.
        path = f"{path.rpartition('/')[0]}/0_copy_{path.rpartition('/')[2]}"
    ds = to_dataset(spoilt, scanner, job.person, job.version, rle=False)
    _write(job.out / path.lstrip("/"), spoil(ds, spoilt.voxels, defect.kind, rng))
    listed = _manifest_row(spoilt, scanner, path)
    if defect.kind == "wrong_laterality":
        listed["laterality"] = SIDES[1 - SIDES.index(volume.laterality)]
    row = {
        "filepath": path,
        "kind": defect.kind,
        "code": defect.code,
        "outcome": defect.outcome,
        "participant_id": job.person.participant,
    }
    return [] if defect.same_uid else [listed], row


def _path(volume: Volume, scanner: Scanner) -> str:
    name = f"{volume.participant}_{scanner.protocol}_oct_{str(volume.laterality).lower()}_{volume.acquisition}.dcm"
    return f"/retinal_oct/structural_oct/{scanner.name}/{volume.participant}/{name}"


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def _zip(folder: Path) -> None:
    """Replace a folder by a ZIP archive of its files.

    Stored, not deflated, with a fixed date, so that bytes depend neither on a compression library nor on the clock.
    """
    with zipfile.ZipFile(folder.with_name(folder.name + ".zip"), "w", zipfile.ZIP_STORED) as archive:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            archive.writestr(zipfile.ZipInfo(str(path.relative_to(folder)), (1980, 1, 1, 0, 0, 0)), path.read_bytes())
    shutil.rmtree(folder)


def _write_truth(path: Path, truth: GroundTruth) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    # Rounded to 1/64 row, which compresses well and is far below what can be measured.
    surfaces = np.round(truth.surfaces * 64) / np.float32(64)
    arrays = {
        "surfaces": surfaces.astype(np.float32),
        "surface_names": np.array(truth.surface_names),
        "lesions": truth.lesions,
        "spacing_mm": np.array(truth.spacing_mm),
    }
    # As np.savez_compressed, but at a compression level that takes less time than the image, and with a fixed date.
    with zipfile.ZipFile(path, "w") as archive:
        for name, array in arrays.items():
            buffer = BytesIO()
            np.lib.format.write_array(buffer, array, allow_pickle=False)
            member = zipfile.ZipInfo(f"{name}.npy", (1980, 1, 1, 0, 0, 0))
            archive.writestr(member, buffer.getbuffer(), zipfile.ZIP_DEFLATED, compresslevel=1)


def _manifest_row(volume: Volume, scanner: Scanner, path: str) -> _Row:
    """A row of retinal_oct/manifest.tsv, with the columns of AI-READI v3."""
    dz, dy, dx = volume.spacing_mm
    frames, rows, columns = volume.shape
    return {
        "person_id": volume.participant,
        "manufacturer": scanner.manufacturer,
        "manufacturers_model_name": scanner.model,
        "anatomic_region": "Macula",
        "imaging": "OCT",
        "laterality": volume.laterality,
        "height": rows,
        "width": columns,
        "number_of_frames": frames,
        "pixel_spacing": f"[{dy:.6f}, {dx:.6f}]",
        "slice_thickness": f"{dz:.6f}",
        "sop_instance_uid": volume.acquisition,
        "filepath": path,
        "reference_instance_uid": uid("fundus", volume.acquisition),
        "reference_filepath": "Not reported",
    }


def _label_row(volume: Volume, truth: GroundTruth, job: _Job, path: str) -> _Row:
    """A row of labels.tsv: the diagnosis and severity drawn for this eye, and the thickness that was rendered.

    In a null cohort (effect=False) the volume does not show the diagnosis.
    """
    person = job.person
    side: Laterality = "R" if truth.laterality == "R" else "L"
    return {
        "participant_id": truth.participant,
        "laterality": truth.laterality,
        "scanner": truth.scanner,
        "filepath": path,
        "sop_instance_uid": volume.acquisition,
        "diagnosis": person.eye_diagnosis[side],
        "severity": f"{person.severity[side]:.4f}",
        "participant_diagnosis": person.diagnosis,
        "cst_um": f"{truth.cst_um:.2f}",
        "age": f"{truth.age:.0f}",
        "phantom_version": job.version,
    }


def _participant_row(person: Participant) -> _Row:
    date = f"{person.study_date[:4]}-{person.study_date[4:6]}-{person.study_date[6:]}"
    row = {
        "person_id": person.participant,
        "clinical_site": person.clinical_site,
        "study_group": person.study_group,
        "age": person.age,
        "study_visit_date": date,
        "recommended_split": person.split,
    }
    return row | {name: str(name == "retinal_oct").upper() for name in _MODALITIES}


def _write_tsv(path: Path, rows: Iterable[_Row], columns: Sequence[str] | None = None) -> None:
    rows = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, columns or list(rows[0]), delimiter="\t", lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
