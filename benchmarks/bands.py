"""Check that the tissue band contains the retina or reports low confidence, on plain, lifted and drifting phantoms.

python benchmarks/bands.py                       # tuned on seeds 0-49, held out 50-99; one line per kind
python benchmarks/bands.py --list                # also every volume that fails
python benchmarks/bands.py --learned --first 200 --count 20 --data FOLDER
                                                 # classic, learned and either, on nine kinds of phantoms, real scans
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from octfm.phantom import DIAGNOSES, SCANNERS, phantom_volume
from octfm.phantom.native.bscans import SURFACES
from octfm.volume.preprocessing import Prepared, Preprocessing
from octfm.volume.volume import Volume

HELD = 0.99
"""Minimum share of ILM-to-BM voxels inside band and crop for a confident volume."""
FILLS = ("serous", "solid", "detached")
"""Content of an elevation: dark fluid or mid-bright material below the RPE, or dark fluid above it, where only the
neurosensory retina is lifted."""
DRIFTS = ("slope", "bowl", "wave", "late")
CROPS = {
    "2.0 mm": Preprocessing(image_size=(32, 192, 128), target_spacing=(0.1875, 0.0104, 0.047)),
    "1.2 mm": Preprocessing(image_size=(32, 192, 128), target_spacing=(0.1875, 0.00625, 0.047)),
}
"""Crops of 6 x 6 mm by height: the default, and one that a drifting retina leaves."""


@dataclass(frozen=True, eq=False)
class Scan:
    """A phantom with its true surfaces [D, W] in rows, warped or not."""

    volume: Volume
    ilm: np.ndarray
    rpe: np.ndarray
    """Upper edge of the RPE."""
    rpe_bottom: np.ndarray
    bm: np.ndarray

    def moved(self, shift_D: np.ndarray) -> "Scan":
        """Displace every B-scan by whole rows, positive downwards; rows that come into view are dark noise."""
        height = self.volume.shape[1]
        rows = np.arange(height)[None, :] - shift_D[:, None]
        outside = (rows < 0) | (rows >= height)
        voxels = np.take_along_axis(self.volume.voxels, np.clip(rows, 0, height - 1)[:, :, None], 1)
        voxels = np.where(outside[:, :, None], self._dark(), voxels)
        surfaces = {name: getattr(self, name) + shift_D[:, None] for name in ("ilm", "rpe", "rpe_bottom", "bm")}
        return Scan(replace(self.volume, voxels=voxels), **surfaces)

    def _dark(self) -> np.ndarray:
        """Vitreous noise in the shape of the volume."""
        rows = np.arange(self.volume.shape[1])[None, :, None]
        dark = self.volume.voxels[np.broadcast_to(rows < (self.ilm - 12)[:, None], self.volume.shape)]
        return np.random.default_rng(0).choice(dark, self.volume.shape)


def phantom(seed: int, scanner: str, diagnosis: str, severity: float) -> Scan:
    volume, truth = phantom_volume(
        seed, scanner=scanner, diagnosis=diagnosis, severity=severity, laterality="RL"[seed % 2], size=(32, 256, 192)
    )
    ilm, rpe, rpe_bottom, bm = (truth.surface(name) for name in ("ilm", "rpe", "rpe_bottom", "bm"))
    return Scan(volume, ilm, rpe, rpe_bottom, bm)


def elevated(
    scan: Scan, height_um: float, width_um: float, fill: str, rng: np.random.Generator, lesions: int = 1
) -> Scan:
    """Lift the tissue above the lower (or upper) edge of the RPE by smooth domes; Bruch's membrane stays in place."""
    volume = scan.volume
    depth, rows, width = volume.shape
    dz, dy, dx = volume.spacing_mm
    d = ((np.arange(depth) - (depth - 1) / 2) * dz)[:, None]
    w = ((np.arange(width) - (width - 1) / 2) * dx)[None]
    dome = np.zeros((depth, width))
    for share in (1, *rng.uniform(0.3, 1, lesions - 1)):
        away = np.hypot(d - rng.uniform(-1.5, 1.5), w - rng.uniform(-1.5, 1.5)) / (share * width_um / 2000)
        dome = np.maximum(dome, share * np.clip(1 - away**2, 0, 1) ** rng.uniform(0.6, 1.6))
    lift = height_um / 1000 / dy * dome
    # Like an operator: move the eye down if its top would leave the frame, as long as BM stays inside.
    room = max(0, int(rows - 0.16 / dy - scan.bm.max()))
    scan = scan.moved(np.full(depth, min(room, max(0, int(0.06 / dy - (scan.ilm - lift).min())))))

    voxels, index = scan.volume.voxels, np.arange(rows)[None, :, None]
    seam = scan.rpe if fill == "detached" else scan.rpe_bottom
    lifted = np.take_along_axis(voxels, np.clip(np.rint(index + lift[:, None]), 0, rows - 1).astype(int), 1)
    below = (index >= (seam - lift)[:, None]) & (index < (seam if fill == "detached" else scan.bm)[:, None])
    below &= (lift > 0)[:, None]
    material = scan._dark()
    if fill == "solid":
        retina = voxels[np.broadcast_to((index > scan.ilm[:, None]) & (index < scan.rpe[:, None]), voxels.shape)]
        material = rng.choice(retina, voxels.shape)
    # The lesion absorbs part of the light, so that the tissue below it is darker.
    shade = 1 - rng.uniform(0, 0.9) * dome[:, None]
    dark = np.median(scan._dark())
    under = dark + (voxels - dark) * np.where(index >= scan.bm[:, None], shade, 1)
    out = np.where(below, material, np.where(index < (seam - lift)[:, None], lifted, under))
    volume = replace(scan.volume, voxels=np.clip(np.rint(out), 0, 255).astype(np.uint8))
    moved = scan.rpe - lift, (scan.rpe_bottom if fill == "detached" else scan.rpe_bottom - lift)
    return Scan(volume, scan.ilm - lift, *moved, scan.bm)


