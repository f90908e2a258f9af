"""Fundus: the picture of the fundus that an instrument takes with a scan, and where its B-scans lie on it."""

from dataclasses import dataclass, replace

import numpy as np

from octfm.display import fields_line
from octfm.volume.volume import Lines


@dataclass(frozen=True, eq=False)
class Fundus:
    """A picture of the fundus, as the instrument shows it: superior at the top."""

    image: np.ndarray
    """uint8 [rows, columns]"""
    about: str
    """What kind of picture it is, for the reader."""
    lines: Lines | None = None
    """Pixels (x, y) of the first and the last A-scan of each B-scan, in the order of the Volume of the same file; None
    if the file does not say where they lie on the picture."""

    __repr__ = fields_line

    def reversed(self) -> "Fundus":
        """The same picture for B-scans in the opposite order."""
        return replace(self, lines=self.lines and self.lines[::-1])
