"""What of a run cannot be a function of its step: a small value that travels in every checkpoint."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from octfm.pretraining.monitors.health import HealthConfig


@dataclass(frozen=True)
class Rollback:
    """One return to an earlier checkpoint."""

    at: int
    """The step that was not believed any more."""
    to: int
    """The step that training went on from."""
    what: str


@dataclass(frozen=True)
class RunState:
    """The batch of step s is the loader's batch s + offset, without the excluded volumes, in micro-batches of `micro_batch`."""

    offset: int = 0
    """Steps of data that were passed over: batches before a rollback are not repeated after it."""
    excluded: tuple[str, ...] = ()
    """Keyed hashes of acquisitions that are not trained on any more."""
    suspects: tuple[str, ...] = ()
    """Keyed hashes of acquisitions whose loss was not finite once."""
    lr_scale: float = 1.0
    """Factor on the schedule's learning rate."""
    micro_batch: int | None = None
    """Volumes per forward pass after memory ran out; None is the config's."""
    skips: tuple[int, ...] = ()
    """Recent steps whose update was not made because the weights were in doubt."""
    doubts: tuple[int, ...] = ()
    """Recent steps whose features were found to be collapsing."""
    faults: tuple[int, ...] = ()
    """Recent steps at which something was found not to be computed as it should be."""
    rollbacks: tuple[Rollback, ...] = ()
    losses: tuple[float, ...] = ()
    """Masked loss of the last accepted steps, which the next ones are measured against."""
    grad_norms: tuple[float, ...] = ()
    """Gradient norm before clipping of the last accepted steps."""

    ranks: tuple[float, ...] = ()
    """Effective rank of tissue tokens at the last looks."""

    @property
    def healthy(self) -> bool:
        """Whether a checkpoint of this moment is one to return to."""
        return not (self.skips or self.doubts or self.faults)

    def accept(self, loss: float, grad_norm: float, window: int) -> "RunState":
        """After an update that was made."""
        return replace(self, losses=(*self.losses, loss)[-window:], grad_norms=(*self.grad_norms, grad_norm)[-window:])

    def look(self, rank: float) -> "RunState":
        """After the features were looked at."""
        return replace(self, ranks=(*self.ranks, rank)[-8:])

    def forget_before(self, step: int, config: HealthConfig) -> "RunState":
        """What happened too long before `step` does not count any more."""
        looks = 2 * config.check_every_steps
        recent = {
            "skips": tuple(s for s in self.skips if s > step - config.skip_window),
            "doubts": tuple(s for s in self.doubts if s >= step - looks),
            "faults": tuple(s for s in self.faults if s >= step - looks),
        }
        return self if all(getattr(self, name) == kept for name, kept in recent.items()) else replace(self, **recent)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"rollbacks": [asdict(r) for r in self.rollbacks]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "RunState":
        plain: dict[str, Any] = {}
        for field in fields(cls):
            if field.name in values:
                value = values[field.name]
                plain[field.name] = tuple(value) if isinstance(value, (list, tuple)) else value
        plain["rollbacks"] = tuple(Rollback(**rollback) for rollback in plain.get("rollbacks", ()))
        return cls(**plain)
