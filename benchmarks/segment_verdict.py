"""What the verdict of `octfm segment` catches on phantoms, and what it refuses in vain.

python benchmarks/segment_verdict.py                              # seeds 0 to 99, on which thresholds were chosen
python benchmarks/segment_verdict.py --first 200 --count 60       # seeds for reports
python benchmarks/segment_verdict.py --invariances --data FOLDER  # the same eyes shown differently
python benchmarks/segment_verdict.py --wide --bscans 25            # Topcon's fields of 12 × 9 mm, as drawn

Every seed is a phantom volume, as it is and in one of the accidents or alterations. A value of an ETDRS zone is wrong
if it differs from the truth by more than 20 µm or stands where the image shows too little retina. After new weights:
run on seeds 0 to 99 with --save FILE, read the quantiles of the measures, change the constants of
src/octfm/layers/verdict.py, and run with --again FILE, which applies them to the measures of that run in a second.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, fields, replace
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import numpy as np

from octfm.errors import EvaluationError
from octfm.layers.edges import onto_edges
from octfm.layers.finder import LayerFinder, load_finder
from octfm.layers.ranges import Ranges, packaged_ranges
from octfm.layers.segment import ScanSegmentation, segment
from octfm.layers.verdict import ZONE_UM, Measures, decide
from octfm.layers.zones import unsteady
from octfm.phantom.native.bscans import SURFACES, Labelled, Placement, sample_placement
from octfm.phantom.native.stream import Stream
from octfm.phantom.scanner import SCANNERS, Scanner
from octfm.volume.etdrs import EtdrsGrid, field_of, field_of_volume, measure_around
from octfm.volume.volume import Volume
from octfm.weights.packaged import CURRENT

WRONG_UM = 20.0
LEAST_TRUE = 0.5
"""Share of a zone in which the truth must be known to compare with."""
ACCIDENTS = ("clipped", "wrapped", "blink", "upside_down")
ALTERATIONS = ("axial x2", "axial /2", "lateral x2", "lateral /2", "gamma 0.5", "gamma 2", "dark", "very dark")


UNDISTURBED = ("as drawn", "gamma 0.5", "gamma 2", "dark")
"""Volumes that should not be refused."""
EVERY = 6
"""Of the real volume's B-scans, which lie 30 µm apart."""
INVARIANT_UM = 2.0
"""Most by which the central thickness may change in an eye that is shown differently."""


class Zone(NamedTuple):
    found_um: float
    true_um: float
    """NaN where the image does not show enough of it."""
    expected_um: float
    """Mean error that the network expects; infinite if the zone is blank for another reason."""
    fluid_um: float = 0.0
    """Mean height of intraretinal fluid that was found."""

    @property
    def wrong(self) -> bool:
        return not abs(self.found_um - self.true_um) <= WRONG_UM


class Case(NamedTuple):
    seed: int
    kind: str
    measures: Measures
    zones: dict[str, Zone]

    def refused(self, zone: Zone) -> bool:
        """Whether the zone is withheld or the whole scan refused."""
        return zone.expected_um > ZONE_UM or not decide(self.measures).accepted


def wide_scanners() -> dict[str, Scanner]:
    """Topcon's instruments with their wide fields."""
    return {
        name: replace(SCANNERS[name], field_mm=(9.0, SCANNERS[name].field_mm[1], 12.0))
        for name in ("topcon_triton", "topcon_maestro2")
    }


def drawn_wide(seed: int, bscans: int) -> Labelled:
    """The volume of a seed without accident, in a field of 12 × 9 mm."""
    scanners = wide_scanners()
    name = list(scanners)[seed % len(scanners)]

    def unspoilt(rng: np.random.Generator) -> Placement:
        return replace(sample_placement(rng), accident="none")

    stream = "octfm.phantom.native.stream"
    with patch(f"{stream}.sample_placement", unspoilt), patch(f"{stream}.SCANNERS", SCANNERS | scanners):
        # 512 A-scans
        return Stream(seed, bscans, randomised=0.0, ascan_um=(23.4, 23.5), scanners=(name,), row_um=2.6)(0)


def drawn(seed: int, accident: str, bscans: int) -> Labelled:
    """The volume of a seed, with this accident whatever was drawn for it."""

    def placement(rng: np.random.Generator):
        own = sample_placement(rng)
        outside = -abs(own.outside) if accident == "wrapped" else own.outside * (-1) ** seed
        return replace(own, accident=accident, outside=outside)

    with patch("octfm.phantom.native.stream.sample_placement", placement):
        return Stream(seed, bscans=bscans, randomised=0.1, ascan_um=(13.0, 19.0))(0)


