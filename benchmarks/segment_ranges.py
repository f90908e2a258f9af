"""Calibrate the ranges of ETDRS zones on phantom participants, and measure how often they hold.

python benchmarks/segment_ranges.py --save people.jsonl            # 1,100 participants, resumable, hours
python benchmarks/segment_ranges.py --save a.jsonl --part 0/2     # every other one, for a second process
python benchmarks/segment_ranges.py --unseen --save unseen.jsonl  # the scanner that no training has seen
python benchmarks/segment_ranges.py --fit people.jsonl --test unseen.jsonl [--write]
python benchmarks/segment_ranges.py --seed 320 --count 200 --save new.jsonl --check new.jsonl

A participant is one phantom volume of 13 B-scans; diseases and scanners are equally frequent. The verdict and the
threshold above which zones are withheld are frozen first (octfm.layers.verdict). A zone is compared twice: with the
true lines of the same A-scans, on which ranges are calibrated, and, by --check, with the eye's own zone, around its
true fovea and without gaps between B-scans. Quantile
regression gives the shape of the range, conformal prediction one factor; coverage is measured on participants of folds,
and of diseases, that have given neither. --write stores the ranges with the packaged network.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from sklearn.linear_model import QuantileRegressor

import octfm.weights
import segment_verdict
from octfm.errors import EvaluationError
from octfm.layers.finder import LayerFinder, load_finder
from octfm.layers.ranges import LEVEL, SWOLLEN_UM, WET_UM, Ranges, conformal_quantile, packaged_ranges
from octfm.layers.segment import segment
from octfm.layers.verdict import ZONE_UM, Measures, decide
from octfm.phantom.anatomy import LAYER
from octfm.phantom.native.bscans import Shot, layers_of
from octfm.phantom.native.stream import CONDITIONS, Stream
from octfm.phantom.scanner import DEFAULT_SCANNERS, SCANNERS
from octfm.volume.etdrs import RINGS_MM, zones_at
from octfm.weights.packaged import CURRENT

SEED, BSCANS, FOLDS = 1000, 13, 5
UNSEEN = tuple(name for name in SCANNERS if name not in DEFAULT_SCANNERS)
Person = dict


def person(place: int, scanners: tuple[str, ...], finder: LayerFinder, seed: int = SEED) -> Person:
    """One participant: what was found, expected and true in every zone, and what the verdict depends on."""
    condition = CONDITIONS[place % len(CONDITIONS)]
    scanner = scanners[place // len(CONDITIONS) % len(scanners)]
    looks = 0.1 if scanners == DEFAULT_SCANNERS else 0.0  # a randomised look may borrow any scanner
    stream = Stream(seed, BSCANS, looks, conditions=(condition,), scanners=(scanner,))
    image = stream(place)
    found = segment(segment_verdict.altered(image, "as drawn"), finder=finder)
    assert found.verdict.measures is not None
    try:
        ranges = found.zone_ranges()
    except EvaluationError:  # a scan of the optic disc
        ranges = {}
    return {
        "place": place,
        "condition": condition,
        "scanner": scanner,
        "accident": image.accident,
        "measures": asdict(found.verdict.measures),
        "zones": {name: list(zone) for name, zone in segment_verdict.zones_of(found, image).items()},
        "sparse": found.etdrs(keep_doubtful=True).too_sparse,
        "given": {name: list(ends) for name, ends in ranges.items()} if found.verdict.accepted else {},
        "eye": zones_of_eye(stream.shot(place)[0]),
    }


def zones_of_eye(shot: Shot) -> dict[str, float]:
    """Zone → true mean around the fovea, in the directions of the scan taken for that of a right eye whose first
    B-scan is superior; empty if the scan is centred on the optic disc."""
    acquisition, eye = shot.acquisition, shot.eye
    if abs(acquisition.fixation_mm[0]) > 2:
        return {}
    cell_mm, rim_mm = 0.05, RINGS_MM[-1]
    axis = np.arange(-rim_mm + cell_mm / 2, rim_mm, cell_mm)
    right, up = np.meshgrid(axis, axis)
    c, s = np.cos(acquisition.torsion_rad), np.sin(acquisition.torsion_rad)
    x, y = (c * right - s * up) * (1 if eye.laterality == "R" else -1), s * right + c * up
    retina_um = layers_of(shot, x, y, cell_mm)[0][: LAYER["choroid"]].sum(axis=0)
    later = -up if shot.scanner.superior_first else up
    return {name: float(retina_um[inside].mean()) for name, inside in zones_at(right, later, "R", True).items()}


def accepted(people: Iterable[Person]) -> list[Person]:
    """Those whom the verdict accepts, with the zones that are given and whose truth is known."""
    found = []
    for one in people:
        zones = {n: z for n, z in one["zones"].items() if z[2] <= ZONE_UM and np.isfinite(z[1])}
        if zones and decide(Measures(**one["measures"])).accepted:
            found.append(one | {"zones": zones})
    return found


def shape_of(people: list[Person]) -> Ranges:
    """Planes through the quantiles of the error over expected error and swelling, 90 % between them."""
    zones = np.array([zone for one in people for zone in one["zones"].values()])
    off, swollen = zones[:, 0] - zones[:, 1], np.maximum(0, zones[:, 0] - SWOLLEN_UM) * (zones[:, 3] < WET_UM)
    known = np.stack([zones[:, 2], swollen], axis=1)
    tail = (1 - LEVEL) / 2
    planes = []
    for quantile, sign in ((1 - tail, 1), (tail, -1)):
        fit = QuantileRegressor(quantile=quantile, alpha=0.0).fit(known, off)
        planes.append((max(1.0, sign * float(fit.intercept_)), *(max(0.0, sign * float(c)) for c in fit.coef_)))
    return Ranges(planes[0], planes[1], 0)


def scores_of(one: Person, shape: Ranges) -> list[float]:
    """Distance of the truth from the mean found in units of the range on that side."""
    scores = []
    for found, true, *known in one["zones"].values():
        low, high = shape.of(found, *known)
        scores.append((found - true) / (found - low) if true < found else (true - found) / (high - found))
    return scores


def scaled(shape: Ranges, factor: float, participants: int) -> Ranges:
    below, above = ((factor * a, factor * b, factor * c) for a, b, c in (shape.below, shape.above))
    return Ranges(below, above, participants)


def calibrated(people: list[Person]) -> Ranges:
    """Ranges of the right shape that cover these participants and, as far as they are exchangeable, a new one."""
    shape = shape_of(people)
    return scaled(shape, conformal_quantile([scores_of(one, shape) for one in people]), len(people))


def covered(one: Person, ranges: Ranges) -> float:
    """Share of a participant's zones whose truth lies within the range."""
    return float(np.mean([score <= 1 for score in scores_of(one, ranges)]))


