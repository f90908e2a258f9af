"""Settings of a segmentation: what to find, with which decoder, on which volumes."""

from pydantic import Field, model_validator

from octfm.config import Config, LearningRate, LocalPlace, Place, Seed
from octfm.models.dense import Decoder
from octfm.run.runtime import Precision


class SegmentConfig(Config):
    """Settings of one run."""

    encoder: Place | None = None
    """Run folder or checkpoint of pretraining."""
    store: Place | None = None
    """Folder of a store prepared with the encoder's Preprocessing."""
    exclude: LocalPlace | None = None
    """File that names an acquisition, uri or participant per line; their volumes are left out."""
    truth: LocalPlace | None = None
    """Folder with <acquisition>.npz: `surfaces` float [S, D, W] in native rows (NaN if unknown), `surface_names`
    and, for masks, `lesions` uint8 [D, H, W]; phantom cohorts have one. Or with corrections that the viewer has saved
    (.json): corrected and checked lines are truth."""
    surfaces: tuple[str, ...] = ("ilm", "rpe", "bm")
    """Names from `surface_names`, from the vitreous downwards."""
    mask_values: tuple[int, ...] = ()
    """Values of `lesions` that make up the mask, for phantoms 1 and 2 for fluid; empty for no mask."""
    mask_name: str = "fluid"
    """Name of the mask in results and files."""
    decoder: Decoder = "linear"
    """One linear layer per token; `light` first mixes neighbouring tokens by convolution."""
    seed: Seed = 0
    """Decides the decoder's initial weights and the order of volumes."""
    steps: int = Field(default=400, ge=1, le=10_000_000)
    """Optimizer updates."""
    batch_size: int = Field(default=2, ge=1, le=1_000_000)
    """Volumes per step."""
    lr: LearningRate = 2e-3
    """Peak learning rate of the decoder."""
    lr_encoder: float = Field(default=0.0, ge=0, le=1)
    """Peak learning rate of the encoder. With 0 it is frozen, and every volume is encoded once."""
    precision: Precision = "fp32"
    """Arithmetic of the networks: float32 throughout, or bfloat16 where it is safe."""
    max_volumes: int | None = Field(default=None, ge=1, le=10**12)
    """Most training volumes, the same ones every time."""
    max_cache_gb: float = Field(default=8.0, gt=0, le=1e6)
    """Memory for the token grids of a frozen encoder."""

    @model_validator(mode="after")
    def _something_to_find(self) -> "SegmentConfig":
        if not self.surfaces and not self.mask_values:
            raise ValueError("surfaces and mask_values are both empty; name what to find")
        names = [*self.surfaces, *([self.mask_name] if self.mask_values else [])]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ValueError(f"surfaces and mask_name: {twice} occurs twice, and results are kept by name")
        return self

    @property
    def channels(self) -> int:
        return len(self.surfaces) + bool(self.mask_values)
