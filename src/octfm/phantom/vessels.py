"""Retinal vessels: arcades from the disc around the fovea, their branches, and their height and shadow in an A-scan."""

from dataclasses import dataclass

import numpy as np
from scipy.spatial import KDTree

from octfm.phantom.anatomy import DISC_MM


@dataclass(frozen=True, eq=False)
class Vessels:
    """Vessels as centre-line points, so dense that the distance to the nearest point is the distance to the vessel."""

    points_mm: np.ndarray
    """[N, 2] nasal and superior position."""
    radius_mm: np.ndarray
    """[N]"""


def sample_vessels(rng: np.random.Generator) -> Vessels:
    """Draw an artery and a vein for each arcade, with branches that thin out before the foveal avascular zone."""
    points, radii = [], []
    for superior in (1.0, -1.0):
        for calibre in (0.045, 0.062):
            arcade, radius = _arcade(rng, superior, calibre)
            points.append(arcade)
            radii.append(radius)
            for start in np.sort(rng.uniform(0.2, 0.95, 9)):
                at = int(start * (len(arcade) - 1))
                inward = rng.random() < 0.75
                branch, thin = _branch(rng, arcade[at], radius[at] * rng.uniform(0.4, 0.75), superior, inward)
                points.append(branch)
                radii.append(thin)
    return Vessels(np.concatenate(points), np.concatenate(radii))


def _arcade(rng: np.random.Generator, superior: float, calibre: float) -> tuple[np.ndarray, np.ndarray]:
    """Centre line [N, 2] and radius [N] of a vessel that leaves the disc steeply and arches around the fovea.

    It passes the fovea at 2 to 3 mm, like the arcuate nerve fibres (deformation.nerve_loss).
    """
    t = np.linspace(0, 1, 400)
    height, reach = rng.uniform(2.2, 3.1), rng.uniform(7.0, 8.5)
    x = DISC_MM[0] - reach * t**1.15
    y = DISC_MM[1] + superior * height * (1 - np.exp(-t / 0.13)) * (1 - 0.3 * t**2)
    wobble = 0.08 * np.sin(2 * np.pi * (rng.uniform(2, 4) * t + rng.random()))
    return np.stack([x, y + superior * wobble], axis=1), calibre * (1 - 0.55 * t)


def _branch(
    rng: np.random.Generator, start: np.ndarray, radius: float, superior: float, inward: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Centre line and radius of a branch from `start`, towards the fovea (`inward`) or away from it."""
    t = np.linspace(0, 1, 160)[:, None]
    if inward:
        angle = rng.uniform(0, 2 * np.pi)
        end = rng.uniform(0.35, 0.8) * np.array([np.cos(angle), superior * abs(np.sin(angle))])
    else:
        end = start + np.array([rng.uniform(-2.5, -0.5), superior * rng.uniform(0.5, 2.0)])
    bend = rng.normal(0, 0.35, 2)
    path = start + (end - start) * t + bend * np.sin(np.pi * t) + 0.04 * np.sin(2 * np.pi * (3 * t + rng.random()))
    return path, radius * (1 - 0.7 * t[:, 0]) + 0.006


def vessel_profile(vessels: Vessels, x_mm: np.ndarray, y_mm: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Half height of the vessel in µm and transmission below it in [0, 1], both of the shape of x_mm.

    Blood scatters forward, so the shadow has a softer edge than the vessel's wall.
    """
    distance, nearest = KDTree(vessels.points_mm).query(
        np.stack([x_mm.ravel(), y_mm.ravel()], axis=1), distance_upper_bound=0.15
    )
    hit = np.isfinite(distance)
    radius = vessels.radius_mm[np.where(hit, nearest, 0)]
    distance = np.where(hit, distance, 1.0)
    half = 1000 * np.sqrt(np.clip(radius**2 - distance**2, 0, None))
    # Large vessels block up to 85 % of the light, capillary-sized branches a quarter of it.
    depth = np.clip(0.2 + 16 * radius, 0, 0.85)
    shade = 1 - depth * np.exp(-((distance / (0.85 * radius)) ** 4))
    return half.reshape(x_mm.shape), shade.reshape(x_mm.shape)
