"""B-scans as a reader found them in a file that is not DICOM, and what follows from that, the same for every format.

Where nothing states a thing it stays unknown: laterality is flagged, spacing is asked for, order is kept.
"""

import hashlib
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import BinaryIO

import numpy as np

from octfm.errors import ReadError
from octfm.formats.declared import Declared, read_declared
from octfm.formats.dicom.geometry import NotRaster, Stack, check_bounds, refuse_rotating, stack_of
from octfm.formats.dicom.pixels import MAX_BYTES
from octfm.formats.dicom.reader import lateralities, slugify
from octfm.formats.reasons import Header
from octfm.volume.planes import used_full_scale
from octfm.volume.radial import expect_a_star
from octfm.volume.volume import LAYOUTS, RASTER_ONLY, Layout, Lines, Shape3, Spacing3, Surfaces, Volume

_OF_ZIP = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError)
"""RuntimeError: a password, a version or a method that zipfile does not know; one flipped bit asks for them."""
DAMAGE = (*_OF_ZIP, struct.error, ValueError, LookupError, ArithmeticError, EOFError, OverflowError, MemoryError)
"""What cut or mutated bytes make of a parser."""

_SAMPLES, _SAMPLE_BYTES = 128, 2048


@dataclass(frozen=True)
class Bscans:
    uri: str
    shape: Shape3
    """(D, H, W)."""
    decode: Callable[[], np.ndarray]
    """The voxels [D, H, W] uint8 or uint16, in the order of the file."""
    uid: str
    """Stands in for a SOP Instance UID: the same for the same bytes, wherever they lie."""
    in_plane_mm: tuple[float, float] | None = None
    """(dy, dx) where the file states them."""
    between_mm: float | None = None
    """Distance between B-scans where the file states it."""
    lines: Lines | None = None
    lines_in_mm: bool = True
    """False: in another unit, and upwards or downwards is unknown; they tell layout and order only."""
    layout: Layout | None = None
    """Where the file states it and positions do not."""
    laterality: str = ""
    scanner: str = "unknown"
    protocol: str = ""
    participant: str = ""
    beside: str = ""
    """Where a sidecar lies beside, if not beside `uri`."""
    surfaces: Callable[[], Surfaces | None] = lambda: None
    set_aside: tuple[tuple[str, str], ...] = ()
    """Images of its folder that are none of its B-scans, each with what tells so."""
    bits: int | None = 16
    """Significant bits of uint16 voxels; None where the file does not say, so that the whole volume has to."""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Arrangement:
    """How the B-scans lie to each other."""

    layout: Layout
    between_mm: float | None
    stack: Stack | None
    problem: ReadError | None = None
    """Why it is no raster."""

    def ordered(self, array: np.ndarray, axis: int) -> np.ndarray:
        """B-scans along `axis` in the order of their positions."""
        return array if self.stack is None or self.stack.order is None else np.take(array, self.stack.order, axis)


def to_header(bscans: Bscans, layouts: Collection[Layout] = RASTER_ONLY) -> Header:
    """Raises ReadError: not_raster, absurd_size, absurd_spacing, contradicting_declaration."""
    check_size(bscans.shape, bscans.uri)
    arrangement = _arrange(bscans)
    if arrangement.problem is not None and arrangement.layout not in layouts:
        raise arrangement.problem
    if arrangement.layout == "radial":
        expect_a_star(_lines_in_mm(bscans), bscans.uri)
    return _header(bscans, arrangement, read_declared(bscans.beside or bscans.uri))


def to_volume(bscans: Bscans, spacing_mm: Spacing3 | None, layouts: Collection[Layout] = LAYOUTS) -> Volume:
    """`spacing_mm` where the file and its sidecar state none. Raises ReadError as `to_header`; missing_spacing, blank_volume."""
    check_size(bscans.shape, bscans.uri)
    arrangement = _arrange(bscans)
    if arrangement.problem is not None and arrangement.layout not in layouts:
        raise arrangement.problem
    declared = read_declared(bscans.beside or bscans.uri)
    header = _header(bscans, arrangement, declared)
    spacing_mm = header.spacing_mm or spacing_mm
    if spacing_mm is None:
        raise missing_spacing(bscans.uri)
    voxels = bscans.decode()
    if voxels.shape != bscans.shape or voxels.dtype not in (np.uint8, np.uint16):
        raise ReadError(
            "damaged_file",
            f"{bscans.uri}: expected voxels {bscans.shape}, got {voxels.dtype} {voxels.shape}; export it again",
        )
    if voxels.min() == voxels.max():
        raise ReadError(
            "blank_volume", f"{bscans.uri}: every voxel has the same value; nothing was imaged, export it again"
        )
    stated = declared.bits or bscans.bits
    white = used_full_scale(voxels) if voxels.dtype == np.uint16 else 255
    if stated is not None:  # unless the values contradict it
        white = max(white, (1 << stated) - 1)
    return Volume(
        voxels=arrangement.ordered(voxels[:, ::-1] if declared.upside_down else voxels, axis=0),
        full_scale=white if voxels.dtype == np.uint16 else 65535,
        spacing_mm=spacing_mm,
        laterality=header.laterality,
        scanner=header.scanner,
        protocol=header.protocol,
        participant=header.participant or "unknown",
        acquisition=header.sop_instance_uid,
        superior_first=header.superior_first,
        layout=arrangement.layout,
        lines=_lines_in_mm(bscans) if arrangement.layout == "radial" else None,
        source=bscans.uri,
    )


