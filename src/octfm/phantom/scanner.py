"""OCT instruments (geometry, optics, display), and what varies between scans (fixation, motion, signal, contrast)."""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from octfm.phantom.anatomy import Waves, waves
from octfm.volume.volume import Shape3, Spacing3

Compression = Literal["none", "rle", "jpeg_ls"]
"""Transfer syntax of the pixel data: uncompressed, RLE Lossless or JPEG-LS Lossless. Encoding JPEG 2000 would take
longer than rendering the image."""


@dataclass(frozen=True)
class Scanner:
    """One OCT instrument."""

    name: str
    manufacturer: str
    model: str
    protocol: str
    field_mm: Spacing3
    """Extent (across B-scans, axial, lateral)."""
    vendor_size: Shape3
    """B-scans, rows, columns of the real instrument; phantoms are smaller by default."""
    superior_first: bool
    """B-scan 0 is the superior one."""
    frames_averaged: int
    """Effective number of independent frames averaged per B-scan."""
    axial_psf_um: float
    """Full width at half maximum in tissue, as `lateral_psf_um`."""
    lateral_psf_um: float
    noise_db: float
    """Detector noise relative to the RPE."""
    roll_off_db_per_mm: float
    """Loss of signal with depth in the frame."""
    choroid_decay_mm: float
    """Depth over which the signal below Bruch's membrane falls to 1/e: longer at 1,050 nm than at 840 nm."""
    black_db: float
    """Level that the display shows as 0."""
    range_db: float
    """Range of the display: `black_db` + `range_db` is shown as 255."""
    axial_motion_um: float
    """Standard deviation of the axial eye motion left in the volume."""
    saccades: float
    """Expected number of abrupt lateral jumps per volume; instruments with eye tracking repeat such B-scans."""
    gamma: float
    """Exponent of the display's curve between black and white: below 1 brightens dark tissue."""
    compression: Compression
    held_out: bool = False
    """Used only if requested by name: kept out of training, to test generalisation to an unseen device."""

    def spacing_mm(self, size: Shape3) -> Spacing3:
        """(dz, dy, dx) of a scan of the whole field with this many voxels."""
        z, y, x = (mm / n for mm, n in zip(self.field_mm, size, strict=True))
        return z, y, x

    def looks(self, size: Shape3) -> int:
        """Independent speckle grains averaged in one pixel: averaged frames times resolution cells per pixel."""
        _, dy, dx = self.spacing_mm(size)
        cells = max(1.0, 1000 * dy / self.axial_psf_um) * max(1.0, 1000 * dx / self.lateral_psf_um)
        return max(1, round(self.frames_averaged * cells))


# Geometry (frames, rows, columns, spacing) as in AI-READI, optics from the manufacturers' data sheets. Noise, display
# window and B-scan order of Maestro2 and Cirrus are guesses by eye.
SCANNERS = {
    # Eye tracking, averaged frames, inferior B-scan first, black background; 30 x 25 degrees reach the optic disc.
    "heidelberg_spectralis": Scanner(
        name="heidelberg_spectralis",
        manufacturer="Heidelberg Engineering",
        model="Spectralis",
        protocol="spectralis_ppol_mac_hr",
        field_mm=(7.3, 1.92, 8.8),
        vendor_size=(61, 496, 768),
        superior_first=False,
        frames_averaged=4,
        axial_psf_um=7.0,
        lateral_psf_um=14.0,
        noise_db=-25.0,
        roll_off_db_per_mm=2.0,
        choroid_decay_mm=0.085,
        black_db=-24.5,
        range_db=26.0,
        axial_motion_um=22.0,
        saccades=0.2,
        gamma=1.0,
        compression="none",
    ),
    # Swept source at 1,050 nm, one shot per A-scan, superior B-scan first, grey background, deep choroid.
    "topcon_triton": Scanner(
        name="topcon_triton",
        manufacturer="Topcon",
        model="Triton",
        protocol="triton_3d_radial",  # a raster in spite of its name
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
        gamma=1.0,
        compression="rle",
    ),
    # Spectral domain, one shot, no tracking: grainy, with a strong roll-off.
    "topcon_maestro2": Scanner(
        name="topcon_maestro2",
        manufacturer="Topcon",
        model="Maestro2",
        protocol="maestro2_3d_macula",
        field_mm=(6.0, 2.30, 6.0),
        vendor_size=(128, 885, 512),
        superior_first=True,
        frames_averaged=1,
        axial_psf_um=6.0,
        lateral_psf_um=20.0,
        noise_db=-23.0,
        roll_off_db_per_mm=3.0,
        choroid_decay_mm=0.09,
        black_db=-26.0,
        range_db=31.0,
        axial_motion_um=45.0,
        saccades=1.6,
        gamma=0.9,
        compression="jpeg_ls",
    ),
    # Spectral domain, one shot, fine axial resolution, contrast set high.
    "zeiss_cirrus": Scanner(
        name="zeiss_cirrus",
        manufacturer="Carl Zeiss Meditec",
        model="Cirrus HD-OCT 5000",
        protocol="macular_cube_512x128",
        field_mm=(6.0, 2.0, 6.0),
        vendor_size=(128, 1024, 512),
        superior_first=False,
        frames_averaged=1,
        axial_psf_um=5.0,
        lateral_psf_um=15.0,
        noise_db=-23.5,
        roll_off_db_per_mm=2.5,
        choroid_decay_mm=0.10,
        black_db=-24.5,
        range_db=27.0,
        axial_motion_um=34.0,
        saccades=0.7,
        gamma=1.0,
        compression="rle",
    ),
    # Not a real instrument: a fifth set of optics and geometry, for tests on a scanner not seen in training.
    "synthetic_held_out": Scanner(
        name="synthetic_held_out",
        manufacturer="Synthetic",
        model="Held-out",
        protocol="held_out_macula",
        field_mm=(6.4, 2.20, 6.4),
        vendor_size=(101, 700, 401),
        superior_first=True,
        frames_averaged=2,
        axial_psf_um=5.0,
        lateral_psf_um=17.0,
        noise_db=-26.0,
        roll_off_db_per_mm=1.3,
        choroid_decay_mm=0.11,
        black_db=-29.0,
        range_db=34.0,
        axial_motion_um=30.0,
        saccades=0.5,
        gamma=0.85,
        compression="none",
        held_out=True,
    ),
}
DEFAULT_SCANNERS = tuple(name for name, scanner in SCANNERS.items() if not scanner.held_out)
"""The scanners of a cohort unless others are named."""


