"""Checks of a tiny copy of the objective: no leak of targets, a moving teacher, content learned (F11)."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from octfm.display import number
from octfm.errors import ConfigError
from octfm.models.objectives.objective import Objective, ObjectiveOutput, View
from octfm.models.token_map import token_map
from octfm.models.vit3d import TokenIndex, normalise, take_patches
from octfm.pretraining.inputs import generators, make_inputs, token_index
from octfm.pretraining.learner import build_objective, optimizer_groups
from octfm.pretraining.masks import sample_masks
from octfm.pretraining.monitors.feed import masks_repeat
from octfm.pretraining.preflight.check import Check, fail, passed, warn
from octfm.pretraining.preflight.data import spread
from octfm.pretraining.preflight.tokens import PREFLIGHT_STREAM
from octfm.pretraining.schedule import Schedule
from octfm.pretraining.settings import PretrainConfig
from octfm.run.runtime import Runtime
from octfm.store.loader import Batch, batch_of
from octfm.store.store import Store

VOLUMES, TOKENS = 4, 48
OVERFIT_STEPS, OVERFIT_LR = 200, 6e-3
OBSERVED = ("masked_goal_BTD", "context_goal_BCD", "features_BMD")
"""What the monitors measure of a step's output: nothing of it may be trained."""
CONTENT_RISE, CLEAR_RISE = 0.05, 0.3
"""Relative rise of the loss with another volume's targets: the least that passes, and what ends the check early."""

HOST = Runtime(torch.device("cpu"))


def integrity(config: PretrainConfig, store: Store, train_rows: np.ndarray) -> Iterator[Check]:
    """The gradient and teacher checks, in a fraction of a second. Raises ConfigError for an objective that returns
    something else than an ObjectiveOutput, or a loss without a gradient."""
    tiny = _tiny(config)
    model = build_objective(tiny, store.preprocessing)
    batch = batch_of(store, train_rows[:1])
    voxels = torch.from_numpy(batch.voxels).unsqueeze(1).float().requires_grad_()
    view = _view(tiny, store, batch, voxels)
    inputs = [view] * config.objective.num_views, config.objective.context_loss
    output = model(*inputs)
    _require_output(config.objective.name, model, output)
    _require_repeatable(config.objective.name, model, *inputs)
    if model.target_encoder is None:  # a teacher that is trained has a check of its own
        _require_detached(config.objective.name, model(_without_gradient(inputs[0]), inputs[1]))
    output.loss.backward()
    name, hidden = "context is blind to targets", model.hidden_from_encoder(view.index)
    if hidden is None:
        yield passed(name, "this objective hides nothing from its encoder")
    elif leak := _gradient_at(voxels, torch.gather(view.index.kept, 1, hidden), tiny.model.patch_size):
        measured = f"gradient of the loss w.r.t. target voxels is {leak:.1e}"
        yield fail(name, measured, "the encoder sees the answers (F11)")
    else:
        yield passed(name, "gradient of the loss w.r.t. target voxels is exactly 0")
    if model.target_encoder is None:
        return
    if taught := sum(float(p.grad.abs().sum()) for p in model.target_encoder.parameters() if p.grad is not None):
        advice = "the target encoder must only be averaged (F11)"
        yield fail("teacher gets no gradient", f"gradient {taught:.1e}", advice)
    else:
        yield passed("teacher gets no gradient", "none")
    # One real update: what the optimizer changes in the encoder must arrive in the teacher.
    before = [p.clone() for p in model.target_encoder.parameters()]
    torch.optim.AdamW(_trained(model), lr=1e-2).step()
    model.update_target(Schedule(config.schedule, config.steps).ema(0))
    if any(not torch.equal(a, b) for a, b in zip(before, model.target_encoder.parameters(), strict=True)):
        yield passed("teacher moves", "it follows the first update")
    else:
        measured = "the target encoder is unchanged after an update"
        yield fail("teacher moves", measured, "its average is not being taken (F11)")


def views(config: PretrainConfig, store: Store, train_rows: np.ndarray) -> Check:
    """Context and teacher must see the same places: grey values may differ, geometry never (F11 c)."""
    # Without noise, which may reorder grey values but does not move them.
    still = config.model_copy(update={"augment": config.augment.model_copy(update={"noise": 0.0, "speckle": 0.0})})
    inputs = make_inputs(still, store.preprocessing, HOST, batch_of(store, train_rows[:1]))
    a, b = (x.flatten() for x in inputs.views[0][:2])
    # Gain and gamma keep the order of grey values; another place of a volume does not.
    order = torch.argsort(b)
    falls = float((a[order].diff() < -1e-4).float().mean())
    if falls > 0.01:
        measured = f"{falls:.0%} of grey values are ordered differently in the two views"
        advice = "context and target must be moved together; see pretraining/augment.py (F11)"
        return fail("views agree", measured, advice)
    return passed("views agree", "context and teacher see the same voxels, recoloured at most")


