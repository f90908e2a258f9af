"""Layer networks that have never seen a disease: do the ranges of ETDRS zones hold for it?

    python benchmarks/segment_absent.py --out OUT --render             # crops to train on, by all cores (4.6 GB)
    python benchmarks/segment_absent.py --out OUT --train --device cuda --jobs 14
    python benchmarks/segment_absent.py --out OUT --judge --jobs 2     # CPU-hours, resumable
    python benchmarks/segment_absent.py --out OUT --table

One network is trained like the packaged one (octfm.layers.training) without each disease, and one with all. They share
the crops, which are those of `make weights`; a network skips the eyes with its disease, or with one that is drawn with
the same lesions (WITH). Ranges are calibrated on participants with the diseases that were present, 13 B-scans each
(segment_ranges.py), and judged on those with the absent one. Every stage goes on after an interruption.
"""

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import count, islice
from pathlib import Path

import numpy as np
import torch

from octfm.io.location import replacing
from octfm.layers.training import CROPS, IMAGES, VALUES, LayerTraining, crop, from_state, stream_of
from octfm.layers.verdict import ZONE_UM, Measures, decide
from octfm.models.layer_net import standardise
from octfm.phantom.native.stream import CONDITIONS
from octfm.phantom.scanner import DEFAULT_SCANNERS
from segment_ranges import Person, accepted, calibrated, covered, percent, person, read
from segment_verdict import Zone

WITH = {
    "dme": ("vein_occlusion",),
    "drusen": ("detachment", "neovascular_amd", "reticular_drusen"),
    "detachment": ("central_serous",),
}
"""Disease → others that are drawn with its lesions. "mixed" has a second disease of any kind. Reticular drusen lie in a
tenth of all eyes, so no training is without them."""
NOTHING = "nothing"
ABSENT = (NOTHING, *(name for name in CONDITIONS if name not in ("healthy", "mixed")))
BLOCK = 200
"""Places of the stream in a file."""


def left_out(absent: str) -> set[str]:
    """Conditions of the eyes that a network without this disease skips."""
    return set() if absent == NOTHING else {absent, "mixed", *WITH.get(absent, ())}


def places_of(absent: str, steps: int, seed: int) -> list[int]:
    """The places of the stream whose images this network is trained on, in order."""
    stream, skipped = stream_of(seed), left_out(absent)
    return list(islice((place for place in count() if stream.condition(place) not in skipped), IMAGES * steps))


# ---- training ----------------------------------------------------------------------------------------------------


def render(block: int, folder: Path, seed: int) -> None:
    """Write the crops of a block: voxels uint8 [N, H, W], rows float32 [N, S, W], lesions uint8 [N, H, W]."""
    file = folder / f"{block:05d}.npz"
    if file.exists():
        return
    stream, crops = stream_of(seed), []
    for place in range(BLOCK * block, BLOCK * (block + 1)):
        image = stream(place)
        crops += [crop(image, np.random.default_rng([seed, 5, place, use])) for use in range(CROPS)]
    voxels, rows, lesions = (np.stack(parts) for parts in zip(*crops, strict=True))
    with replacing(file) as unfinished, unfinished.open("wb") as out:
        np.savez(out, voxels=voxels.astype(np.uint8), rows=rows, lesions=lesions)


