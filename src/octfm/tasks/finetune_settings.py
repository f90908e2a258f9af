"""Settings of a fine-tuning run; with a frozen encoder it is a probe."""

from typing import Any

from pydantic import Field, model_validator

from octfm.config import Config, LearningRate, LocalPlace, Place, Seed
from octfm.models.heads import Pool
from octfm.pretraining.augment import AugmentConfig
from octfm.run.runtime import Precision, RuntimeConfig

MAY_CHANGE = frozenset({"store", "runtime", "max_cache_gb"})
"""Settings that a resumed run may change and still be the same run."""


class FinetuneConfig(Config):
    """Settings of one run."""

    encoder: Place | None = None
    """Run folder or checkpoint of pretraining, or the address of a run in a bucket."""
    from_scratch: bool = False
    """Start from the encoder's random initialisation, for the supervised baseline."""
    store: Place | None = None
    """Folder of a store prepared with the encoder's Preprocessing."""
    exclude: LocalPlace | None = None
    """File that names an acquisition, uri or participant per line; their volumes are left out."""
    labels: LocalPlace | None = None
    """CSV or TSV with participant_id (and laterality); null uses the labels in the store."""
    target: str = "study_group"
    """Label column to predict."""
    order: tuple[str, ...] = ()
    """Grades of the target, lowest first, if octfm does not know them."""
    seed: Seed = 0
    """Decides the head's initial weights, order of volumes and augmentation."""
    epochs: float = Field(default=30, gt=0, le=1e5)
    """Passes over the training volumes, at most."""
    head_epochs: float = Field(default=3, ge=0, le=1e5)
    """Passes in which the head learns alone, before the encoder is unfrozen."""
    patience: int = Field(default=8, ge=1, le=1_000_000)
    """Stop after so many epochs without a better balanced accuracy (R² for numbers) of validation participants."""
    batch_size: int = Field(default=16, ge=1, le=1_000_000)
    """Volumes per optimizer step."""
    per_device_batch_size: int = Field(default=4, ge=1, le=1_000_000)
    """Volumes per forward pass; must divide batch_size."""
    precision: Precision = "fp32"
    """Arithmetic of the network: float32 throughout, or bfloat16 where it is safe."""
    pool: Pool = "mean"
    """How tissue tokens become one vector: their mean, or a small cross-attention pool that is trained."""
    lr_head: LearningRate = 1e-3
    """Peak learning rate of the head."""
    lr_encoder: float = Field(default=3e-5, ge=0, le=1)
    """Peak learning rate of the encoder's final norm; each layer before it, from the last block to the patch embedding,
    has `layer_decay` times the rate of the one after it. With 0 the encoder is frozen, and its token features are
    computed once."""
    layer_decay: float = Field(default=0.75, gt=0, le=1)
    """Ratio of each block's learning rate to that of the block after it (as in MAE, arXiv:2111.06377)."""
    lora_rank: int | None = Field(default=None, ge=1, le=16_384)
    """Train low-rank updates of the attention projections instead of the encoder's own weights (arXiv:2106.09685)."""
    weight_decay: float = Field(default=0.05, ge=0, le=100)
    """AdamW's weight decay."""
    warmup_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of the run spent warming up."""
    clip_grad_norm: float = Field(default=3.0, gt=0, le=1e12)
    """Gradients are scaled down to this norm."""
    class_weights: bool = True
    """Weigh all classes alike, however rare."""
    augment: AugmentConfig = AugmentConfig()
    """Unused if the encoder is frozen."""
    tokens_per_volume: int = Field(default=256, ge=1, le=10_000_000)
    """Tissue tokens per volume whose features a frozen encoder keeps."""
    max_cache_gb: float = Field(default=16.0, gt=0, le=1e6)
    """Largest cache of a frozen encoder's token features in the run folder."""
    runtime: RuntimeConfig = RuntimeConfig()
    """For several ranks under torchrun; each holds the whole model (`ddp`)."""

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
        """The settings that runs of one recipe share, whatever their seed, the machine, and where files lie on it."""
        return self.model_dump(mode="json", exclude={"seed", "encoder", "exclude", "labels", *MAY_CHANGE})
