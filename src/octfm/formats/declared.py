"""What a file NAME.json beside NAME.npz, NAME.tif or the folder NAME states about a volume whose format cannot.

{"spacing_mm": [0.12, 0.0039, 0.0115], "laterality": "OD", "participant": "p1", "scanner": "heidelberg_spectralis", "axes": "DHW"}
Every key may be missing. Keys that other programs write are ignored; a mistyped one, or a value that cannot be meant, is an error.
"""

import json
import re
from collections.abc import Collection
from dataclasses import dataclass
from difflib import get_close_matches
from typing import NoReturn

import numpy as np

from octfm.errors import ReadError
from octfm.io.archive import open_file
from octfm.io.location import is_remote, listed
from octfm.volume.appearance import UNDOUBTED, native_way_up
from octfm.volume.planes import eight_bit
from octfm.volume.volume import Spacing3, Volume

_MAX_BYTES = 2**20
"""A larger file is some other program's."""
_EYES = ("R", "L", "OD", "OS", "right", "left")
_NO_EYE = ("", "B", "OU", "BOTH", "U", "UNK", "UNKNOWN", "UNSPECIFIED", "NA", "N/A", "NONE", "-")
KEYS = {
    "spacing_mm": "[dz, dy, dx], three positive numbers in millimetres: between B-scans, axial, lateral",
    "laterality": f"one of {', '.join(_EYES)}",
    "participant": "an id, as text or a whole number",
    "scanner": "a name such as heidelberg_spectralis",
    "protocol": "a name such as macula",
    "axes": "the letters D, H and W, such as DHW",
    "bits": "how many bits of 16 are used, a whole number from 8 to 16",
    "upside_down": "true where row 0 is the choroid's side, so that rows are flipped; false where it is the vitreous's",
}
"""Every key that is read -> its value."""
_ALSO = {"spacing_mm_zyx": "spacing_mm"}
_MEANT = {
    "spacing_mm": "pixelspacing voxelspacing voxelsize pixelsize resolution resolutionmm zooms pixdim scale scalemm mm spacingzyx",
    "laterality": "eye side eyeside whicheye lat",
    "participant": "patient patientid subject subjectid participantid personid",
    "scanner": "device instrument machine",
    "axes": "axis axesorder axisorder dims dimorder",
    "bits": "bitdepth bitsstored significantbits bitspersample",
    "upside_down": "flipped flip inverted orientation flipud upsidedown",
}
"""Other words that people write; CamelCase ones are other programs' (BIDS, dcm2niix)."""


@dataclass(frozen=True)
class Declared:
    spacing_mm: Spacing3 | None = None
    """(dz, dy, dx)."""
    laterality: str = ""
    participant: str = ""
    scanner: str = ""
    protocol: str = ""
    axes: str = ""
    """Of an array, outermost first: DHW, WHD, ...; D is B-scan, H axial, W lateral."""
    bits: int | None = None
    """Significant bits of 16-bit voxels."""
    upside_down: bool | None = None
    """Whether the last row is the vitreous side, so that rows have to be flipped; None where nothing is declared."""
    flags: tuple[str, ...] = ()


def read_declared(uri: str) -> Declared:
    """From NAME.json or NAME.ending.json. Raises ReadError contradicting_declaration for what cannot be read or cannot be meant."""
    path = listed(uri)
    plain = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    for place in dict.fromkeys([path.with_name(f"{plain}.json"), path.with_name(f"{path.name}.json")]):
        try:
            with open_file(str(place)) as file:
                content = file.read(_MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError, ReadError):
            continue
        except OSError as error:
            _refuse(f"{place}: cannot be read: {error.strerror or type(error).__name__}; check permissions")
        if len(content) > _MAX_BYTES:
            return Declared(flags=("sidecar_states_nothing",))
        return _parsed(content, str(place))
    return Declared()


