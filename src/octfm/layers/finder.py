"""Find surfaces and lesions in the B-scans of any volume, in its native frame and in fractions of a row."""

import functools
import hashlib
import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from octfm.display import fields_line
from octfm.errors import CheckpointError
from octfm.layers.areas import (
    DETACHMENT,
    DRUSEN,
    FLUID,
    FLUID_GROWS,
    clear_openings,
    clear_shadows,
    fill_detachments,
    keep_plausible,
    keep_sure,
    keep_sure_drusen,
    keep_visible,
    one_kind_of_fluid,
)
from octfm.models.layer_net import (
    ASCAN_UM,
    MASKS,
    ROW_UM,
    SURFACES,
    LayerNet,
    LayerNetConfig,
    in_channels_last,
    standardise,
)
from octfm.run.runtime import Runtime, device_named, torch_defaults
from octfm.volume.margins import inside_frame, without_marks, without_padding
from octfm.volume.surface import best_path
from octfm.volume.volume import Shape3, Spacing3, Volume
from octfm.weights.packaged import CURRENT, find_packaged, weights_of

TOLERATED = 1.06
"""In training the network saw rows and A-scans this many times as large or small, so an axis of B-scans whose distances
are that close to ROW_UM or ASCAN_UM is not resampled."""
STEEPEST = 2.0
"""Steepest slope (rise over run) of a surface between neighbouring A-scans, as at the rim of a hole or of a druse."""
PATH_PENALTY = 0.2
"""Log-likelihood that a path loses per row that it moves between neighbouring A-scans."""
WINDOW_ROWS = 4
"""A surface is the mean row within this distance of its path: sub-row precision, but never between two candidates."""
LARGEST = (2051, 1250)
"""Most rows and A-scans in the network: 8 x 20 mm, beyond which the verdict refuses a scan. Larger B-scans must have
wrong millimetres and are not searched: micrometres taken for millimetres would make them gigabytes."""
CHUNK, CHUNK_PIXELS, CPU_PIXELS = 4, 2**21, 2**16
"""Most B-scans that the network sees at a time, and most pixels in them, on an accelerator and on a CPU."""


@dataclass(frozen=True, eq=False)
class Layers:
    """What the network found in D B-scans, in native rows and A-scans."""

    rows: np.ndarray
    """float32 [S, D, W] of SURFACES, 0 at the centre of the first row; NaN where the surface is probably not in the
    image."""
    spread_um: np.ndarray
    """float32 [S, D, W]: standard deviation of the row in the network's own distribution."""
    near: np.ndarray
    """float32 [S, D, W]: share of the distribution over rows within WINDOW_ROWS of the row, 0 to 1."""
    disorder_um: np.ndarray
    """float32 [D, W]: the most by which a surface had to be moved down because one above it lay deeper."""
    present: np.ndarray
    """float32 [D, W]: probability that the retina is in the image, the lower one of ILM and BM."""
    lesions: np.ndarray
    """uint8 [D, H, W]: 0, or 1 + index in MASKS."""
    hole: np.ndarray | None = None
    """bool [D]: B-scans in which an area of fluid was open to the vitreous, as in a macular hole, and left out."""

    __repr__ = fields_line

    def placed(self, inner: tuple[slice, slice], shape: Shape3) -> "Layers":
        """These layers, found within the rows and A-scans `inner`, in whole B-scans of a volume of `shape` [D, H, W];
        outside there is no retina."""
        first, columns = inner[0].start, inner[1]
        outside = ((0, 0), (columns.start, shape[2] - columns.stop))
        beside = functools.partial(np.pad, pad_width=((0, 0), *outside))
        lesions = np.zeros(shape, np.uint8)
        lesions[:, *inner] = self.lesions
        return replace(
            self,
            rows=beside(self.rows + np.float32(first), constant_values=np.nan),
            spread_um=beside(self.spread_um),
            near=beside(self.near),
            disorder_um=np.pad(self.disorder_um, outside),
            present=np.pad(self.present, outside),
            lesions=lesions,
        )

    def taken(self, inner: tuple[slice, slice]) -> "Layers":
        """The layers within the rows and A-scans `inner`; the reverse of `placed`."""
        first, columns = inner[0].start, inner[1]
        return replace(
            self,
            rows=self.rows[..., columns] - np.float32(first),
            spread_um=self.spread_um[..., columns],
            near=self.near[..., columns],
            disorder_um=self.disorder_um[..., columns],
            present=self.present[..., columns],
            lesions=self.lesions[:, *inner],
        )


