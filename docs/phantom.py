"""Makes the figure and the tables of docs/phantom.md.

`python docs/phantom.py` writes docs/phantom.webp and prints the tables. `python docs/phantom.py --real FOLDER OUT.png`
writes, for your eyes only, phantom B-scans beside real ones: real pixels are never committed. FOLDER is that of
docs/results.md with macular_hole_49.npz as well (`volume`, uint8 [B-scans, rows, A-scans]).
"""

import io
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from PIL import Image

from octfm.phantom import DIAGNOSES, SCANNERS, phantom_volume, sample_eye
from octfm.phantom.normative import PUBLISHED_UM, sectors_um
from octfm.phantom.optics import speckle
from octfm.phantom.render import FWHM
from octfm.volume.etdrs import ZONES

SHOWN_MM = (1.25, 5.6)
"""Height and width of what the figure shows of each B-scan."""
SEEDS = {
    "healthy": 4,
    "drusen": 30,
    "geographic_atrophy": 8,
    "dme": 21,
    "epiretinal_membrane": 6,
    "macular_hole": 5,
    "glaucoma": 4,
}


def b_scan(scanner: str, diagnosis: str, severity: float = 0.75) -> np.ndarray:
    """The B-scan nearest the fovea, cut to SHOWN_MM around the retina; glaucoma 1.2 mm inferior of it, where the arcs
    run."""
    volume, truth = phantom_volume(
        SEEDS[diagnosis], diagnosis=diagnosis, severity=severity, scanner=scanner, size=(33, 384, 320), age=66
    )
    dz, dy, dx = volume.spacing_mm
    inferior = -1 if not volume.superior_first else 1
    d = 16 + (round(1.2 / dz) * inferior if diagnosis == "glaucoma" else 0)
    half = round(SHOWN_MM[1] / dx / 2)
    w = slice(max(160 - half, 0), 160 + half)
    rows = round(SHOWN_MM[0] / dy)
    top = round(float(truth.surface("ilm")[d, w].min()) - 0.22 / dy)
    top = min(max(top, 0), volume.shape[1] - rows)
    return volume.voxels[d, top : top + rows, w]


def figure(out: Path) -> None:
    """Diagnoses down, scanners across, as WebP, which keeps speckle small."""
    panel = Figure(figsize=(11, 8.4), dpi=80)
    grid = panel.subplots(len(DIAGNOSES), len(SCANNERS))
    for row, diagnosis in zip(grid, DIAGNOSES, strict=True):
        for axes, scanner in zip(row, SCANNERS, strict=True):
            axes.imshow(
                b_scan(scanner, diagnosis), cmap="gray", vmin=0, vmax=255, aspect="auto", interpolation="antialiased"
            )
            axes.set_xticks([])
            axes.set_yticks([])
        row[0].set_ylabel(diagnosis.replace("_", "\n"), fontsize=9)
    for axes, scanner in zip(grid[0], SCANNERS, strict=True):
        axes.set_title(scanner.replace("_", " "), fontsize=9)
    panel.subplots_adjust(left=0.07, right=0.995, bottom=0.005, top=0.965, wspace=0.02, hspace=0.02)
    drawn = io.BytesIO()
    panel.savefig(drawn)
    Image.open(drawn).convert("L").save(out, quality=65, method=6)


def thickness_table(eyes: int = 100) -> str:
    found = [
        sectors_um(sample_eye((seed, 0), "R", participant="x", age=50, diagnosis="healthy", severity=0))
        for seed in range(eyes)
    ]
    lines = ["| phantom / published, µm | " + " | ".join(ZONES) + " |", "|" + "---|" * (len(ZONES) + 1)]
    for name, (published, _) in PUBLISHED_UM.items():
        mean = np.mean([sectors[name] for sectors in found], axis=0)
        lines.append(
            f"| {name} | " + " | ".join(f"{a:.0f} / {b:.0f}" for a, b in zip(mean, published, strict=True)) + " |"
        )
    return "\n".join(lines)


def speckle_table() -> str:
    """At each instrument's own sampling, five B-scans."""
    lines = [
        "| scanner | looks | contrast: theory | measured | axial width, µm: theory | measured | lateral width, µm: theory | measured |",
        "|" + "---|" * 8,
    ]
    for scanner in SCANNERS.values():
        looks = scanner.looks(scanner.vendor_size)
        pixel = [1000 * mm for mm in scanner.spacing_mm(scanner.vendor_size)[1:]]
        psf = (scanner.axial_psf_um, scanner.lateral_psf_um)
        axial, lateral = (2**0.5 * um / FWHM / step for um, step in zip(psf, pixel, strict=True))
        field = speckle(np.random.default_rng(0), (5, *scanner.vendor_size[1:]), (axial, lateral), looks)
        contrast = field.std() / field.mean()
        widths = [
            f"{2**0.5 * um:.1f} | {_width(field - field.mean(), axis) * step:.1f}"
            for axis, um, step in zip((1, 2), psf, pixel, strict=True)
        ]
        lines.append(f"| {scanner.name} | {looks} | {looks**-0.5:.3f} | {contrast:.3f} | {widths[0]} | {widths[1]} |")
    return "\n".join(lines)


def _width(field: np.ndarray, axis: int) -> float:
    """Full width at half maximum, in pixels, of the autocovariance along one axis."""
    size = field.shape[axis]
    lags = np.arange(12)
    ratio = (
        np.array([(np.take(field, range(size - k), axis) * np.take(field, range(k, size), axis)).mean() for k in lags])
        / field.var()
    )
    below = int(np.argmax(ratio < 0.5))
    return 2 * float(np.interp(0.5, ratio[[below, below - 1]], [below, below - 1]))


def beside_real(folder: Path, out: Path) -> None:
    """A real eye with drusen and a real hole, each beside the phantom of the same disease on the same instrument."""
    with np.load(folder / "medvisbonn_amd_spectralis_145.npz") as amd, np.load(folder / "macular_hole_49.npz") as hole:
        real = {"drusen": amd["volume"][72, 120:440], "macular_hole": hole["volume"][24]}
    panel = Figure(figsize=(12, 8), layout="constrained")
    for row, (diagnosis, image) in zip(panel.subplots(2, 2), real.items(), strict=True):
        row[0].imshow(image, cmap="gray", vmin=0, vmax=255, aspect="auto")
        row[1].imshow(b_scan("heidelberg_spectralis", diagnosis, 0.6), cmap="gray", vmin=0, vmax=255, aspect="auto")
        row[0].set_title(f"real, {diagnosis}")
        row[1].set_title(f"phantom, {diagnosis}")
    panel.savefig(out)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--real"]:
        beside_real(Path(sys.argv[2]), Path(sys.argv[3]))
    else:
        figure(Path(__file__).with_suffix(".webp"))
        print(thickness_table(), speckle_table(), sep="\n\n")
