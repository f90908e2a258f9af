"""Parse functional groups directly from their bytes: only what geometry and gray values need.

This avoids a pydicom Dataset per frame; benchmarks/header_scan.py measures the difference.
Standard: DICOM PS3.5 7.1 (elements), 7.5 (sequences, of stated and of undefined length), PS3.3 C.7.6.16.
"""

import itertools
import struct
from collections.abc import Iterator
from typing import Any, BinaryIO, Protocol

_FIRST_GROUP = 0x52000000
_PIXELS = (0x7FE00008, 0x7FE00009, 0x7FE00010)
_WANTED: dict[int, tuple[str, str]] = {
    0x52009229: ("SharedFunctionalGroupsSequence", "SQ"),
    0x52009230: ("PerFrameFunctionalGroupsSequence", "SQ"),
    0x00289110: ("PixelMeasuresSequence", "SQ"),
    0x00209113: ("PlanePositionSequence", "SQ"),
    0x00209116: ("PlaneOrientationSequence", "SQ"),
    0x00209071: ("FrameAnatomySequence", "SQ"),
    0x00220031: ("OphthalmicFrameLocationSequence", "SQ"),
    0x00089124: ("DerivationImageSequence", "SQ"),
    0x00082112: ("SourceImageSequence", "SQ"),
    0x00081155: ("ReferencedSOPInstanceUID", "UI"),
    0x00289145: ("PixelValueTransformationSequence", "SQ"),
    0x00289132: ("FrameVOILUTSequence", "SQ"),
    0x00281052: ("RescaleIntercept", "DS"),
    0x00281053: ("RescaleSlope", "DS"),
    0x00281050: ("WindowCenter", "DS"),
    0x00281051: ("WindowWidth", "DS"),
    0x00280030: ("PixelSpacing", "DS"),
    0x00180050: ("SliceThickness", "DS"),
    0x00180088: ("SpacingBetweenSlices", "DS"),
    0x00200032: ("ImagePositionPatient", "DS"),
    0x00200037: ("ImageOrientationPatient", "DS"),
    0x00209072: ("FrameLaterality", "CS"),
    0x00220039: ("OphthalmicImageOrientation", "CS"),
    0x00220032: ("ReferenceCoordinates", "FL"),
}
"""Tag -> keyword and value representation."""
_SEQUENCES = {tag for tag, (_, kind) in _WANTED.items() if kind == "SQ"}
_ITEM, _ITEM_END, _SEQUENCE_END = 0xFFFEE000, 0xFFFEE00D, 0xFFFEE0DD
_UNDEFINED = 0xFFFFFFFF
_LONG = {b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV"}
_DEEPEST = 16
_MOST = 2**20
"""Items and elements of all groups: a thousand frames have 40,000. Each takes a hundred bytes as a dict."""
_STEP = 2**18
"""Bytes read at once of a sequence of undefined length."""

Group = dict[str, Any]
"""Keyword -> list of Groups, list of decimal strings, tuple of floats, or text."""


class Elements(Protocol):
    """Elements by keyword: a pydicom Dataset, a FileHeader, or a dict such as a functional group."""

    def get(self, keyword: str, /) -> Any: ...


def items_in_groups(dataset: Elements, sequence: str) -> list[Elements]:
    """The items of a sequence in the shared functional group and in those of every frame."""
    names = ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence")
    groups = [group for name in names for group in dataset.get(name) or []]
    return [item for group in groups for item in group.get(sequence) or []]


def is_behind_header(tag: int, _vr: str | None, _length: int) -> bool:
    """Stop condition for pydicom: the functional groups and everything after them."""
    return tag >= _FIRST_GROUP


def read_groups(stream: BinaryIO, size: int, implicit: bool, big_endian: bool) -> Group:
    """Read functional groups from the stream's position; leaves it at the pixel element, or at the end of the file.

    Raises EOFError, ValueError for a file that is cut or damaged here.
    """
    walk, groups = _Walk(implicit, big_endian), {}
    while True:
        start = stream.tell()
        head = stream.read(12)
        if len(head) < 8:
            return groups
        # An element with a short length has a header of 8 bytes: the last one of a file may have no 12.
        tag, length, content = walk.element(head.ljust(12, b"\0"), 0)
        if tag in _PIXELS:
            stream.seek(start)
            return groups
        keyword, kind = _WANTED.get(tag, ("", ""))
        inner = walk.inside(head, 0)
        if length != _UNDEFINED:
            if start + content + length > size:
                raise EOFError("an element ends beyond the end of the file")
            stream.seek(start + content)
            if kind == "SQ":
                groups[keyword], _ = inner.items(stream.read(length), 0, length, 0)
            else:
                stream.seek(length, 1)
            continue
        items, used = _read_undefined(stream, start + content, size, inner)
        if kind == "SQ":
            groups[keyword] = items
        stream.seek(start + content + used)


def _read_undefined(stream: BinaryIO, start: int, size: int, walk: "_Walk") -> tuple[list[Group], int]:
    """Items up to the delimiter, and their size in bytes. Reads ever larger pieces until one holds the delimiter."""
    step = _STEP
    while True:
        stream.seek(start)
        content = stream.read(step)
        try:
            return walk.items(content, 0, None, 0)
        except (IndexError, struct.error):
            if start + step >= size:
                raise EOFError("a sequence without its end") from None
        step *= 4


class _Walk:
    """A parser for one encoding: explicit or implicit VR, little or big endian."""

    def __init__(self, implicit: bool, big_endian: bool, count: Iterator[int] | None = None):
        """`count`: counts items and elements, also those of the parsers inside."""
        self._count = itertools.count() if count is None else count
        order = ">" if big_endian else "<"
        self._implicit, self._order = implicit, order
        self._tag = struct.Struct(order + "HH").unpack_from
        self._short = struct.Struct(order + "H").unpack_from
        self._long = struct.Struct(order + "I").unpack_from

    def element(self, content: bytes, at: int) -> tuple[int, int, int]:
        """Tag, length of the value (may be undefined), and offset of the value from `at`."""
        if next(self._count) >= _MOST:
            raise ValueError("more elements than any instrument writes")
        group, number = self._tag(content, at)
        tag = group << 16 | number
        if self._implicit or group == 0xFFFE:  # items and delimiters never have a VR (PS3.5 7.5)
            return tag, self._long(content, at + 4)[0], 8
        if content[at + 4 : at + 6] in _LONG:
            return tag, self._long(content, at + 8)[0], 12
        return tag, self._short(content, at + 6)[0], 8

    def inside(self, content: bytes, at: int) -> "_Walk":
        """The parser for the sequence at `at`: with VR UN its content is implicit and little endian (PS3.5 6.2.2)."""
        return _Walk(True, False, self._count) if not self._implicit and content[at + 4 : at + 6] == b"UN" else self

    def items(self, content: bytes, at: int, end: int | None, depth: int) -> tuple[list[Group], int]:
        """Items of a sequence that ends at `end`, or at its delimiter if that is None; and the offset of its end."""
        if depth > _DEEPEST:
            raise ValueError("sequences nested deeper than any instrument nests them")
        found: list[Group] = []
        while end is None or at < end:
            tag, length, head = self.element(content, at)
            at += head
            if tag == _SEQUENCE_END:
                return found, at
            if tag != _ITEM:
                raise ValueError("a sequence holds something other than items")
            group, at = self._group(content, at, None if length == _UNDEFINED else at + length, depth)
            found.append(group)
        return found, at

    def _group(self, content: bytes, at: int, end: int | None, depth: int) -> tuple[Group, int]:
        group: Group = {}
        if end is not None and end > len(content):
            raise IndexError("an item ends beyond what was read")
        while end is None or at < end:
            tag, length, head = self.element(content, at)
            # Sequences that are not wanted are parsed as well if their length is undefined, to find their end.
            inner = self.inside(content, at) if length == _UNDEFINED or tag in _SEQUENCES else self
            at += head
            if tag == _ITEM_END:
                return group, at
            keyword, kind = _WANTED.get(tag, ("", ""))
            if kind == "SQ" or length == _UNDEFINED:
                items, at = inner.items(content, at, None if length == _UNDEFINED else at + length, depth + 1)
                if keyword:
                    group[keyword] = items
                continue
            if at + length > len(content):
                raise IndexError("an element ends beyond what was read")
            if keyword:
                group[keyword] = self._value(content[at : at + length], kind)
            at += length
        return group, at

    def _value(self, value: bytes, kind: str) -> Any:
        if kind == "FL":
            return struct.unpack(f"{self._order}{len(value) // 4}f", value[: len(value) // 4 * 4])
        # Decimal strings stay text: geometry.floats converts them and refuses what is not a number.
        words = value.decode("latin-1").strip(" \0")
        return words.split("\\") if kind == "DS" else words
