"""Settings of the prototype and their successors: one error maps every key of an unmodified prototype YAML."""

from pathlib import Path
from typing import Any

from octfm.config import Config, find_config, flat, known_keys, read_yaml
from octfm.errors import ConfigError

_RENAMED = {
    "model.width": "embed_dim hidden_size",
    "model.depth": "depth num_layers",
    "model.heads": "num_heads",
    "model.mlp_ratio": "mlp_ratio",
    "model.patch_size": "patch_size",
    "predictor.width": "predictor_dim pred_dim",
    "predictor.depth": "predictor_depth",
    "predictor.heads": "predictor_heads",
    "masks.mask_ratio": "mask_ratio",
    "schedule.ema_base": "ema_base ema_momentum",
    "schedule.ema_end": "ema_end",
    "schedule.base_lr": "base_lr lr learning_rate",
    "schedule.weight_decay": "weight_decay",
    "schedule.warmup_ratio": "warmup_ratio",
    "schedule.min_lr_ratio": "min_lr_ratio",
    "betas": "betas",
    "clip_grad_norm": "grad_clip clip_grad max_grad_norm",
    "data.global_batch_size": "global_batch_size",
    "data.per_device_batch_size": "per_device_batch_size per_core_batch_size",
    "data.max_samples": "max_samples",
    "data.prefetch": "prefetch_factor",
    "epochs": "epochs num_epochs",
    "steps": "max_steps",
    "ckpt_every_epochs": "ckpt_every_epochs save_every_epochs",
    "keep_checkpoints": "keep_last",
    "log_every_steps": "log_every_steps log_every",
    "seed": "seed",
    "tracking.project": "wandb_project",
}
RENAMED = {old: new for new, names in _RENAMED.items() for old in names.split()}
"""Settings with the same meaning and value under another name or in another section."""

_CHANGED = {
    "image_size": "octfm prepare CATALOG image_size={value}: the size is fixed when volumes are prepared (F15)",
    "target_spacing": "octfm prepare CATALOG target_spacing={value}: octfm doctor counts tissue and padding (F14)",
    "warmup_epochs": "schedule.warmup_ratio, as a share of the run: the schedule is a function of the step (F1)",
    "warmup_steps": "schedule.warmup_ratio, as a share of the run (F1)",
    "min_lr": "schedule.min_lr_ratio, as a share of schedule.base_lr (F2)",
    "use_bf16 bf16 amp": "precision=bf16, or precision=fp32 for false",
    "mixed_precision": "precision=bf16 or precision=fp32",
    "list_strategy": "data.scanners: [topcon_triton] for single_domain, none named for multi_domain",
    "domain": "data.scanners, a list; none named for all",
    "device_name": "data.scanners, a list of instruments",
    "grad_accum_steps accum_steps grad_accum gradient_accumulation_steps": (
        "nothing to set: accumulation follows from the batch sizes, and must divide (F7)"
    ),
    "steps_per_epoch": "nothing to set: it follows from the store",
    "scheduler lr_scheduler": "schedule.lr_shape=cosine or constant",
    "use_scheduler": "schedule.lr_shape=constant for false; the rate is set anew for every update (F2)",
    "loss loss_type": "objective.name=vjepa2, or data2vec for the prototype's",
    "model_name model_size": (
        "model.width, model.depth and model.heads; the parameter count is shown before step 0 (F19)"
    ),
    "ckpt_dir": "--out FOLDER: write-tested before step 0, never null (F6)",
    "output_dir": "--out FOLDER (F6)",
    "log_dir": "--out FOLDER: metrics.jsonl lies in it",
    "run_name experiment_name": "--out FOLDER: a run is named after its folder",
    "resume resume_from": "nothing to set: the same command resumes (F18)",
    "data_root data_dir": "octfm scan ROOT, then octfm prepare, then data.store=prepared/",
    "manifest manifest_path": "octfm scan ROOT finds manifest.tsv by itself",
    "participants_tsv": "octfm scan ROOT finds participants.tsv by itself",
    "val_split val_ratio": "octfm scan: splits are by participant, recommended_split where there is one (F16)",
    "cache_dir": "octfm prepare: volumes are prepared once",
    "num_workers workers": "octfm prepare --workers; training reads ahead by data.prefetch",
    "normalize": "intensity_mean and intensity_std of octfm prepare: preprocessing travels in the checkpoint (F15)",
    "random_flip flip_prob": (
        "nothing to set: nothing is flipped at random (F13); augment.mirror_unknown mirrors only eyes of unknown side"
    ),
    "use_wandb": "tracking.wandb=online or offline, null for false",
    "wandb": "tracking.wandb=online or offline, null for none",
    "wandb_mode": "tracking.wandb=online or offline",
    "use_tensorboard": "tracking.tensorboard=true",
    "num_cores tpu_cores": "the launcher's business: ranks come from torchrun (F10)",
    "device": "--device",
}
CHANGED = {old: advice for names, advice in _CHANGED.items() for old in names.split()}
"""Settings that have another form now; {value} stands for the old value."""


def refuse(source: str | Path, cls: type[Config]) -> None:
    """Raise a ConfigError that names the successor of every setting if `source` is a YAML of the prototype."""
    path = find_config(source)
    known = set(known_keys(cls))
    foreign = {key: value for key, value in flat(read_yaml(path)).items() if key not in known}
    if not any(key.split(".")[-1] in RENAMED | CHANGED for key in foreign):
        return
    successors = [f"{key} -> {successor(key, value)}" for key, value in foreign.items()]
    raise ConfigError(
        f"{path}: these are settings of the prototype. {'; '.join(successors)}. "
        "Its runs are ready as smoke_test, pretrain_vjepa_single_domain and pretrain_vjepa_multi_domain"
    )


def successor(key: str, value: Any) -> str:
    """The present name of a setting of the prototype, with its value if that stays the same."""
    name = key.split(".")[-1]
    text = f"[{','.join(map(str, value))}]" if isinstance(value, list) else "null" if value is None else str(value)
    if name in RENAMED:
        return f"{RENAMED[name]}={text}"
    return CHANGED.get(name, "no such setting; leave it out").format(value=text)