class Crops:
    """All crops, on the device."""

    def __init__(self, folder: Path, blocks: int, device: str):
        parts: dict[str, list[torch.Tensor]] = {"voxels": [], "rows": [], "lesions": []}
        for block in range(blocks):
            with np.load(folder / f"{block:05d}.npz") as file:
                for name, tensors in parts.items():
                    tensors.append(torch.from_numpy(file[name]).to(device))
        self.voxels, self.rows, self.lesions = (torch.cat(tensors) for tensors in parts.values())
        self.values = torch.tensor(VALUES, dtype=torch.uint8, device=device)[:, None, None]

    def batch(self, places: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As octfm.layers.training.batch."""
        index = torch.tensor([CROPS * place + use for place in places for use in range(CROPS)]).to(self.voxels.device)
        images = standardise(self.voxels[index, None])
        masks = (self.lesions[index, None] == self.values).float()
        return images.to(memory_format=torch.channels_last), self.rows[index], masks


def train(absent: str, out: Path, steps: int, seed: int, blocks: int, device: str) -> str:
    final, state = out / f"{absent}.pt", out / f"{absent}.state"
    if final.exists():
        return f"{absent}: done"
    torch.set_num_threads(1)
    training, places = LayerTraining(steps, seed), places_of(absent, steps, seed)
    training.network.to(device)
    training.average.to(device)
    if state.exists():
        training.restore(state)
    crops, losses = Crops(out / "crops", blocks, device), []
    while training.step < steps:
        first = IMAGES * training.step
        losses.append(training.learn(*crops.batch(places[first : first + IMAGES])))
        if training.step % 200 == 0:
            training.save(state)
            print(f"{absent:16} step {training.step}/{steps}  loss {np.mean(losses[-200:]):.3f}", flush=True)
    with replacing(final) as unfinished:
        torch.save({"average": training.average.cpu().state_dict(), "step": steps}, unfinished)
    state.unlink(missing_ok=True)
    return f"{absent}: {steps} steps, loss {np.mean(losses[-200:]):.3f}"


# ---- judging -----------------------------------------------------------------------------------------------------


def judge(absent: str, out: Path, each: int, seed: int) -> str:
    """Add the participants that the network's file lacks: so many of each condition, thrice as many of the absent."""
    torch.set_num_threads(1)
    file, finder = out / f"{absent}.jsonl", from_state(out / f"{absent}.pt")
    done = {one["place"] for one in read(file)}
    with file.open("a") as lines:
        for at, condition in enumerate(CONDITIONS):
            for turn in range(3 * each if condition == absent else each):
                place = at + turn * len(CONDITIONS)
                if place not in done:
                    one = person(place, DEFAULT_SCANNERS, finder, seed)
                    lines.write("\n" * (lines.tell() > 0) + json.dumps(one))
                    lines.flush()
    return f"{absent}: judged"


def table(out: Path) -> Iterable[str]:
    everyone = {absent: read(out / f"{absent}.jsonl") for absent in ABSENT if (out / f"{absent}.jsonl").exists()}
    yield "| absent | accepted | zones held, % | with the network that saw it, % | wrong caught | right withheld |"
    yield "|---|---|---|---|---|---|"
    for absent in everyone:
        if absent == NOTHING:
            continue
        own = row(everyone[absent], absent)
        same = {one["place"] for one in everyone[absent]}
        control = [one for one in everyone.get(NOTHING, []) if one["place"] in same]
        seen = row(control, absent)[1] if control else "–"
        yield f"| {absent} | {own[0]} | {own[1]} | {seen} | {own[2]} | {own[3]} |"


def row(people: list[Person], absent: str) -> tuple[str, str, str, str]:
    """Of participants with this disease, by ranges calibrated without it and without what is drawn with its lesions:
    accepted, coverage, wrong zones caught, right zones withheld."""
    ranges = calibrated(accepted(one for one in people if one["condition"] not in left_out(absent)))
    mine = [one for one in people if one["condition"] == absent]
    some = accepted(mine)
    held = np.array([covered(one, ranges) for one in some])
    zones = [
        (Zone(*zone).wrong, zone[2] > ZONE_UM or not decide(Measures(**one["measures"])).accepted)
        for one in mine
        for zone in one["zones"].values()
    ]
    wrong, right = ([hit for off, hit in zones if off is kind] for kind in (True, False))
    caught, withheld = (f"{100 * np.mean(part):.0f} % of {len(part)}" if part else "–" for part in (wrong, right))
    return f"{len(some)} of {len(mine)}", percent(held) if len(held) > 1 else "–", caught, withheld


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--render", action="store_true")
    parser.add_argument("--train", action="store_true")
    parser.add_argument("--judge", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--absent", nargs="+", default=ABSENT, choices=ABSENT, metavar="DISEASE")
    parser.add_argument("--steps", type=int, default=3400, help="as of the packaged network")
    parser.add_argument("--seed", type=int, default=11, help="of training, as of the packaged network")
    parser.add_argument("--people", type=int, default=333, help="seed of the participants")
    parser.add_argument("--each", type=int, default=8, help="participants of each condition")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    crops = chosen.out / "crops"
    crops.mkdir(parents=True, exist_ok=True)
    last = max(places_of(absent, chosen.steps, chosen.seed)[-1] for absent in chosen.absent)
    blocks = last // BLOCK + 1
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(chosen.jobs, spawn) as pool:
        if chosen.render:
            list(pool.map(partial(render, folder=crops, seed=chosen.seed), range(blocks)))
        if chosen.train:
            sizes = {"steps": chosen.steps, "seed": chosen.seed, "blocks": blocks, "device": chosen.device}
            for line in pool.map(partial(train, out=chosen.out, **sizes), chosen.absent):
                print(line, flush=True)
        if chosen.judge:
            for line in pool.map(partial(judge, out=chosen.out, each=chosen.each, seed=chosen.people), chosen.absent):
                print(line, flush=True)
    if chosen.table:
        print("\n".join(table(chosen.out)))


if __name__ == "__main__":
    main()
