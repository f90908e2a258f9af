"""An exported encoder as a torch module that can be loaded from, saved for and pushed to the Hugging Face hub."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from octfm.addresses import expect_local, path_text
from octfm.encoder.encoder import Encoder
from octfm.encoder.export import write_files
from octfm.encoder.sources import HUB, from_hub
from octfm.encoder.tuned import heads_of
from octfm.errors import ConfigError
from octfm.io.location import write_whole
from octfm.models.heads import TaskHead
from octfm.models.vit3d import VisionTransformer3D
from octfm.pretraining.learner import grid_of
from octfm.pretraining.settings import stored_config
from octfm.run.runtime import start, torch_defaults
from octfm.volume.preprocessing import Preprocessing
from octfm.weights import exported

try:
    from huggingface_hub import PyTorchModelHubMixin
except ImportError:
    raise ConfigError("octfm.OctEncoder needs huggingface_hub; install it with: pip install 'octfm[hub]'") from None

_HUB_OPTIONS = {"revision", "cache_dir", "force_download", "local_files_only", "token"}
"""Options of the download, which huggingface_hub passes on after it."""


class OctEncoder(nn.Module, PyTorchModelHubMixin, library_name="octfm", tags=["medical", "oct", "retina"]):
    """A backbone from prepared voxels to a grid of feature vectors, one per patch; differentiable.

    `from_pretrained(folder or hub id)` reads an `octfm export`, offline if it is a folder; `save_pretrained` writes the
    same layout with the current weights. `encoder` gives the same network the methods of octfm.Encoder.
    """

    def __init__(self, **facts: Any):
        """`facts`: the content of an export's config.json."""
        super().__init__()
        if absent := {"settings", "preprocessing", "fingerprint"} - facts.keys():
            raise ConfigError(
                f"OctEncoder: expected the keys of an export's config.json, {', '.join(sorted(absent))} missing; "
                "load one with OctEncoder.from_pretrained(folder)"
            )
        self.facts = facts
        self.run = stored_config(facts["settings"])
        self.preprocessing = Preprocessing.recorded(facts["preprocessing"])
        self.network = VisionTransformer3D(self.run.model, grid_of(self.preprocessing, self.run.model.patch_size))
        self.network.intensity = (self.preprocessing.intensity_mean, self.preprocessing.intensity_std)
        self.head = None
        if "answer" in facts:
            outputs = len(facts["answer"]["classes"]) or 1
            heads = heads_of(self.run.model)
            self.head = TaskHead(self.run.model.width, heads, outputs, facts["head_settings"]["pool"])
        self.seen: dict[str, Any] = {"key": None, "hashes": []}

    @property
    def width(self) -> int:
        """Channels of the features."""
        return self.run.model.width

    @property
    def patch_size(self) -> tuple[int, int, int]:
        """Voxels per feature vector, (B-scan, axial, lateral): the scale from the feature grid to voxels."""
        return self.run.model.patch_size

    def forward(self, voxels: Tensor) -> Tensor:
        """float32 [B, width, d, h, w]: the full token grid, channels first.

        `voxels`: prepared voxels [B, 1, D, H, W] or [B, D, H, W], 0 to 255. Raises ConfigError for another shape, and
        for voxels that were scaled or standardised.
        """
        return self.network.feature_map(voxels)

    def forward_features(self, voxels: Tensor) -> Tensor:
        """float32 [B, d·h·w, width]: the same tokens as a sequence, as timm's backbones return them."""
        return self.network.forward_features(voxels)

    @property
    def encoder(self) -> Encoder:
        """This network as an octfm.Encoder, with `embed` and `embed_tokens` for native volumes. Whether it is in
        training mode, and which parameters are frozen, is not changed."""
        runtime = start("fp32", str(next(self.network.parameters()).device))
        return Encoder(self.network, self.run, self.preprocessing, runtime, "OctEncoder", self.facts["fingerprint"])

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        *,
        force_download: bool = False,
        token: str | bool | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        revision: str | None = None,
        **model_kwargs: Any,
    ) -> "OctEncoder":
        """The backbone of an export: a folder, or `owner/name` on the Hugging Face hub or in its cache, in eval mode.

        Options are huggingface_hub's, and `map_location`, the device (cpu). Raises CheckpointError if neither a folder
        nor the hub has an export of this name, ConfigError for an address.
        """
        given = path_text(pretrained_model_name_or_path)
        name = given.removeprefix(HUB)
        folder = Path(expect_local(name, "expected the folder of an export, or owner/name on the Hugging Face hub"))
        # Downloaded here, because without a connection the mixin would retry for half a minute.
        if given.startswith(HUB) or not folder.is_dir():
            folder = from_hub(
                f"{name}@{revision}" if revision else name, local_files_only,
                force_download=force_download, token=token, cache_dir=cache_dir,
            )  # fmt: skip
        return super().from_pretrained(folder, **model_kwargs)

    @classmethod
    @torch_defaults()
    def _from_pretrained(cls, *, model_id: str, map_location: str = "cpu", **facts: Any) -> "OctEncoder":
        content = exported.read_export(Path(model_id))
        facts = {name: facts[name] for name in facts.keys() - _HUB_OPTIONS}
        with torch.random.fork_rng(devices=[]):  # initial weights are drawn and replaced at once
            model = cls(**facts)
        parts = {f"{part}.{name}": tensor for part in ("network", "head") for name, tensor in content[part].items()}
        model.load_state_dict(parts)
        model.seen = exported.read_seen(Path(model_id))
        return model.to(map_location).eval()

    def _save_pretrained(self, save_directory: Path) -> None:
        write_files(Path(save_directory), self.facts, self.state_dict(), self.seen)
        if keys := exported.keys_text(self.seen):
            write_whole(Path(save_directory) / exported.KEY, keys.encode())
