"""Cost of augmentation on the device, as a share of a training step: `python benchmarks/augment.py`.

A step is one micro-batch of `octfm pretrain` with the vit_s networks (384 x 12, bf16): augmentation, masks, patches,
forward, backward, AdamW and EMA. It alternates with variants of `make_inputs`, so that other load on the machine
affects all alike: without augmentation (as in validation), with the default augmentation (shift, contrast, gamma), with
the in-plane affine, and with affine, noise and speckle. The cost of augmentation is the difference from the variant
without. CPU seconds, medians over rounds.
"""

import argparse
import statistics
import time

import numpy as np
import torch

from octfm.pretraining.augment import AugmentConfig
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import Learner
from octfm.pretraining.settings import load_config
from octfm.run.runtime import start
from octfm.store.loader import Batch
from octfm.volume.preprocessing import Preprocessing

AFFINE = {"lateral_shift_mm": 0.3, "lateral_scale": 0.1, "axial_scale": 0.05, "tilt_deg": 5.0}
GRAIN = {"noise": 0.05, "speckle": 0.2}


def synthetic(size: tuple[int, int, int], volumes: int) -> Batch:
    """A batch of random voxels with a band of healthy retinal thickness."""
    rng = np.random.default_rng(0)
    d, h, w = size
    middle = h / 2 + rng.uniform(-0.05, 0.05, (volumes, d, w)) * h
    band = np.stack([middle - 0.15 * h, middle + 0.15 * h], 1).astype(np.float32)
    valid = np.stack([np.zeros((volumes, d, w)), np.full((volumes, d, w), h)], 1).astype(np.int16)
    index = np.arange(volumes)
    voxels = rng.integers(0, 256, (volumes, *size), dtype=np.uint8)
    return Batch(voxels, band, valid, index=index, position=index, laterality=("R",) * volumes)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--size", type=int, nargs=3, default=(32, 192, 192))
    arguments.add_argument("--batch", type=int, default=1)
    arguments.add_argument("--rounds", type=int, default=9)
    arguments.add_argument("--precision", default="bf16")
    chosen = arguments.parse_args()
    size = (chosen.size[0], chosen.size[1], chosen.size[2])
    preprocessing = Preprocessing(image_size=size, target_spacing=(0.188, 0.0104, 0.0312))
    config = load_config("vit_s", [f"precision={chosen.precision}", f"data.per_device_batch_size={chosen.batch}"])
    learner = Learner(config, preprocessing, start(chosen.precision, "cpu"))
    batch = synthetic(size, chosen.batch)
    learner.set_rates(1e-4, 0.05, 0.999)

    def step() -> None:
        inputs = make_inputs(config, preprocessing, learner.runtime, batch)
        with learner.runtime.autocast():
            output = learner.model(inputs.views, 0.5)
        output.loss.backward()
        learner.update(torch.tensor(True))
        learner.optimizer.zero_grad(set_to_none=True)

    def inputs_with(changes: dict[str, float], augmented: bool = True):
        own = config.model_copy(update={"augment": AugmentConfig(**changes)})
        return lambda: make_inputs(own, preprocessing, learner.runtime, batch, augmented)

    arms = {
        "step": step,
        "no augmentation": inputs_with({}, augmented=False),
        "default": inputs_with({}),
        "+ affine": inputs_with(AFFINE),
        "+ affine, noise, speckle": inputs_with(AFFINE | GRAIN),
    }
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for number in range(chosen.rounds + 1):
        for name, work in arms.items():
            # Short variants are repeated, so that one interruption does not dominate the measurement.
            repeats = 1 if name == "step" else 5
            begun = time.process_time()
            for _ in range(repeats):
                work()
            if number:
                seconds[name].append((time.process_time() - begun) / repeats)
    middle = {name: statistics.median(times) for name, times in seconds.items()}
    print(
        f"{list(size)} {chosen.precision}, {chosen.batch} volume(s), {chosen.rounds} rounds; "
        f"a step: {middle['step']:.3f} CPU s"
    )
    print(f"{'inputs':<26}{'ms':>8}{'of a step':>11}{'augmentation':>14}")
    for name, value in middle.items():
        if name != "step":
            added = value - middle["no augmentation"]
            print(f"{name:<26}{1000 * value:>8.1f}{value / middle['step']:>11.1%}{added / middle['step']:>14.1%}")


if __name__ == "__main__":
    main()
