"""Sidecars: NAME.json next to NAME.npz, NAME.tif or the folder NAME states what the file's format cannot.

{"spacing_mm": [0.12, 0.0039, 0.0115], "laterality": "OD", "participant": "p1", "scanner": "topcon_maestro2",
"axes": "DHW"}
Every key is optional. Keys of other programs are ignored; a mistyped key or an impossible value is an error.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NoReturn

from octfm.errors import ReadError, shown
from octfm.formats.names import may_be_an_eye
from octfm.io.archive import MEMBER, file_size, is_folder, open_file
from octfm.io.location import Location, listed
from octfm.volume.appearance import UNDOUBTED, layered_axis, native_way_up
from octfm.volume.margins import searchable
from octfm.volume.volume import Modality, Spacing3, Volume, eight_bit

_MAX_BYTES = 2**20
"""A larger file belongs to another program."""
_MODALITIES: dict[str, Modality] = {"structure": "structure", "oct": "structure", "octa": "octa"}
KEYS = {
    "spacing_mm": "[dz, dy, dx], three positive numbers in millimetres: between B-scans, axial, lateral",
    "laterality": "one of R, L, OD, OS, right, left",
    "participant": "an id, as text or a whole number",
    "scanner": "a name such as heidelberg_spectralis",
    "protocol": "a name such as macula",
    "modality": f"one of {', '.join(_MODALITIES)}; octa is OCT angiography",
    "axes": "the letters D, H and W, such as DHW",
    "bits": "how many bits of 16 are used, a whole number from 8 to 16",
    "superior_first": "true or false, without quotes: true where B-scan 0 is superior, false where it is inferior",
    "bscan_lines_mm": "[x, y, x, y] per B-scan: its first and last A-scan on the fundus, to the right and downwards",
    "upside_down": "true or false, without quotes: true where row 0 is the choroid's side, so that rows are flipped",
}
"""Every key that is read -> description of its value."""
_ALSO = {"spacing_mm_zyx": "spacing_mm"}
_WITH_A_KEY = re.compile(rf'[^"\[{{]*\{{.*"({"|".join((*KEYS, *_ALSO))})"\s*:'.encode(), re.DOTALL)
"""An object, not a list, with one of the keys."""
_SYNONYMS = {
    "spacing_mm": "pixelspacing voxelspacing voxelsize pixelsize resolution resolutionmm zooms pixdim scale scalemm mm "
    "spacingzyx",
    "laterality": "eye side eyeside whicheye lat",
    "participant": "patient patientid subject subjectid participantid personid",
    "scanner": "device instrument machine",
    "axes": "axis axesorder axisorder dims dimorder",
    "bits": "bitdepth bitsstored significantbits bitspersample",
    "upside_down": "flipped flip inverted orientation flipud upsidedown",
}
"""Lower-case words that people write for a key. In CamelCase they are keys of other programs (BIDS, dcm2niix)."""
_NO_TEXT = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
"""Control characters, and halves of surrogate pairs, which no file can hold."""


@dataclass(frozen=True)
class Declared:
    """The facts of a sidecar; empty or None where it states nothing."""

    spacing_mm: Spacing3 | None = None
    """(dz, dy, dx)."""
    laterality: str = ""
    participant: str = ""
    scanner: str = ""
    protocol: str = ""
    modality: Modality | None = None
    axes: str = ""
    """Axes of an array, outermost first: DHW, WHD, ...; D is B-scan, H axial, W lateral."""
    bits: int | None = None
    """Significant bits of 16-bit voxels."""
    superior_first: bool | None = None
    bscan_lines_mm: tuple[tuple[float, ...], ...] = ()
    """x, y of the first and of the last A-scan of each B-scan; counts if the format states no positions."""
    upside_down: bool | None = None
    """True if the last row is the vitreous side, so that rows must be flipped; None if not declared."""
    flags: tuple[str, ...] = ()


def read_declared(uri: str) -> Declared:
    """The sidecar of a file, NAME.json or NAME.ending.json. Raises ReadError contradicting_declaration."""
    for place in sidecars(uri):
        try:
            with open_file(place) as file:  # which verifies the checksum of a member, as `read_start` does not
                content = file.read(_MAX_BYTES + 1)
        except (FileNotFoundError, NotADirectoryError, ReadError):
            continue
        except OSError as error:
            # Not skipped: what it states may contradict the file, or be all that is known about it.
            _refuse(f"{place}: cannot be read: {error.strerror or type(error).__name__}; check permissions")
        if len(content) > _MAX_BYTES:
            return Declared(flags=("sidecar_states_nothing",))
        return _parsed(content, str(place))
    return Declared()


def declared_for_dicom(uri: str) -> Declared:
    """The sidecar of a file whose header states most facts: a JSON with none of the keys is another program's, and
    ignored. Raises ReadError contradicting_declaration."""
    for place in sidecars(uri):
        try:
            with open_file(place) as file:
                content = file.read(_MAX_BYTES + 1)
        except (OSError, ReadError, ValueError):
            continue
        words = content.replace(b"\0", b"")  # it may be UTF-16
        if len(content) <= _MAX_BYTES and _WITH_A_KEY.match(words):
            return _parsed(content, str(place), others=True)
    return Declared()


def sidecars(uri: str) -> Iterable[Location]:
    """Where the sidecar of a file may be. The ending of a file begins with a letter, so the sidecar of the
    folder vol.1 is vol.1.json, never vol.json. A volume file!/name, one of several in a file that is not an archive,
    has the sidecar of its file."""
    file, mark, _ = uri.rpartition(MEMBER)
    # The mark may also be the end of an archive's name or, in new!/scan.png, of a folder's.
    in_file = mark and not file.lower().endswith(".zip") and file_size(file) and not is_folder(file)
    path = listed(file if in_file else uri)
    plain = re.sub(r"\.[A-Za-z]\w*$", "", path.name.removesuffix(".gz"))
    return dict.fromkeys([path.with_name(f"{plain}.json"), path.with_name(f"{path.name}.json")])


def spacing_from(value: object, where: str) -> Spacing3:
    """(dz, dy, dx) from three positive numbers. Raises ReadError."""
    if isinstance(value, list | tuple) and len(value) == 3 and all(_is_number(mm) and mm > 0 for mm in value):
        z, y, x = (float(mm) for mm in value)
        return z, y, x
    _refuse(f"{where}: spacing_mm is {shown(value)}; expected {KEYS['spacing_mm']}")


_WORDS = ("laterality", "scanner", "protocol", "modality", "axes")
"""Keys whose values are text."""
_FITS: dict[str, Callable[[Any], bool]] = {
    "laterality": may_be_an_eye,
    "participant": lambda who: type(who) in (str, int) and not _NO_TEXT.search(str(who).strip()),
    "modality": lambda text: text.lower() in ("", *_MODALITIES),
    "axes": lambda text: sorted(text.upper()) in ([], ["D", "H", "W"]),
    "bits": lambda bits: type(bits) is int and 8 <= bits <= 16,
    "superior_first": lambda value: isinstance(value, bool),
    "bscan_lines_mm": lambda ends: isinstance(ends, list) and ends != [] and all(map(_is_line, ends)),
    "upside_down": lambda value: isinstance(value, bool),
}
"""Key -> whether a value is what KEYS describes. `type`, because True is an int."""


def _parsed(content: bytes, place: str, others: bool = False) -> Declared:
    """`others`: without any of the keys, similar ones are another program's, not mistyped, and any modality passes."""
    lines = _Lines(_decoded(content, place), place)
    facts = lines.facts()
    known = {name for name in facts if name in KEYS or name in _ALSO}
    if others and not known:
        return Declared()
    for name in facts:
        if name not in known and (meant := _nearest(name)):
            _refuse(f"{lines.at(name)}: unknown key {name[:40]!r}; did you mean {meant}? It is {KEYS[meant]}")
    if not known:
        return Declared(flags=("sidecar_states_nothing",))
    stated: dict[str, Any] = {name: facts[name] for name in facts if name in known and facts[name] is not None}
    spacings = {name: spacing_from(stated[name], lines.at(name)) for name in ("spacing_mm", *_ALSO) if name in stated}
    if len(set(spacings.values())) > 1:
        _refuse(f"{lines.at('spacing_mm')}: spacing_mm and spacing_mm_zyx differ; keep one of them")
    stated |= {name: _text(stated.get(name), name, lines) for name in _WORDS}
    for name, fits in _FITS.items():
        of_header = others and name == "modality"  # a DICOM's header states it, as OPT
        if name in stated and not fits(stated[name]) and not of_header:
            got = "not an id" if name == "participant" else shown(stated[name], 40)
            _refuse(f"{lines.at(name)}: {name} is {got}; expected {KEYS[name]}")
    upside_down = stated.get("upside_down")
    return Declared(
        spacing_mm=next(iter(spacings.values()), None),
        laterality=stated["laterality"],
        participant=str(stated.get("participant", "")).strip(),
        scanner=stated["scanner"],
        protocol=stated["protocol"],
        modality=_MODALITIES.get(stated["modality"].lower()),
        axes=stated["axes"].upper(),
        bits=stated.get("bits"),
        superior_first=stated.get("superior_first"),
        bscan_lines_mm=tuple(tuple(map(float, line)) for line in stated.get("bscan_lines_mm", ())),
        upside_down=upside_down,
        flags=() if upside_down is None else ("declared_upside_down",) if upside_down else ("declared_upright",),
    )


