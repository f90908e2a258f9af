"""Run state that must be saved, as it does not follow from the step: rollbacks, excluded volumes, micro-batch size."""

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from octfm.pretraining.monitors.health import HealthConfig


@dataclass(frozen=True)
class Rollback:
    """One return to an earlier checkpoint."""

    at: int
    """The step at which training went back."""
    to: int
    """The step from which it went on."""
    what: str


@dataclass(frozen=True)
class RunState:
    """Step s trains on the loader's batch s + offset, without excluded volumes, in micro-batches of `micro_batch`."""

    offset: int = 0
    """Batches that rollbacks skipped; batches before a rollback are not repeated after it."""
    excluded: tuple[str, ...] = ()
    """Keyed hashes of acquisitions that are no longer trained on."""
    suspects: tuple[str, ...] = ()
    """Keyed hashes of acquisitions whose loss was once not finite."""
    lr_scale: float = 1.0
    """Factor on the schedule's learning rate."""
    micro_batch: int | None = None
    """Volumes per forward pass, once memory ran out; None uses the config's."""
    skips: tuple[int, ...] = ()
    """Recent steps whose update was not made, because it might have damaged the weights."""
    doubts: tuple[int, ...] = ()
    """Recent steps at which features were collapsing."""
    faults: tuple[int, ...] = ()
    """Recent steps at which something was computed wrongly."""
    rollbacks: tuple[Rollback, ...] = ()
    losses: tuple[float, ...] = ()
    """Masked loss of the last updates, with which the next ones are compared."""
    grad_norms: tuple[float, ...] = ()
    """Gradient norm before clipping of the last updates."""
    ranks: tuple[float, ...] = ()
    """Effective rank of tissue tokens at the last inspections."""

    def healthy(self, step: int, config: HealthConfig) -> bool:
        """Whether a checkpoint with this state after `step` updates may be returned to."""
        # What happened long before it is still listed if nothing has happened since.
        recent = self.forget_before(step, config)
        return not (recent.skips or recent.doubts or recent.faults)

    def accept(self, loss: float, grad_norm: float, window: int) -> "RunState":
        """The state after an update."""
        return replace(self, losses=(*self.losses, loss)[-window:], grad_norms=(*self.grad_norms, grad_norm)[-window:])

    def with_rank(self, rank: float) -> "RunState":
        """The state after an inspection of the features."""
        return replace(self, ranks=(*self.ranks, rank)[-8:])

    def forget_before(self, step: int, config: HealthConfig) -> "RunState":
        """The state without events that happened too long before `step` to count."""
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
        # A checkpoint of another version may lack fields, which keep their defaults, or have more, which are dropped.
        known = {field.name: values[field.name] for field in fields(cls) if field.name in values}
        plain: dict[str, Any] = {n: tuple(v) if isinstance(v, (list, tuple)) else v for n, v in known.items()}
        names = [field.name for field in fields(Rollback)]
        plain["rollbacks"] = tuple(Rollback(**{n: back[n] for n in names}) for back in plain.get("rollbacks", ()))
        return cls(**plain)
