"""Three synthetic scans to try octfm segment and octfm view on, rendered in a tenth of a second each."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from octfm.errors import ConfigError
from octfm.phantom import phantom_volume
from octfm.volume.volume import Volume

SEVERITY = {"healthy": 0.5, "drusen": 0.7, "dme": 0.6}
"""Diagnoses of one synthetic eye."""
SEED = 7
SIZE = (20, 256, 192)


@dataclass(frozen=True, eq=False)
class Sample:
    volume: Volume
    centre_um: float
    """True thickness of the central ETDRS zone, ILM to BM."""


def samples(names: Iterable[str] = ()) -> list[Sample]:
    """Samples of these names, else all. Raises ConfigError for an unknown name."""
    made = []
    for name in list(names) or list(SEVERITY):
        if name not in SEVERITY:
            raise ConfigError(f"--sample: expected {', '.join(SEVERITY)}, got {name!r}; a file needs no --sample")
        volume, truth = phantom_volume(SEED, diagnosis=name, severity=SEVERITY[name], size=SIZE)
        # Nobody must take it for a scan of the instrument that the phantom imitates.
        volume = replace(volume, source=f"sample-{name}", scanner="synthetic", protocol=f"phantom {name}")
        made.append(Sample(volume, truth.cst_um))
    return made
