"""Three synthetic scans to try octfm segment and octfm view on, rendered in a tenth of a second each."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from octfm.errors import ConfigError
from octfm.phantom import SCANNERS
from octfm.phantom.eye import sample_eye
from octfm.phantom.native.eye import render_eye
from octfm.volume.etdrs import field_of_volume, measure_around, measure_grid
from octfm.volume.volume import Volume

SEVERITY = {"healthy": 0.5, "drusen": 0.7, "dme": 0.6}
"""Diagnoses of one synthetic eye."""
SEED = 1
SIZE = (20, 256, 192)
"""B-scans, rows and A-scans."""


@dataclass(frozen=True, eq=False)
class Sample:
    """A synthetic scan and its true retinal thickness."""

    volume: Volume
    retina_um: np.ndarray = field(repr=False)
    """[D, W]: true thickness from ILM to BM at every A-scan."""
    centre_um: float
    """Mean of `retina_um` in the central ETDRS zone around the true pit."""

    def centre_at(self, place_mm: tuple[float, float]) -> float:
        """True mean thickness in µm of the central zone around another place (x, y) on the fundus; NaN if the scan does
        not cover it."""
        grid = measure_around(place_mm, self.retina_um, field_of_volume(self.volume), self.volume.laterality)
        return grid.mean_um["centre"] or np.nan


def samples(names: Iterable[str] = ()) -> list[Sample]:
    """The samples of these names (keys of SEVERITY), by default all. Raises ConfigError for an unknown name."""
    made = []
    for name in list(names) or list(SEVERITY):
        if name not in SEVERITY:
            raise ConfigError(f"--sample: expected {', '.join(SEVERITY)}, got {name!r}; a file needs no --sample")
        eye = sample_eye((SEED, 0), "R", participant=name, age=60, diagnosis=name, severity=SEVERITY[name])
        volume, truth = render_eye(eye, SCANNERS["heidelberg_spectralis"], np.random.default_rng(SEED), SIZE)
        # So that nobody takes it for a scan of the instrument that the phantom imitates.
        volume = replace(volume, source=f"sample-{name}", scanner="synthetic", protocol=f"phantom {name}")
        retina, inner = (
            1000 * truth.spacing_mm[1] * (truth.surface(s) - truth.surface("ilm")) for s in ("bm", "ipl_inl")
        )
        grid = measure_grid(retina, field_of_volume(volume), volume.laterality, pit_map_um=inner)
        made.append(Sample(volume, retina, grid.mean_um["centre"] or np.nan))
    return made