class LayerFinder:
    """A trained LayerNet and what identifies it."""

    def __init__(
        self,
        network: LayerNet,
        name: str = "untrained",
        digest: str = "",
        masks: tuple[str, ...] = MASKS,
        runtime: Runtime | None = None,
    ):
        """`masks`: those that the network has learned; others are not reported. `runtime`: the device, by default the
        CPU."""
        self.runtime = runtime or Runtime(torch.device("cpu"))
        self.network = in_channels_last(network.eval()).to(self.runtime.device)
        for module in network.modules():
            if isinstance(module, nn.SiLU):
                module.inplace = True  # a third of the time; the input is not needed again
        self.name, self.digest, self.masks = name, digest, masks

    @property
    def model(self) -> str:
        """Name and first digits of the hash, as stated in results."""
        return f"{self.name} {self.digest[:12]}"

    @torch_defaults()
    @torch.no_grad()
    def find(self, volume: Volume) -> Layers:
        """Surfaces and lesions of every B-scan of a volume, each found separately; layout and laterality do not matter.

        Nothing is found in B-scans larger than LARGEST, nor in a frame around the image (`inside_frame`).
        """
        depth, height, width = volume.shape
        white = volume.white
        if (inner := inside_frame(volume.voxels, white)) is not None:
            # The frame would change the mean and variance by which B-scans are standardised.
            return self.find(replace(volume, voxels=volume.voxels[:, *inner])).placed(inner, volume.shape)
        size = network_size(volume.shape, volume.spacing_mm)
        rows = np.full((len(SURFACES), depth, width), np.nan, np.float32)
        spread, near = np.zeros_like(rows), np.zeros_like(rows)
        disorder, present = np.zeros((depth, width), np.float32), np.zeros((depth, width), np.float32)
        lesions, hole = np.zeros(volume.shape, np.uint8), np.zeros(depth, bool)
        if size[0] > LARGEST[0] or size[1] > LARGEST[1]:
            return Layers(rows, spread, near, disorder, present, lesions, hole)
        # Fewer on a CPU, where larger arrays would be mapped and cleared again for every chunk (octfm.io.heap).
        most = CPU_PIXELS if self.runtime.device.type == "cpu" else CHUNK_PIXELS
        chunk = max(1, min(CHUNK, most // math.prod(size)))
        for first in range(0, depth, chunk):
            part = slice(first, first + chunk)
            grey = without_padding(without_marks(volume.voxels[part], white), white)
            grey = grey.astype(np.float32) * (255 / white)
            image = self.runtime.tensor(grey)
            found = self.network(self._prepared(image[:, None], size))
            surfaces = self._surfaces(found.rows, size, volume)
            rows[:, part], spread[:, part], near[:, part], disorder[part], present[part] = surfaces
            if self.masks:
                logits = found.masks[:, :, : size[0], : size[1]].clone()
                for i, name in enumerate(MASKS):
                    if name not in self.masks:
                        logits[:, i] = -1e4
                logits = F.interpolate(logits, (height, width), mode="bilinear")
                grown = logits.clone()
                grown[:, FLUID] += FLUID_GROWS
                best, which = grown.max(dim=1)
                areas = torch.where(best > 0, which + 1, 0).to(torch.uint8).cpu().numpy()
                seen = logits.cpu().numpy(), grey, rows[:, part], present[part]
                lesions[part], hole[part] = self._reported(areas, *seen, volume.spacing_mm)
        return Layers(rows, spread, near, disorder, present, lesions, hole)

    def _reported(
        self,
        lesions: np.ndarray,
        logits: np.ndarray,
        grey: np.ndarray,
        rows: np.ndarray,
        present: np.ndarray,
        spacing_mm: Spacing3,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The areas to report, [B, H, W], from the network's (`lesions`, changed in place) with log-odds [B, M, H, W],
        and bool [B]: B-scans with the opening of a hole; see layers/areas.py."""
        row_um, ascan_um = 1000 * spacing_mm[1], 1000 * spacing_mm[2]
        one_kind_of_fluid(lesions, logits)
        for kinds in (FLUID, DETACHMENT):
            keep_sure(lesions, logits[:, kinds].max(axis=1), kinds, row_um * ascan_um / 1e6)
        clear_shadows(lesions, grey, rows, ascan_um)
        keep_plausible(lesions, rows, row_um)
        keep_sure_drusen(lesions, logits[:, DRUSEN].max(axis=1), rows, row_um, ascan_um)
        if "detachment" in self.masks:
            fill_detachments(lesions, rows, row_um)
        opened = clear_openings(lesions, grey, rows, row_um, ascan_um)
        keep_visible(lesions, present)
        return lesions, opened

    def _prepared(self, images: Tensor, size: tuple[int, int]) -> Tensor:
        if images.shape[-2:] != size:
            images = F.interpolate(images, size, mode="bilinear", antialias=True)
        multiple = self.network.config.multiple
        padded = F.pad(images, (0, -size[1] % multiple, 0, -size[0] % multiple))
        return standardise(padded).to(memory_format=torch.channels_last)

    def _surfaces(self, logits: Tensor, size: tuple[int, int], volume: Volume) -> tuple[np.ndarray, ...]:
        """`rows`, `spread_um`, `near`, `disorder_um` and `present` of Layers, in native rows and A-scans, from logits
        [B, S, H + 1, W] on the network's grid, which has `size`."""
        height, width = size
        log_p = logits[..., :width].log_softmax(2)
        absent = log_p[:, :, -1].exp()
        log_p = log_p[:, :, :height]
        count, surfaces = log_p.shape[:2]
        ratio = (volume.shape[1] * volume.spacing_mm[1] / height) / (volume.shape[2] * volume.spacing_mm[2] / width)
        score = log_p.flatten(0, 1).transpose(1, 2).cpu().numpy()
        path = self.runtime.tensor(best_path(score, max(1, math.ceil(STEEPEST / ratio)), PATH_PENALTY))
        path = path.view(count, surfaces, 1, width)
        p = (log_p - log_p.logsumexp(2, keepdim=True)).exp()
        row = torch.arange(height, dtype=p.dtype, device=p.device).view(1, 1, -1, 1)
        near = p * ((row - path).abs() <= WINDOW_ROWS)
        held = near.sum(2)
        own = (near * row).sum(2) / held.clamp_min(1e-12)
        found = own.cummax(dim=1).values
        spread = (p * (row - found.unsqueeze(2)) ** 2).sum(2).sqrt()
        scale = volume.shape[1] / height
        moved = (found - own).amax(1, keepdim=True).expand_as(found)
        native = torch.stack([found, spread, held, moved, absent])
        if width != volume.shape[2]:
            native = F.interpolate(native.flatten(0, 1), volume.shape[2], mode="linear").unflatten(0, (5, count))
        rows, spread, held, moved, gone = native.transpose(1, 2).cpu().numpy()
        rows = (rows + 0.5) * scale - 0.5
        um = scale * 1000 * volume.spacing_mm[1]
        present = 1 - np.maximum(gone[0], gone[-1])
        return np.where(gone > 0.5, np.nan, rows), spread * um, held, moved[0] * um, present


def network_size(shape: Shape3, spacing_mm: Spacing3) -> tuple[int, int]:
    """Rows and A-scans to which B-scans of a volume are resampled for the network."""
    _, height, width = shape
    rows = 1000 * spacing_mm[1] / ROW_UM
    rows = height if 1 / TOLERATED < rows < TOLERATED else max(1, round(height * rows))
    columns = 1000 * spacing_mm[2] / ASCAN_UM
    columns = width if 1 / TOLERATED < columns < TOLERATED else max(1, round(width * columns))
    return rows, columns


@functools.cache
@torch_defaults()
def load_finder(name: str = CURRENT, device: str | torch.device | None = None) -> LayerFinder:
    """The packaged network of this name on a device. Raises CheckpointError if its file is damaged or missing."""
    from safetensors.torch import load

    about = find_packaged(name)
    content = weights_of(name)
    digest = hashlib.sha256(content).hexdigest()
    if digest != about.digest:
        raise CheckpointError(
            f"octfm/weights/{name}.safetensors: damaged (SHA-256 {digest[:12]}, expected "
            f"{about.digest[:12]}); install octfm again"
        )
    with torch.random.fork_rng(devices=[]):  # initial weights are drawn and replaced at once
        network = LayerNet(LayerNetConfig(tuple(about.facts["channels"])))
    network.load_state_dict({key: tensor.float() for key, tensor in load(content).items()})
    # Not `start`, which refuses several ranks: here each may segment its own scans, as anchored's validation does.
    return LayerFinder(network, name, digest, about.masks, Runtime(device_named(device), "fp32"))
