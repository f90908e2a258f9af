"""How tissue looks in one acquisition: reflectivity of every layer, of the bands of the outer retina and of the
choroid, and the display.

`sample_look` draws it around published and observed values (`spread` 1) or far beyond what exists (`spread` 3), as in
training on randomised synthetic images (SynthSeg, arXiv:2107.09559): a network trained on every look does not depend on
any of them.
"""

from dataclasses import dataclass

import numpy as np

from octfm.phantom.render import LAYER_DB
from octfm.phantom.scanner import Scanner

ABSENT_DB = -30.0
"""A structure this far below the RPE is invisible."""
WIDE = 3.0
"""`spread` of the randomised domain."""


@dataclass(frozen=True, eq=False)
class Look:
    """Levels are backscatter in dB relative to the RPE, extents are µm."""

    layer_db: dict[str, float]
    elm_db: float
    interdigitation_db: float
    """The line on the photoreceptor tips, between EZ and RPE; ABSENT_DB if the instrument does not resolve it."""
    interdigitation_um: float
    band_um: float
    """Thickness of the bright band (RPE and Bruch's membrane) minus that of the RPE alone, where the two touch."""
    peak_at: float
    """Place of the brightest line within that band, 0 inner edge, 1 outer edge."""
    peak_db: float
    bruch_db: float
    """Bruch's membrane as a line of its own, seen where the RPE is raised."""
    choriocapillaris_db: float
    choriocapillaris_um: float
    choroid_db: float
    choroid_contrast: float
    """In [0, 1): how much darker than stroma the lumina of choroidal vessels are."""
    choroid_decay_mm: float
    sclera_db: float
    ilm_db: float
    """The specular line on the ILM where it faces the beam; ABSENT_DB if there is none."""
    texture_db: float
    """Standard deviation of reflectivity within a layer."""
    texture_um: tuple[float, float]
    """Its (axial, lateral) scale."""
    oblique_db: float
    """Loss of the nerve fibre layer per degree of obliquity; fibres reflect like a mirror."""
    fill_db: float
    """Material below a raised RPE: drusen and solid detachments."""
    fill_fall_db: float
    """How much darker that material is at Bruch's membrane than below the RPE; negative if brighter."""
    base_db: float
    """A bright sheet on Bruch's membrane below a raised RPE; ABSENT_DB if there is none. It outshines the RPE of
    many drusen in a Spectralis volume."""
    raised_rpe_db: float
    """Change of the RPE's brightness where it is raised, in patches."""
    fill_sd_db: float
    ellipsoid_loss_um: float
    """Elevation of the RPE over which the ellipsoid zone above it fades to 1/e."""
    vessel_shadow: float
    """Exponent on the light that passes a vessel."""
    axial_um: float
    lateral_um: float
    """Full widths at half maximum of the point-spread function."""
    frames_averaged: float
    noise_db: float
    black_db: float
    range_db: float
    gamma: float
    smoothing_px: tuple[float, float]
    """(axial, lateral) width of the maker's denoising; 0 for none."""
    inverted: bool
    """Dark on white, as in some exports."""
    linear: bool
    """Shown as the fourth root of intensity instead of its logarithm, as raw files are."""


def sample_look(rng: np.random.Generator, scanner: Scanner, spread: float = 1.0) -> Look:
    """The look of one acquisition on this instrument. Every look takes the same number of draws."""

    def around(level: float, sd: float) -> float:
        return float(level + spread * rng.normal(0, sd))

    def between(low: float, high: float) -> float:
        return float(rng.uniform(low, high))

    def sometimes(share: float, level: float) -> float:
        return level if rng.random() < share else ABSENT_DB

    wide = spread > 1
    layers = {name: around(level, 1.2) for name, level in LAYER_DB.items()}
    haze = around(0, 1.0)
    for name in ("gcl", "ipl", "inl", "opl", "onl", "myoid"):
        layers[name] += haze
    layers |= {"ellipsoid": around(-2.5, 1.2), "outer_segment": around(-5.0, 2.0), "rpe": 0.0}
    denoised = rng.random() < 0.6
    smoothing = (between(0, 1.0), between(0, 1.2))
    frames, noise = float(np.exp(between(0, np.log(40)))), between(-30, -17)
    own_frames = float(scanner.frames_averaged * np.exp(rng.normal(0.4, 0.6)))
    own_noise = float(scanner.noise_db + rng.normal(0, 2))
    return Look(
        layer_db=layers,
        elm_db=around(-9, 2),
        interdigitation_db=sometimes(0.75, between(-7, 0)),
        interdigitation_um=between(4, 12),
        band_um=between(-3, 16),
        # On a Spectralis it is brightest 4 to 5 rows of 3.9 µm above its outer edge (30 B-scans of one AMD eye).
        peak_at=between(0.1, 0.55),
        peak_db=between(-4, 3),
        bruch_db=between(-9, -1),
        choriocapillaris_db=between(-9, -3.5),
        choriocapillaris_um=between(8, 30),
        choroid_db=around(-6, 1.8),
        choroid_contrast=between(0.45, 0.9),
        choroid_decay_mm=float(np.exp(between(np.log(0.08), np.log(0.35)))),
        sclera_db=around(-10, 1.5),
        ilm_db=sometimes(0.5, between(-4, 3)),
        texture_db=between(0.3, 1.3) * min(spread, 2.0),
        texture_um=(between(3, 10), between(15, 90)),
        oblique_db=between(0, 0.25),
        fill_db=between(-9, 1),
        fill_fall_db=between(-5, 5),
        base_db=sometimes(0.5, between(-5, 3)),
        raised_rpe_db=between(-8, 1),
        fill_sd_db=between(0.5, 3),
        ellipsoid_loss_um=float(np.exp(between(np.log(12), np.log(110)))),
        vessel_shadow=between(0.6, 1.3),
        axial_um=float(scanner.axial_psf_um * np.exp(rng.normal(0.1, 0.2 * min(spread, 2.0)))),
        lateral_um=float(scanner.lateral_psf_um * np.exp(abs(rng.normal(0, 0.35)))),
        frames_averaged=frames if wide else own_frames,
        noise_db=noise if wide else own_noise,
        black_db=around(scanner.black_db, 1.8),
        range_db=float(scanner.range_db * np.exp(spread * rng.normal(0, 0.09))),
        gamma=float(np.exp(spread * rng.normal(0, 0.15))),
        smoothing_px=smoothing if denoised else (0.0, 0.0),
        inverted=bool(rng.random() < 0.02 * spread),
        linear=bool(rng.random() < 0.03 * spread),
    )
