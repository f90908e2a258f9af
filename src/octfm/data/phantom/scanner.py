"""The OCT instruments: geometry, optics and display of each, and what varies from one acquisition to the next."""

from dataclasses import dataclass

import numpy as np

from octfm.data.phantom.anatomy import Waves, waves
from octfm.data.volume import Shape3, Spacing3


@dataclass(frozen=True)
class Scanner:
    name: str
    manufacturer: str
    model: str
    protocol: str
    field_mm: Spacing3
    """Extent (across B-scans, axial, lateral)."""
    vendor_size: Shape3
    """B-scans, rows, columns of the instrument itself; phantoms are smaller unless asked."""
    superior_first: bool
    frames_averaged: int
    """Effective number of independent frames averaged per B-scan."""
    axial_psf_um: float
    """Full width at half maximum in tissue."""
    lateral_psf_um: float
    noise_db: float
    """Detector noise relative to the RPE."""
    roll_off_db_per_mm: float
    choroid_decay_mm: float
    """Depth over which the signal below Bruch's membrane falls to 1/e: longer at 1,050 nm than at 840 nm."""
    black_db: float
    range_db: float
    """Display window: level shown as 0, and how far above it 255 lies."""
    axial_motion_um: float
    """Standard deviation of what remains of axial eye motion across the volume."""
    saccades: float
    """Expected number per volume of abrupt lateral jumps; tracking instruments repeat those B-scans."""
    rle: bool
    """Files written with RLE Lossless instead of uncompressed."""

    def spacing_mm(self, size: Shape3) -> Spacing3:
        z, y, x = (mm / n for mm, n in zip(self.field_mm, size, strict=True))
        return z, y, x

    def looks(self, size: Shape3) -> int:
        """Independent speckle grains in one pixel: averaged frames, times the resolution cells a coarse pixel averages over."""
        _, dy, dx = self.spacing_mm(size)
        cells = max(1.0, 1000 * dy / self.axial_psf_um) * max(1.0, 1000 * dx / self.lateral_psf_um)
        return max(1, round(self.frames_averaged * cells))


SCANNERS = {
    # Eye tracking, averaged frames, inferior B-scan first, black background.
    "heidelberg_spectralis": Scanner(
        name="heidelberg_spectralis",
        manufacturer="Heidelberg Engineering",
        model="Spectralis",
        protocol="spectralis_mac_raster",
        field_mm=(5.8, 1.92, 5.8),
        vendor_size=(49, 496, 512),
        superior_first=False,
        frames_averaged=4,
        axial_psf_um=7.0,
        lateral_psf_um=14.0,
        noise_db=-25.0,
        roll_off_db_per_mm=2.0,
        choroid_decay_mm=0.12,
        black_db=-24.5,
        range_db=26.0,
        axial_motion_um=22.0,
        saccades=0.2,
        rle=False,
    ),
    # Swept source, one shot per A-scan, superior B-scan first, grey background, deep choroid.
    "topcon_triton": Scanner(
        name="topcon_triton",
        manufacturer="Topcon",
        model="Triton",
        protocol="triton_macula_7x7",
        field_mm=(7.0, 2.58, 7.0),
        vendor_size=(256, 992, 512),
        superior_first=True,
        frames_averaged=1,
        axial_psf_um=8.0,
        lateral_psf_um=20.0,
        noise_db=-23.5,
        roll_off_db_per_mm=0.6,
        choroid_decay_mm=0.18,
        black_db=-30.0,
        range_db=37.0,
        axial_motion_um=42.0,
        saccades=1.2,
        rle=True,
    ),
}


@dataclass(frozen=True, eq=False)
class Acquisition:
    """One press of the button: where the eye was, and how good the signal. None of it knows the diagnosis."""

    fixation_mm: tuple[float, float]
    """Image position of the fovea relative to the centre of the scan."""
    torsion_rad: float
    tilt: tuple[float, float]
    """Slope of the retina in the frame across columns and across B-scans, µm per mm."""
    position: float
    """Depth of the fovea in the frame, as a share of its height."""
    axial_motion_um: np.ndarray
    """[D]"""
    lateral_motion_mm: np.ndarray
    """[D, 2]: x and y displacement of each B-scan."""
    signal_db: np.ndarray
    """[D]: strength of every B-scan, quality of the acquisition included."""
    vignetting: Waves
    vignetting_db: float
    black_db: float
    range_db: float
    noise_db: float
    defocus: float
    """Multiplier of the lateral point-spread function."""


def acquire(rng: np.random.Generator, scanner: Scanner, frames: int) -> Acquisition:
    return Acquisition(
        fixation_mm=(float(rng.normal(0, 0.12)), float(rng.normal(0, 0.12))),
        torsion_rad=float(rng.normal(0, np.radians(3))),
        tilt=(float(rng.normal(0, 30)), float(rng.normal(0, 20))),
        position=float(rng.uniform(0.42, 0.56)),
        axial_motion_um=_axial_motion(rng, scanner, frames),
        lateral_motion_mm=_lateral_motion(rng, scanner, frames),
        signal_db=(rng.normal(-1.5, 1.8) + rng.normal(0, 0.35, frames)),
        vignetting=waves(rng, (3.0, 12.0)),
        vignetting_db=float(rng.uniform(0.2, 1.6)),
        # Operators and firmware set brightness and contrast; disease must not be readable from either.
        black_db=float(scanner.black_db + rng.normal(0, 1.5)),
        range_db=float(scanner.range_db * np.exp(rng.normal(0, 0.09))),
        noise_db=float(scanner.noise_db + rng.normal(0, 1.2)),
        defocus=float(1 + abs(rng.normal(0, 0.35))),
    )


def _axial_motion(rng: np.random.Generator, scanner: Scanner, frames: int) -> np.ndarray:
    """Pulse and breathing are slow, head drift is a random walk, and single B-scans jump; between 10 and 60 µm in all."""
    t = np.arange(frames)
    slow = np.sin(2 * np.pi * (t / frames * rng.uniform(0.8, 4) + rng.random()))
    drift = np.cumsum(rng.normal(0, 1, frames))
    drift = (drift - drift.mean()) / max(float(drift.std()), 1e-6)
    motion = 0.5 * slow + 0.6 * drift + 0.35 * rng.normal(0, 1, frames)
    amount = np.clip(scanner.axial_motion_um * np.exp(rng.normal(0, 0.3)), 10, 60)
    return amount * motion / max(float(motion.std()), 1e-6)


def _lateral_motion(rng: np.random.Generator, scanner: Scanner, frames: int) -> np.ndarray:
    jumps = np.zeros((frames, 2))
    for _ in range(rng.poisson(scanner.saccades)):
        jumps[rng.integers(0, frames) :] += rng.normal(0, 0.09, 2)
    return jumps - jumps.mean(axis=0) + rng.normal(0, 0.008, (frames, 2))
