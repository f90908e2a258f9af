"""`Bscans`, which every reader except DICOM's returns, and the steps from there to Header, Volume and Surfaces.

Facts that the file does not state stay unknown: laterality is flagged, spacing must be declared, stored order is kept.
"""

import hashlib
import lzma
import struct
import zipfile
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import BinaryIO, Protocol

import numpy as np

from octfm.errors import ReadError
from octfm.formats.declared import Declared, read_declared, sidecars
from octfm.formats.dicom.geometry import NotRaster, Stack, check_bounds, is_running_number, positions_across, stack_of
from octfm.formats.dicom.pixels import check_size
from octfm.formats.names import is_flow_beside_structure, may_be_labels, slugify, stated_eye
from octfm.formats.reasons import Header, angiography, blank, cannot_open, voxel_labels
from octfm.io.archive import is_folder
from octfm.volume.appearance import holds_two
from octfm.volume.estimated import axial_mm, retina_rows, spacing_of
from octfm.volume.radial import expect_a_star
from octfm.volume.volume import (
    Fundus,
    Layout,
    Lines,
    Modality,
    Shape3,
    Spacing3,
    Surfaces,
    Volume,
    in_eight_bits,
    used_full_scale,
)

# RuntimeError: zipfile raises it for a password and for an unknown version or method; one flipped bit sets any of them.
_ZIP_ERRORS = (zlib.error, lzma.LZMAError, zipfile.BadZipFile, RuntimeError)
DAMAGE = (*_ZIP_ERRORS, struct.error, ValueError, LookupError, ArithmeticError, EOFError)
"""Exceptions that parsers raise on truncated or corrupt bytes."""

_SAMPLES, _SAMPLE_BYTES = 128, 2048
MOST_LABELS = 16
"""Voxels of no more different values are labels of a segmentation, whatever the file is called."""
OR_SINGLE = ", or, if each image is a scan of its own, add --layouts line"
MEAN_EYE = "lateral_mm_of_a_mean_eye"
"""Flag of lateral millimetres that follow from degrees and a mean eye; declared ones take precedence."""


@dataclass(frozen=True)
class Bscans:
    """B-scans as a reader found them in a file: their facts, and a function that decodes them."""

    uri: str
    shape: Shape3
    """(D, H, W)."""
    decode: Callable[[], np.ndarray]
    """Returns the voxels [D, H, W], uint8 or uint16, in the order of the file."""
    uid: str
    """Takes the place of a SOP Instance UID; a function of the content only, not of the path."""
    in_plane_mm: tuple[float, float] | None = None
    """(dy, dx), None if the file does not state them."""
    between_mm: float | None = None
    """Distance between B-scans, None if the file does not state it."""
    lines: Lines | None = None
    """Positions of the B-scans, in the order of the file."""
    layout: Layout | None = None
    """As the file states it; used where positions do not show it."""
    modality: Modality | None = None
    """None if the file does not state it: structure, unless the sidecar declares octa, or folders called OCT and OCTA
    lie side by side."""
    laterality: str = ""
    scanner: str = "unknown"
    protocol: str = ""
    participant: str = ""
    beside: str = ""
    """The file that a sidecar accompanies, if not `uri`."""
    surfaces: Callable[[], Surfaces | None] = lambda: None
    fundus: Callable[[], Fundus | None] = lambda: None
    """The picture of the fundus that came with the scan, its lines in the order of the file."""
    set_aside: tuple[tuple[str, str], ...] = ()
    """(uri, reason) of each image in the folder that is not one of the B-scans."""
    bits: int | None = 16
    """Significant bits of uint16 voxels; None if the file does not say: they are then derived from the voxel values."""
    flags: tuple[str, ...] = ()
    alone: ReadError | None = None
    """Raised for a single B-scan where only volumes are wanted; by default not_raster."""
    picture: bool = False
    """An image of a general format, which may be a screenshot."""
    aside: ReadError | None = None
    """Raised where scans are listed: labels by header or name; `to_volume` knows others by their values."""


