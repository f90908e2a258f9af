"""Readers that a caller passes as objects: what they return is checked, and their bugs are named by reader and line."""

import hashlib
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, TypeVar

import numpy as np

from octfm.errors import ConfigError, OctfmError, ReadError, require_objects, shown
from octfm.formats.bscans import Bscans, Reader, uid_from
from octfm.formats.reasons import REASONS
from octfm.io.archive import MEMBER
from octfm.volume.volume import LAYOUTS, MODALITIES, Lines, Shape3

T = TypeVar("T")

_METHODS = ("fits", "volumes", "open_bscans")
_TEXTS = {"laterality": "", "scanner": "unknown", "protocol": "", "participant": "", "beside": ""}
"""Fields of Bscans that are text, and what stands for None."""


def _sequence(value: object, count: int, kind: type) -> bool:
    return isinstance(value, tuple | list) and len(value) == count and all(isinstance(v, kind) for v in value)


_FIELDS: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("shape", lambda v: _sequence(v, 3, Integral), "three whole numbers, (B-scans, rows, columns)"),
    ("decode", callable, "a function that returns the voxels, such as lambda: voxels"),
    ("uid", lambda v: isinstance(v, str) and v != "", "text, such as uid_of returns"),
    ("in_plane_mm", lambda v: v is None or _sequence(v, 2, Real), "two numbers, (dy, dx), or None"),
    ("between_mm", lambda v: v is None or isinstance(v, Real), "a number or None"),
    ("layout", lambda v: v is None or v in LAYOUTS, f"None or one of {', '.join(LAYOUTS)}"),
    ("modality", lambda v: v is None or v in MODALITIES, f"None or one of {', '.join(MODALITIES)}"),
    ("bits", lambda v: v is None or (isinstance(v, Integral) and 1 <= int(v) <= 16), "None or 1 to 16"),
    *((name, lambda v: isinstance(v, str), "text or None") for name in _TEXTS),
    ("lines", lambda v: v is None or isinstance(v, Lines), "octfm.volume.volume.Lines or None"),
    ("flags", lambda v: isinstance(v, tuple | list) and all(isinstance(flag, str) for flag in v), "a tuple of texts"),
    (
        "set_aside",
        lambda v: isinstance(v, tuple | list) and all(_sequence(x, 2, str) for x in v),
        "pairs (uri, why)",
    ),
    *((name, lambda v: v is None or isinstance(v, ReadError), "None or a ReadError") for name in ("alone", "aside")),
    ("surfaces", callable, "a function that returns Surfaces or None"),
    ("fundus", callable, "a function that returns a Fundus or None"),
)
"""Field of Bscans, whether a value fits, and what is expected."""


