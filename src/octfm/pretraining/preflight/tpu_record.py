"""Writes the training step as a program (StableHLO) for many devices, recorded on one: `python -m octfm.pretraining.preflight.tpu_record DIR`.

Nothing of it runs. The recording is of whole batches; which of the program's arguments are split among the devices, and which are whole
on all of them, is written beside it, for the compiler to divide the work by.
"""

# Its libraries live in an environment of their own.
# pyright: reportMissingImports=false

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch_xla
import torch_xla.core.xla_model as xm
from torch import Tensor, nn

from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors.limits import Limits
from octfm.pretraining.monitors.measure import update
from octfm.pretraining.settings import PretrainConfig
from octfm.pretraining.step import accumulate, judge
from octfm.run.runtime_xla import XLARuntime
from octfm.store.loader import Batch
from octfm.volume.preprocessing import Preprocessing


@dataclass(frozen=True, eq=False)
class Recorder(XLARuntime):
    """One device that stands for all of them and remembers what a batch was made of."""

    split: set[int] = field(default_factory=set)

    def tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        self.split.add(torch_xla._XLAC._xla_get_tensor_id(tensor))
        return tensor

    def _sent(self, host: Tensor) -> Tensor:
        # A scalar by way of a list: by itself a 0 would be a constant of the program.
        return host.to(self.device) if host.ndim else host.reshape(1).to(self.device)[0]

    def place(self, model: nn.Module) -> None:
        model.to(self.device)


def record(config: PretrainConfig, preprocessing: Preprocessing, devices: int) -> tuple[str, dict[str, Any]]:
    """(program, {"split": for each of its arguments whether it is, along its first axis})."""
    config = config.model_copy(update={"masks": config.masks.heaviest})
    runtime = Recorder(torch_xla.device(), config.precision, devices=devices, steady=True)
    learner = Learner(config, preprocessing, runtime)
    learner.set_rates(1e-4, 0.05, 0.999)
    torch_xla.sync()  # what was done so far is no part of a step
    done = accumulate(learner, blank_batch(preprocessing, config.data.global_batch_size), 0.5, everything=True)
    outcome = judge(learner, done, runtime.clip(learner.trained, config.clip_grad_norm), Limits(1.0, 1.0, 1.0))
    moved = update(learner, outcome.made, look=True)
    left = [x for found in (*done, outcome) for x in vars(found).values()]
    results = [x for x in (*learner.tensors().values(), *left, *moved.values()) if isinstance(x, Tensor)]
    arguments, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(results)
    return xm.get_stablehlo(results), {"split": [argument in runtime.split for argument in arguments]}


def blank_batch(preprocessing: Preprocessing, volumes: int) -> Batch:
    """Voxels with a tissue band in the middle; a program does not depend on what is in them."""
    (d, h, w), index = preprocessing.image_size, np.arange(volumes)
    surfaces = np.broadcast_to(np.array([0.4, 0.6, 0.0, 1.0], np.float32)[:, None, None] * h, (volumes, 4, d, w))
    # Zeros that take no memory until somebody writes to them.
    voxels = np.zeros((volumes, d, h, w), np.uint8)
    return Batch(
        voxels, surfaces[:, :2].copy(), surfaces[:, 2:].astype(np.int16), index, index, ("none",) * volumes, 0.0
    )


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    config, preprocessing = (
        PretrainConfig.model_validate(job["config"]),
        Preprocessing.model_validate(job["preprocessing"]),
    )
    program, arguments = record(config, preprocessing, job["devices"])
    (folder / "step.mlir").write_text(program)
    (folder / "arguments.json").write_text(json.dumps(arguments | {"devices": job["devices"]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