@dataclass(frozen=True, eq=False)
class Acquisition:
    """What varies between scans with one instrument; none of it depends on the diagnosis."""

    fixation_mm: tuple[float, float]
    """Position (x, y) of the fovea relative to the centre of the scan."""
    torsion_rad: float
    """Rotation of the eye about the optical axis."""
    tilt: tuple[float, float]
    """Slope of the retina in the frame across columns and across B-scans, µm per mm."""
    position: float
    """Depth of the fovea in the frame, as a share of its height."""
    axial_motion_um: np.ndarray
    """[D] axial displacement of each B-scan."""
    lateral_motion_mm: np.ndarray
    """[D, 2] x and y displacement of each B-scan."""
    signal_db: np.ndarray
    """[D] signal strength of each B-scan."""
    vignetting: Waves
    """Pattern of signal loss across the field."""
    vignetting_db: float
    """Its strength."""
    black_db: float
    range_db: float
    noise_db: float
    defocus: float
    """Multiplier of the lateral point-spread function."""


def acquire(rng: np.random.Generator, scanner: Scanner, frames: int) -> Acquisition:
    """Draw one acquisition of `frames` B-scans."""
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
        # Brightness and contrast depend on operator and firmware; disease must not be readable from either.
        black_db=float(scanner.black_db + rng.normal(0, 1.5)),
        range_db=float(scanner.range_db * np.exp(rng.normal(0, 0.09))),
        noise_db=float(scanner.noise_db + rng.normal(0, 1.2)),
        defocus=float(1 + abs(rng.normal(0, 0.35))),
    )


def _axial_motion(rng: np.random.Generator, scanner: Scanner, frames: int) -> np.ndarray:
    """Axial displacement of each B-scan in µm, with a standard deviation of 10 to 60 µm.

    A slow oscillation (pulse, breathing), a random walk (head drift) and independent jumps of single B-scans.
    """
    t = np.arange(frames)
    slow = np.sin(2 * np.pi * (t / frames * rng.uniform(0.8, 4) + rng.random()))
    drift = np.cumsum(rng.normal(0, 1, frames))
    drift = (drift - drift.mean()) / max(float(drift.std()), 1e-6)
    motion = 0.5 * slow + 0.6 * drift + 0.35 * rng.normal(0, 1, frames)
    amount = np.clip(scanner.axial_motion_um * np.exp(rng.normal(0, 0.3)), 10, 60)
    return amount * motion / max(float(motion.std()), 1e-6)


def _lateral_motion(rng: np.random.Generator, scanner: Scanner, frames: int) -> np.ndarray:
    """Lateral displacement (x, y) of each B-scan in mm: saccades, which displace all later B-scans, and jitter."""
    jumps = np.zeros((frames, 2))
    for _ in range(rng.poisson(scanner.saccades)):
        jumps[rng.integers(0, frames) :] += rng.normal(0, 0.09, 2)
    return jumps - jumps.mean(axis=0) + rng.normal(0, 0.008, (frames, 2))
