"""Record the training step for many devices on a single one, as a StableHLO program that is never run.

Run as `python -m octfm.pretraining.preflight.tpu_record DIR`. The program works on global batches; arguments.json says
which of its arguments the compiler must split among the devices and which are replicated.
"""

# torch_xla is installed in an environment of its own (tests/xla).
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
from octfm.store.loader import batch_of_voxels
from octfm.volume.preprocessing import Preprocessing


@dataclass(frozen=True, eq=False)
class Recorder(XLARuntime):
    """One device in place of all of them, which keeps the ids of the tensors that a batch is made of."""

    split: set[int] = field(default_factory=set)

    def tensor(self, array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(np.ascontiguousarray(array)).to(self.device)
        self.split.add(torch_xla._XLAC._xla_get_tensor_id(tensor))
        return tensor

    def _sent(self, host: Tensor) -> Tensor:
        # A scalar goes through a list of one: XLA would make a bare 0 a constant of the program.
        return host.to(self.device) if host.ndim else host.reshape(1).to(self.device)[0]

    def place(self, model: nn.Module) -> None:
        model.to(self.device)


def record(config: PretrainConfig, preprocessing: Preprocessing, devices: int) -> tuple[str, dict[str, Any]]:
    """(program, {"split": whether each of its arguments is split along its first axis})."""
    config = config.model_copy(update={"masks": config.masks.heaviest})
    runtime = Recorder(torch_xla.device(), config.precision, devices=devices, steady=True)
    learner = Learner(config, preprocessing, runtime)
    learner.set_rates(1e-4, 0.05, 0.999)
    torch_xla.sync()  # initialisation is not part of the step
    # The program does not depend on voxel values; untouched pages of np.zeros take no memory.
    blank = np.zeros((config.data.global_batch_size, *preprocessing.image_size), np.uint8)
    micro_steps = accumulate(learner, batch_of_voxels(blank), 0.5, everything=True)
    outcome = judge(learner, micro_steps, runtime.clip(learner.trained, config.clip_grad_norm), Limits(1.0, 1.0, 1.0))
    movement = update(learner, outcome.made, inspect=True)
    # Everything that a step leaves behind must be a result, or the compiler would remove its computation.
    values = [x for part in (*micro_steps, outcome) for x in vars(part).values()]
    results = [x for x in (*learner.tensors().values(), *values, *movement.values()) if isinstance(x, Tensor)]
    arguments, _ = torch_xla._XLAC._get_tensors_xla_device_data_node(results)
    return xm.get_stablehlo(results), {"split": [argument in runtime.split for argument in arguments]}


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text("utf-8"))
    config, preprocessing = (
        PretrainConfig.model_validate(job["config"]),
        Preprocessing.model_validate(job["preprocessing"]),
    )
    program, arguments = record(config, preprocessing, job["devices"])
    (folder / "step.mlir").write_text(program, "utf-8")
    (folder / "arguments.json").write_text(json.dumps(arguments | {"devices": job["devices"]}), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