def declared_way_up(uri: str) -> bool | None:
    """`Declared.upside_down` of a file whose other facts are in its own header: a JSON without that key is not looked at further."""
    path = listed(uri)
    if is_remote(uri):
        return None  # one request more for every file
    for place in (path.with_suffix(".json"), path.with_name(f"{path.name}.json")):
        try:
            with open_file(str(place)) as file:
                content = file.read(_MAX_BYTES)
        except (OSError, ReadError, ValueError):
            continue
        if b"upside_down" in content:
            return _parsed(content, str(place)).upside_down
    return None


def spacing_from(value: object, where: str) -> Spacing3:
    """Three positive numbers, dz, dy, dx. Raises ReadError."""
    numbers = isinstance(value, list | tuple) and len(value) == 3 and all(_is_number(mm) for mm in value)
    if not numbers or not all(np.isfinite(float(mm)) and mm > 0 for mm in value):  # type: ignore[union-attr]
        shown = f"{str(value)[:80]!r}" if isinstance(value, str) else str(value)[:80]
        _refuse(f"{where}: spacing_mm is {shown}; expected {KEYS['spacing_mm']}")
    z, y, x = (float(mm) for mm in value)  # type: ignore[union-attr]
    return z, y, x


def _parsed(content: bytes, place: str) -> Declared:
    text = _decoded(content, place)
    lines = _Lines(text, place)
    facts = lines.facts()
    for name in facts:
        if name not in KEYS and name not in _ALSO and (meant := _nearest(name)):
            _refuse(f"{lines.at(name)}: unknown key {name[:40]!r}; did you mean {meant}? It is {KEYS[meant]}")
    known = {name for name in facts if name in KEYS or name in _ALSO}
    if not known:
        return Declared(flags=("sidecar_states_nothing",))
    stated = {name: value for name, value in facts.items() if name in known and value is not None}
    spacings = {name: spacing_from(stated[name], lines.at(name)) for name in ("spacing_mm", *_ALSO) if name in stated}
    if len(set(spacings.values())) > 1:
        _refuse(f"{lines.at('spacing_mm')}: spacing_mm and spacing_mm_zyx differ; keep one of them")
    words = {name: _text(stated.get(name), name, lines) for name in ("laterality", "scanner", "protocol", "axes")}
    if words["laterality"].upper() not in (*(eye.upper() for eye in _EYES), *_NO_EYE):
        _refuse(f"{lines.at('laterality')}: laterality is {words['laterality'][:40]!r}; expected {KEYS['laterality']}")
    axes = words["axes"].upper()
    if axes and sorted(axes) != ["D", "H", "W"]:
        _refuse(f"{lines.at('axes')}: axes is {words['axes'][:40]!r}; expected {KEYS['axes']}")
    bits, upside_down, participant = (stated.get(name) for name in ("bits", "upside_down", "participant"))
    if bits is not None and not (isinstance(bits, int) and not isinstance(bits, bool) and 8 <= bits <= 16):
        _refuse(f"{lines.at('bits')}: bits is {str(bits)[:40]}; expected {KEYS['bits']}")
    if not isinstance(upside_down, bool | None):
        _refuse(
            f"{lines.at('upside_down')}: upside_down is {str(upside_down)[:40]!r}; expected true or false, without quotes"
        )
    if not isinstance(participant, str | int | None) or isinstance(participant, bool):
        _refuse(f"{lines.at('participant')}: participant is no id; expected {KEYS['participant']}")
    return Declared(
        **{**words, "axes": axes},
        participant="" if participant is None else str(participant).strip(),
        spacing_mm=next(iter(spacings.values()), None),
        bits=bits,
        upside_down=upside_down,
        flags={True: ("declared_upside_down",), False: ("declared_upright",)}.get(upside_down, ()),  # type: ignore[call-overload]
    )