class Reader(Protocol):
    """A reader of a format of your own, passed as an object: `octfm.scan(root, readers=[MyReader()])`.

    Files are read in child processes, so the object must be picklable. See docs/guide/plug-ins.md.
    """

    def fits(self, head: bytes, uri: str) -> bool:
        """Whether this is the reader of a file, from its first 4,096 bytes and its name."""
        ...

    def volumes(self, uri: str) -> Sequence[str]:
        """Names of the volumes in a file; their uris are file!/name. Empty or a single name: the file is one volume."""
        ...

    def open_bscans(self, uri: str, name: str) -> Bscans:
        """One volume of a file; `name` is empty if the file is one volume. Raises ReadError with one of REASONS."""
        ...


@dataclass(frozen=True)
class Arrangement:
    """How the B-scans lie relative to each other."""

    layout: Layout
    stack: Stack | None
    problem: ReadError | None = None
    """Why it is not a raster."""

    def ordered(self, array: np.ndarray, axis: int) -> np.ndarray:
        """B-scans along `axis` in the order of their positions."""
        return array if self.stack is None or self.stack.order is None else np.take(array, self.stack.order, axis)


def to_header(bscans: Bscans, layouts: Collection[Layout], modalities: Collection[Modality]) -> Header:
    """The Header. Raises ReadError: angiography for flow unless it is among `modalities`, not_raster, absurd_size,
    absurd_spacing, swapped_spacing, contradicting_declaration, voxel_labels.

    Voxels are decoded only where a name says that they may be labels (`masks/1.png`).
    """
    if bscans.aside is not None:
        raise bscans.aside
    if may_be_labels(bscans.uri):
        _expect_no_labels(bscans)
    bscans, declared = _with_sidecar(bscans)
    arrangement = _admissible_arrangement(bscans, declared, layouts, modalities)
    if arrangement.layout == "radial":
        expect_a_star(bscans.lines, bscans.uri)
    return _header(bscans, arrangement, declared)


def to_volume(
    bscans: Bscans, spacing_mm: Spacing3 | None, layouts: Collection[Layout], modalities: Collection[Modality]
) -> Volume:
    """Decode the voxels. `spacing_mm` is used if neither file nor sidecar states one.

    Raises ReadError as `to_header`, and missing_spacing, blank_volume, voxel_labels, side_by_side.
    """
    bscans, declared = _with_sidecar(bscans)
    arrangement = _admissible_arrangement(bscans, declared, layouts, modalities)
    header = _header(bscans, arrangement, declared)
    given, spacing_mm = spacing_mm, header.spacing_mm or spacing_mm
    mean_eye = MEAN_EYE in header.flags
    if given is not None and mean_eye:
        spacing_mm, mean_eye = given, False
    single = arrangement.layout == "line" and bscans.shape[0] == 1
    if spacing_mm is None and not single:
        raise missing_spacing(bscans.uri)
    voxels = bscans.decode()
    if voxels.shape != bscans.shape or voxels.dtype not in (np.uint8, np.uint16):
        raise ReadError(
            "damaged_file",
            f"{bscans.uri}: expected voxels {bscans.shape}, got {voxels.dtype} {voxels.shape}; export it again",
        )
    if voxels.min() == voxels.max():
        raise blank(bscans.uri)
    if are_labels(voxels):
        raise voxel_labels(bscans.uri)
    full_scale = 65535  # uint8 voxels do not use it
    if voxels.dtype == np.uint16:
        # Brighter voxels than the stated bits allow prove the statement wrong.
        full_scale = max(used_full_scale(voxels), (1 << (declared.bits or bscans.bits or 0)) - 1)
    voxels = arrangement.ordered(voxels[:, ::-1] if declared.upside_down else voxels, axis=0)
    if single and bscans.picture and declared.spacing_mm is None:
        _expect_one_picture(voxels, full_scale, bscans.uri)
    lines = _lines_of_volume(bscans, arrangement, spacing_mm)
    if spacing_mm is None:
        spacing_mm = _estimated(voxels, full_scale, bscans.uri)
        return replace(header.volume(voxels, full_scale, spacing_mm, lines), spacing_estimated=True)
    return replace(header.volume(voxels, full_scale, spacing_mm, lines), mean_eye=mean_eye)