def drifted(scan: Scan, range_um: float, kind: str, rng: np.random.Generator) -> Scan:
    """Displace the retina from B-scan to B-scan, by `range_um` between the highest and the lowest."""
    t = np.linspace(0, 1, scan.volume.shape[0])
    path = {
        "slope": t,
        "bowl": (2 * t - 1) ** 2,
        "wave": 0.5 + 0.5 * np.sin(2 * np.pi * (t + rng.uniform())),
        "late": np.clip(3 * t - 2, 0, 1),
    }[kind]
    path = path if rng.uniform() < 0.5 else 1 - path
    shift = range_um / 1000 / scan.volume.spacing_mm[1] * path
    # Like an operator: keep as much of the retina in the frame as possible.
    top, bottom = (scan.ilm + shift[:, None]).min(), (scan.bm + shift[:, None]).max()
    return scan.moved(np.rint(shift - (top + bottom) / 2 + scan.volume.shape[1] / 2).astype(int))


def held(prepared: Prepared, scan: Scan) -> float:
    """Share of retinal voxels of the native frame inside band and crop, over the A-scans inside the crop."""
    return overlap(prepared, scan)[0]


def overlap(prepared: Prepared, scan: Scan) -> tuple[float, float]:
    """What `held` returns, and the rows of the band per row of the retina; NaN where nothing is known of the retina."""
    size = prepared.voxels.shape[1]
    # Rows extend half a pixel beyond their centres. Retina outside the native frame does not count.
    rows = scan.volume.shape[1]
    ilm, bm = (np.clip(surface, -0.5, rows - 0.5) for surface in (scan.ilm - 0.5, scan.bm + 0.5))
    upper, lower = (prepared.transform.rows_to_prepared(surface) for surface in (ilm, bm))
    shown = (prepared.valid[1] > prepared.valid[0]) & np.isfinite(upper) & np.isfinite(lower)
    first, last = np.maximum(prepared.band[0], 0), np.minimum(prepared.band[1], size)
    inside = np.clip(np.minimum(lower, last) - np.maximum(upper, first), 0, None)
    retina = np.clip(lower - upper, 1e-9, None)[shown].sum()
    if not retina:
        return float("nan"), float("nan")
    return float(inside[shown].sum() / retina), float((last - first)[shown].sum() / retina)