def altered(image: Labelled, kind: str) -> Volume:
    """The image as drawn, darkened, with another gamma, or with wrong millimetres."""
    name, _, factor = kind.partition(" ")
    dz, dy, dx = image.spacing_mm
    times = {"x2": 2.0, "/2": 0.5}.get(factor, 1.0)
    spacing = (dz, dy * times if name == "axial" else dy, dx * times if name == "lateral" else dx)
    voxels = image.voxels
    if name == "gamma":
        voxels = np.rint(255 * (voxels / 255) ** float(factor)).astype(np.uint8)
    elif "dark" in name or "dark" in factor:
        voxels = (voxels * (0.02 if name == "very" else 0.1)).astype(np.uint8)
    return Volume(voxels, spacing, laterality="R", superior_first=True, source=kind)


def zones_of(found: ScanSegmentation, image: Labelled) -> dict[str, Zone]:
    """Zones that were given a value, and, as withheld, those that all lines of the network would have given one."""
    rows = onto_edges(found.volume.voxels, found.found.rows, found.spacing_mm)
    drawn = replace(found, surfaces=dict(zip(found.surfaces, rows, strict=True)))
    every = _zones(drawn, drawn.etdrs(keep_doubtful=True), image)
    # What is not blank for its expected error is for another reason.
    held = {n: z if z.expected_um > ZONE_UM else z._replace(expected_um=float("inf")) for n, z in every.items()}
    try:
        return held | _zones(found, found.etdrs(), image)
    except EvaluationError:  # a scan of the optic disc
        return {name: zone._replace(expected_um=float("inf")) for name, zone in held.items()}


def _zones(found: ScanSegmentation, grid: EtdrsGrid, image: Labelled) -> dict[str, Zone]:
    """Zones of a grid, with the true mean of the place on the retina where it was centred."""
    top, bottom = (image.surfaces[SURFACES.index(name)] for name in ("ilm", "bm"))
    truth = (bottom - top) * 1000 * image.spacing_mm[1]
    depth, width = truth.shape
    place = field_of((depth, width), image.spacing_mm, True)
    scale = image.spacing_mm[2] / found.spacing_mm[2]
    centre = grid.centre_mm[0] * scale, grid.centre_mm[1]
    total, share = (
        measure_around(centre, values, place, "R").mean_um
        for values in (np.nan_to_num(truth), np.isfinite(truth).astype(float))
    )
    maps, own, zones = (found.expected_error_um(), found.fluid_um()), field_of_volume(found.volume), {}
    expected, fluid = (measure_around(grid.centre_mm, values, own, "R").mean_um for values in maps)
    for name, mean in grid.mean_um.items():
        if mean is not None:
            known = share[name] or 0.0
            true = (total[name] or 0.0) / known if known >= LEAST_TRUE else np.nan
            zones[name] = Zone(mean, true, expected[name] or 0.0, fluid[name] or 0.0)
    return zones


def case(seed: int, kind: str, image: Labelled, finder: LayerFinder) -> Case:
    found = segment(altered(image, kind), finder=finder)
    assert found.verdict.measures is not None
    return Case(seed, kind, found.verdict.measures, zones_of(found, image))