def held_out(people: list[Person], group: Callable[[Person], object]) -> list[float]:
    """Coverage of every participant by ranges calibrated on all who are in other groups."""
    ranges = {own: calibrated([p for p in people if group(p) != own]) for own in {group(p) for p in people}}
    return [covered(one, ranges[group(one)]) for one in people]


def report(rest: list[Person], unseen: list[Person]) -> Ranges:
    people = accepted(rest)
    ranges = calibrated(people)
    low, high = ranges.of(0.0, 5.0, 0.0)
    print(f"{len(people)} of {len(rest)} participants accepted; {ranges}")
    print(f"where the network expects an error of 5 µm: {low:.1f} to +{high:.1f} µm")
    given, possible = (sum(len(one["zones"]) for one in part) for part in (people, rest))
    print(f"zones given: {given} of {possible} ({100 * (1 - given / possible):.0f} % withheld or refused)")
    by_fold = held_out(people, lambda one: one["place"] % FOLDS)
    print(f"coverage of participants in folds not calibrated on: {100 * np.mean(by_fold):.1f} %")
    without = held_out(people, lambda one: one["condition"])
    print(f"coverage of diseases absent from calibration: {100 * np.mean(without):.1f} %")
    print(f"{'':24} {'n':>4} {'given':>6} {'covered':>8} {'absent':>7} {'width, µm':>9}   by scanner, %")
    cells = []
    for condition in CONDITIONS:
        mine = [i for i, one in enumerate(people) if one["condition"] == condition]
        every = [one for one in rest if one["condition"] == condition]
        share = sum(len(people[i]["zones"]) for i in mine) / max(1, sum(len(one["zones"]) for one in every))
        by_scanner = {}
        for scanner in DEFAULT_SCANNERS:
            here = [by_fold[i] for i in mine if people[i]["scanner"] == scanner]
            by_scanner[scanner] = f"{100 * np.mean(here):.0f} ({len(here)})" if here else "–"
            cells += [float(np.mean(here))] if here else []
        print(
            f"{condition:24} {len(mine):>4} {100 * share:>5.0f}% {mean_of(by_fold, mine):>7.1f}% "
            f"{mean_of(without, mine):>6.1f}% {width(ranges, [people[i] for i in mine]):>9.1f}   "
            + ", ".join(f"{name} {cell}" for name, cell in by_scanner.items())
        )
    print(
        f"cells of disease x scanner: least {100 * min(cells):.0f} %, {sum(c < 0.8 for c in cells)} of {len(cells)} "
        "below 80 %"
    )
    if unseen:
        others = accepted(unseen)
        share = sum(len(one["zones"]) for one in others) / sum(len(one["zones"]) for one in unseen)
        print(
            f"scanner never seen: {len(others)} of {len(unseen)} accepted, {100 * share:.0f} % of zones given, "
            f"coverage {100 * np.mean([covered(one, ranges) for one in others]):.1f} %, "
            f"width {width(ranges, others):.1f} µm"
        )
    return ranges