@dataclass(frozen=True)
class _Lines:
    """The text of a JSON file, and the lines of its keys."""

    text: str
    place: str

    def facts(self) -> dict[str, object]:
        """The pairs of the outermost object. Raises ReadError for anything else, and for a key that occurs twice.

        NaN, which Python writes into JSON, is parsed; no key that is read accepts it.
        """
        twice: list[str] = []

        def object_of(pairs: list[tuple[str, object]]) -> dict[str, object]:
            names = [name for name, _ in pairs]
            # Overwritten by each object: the outermost one is parsed last.
            twice[:] = [name for name in names if names.count(name) > 1]
            return dict(pairs)

        try:
            facts = json.loads(self.text, object_pairs_hook=object_of)
        except json.JSONDecodeError as error:
            hint = " (JSON, not YAML or Python: one {object}, keys and words in double quotes, no comma after the last)"
            _refuse(f"{self.place}: line {error.lineno}, column {error.colno}: not JSON: {error.msg}{hint}")
        except (RecursionError, ValueError):
            _refuse(f"{self.place}: line 1: not readable as JSON; expected one object with {', '.join(KEYS)}")
        if not isinstance(facts, dict):
            _refuse(
                f'{self.place}: line 1: expected an object such as {{"spacing_mm": [dz, dy, dx]}}, '
                f"got a {type(facts).__name__}"
            )
        if twice:
            _refuse(f"{self.at(twice[0], last=True)}: {twice[0][:40]!r} occurs twice; keep one of them")
        return facts

    def at(self, name: str, last: bool = False) -> str:
        """File and line of a key, for error messages."""
        found = [match.start() for match in re.finditer(re.escape(json.dumps(name)) + r"\s*:", self.text)]
        line = f": line {1 + self.text[: found[-1 if last else 0]].count(chr(10))}" if found else ""
        return f"{self.place}{line}"