def cases(seeds: range, plain: int, warped: int) -> Iterator[tuple[str, str, Scan]]:
    """(kind, description, scan): `plain` unchanged phantoms, then `warped` ones with elevations, drifts or both.

    Scanners and diagnoses take turns.
    """
    rng = np.random.default_rng(seeds.start)
    scanners, kinds = list(SCANNERS), ("elevated", "drifted", "both")
    for i in range(plain + warped):
        scanner, diagnosis = scanners[i % len(scanners)], DIAGNOSES[i // len(scanners) % len(DIAGNOSES)]
        severity = rng.uniform(0.2, 1)
        seed = seeds[i % len(seeds)]
        words = f"seed {seed} {scanner} {diagnosis} {severity:.2f}"
        scan = phantom(seed, scanner, diagnosis, severity)
        if i < plain:
            yield "unwarped", words, scan
            continue
        kind = kinds[(i - plain) % 3]
        if kind != "drifted":
            lesion = (float(rng.uniform(100, 800)), float(rng.uniform(500, 3000)), str(rng.choice(FILLS)))
            count = int(rng.integers(1, 4))
            scan = elevated(scan, *lesion, rng, count)
            words += f", lifted {lesion[0]:.0f} µm over {lesion[1]:.0f} µm, {lesion[2]}, {count} times"
        if kind != "elevated":
            way = (float(rng.uniform(100, 600)), str(rng.choice(DRIFTS)))
            scan = drifted(scan, *way, rng)
            words += f", drift {way[0]:.0f} µm, {way[1]}"
        yield kind, words, scan


ACCIDENTS = {"none": 13, "clipped": 7, "wrapped": 7, "upside_down": 7, "blink": 9}
"""Of phantoms of version 4, with the B-scans rendered: fewer where hardly any band can be trusted."""


def version_4(seed: int, accident: str) -> Scan:
    """A phantom of the stream on native rows, with an accident whatever was drawn for it."""
    from segment_verdict import drawn

    image = drawn(seed, accident, ACCIDENTS[accident])
    volume = Volume(image.voxels, image.spacing_mm, laterality="R", superior_first=True, source=accident)
    ilm, rpe, bm = (image.surfaces[SURFACES.index(name)] for name in ("ilm", "rpe_inner", "bm"))
    # Where one end of the retina is outside the frame, the image holds it up to the edge.
    top = np.where(np.isnan(ilm) & np.isfinite(bm), -0.5, ilm)
    bottom = np.where(np.isnan(bm) & np.isfinite(ilm), volume.shape[1] - 0.5, bm)
    return Scan(volume, top, rpe, bottom, bottom)


def real(folder: Path) -> Iterator[tuple[str, str, Scan]]:
    """The AMD volume, between the expert's RPE and BM; a macular hole and five eyes with oedema, without truth."""
    import segment_amd

    volume, (rpe, bm) = segment_amd.read(folder)
    yield "real, AMD, RPE to BM", "amd", Scan(replace(volume, laterality="R", superior_first=True), rpe, rpe, bm, bm)
    nominal_mm = (0.12, 0.00387, 0.0115)
    with np.load(folder / "macular_hole_49.npz") as file:
        scans = {"macular hole": file["volume"]}
    with np.load(folder / "chiu2015_dme_subjects1to5.npz") as file:
        scans |= {f"DME {eye + 1}": file["bscans"][11 * eye : 11 * eye + 11] for eye in range(5)}
    for name, voxels in scans.items():
        volume = Volume(np.ascontiguousarray(voxels), nominal_mm, laterality="R", superior_first=True, source=name)
        unknown = np.full((volume.shape[0], volume.shape[2]), np.nan)
        yield f"real, {name.split()[0]}", name, Scan(volume, unknown, unknown, unknown, unknown)


class Outcome(NamedTuple):
    confident: bool
    held: float
    rows: float
    """Of the band per row of the retina; of all rows where the band is not trusted."""
    seconds: float
    """CPU time of preparing the volume."""


def compare(first: int, count: int, data: Path | None, only: str, listed: bool) -> None:
    """Print a table of classic, learned and either bands: `count` volumes of each kind, of seeds from `first` on."""
    from octfm.layers.band import LearnedBand

    learned = LearnedBand()
    classic = CROPS["2.0 mm"]
    ways = {"classic": (classic, None)} | {
        band: (classic.model_copy(update={"band": band, "band_network": learned.network}), learned)
        for band in ("learned", "either")
    }
    found: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for kind, words, scan in _compared(first, count, data, only):
        for way, (preprocessing, find_band) in ways.items():
            begin = time.process_time()
            prepared = preprocessing(scan.volume, find_band)
            seconds = time.process_time() - begin
            outcome = Outcome(prepared.confident, *overlap(prepared, scan), seconds)
            found[kind, way].append(outcome)
            if listed:
                facts = {name: round(value, 3) for name, value in prepared.confidence.items()}
                print(f"{kind}: {words}: {way}: {outcome}, {facts}", flush=True)
    print("| | volumes | low confidence | confident and failing | rows of band per row of retina | CPU s per volume |")
    print("|---|---|---|---|---|---|")
    for kind in dict.fromkeys(kind for kind, _ in found):
        each = [np.array(found[kind, way]) for way in ways]
        cells = [
            [f"{1 - way[:, 0].mean():.0%}" for way in each],
            [str(int(((way[:, 0] > 0) & (way[:, 1] < HELD)).sum())) for way in each],
            [f"{np.nanmean(way[:, 2]):.2f}" if np.isfinite(way[:, 2]).any() else "–" for way in each],
            [f"{way[:, 3].mean():.1f}" for way in each],
        ]
        print(f"| {kind} | {len(each[0])} | {' | '.join(', '.join(pair) for pair in cells)} |")


def _compared(first: int, count: int, data: Path | None, only: str) -> Iterator[tuple[str, str, Scan]]:
    if "3" in only:
        for kind, words, scan in cases(range(first, first + 3 * count), count, 3 * count):
            yield f"version 3, {kind}", words, scan
    if "4" in only:
        for accident in ACCIDENTS:
            for seed in range(first, first + count):
                yield f"version 4, {accident.replace('_', ' ')}", f"seed {seed}", version_4(seed, accident)
    if data is not None:
        yield from real(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plain", type=int, default=175, help="volumes without a warp, of each half of the seeds")
    parser.add_argument("--warped", type=int, default=150, help="volumes with one")
    parser.add_argument("--list", action="store_true", help="name every volume that fails or is of low confidence")
    parser.add_argument("--half", choices=("tuned", "held-out"), help="only these seeds")
    parser.add_argument("--learned", action="store_true", help="compare classic bands with learned ones and either")
    parser.add_argument("--first", type=int, default=0, help="first seed of the comparison; report 200 and above")
    parser.add_argument("--count", type=int, default=20, help="volumes of each kind in the comparison")
    parser.add_argument("--data", type=Path, help="folder of the shared real scans, also compared")
    parser.add_argument("--versions", default="34", help="of phantoms in the comparison: 3, 4 or 34")
    given = parser.parse_args()
    if given.learned:
        compare(given.first, given.count, given.data, given.versions, given.list)
        return
    for half, seeds in (("tuned", range(50)), ("held-out", range(50, 100))):
        if given.half not in (None, half):
            continue
        found = defaultdict(list)
        for kind, words, scan in cases(seeds, given.plain, given.warped):
            for crop, preprocessing in CROPS.items():
                prepared = preprocessing(scan.volume)
                share = held(prepared, scan)
                found[crop, kind].append((prepared.confident, share))
                if given.list and (share < HELD if prepared.confident else kind == "unwarped"):
                    floors = {name: round(value, 3) for name, value in prepared.confidence.items()}
                    print(f"{crop}: {words}: confident {prepared.confident}, holds {share:.3f}, {floors}", flush=True)
        for (crop, kind), outcomes in sorted(found.items()):
            confident, share = (np.array(values) for values in zip(*outcomes, strict=True))
            wrong = confident & (share < HELD)
            print(
                f"{half:8}  crop {crop}  {kind:8}  {len(outcomes):4} volumes  "
                f"low confidence {1 - confident.mean():6.1%}  "
                f"confident and holding less than {HELD:.0%}: {wrong.sum():3} ({wrong.mean():.1%})  "
                f"least held {share[confident].min() if confident.any() else 1:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
