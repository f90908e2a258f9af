"""Networks of a run, optimizer, step and run state, which a checkpoint saves and a rollback restores."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octfm.errors import CheckpointError, ConfigError
from octfm.models.objectives.objective import Objective
from octfm.models.token_map import token_grid
from octfm.models.vit3d import TokenGrid, VisionTransformer3D
from octfm.pretraining.initial_weights import begin_with, read_initial
from octfm.pretraining.run_state import RunState
from octfm.pretraining.settings import PretrainConfig
from octfm.run import checkpoint, shards
from octfm.run.optimizers import no_moments
from octfm.run.runtime import Runtime
from octfm.version import __version__
from octfm.volume.preprocessing import Preprocessing

ENGINE = ("fused", "foreach", "capturable")
"""Optimizer settings that depend on the device, not on the run."""


def grid_of(preprocessing: Preprocessing, patch_size: tuple[int, int, int]) -> TokenGrid:
    """Token grid of volumes prepared this way."""
    shape = token_grid(preprocessing.image_size, patch_size)
    z, y, x = (p * mm for p, mm in zip(patch_size, preprocessing.target_spacing, strict=True))
    return TokenGrid(shape, (z, y, x))


def build_objective(config: PretrainConfig, preprocessing: Preprocessing) -> Objective:
    """The networks of a run at the weights that its seed draws; leaves torch's generator as it was. ConfigError if the
    objective builds none."""
    settings, grid = config.objective, grid_of(preprocessing, config.model.patch_size)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.seed)
        model = settings.build(config.model, config.predictor, grid)
    if not isinstance(model, Objective) or not isinstance(getattr(model, "encoder", None), VisionTransformer3D):
        got = f"a {type(model).__name__}" + " without one" * isinstance(model, Objective)
        raise ConfigError(
            f"objective {settings.name}: build returned {got}, expected an Objective with an encoder; derive its "
            "networks from Objective and set self.encoder = VisionTransformer3D(model, grid)"
        )
    return model


def blueprint(config: PretrainConfig, preprocessing: Preprocessing) -> Objective:
    """The networks of a run without memory for their weights."""
    with torch.device("meta"):
        return build_objective(config, preprocessing)


def optimizer_groups(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """(decayed, not decayed) parameters: biases, norms and single tokens are not pulled towards zero. Networks named
    `target_…` are only averaged: weight decay would shrink them although they get no gradient."""
    trained = [p for name, p in model.named_parameters() if p.requires_grad and not name.startswith("target_")]
    return [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]


class Learner:
    """Networks, optimizer, next step and run state of one run; starts at the weights drawn from the seed."""

    def __init__(
        self,
        config: PretrainConfig,
        preprocessing: Preprocessing,
        runtime: Runtime,
        *,
        fresh: bool = True,
        began_with: str | None = None,
    ):
        """`fresh`: read `model.init`; false if a checkpoint will be restored, so that the file may be gone.
        `began_with`: digest of the weights that `model.init` named when the run began, None if it begins now. Raises
        CheckpointError if it names others now."""
        self.config, self.preprocessing, self.runtime, self.began_with = config, preprocessing, runtime, began_with
        self.lr, self.weight_decay, self.ema = (runtime.scalar() for _ in range(3))
        self.begin(fresh)

    @property
    def finished(self) -> bool:
        return self.step >= self.config.steps

    def begin(self, fresh: bool = True) -> None:
        """Initial weights, no optimizer state, step 0."""
        self.model = build_objective(self.config, self.preprocessing)
        self.before: tuple[dict[str, Any], ...] = ()
        """Participants of the runs whose weights came before (Initial.before)."""
        if fresh and self.config.model.init is not None:
            self.began_with, self.before = self.runtime.first(self._read_initial)
            # Only rank 0 has read the file, which may be the newest checkpoint of a run that goes on.
            self.runtime.share(self.model.state_dict().values())
        self.runtime.place(self.model)
        self.model.connect(self.runtime.sum_)
        self.decayed, self.free = optimizer_groups(self.model)
        self.tables_decay = False
        """Whether weight decay shrinks tables of positions; true only in runs begun by an octfm that did so."""
        self.optimizer = self.runtime.adamw(
            [{"params": self.decayed}, {"params": self.free}], self.lr, self.config.betas
        )
        self.step, self.state = 0, RunState()
        self.compiled = self.runtime.compiled(self.model)
        """The networks as steps that are not inspected call them."""

    def _read_initial(self) -> tuple[str, tuple[dict[str, Any], ...]]:
        """Fill the networks with what model.init names. Raises CheckpointError if the run began with other weights."""
        initial = read_initial(str(self.config.model.init), self.config)
        begin_with(initial, self.model)
        if self.began_with not in (None, initial.digest):
            init = self.config.model.init
            of_run = Path(initial.named).is_file() and initial.named != init
            with_it = f" with a copy of {initial.named} as model.init, since a run deletes old checkpoints"
            raise CheckpointError(
                f"model.init={init}: holds other weights now ({initial.named}) than this run began with; put those "
                f"back, or begin a new run in another --out{with_it * of_run}"
            )
        return initial.digest, initial.before

    @property
    def trained(self) -> list[Tensor]:
        return self.decayed + self.free

    @property
    def pulled(self) -> list[Tensor]:
        """Parameters that weight decay shrinks."""
        # A row of a table of positions moves only when its token is kept, so decay would erase rare places.
        tables = {id(p) for name, p in self.model.named_parameters() if name.endswith(".position")}
        return [p for p in self.decayed if self.tables_decay or id(p) not in tables]

    @property
    def micro_batch(self) -> int:
        """Volumes per forward pass of this process: at most what memory allowed, in a size that divides its share."""
        data, devices = self.config.data, self.runtime.devices
        if not self.state.micro_batch:
            return data.per_device_batch_size * devices
        most = min(self.state.micro_batch, data.per_device_batch_size)
        share = data.global_batch_size // self.runtime.replicas
        return devices * max(size for size in range(1, most + 1) if share % size == 0)

    def set_rates(self, lr: float, weight_decay: float, ema: float) -> None:
        """Set the rates of the next update; called before every one, so that none is forgotten (F2)."""
        for tensor, value in ((self.lr, lr), (self.weight_decay, weight_decay), (self.ema, ema)):
            self.runtime.set(tensor, value)
        for group in self.optimizer.param_groups:
            # Decay is applied by `update`: the optimizer would take it as a constant.
            group.update(lr=self.lr, weight_decay=0.0)

    @torch.no_grad()
    def update(self, made: Tensor) -> None:
        """One step of AdamW (arXiv:1711.05101) and of the average; if `made` is false, the kernels change nothing."""
        # Reading `made` waits for the device, so only objectives that gather statistics do it.
        if self.config.objective.gathers and not made:
            self.model.discard_step()
        rate = self.optimizer.param_groups[0]["lr"]
        keep = torch.where(made, 1 - rate * self.weight_decay, torch.ones_like(self.lr))
        torch._foreach_mul_([self.runtime.local(p.detach()) for p in self.pulled], keep)
        self.optimizer.found_inf = (~made).float()  # pyright: ignore[reportAttributeAccessIssue]  (what GradScaler sets)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.update_target(torch.where(made, self.ema, torch.ones_like(self.ema)))

    def whole(self) -> Objective:
        """The networks with all weights on this rank, copied if they are sharded; all ranks must call it."""
        if not self.runtime.sharded:
            return self.model
        copy = build_objective(self.config, self.preprocessing).to(self.runtime.device)
        copy.load_state_dict({name: self.runtime.whole(tensor) for name, tensor in self.model.state_dict().items()})
        return copy

    def content(self, record: dict[str, Any], fingerprint: str, participants: dict[str, Any]) -> dict[str, Any]:
        """All that resuming, embedding and evaluation need, for a checkpoint. `record`: the run's run.json."""
        optimizer = self.optimizer.state_dict()
        # As torch's own AdamW would store them: a number for the rate, and the decay that `update` applies by itself.
        for group, decay in zip(optimizer["param_groups"], (float(self.weight_decay), 0.0), strict=True):
            group.update(lr=float(group["lr"]), weight_decay=decay)
        return {
            "model": self.model.state_dict(),
            "optimizer": optimizer,
            "state": self.state.to_dict(),
            "tables_decay": self.tables_decay,
            "config": self.config.model_dump(mode="json"),
            "preprocessing": self.preprocessing.model_dump(mode="json"),
            "fingerprint": fingerprint,
            "participants": participants,
            "git": record["git"],
            "environment": record["environment"],
            "octfm": __version__,
        }

    def restore(self, content: dict[str, Any] | None, source: Path) -> None:
        """Restore a checkpoint in place; all ranks must call it. `content` is what rank 0 has read of it."""
        if self.runtime.sharded:
            content = shards.load_rest(source) if source.is_dir() else checkpoint.load(source)

        def load_tensors() -> tuple[int, dict[str, Any], bool, tuple[dict[str, Any], ...]]:
            assert content is not None
            try:
                if self.runtime.sharded:
                    self._check_shapes(content["model"] or shards.shapes(source))
                else:
                    self.model.load_state_dict(content["model"])
                    # load_state_dict also restores the kernels that the saving machine had chosen.
                    own = [{name: group[name] for name in ENGINE} for group in self.optimizer.param_groups]
                    self.optimizer.load_state_dict(content["optimizer"])
                    for group, kernels in zip(self.optimizer.param_groups, own, strict=True):
                        group.update(kernels)
            except (RuntimeError, ValueError) as error:
                # torch names the network first, and the tensor in the second line.
                lines = [line.strip() for line in str(error).splitlines() if line.strip()]
                raise CheckpointError(
                    f"{source}: its weights do not fit the networks of this config "
                    f"({lines[min(1, len(lines) - 1)][:200]}); "
                    "settings that change shapes cannot be overridden: restore them, or choose another --out"
                ) from None
            before = tuple(content["participants"].get("before", ()))
            return content["step"], content.get("state", {}), content.get("tables_decay", True), before

        self.step, state, self.tables_decay, self.before = self.runtime.first(load_tensors)
        self.state = RunState.from_dict(state)
        if self.runtime.sharded:
            self._restore_shares(content or {}, source)
        elif self.runtime.first(lambda: bool(self.optimizer.state)):
            # Only rank 0 has read the file: the others need memory for what it sends them.
            self._make_moments()
            self.runtime.share(self.tensors().values())
        else:
            self.runtime.share(self.model.state_dict().values())
        self._require_moments(source)

    def _require_moments(self, source: Path) -> None:
        """Raise CheckpointError if the optimizer lost its moments: AdamW would then take huge first steps."""
        # The state keeps the losses of the last accepted updates, so at least as many were made.
        made, lost = len(self.state.losses), 0
        matrices = [p for p in self.model.encoder.parameters() if p.ndim == 2 and p.requires_grad]
        for p in matrices if made else ():
            state = self.optimizer.state.get(p, {})
            share = self.runtime.local(state["exp_avg_sq"]) if "exp_avg_sq" in state else None
            # Shares of a small matrix may be empty on some ranks.
            empty = share is not None and not share.numel()
            lost += share is None or float(state["step"]) < made or not (empty or bool(share.any()))
        if lost:
            raise CheckpointError(
                f"{source}: the optimizer's state is lost for {lost} of {len(matrices)} weight matrices of the "
                f"encoder, after {self.step} updates: going on would damage what was learned; move this checkpoint "
                "away, so that the run continues from the one before, or start another run with these weights "
                "(model.init)"
            )

    def tensors(self) -> dict[str, Tensor]:
        """Weights and optimizer moments by name; the tensors in use, not copies."""
        return shards.flat({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()})

    def _make_moments(self) -> None:
        """Allocate the state that AdamW creates at its first step, to be filled from a checkpoint."""
        for p in self.trained:
            if not self.optimizer.state[p]:
                self.optimizer.state[p] = no_moments(p, self.runtime.device)

    def _check_shapes(self, saved: dict[str, Any]) -> None:
        own = {name: tuple(t.shape) for name, t in self.model.state_dict().items()}
        for name, shape in own.items():
            found = saved.get(name)
            found = tuple(found.shape) if isinstance(found, Tensor) else found
            if found != shape:
                raise ValueError(f"{name}: expected {list(shape)}, found {list(found) if found else 'nothing'}")

    def _restore_shares(self, content: dict[str, Any], source: Path) -> None:
        if shards.has_moments(content, source):
            self._make_moments()
        else:
            self.optimizer.state.clear()
        if source.is_dir():
            shards.load_into(source, self.tensors(), self.runtime)
            return
        with torch.no_grad():
            for name, tensor in self.model.state_dict().items():
                self.runtime.fill(tensor, content["model"][name])
            for i, p in enumerate(self.trained):
                for name, tensor in self.optimizer.state[p].items():
                    self.runtime.fill(tensor, content["optimizer"]["state"][i][name])