def to_surfaces(bscans: Bscans) -> Surfaces | None:
    """B-scan for B-scan as `to_volume` orders them."""
    surfaces = bscans.surfaces()
    if surfaces is None:
        return None
    heights_px = _arrange(bscans).ordered(surfaces.heights_px, axis=1)
    if read_declared(bscans.beside or bscans.uri).upside_down:
        heights_px = bscans.shape[1] - 1 - heights_px
    return replace(surfaces, heights_px=heights_px)


def check_size(shape: Shape3, uri: str, bytes_per_voxel: int = 1) -> None:
    """Before anything of that size is asked for. Raises ReadError absurd_size."""
    d, h, w = shape
    if min(shape) < 1 or d * h * w * bytes_per_voxel > MAX_BYTES:
        raise ReadError(
            "absurd_size",
            f"{uri}: {d} B-scans of {h} x {w} pixels; expected 1 or more of each and at most {MAX_BYTES:,} bytes",
        )


def uid_of(file: BinaryIO, size: int) -> str:
    """A UID (PS3.5 B.2) from the content. Of a large file 128 pieces and both ends count, so that looking at a header stays cheap: two
    files that differ elsewhere only get one UID, and are then compared voxel by voxel."""
    digest = hashlib.blake2b(str(size).encode(), digest_size=16)
    if size <= _SAMPLES * _SAMPLE_BYTES:
        file.seek(0)
        digest.update(file.read())
    else:
        for place in np.linspace(0, size - _SAMPLE_BYTES, _SAMPLES).astype(int):
            file.seek(int(place))
            digest.update(file.read(_SAMPLE_BYTES))
    return uid_from(digest.digest())


def uid_from(digest: bytes) -> str:
    return f"2.25.{int.from_bytes(digest[:16], 'big')}"


def missing_spacing(uri: str) -> ReadError:
    return ReadError(
        "missing_spacing",
        f"{uri}: does not state millimetres on all axes; declare spacing_mm, [dz, dy, dx], in {PurePath(uri).stem}.json beside it or in "
        "a table of files, or ask for a nominal spacing",
    )


@contextmanager
def damage_has_a_code(uri: str) -> Iterator[None]:
    """A parser's surprise at bytes that no instrument wrote is a reject, not a crash. Not its words: they may quote a person's name."""
    try:
        yield
    except OSError as error:
        raise ReadError(
            "unreadable", f"{uri}: cannot be read: {error.strerror or type(error).__name__}; check path and permissions"
        ) from None
    except MemoryError:
        raise ReadError(
            "decoder_memory",
            f"{uri}: reading it needs more memory than there is; a huge volume needs a higher limit, else it is damaged",
        ) from None
    except DAMAGE as error:
        raise ReadError(
            "damaged_file",
            f"{uri}: its structure contradicts itself ({type(error).__name__}); fetch or export it again",
        ) from None


def check_spacing(spacing_mm: Spacing3, shape: Shape3, layout: Layout, uri: str) -> None:
    """Of anything but a raster only the millimetres within a B-scan mean something. Raises ReadError as `check_bounds`."""
    _, dy, dx = spacing_mm
    if layout == "raster":
        check_bounds(spacing_mm, shape, uri)
    else:
        check_bounds((dx, dy, dx), (shape[2], shape[1], shape[2]), uri)


