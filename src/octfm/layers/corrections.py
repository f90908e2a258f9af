"""Corrections of a scan made by hand in the viewer: the file that holds them, read strictly, and what it states.

The file is JSON (docs/guide/correct-by-hand.md): the fingerprint of the scan's voxels, the network whose lines were
corrected, who did it and when, and for every corrected or checked B-scan its lines in rows and its areas as run
lengths.
"""

from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from octfm.errors import CorrectionsError, one_line, shown
from octfm.io.location import local_path
from octfm.models.layer_net import MASKS, SURFACES
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.volume import Shape3, Volume

FORMAT = "octfm corrections 1"
MOST_BYTES = 300_000_000
"""Nine lines of 1,024 B-scans with 1,024 A-scans take 80 MB."""
AXIAL_LENGTH_MM = (14, 40)
"""Shortest and longest eye by which lateral millimetres are rescaled."""
OUTSIDE_ROWS = 32
"""Rows by which a line may leave the frame."""
OUT_OF_ORDER_ROWS = 0.02
"""A line may lie this much above one before it, because pages round uncorrected lines to a fraction of a row."""


class _Bscan(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    bscan: int = Field(ge=0)
    checked: bool = False
    surfaces: dict[str, list[float | None]] = {}
    areas: dict[str, list[int]] | None = None


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    format: Literal["octfm corrections 1"]
    scan: str = Field(pattern=r"^[0-9a-f]{32}$")
    network: str = Field(max_length=200)
    octfm: str = Field(max_length=100)
    author: str = Field(max_length=200)
    participant: str = Field(default="", max_length=200)
    time: AwareDatetime
    shape: tuple[int, int, int]
    axial_length_mm: float | None = Field(default=None, ge=AXIAL_LENGTH_MM[0], le=AXIAL_LENGTH_MM[1])
    fovea: tuple[float, float] | None = None
    bscans: list[_Bscan]


@dataclass(frozen=True, eq=False)
class Corrections:
    """What somebody has corrected or confirmed in one scan; B-scans are counted from 0 in the order of the file."""

    scan: str
    """Fingerprint of the voxels (octfm.volume.pixel_copies)."""
    network: str
    """Name and hash of the network whose lines were corrected."""
    shape: Shape3
    author: str
    participant: str
    """As typed in the viewer; empty if nothing was."""
    time: str
    """ISO 8601."""
    octfm: str
    """Version that made the page."""
    surfaces: dict[str, dict[int, np.ndarray]]
    """Surface → B-scan → float32 [W] rows, NaN where the surface is not in the image: all lines of checked B-scans, and
    the changed lines of others."""
    areas: dict[int, dict[str, np.ndarray]]
    """B-scan → mask → int64 [R, 2]: runs of (first voxel, count), in which voxels are numbered row by row."""
    checked: frozenset[int]
    """B-scans in which somebody has confirmed all lines and areas."""
    source: str = field(default="corrections", repr=False)
    axial_length_mm: float | None = None
    """Axial length by which the page scaled lateral millimetres; None: nominal millimetres."""
    fovea: tuple[float, float] | None = None
    """(B-scan, A-scan), in fractions, where somebody has set the fovea; None: the pit that is found counts."""

    @property
    def touched(self) -> frozenset[int]:
        """B-scans that were corrected or checked."""
        return self.checked.union(self.areas, *self.surfaces.values())

    @property
    def and_fovea(self) -> str:
        """The words " and the fovea" if it was set by hand, else empty; for sentences that count corrected B-scans."""
        return "" if self.fovea is None else " and the fovea"

    def trusted(self, *names: str) -> np.ndarray:
        """bool [D]: B-scans that were checked, or in which somebody has corrected one of these surfaces."""
        found = np.zeros(self.shape[0], bool)
        found[sorted(self.checked.union(*(self.surfaces.get(name, ()) for name in names)))] = True
        return found

    def labels(self, bscan: int) -> np.ndarray:
        """uint8 [H, W] of one corrected B-scan: 0, or 1 + index in MASKS."""
        flat = np.zeros(self.shape[1] * self.shape[2], np.uint8)
        for name, runs in self.areas[bscan].items():
            for first, count in runs:
                flat[first : first + count] = 1 + MASKS.index(name)
        return flat.reshape(self.shape[1:])

    def require(self, volume: Volume, network: str) -> None:
        """Raise CorrectionsError unless they were made on this scan and on the lines of this network."""
        if (own := fingerprint(volume.voxels)) != self.scan:
            raise CorrectionsError(
                f"{self.source}: corrections of another scan (voxels {self.scan[:12]}, this scan {own[:12]}); give the "
                "scan that was corrected, read with the same options"
            )
        if volume.shape != self.shape:
            raise CorrectionsError(f"{self.source}: shape {self.shape}, expected the scan's {volume.shape}")
        if network != self.network:
            raise CorrectionsError(
                f"{self.source}: corrects lines of {shown(self.network)}, this is {network}; use the octfm that made "
                "the page, or correct a new page"
            )


def read_corrections(path: str | Path) -> Corrections:
    """Read a file that the viewer has saved. Raises CorrectionsError, one line, for anything else."""
    path = local_path(path)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise CorrectionsError(f"{path}: {path.stat().st_size:,} bytes, expected at most {MOST_BYTES:,}")
        file = _File.model_validate_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise CorrectionsError(f"{path}: {_why(error)}") from None
    return _checked(file, str(path))


def find_corrections(place: str | Path) -> dict[str, Corrections]:
    """Fingerprint of a scan → its corrections, from a file or from every .json file in a folder.

    Raises CorrectionsError if there is none, one of them cannot be read, or two are of the same scan.
    """
    place, found = local_path(place), {}
    try:
        files = sorted(place.glob("*.json")) if place.is_dir() else [place]
    except (OSError, ValueError) as error:
        raise CorrectionsError(f"{place}: {_why(error)}") from None
    for path in files:
        each = read_corrections(path)
        if (other := found.setdefault(each.scan, each)) is not each:
            raise CorrectionsError(f"{path}: corrects the same scan as {other.source}; keep the one that counts")
    if not found:
        raise CorrectionsError(
            f"{place}: expected a corrections file of the viewer or a folder of them, found no .json"
        )
    return found


def _why(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be read ({error.strerror or 'not a file name'}); expected a corrections file of the viewer"
    if not isinstance(error, ValidationError):
        return f"not a corrections file of the viewer ({shown(error)})"
    first = error.errors(include_url=False, include_context=False)[0]
    where = ".".join(one_line(part) for part in first["loc"])
    got = "" if first["type"] in ("missing", "json_invalid") else f", got {shown(first['input'], 40)}"
    return (
        f"not a corrections file of the viewer, or edited: {where[:80] or 'JSON'}: "
        f"{one_line(first['msg'])[:120]}{got}; save it again from the page"
    )


def _checked(file: _File, source: str) -> Corrections:
    """The corrections of a file whose lines and areas fit its shape."""
    depth, height, width = file.shape
    if min(file.shape) < 1 or max(file.shape) > 1_000_000:
        raise _refused(source, "shape", "B-scans, rows and A-scans of a scan", shown(file.shape))
    if file.fovea and not all(0 <= at <= count - 1 for at, count in zip(file.fovea, (depth, width), strict=True)):
        raise _refused(
            source, "fovea", f"a B-scan from 0 to {depth - 1} and an A-scan from 0 to {width - 1}", file.fovea
        )
    surfaces: dict[str, dict[int, np.ndarray]] = {}
    areas: dict[int, dict[str, np.ndarray]] = {}
    seen = set()
    for each in file.bscans:
        if each.bscan >= depth or each.bscan in seen:
            raise _refused(source, "bscans", f"each of 0 to {depth - 1} at most once", each.bscan)
        seen.add(each.bscan)
        _expect_names(each, source)
        for name, rows in _lines_of(each, height, width, source).items():
            surfaces.setdefault(name, {})[each.bscan] = rows
        if each.areas is not None:
            areas[each.bscan] = _areas_of(each, each.areas, height * width, source)
    checked = frozenset(each.bscan for each in file.bscans if each.checked)
    return Corrections(
        file.scan, file.network, file.shape, file.author, file.participant, file.time.isoformat(), file.octfm,
        surfaces, areas, checked, source, file.axial_length_mm, file.fovea,
    )  # fmt: skip


def _refused(source: str, where: str, expected: str, got: object) -> CorrectionsError:
    return CorrectionsError(f"{source}: {where}: expected {expected}, got {got}; save it again from the page")


def _expect_names(each: _Bscan, source: str) -> None:
    """Raise CorrectionsError for an unknown name, and if a checked B-scan lacks a line or its areas."""
    where = f"B-scan {each.bscan}"
    for part, names, known in (("surfaces", each.surfaces, SURFACES), ("areas", each.areas or {}, MASKS)):
        if unknown := [name for name in names if name not in known]:
            raise _refused(source, f"{where}, {part}", f"names among {', '.join(known)}", shown(unknown[0], 40))
    if absent := [name for name in SURFACES if each.checked and name not in each.surfaces]:
        raise _refused(source, where, "all lines of a checked B-scan", f"none for {', '.join(absent)}")
    if each.checked and each.areas is None:
        raise _refused(source, where, "the areas of a checked B-scan", "none")


def _lines_of(each: _Bscan, height: int, width: int, source: str) -> dict[str, np.ndarray]:
    """Surface → float32 [width] rows in one B-scan, NaN for gaps."""
    lines = {}
    for name, values in each.surfaces.items():
        where = f"B-scan {each.bscan}, {name}"
        if len(values) != width:
            raise _refused(source, where, f"{width} rows", len(values))
        rows = np.array([np.nan if row is None else row for row in values], np.float64)
        if ((rows < -OUTSIDE_ROWS) | (rows > height + OUTSIDE_ROWS)).any():
            raise _refused(source, where, f"rows from 0 to {height - 1}", f"{np.nanmin(rows)}, {np.nanmax(rows)}")
        lines[name] = rows.astype(np.float32)
    # All pairs, since a line between two others may have a gap.
    for upper, lower in combinations([name for name in SURFACES if name in lines], 2):
        require_order(source, each.bscan, upper, lines[upper], lower, lines[lower])
    return lines


def _areas_of(each: _Bscan, areas: dict[str, list[int]], voxels: int, source: str) -> dict[str, np.ndarray]:
    """Mask → int64 [R, 2] runs of (first voxel, count) in a B-scan of so many voxels."""
    where = f"B-scan {each.bscan}, areas"
    if any(len(values) % 2 for values in areas.values()):
        raise _refused(source, where, "pairs of first voxel and count", "an odd number of values")
    try:
        found = {name: np.array(values, np.int64).reshape(-1, 2) for name, values in areas.items()}
    except OverflowError:
        raise _refused(source, where, "voxels of the B-scan", "larger numbers") from None
    runs = np.concatenate([*found.values(), np.zeros((0, 2), np.int64)])
    runs = runs[np.argsort(runs[:, 0], kind="stable")]
    inside = (runs[:, 0] >= 0) & (runs[:, 1] > 0) & (runs[:, 1] <= voxels - runs[:, 0])
    if not inside.all() or (runs[1:, 0] < runs[:-1].sum(axis=1)).any():
        raise _refused(source, where, "runs within the B-scan that do not overlap", "others")
    return found


def require_order(source: str, bscan: int, upper: str, above: np.ndarray, lower: str, below: np.ndarray) -> None:
    """Raise CorrectionsError where a line, rows [W], lies above one before it."""
    if (wrong := np.flatnonzero(below < above - OUT_OF_ORDER_ROWS)).size:
        raise CorrectionsError(
            f"{source}: B-scan {bscan}, A-scan {wrong[0]}: {lower} at row {below[wrong[0]]:g} lies above {upper} at "
            f"row {above[wrong[0]]:g}; lines keep their order in the viewer, save the file again from the page"
        )