def _decoded(content: bytes, place: str) -> str:
    encoding = "utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig"
    try:
        return content.decode(encoding)
    except UnicodeDecodeError as error:
        line = 1 + content[: error.start].count(b"\n")
        _refuse(f"{place}: line {line}: not UTF-8, the encoding of JSON; save it as UTF-8")


def _nearest(name: str) -> str:
    """The key that a mistyped or similar word stands for; empty for keys of other programs."""
    if name == "Modality":
        return ""  # dcm2niix writes DICOM's keyword into every sidecar
    word = re.sub(r"[^a-z0-9]", "", name.lower())
    keys = {re.sub(r"[^a-z0-9]", "", key): key for key in KEYS}
    words = keys | {other: key for key, others in _SYNONYMS.items() for other in others.split()}
    if word in keys or (word in words and name == name.lower()):
        return words[word]
    close = get_close_matches(word, [key for key in keys if abs(len(key) - len(word)) <= 2], n=1, cutoff=0.72)
    return keys[close[0]] if close else ""


def _text(value: object, name: str, lines: _Lines) -> str:
    if not isinstance(value, str | None):
        _refuse(f"{lines.at(name)}: {name} is {shown(value, 40)}; expected {KEYS[name]}, in double quotes")
    return (value or "").strip()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300  # neither inf nor NaN


def _is_line(value: object) -> bool:
    return isinstance(value, list) and len(value) == 4 and all(map(_is_number, value))


def _refuse(message: str) -> NoReturn:
    raise ReadError("contradicting_declaration", message)


DECLARED = frozenset({"declared_upright", "declared_upside_down"})
"""Flags of a volume whose sidecar declares `upside_down`."""


def doubtful_way_up(
    volume: Volume, ilm_support: float, keep: bool = False, flags: Collection[str] = ()
) -> tuple[str, ...]:
    """The flag of a volume that is or may be upside down; none for one that is upright or whose sidecar declares it.

    `ilm_support`: `find_tissue`'s confidence in the volume as stored; if it is high, nothing else is computed.
    `keep`: flag a volume that is upside down; otherwise ReadError upside_down is raised. `flags`: those of its header.
    Raises ReadError unknown_axes for a volume whose layers lie across its B-scans or A-scans instead of its rows.
    """
    if ilm_support >= UNDOUBTED or not DECLARED.isdisjoint(flags):
        return ()
    voxels = eight_bit(searchable(volume))
    axis = layered_axis(voxels)
    up = native_way_up(voxels, volume.spacing_mm) if axis == 1 else None
    if up == "up" or declared_for_dicom(volume.source).upside_down is not None:
        return ()
    if up is None:
        looks = "like en face images: layers follow from image to image" if axis == 0 else "turned by 90 degrees"
        raise ReadError(
            "unknown_axes",
            f"{volume.source}: its B-scans look {looks}; save it as [B-scan, axial, lateral], or declare "
            '"axes" in a sidecar next to it (of an array, NIfTI or MetaImage; H is axial); if its B-scans are right, '
            'declare "upside_down": false there',
        )
    if up == "unclear":
        return ("way_up_unclear",)
    if keep:
        return ("looks_upside_down",)
    raise ReadError(
        "upside_down",
        f"{volume.source}: looks upside down: the border to the dark vitreous is at the bottom of its B-scans; declare "
        '"upside_down" in a sidecar next to it, true to have it flipped, false if it is not',
    )
