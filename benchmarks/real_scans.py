"""What frozen tokens are worth on real scans, beside the cheapest rivals. Results are development figures.

    python benchmarks/real_scans.py diagnoses --scans splitedMulticlass --groups cirrus_line_scans_groups.csv \\
        --encoder dense=runs/dense --out real
    python benchmarks/real_scans.py icons --scans splitedMulticlass [--as-is]
    python benchmarks/real_scans.py lines --data FOLDER --encoder dense=runs/dense --out real
    python benchmarks/real_scans.py fluid --data FOLDER --encoder dense=runs/dense --out real

diagnoses: classes of single B-scans by frozen vectors, grouped by patient; all arms of yardstick.py with --layers.
icons: what the burnt-in icon of these B-scans does to the search for the retina.
lines: RPE and Bruch's membrane of one Spectralis volume, trained on one half of its B-scans and tested on the other.
fluid: five eyes with diabetic oedema, trained on eyes 1 to 3 and tested on 4 and 5, and the reverse.
Lines and fluid: tokens of native B-scans and DenseDecoder, the same for trained, untrained and pixels. Everything is
computed once in OUT, which then holds real data; the same command goes on where it stopped.
"""

import argparse
import csv
import functools
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from scipy.ndimage import map_coordinates
from torch.nn import functional as F

from octfm.encoder.embed import RANDOM_INIT
from octfm.encoder.encoder import Encoder, load_encoder
from octfm.io.location import write_whole
from octfm.layers.edges import EDGES, onto_edge, onto_edges
from octfm.layers.finder import load_finder
from octfm.models.dense import DenseDecoder, mask_loss, surface_loss, surface_rows
from octfm.models.layer_net import SURFACES
from octfm.models.vit3d import normalise, take_patches
from octfm.volume.estimated import axial_mm, retina_rows, spacing_of
from octfm.volume.margins import searchable, without_padding
from octfm.volume.surface import best_path
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Volume
from segment_amd import read
from segment_packaged import dice

UNTRAINED = "untrained:"
STRIDE = 4
"""Prepared voxels between tokens, axially and laterally: patches are embedded at every such shift."""
ROWS_OF_LINES, ROWS_OF_FLUID = 12, 8
"""Rows that a token decodes over its STRIDE: 3.5 and 5.2 µm with voxels of 10.4 µm."""
BATCH, LR = 2, 2e-3
STEEPEST, PATH_PENALTY = 2.0, 0.02
"""Of a line: greatest slope, and log-likelihood that it loses per µm of depth between A-scans."""
BETWEEN = 10
"""B-scans between the halves of the volume, in neither of them."""


# Tokens of native B-scans


@dataclass(frozen=True)
class Frame:
    """Where the cells of tokens lie in a native B-scan: fine (row, column) ↔ native (row, column)."""

    native: tuple[int, int]
    prepared: tuple[int, int]
    """Size of the B-scan on the encoder's grid of voxels."""
    first: tuple[int, int]
    """Prepared voxel at which the first cell begins."""
    cells: tuple[int, int]
    fine: tuple[int, int]
    """Rows and columns of a cell."""

    def to_native(self, fine: np.ndarray, axis: int) -> np.ndarray:
        edge = self.first[axis] + (fine + 0.5) * STRIDE / self.fine[axis]
        return edge * self.native[axis] / self.prepared[axis] - 0.5

    def to_fine(self, native: np.ndarray, axis: int) -> np.ndarray:
        edge = (native + 0.5) * self.prepared[axis] / self.native[axis]
        return (edge - self.first[axis]) * self.fine[axis] / STRIDE - 0.5

    @property
    def shape(self) -> tuple[int, int]:
        return self.cells[0] * self.fine[0], self.cells[1] * self.fine[1]


Embed = Callable[[torch.Tensor, Encoder], torch.Tensor]


def by_encoder(windows: torch.Tensor, encoder: Encoder) -> torch.Tensor:
    """Tokens [B, N, F] of prepared B-scans [B, H, W], 0 to 255."""
    return encoder.network.forward_features(windows[:, None])


