"""What a summary learns: how thick layers and lesions of a phantom are, as seen from above.

Shape suffixes: B batch, K kept tokens, A parts x classes of a patch, C counted classes, D W parts of the en face plane,
G goals.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octfm.models.products import Linear
from octfm.models.vit3d import Summary, TokenGrid
from octfm.volume.segmentation import CLASSES, LAYERS

CELLS = 4
"""Cells along each side of the en face plane, or of a slab."""
COUNTED = tuple(c for c in range(len(CLASSES)) if CLASSES[c] not in (LAYERS[0], LAYERS[-1]))
"""All classes but vitreous and choroid, which end where the kept tokens do."""
BEND = 0.5
"""Error in square roots of rows above which the loss is linear instead of quadratic (smooth L1)."""


class EnFaceGoals(nn.Module):
    """Goals of a volume and of each of its slabs, and heads that predict them. A slab is one step of the token grid
    across B-scans.

    A goal is the square root of a thickness in rows, so that small lesions count next to swollen layers. For every
    class there are the means of CELLS x CELLS cells, the maximum and the minimum of the plane. A slab has cells along
    the B-scan only, as an encoder of single B-scans needs them.
    """

    weights: Tensor
    counted: Tensor

    def __init__(self, width: int, grid: TokenGrid, parts: tuple[int, int, int], rows: int, weights: list[float]):
        """width: of the summary's vector. parts: parts of a patch along each axis. rows: rows of a part. weights: of
        the classes in the composition."""
        super().__init__()
        self.grid, self.parts, self.rows = grid, parts, rows
        # As buffers they are on the device already when a step needs them.
        self.register_buffer("weights", torch.tensor(weights), persistent=False)
        self.register_buffer("counted", torch.tensor(COUNTED), persistent=False)
        self.volume = Linear(width, len(COUNTED) * (CELLS * CELLS + 2))
        self.slab = Linear(width, len(COUNTED) * (CELLS + 2))

    @torch.no_grad()
    def of(self, goal_BKA: Tensor, kept_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Goals [B, G] of the volume and [B, d, G] of its slabs, from the composition of the kept tokens at sorted flat
        grid indices."""
        depth, height, width = self.grid.shape
        share = goal_BKA.float().unflatten(-1, (*self.parts, len(CLASSES))) / self.weights
        thick = self.rows * share.sum(3).index_select(-1, self.counted).flatten(2)
        place_BK = kept_BK // (height * width) * width + kept_BK % width
        onto_BKN = place_BK.unsqueeze(-1) == torch.arange(depth * width, device=kept_BK.device)
        # A volume with fewer tokens than the budget repeats some of them, which must not count twice.
        onto_BKN[:, 1:] &= (kept_BK[:, 1:] != kept_BK[:, :-1]).unsqueeze(-1)
        # As a matrix product, not a scatter: atomic additions would make the order of sums random on a GPU.
        map_BNX = onto_BKN.to(thick.dtype).mT @ thick
        map_BdwpqC = map_BNX.unflatten(2, (self.parts[0], self.parts[2], -1)).unflatten(1, (depth, width))
        map_BCDW = map_BdwpqC.permute(0, 5, 1, 3, 2, 4).flatten(4, 5).flatten(2, 3)
        slab_BdCW = map_BdwpqC.mean(3).permute(0, 1, 4, 2, 3).flatten(3)
        cells = F.adaptive_avg_pool2d(map_BCDW, CELLS).flatten(1)
        volume = torch.cat((cells, map_BCDW.amax((2, 3)), map_BCDW.amin((2, 3))), 1)
        along = F.adaptive_avg_pool1d(slab_BdCW.flatten(0, 1), CELLS).unflatten(0, slab_BdCW.shape[:2]).flatten(2)
        slab = torch.cat((along, slab_BdCW.amax(3), slab_BdCW.amin(3)), 2)
        return volume.sqrt(), slab.sqrt()

    def slabs(self, index_BM: Tensor) -> Tensor:
        """bool [B, d, M]: which tokens are in each slab; all tokens for a slab that has none."""
        depth, height, width = self.grid.shape
        inside = (index_BM // (height * width)).unsqueeze(1) == torch.arange(depth, device=index_BM.device)[:, None]
        return inside | ~inside.any(2, keepdim=True)

    def error(self, summary_BD: Tensor, slabs_BSD: Tensor, volume_BG: Tensor, slabs_BSG: Tensor) -> Tensor:
        """[B]: mean error of a volume's goals plus that of its slabs with truth; 0 for a volume without truth."""
        volume = self._apart(self.volume(summary_BD), volume_BG) * (volume_BG.amax(1) > 0)
        known_BS = (slabs_BSG.amax(2) > 0).float()
        slabs = self._apart(self.slab(slabs_BSD), slabs_BSG) * known_BS
        return volume + slabs.sum(1) / known_BS.sum(1).clamp_min(1)

    def loss(self, summary: Summary, tokens_BMD: Tensor, index_BM: Tensor, goal_BKA: Tensor, kept_BK: Tensor) -> Tensor:
        """[B]: `error` of the summary, which reads tokens at flat grid indices and describes all kept ones."""
        slabs_BSM = self.slabs(index_BM)
        read = summary(tokens_BMD, torch.cat((torch.ones_like(slabs_BSM[:, :1]), slabs_BSM), 1), index_BM)
        return self.error(read[:, 0], read[:, 1:], *self.of(goal_BKA, kept_BK))

    def _apart(self, answer: Tensor, goal: Tensor) -> Tensor:
        return F.smooth_l1_loss(answer.float(), goal, reduction="none", beta=BEND).mean(-1)
