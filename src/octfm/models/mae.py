"""Masked autoencoding, the baseline without a teacher: the voxels of hidden tissue are predicted from the tokens that are seen."""

from math import prod

import torch
from torch import Tensor, nn

from octfm.models.objective import ObjectiveOutput, TokenIndex, distance
from octfm.models.predictor import Predictor, PredictorConfig, predictor_table
from octfm.models.vit3d import TokenGrid, VisionTransformer3D, ViTConfig, rotary, take_rotary, take_tokens

FLAT = 1e-6
"""Added to the variance of a patch, in squared units of normalised intensity: a patch without structure has nothing to predict."""


class MAE(nn.Module):
    """MAE (arXiv:2111.06377) on 3-D patches, as VideoMAE (arXiv:2203.12602): an encoder of visible tokens and a narrow decoder.

    Hidden tokens that are tissue are what the loss is about: by its own mean and deviation a patch of vitreous is speckle, which nobody can
    predict and which would outweigh the retina.
    """

    name = "mae"
    gathers = False
    target_encoder = None
    """Voxels are the goal, so there is no teacher."""

    def __init__(self, model: ViTConfig, predictor: PredictorConfig, grid: TokenGrid):
        super().__init__()
        self.encoder = VisionTransformer3D(model, grid)
        self.predictor = Predictor(predictor, model.width, prod(model.patch_size), model.activation_checkpointing)

    def forward(
        self, patches_BKP: Tensor, target_patches_BKP: Tensor, index: TokenIndex, context_weight: float | Tensor
    ) -> ObjectiveOutput:
        """Losses of normalised patches of the kept tokens. The encoder receives the context patches and nothing else.

        `target_patches_BKP` are the same voxels as they are to be predicted (without recolouring and noise).
        """
        encoder = self.encoder
        table = rotary(encoder.grid, index.kept, encoder.head_width) if encoder.config.positions == "rotary" else None
        context_index = torch.gather(index.kept, 1, index.context)
        seen = encoder(take_tokens(patches_BKP, index.context), context_index, take_rotary(table, index.context) if table else None)

        asked = torch.cat((index.context, index.target), dim=1)
        answer = self.predictor(seen, index.target.shape[1], predictor_table(self.predictor, encoder, table, index, asked))
        with torch.no_grad():
            wanted = own_contrast(take_tokens(target_patches_BKP, asked))
        num_context = index.context.shape[1]
        counted = tissue_first(index)
        context_goal, masked_goal = wanted[:, :num_context], take_tokens(wanted[:, num_context:], counted)
        context_loss_B = distance(self.name, answer[:, :num_context], context_goal)
        masked_loss_B = distance(self.name, take_tokens(answer[:, num_context:], counted), masked_goal)
        loss = masked_loss_B.mean() + context_weight * context_loss_B.mean()
        return ObjectiveOutput(loss, masked_loss_B, context_loss_B, masked_goal, context_goal, seen.detach(), index.context)

    def update_target(self, momentum: float | Tensor) -> None:
        """There is none."""

    def discard_step(self) -> None:
        """Nothing is gathered outside the weights."""


def own_contrast(patches_BMP: Tensor) -> Tensor:
    """Each patch by its own mean and standard deviation, in float32 (He et al. 2021, §4.1)."""
    values = patches_BMP.float()
    variance, mean = torch.var_mean(values, dim=-1, keepdim=True)
    return (values - mean) * (variance + FLAT).rsqrt()


def tissue_first(index: TokenIndex) -> Tensor:
    """int64 [B, T]: places within the targets where tissue is, in turn until there are T; all targets of a volume without tissue.

    As many for every volume, so that shapes stay fixed and a volume's loss does not depend on how much tissue another one has.
    """
    batch, count = index.target.shape
    everything = torch.arange(count, device=index.target.device).expand(batch, -1)
    if index.tissue is None:
        return everything
    tissue = torch.gather(index.tissue, 1, index.target)
    found = tissue.sum(1, keepdim=True)
    order = torch.argsort(tissue.int(), dim=1, descending=True, stable=True)
    return torch.where(found > 0, torch.gather(order, 1, everything % found.clamp_min(1)), everything)
