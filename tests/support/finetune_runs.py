"""Settings of fine-tuning runs of a few seconds."""

from pathlib import Path

from octfm.config import load
from octfm.tasks.finetune_settings import FinetuneConfig
from support.small_store import GRADES


def write_labels(path: Path) -> Path:
    """Grades of the participants of a store that was `darkened`."""
    path.write_text("participant_id\tgrade\n" + "".join(f"P{i:03d}\t{GRADES[i % 3]}\n" for i in range(12)))
    return path


def settings(run, store, labels, **changes) -> FinetuneConfig:
    base = {
        "encoder": str(run), "store": str(store.path), "labels": str(labels), "target": "grade", "order": list(GRADES), "epochs": 6,
        "head_epochs": 1, "batch_size": 4, "per_device_batch_size": 2, "lr_head": 1e-2, "lr_encoder": 3e-4,
        "augment": {"axial_shift": 2, "contrast": 0, "gamma": 0}, "tokens_per_volume": 32,
    }  # fmt: skip
    return load(FinetuneConfig, base | changes)