def by_pixels(windows: torch.Tensor, encoder: Encoder) -> torch.Tensor:
    """The pixels of every patch in place of its token."""
    grid, pre = encoder.network.grid, encoder.preprocessing
    index = torch.arange(grid.size).expand(len(windows), -1)
    patches = take_patches(windows[:, None, None], index, encoder.config.model.patch_size)
    return normalise(patches, pre.intensity_mean, pre.intensity_std)


@torch.inference_mode()
def tokens_of(
    bscans: np.ndarray, spacing_mm: Sequence[float], encoder: Encoder, embed: Embed, rows: int
) -> tuple[torch.Tensor, Frame]:
    """Half-precision tokens [D, h, w, F] of native B-scans uint8 [D, H, W], one every STRIDE voxels, and their frame.

    B-scans are read one by one, in windows of the encoder's own size: its positions are those of training.
    """
    encoder = encoder.of_bscans()
    (_, height, width), (_, *voxel_mm) = encoder.preprocessing.image_size, encoder.preprocessing.target_spacing
    _, *patch = encoder.config.model.patch_size
    native = bscans.shape[1:]
    size = [round(n * mm / own) for n, mm, own in zip(native, spacing_mm[1:], voxel_mm, strict=True)]
    if size[0] + patch[0] - STRIDE > height:
        raise SystemExit(f"B-scans of {size[0]} prepared rows are too high for an encoder of {height}")
    images = F.interpolate(torch.from_numpy(bscans)[:, None].float(), size, mode="bilinear", antialias=True)[:, 0]
    count = math.ceil((size[1] + patch[1] - STRIDE) / width)
    shifts = [range(0, p, STRIDE) for p in patch]
    grid = [height // patch[0] * len(shifts[0]), width * count // patch[1] * len(shifts[1])]
    every = torch.zeros(len(images), *grid, 0)
    for down in shifts[0]:
        for right in shifts[1]:
            frame = torch.zeros(len(images), height, width * count)
            frame[:, down : down + size[0], right : right + size[1]] = images
            windows = frame.unflatten(2, (count, width)).transpose(1, 2).flatten(0, 1)
            parts = [embed(part, encoder).half() for part in windows.split(16)]
            found = torch.cat(parts).unflatten(1, encoder.network.grid.shape[1:]).unflatten(0, (-1, count))
            found = found.transpose(1, 2).flatten(2, 3)
            if not every.shape[-1]:
                every = found.new_zeros(len(images), *grid, found.shape[-1])
            # A shift to the right by STRIDE moves a patch of the image one cell to the left.
            at = [len(s) - 1 - shift // STRIDE for s, shift in zip(shifts, (down, right), strict=True)]
            every[:, at[0] :: len(shifts[0]), at[1] :: len(shifts[1])] = found
    first, kept = [], []
    for n, p in zip(size, patch, strict=True):
        # A cell is the middle of its patch; those that lie before the image are left out.
        begins = np.arange(-(p // STRIDE - 1), math.ceil(n / STRIDE) + 1) * STRIDE + (p - STRIDE) // 2
        inside = np.flatnonzero((begins + STRIDE > 0) & (begins < n))
        first.append(int(begins[inside[0]]))
        kept.append(slice(inside[0], inside[-1] + 1))
    every = every[:, kept[0], kept[1]].contiguous()
    cells = (every.shape[1], every.shape[2])
    return every, Frame(native, (size[0], size[1]), (first[0], first[1]), cells, (rows, STRIDE))


def fitted(
    tokens: torch.Tensor, rows: int, channels: int, masks: int, steps: int, loss: Callable[[Any, Any], Any]
) -> DenseDecoder:
    """A decoder fitted to tokens [D, h, w, F]; `loss(logits [B, C, 1, H, W], B-scans [B])`."""
    torch.manual_seed(0)
    decoder = DenseDecoder(tokens.shape[-1], channels, (1, rows, STRIDE), "light", masks)
    decoder.standardise_by(tokens.flatten(0, 2).float())
    optimizer = torch.optim.AdamW(decoder.parameters(), LR, weight_decay=0.05)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = LR * 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / (0.05 * steps + 1))
        chosen = np.random.default_rng((0, step)).permutation(len(tokens))[:BATCH]
        value = loss(decoder(tokens[chosen, None].float()), chosen)
        optimizer.zero_grad(set_to_none=True)
        value.backward()
        optimizer.step()
    return decoder


# Arms


def arms_of(chosen: argparse.Namespace) -> dict[str, tuple[Encoder, Embed]]:
    """Every encoder, three draws of the first one untrained, and the pixels of its patches."""
    named = dict(text.split("=", 1) for text in chosen.encoder)
    runs = [run for run in named.values() if not run.startswith(UNTRAINED)]
    if not runs:
        raise SystemExit("--encoder: name a run or an export, of which the untrained networks are draws")
    untrained = {name: f"{UNTRAINED}{draw}" for draw, name in enumerate(RANDOM_INIT)}
    found: dict[str, tuple[Encoder, Embed]] = {}
    for name, run in (named | untrained).items():
        draw = int(run.removeprefix(UNTRAINED)) if run.startswith(UNTRAINED) else None
        encoder = load_encoder(run) if draw is None else load_encoder(runs[0], random_init=True, draw=draw)
        found[name] = encoder, by_encoder
    return found | {"pixels": (load_encoder(runs[0]), by_pixels)}


def once(folder: Path, key: Sequence[Any], compute: Callable[[], Any]) -> Any:
    """A result computed once for this key, kept as JSON."""
    file = folder / f"{hashlib.sha256(json.dumps([str(k) for k in key]).encode()).hexdigest()[:24]}.json"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(compute()).encode())
    return json.loads(file.read_text())


def key_of(encoder: Encoder, embed: Embed) -> str:
    return "pixels" if embed is by_pixels else encoder.key


def say(line: str) -> None:
    print(line, flush=True)


# Lines


def lines(chosen: argparse.Namespace) -> None:
    volume, truth = read(chosen.data)
    kept = np.arange(0, len(volume.voxels), chosen.every)
    middle, gap = len(volume.voxels) / 2, BETWEEN / 2
    halves = [np.flatnonzero(kept < middle - gap), np.flatnonzero(kept >= middle + gap)]
    voxels, truth = volume.voxels[kept], truth[:, kept]
    um = 1000 * volume.spacing_mm[1]

    def errors(rows: np.ndarray) -> dict[str, list[float]]:
        """Mean absolute error in µm of rows [2, D, W], by half; `lifted`: of RPE where it is 40 µm or more above BM."""
        off = np.abs(rows - truth) * um
        off_lifted = np.where((truth[1] - truth[0]) * um >= 40, off[0], np.nan)
        found = {"rpe": off[0], "bm": off[1], "lifted": off_lifted}
        return {name: [float(np.nanmean(e[half])) for half in halves[::-1]] for name, e in found.items()}

    def moved(rows: np.ndarray) -> np.ndarray:
        names = ("rpe_peak", "bm")
        return np.stack([onto_edge(voxels, r, EDGES[n], volume.spacing_mm) for r, n in zip(rows, names, strict=True)])

    def of_tokens(encoder: Encoder, embed: Embed) -> list[dict[str, list[float]]]:
        tokens, frame = tokens_of(voxels, volume.spacing_mm, encoder, embed, ROWS_OF_LINES)
        target = lines_to_fine(truth, frame)
        rows = np.full(truth.shape, np.nan)
        for train, test in (halves, halves[::-1]):
            known = torch.from_numpy(target[:, train])
            decoder = fitted(
                tokens[train], ROWS_OF_LINES, 2, 0, chosen.steps,
                lambda logits, at, known=known: surface_loss(logits, known[:, at].transpose(0, 1)[:, :, None]),
            )  # fmt: skip
            rows[:, test] = decoded_lines(decoder, tokens[test], frame, um)
        return [errors(rows), errors(moved(rows))]

    def rivals() -> dict[str, list[dict[str, list[float]]]]:
        whole = Volume(voxels, volume.spacing_mm)
        own = load_finder().find(whole).rows
        peak, bm = SURFACES.index("rpe_peak"), SURFACES.index("bm")
        both = onto_edges(voxels, own, volume.spacing_mm)
        band = find_tissue(volume.voxels, volume.spacing_mm).bm[kept]
        band = np.stack([band - 15.0 / um, band])
        return {
            "packaged segmenter": [errors(own[[peak, bm]]), errors(both[[peak, bm]])],
            "tissue band, no label": [errors(band), errors(moved(band))],
        }

    folder, common = chosen.out / "lines", ("lines", 1, chosen.every, chosen.steps)
    found = {}
    for name, (encoder, embed) in arms_of(chosen).items():
        found[name] = once(folder, (*common, key_of(encoder, embed)), functools.partial(of_tokens, encoder, embed))
        say(f"{name}: {found[name]}")
    found |= once(folder, (*common[:3], "rivals"), rivals)
    heads = ["mean absolute error, µm, trained on the first half; the second", "RPE", "BM"]
    heads += ["RPE 40 µm or more above BM", "RPE, moved onto edges", "BM, moved onto edges"]
    table = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, (own, at_edges) in found.items():
        cells = [own["rpe"], own["bm"], own["lifted"], at_edges["rpe"], at_edges["bm"]]
        table.append(f"| {name} | {' | '.join('; '.join(f'{v:.2f}' for v in cell) for cell in cells)} |")
    report(chosen.out / "lines.md", table)


def lines_to_fine(rows_SDW: np.ndarray, frame: Frame) -> np.ndarray:
    """float32 [S, D, w]: native rows at native A-scans as fine rows at fine columns; NaN if not known."""
    columns = frame.to_native(np.arange(frame.shape[1]), 1)
    known = frame.to_fine(rows_SDW, 0)
    own = np.arange(rows_SDW.shape[2])
    fine = [np.interp(columns, own, line, np.nan, np.nan) for line in known.reshape(-1, len(own))]
    return np.stack(fine).reshape(*rows_SDW.shape[:2], -1).astype(np.float32)


@torch.inference_mode()
def decoded_lines(decoder: DenseDecoder, tokens: torch.Tensor, frame: Frame, um: float) -> np.ndarray:
    """Native rows [S, D, W] of B-scans with tokens [D, h, w, F]."""
    row_um = um * frame.native[0] / frame.prepared[0] * STRIDE / frame.fine[0]
    # Fine columns are prepared voxels, of about 31 µm; the slope counts in µm of both axes.
    jump = math.ceil(STEEPEST * 31.0 / row_um)
    own = np.arange(frame.native[1])
    columns = frame.to_native(np.arange(frame.shape[1]), 1)
    found = []
    for one in tokens:
        logits = decoder(one[None, None].float())
        score = logits[0, :, 0].log_softmax(1).transpose(1, 2).numpy()
        path = torch.from_numpy(best_path(score, jump, PATH_PENALTY * row_um))
        rows = surface_rows(logits, path[None, :, None])[0, :, 0].numpy()
        found.append([np.interp(own, columns, frame.to_native(line, 0)) for line in rows])
    return np.stack(found, axis=1)


# Fluid


def fluid(chosen: argparse.Namespace) -> None:
    with np.load(chosen.data / "chiu2015_dme_subjects1to5.npz") as file:
        shape = tuple(file["shape"])
        voxels = without_padding(file["bscans"], 255)
        unpacked = [np.unpackbits(file[f"fluid_grader{i}"])[: math.prod(shape)] for i in (1, 2)]
    graders = [masks.reshape(shape).astype(bool) for masks in unpacked]
    eye = np.arange(len(voxels)) // 11 + 1
    spacing_mm = (0.12, 0.00387, 0.0115)
    sides = [np.flatnonzero(eye <= 3), np.flatnonzero(eye > 3)]

    def scores(masks: np.ndarray) -> list[list[float]]:
        """Dice with both graders: pooled over all B-scans, then of eyes 1 to 5."""
        parts = [np.arange(len(voxels)), *(np.flatnonzero(eye == e) for e in range(1, 6))]
        return [[dice(masks[part], grader[part]) for part in parts] for grader in graders]

    def of_tokens(encoder: Encoder, embed: Embed) -> list[list[float]]:
        tokens, frame = tokens_of(voxels, spacing_mm, encoder, embed, ROWS_OF_FLUID)
        at = [frame.to_native(np.arange(n), axis) for axis, n in enumerate(frame.shape)]
        # Between the graders: what one of them marks counts half.
        both = np.mean(graders, axis=0, dtype=np.float32)
        target = torch.from_numpy(np.stack([sampled(one, at) for one in both]))
        back = [frame.to_fine(np.arange(n), axis) for axis, n in enumerate(frame.native)]
        found = np.zeros(shape, bool)
        for train, test in (sides, sides[::-1]):
            known = target[train]
            decoder = fitted(
                tokens[train], ROWS_OF_FLUID, 1, 1, chosen.steps,
                lambda logits, at, known=known: mask_loss(logits, known[at][:, None, None]),
            )  # fmt: skip
            with torch.inference_mode():
                for i in test:
                    found[i] = sampled(decoder(tokens[i][None, None].float())[0, 0, 0].numpy(), back) > 0
        return scores(found)

    folder, common = chosen.out / "fluid", ("fluid", 1, chosen.steps)
    found = {}
    for name, (encoder, embed) in arms_of(chosen).items():
        found[name] = once(folder, (*common, key_of(encoder, embed)), functools.partial(of_tokens, encoder, embed))
        say(f"{name}: {found[name]}")

    def packaged() -> list[list[float]]:
        return scores(np.isin(load_finder().find(Volume(voxels, spacing_mm)).lesions, (1, 2)))

    found["packaged segmenter"] = once(folder, ("packaged",), packaged)
    found["the other grader"] = [scores(graders[1])[0], scores(graders[0])[1]]
    table = ["| Dice with grader 1, grader 2 | pooled | 1 | 2 | 3 | 4 | 5 |", "|---|---|---|---|---|---|---|"]
    for name, (one, other) in found.items():
        cells = [f"{a:.2f}, {b:.2f}".replace("0.", ".") for a, b in zip(one, other, strict=True)]
        table.append(f"| {name} | {' | '.join(cells)} |")
    report(chosen.out / "fluid.md", table)


def sampled(image: np.ndarray, at: Sequence[np.ndarray]) -> np.ndarray:
    """An image [H, W] at these rows and columns, linear in between, float32."""
    grid = np.meshgrid(*at, indexing="ij")
    return map_coordinates(image.astype(np.float32), grid, order=1, mode="nearest")


# Diagnoses

CLASSES = {"acontrol": "control", "amd": "amd", "dme": "dme", "retinal_vein_occlusion": "rvo"}
ICON = (slice(310, None), slice(0, 112))
"""Where the viewer drew an icon that shows how the scan lies: which eye, and which line of the protocol."""


def diagnoses(chosen: argparse.Namespace) -> None:
    import yardstick
    from octfm.catalog.catalog import Catalog
    from octfm.catalog.labels import read_labels
    from octfm.catalog.scan import scan
    from octfm.encoder.encoder import preprocessing_of
    from octfm.evaluation.cases import Target, make_cases, make_rounds
    from octfm.evaluation.probe import FOLDS
    from octfm.store.prepare import prepare
    from octfm.volume.preprocessing import Preprocessing
    from yardstick_questions import Question

    out = chosen.out / "diagnoses"
    masked(chosen.scans, chosen.groups, out / "masked")
    if not (out / "catalog").exists():
        scan(out / "masked", layouts=("line",), participant_from="{label}/{participant}-*").save(out / "catalog")
    catalog = Catalog.load(out / "catalog")
    encoders = dict(text.split("=", 1) for text in chosen.encoder)
    first = next(run for run in encoders.values() if not run.startswith(UNTRAINED))
    preprocessing = Preprocessing.recorded(preprocessing_of(first))
    store = out / f"prepared-{preprocessing.fingerprint()}"
    prepare(catalog, store, preprocessing, workers=1)
    rows = [(a.sop_instance_uid, a.participant_labels["label"]) for a in catalog.acquisitions]
    text = "".join(f"{uid}\t{name}\t{'control' if name == 'control' else 'ill'}\n" for uid, name in rows)
    write_whole(out / "labels.tsv", f"sop_instance_uid\tlabel\tstate\n{text}".encode())
    cohort = yardstick.Cohort("arms", store, out / "labels.tsv", encoders)
    layers = not chosen.without_layers
    settings = argparse.Namespace(out=out, pool=None, truth=False, layers=layers, bscans=None)
    arms, seen = yardstick.arms_of(cohort, settings)
    data, table, scores = arms[0].features, read_labels(cohort.labels), {}
    for target, name in (("label", "four classes"), ("state", "control or ill")):
        cases = make_cases(Target(target, target, "acquisition"), data, table)
        cases, rounds = make_rounds(cases, data, "k-fold", seen, False, FOLDS, chosen.seed)
        question = Question(name, cases, (("", tuple(rounds)),))
        scores[name] = {arm.name: yardstick._kept(out / "scores", question, arm, chosen) for arm in arms}
        say(", ".join(f"{arm} {draws[0].estimate:.3f}" for arm, draws in scores[name].items()))
    found = yardstick.results({cohort.name: scores}, list(encoders))
    groups = len(np.unique(data.participant))
    facts = [f"{len(data.acquisition)} B-scans of {groups} patient groups; macro AUROC, 95 % intervals by group."]
    write_whole(chosen.out / "diagnoses.json", json.dumps(found, indent=1).encode())
    report(chosen.out / "diagnoses.md", yardstick.table(found, facts).splitlines())


def masked(scans: Path, groups: Path, out: Path) -> None:
    """Write every usable B-scan without its icon as OUT/class/group-name.png."""
    if out.exists():
        return
    files = {(path.parent.name, path.name): path for path in scans.glob("*/*/*")}
    partial, known = out.with_name("masked.partial"), set()
    with groups.open(newline="") as file:
        for row in csv.DictReader(file):
            if row["label_conflict"] != "0" or row["md5"] in known:
                continue
            known.add(row["md5"])
            image = np.array(Image.open(files[row["class"], row["file"]]).convert("L"))
            image[ICON] = 0
            place = partial / CLASSES[row["class"]] / f"{row['group']}-{Path(row['file']).stem}.png"
            place.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(place)
    partial.rename(out)


def icons(chosen: argparse.Namespace) -> None:
    """Every 23rd line scan with and without its icon: whether the tissue band is sure, and how far Bruch's membrane
    lies from that of the other; with `--as-is` searched as if the icon were image."""
    sure, off_um = np.zeros(2, int), []
    for path in sorted(chosen.scans.glob("**/*.jpg"))[::23]:
        image = np.array(Image.open(path).convert("L"))
        without = image.copy()
        without[ICON] = 0
        if (rows := retina_rows(without[None])) is None:
            continue
        spacing = spacing_of(axial_mm([rows]), (1, *image.shape))
        both = [Volume(each[None], spacing) for each in (image, without)]
        found = [find_tissue((each if chosen.as_is else searchable(each)).voxels, spacing) for each in both]
        sure += [each.confident for each in found]
        off_um.append(1000 * spacing[1] * np.abs(found[0].bm - found[1].bm).mean())
    far = int((np.array(off_um) > 20).sum())
    say(f"{len(off_um)} line scans: sure bands {sure[0]}, without icon {sure[1]}; BM more than 20 um apart in {far}")


def report(file: Path, table: Sequence[str]) -> None:
    text = "\n".join(table) + "\n"
    write_whole(file, text.encode())
    say(text)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = arguments.add_subparsers(required=True)
    for part in (diagnoses, lines, fluid):
        own = parts.add_parser(part.__name__)
        own.set_defaults(part=part)
        own.add_argument("--encoder", action="append", required=True, metavar="NAME=RUN", help="or untrained:N; repeat")
        own.add_argument("--out", type=Path, required=True)
        if part is diagnoses:
            own.add_argument("--scans", type=Path, required=True, help="the folder splitedMulticlass")
            own.add_argument(
                "--groups", type=Path, required=True, help="table of file, class, group, md5, label_conflict"
            )
            own.add_argument("--without-layers", action="store_true", help="do not measure layers (minutes, once)")
            own.add_argument("--resamples", type=int, default=2000)
            own.add_argument("--seed", type=int, default=0, help="of folds and resamples")
        else:
            own.add_argument("--data", type=Path, required=True, help="folder of real scans, as OCTFM_REAL_DATA")
            own.add_argument("--steps", type=int, default=250)
        if part is lines:
            own.add_argument("--every", type=int, default=2, help="of the volume's B-scans")
    own = parts.add_parser(icons.__name__)
    own.set_defaults(part=icons)
    own.add_argument("--scans", type=Path, required=True, help="the folder splitedMulticlass")
    own.add_argument("--as-is", action="store_true", help="search as if the icon were image")
    chosen = arguments.parse_args()
    chosen.part(chosen)


if __name__ == "__main__":
    main()
