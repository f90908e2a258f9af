"""Voxels of hidden tissue as prediction targets: normalised per patch, the same number of tokens for every volume."""

import torch
from torch import Tensor

from octfm.models.objectives.objective import squared_error
from octfm.models.vit3d import TokenIndex, take_tokens
from octfm.volume.volume import Shape3

FLAT = 1e-6
"""Added to the variance of a patch (in squared normalised intensity), so that a constant patch has a target of zero."""


def check_average(goal_average: Shape3, patch_size: Shape3, predicted: bool, name: str = "goal_average") -> None:
    """Raise ValueError unless blocks of `goal_average` voxels tile a patch and, if `predicted`, it has more than
    one."""
    if any(side % over for side, over in zip(patch_size, goal_average, strict=True)):
        raise ValueError(f"objective.{name} {list(goal_average)} must divide model.patch_size {list(patch_size)}")
    if predicted and goal_average == patch_size:
        raise ValueError(
            f"objective.goal_average {list(goal_average)} leaves one number per patch, which has no contrast to "
            "predict; halve it"
        )


def averaged(patches_BMP: Tensor, patch_size: Shape3, over: Shape3) -> Tensor:
    """Patches [B, M, P] averaged over blocks of `over` voxels, (B-scan, axial, lateral): [B, M, P / prod(over)].

    Speckle is independent between A-scans and cannot be predicted. Averaging it away leaves the layers to predict.
    """
    if over == (1, 1, 1):
        return patches_BMP
    (d, h, w), (od, oh, ow) = patch_size, over
    return patches_BMP.unflatten(-1, (d // od, od, h // oh, oh, w // ow, ow)).mean((-5, -3, -1)).flatten(-3)


def despeckled(patches_BMP: Tensor, patch_size: Shape3, over: Shape3) -> Tensor:
    """Patches [B, M, P] in which every voxel is replaced by the mean of its block (see `averaged`)."""
    if over == (1, 1, 1):
        return patches_BMP
    (d, h, w), (od, oh, ow) = patch_size, over
    blocks = averaged(patches_BMP, patch_size, over).unflatten(-1, (d // od, 1, h // oh, 1, w // ow, 1))
    return blocks.expand(*blocks.shape[:2], d // od, od, h // oh, oh, w // ow, ow).flatten(2)


def hidden_voxels(answer_BTP: Tensor, patches_BKP: Tensor, index: TokenIndex) -> tuple[Tensor, Tensor]:
    """Mean squared error [B] of the predicted voxels of hidden tissue, and the true ones [B, T, P].

    `answer_BTP`: predictions for the targets. `patches_BKP`: patches of the kept tokens, already averaged if answers
    are. Patches without tissue are left out: normalised by its own mean and deviation, a patch of vitreous is pure
    speckle, which cannot be predicted and would outweigh the retina.
    """
    counted = tissue_first(index)
    with torch.no_grad():
        goal = take_tokens(own_contrast(take_tokens(patches_BKP, index.target)), counted)
    return squared_error(take_tokens(answer_BTP, counted), goal), goal


def own_contrast(patches_BMP: Tensor) -> Tensor:
    """Each patch normalised by its own mean and standard deviation, in float32 (MAE, He et al., arXiv:2111.06377)."""
    values = patches_BMP.float()
    variance, mean = torch.var_mean(values, dim=-1, keepdim=True)
    return (values - mean) * (variance + FLAT).rsqrt()


def tissue_first(index: TokenIndex) -> Tensor:
    """int64 [B, T]: places among the targets of those with tissue, repeated in turn up to T; all targets of a volume
    without tissue.

    Every volume gets the same number, so that shapes are fixed and a volume's loss does not depend on how much tissue
    the others have.
    """
    batch, count = index.target.shape
    everything = torch.arange(count, device=index.target.device).expand(batch, -1)
    if index.tissue is None:
        return everything
    tissue = torch.gather(index.tissue, 1, index.target)
    found = tissue.sum(1, keepdim=True)
    order = torch.argsort(tissue.int(), dim=1, descending=True, stable=True)
    return torch.where(found > 0, torch.gather(order, 1, everything % found.clamp_min(1)), everything)
