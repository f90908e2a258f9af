"""What a file NAME.json beside NAME.npz, NAME.tif or the folder NAME states about a volume whose format cannot.

{"spacing_mm": [0.12, 0.0039, 0.0115], "laterality": "OD", "participant": "p1", "scanner": "heidelberg_spectralis", "axes": "DHW"}
Every key may be missing, and others are of no interest here.
"""

import json
from dataclasses import dataclass

import numpy as np

from octfm.data.archive import open_file
from octfm.data.location import location
from octfm.data.volume import Spacing3
from octfm.errors import ReadError

_MAX_BYTES = 2**20


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


def read_declared(uri: str) -> Declared:
    """From NAME.json or NAME.ending.json. Raises ReadError contradicting_declaration for what cannot be meant."""
    path = location(uri)
    plain = path.name.removesuffix(".gz").rsplit(".", 1)[0]
    for place in dict.fromkeys([path.with_name(f"{plain}.json"), path.with_name(f"{path.name}.json")]):
        try:
            with open_file(str(place)) as file:
                content = file.read(_MAX_BYTES)
        except (OSError, ReadError):
            continue
        return _parsed(content, str(place))
    return Declared()


def spacing_from(value: object, where: str) -> Spacing3:
    """Three positive numbers, dz, dy, dx. Raises ReadError."""
    try:
        z, y, x = (float(mm) for mm in value)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        z = y = x = np.nan
    if not all(np.isfinite(mm) and mm > 0 for mm in (z, y, x)):
        raise ReadError(
            "contradicting_declaration",
            f"{where}: spacing_mm is {value!r}; expected three positive numbers, [dz, dy, dx] in millimetres",
        )
    return z, y, x


def _parsed(content: bytes, place: str) -> Declared:
    try:
        facts = json.loads(content)
    except ValueError:
        return Declared()  # some other file of that name
    if not isinstance(facts, dict):
        return Declared()
    spacing = facts.get("spacing_mm", facts.get("spacing_mm_zyx"))
    words = {
        name: str(facts.get(name) or "").strip()
        for name in ("laterality", "participant", "scanner", "protocol", "axes")
    }
    axes = words["axes"].upper()
    if axes and sorted(axes) != ["D", "H", "W"]:
        raise ReadError(
            "contradicting_declaration",
            f"{place}: axes is {words['axes']!r}; expected the letters D, H and W, such as DHW",
        )
    return Declared(
        **{**words, "axes": axes, "spacing_mm": spacing_from(spacing, place) if spacing is not None else None}
    )