def check(rest: list[Person]) -> None:
    """Coverage of the packaged ranges, and what the verdict catches, on participants that gave neither.

    Scans of the optic disc, which have no zones, and zones for which B-scans lie too far apart are counted apart.
    """
    discs = [one for one in rest if not one["eye"]]
    without = sum(not one["given"] for one in discs)
    rest = [one for one in rest if one["eye"]]
    for one in rest:
        one["zones"] = {name: zone for name, zone in one["zones"].items() if name not in one["sparse"]}
    people, finder = [one for one in accepted(rest) if one["given"]], load_finder()
    ranges = packaged_ranges(finder.name, finder.digest)
    assert ranges is not None
    hits = np.array([covered(one, ranges) for one in people])
    given, possible = (sum(len(one["zones"]) for one in part) for part in (people, rest))
    print(f"{without} of {len(discs)} scans of the optic disc have no zones; of the others:")
    print(
        f"{len(people)} of {len(rest)} participants accepted; {100 * (1 - given / possible):.0f} % of zones not given"
    )
    print(f"ranges of the lines cover {percent(hits)}, width {width(ranges, people):.1f} µm")
    eyes = np.array([held_eye(one) for one in people])
    ends = np.array([ends for one in people for ends in one["given"].values()])
    print(f"ranges given cover the eye's own zone in {percent(eyes)}, width {np.median(np.diff(ends)):.1f} µm")
    off_um = np.array([abs(one["zones"][n][0] - one["eye"][n]) for one in people for n in one["given"]])
    wide = np.diff(ends)[:, 0] > 2 * segment_verdict.WRONG_UM
    for words, some in (("40 µm wide or more", wide), ("narrower", ~wide)):
        wrong = 100 * np.mean(off_um[some] > segment_verdict.WRONG_UM)
        print(f"  {words}: {some.sum()} zones, {wrong:.1f} % of them wrong by more than {segment_verdict.WRONG_UM:.0f}")
    print(f"{'':24} {'wrong':>6} {'caught':>7} {'right':>6} {'withheld':>8} {'covered':>8} {'eye':>6} {'off':>6}")
    for condition in ("", *CONDITIONS):
        some = [one for one in rest if condition in ("", one["condition"])]
        zones = [(segment_verdict.Zone(*zone), one) for one in some for zone in one["zones"].values()]
        held = [
            (z.wrong, z.expected_um > ZONE_UM or not decide(Measures(**one["measures"])).accepted) for z, one in zones
        ]
        wrong, right = ([hit for off, hit in held if off is kind] for kind in (True, False))
        mine = [i for i, one in enumerate(people) if condition in ("", one["condition"])]
        off = [
            abs(one["zones"][n][0] - one["eye"][n]) > segment_verdict.WRONG_UM
            for one in some
            for n in one["given"]
            if n in one["zones"]
        ]
        parts = (wrong, right, hits[mine], eyes[mine], off)
        shares = [f"{100 * np.mean(part):.0f} %" if len(part) else "–" for part in parts]
        print(
            f"{condition or 'all':24} {len(wrong):>6} {shares[0]:>7} {len(right):>6} {shares[1]:>8} {shares[2]:>8} "
            f"{shares[3]:>6} {shares[4]:>6}"
        )
    cells = [
        np.mean([eyes[i] for i, one in enumerate(people) if (one["condition"], one["scanner"]) == cell])
        for cell in sorted({(one["condition"], one["scanner"]) for one in people})
    ]
    print(f"disease x scanner: least {100 * min(cells):.0f} %, {sum(c < 0.8 for c in cells)} of {len(cells)} below 80")


