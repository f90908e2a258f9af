"""Effects of detachments, subretinal material, reticular drusen and fluctuations of the RPE on the outer retina.

They come on top of the lesions of pathology.py and lie in the same layers: everything between RPE and Bruch's membrane
in `drusen`, everything between photoreceptors and RPE in `subretinal_fluid`. The retina above follows: low bumps are
taken up by the outer nuclear layer, high ones lift it, smoothly.
"""

from dataclasses import dataclass, field

import numpy as np
from scipy.ndimage import gaussian_filter1d

from octfm.phantom.anatomy import LAYER, Waves, waves
from octfm.phantom.pathology import around_the_fovea

DETACHMENT = 7
"""Value of a detachment of the pigment epithelium in a lesion mask, after those of pathology.LESIONS; 8 is subretinal
material."""
MATERIAL = 8
_SMOOTH_MM, _ABSORBED_UM = 0.16, 70.0
"""Width over which a bump is smoothed on its way to the ILM, and the height above which it is passed on in full."""


@dataclass(frozen=True, eq=False)
class OuterLesions:
    detachments: np.ndarray = field(default_factory=lambda: np.zeros((0, 6)))
    """[N, 6]: x, y, radius in mm; height in µm; exponent of the dome; solidity from 0 (serous) to 1 (fibrous)."""
    material: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))
    """[N, 4] subretinal hyperreflective material: x, y, radius in mm; height in µm."""
    reticular: np.ndarray = field(default_factory=lambda: np.zeros((0, 4)))
    """[N, 4] subretinal drusenoid deposits: the same columns."""
    fluctuation: Waves | None = None
    """Unevenness of the RPE over basal deposits and many small drusen."""
    fluctuation_um: float = 0.0
    fluctuation_from: float = 0.0
    """Height of the wave below which the RPE is even."""


def sample_outer_lesions(
    rng: np.random.Generator, *, detached: bool, neovascular: bool, reticular: bool
) -> OuterLesions:
    """Detachments are 60 to 800 µm high, log-uniform; material goes with wet AMD; six in ten have an uneven RPE."""
    detachments, material, deposits = np.zeros((0, 6)), np.zeros((0, 4)), np.zeros((0, 4))
    if detached or neovascular:
        count = 1 + int(rng.poisson(0.6))
        height = np.exp(rng.uniform(np.log(60), np.log(800), count))
        radius = np.clip(height / 1000 * rng.uniform(1.0, 3.5, count), 0.12, 2.2)
        x, y = around_the_fovea(rng, np.abs(rng.normal(0, 0.9, count)))
        solid = rng.beta(0.7, 0.7, count) if neovascular else rng.beta(0.6, 1.5, count)
        detachments = np.stack([x, y, radius, height, rng.uniform(0.4, 1.2, count), solid], axis=1)
    if neovascular:
        count = 1 + int(rng.poisson(0.7))
        x, y = around_the_fovea(rng, np.abs(rng.normal(0, 0.7, count)))
        material = np.stack([x, y, rng.uniform(0.15, 1.0, count), rng.uniform(20, 160, count)], axis=1)
    if reticular:
        count = int(rng.uniform(20, 160))
        # Densest around the arcades, rare in the fovea.
        x, y = around_the_fovea(rng, rng.uniform(0.8, 4, count))
        deposits = np.stack([x, y, rng.uniform(0.03, 0.11, count), rng.uniform(10, 70, count)], axis=1)
    uneven = rng.random() < 0.6
    wave, height, level = waves(rng, (0.12, 0.7), 10), rng.uniform(4, 60), rng.uniform(-0.8, 0.6)
    return OuterLesions(detachments, material, deposits, wave, float(height) if uneven else 0.0, float(level))


@dataclass(frozen=True, eq=False)
class OuterRetina:
    """The outer lesions of one eye on a grid of A-scans, all [D, W]."""

    drusen_um: np.ndarray
    """Height of drusen, fluctuations included."""
    detachment_um: np.ndarray
    serous: np.ndarray
    """Share of fluid in what lies below the RPE: 0 solid, 1 clear."""
    material_um: np.ndarray
    reticular_um: np.ndarray

    @property
    def raised_um(self) -> np.ndarray:
        """Distance of RPE and Bruch's membrane."""
        return np.maximum(self.drusen_um, self.detachment_um)


def raise_outer_retina(
    lesions: OuterLesions, layers_um: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray, ascan_mm: float
) -> OuterRetina:
    """Add outer lesions to the layers [L, D, W] in place; lateral smoothing runs along A-scans, `ascan_mm` apart."""
    drusen_layer, subretinal_layer, onl = (LAYER[name] for name in ("drusen", "subretinal_fluid", "onl"))
    drusen = layers_um[drusen_layer].copy()
    # pathology.py has pressed this much of a druse into the outer nuclear layer already.
    pressed = np.minimum(0.85 * drusen, 1.5 * layers_um[onl])
    uneven = drusen
    if lesions.fluctuation is not None and lesions.fluctuation_um > 0:
        wave = 0.6 * lesions.fluctuation(x_mm, y_mm) - lesions.fluctuation_from
        uneven = np.maximum(drusen, lesions.fluctuation_um * np.clip(wave, 0, 1.6))
    detachment, serous = _domes(lesions.detachments, x_mm, y_mm), np.zeros(x_mm.shape)
    for x, y, radius, _, _, solid in lesions.detachments:
        inside = (x_mm - x) ** 2 + (y_mm - y) ** 2 < radius**2
        serous = np.where(inside & (detachment > uneven), 1 - solid, serous)
    material, reticular = (
        _domes(table, x_mm, y_mm, p) for table, p in ((lesions.material, 0.6), (lesions.reticular, 0.8))
    )
    found = OuterRetina(uneven, detachment, serous, material, reticular)

    layers_um[drusen_layer] = found.raised_um
    layers_um[subretinal_layer] += np.maximum(material, reticular)
    bump = found.raised_um - pressed + np.maximum(material, reticular)
    smooth = gaussian_filter1d(bump, _SMOOTH_MM / ascan_mm, axis=1, mode="nearest")
    passed_on = smooth * np.clip(smooth / _ABSORBED_UM, 0.1, 1)
    layers_um[onl] = np.maximum(layers_um[onl] - (bump - passed_on), 0.25 * layers_um[onl])
    for name in ("myoid", "ellipsoid", "outer_segment"):
        layers_um[LAYER[name]] *= np.exp(-material / 60 - (found.raised_um - drusen) / 400)
    # Over a druse the ellipsoid zone comes down to the RPE.
    layers_um[LAYER["outer_segment"]] *= np.exp(-found.raised_um / 90)
    return found


def _domes(table: np.ndarray, x_mm: np.ndarray, y_mm: np.ndarray, exponent: float | None = None) -> np.ndarray:
    """[D, W] height of the highest dome: height · (1 - r²)^exponent; if none is given, the exponent is in column 4."""
    height = np.zeros(x_mm.shape)
    for row in table:
        inside = np.clip(1 - ((x_mm - row[0]) ** 2 + (y_mm - row[1]) ** 2) / row[2] ** 2, 0, 1)
        np.maximum(height, row[3] * inside ** (row[4] if exponent is None else exponent), out=height)
    return height
