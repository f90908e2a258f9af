"""Synthetic retinal OCT volumes ("phantoms") with known anatomy, disease and geometry.

An `Eye` has anatomy, vessels and lesions as functions of en-face position; a `Scanner` renders it into a Volume with
its GroundTruth. `write_phantom` writes a cohort of DICOM files in the layout of AI-READI. docs/phantom.md has the
validation.
"""

import numpy as np

from octfm.phantom.anatomy import LAYERS, SURFACES
from octfm.phantom.eye import Eye, central_subfield_um, sample_eye
from octfm.phantom.pathology import DIAGNOSES, LESIONS
from octfm.phantom.render import GroundTruth, render
from octfm.phantom.scanner import DEFAULT_SCANNERS, SCANNERS, Scanner
from octfm.phantom.write import PHANTOM_VERSION, write_phantom
from octfm.volume.volume import Laterality, Shape3, Volume


def phantom_volume(
    seed: int = 0,
    *,
    diagnosis: str = "healthy",
    severity: float = 0.5,
    laterality: Laterality = "R",
    scanner: str = "heidelberg_spectralis",
    size: Shape3 = (32, 256, 192),
    age: float = 60.0,
) -> tuple[Volume, GroundTruth]:
    """Render one phantom in memory. One seed is one participant; the same arguments give the same voxels."""
    eye = sample_eye(
        (seed, 0), laterality, participant=f"phantom{seed}", age=age, diagnosis=diagnosis, severity=severity
    )
    # Each scanner and eye has its own stream of eye motion and noise.
    rng = np.random.default_rng([seed, 0, 100 + list(SCANNERS).index(scanner) + 1000 * (laterality == "L")])
    return render(eye, SCANNERS[scanner], rng, size)


__all__ = [
    "DEFAULT_SCANNERS",
    "DIAGNOSES",
    "LAYERS",
    "LESIONS",
    "PHANTOM_VERSION",
    "SCANNERS",
    "SURFACES",
    "Eye",
    "GroundTruth",
    "Scanner",
    "central_subfield_um",
    "phantom_volume",
    "render",
    "sample_eye",
    "write_phantom",
]