def held_eye(one: Person) -> float:
    """Share of the zones given whose range holds the eye's own zone."""
    return float(np.mean([low <= one["eye"][name] <= high for name, (low, high) in one["given"].items()]))


def percent(shares: np.ndarray) -> str:
    """The mean of participants with its standard error."""
    return f"{100 * shares.mean():.1f} ± {100 * shares.std(ddof=1) / np.sqrt(len(shares)):.1f} %"


def mean_of(values: list[float], places: list[int]) -> float:
    return 100 * float(np.mean([values[i] for i in places])) if places else float("nan")


def width(ranges: Ranges, people: list[Person]) -> float:
    """Median width of the ranges in µm."""
    ends = [ranges.of(zone[0], *zone[2:]) for one in people for zone in one["zones"].values()]
    return float(np.median([high - low for low, high in ends])) if ends else float("nan")


def read(path: Path) -> list[Person]:
    """Participants of a file of --save in their order; a line that a kill has cut short is left out."""
    found = {}
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            one = json.loads(line)
        except json.JSONDecodeError:
            continue
        found[one["place"]] = one
    return [found[place] for place in sorted(found)]


def collect(path: Path, count: int, scanners: tuple[str, ...], part: str, seed: int) -> None:
    """Add the participants that the file lacks, a line each."""
    own, of = (int(word) for word in part.split("/"))
    done, finder = {one["place"] for one in read(path)}, load_finder()
    with path.open("a") as file:
        for place in range(count):
            if place % of == own and place not in done:
                file.write("\n" * (file.tell() > 0) + json.dumps(person(place, scanners, finder, seed)))
                file.flush()


def write(ranges: Ranges) -> None:
    finder = load_finder()
    facts = {"sha256": finder.digest, "level": LEVEL, **asdict(ranges)}
    facts["made"] = f"benchmarks/segment_ranges.py: phantom participants of seed {SEED}, {BSCANS} B-scans each"
    path = Path(octfm.weights.__path__[0]) / f"{CURRENT}.ranges.json"
    path.write_text(json.dumps(facts, indent=2) + "\n")
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save", type=Path, help="file of participants, extended")
    parser.add_argument("--count", type=int, default=1100)
    parser.add_argument("--seed", type=int, default=SEED, help="of the participants; others are for --check")
    parser.add_argument("--check", type=Path, help="report how the packaged ranges and the verdict do on this file")
    parser.add_argument("--part", default="0/1", help="every N-th participant, from the K-th: K/N")
    parser.add_argument("--unseen", action="store_true", help="the scanner that training and calibration lack")
    parser.add_argument("--fit", type=Path, help="calibrate on this file of --save, and report")
    parser.add_argument("--test", type=Path, help="of --unseen, for the report")
    parser.add_argument("--write", action="store_true", help="with --fit: store the ranges with the network")
    arguments = parser.parse_args()
    if arguments.save:
        collect(
            arguments.save,
            arguments.count,
            UNSEEN if arguments.unseen else DEFAULT_SCANNERS,
            arguments.part,
            arguments.seed,
        )
    if empty := next(
        (path for path in (arguments.check, arguments.fit, arguments.test) if path and not read(path)), None
    ):
        parser.error(f"{empty}: no participants; make them with --save {empty}")
    if arguments.check:
        check(read(arguments.check))
    if arguments.fit:
        ranges = report(read(arguments.fit), read(arguments.test) if arguments.test else [])
        if arguments.write:
            write(ranges)


if __name__ == "__main__":
    main()
