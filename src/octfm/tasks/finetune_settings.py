"""All settings of a fine-tuning run; a frozen probe is one whose encoder never moves."""

from typing import Any

from pydantic import Field, model_validator

from octfm.config import Config, LearningRate, LocalPlace, Place, Seed
from octfm.models.heads import Pool
from octfm.pretraining.augment import AugmentConfig
from octfm.run.runtime import Precision, RuntimeConfig

MAY_CHANGE = frozenset({"runtime", "max_cache_gb"})
"""Settings that a resumed run may change and still be the same run."""


class FinetuneConfig(Config):
    """One run."""

    encoder: Place | None = None
    """Run folder or checkpoint of pretraining, or the address of a run in a bucket."""
    from_scratch: bool = False
    """Begin at the encoder's random initialisation: the supervised baseline."""
    store: Place | None = None
    """Folder of a store prepared with the encoder's Preprocessing."""
    exclude: LocalPlace | None = None
    """File with an acquisition, uri or participant per line: their volumes are left out."""
    labels: LocalPlace | None = None
    """CSV or TSV with participant_id (and laterality); null takes what the store knows about its participants."""
    target: str = "study_group"
    order: tuple[str, ...] = ()
    """Grades of the target, lowest first, where they are not known already."""
    seed: Seed = 0
    epochs: float = Field(default=30, gt=0, le=1e5)
    """Passes over the training volumes, at most."""
    head_epochs: float = Field(default=3, ge=0, le=1e5)
    """The head alone learns first; then the encoder is unfrozen."""
    patience: int = Field(default=8, ge=1, le=1_000_000)
    """Stop after so many epochs without a better balanced accuracy (R² for numbers) of validation participants."""
    batch_size: int = Field(default=16, ge=1, le=1_000_000)
    """Volumes per optimizer step."""
    per_device_batch_size: int = Field(default=4, ge=1, le=1_000_000)
    """Volumes per forward pass; must divide batch_size."""
    precision: Precision = "fp32"
    pool: Pool = "mean"
    lr_head: LearningRate = 1e-3
    lr_encoder: float = Field(default=3e-5, ge=0, le=1)
    """0: the encoder is frozen, and its token features are computed once."""
    layer_decay: float = Field(default=0.75, gt=0, le=1)
    """Every block learns at this share of the rate of the block after it."""
    lora_rank: int | None = Field(default=None, ge=1, le=16_384)
    """Train low-rank updates of the attention projections instead of the encoder's own weights."""
    weight_decay: float = Field(default=0.05, ge=0, le=100)
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    clip_grad_norm: float = Field(default=3.0, gt=0, le=1e12)
    class_weights: bool = True
    """Classes count the same however rare."""
    augment: AugmentConfig = AugmentConfig()
    """Not used while the encoder is frozen."""
    tokens_per_volume: int = Field(default=256, ge=1, le=10_000_000)
    """Tissue tokens of each volume that a frozen encoder's features are kept of."""
    max_cache_gb: float = Field(default=16.0, gt=0, le=1e6)
    runtime: RuntimeConfig = RuntimeConfig()
    """Of several ranks under torchrun; each holds the whole model (`ddp`)."""

    @model_validator(mode="after")
    def _consistent(self) -> "FinetuneConfig":
        if self.runtime.parallel != "ddp":
            raise ValueError(
                f"runtime.parallel: fine-tuning keeps the whole model on every device, ddp; got {self.runtime.parallel}"
            )
        if self.batch_size % self.per_device_batch_size:
            raise ValueError(
                f"batch_size {self.batch_size} is not a multiple of per_device_batch_size {self.per_device_batch_size}"
            )
        if self.lora_rank is not None and not self.lr_encoder:
            raise ValueError("lora_rank needs an lr_encoder above 0")
        if self.lora_rank is not None and self.from_scratch:
            raise ValueError("lora_rank updates a pretrained encoder; leave from_scratch out")
        return self

    @property
    def frozen(self) -> bool:
        return self.lr_encoder == 0

    def recipe(self) -> dict[str, Any]:
        """What makes two runs the same recipe with different seeds."""
        return self.model_dump(mode="json", exclude={"seed", "store", "runtime"})
