"""What learns: networks, optimizer, the next step and the run's state; everything a checkpoint saves and a rollback restores."""

from typing import Any

import torch

from octfm import __version__
from octfm.config import load
from octfm.data.preprocessing import Preprocessing
from octfm.errors import CheckpointError
from octfm.training.inputs import build_objective, optimizer_groups
from octfm.training.run_state import RunState
from octfm.training.runtime import Runtime
from octfm.training.schedule import Schedule
from octfm.training.settings import PretrainConfig


class Learner:
    """Begins at the weights that the seed gives."""

    def __init__(self, config: PretrainConfig, preprocessing: Preprocessing, runtime: Runtime):
        self.config, self.preprocessing, self.runtime = config, preprocessing, runtime
        self.begin()

    def begin(self) -> None:
        """Initial weights, no optimizer state, step 0."""
        self.model = build_objective(self.config, self.preprocessing).to(self.runtime.device)
        self.decayed, self.free = optimizer_groups(self.model)
        self.optimizer = torch.optim.AdamW(
            [{"params": self.decayed}, {"params": self.free, "weight_decay": 0.0}],
            lr=Schedule(self.config.schedule, self.config.steps).lr(0),
            betas=self.config.betas,
            fused=True,
        )
        self.step, self.state = 0, RunState()

    @property
    def micro_batch(self) -> int:
        """Volumes per forward pass."""
        return self.state.micro_batch or self.config.data.per_device_batch_size

    def set_rates(self, lr: float, weight_decay: float) -> None:
        """What the next update uses: set anew for every one, so that no scheduler can forget it (F2)."""
        self.optimizer.param_groups[0].update(lr=lr, weight_decay=weight_decay)
        self.optimizer.param_groups[1].update(lr=lr)

    def content(self, record: dict[str, Any], fingerprint: str, participants: dict[str, Any]) -> dict[str, Any]:
        """Everything that resuming, embedding and an honest evaluation need; `record` is the run's run.json."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "state": self.state.to_dict(),
            "config": self.config.model_dump(mode="json"),
            "preprocessing": self.preprocessing.model_dump(mode="json"),
            "fingerprint": fingerprint,
            "participants": participants,
            "git": record["git"],
            "environment": record["environment"],
            "octfm": __version__,
        }

    def restore(self, content: dict[str, Any], source: object) -> None:
        """Go back or on to a checkpoint, in place."""
        try:
            self.model.load_state_dict(content["model"])
            self.optimizer.load_state_dict(content["optimizer"])
        except (RuntimeError, ValueError) as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            raise CheckpointError(
                f"{source}: its weights do not fit the networks of this config ({lines[min(1, len(lines) - 1)][:200]}); "
                "settings that change shapes cannot be overridden: restore them, or choose another --out"
            ) from None
        self.step, self.state = content["step"], RunState.from_dict(content.get("state", {}))


def config_of(content: dict[str, Any]) -> PretrainConfig:
    """The config stored in a checkpoint."""
    return load(PretrainConfig, content["config"])