@dataclass(frozen=True)
class PlugIn:
    """A caller's reader for one volume of one file."""

    reader: Reader
    file: str
    name: str
    """Name of the volume; empty if the uri names the whole file."""

    def fits(self, head: bytes) -> bool:
        with self._bugs_have_a_place("fits", self.file):
            return bool(self.reader.fits(head, self.file))

    def open_bscans(self, uri: str) -> Bscans:
        if not self.name and len(names := self._names()) > 1:
            listed = ", ".join(names)[:200]
            raise ReadError(
                "several_volumes",
                f"{uri}: which of its {len(names)} volumes? add {MEMBER} and one of {listed}, in single quotes",
            )
        with self._bugs_have_a_place("open_bscans", uri):
            found = self.reader.open_bscans(self.file, self.name)
        if not isinstance(found, Bscans):
            raise self._returned("open_bscans", "Bscans", type(found).__name__)
        found = self._checked(found)
        if self.name:
            # Volumes of one file are different acquisitions, even if the reader takes the UID from the whole file.
            digest = hashlib.blake2b(f"{found.uid} {self.name}".encode(), digest_size=16).digest()
            found = replace(found, uid=uid_from(digest))
        return replace(
            found,
            uri=uri,
            beside=found.beside or self.file,
            decode=lambda decode=found.decode: self._voxels(self._guarded("decode", decode, uri), found.shape, uri),
            surfaces=lambda surfaces=found.surfaces: self._guarded("surfaces", surfaces, uri),
            fundus=lambda fundus=found.fundus: self._guarded("fundus", fundus, uri),
        )

    def volumes(self, uri: str) -> list[str]:
        names = [] if self.name else self._names()
        return [f"{uri}{MEMBER}{name}" for name in names] if len(names) > 1 else [uri]

    def _names(self) -> Sequence[str]:
        with self._bugs_have_a_place("volumes", self.file):
            names = self.reader.volumes(self.file)
        if isinstance(names, str) or not isinstance(names, Sequence) or not all(isinstance(n, str) for n in names):
            raise self._returned("volumes", "a list of names", type(names).__name__)
        return names

    def _checked(self, found: Bscans) -> Bscans:
        """The B-scans, "" in place of a text that is None. Raises ConfigError for a field of another type."""
        found = replace(found, **{name: default for name, default in _TEXTS.items() if getattr(found, name) is None})
        for name, fits, expected in _FIELDS:
            if not fits(value := getattr(found, name)):
                # An array is long, and a participant's id is not for error messages.
                plain = isinstance(value, str | int | float | tuple | list) and name != "participant"
                got = shown(value) if plain else type(value).__name__
                raise self._returned(f"open_bscans: {name}", expected, got)
        d, h, w = found.shape
        return replace(found, shape=(int(d), int(h), int(w)))

    def _voxels(self, voxels: object, shape: Shape3, uri: str) -> np.ndarray:
        if not isinstance(voxels, np.ndarray) or voxels.shape != shape or voxels.dtype not in (np.uint8, np.uint16):
            is_array = isinstance(voxels, np.ndarray)
            got = f"{voxels.dtype} {list(voxels.shape)}" if is_array else type(voxels).__name__
            raise ReadError(
                "damaged_file",
                f"{uri}: {type(self.reader).__name__}: decode: expected a uint8 or uint16 array {list(shape)}, as "
                f"stated in shape, got {got}; the file is damaged, or the reader has a bug",
            )
        return voxels

    def _guarded(self, method: str, function: Callable[[], T], uri: str) -> T:
        with self._bugs_have_a_place(method, uri):
            return function()

    def _returned(self, what: str, expected: str, got: str) -> ConfigError:
        return ConfigError(f"reader {type(self.reader).__name__}: {what}: expected {expected}, got {got}")

    @contextmanager
    def _bugs_have_a_place(self, method: str, uri: str) -> Iterator[None]:
        """Say in which line of the reader an exception was raised, and never its words: they may quote a name."""
        reader = type(self.reader).__name__
        try:
            yield
        except ReadError as error:
            if error.code not in REASONS:
                raise ReadError(
                    "damaged_file", f"{error} ({reader} gave it the unknown reason code {error.code})"
                ) from None
            raise
        except (OctfmError, OSError, MemoryError):
            raise  # a bucket, a file system or the limit on memory: `damage_has_a_code` and the parent name them
        except Exception as error:  # the caller's code may raise anything
            codes = (getattr(getattr(type(self.reader), name), "__code__", None) for name in _METHODS)
            own = {code.co_filename for code in codes if code is not None}
            steps = [step for step in traceback.extract_tb(error.__traceback__) if step.filename in own]
            place = f"in {PurePath(steps[-1].filename).name}, line {steps[-1].lineno}" if steps else f"in {method}"
            raise ReadError(
                "damaged_file",
                f"{uri}: {reader} raised {type(error).__name__} {place}; the file is damaged, or the reader has a bug",
            ) from None


def require_readers(readers: object) -> None:
    """Raises ConfigError unless these are objects with the methods of a Reader."""
    require_objects("readers", readers, _METHODS)