def are_labels(voxels: np.ndarray) -> bool:
    """Whether voxels [D, H, W] hold so few values that they are the labels of a segmentation: a B-scan has more."""
    seen = np.zeros(2**16, bool)
    for at in sorted(range(len(voxels)), key=lambda at: abs(at - len(voxels) // 2)):  # the middle shows it at once
        seen[voxels[at]] = True
        if np.count_nonzero(seen) > MOST_LABELS:
            return False
    return True


def _expect_no_labels(bscans: Bscans) -> None:
    """Raises ReadError voxel_labels for B-scans that hold labels, or show them in colours."""
    check_size(bscans.shape, bscans.uri)
    try:
        labels = are_labels(bscans.decode())
    except ReadError as error:
        labels = error.code == "unsupported_pixels"
    if labels:
        raise voxel_labels(bscans.uri)


def _expect_one_picture(voxels: np.ndarray, full_scale: int, uri: str) -> None:
    """Raises ReadError side_by_side for a screenshot that holds more than a B-scan."""
    if holds_two(in_eight_bits(voxels, full_scale)[0]):
        raise ReadError(
            "side_by_side",
            f"{uri}: looks like two pictures next to each other, such as a fundus image and a B-scan, or two B-scans; "
            f"crop it to one B-scan, or, if it is one, declare spacing_mm, [dz, dy, dx], in {_sidecar_name(uri)} "
            "beside it",
        )


def _estimated(voxels: np.ndarray, full_scale: int, uri: str) -> Spacing3:
    """Millimetres of a single B-scan, from its own retina. Raises ReadError missing_spacing where none is found."""
    rows = retina_rows(in_eight_bits(voxels, full_scale))
    if rows is None:
        raise ReadError(
            "missing_spacing",
            f"{uri}: does not state millimetres, and shows no retina to estimate them from, vitreous on top and bright "
            f"on dark; export it so, or declare spacing_mm, [dz, dy, dx], in {_sidecar_name(uri)} beside it",
        )
    return spacing_of(axial_mm([rows]), voxels.shape)


def to_surfaces(bscans: Bscans) -> Surfaces | None:
    """The surfaces in the B-scan order of `to_volume`; None if the file has none."""
    surfaces = bscans.surfaces()
    if surfaces is None:
        return None
    bscans, declared = _with_sidecar(bscans)
    heights_px = _arrange(bscans).ordered(surfaces.heights_px, axis=1)
    if declared.upside_down:
        heights_px = bscans.shape[1] - 1 - heights_px
    return replace(surfaces, heights_px=heights_px)


def to_labels(bscans: Bscans, values: np.ndarray) -> np.ndarray:
    """Labels [D, H, W] of the file's voxels, as they lie in the file, as they lie in the volume of `to_volume`."""
    bscans, declared = _with_sidecar(bscans)
    ordered = _arrange(bscans).ordered(values, axis=0)
    return ordered[:, ::-1] if declared.upside_down else ordered


def to_fundus(bscans: Bscans) -> Fundus | None:
    """The picture of the fundus with its lines in the B-scan order of `to_volume`; None if the file has none."""
    found = bscans.fundus()
    stack = _arrange(bscans).stack
    if found is None or found.lines is None or stack is None or stack.order is None:
        return found
    return replace(found, lines=found.lines[stack.order])


def uid_of(file: BinaryIO, size: int) -> str:
    """A UID (DICOM PS3.5 B.2) from the content.

    Of a large file only 128 pieces are hashed, including both ends, so that reading a header stays cheap. Two files
    that differ elsewhere get the same UID; the catalog then compares them voxel by voxel.
    """
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
        f"{uri}: does not state millimetres on all axes; declare them in {_sidecar_name(uri)} beside it, "
        '{"spacing_mm": [between B-scans, axial, lateral]}; octfm scan also takes --table or --nominal-spacing'
        f"{OR_SINGLE * is_folder(uri)}",
    )


def _sidecar_name(uri: str) -> str:
    return next(iter(sidecars(uri))).name


@contextmanager
def damage_has_a_code(uri: str) -> Iterator[None]:
    """Turn exceptions of a parser into ReadError: damaged bytes make a reject, not a crash.

    The parser's own message is dropped: it may quote a person's name.
    """
    try:
        yield
    except OSError as error:
        raise cannot_open(uri, error) from None
    except MemoryError:
        raise ReadError(
            "decoder_memory",
            f"{uri}: not enough memory to read it; raise the limit for a huge volume, else the file is damaged",
        ) from None
    except DAMAGE as error:
        raise ReadError(
            "damaged_file",
            f"{uri}: its structure contradicts itself ({type(error).__name__}); fetch or export it again",
        ) from None


def _with_sidecar(bscans: Bscans) -> tuple[Bscans, Declared]:
    """The B-scans, at the positions in their sidecar if the file states none, and the sidecar. Raises ReadError."""
    declared = read_declared(bscans.beside or bscans.uri)
    if bscans.lines is not None or not declared.bscan_lines_mm:
        return bscans, declared
    ends = np.array(declared.bscan_lines_mm)
    if len(ends) != bscans.shape[0]:
        raise ReadError(
            "contradicting_declaration",
            f"{bscans.uri}: bscan_lines_mm in its sidecar has {len(ends)} lines, expected one for each of the "
            f"{bscans.shape[0]} B-scans",
        )
    return replace(bscans, lines=Lines(ends[:, :2], ends[:, 2:])), declared


def _modality(bscans: Bscans, declared: Declared) -> Modality:
    if stated := bscans.modality or declared.modality:
        return stated
    # Instruments' own files are of structure, whatever folder they lie in.
    return "octa" if bscans.scanner == "unknown" and is_flow_beside_structure(bscans.uri) else "structure"


def _admissible_arrangement(
    bscans: Bscans, declared: Declared, layouts: Collection[Layout], modalities: Collection[Modality]
) -> Arrangement:
    if _modality(bscans, declared) not in modalities:
        raise angiography(bscans.uri)
    check_size(bscans.shape, bscans.uri)
    arrangement = _arrange(bscans)
    single = bscans.shape[0] == 1
    if arrangement.problem is not None and arrangement.layout not in layouts:
        raise (single and bscans.alone) or arrangement.problem
    return arrangement


def _header(bscans: Bscans, arrangement: Arrangement, declared: Declared) -> Header:
    spacing_mm, source, flags = _spacing(bscans, arrangement, declared)
    if spacing_mm is not None:
        check_bounds(spacing_mm, bscans.shape, bscans.uri, arrangement.layout)
    laterality, doubts = stated_eye([bscans.laterality, declared.laterality])
    own = tuple(flag for flag in bscans.flags if flag != MEAN_EYE or source.startswith("header"))
    flags += doubts + ["bits_from_values"] * (bscans.bits is None and declared.bits is None)
    # Lines that gave no stack are placeholders; without any, the order is that of the file.
    stack = arrangement.stack
    unordered = stack is None and arrangement.layout == "raster"
    flags += ["bscan_order_unstated"] * (unordered and declared.superior_first is None)
    flags += ["positions_placeholder"] * (unordered and bscans.lines is not None)
    flags += stack.doubts(bscans.lines) if stack is not None else []
    return Header(
        uri=bscans.uri,
        shape=bscans.shape,
        spacing_mm=spacing_mm,
        spacing_source=source,
        laterality=laterality,
        scanner=bscans.scanner if bscans.scanner != "unknown" else slugify(declared.scanner),
        protocol=slugify(bscans.protocol or declared.protocol),
        participant=bscans.participant or declared.participant or None,
        sop_instance_uid=bscans.uid,
        superior_first=stack.superior_first if stack else declared.superior_first,
        flags=(*own, *declared.flags, *flags),
        layout=arrangement.layout,
        modality=_modality(bscans, declared),
        set_aside=bscans.set_aside,
    )


def _spacing(bscans: Bscans, arrangement: Arrangement, declared: Declared) -> tuple[Spacing3 | None, str, list[str]]:
    """Spacing, its source and flags. What the file states overrides its sidecar."""
    flags: list[str] = []
    between, source = bscans.between_mm, "header"
    if between is not None and bscans.in_plane_mm and is_running_number(between, bscans.shape, bscans.in_plane_mm[1]):
        between = None
    if arrangement.layout != "raster" and bscans.in_plane_mm is not None:
        between = bscans.in_plane_mm[1]
    if (stack := arrangement.stack) is not None:
        if between is not None and abs(stack.step / between - 1) > 0.1:
            flags.append("slice_thickness_contradicts_positions")
        between, source = stack.step, "header+positions"  # positions override a stated distance
    stated_better = MEAN_EYE in bscans.flags and declared.spacing_mm is not None
    if bscans.in_plane_mm is not None and between is not None and not stated_better:
        stated = (between, *bscans.in_plane_mm)
        if declared.spacing_mm and (np.abs(np.divide(stated, declared.spacing_mm) - 1) > 0.05).any():
            flags.append("spacing_conflict")
        return stated, source, flags
    return declared.spacing_mm, "sidecar" if declared.spacing_mm else "missing", flags


def _arrange(bscans: Bscans) -> Arrangement:
    """Positions decide over what the file states, which counts only without positions or for circles (see `_stack`)."""
    try:
        stack = _stack(bscans)
    except NotRaster as error:
        return Arrangement(error.layout, None, error)
    return Arrangement("raster", stack)


def _lines_of_volume(bscans: Bscans, arrangement: Arrangement, spacing_mm: Spacing3 | None) -> Lines | None:
    """Lines in the order of the volume's voxels; None unless they show a raster or a star."""
    lines, stack = bscans.lines, arrangement.stack
    if lines is not None and spacing_mm is not None and MEAN_EYE in bscans.flags:
        # Millimetres that somebody has declared are those of this eye.
        length_mm = float(np.median(np.linalg.norm(lines.end - lines.start, axis=1)))
        scale = spacing_mm[2] * bscans.shape[2] / length_mm if length_mm > 0 else 1.0
        lines = Lines(scale * lines.start, scale * lines.end)
    if lines is None or arrangement.layout == "radial":
        return lines
    if arrangement.layout != "raster" or stack is None:  # without a stack they are placeholders
        return None
    return lines if stack.order is None else lines[stack.order]


def _stack(bscans: Bscans) -> Stack | None:
    """None without usable positions. Raises NotRaster."""
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
    """None where every B-scan starts and ends at the same point, which is a placeholder. Raises NotRaster."""
    length = np.linalg.norm(lines.end - lines.start, axis=1)
    if not np.isfinite(length).all() or max(length.max(), np.ptp(lines.start, axis=0).max()) < 1e-6:
        return None
    along, superior, median_length = positions_across(lines.start, lines.end, 1, uri)
    stack = stack_of(along, superior, uri, median_length)
    # Some formats round positions to micrometres; averaging over the whole stack removes that error from the spacing.
    return replace(stack, step=float(np.ptp(along)) / (len(along) - 1)) if stack.even else stack