def masks_change(config: PretrainConfig, store: Store, train_rows: np.ndarray) -> Check:
    """A volume must get new masks each time it is used, so that all of its places are hidden at some time."""
    if masks_repeat(config, store, batch_of(store, train_rows[:1]), len(train_rows)):
        measured = "the masks of a volume are the same at every step or in every epoch"
        advice = "the same places would be hidden for ever and the others never learned; report this as a bug"
        return fail("masks change", measured, advice)
    return passed("masks change", "a volume has other masks whenever it comes")


def validation_masks(config: PretrainConfig, store: Store, validation_rows: np.ndarray) -> list[Check]:
    """Held-out volumes have real targets, so that a validation loss means something (F12)."""
    if not len(validation_rows):
        return []
    inputs = make_inputs(config, store.preprocessing, HOST, batch_of(store, validation_rows[:1]), augmented=False)
    # A volume with fewer image tokens than the budget repeats some; they count once.
    target, context = (len(np.unique(x[0])) for x in (inputs.masks.target, inputs.masks.context))
    distinct = len(np.unique(inputs.masks.kept[0]))
    if target < 0.5 * config.masks.mask_ratio * distinct or not context:
        measured = f"{target} of {distinct} tokens of a held-out volume are targets, {context} are context"
        advice = "a loss without targets is always 0, and the first epoch would look best (F12)"
        return [fail("validation masks", measured, advice)]
    return [passed("validation masks", f"{target} targets and {context} context tokens in a held-out volume")]