def _header(bscans: Bscans, arrangement: Arrangement, declared: Declared) -> Header:
    spacing_mm, source, flags = _spacing(bscans, arrangement, declared)
    if spacing_mm is not None:
        check_spacing(spacing_mm, bscans.shape, arrangement.layout, bscans.uri)
    laterality, conflict = lateralities([bscans.laterality, declared.laterality])
    flags += ["laterality_conflict"] * conflict + ["laterality_unknown"] * (laterality is None and not conflict)
    flags += ["bits_from_values"] * (bscans.bits is None and declared.bits is None)
    stack = arrangement.stack
    flags += ["bscan_order_unstated"] * (stack is None and arrangement.layout == "raster")
    flags += ["positions_placeholder"] * (stack is None and bscans.lines is not None and arrangement.layout == "raster")
    if stack is not None and not stack.even:
        flags.append("uneven_positions")
    if stack is not None and stack.order is not None:
        flags.append("frames_reordered")
    return Header(
        uri=bscans.uri,
        shape=bscans.shape,
        spacing_mm=spacing_mm,
        spacing_source=source,
        laterality=laterality,
        scanner=bscans.scanner if bscans.scanner != "unknown" else slugify(declared.scanner) or "unknown",
        protocol=slugify(bscans.protocol or declared.protocol) or "unknown",
        participant=bscans.participant or declared.participant or None,
        sop_instance_uid=bscans.uid,
        superior_first=stack.superior_first if stack else None,
        flags=(*bscans.flags, *declared.flags, *flags),
        layout=arrangement.layout,
        set_aside=bscans.set_aside,
    )


def _spacing(bscans: Bscans, arrangement: Arrangement, declared: Declared) -> tuple[Spacing3 | None, str, list[str]]:
    """What the file states is believed, then its sidecar."""
    flags: list[str] = []
    between, source = bscans.between_mm, "header"
    if arrangement.layout != "raster" and bscans.in_plane_mm is not None:
        between = bscans.in_plane_mm[1]
    if arrangement.between_mm is not None:
        if between is not None and abs(arrangement.between_mm / between - 1) > 0.1:
            flags.append("slice_thickness_contradicts_positions")
        between, source = arrangement.between_mm, "header+positions"
    if bscans.in_plane_mm is not None and between is not None:
        own = (between, *bscans.in_plane_mm)
        if declared.spacing_mm and any(
            abs(mm / other - 1) > 0.05 for mm, other in zip(own, declared.spacing_mm, strict=True)
        ):
            flags.append("spacing_conflict")
        return own, source, flags
    return declared.spacing_mm, "sidecar" if declared.spacing_mm else "missing", flags


def _arrange(bscans: Bscans) -> Arrangement:
    """Positions decide; what the file calls itself, only where there are none or where a circle looks like a line."""
    try:
        stack = _stack(bscans)
    except NotRaster as error:
        return Arrangement(error.layout, None, None, error)
    if stack is None or not bscans.lines_in_mm:
        return Arrangement("raster", None, stack and replace(stack, superior_first=None))
    return Arrangement("raster", stack.step, stack)


def _lines_in_mm(bscans: Bscans) -> Lines | None:
    return bscans.lines if bscans.lines_in_mm else None


def _stack(bscans: Bscans) -> Stack | None:
    """None where no positions tell. Raises NotRaster."""
    if bscans.layout == "circle":
        raise NotRaster("circle", f"{bscans.uri}: a circular scan; a volume needs several parallel B-scans")
    if bscans.shape[0] == 1:
        raise NotRaster("line", f"{bscans.uri}: a single B-scan; a volume needs several parallel B-scans")
    found = _stack_of_lines(bscans.lines, bscans.uri) if bscans.lines is not None else None
    if found is None and bscans.layout not in (None, "raster"):
        raise NotRaster(
            bscans.layout,
            f"{bscans.uri}: a {bscans.layout} scan, as the file says; a volume needs several parallel B-scans",
        )
    return found


def _stack_of_lines(lines: Lines, uri: str) -> Stack | None:
    """None where every B-scan starts and ends at one point, which is a placeholder. Raises NotRaster."""
    direction = lines.end - lines.start
    length = np.linalg.norm(direction, axis=1)
    if not np.isfinite(length).all() or max(length.max(), np.ptp(lines.start, axis=0).max()) < 1e-6:
        return None
    if (length < 1e-6).any():
        raise NotRaster(
            "circle",
            f"{uri}: a B-scan ends where it starts, so it is a circle; a volume needs several parallel B-scans",
        )
    angle = np.arctan2(direction[:, 1], direction[:, 0])
    refuse_rotating(np.angle(np.exp(1j * (angle - angle[0]))), uri)
    across = np.array([-direction[0, 1], direction[0, 0]]) / length[0]
    middle = (lines.start + lines.end) / 2
    # y grows downwards, so that what grows along a falling `across` goes up.
    superior = -int(np.sign(across[1])) if abs(across[1]) > 0.7 else None
    along = (middle - middle[0]) @ across
    stack = stack_of(along, superior, uri, float(np.median(length)))
    # Positions are rounded to micrometres in some formats: over the whole stack that does not matter.
    return replace(stack, step=float(np.ptp(along)) / (len(along) - 1)) if stack.even else stack