def cases_of(seed: int, bscans: int, finder: LayerFinder) -> list[Case]:
    """The volume as it is, with one of the ALTERATIONS, and, for every other seed, with one of the ACCIDENTS."""
    image = drawn(seed, "none", bscans)
    found = [case(seed, kind, image, finder) for kind in ("as drawn", ALTERATIONS[seed % len(ALTERATIONS)])]
    if seed % 2 == 0:
        accident = ACCIDENTS[seed // 2 % len(ACCIDENTS)]
        found.append(case(seed, accident, drawn(seed, accident, bscans), finder))
    return found


def loaded(record: list) -> Case:
    """A case from a file of --save."""
    seed, kind, measures, zones = record
    return Case(seed, kind, Measures(**measures), {name: Zone(*zone) for name, zone in zones.items()})


def report(cases: list[Case], ranges: Ranges | None) -> None:
    """Zone values wrong and right, and the share of each that the verdict refuses, by kind of volume; and how far those
    of undisturbed volumes that are given are off."""
    print(f"{'volumes':<16} {'n':>4} {'refused':>8} {'wrong':>6} {'refused':>8} {'right':>6} {'refused':>8}  reasons")
    undisturbed = [c for c in cases if c.kind == "as drawn"]
    for kind in ("as drawn", *ACCIDENTS, *ALTERATIONS):
        row(kind, [c for c in cases if c.kind == kind])
    row("all", cases)
    plain = [c for c in cases if c.kind in UNDISTURBED]
    row("undisturbed", plain)
    print(given(plain, ranges))
    print()
    candidates(cases, plain)
    print()
    good = [c for c in undisturbed if not any(zone.wrong for zone in c.zones.values())]
    bad = [c for c in cases if any(zone.wrong for zone in c.zones.values())]
    print(f"{'measure':<14} {f'{len(good)} undisturbed volumes, every zone right':<52} {len(bad)} with a wrong zone")
    print(
        f"{'':<14} {'least':>9} {'5 %':>9} {'median':>9} {'95 %':>9} {'most':>9} {'5 %':>12} {'median':>9} {'95 %':>9}"
    )
    for item in fields(Measures):
        values = [[float(getattr(c.measures, item.name)) for c in part] for part in (good, bad)]
        if values[0] and values[1]:
            cells = [*np.quantile(values[0], (0, 0.05, 0.5, 0.95, 1)), *np.quantile(values[1], (0.05, 0.5, 0.95))]
            print(f"{item.name:<14} " + " ".join(f"{v:{12 if i == 5 else 9}.3g}" for i, v in enumerate(cells)))


def given(cases: list[Case], ranges: Ranges | None) -> str:
    """Errors of the zones that are neither withheld nor refused, and the share whose truth lies in their range."""
    zones = [z for c in cases for z in c.zones.values() if not c.refused(z) and np.isfinite(z.true_um)]
    if not zones:
        return "no zone is given"
    off = np.abs([z.found_um - z.true_um for z in zones])
    line = f"{len(zones)} zones given: {off.mean():.1f} µm off on average, 95th percentile {np.quantile(off, 0.95):.1f}"
    if ranges is None:  # a network that is not packaged
        return line
    ends = [(ranges.of(z.found_um, z.expected_um, z.fluid_um), z.true_um) for z in zones]
    return f"{line}, {100 * np.mean([low <= true <= high for (low, high), true in ends]):.0f} % within their range"


def candidates(*groups: list[Case]) -> None:
    """What other values of ZONE_UM would refuse, of all volumes and of those that are undisturbed."""
    print("ZONE_UM   all: wrong    right   undisturbed: wrong    right   refused, %")
    for bar in (4, 6, 8, 10, 12, 15, 20, 30, np.inf):
        cells = []
        for cases in groups:
            refused = [not decide(c.measures).accepted for c in cases]
            zones = [
                (z.wrong, z.expected_um > bar or all_of_it)
                for c, all_of_it in zip(cases, refused, strict=True)
                for z in c.zones.values()
            ]
            for kind in (True, False):
                here = [hit for off, hit in zones if off is kind]
                cells.append(100 * np.mean(here) if here else np.nan)
        print(f"{bar:>7} {cells[0]:>12.0f} {cells[1]:>8.0f} {cells[2]:>20.0f} {cells[3]:>8.0f}")


def row(name: str, cases: list[Case]) -> None:
    zones = [(zone.wrong, c.refused(zone)) for c in cases for zone in c.zones.values()]
    refused = sum(not decide(c.measures).accepted for c in cases)
    cells = []
    for kind in (True, False):
        here = [hit for off, hit in zones if off is kind]
        cells += [f"{len(here):>6}", f"{100 * sum(here) / len(here):>6.0f} %" if here else f"{'':>8}"]
    reasons = Counter(code for c in cases for code in decide(c.measures).codes)
    share = f"{100 * refused / len(cases):>6.0f} %" if cases else f"{'':>8}"
    print(f"{name:<16} {len(cases):>4} {share} {' '.join(cells)}  {', '.join(f'{k} {n}' for k, n in reasons.items())}")


def shown_differently(volume: Volume) -> dict[str, Volume]:
    """The same eye mirrored, with another gamma, shifted, tilted, and its odd and even B-scans."""
    voxels, (dz, dy, dx) = volume.voxels, volume.spacing_mm
    _, height, width = voxels.shape
    slope = np.rint(np.tan(np.radians(3)) * dx / dy * (np.arange(width) - width / 2)).astype(int)
    rows = np.clip(np.arange(height)[:, None] - slope, 0, height - 1)
    found = {
        "mirrored": voxels[:, :, ::-1],
        "gamma 0.8": np.rint(255 * (voxels / 255) ** 0.8).astype(np.uint8),
        "gamma 1.25": np.rint(255 * (voxels / 255) ** 1.25).astype(np.uint8),
        "20 rows down": voxels[:, np.clip(np.arange(height) - 20, 0, None)],
        "20 rows up": voxels[:, np.clip(np.arange(height) + 20, None, height - 1)],
        "tilted by 3°": np.take_along_axis(voxels, rows[None], axis=1),
    }
    shown = {name: replace(volume, voxels=np.ascontiguousarray(array)) for name, array in found.items()}
    # Every other B-scan; the middle of the field moves by half a B-scan, which the pit makes up for.
    return shown | {
        name: replace(volume, voxels=voxels[first::2], spacing_mm=(2 * dz, dy, dx))
        for first, name in enumerate(("even B-scans", "odd B-scans"))
    }


def central(volume: Volume, finder: LayerFinder) -> tuple[float | None, bool]:
    """Central thickness in µm, and whether it is refused, withheld, or named as one that may change."""
    found = segment(volume, finder=finder)
    value = found.etdrs(keep_doubtful=True).mean_um["centre"]
    try:
        grid = found.etdrs()
    except EvaluationError:  # the disc lies in its centre
        return value, True
    doubtful = grid.mean_um["centre"] is None or any("centre by" in note for note in unsteady(grid))
    return value, doubtful or not found.verdict.accepted


def invariances(volumes: Iterable[Volume], finder: LayerFinder) -> None:
    """Change of the central thickness in µm; R where either value is refused, ! where neither is and they differ."""
    print(f"{'central thickness':<20} {'as it is':>9}  change in µm")
    changes: dict[str, list[tuple[float, bool]]] = {}
    for volume in volumes:
        own, refused = central(volume, finder)
        if own is None:
            print(f"{volume.source:<20} no value")
            continue
        cells = []
        for name, other in shown_differently(volume).items():
            value, withheld = central(other, finder)
            change, flagged = abs(value - own) if value is not None else np.inf, withheld or refused
            changes.setdefault(name, []).append((change, flagged))
            mark = "R" if flagged else "" if change <= INVARIANT_UM else "!"
            cells.append(f"{name} {change:.1f}{mark}")
        print(f"{volume.source:<20} {own:7.1f} {'R' if refused else ' '}  {', '.join(cells)}", flush=True)
    print(f"\n{'shown differently':<17} {'n':>4} {'holds':>6} {'differs, flagged':>17} {'not':>4}  not flagged")
    for name, pairs in (changes | {"all": [pair for each in changes.values() for pair in each]}).items():
        holds = sum(change <= INVARIANT_UM for change, _ in pairs)
        missed = sum(change > INVARIANT_UM and not flagged for change, flagged in pairs)
        given = [change for change, flagged in pairs if not flagged]
        spread = f"median {np.median(given):.1f}, most {max(given):.1f} µm of {len(given)}" if given else "-"
        print(f"{name:<17} {len(pairs):>4} {holds:>6} {len(pairs) - holds - missed:>17} {missed:>4}  {spread}")


def real_eyes(folder: Path) -> Iterator[Volume]:
    """The volume of an eye with AMD, and five eyes with diabetic oedema, of which 1.3 mm were scanned."""
    with np.load(folder / "medvisbonn_amd_spectralis_145.npz") as file:
        yield Volume(file["volume"][::EVERY], (0.030 * EVERY, 0.003872, 0.011182), source="AMD volume")
    with np.load(folder / "chiu2015_dme_subjects1to5.npz") as file:
        for i, bscans in enumerate(np.split(file["bscans"], 5), 1):
            yield Volume(bscans, (0.123, 0.00387, 0.0114), source=f"diabetic oedema {i}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, help="seeds; default 100, of --invariances 5")
    parser.add_argument("--bscans", type=int, default=7, help="--invariances takes twice as many")
    parser.add_argument("--model", default=CURRENT)
    parser.add_argument("--save", type=Path, help="keep the measures in this file, after every seed")
    parser.add_argument("--again", type=Path, nargs="+", help="files of --save: the table under today's thresholds")
    parser.add_argument("--wide", action="store_true", help="volumes of 12 × 9 mm, as drawn only")
    parser.add_argument("--invariances", action="store_true", help="central thickness of eyes shown differently")
    parser.add_argument("--data", type=Path, help="folder of real scans, as OCTFM_REAL_DATA, for --invariances")
    arguments = parser.parse_args()
    if arguments.invariances:
        seeds = range(arguments.first, arguments.first + (arguments.count or 5))
        eyes = ((seed, drawn(seed, "none", 2 * arguments.bscans)) for seed in seeds)
        phantoms = (Volume(eye.voxels, eye.spacing_mm, source=f"phantom {seed}") for seed, eye in eyes)
        real = real_eyes(arguments.data) if arguments.data else ()
        invariances(chain(phantoms, real), load_finder(arguments.model))
        return
    cases: list[Case] = []
    finder = load_finder(arguments.model)
    if arguments.again:
        cases = [loaded(record) for path in arguments.again for record in json.loads(path.read_text())]
    else:
        for seed in range(arguments.first, arguments.first + (arguments.count or 100)):
            if arguments.wide:
                cases.append(case(seed, "as drawn", drawn_wide(seed, arguments.bscans), finder))
            else:
                cases += cases_of(seed, arguments.bscans, finder)
            if arguments.save:
                arguments.save.write_text(json.dumps([c._replace(measures=asdict(c.measures)) for c in cases]))
    report(cases, packaged_ranges(finder.name, finder.digest))


if __name__ == "__main__":
    main()