def overfit(config: PretrainConfig, store: Store, train_rows: np.ndarray) -> Check:
    """Train a tiny copy on four volumes; each volume's own targets must then fit better than another's.

    A model whose answers do not depend on what it sees (a constant, the mean of each position) fits both equally well,
    and so does one whose teacher gives the same targets for every volume. The first clear difference ends the check.
    The teacher is not updated meanwhile: on four volumes it may collapse in a few steps, unlike in the run."""
    name = "objective learns"
    rows = spread(store, train_rows, VOLUMES)
    if len(rows) < 2:
        measured = "one training volume: it cannot be tested whether answers depend on content"
        return warn(name, measured, "train on more volumes")
    tiny = _tiny(config)
    model = build_objective(tiny, store.preprocessing)
    batch = batch_of(store, rows)
    views = [_view(tiny, store, batch, torch.from_numpy(batch.voxels).unsqueeze(1))] * config.objective.num_views
    weight = config.objective.context_loss
    optimizer = torch.optim.AdamW(_trained(model), lr=OVERFIT_LR, weight_decay=0.0, fused=True)
    with torch.no_grad():
        output = model(views, weight)
    _require_one_each(config.objective.name, model, output, len(rows))
    first = own = float(output.loss)
    rise, steps = 0.0, 0
    # `not >` instead of `<=`: a rise of NaN must not end the loop as a clear one.
    while steps < OVERFIT_STEPS and not rise > CLEAR_RISE:
        # Looks at the losses eight times at most, because each look takes two forward passes.
        for _ in range(OVERFIT_STEPS // 8):
            optimizer.zero_grad(set_to_none=True)
            model(views, weight).loss.backward()
            optimizer.step()
        steps += OVERFIT_STEPS // 8
        own, other = _losses_with_shuffled_targets(model, views, weight)
        _require_positive(config.objective.name, own)
        rise = other / max(own, 1e-12) - 1
    if not np.isfinite(rise):
        measured = f"the loss of a tiny copy is {own} after {steps} steps"
        return fail(name, measured, "the objective is not differentiable as it stands")
    losses = f"loss {first:.3f} to {own:.3f}; targets of another volume raise it by {rise:.0%}"
    measured = f"{steps} steps on {len(rows)} volumes: {losses}"
    if rise < CONTENT_RISE:
        advice = "its answers do not depend on what it sees; check the teacher, masks and targets (F11)"
        return fail(name, measured, advice)
    return passed(name, measured)


def _require_output(name: str, model: Objective, output: object) -> None:
    """Raise ConfigError unless `output`, of one volume, is what a training step and its monitors expect."""
    if not isinstance(output, ObjectiveOutput):
        raise ConfigError(
            f"objective {name}: its forward returned a {type(output).__name__}, expected an ObjectiveOutput"
        )
    if not isinstance(output.loss, Tensor):
        raise ConfigError(f"objective {name}: expected a loss that is a tensor, got {type(output.loss).__name__}")
    if output.loss.ndim or not output.loss.requires_grad:
        got = f"one of shape {list(output.loss.shape)}" if output.loss.ndim else "one without a gradient"
        raise ConfigError(
            f"objective {name}: expected a loss that is one number with a gradient, got {got}; compute it from "
            "masked_loss_B, and detach goals only (F3)"
        )
    _require_observed(name, output)
    _require_one_each(name, model, output, 1)
    _require_positive(name, float(output.masked_loss_B.detach()))


def _require_observed(name: str, output: ObjectiveOutput) -> None:
    """Raise ConfigError unless goals and features are numbers of three axes."""
    for what in OBSERVED:
        value = getattr(output, what)
        if not isinstance(value, Tensor) or value.ndim != 3 or not value.is_floating_point():
            got = f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
            raise ConfigError(
                f"objective {name}: {what}: expected floating-point numbers [volumes, tokens, channels], got {got}"
            )


def _require_detached(name: str, output: ObjectiveOutput) -> None:
    """Raise ConfigError if a goal or feature has a gradient although the voxels have none: then a network that is
    trained computes it, and could learn to be easy to predict."""
    for what in OBSERVED:
        if getattr(output, what).requires_grad:
            raise ConfigError(f"objective {name}: {what} carries a gradient of what is trained; detach it (F11)")


def _without_gradient(views: list[View]) -> list[View]:
    return [
        v._replace(patches_BKP=v.patches_BKP.detach(), target_patches_BKP=v.target_patches_BKP.detach()) for v in views
    ]


def _require_one_each(name: str, model: Objective, output: ObjectiveOutput, count: int) -> None:
    """Raise ConfigError unless losses and baselines are of each of `count` volumes."""
    per_volume = {
        "masked_loss_B": output.masked_loss_B,
        "context_loss_B": output.context_loss_B,
        "baseline(masked_goal_BTD)": model.baseline(output.masked_goal_BTD),
        "baseline(context_goal_BCD)": model.baseline(output.context_goal_BCD),
    }
    for what, value in per_volume.items():
        if not isinstance(value, Tensor) or value.shape != (count,) or not value.is_floating_point():
            got = type(value).__name__
            if isinstance(value, Tensor):
                got = str(value.dtype) if value.shape == (count,) else f"one of shape {list(value.shape)}"
            raise ConfigError(
                f"objective {name}: {what} of {number(count, 'volume')}: expected a tensor of shape [{count}], got "
                f"{got}; return a loss for each volume"
            )


def _require_positive(name: str, loss: float) -> None:
    if loss < 0:
        raise ConfigError(
            f"objective {name}: masked_loss_B is {loss:.3g}; expected 0 or more, since the monitors compare losses by "
            "their ratio: add the constant that makes a perfect answer 0, as 1 - cos instead of -cos"
        )


@torch.no_grad()
def _require_repeatable(name: str, model: Objective, views: list[View], weight: float) -> None:
    one, other = (float(model(views, weight).masked_loss_B) for _ in range(2))
    if abs(one - other) > 1e-4 * abs(one):
        raise ConfigError(
            f"objective {name}: its loss of the same volume is {one:.6g}, then {other:.6g}: forward draws random "
            "numbers, which a resumed run would not repeat; take dropout and the like out of it"
        )


def _tiny(config: PretrainConfig) -> PretrainConfig:
    """The same kind of networks, masks and objective at a size that trains in a second."""
    width, depth = 48, min(2, config.model.depth)
    budget = min(TOKENS, config.masks.budget or TOKENS)
    return config.model_copy(
        update={
            "model": config.model.model_copy(update={"width": width, "heads": 2, "depth": depth}),
            "predictor": config.predictor.model_copy(update={"width": 32, "heads": 1, "depth": 1}),
            "objective": config.objective.shrunk(depth),
            "masks": config.masks.model_copy(update={"budget": budget}),
        }
    )


def _trained(model: Objective) -> list[Tensor]:
    decayed, free = optimizer_groups(model)
    return decayed + free


def _gradient_at(voxels: Tensor, tokens: Tensor, patch: tuple[int, int, int]) -> float:
    """Largest gradient at a voxel of these tokens."""
    assert voxels.grad is not None
    return float(take_patches(voxels.grad, tokens, patch).abs().max())


def _view(config: PretrainConfig, store: Store, batch: Batch, voxels: Tensor) -> View:
    """Volumes of a batch at the same tokens, those of the first one's masks; voxels: [B, 1, D, H, W]."""
    pre, patch = store.preprocessing, config.model.patch_size
    maps = token_map(batch.band[:1], batch.valid[:1], pre.image_size, patch)
    masks = sample_masks(config.masks, maps, generators(config.seed, PREFLIGHT_STREAM, np.array([0])))
    index = TokenIndex(*(x.expand(len(batch), -1) for x in vars(token_index(HOST, masks)).values()))
    patches = normalise(take_patches(voxels, index.kept, patch), pre.intensity_mean, pre.intensity_std)
    labels = None if batch.labels is None else torch.from_numpy(batch.labels).unsqueeze(1)
    return View(patches, patches, index, None if labels is None else take_patches(labels, index.kept, patch))


@torch.no_grad()
def _losses_with_shuffled_targets(model: Objective, views: list[View], weight: float) -> tuple[float, float]:
    """Masked loss with each volume's own targets, and with those of the next volume."""
    shuffled = [
        view._replace(
            target_patches_BKP=view.target_patches_BKP.roll(1, 0),
            labels_BKP=view.labels_BKP.roll(1, 0) if view.labels_BKP is not None else None,
        )
        for view in views
    ]
    own, other = (model(x, weight).masked_loss_B for x in (views, shuffled))
    return float(own.mean()), float(other.mean())
