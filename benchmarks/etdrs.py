"""Where the ETDRS grid of phantom eyes lies, and how far its zones are from the eye's own: the pit looked for in the
inner retina (ILM to the inner nuclear layer) and in the whole retina (ILM to BM).

    python benchmarks/etdrs.py [--seeds 12] [--severity 0.7]
    python benchmarks/etdrs.py --found 210 [--each 5]       # phantoms of version 4 as octfm segment finds them

Thickness maps are the true surfaces at the A-scans of a scan, with its fixation, torsion and eye motion. Distances are
from the position of the fovea in the scan; the mean error is that of the zones that were covered.

--found SEED: 25 B-scans of every condition of the stream, measured by the packaged network; how far the centre of the
grid lies from the true fovea, and how often the range of a zone holds its true mean around the true fovea.
"""

import argparse
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from octfm.layers.finder import load_finder
from octfm.layers.segment import segment
from octfm.phantom import DIAGNOSES, SCANNERS
from octfm.phantom.anatomy import SURFACE
from octfm.phantom.eye import sample_eye, surfaces_um
from octfm.phantom.native.bscans import SURFACES, render_native
from octfm.phantom.native.stream import CONDITIONS, Stream
from octfm.phantom.normative import sectors_um
from octfm.phantom.render import en_face_positions
from octfm.phantom.scanner import acquire
from octfm.volume.etdrs import ZONES, Field, field_of, field_of_volume, measure_around, measure_grid, sample
from octfm.volume.volume import Volume

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
    """mm from the fovea to the pit, None if no pit was found; and the error of each of ZONES in µm, NaN if blank.

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
    found = [np.nan if (um := grid.mean_um[zone]) is None else um for zone in ZONES]
    if grid.centre != "pit":
        return None, list(found - truth)
    at = np.array(grid.centre_mm)[:, None]
    return float(np.hypot(sample(x, field, *at), sample(y, field, *at))[0]), list(found - truth)


def found(seed: int, each: int) -> Iterator[str]:
    """What `--found` prints, a line per scan and then the summary."""
    finder, away, covered = load_finder(), [], {kind: [] for kind in ("centre", "inner", "outer")}
    for number, condition in enumerate(CONDITIONS):
        for k in range(each):
            stream = Stream(seed, 25, 0.05, conditions=(condition,), ascan_um=(13.0, 19.0))
            shot, size, rng = stream.shot(k + 100 * number)
            if abs(shot.acquisition.fixation_mm[0]) > 2:  # centred on the disc
                continue
            shot = replace(shot, placement=replace(shot.placement, accident="none"))
            image = render_native(shot, rng, size)
            side, superior = shot.eye.laterality, shot.scanner.superior_first
            volume = Volume(image.voxels, image.spacing_mm, laterality=side, superior_first=superior, source=condition)
            measured, place = segment(volume, finder=finder), field_of_volume(volume)
            fovea = fovea_of(place, *en_face_positions(shot.eye, shot.scanner, shot.acquisition, size))
            ilm, bm = (image.surfaces[SURFACES.index(name)] for name in ("ilm", "bm"))
            true = measure_around(fovea, 1000 * image.spacing_mm[1] * (bm - ilm), place, side).mean_um
            grid = measured.etdrs(keep_doubtful=True)
            away.append(float(np.hypot(*np.subtract(grid.centre_mm, fovea))))
            ranges = measured.zone_ranges() if measured.verdict.accepted else {}
            for zone, (low, high) in ranges.items():
                if (um := true[zone]) is not None:
                    covered[zone.split()[0]].append((low <= um <= high, high - low))
            yield f"{condition} {k}: {grid.centre}, {away[-1]:.2f} mm away"
    middle, most, whole = np.quantile(away, (0.5, 0.9, 1))
    yield f"{len(away)} scans: median {middle:.3f}, 90 % within {most:.2f}, largest {whole:.2f} mm"
    for kind, own in covered.items():
        share, width = np.mean(own, axis=0)
        yield f"{kind}: {len(own)} zones given, {share:.1%} within their range, {width:.1f} µm wide"


def fovea_of(place: Field, x_mm: np.ndarray, y_mm: np.ndarray) -> tuple[float, float]:
    """Where (0, 0) of the eye lies in the field, from the [D, W] positions of A-scans in the eye."""
    near = np.hypot(x_mm, y_mm) < 1.2
    known = np.stack([x_mm[near], y_mm[near], np.ones(near.sum())], axis=1)
    at = np.stack(np.nonzero(near), axis=1).astype(float)
    bscan, ascan = np.linalg.lstsq(known, at, rcond=None)[0][2]
    step = place.bscans_mm[1] - place.bscans_mm[0]
    x, y = place.origin + place.along * ascan * place.ascan_mm + place.across * bscan * step
    return float(x), float(y)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12)
    parser.add_argument("--severity", type=float, default=0.7)
    parser.add_argument("--found", type=int, metavar="SEED", help="of phantoms that the packaged network measures")
    parser.add_argument("--each", type=int, default=5, help="scans of every condition, for --found")
    arguments = parser.parse_args()
    if arguments.found is not None:
        for line in found(arguments.found, arguments.each):
            print(line, flush=True)
        raise SystemExit
    print("\n".join(table(DIAGNOSES, arguments.seeds, arguments.severity)))