@dataclass(frozen=True)
class _Lines:
    """A JSON text, and where in it a key stands."""

    text: str
    place: str

    def facts(self) -> dict[str, object]:
        """The pairs of the outermost object. Raises ReadError for anything that is no JSON object or has a key twice. NaN, which Python
        writes into JSON, is a number like any other, and no value of a key that is read."""
        twice: list[str] = []

        def object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
            names = [name for name, _ in pairs]
            twice[:] = [name for name in names if names.count(name) > 1]  # of the outermost object, which ends last
            return dict(pairs)

        try:
            facts = json.loads(self.text, object_pairs_hook=object_of)
        except json.JSONDecodeError as error:
            hint = " (JSON, not YAML or Python: one {object}, keys and words in double quotes, no comma after the last)"
            _refuse(f"{self.place}: line {error.lineno}, column {error.colno}: no JSON: {error.msg}{hint}")
        except (RecursionError, ValueError):
            _refuse(f"{self.place}: line 1: no JSON that can be read; expected one object with {', '.join(KEYS)}")
        if not isinstance(facts, dict):
            _refuse(
                f'{self.place}: line 1: expected an object such as {{"spacing_mm": [dz, dy, dx]}}, got a {type(facts).__name__}'
            )
        if twice:
            _refuse(f"{self.at(twice[0], last=True)}: {twice[0][:40]!r} is there twice; keep one of them")
        return facts

    def at(self, name: str, last: bool = False) -> str:
        """File and line of a key."""
        found = [match.start() for match in re.finditer(re.escape(json.dumps(name)) + r"\s*:", self.text)]
        line = f": line {1 + self.text[: found[-1 if last else 0]].count(chr(10))}" if found else ""
        return f"{self.place}{line}"


def _decoded(content: bytes, place: str) -> str:
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line = 1 + content[: error.start].count(b"\n")
        _refuse(f"{place}: line {line}: not UTF-8, which JSON has to be; save it as UTF-8")


def _nearest(name: str) -> str:
    """The key that a mistyped or similar one means; empty for other programs' keys."""
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    keys = {re.sub(r"[^a-z0-9]", "", key): key for key in KEYS}
    words = keys | {other: key for key, others in _MEANT.items() for other in others.split()}
    if word in keys or (word in words and name == name.lower()):
        return words[word]
    close = get_close_matches(word, [key for key in keys if abs(len(key) - len(word)) <= 2], n=1, cutoff=0.72)
    return keys[close[0]] if close else ""


def _text(value: object, name: str, lines: _Lines) -> str:
    if not isinstance(value, str | None):
        _refuse(f"{lines.at(name)}: {name} is {str(value)[:40]}; expected {KEYS[name]}, in double quotes")
    return (value or "").strip()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _refuse(message: str) -> NoReturn:
    raise ReadError("contradicting_declaration", message)


DECLARED = frozenset({"declared_upright", "declared_upside_down"})
"""Flags of a volume whose sidecar says which way up it lies."""


def doubtful_way_up(
    volume: Volume, ilm_support: float, keep: bool = False, flags: Collection[str] = ()
) -> tuple[str, ...]:
    """The flag for a volume that is or may be upside down, none for one that lies as it should or whose sidecar says how it lies.

    `ilm_support`: what the tissue search measured as it lies; where that leaves no doubt, nothing else is looked at. `keep`: a volume
    that is upside down gets a flag instead of raising ReadError upside_down. `flags`: what its header gave, a declaration among them.
    """
    if ilm_support >= UNDOUBTED or not DECLARED.isdisjoint(flags):
        return ()
    up = native_way_up(eight_bit(volume), volume.spacing_mm)
    if up == "up" or declared_way_up(volume.source) is not None:
        return ()
    if up == "unclear":
        return ("way_up_unclear",)
    if keep:
        return ("looks_upside_down",)
    raise ReadError(
        "upside_down",
        f'{volume.source}: looks upside down: the border to the dark vitreous is at the bottom of its B-scans; declare "upside_down" in a '
        "sidecar beside it, true to have it flipped, false if it is not",
    )
