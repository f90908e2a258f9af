"""What a network of `octfm segment` finds on phantoms that it has not seen: surfaces, fluid, false fluid, by scanner.

python benchmarks/segment_phantoms.py                            # the packaged network, seed 200
python benchmarks/segment_phantoms.py --state state.pt --seed 30 # a training's state, on a seed for development
"""

import argparse
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from octfm.layers.edges import EDGES, onto_edges
from octfm.layers.finder import LayerFinder, load_finder
from octfm.layers.training import VALUES, from_state
from octfm.models.layer_net import MASKS, SURFACES
from octfm.phantom.native.bscans import SURFACES as DRAWN
from octfm.phantom.native.stream import Stream
from octfm.phantom.scanner import DEFAULT_SCANNERS, SCANNERS
from octfm.volume.volume import Volume
from octfm.weights.packaged import CURRENT


@dataclass
class Tally:
    """Sums over the volumes of one scanner."""

    off_um: dict[str, list[float]] = field(default_factory=dict)
    """Mean absolute error of a surface in every volume."""
    both: np.ndarray = field(default_factory=lambda: np.zeros(len(MASKS)))
    true: np.ndarray = field(default_factory=lambda: np.zeros(len(MASKS)))
    ours: np.ndarray = field(default_factory=lambda: np.zeros(len(MASKS)))
    false_nl: list[float] = field(default_factory=list)
    """Fluid found in volumes without any."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=CURRENT)
    parser.add_argument("--state", type=Path, help="of `python -m octfm.layers.training`, instead of --model")
    parser.add_argument("--seed", type=int, default=200)
    parser.add_argument("--volumes", type=int, default=60, help="per group: scanners of training, scanner never seen")
    parser.add_argument("--bscans", type=int, default=7)
    arguments = parser.parse_args()
    finder = from_state(arguments.state) if arguments.state else load_finder(arguments.model)
    print(f"{finder.name} {finder.digest[:12]}; seed {arguments.seed}, {arguments.bscans} B-scans a volume")
    unseen = tuple(name for name in SCANNERS if name not in DEFAULT_SCANNERS)
    for title, scanners in (("scanners of training", DEFAULT_SCANNERS), (f"never seen: {', '.join(unseen)}", unseen)):
        stream = Stream(arguments.seed, arguments.bscans, 0.0, scanners=scanners, row_um=None)
        print(f"\n{title}")
        show(tally(finder, stream, arguments.volumes))


def tally(finder: LayerFinder, stream: Stream, volumes: int) -> Tally:
    sums = Tally()
    for place in range(volumes):
        image = stream(place)
        if image.accident != "none":
            continue
        found = finder.find(Volume(image.voxels, image.spacing_mm))
        rows = onto_edges(image.voxels, found.rows, image.spacing_mm)
        for i, name in enumerate(SURFACES):
            for kind, line in ((name, rows[i]), (f"{name} of the network", found.rows[i])):
                off = np.abs(line - image.surfaces[DRAWN.index(name)]) * image.spacing_mm[1] * 1000
                if np.isfinite(off).any() and (kind == name or name in EDGES):
                    sums.off_um.setdefault(kind, []).append(float(np.nanmean(off)))
        for k, value in enumerate(VALUES):
            truth, ours = image.lesions == value, found.lesions == k + 1
            sums.both[k] += (truth & ours).sum()
            sums.true[k] += truth.sum()
            sums.ours[k] += ours.sum()
        if not np.isin(image.lesions, VALUES[:2]).any():
            sums.false_nl.append(float(np.isin(found.lesions, (1, 2)).sum() * np.prod(image.spacing_mm) * 1000))
    return sums


def show(sums: Tally) -> None:
    for name, errors in sums.off_um.items():
        print(
            f"  {name:24} median of volumes {np.median(errors):5.2f} µm, mean {np.mean(errors):6.2f}, "
            f"worst tenth from {np.quantile(errors, 0.9):6.2f}"
        )
    for name, both, true, ours in zip(MASKS, sums.both, sums.true, sums.ours, strict=True):
        dice, area = 2 * both / (true + ours) if true + ours else np.nan, ours / true if true else np.nan
        print(f"  {name:20} Dice {dice:.3f}, area over the true one {area:.2f}")
    fluid = np.array(sums.false_nl)
    print(
        f"  {len(fluid)} volumes without fluid: {100 * np.mean(fluid <= 1):.0f} % with at most 1 nl found, "
        f"largest {fluid.max(initial=0):.1f} nl"
    )


if __name__ == "__main__":
    main()
