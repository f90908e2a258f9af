"""Train a LayerNet on streamed phantoms: `make weights`. No file is read and no patient's image is involved.

Every batch is a function of (seed, step), and the state is saved whole, so a stopped training resumes bit for bit on
the same processor with the same number of threads.
"""

import argparse
import ast
import copy
import functools
import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from octfm.io.location import write_whole
from octfm.layers.finder import LayerFinder
from octfm.models.layer_net import (
    ASCAN_UM,
    MASKS,
    ROW_UM,
    SURFACES,
    LayerNet,
    LayerNetConfig,
    in_channels_last,
    layer_loss,
    standardise,
)
from octfm.phantom.native.bscans import SURFACES as DRAWN
from octfm.phantom.native.bscans import Labelled
from octfm.phantom.native.outer_retina import DETACHMENT
from octfm.phantom.native.stream import CONDITIONS, Stream
from octfm.phantom.pathology import LESIONS

HEIGHT, WIDTH = 512, 160
"""Rows and A-scans of a crop."""
IMAGES, CROPS = 2, 2
"""Images per step, and crops of each."""
LR, DECAY, EMA = 2e-3, 0.35, 0.995
"""Peak learning rate, share of the steps over which it falls to 0, and the average's memory of earlier weights."""
VALUES = (*(LESIONS[name] for name in MASKS[:3]), DETACHMENT)
FLUID = ("dme", "detachment", "neovascular_amd", "central_serous", "vein_occlusion", "mixed")
"""Conditions drawn three times as often as the others, and those of CYSTIC seven times: lesions are rare in pixels."""
CYSTIC = ("dme", "vein_occlusion")
FACTS = {
    "about": "Nine retinal surfaces, fluid, drusen and detachments in single B-scans of any scanner",
    "licence": "Apache-2.0",
    "trained_on": "synthetic B-scans only (octfm.phantom.native); no patient's image. The appearance of phantoms was "
    "set with published values and with statistics of real development scans: one Spectralis volume with AMD "
    "(MedVisBonn, eyepy), five Spectralis eyes with diabetic macular oedema (Chiu et al. 2015)",
    "limits": "Research use only; not a medical device, no clearance or CE mark; not for diagnosis, treatment or "
    "monitoring. Inner layers are experimental. Not measured in children or high myopia",
}
"""Of the model card of weights that are made here."""
PACKAGE = Path(__file__).parent.parent
CODE = ("phantom/**/*.py", "models/layer_net.py", "layers/training.py")
"""What decides the weights, within PACKAGE."""


@functools.cache
def code_digest(folder: Path) -> str:
    """SHA-256 of CODE in the package's folder, without comments and docstrings: states of one training must be of
    one."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in CODE for path in folder.glob(pattern)):
        tree = ast.parse(path.read_bytes())
        for node in ast.walk(tree):
            if isinstance(body := getattr(node, "body", None), list):
                node.body = [part for part in body if not _is_text(part)] or [ast.Pass()]  # pyright: ignore[reportAttributeAccessIssue]
        digest.update(f"{path.relative_to(folder).as_posix()}\n{ast.unparse(tree)}\n".encode())
    return digest.hexdigest()


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def stream_of(seed: int) -> Stream:
    return Stream(
        seed,
        ascan_um=(0.8 * ASCAN_UM, 1.2 * ASCAN_UM),
        row_um=ROW_UM,
        conditions=(*CONDITIONS, *FLUID * 2, *CYSTIC * 4),
    )


def crop(image: Labelled, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A crop of the first B-scan, mirrored half of the time: voxels [H, W], rows [S, W], lesions [H, W]."""
    voxels, lesions = image.voxels[0].astype(np.float32), image.lesions[0]
    rows = image.surfaces[[DRAWN.index(name) for name in SURFACES], 0]
    if rng.random() < 0.5:
        voxels, rows, lesions = voxels[:, ::-1], rows[:, ::-1], lesions[:, ::-1]
    height, width = voxels.shape
    left, shown = int(rng.integers(max(width - WIDTH, 0) + 1)), [value for value in VALUES if (lesions == value).any()]
    if shown and rng.random() < 0.75:  # through one of the lesions, each kind as often
        through = np.nonzero((lesions == rng.choice(shown)).any(axis=0))[0]
        left = int(np.clip(rng.choice(through) - rng.integers(WIDTH), 0, max(width - WIDTH, 0)))
    columns = slice(left, left + WIDTH)
    shift = int(rng.integers(min(0, HEIGHT - height), max(0, HEIGHT - height) + 1))
    first, skipped = max(0, shift), max(0, -shift)
    count, found = min(HEIGHT - first, height - skipped), min(WIDTH, width)
    out, mask = np.zeros((HEIGHT, WIDTH), np.float32), np.zeros((HEIGHT, WIDTH), np.uint8)
    lines = np.full((len(SURFACES), WIDTH), np.nan, np.float32)
    out[first : first + count, :found] = voxels[skipped : skipped + count, columns]
    mask[first : first + count, :found] = lesions[skipped : skipped + count, columns]
    lines[:, :found] = rows[:, columns] + shift
    _blacken(out, lines, mask, rng)
    return out, lines, mask


