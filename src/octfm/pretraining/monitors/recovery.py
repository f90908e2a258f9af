"""Respond to a finding: skip the update, exclude a volume, roll back to a healthy checkpoint, or stop."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from octfm.errors import TrainingError
from octfm.pretraining.learner import Learner
from octfm.pretraining.monitors.health import HealthConfig
from octfm.pretraining.monitors.monitors import Finding
from octfm.pretraining.resume import healthy_before
from octfm.pretraining.run_state import Rollback, RunState
from octfm.run.folder import RunFolder

Action = Literal["skip", "exclude", "watch", "roll back", "stop"]


@dataclass(frozen=True)
class Response:
    """An action, and the run's state after it."""

    action: Action
    state: RunState
    sentence: str


def respond(
    config: HealthConfig, finding: Finding, step: int, state: RunState, names: Sequence[str], volumes: int
) -> Response:
    """Choose the action: skip suspect updates, and roll back after `max_skips` within `skip_window` steps.

    Volumes whose loss is not finite twice are excluded. Findings about code and features are acted upon when seen again
    within two inspections. `names`: keyed hashes of the finding's volumes; `volumes`: the number to train on."""
    state = state.forget_before(step, config)
    if finding.kind == "advice":
        return Response("watch", state, "training continues")
    if finding.kind == "code":
        state = replace(state, faults=(*state.faults, step))
        if len(state.faults) < 2 or config.on_fault == "warn":
            return Response("watch", state, "watching whether it persists")
        return Response(
            "stop", state, "neither another batch nor an older checkpoint helps: the code or its settings are wrong"
        )
    if finding.kind == "features":
        if state.faults:
            return Response("watch", state, "not rolling back: an older checkpoint does not fix the fault found before")
        state = replace(state, doubts=(*state.doubts, step))
        if len(state.doubts) < 2:
            return Response("watch", state, "watching whether it persists")
        return Response("roll back", state, "going back to the last healthy checkpoint")
    if not finding.damaging:
        again = [name for name in names if name in state.suspects and name not in state.excluded]
        suspects = tuple(dict.fromkeys((*state.suspects, *names)))
        state = replace(state, suspects=suspects, excluded=(*state.excluded, *again))
        most = max(1, config.max_excluded * volumes)
        # So many bad volumes are a fault of the store, and the rest would no longer be the cohort.
        if len(state.excluded) > most:
            return Response(
                "stop", state, f"{len(state.excluded)} of {volumes} volumes cannot be trained on; prepare them again"
            )
        if again:
            return Response("exclude", state, "no weight was changed; these volumes are excluded from now on")
        sentence = "no weight was changed"
        if len(suspects) > most:
            sentence += (
                f"; so far the loss of {len(suspects)} of {volumes} volumes was not finite: the run stops once more "
                f"than {most:.0f} have had one twice, so look at them now"
            )
        return Response("skip", state, sentence)
    state = replace(state, skips=(*state.skips, step))
    if len(state.skips) < config.max_skips:
        return Response(
            "skip", state, f"no weight was changed ({len(state.skips)} of {config.max_skips} before a rollback)"
        )
    return Response("roll back", state, f"{len(state.skips)} updates in {config.skip_window} steps were suspect")


def roll_back(learner: Learner, run: RunFolder, step: int, what: str) -> str:
    """Restore the last healthy checkpoint, skip the batches since, and return a sentence that says so.

    Healthy means written while no update was suspect, preferably `margin` steps before the first sign of trouble.
    Before the first checkpoint, training starts over. Raises TrainingError after `max_rollbacks` to the same one."""
    state, config = learner.state, learner.config.health
    first_sign = min((*state.skips, *state.doubts), default=step)
    content: dict[str, Any] | None = None

    def choose() -> Path | None:
        nonlocal content
        before = first_sign - config.margin
        found = healthy_before(run, before, config) or healthy_before(run, first_sign, config)
        if found is not None:
            path, content = found
            return path
        # Trouble before the first checkpoint was due: no healthy one can exist.
        if run.last_checkpoint() is None or first_sign <= learner.config.ckpt_every_steps:
            return None
        raise TrainingError(
            f"step {step + 1}: {what}; there is no healthy checkpoint from before step {first_sign + 1} to go back to"
        )

    # Rank 0 chooses, so that all ranks restore the same checkpoint.
    path = learner.runtime.first(choose)
    if path is not None:
        learner.restore(content, path)
    else:
        learner.begin()
    where = path.name if path is not None else "the initial weights"
    tries = [r for r in state.rollbacks if r.to == learner.step]
    if len(tries) >= config.max_rollbacks:
        reasons = ", ".join(f"{r.what} at step {r.at + 1}" for r in (*tries, Rollback(step, learner.step, what)))
        raise TrainingError(
            f"step {step + 1}: {what} again: training continued {len(tries)} times from step {learner.step} with other "
            f"batches and failed each time ({reasons}). Look at the volumes in metrics.jsonl. The same command with "
            f"schedule.base_lr={learner.config.schedule.base_lr / 2:g} --override goes on at half the learning rate, "
            f"with health.max_rollbacks={len(tries) + 2} --override with other batches, at most twice; "
            f"without either it stops again. Last healthy: {where}"
        )
    learner.state = replace(
        state,
        # The next update then takes the batch after the one that failed.
        offset=state.offset + step + 1 - learner.step,
        lr_scale=state.lr_scale * config.lr_factor,
        skips=(),
        doubts=(),
        faults=(),
        rollbacks=(*state.rollbacks, Rollback(step, learner.step, what)),
        # The history that belongs to the restored weights, not to the failed ones.
        losses=learner.state.losses,
        ranks=learner.state.ranks,
        grad_norms=learner.state.grad_norms,
    )
    scaled = f" at {learner.state.lr_scale:.2g} of the learning rate" if config.lr_factor < 1 else ""
    return f"went back to {where} ({learner.step} updates); batches up to step {step + 1} are not repeated{scaled}"
