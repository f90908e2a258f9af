"""Where the ETDRS grid of phantom eyes lies, and how far its zones are from the eye's own: the pit looked for in the
inner retina (ILM to the inner nuclear layer) and in the whole retina (ILM to BM).

    python benchmarks/etdrs.py [--seeds 12] [--severity 0.7]

Thickness maps are the true surfaces at the A-scans of a scan, with its fixation, torsion and eye motion. Distances are
from the position of the fovea in the scan; the mean error is that of the zones that were covered.
"""

import argparse
from collections.abc import Iterable

import numpy as np

from octfm.phantom import DIAGNOSES, SCANNERS
from octfm.phantom.anatomy import SURFACE
from octfm.phantom.eye import sample_eye, surfaces_um
from octfm.phantom.normative import SECTORS, sectors_um
from octfm.phantom.render import en_face_positions
from octfm.phantom.scanner import acquire
from octfm.volume.etdrs import field_of, measure_grid, sample

SIZES = {
    "heidelberg_spectralis": (49, 496, 256),
    "topcon_triton": (64, 992, 128),
    "zeiss_cirrus": (128, 1024, 128),
}
"""Scanner → (B-scans, rows, A-scans)."""


def table(diagnoses: Iterable[str], seeds: int, severity: float) -> list[str]:
    """Two lines per diagnosis, one for each map in which the pit is looked for."""
    lines = [
        "| diagnosis | pit looked for in | pits | distance, median, largest | error of zones, median, range of zones |",
        "|---|---|---|---|---|",
    ]
    for diagnosis in diagnoses:
        for name, lower in (("ILM to INL", "ipl_inl"), ("ILM to BM", "bm")):
            scans = [scan(diagnosis, severity, seed, scanner, lower) for seed in range(seeds) for scanner in SIZES]
            away = np.array([distance for distance, _ in scans if distance is not None])
            errors = np.nanmean(np.abs([error for _, error in scans]), axis=0)
            distances = f"{np.median(away):.2f}, {away.max():.2f} mm" if len(away) else ""
            lines.append(
                f"| {diagnosis} | {name} | {len(away)} of {len(scans)} | {distances} | "
                f"{np.median(errors):.1f}, {errors.min():.1f} to {errors.max():.1f} µm |"
            )
    return lines


def scan(diagnosis: str, severity: float, seed: int, scanner: str, lower: str) -> tuple[float | None, list[float]]:
    """mm from the fovea to the pit, None if no pit was found; and the error of each of SECTORS in µm, NaN if blank.

    `lower`: lower boundary of the map in which the pit is looked for.
    """
    eye = sample_eye((3, seed), "RL"[seed % 2], participant="p", age=65, diagnosis=diagnosis, severity=severity)
    instrument, size = SCANNERS[scanner], SIZES[scanner]
    x, y = en_face_positions(eye, instrument, acquire(np.random.default_rng(seed), instrument, size[0]), size)
    depth_um = surfaces_um(eye, x, y)
    retina_um, pit_um = (depth_um[SURFACE[name]] - depth_um[SURFACE["ilm"]] for name in ("bm", lower))
    field = field_of((size[0], size[2]), instrument.spacing_mm(size), instrument.superior_first)
    grid = measure_grid(retina_um, field, eye.laterality, pit_map_um=pit_um)
    truth = sectors_um(eye)["retina"]
    found = [np.nan if (um := grid.mean_um[zone]) is None else um for zone in SECTORS]
    if grid.centre != "pit":
        return None, list(found - truth)
    at = np.array(grid.centre_mm)[:, None]
    return float(np.hypot(sample(x, field, *at), sample(y, field, *at))[0]), list(found - truth)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--severity", type=float, default=0.7)
    arguments = parser.parse_args()
    print("\n".join(table(DIAGNOSES, arguments.seeds, arguments.severity)))