def _blacken(voxels: np.ndarray, rows: np.ndarray, lesions: np.ndarray, rng: np.random.Generator) -> None:
    """Blacken, in place, what averaging of shifted frames leaves empty in exported B-scans: in some a wedge at the top
    or the bottom, in some a strip at one side."""
    row, column = np.ogrid[:HEIGHT, :WIDTH]
    empty = np.zeros((HEIGHT, WIDTH), bool)
    if rng.random() < 0.15:
        edge = rng.uniform(0, 80) + rng.uniform(-0.3, 0.3) * column
        empty |= row < edge if rng.random() < 0.5 else row > HEIGHT - 1 - edge
    if rng.random() < 0.1:
        strip = column < rng.integers(1, 13)
        empty |= strip if rng.random() < 0.5 else strip[:, ::-1]
    voxels[empty], lesions[empty] = 0, 0
    at = np.clip(np.rint(np.nan_to_num(rows)), 0, HEIGHT - 1).astype(np.intp)
    rows[np.isfinite(rows) & empty[at, column]] = np.nan


def batch(stream: Stream, step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Images [B, 1, H, W], rows [B, S, W] and masks [B, M, H, W] of one step."""
    crops = []
    for place in range(IMAGES * step, IMAGES * (step + 1)):
        image = stream(place)
        crops += [crop(image, np.random.default_rng([stream.seed, 5, place, use])) for use in range(CROPS)]
    voxels, rows, lesions = (np.stack(parts) for parts in zip(*crops, strict=True))
    masks = np.stack([lesions == value for value in VALUES], axis=1).astype(np.float32)
    images = standardise(torch.from_numpy(voxels[:, None]))
    return images.to(memory_format=torch.channels_last), torch.from_numpy(rows), torch.from_numpy(masks)


class LayerTraining:
    """Weights, their running average and the optimizer, after `step` updates."""

    def __init__(self, steps: int, seed: int, config: LayerNetConfig | None = None):
        torch.manual_seed(seed)
        # Now: files may change while this runs.
        self.code = code_digest(PACKAGE)
        self.steps, self.stream, self.step = steps, stream_of(seed), 0
        self.network = in_channels_last(LayerNet(config))
        self.average = copy.deepcopy(self.network).requires_grad_(False)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), lr=LR, weight_decay=0.01)

    def update(self) -> float:
        """One update; its loss."""
        return self.learn(*batch(self.stream, self.step))

    def learn(self, images: Tensor, rows: Tensor, masks: Tensor) -> float:
        """An update with this batch; its loss."""
        step = self.step
        rate = LR * min(1.0, (step + 1) / 100) * min(1.0, (self.steps - step) / (DECAY * self.steps))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = layer_loss(self.network(images), rows, masks)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        memory = min(EMA, (step + 1) / (step + 20))
        with torch.no_grad():
            for mean, now in zip(self.average.parameters(), self.network.parameters(), strict=True):
                mean.lerp_(now, 1 - memory)
        self.step += 1
        return float(loss.detach())

    def save(self, path: Path) -> None:
        """Write the whole state; the file is replaced at once or not at all."""
        content = {
            "code": self.code,
            "step": self.step,
            "steps": self.steps,
            "seed": self.stream.seed,
            "network": self.network.state_dict(),
            "average": self.average.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }
        buffer = io.BytesIO()
        torch.save(content, buffer)
        write_whole(path, buffer.getvalue())

    def restore(self, path: Path) -> None:
        """Go on from a state. Raises ValueError if it is one of another seed or length, or of other code."""
        content = torch.load(path, weights_only=True)
        if (content["steps"], content["seed"]) != (self.steps, self.stream.seed):
            raise ValueError(
                f"{path}: begun with seed {content['seed']} for {content['steps']} steps; repeat them, "
                "or choose another --out"
            )
        if (code := content["code"]) != self.code:
            raise ValueError(
                f"{path}: begun with other code of phantoms, network or training ({code[:12]}, this is "
                f"{self.code[:12]}), so the same seed would make other weights; go back to the octfm that began it, or "
                "choose another --out"
            )
        self.network.load_state_dict(content["network"])
        self.average.load_state_dict(content["average"])
        self.optimizer.load_state_dict(content["optimizer"])
        self.step = content["step"]


def from_state(path: Path) -> LayerFinder:
    """The averaged weights of a training, with all masks."""
    content = torch.load(path, weights_only=True)
    network = LayerNet()
    network.load_state_dict(content["average"])
    return LayerFinder(network, f"step {content['step']}")


def write_weights(network: LayerNet, folder: Path, name: str, facts: dict) -> Path:
    """NAME.safetensors and NAME.json, which holds `facts`, the channels and the SHA-256 of the weights."""
    from safetensors.torch import save

    weights = save({key: tensor.contiguous() for key, tensor in network.state_dict().items()})
    known = {"sha256": hashlib.sha256(weights).hexdigest(), "channels": list(network.config.channels)}
    write_whole(folder / f"{name}.safetensors", weights)
    write_whole(folder / f"{name}.json", (json.dumps(facts | known, indent=2) + "\n").encode())
    return folder / f"{name}.safetensors"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for the state and the weights")
    parser.add_argument("--steps", type=int, default=3400)
    parser.add_argument("--seed", type=int, default=11)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # the same sums in the same order wherever it runs
    training = LayerTraining(arguments.steps, arguments.seed)
    arguments.out.mkdir(parents=True, exist_ok=True)
    state = arguments.out / "state.pt"
    if state.exists():
        try:
            training.restore(state)
        except ValueError as error:
            sys.exit(str(error))
    losses = []
    while training.step < training.steps:
        losses.append(training.update())
        if training.step % 50 == 0 or training.step == training.steps:
            training.save(state)
            print(f"step {training.step}/{training.steps}  loss {np.mean(losses[-50:]):.3f}", flush=True)
    made = f"trained by `make weights`, {training.steps:,} steps with seed {arguments.seed} on one thread"
    facts = FACTS | {"masks": list(MASKS), "made": made}
    print(write_weights(training.average, arguments.out, "layers", facts))


if __name__ == "__main__":
    main()
