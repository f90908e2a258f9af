"""Whole programs on a device that is not the CPU (other_device.py), each in a process of its own.

`python device_traces.py FOLDER DEVICE:PRECISION:TRACE…` prints one line of JSON per trace: numbers that the CPU must
agree with, or the error that ended it, and for each update where the host waited for the device.
"""

import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import pyarrow.parquet as pq
import torch

import octfm
from octfm.config import load
from octfm.encoder.encoder import load_encoder
from octfm.encoder.export import export
from octfm.encoder.hub import OctEncoder
from octfm.encoder.tuned import load_tuned
from octfm.layers.finder import LayerFinder, load_finder
from octfm.phantom import phantom_volume
from octfm.pretraining import pretrain as pretraining
from octfm.pretraining.bench import bench
from octfm.pretraining.preflight import examine
from octfm.run import runtime
from octfm.run.checkpoint_files import steps
from octfm.store.loader import Loader
from octfm.store.store import Store
from octfm.tasks.embed_run import embed_all
from octfm.tasks.finetune import finetune
from octfm.tasks.scene import load_scenes
from octfm.tasks.segment import load_segmenter
from octfm.tasks.segment_score import segment
from octfm.tasks.segment_settings import SegmentConfig
from support.finetune_runs import settings as finetune_settings
from support.finetune_runs import write_labels
from support.small_store import GRADES, darkened, edit_rows, small_store
from support.tiny_runs import config, import_all_of_a_step, quick_pretrain, quiet, rows

NUMBERS = (
    "masked_loss", "context_loss", "grad_norm", "effective_rank", "feature_std", "teacher_step", "gradient_agrees",
    "update_agrees", "score", "knn",
)  # fmt: skip


@dataclass(frozen=True)
class Place:
    """Where a trace runs, and what it may use: a store, its labels and truth, and runs made on the CPU."""

    made: Path
    out: Path
    device: str
    precision: str

    @property
    def store(self) -> Store:
        return Store.open(self.made / "store")

    def config(self, **changes: Any):
        return config(
            steps=4, precision=self.precision, log_every_steps=3, validate_every_steps=2, ckpt_every_steps=2,
            health={"check_every_steps": 3}, probe={"target": "grade"},
            **{"model": {"patch_size": [2, 8, 8], "width": 48, "depth": 1, "heads": 2}} | changes,
        )  # fmt: skip

    def finetuning(self, **changes: Any):
        return finetune_settings(
            self.made / "run", self.store, self.made / "labels.tsv", precision=self.precision, epochs=1, **changes
        )

    def segmentation(self, **changes: Any) -> SegmentConfig:
        base = {
            "encoder": str(self.made / "run"), "store": str(self.made / "store"), "truth": str(self.made / "truth"),
            "surfaces": ["ilm", "bm"], "mask_values": [1], "steps": 3, "max_volumes": 4, "precision": self.precision,
        }  # fmt: skip
        return load(SegmentConfig, base | changes)


def make(folder: Path, tuned: bool) -> None:
    """A store with labels and truth and a pretraining run; if `tuned`, a head and a segmenter on its encoder. On the
    CPU."""
    store = small_store(folder / "store", darkened)
    edit_rows(store.path, lambda row: {"participant_labels": {"grade": GRADES[int(row.participant[1:]) % 3]}})
    write_labels(folder / "labels.tsv")
    (folder / "truth").mkdir()
    for row in store.rows:
        band = store.read([row.index]).band[0].astype(np.float64)
        lesions = np.zeros(store.image_size, np.uint8)
        lesions[2:5, 30:36, 8:20] = row.index % 2
        np.savez(
            folder / "truth" / f"{row.acquisition}.npz", surfaces=band + 2, surface_names=np.array(["ilm", "bm"]),
            lesions=lesions, spacing_mm=np.array(store.preprocessing.target_spacing),
        )  # fmt: skip
    here = Place(folder, folder, "cpu", "fp32")
    quick_pretrain(here.config(), here.store, folder / "run", "cpu", echo=quiet)
    if not tuned:
        return
    finetune(here.finetuning(lr_encoder=0, pool="attention"), folder / "head", "cpu", echo=quiet)
    segment(here.segmentation(), folder / "segmenter", "cpu", baselines=False, echo=quiet)


def metrics_of(run: Path) -> dict[str, list[float]]:
    kinds = ("train", "validation", "probe")
    found = {
        f"{kind} {name}": [row[name] for row in rows(run, kind) if name in row] for kind in kinds for name in NUMBERS
    }
    return {name: values for name, values in found.items() if values}


def pretrained(place: Place, **changes: Any) -> dict[str, Any]:
    """Steps, health checks, validation, online probe and checkpoints; then once more from the middle."""
    settings, out = place.config(**changes), place.out / "run"
    quick_pretrain(settings, place.store, out, place.device, echo=quiet)
    steps(out / "checkpoints")[-1].unlink()
    quick_pretrain(settings, place.store, out, place.device, echo=quiet)
    return metrics_of(out)


def summarised(place: Place) -> dict[str, Any]:
    """Streamed phantoms with their truth, and queries that read all tokens into the vector that is probed."""
    return pretrained(
        place,
        data={"global_batch_size": 4, "per_device_batch_size": 2, "phantoms": {"seed": 1, "volumes": 40, "share": 0.5}},
        objective={"name": "dense", "pool": "summary"},
        model={"patch_size": [2, 8, 8], "width": 48, "depth": 2, "heads": 2, "summary": 3},
    )


def without_float64(place: Place) -> dict[str, Any]:
    """As on Apple's GPU, whose fused AdamW also lacks what a step needs."""
    runtime.WITHOUT_FLOAT64.add(place.device)
    runtime.PLAIN_ADAMW.add(place.device)
    return pretrained(place)


def embedded(place: Place) -> dict[str, Any]:
    """Vectors of a store, and maps: PCA, attention, occlusion, surfaces and masks."""
    runs = place.made / "head", place.made / "segmenter"
    written = embed_all(
        place.made / "run", place.store.path, place.out / "embeddings", head=runs[0], segmenter=runs[1],
        device=place.device, echo=quiet,
    )  # fmt: skip
    scenes = load_scenes(place.out / "embeddings" / "figures" / "scenes.npz")
    drawn = [overlay for overlay in scenes[0].overlays if overlay.name in ("attention", "occlusion")]
    return {path.stem: np.array(pq.read_table(path)["vector"].to_pylist())[:4] for path in written} | {
        overlay.name: np.nan_to_num(overlay.values.astype(np.float64)) for overlay in drawn
    }


def finetuned(place: Place, **changes: Any) -> dict[str, Any]:
    out = finetune(place.finetuning(**changes), place.out / "tuned", place.device, echo=quiet)
    losses = [row["loss"] for kind in ("train", "validation") for row in rows(out, kind)]
    return {"losses": losses, "answers": load_tuned(out, place.device).answers(place.store.read([0, 1]))}


def segmented(place: Place, **changes: Any) -> dict[str, Any]:
    """A segmenter trained, scored and applied to a volume in its native frame."""
    segment(place.segmentation(**changes), place.out / "seg", place.device, baselines=not changes, echo=quiet)
    found = load_segmenter(place.out / "seg", place.device)
    surfaces, masks = found.in_prepared(place.store.read([1]))
    native = found.segment(phantom_volume(0)[0])
    return {"losses": [row["loss"] for row in rows(place.out / "seg")], "mask": masks["fluid"].mean(), **surfaces} | {
        "native": [np.isfinite(rows).mean() for rows in native.surfaces.values()]
    }


def layers_found(place: Place) -> dict[str, Any]:
    """The packaged network, on B-scans of its own distances and of others; and one that reports fewer masks."""
    volume, finder = phantom_volume(1)[0], load_finder(device=place.device)
    fewer = LayerFinder(finder.network, masks=finder.masks[:1], runtime=finder.runtime)
    few = octfm.Volume(volume.voxels[3:5], volume.spacing_mm, source="phantom")
    found = finder.find(few)
    return {
        "rows": np.nan_to_num(found.rows), "spread": np.nan_to_num(found.spread_um),
        "fluid": fewer.find(few).lesions.mean(), "seen": octfm.segment(few, device=place.device).found.present,
    }  # fmt: skip


def exported(place: Place) -> dict[str, Any]:
    """A checkpoint of the device exported, and read and applied on the device again."""
    run = quick_pretrain(place.config(), place.store, place.out / "run", place.device, echo=quiet)
    out, volume = export(run, place.out / "export", echo=quiet), phantom_volume(2)[0]
    whole = OctEncoder.from_pretrained(str(out)).to(place.device)
    voxels = runtime.start(device=place.device).tensor(place.store.read([0]).voxels)
    with torch.no_grad():
        features = whole(voxels).cpu().numpy()
    return {"vector": load_encoder(out, device=place.device).embed(volume), "features": features}


def examined(place: Place) -> dict[str, Any]:
    """The checks before step 0, and the measurements of `octfm bench`."""
    settings = place.config(data={"global_batch_size": 4, "per_device_batch_size": 2, "store": str(place.store.path)})
    found = examine(settings, place.out / "run", place.device)
    timed = bench(settings, place.store, place.device, steps=1, echo=quiet)
    return {
        "failed": sum(check.status == "FAIL" for check in found),
        "fit": [t.step_s is not None for t in timed.trials],
    }


TRACES: dict[str, Callable[[Place], dict[str, Any]]] = {
    "vjepa2": pretrained,
    "mae": lambda place: pretrained(place, objective={"name": "mae"}),
    "whitened": lambda place: pretrained(place, objective={"name": "vjepa2", "target_norm": "whiten", "voxel_loss": 0.5}),
    "warped": lambda place: pretrained(
        place,
        objective={"name": "data2vec"},
        augment={"lateral_shift_mm": 0.2, "lateral_scale": 0.1, "tilt_deg": 3, "noise": 0.1, "speckle": 0.2},
        model={"patch_size": [2, 8, 8], "width": 48, "depth": 2, "heads": 2, "positions": "learned", "activation_checkpointing": True},
    ),
    "summary": summarised,
    "vjepa2 without float64": without_float64,
    "doctor and bench": examined,
    "embed and maps": embedded,
    "finetune": finetuned,
    "finetune frozen": lambda place: finetuned(place, lr_encoder=0, pool="attention"),
    "finetune low rank": lambda place: finetuned(place, lora_rank=2, pool="attention"),
    "segment": segmented,
    "segment finetuned": lambda place: segmented(place, decoder="light", lr_encoder=1e-3),
    "layers": layers_found,
    "export": exported,
}  # fmt: skip


def trace(name: str, place: Place) -> dict[str, Any]:
    """One trace in this process, which can do nothing else afterwards."""
    waits: list[list[str]] = []
    if place.device != "cpu":
        from support.other_device import DEVICE

        DEVICE.start(doubles="without float64" not in name)
        _count_waits(DEVICE.waited, waits)
    try:
        numbers = TRACES[name](place)
    except Exception as error:
        lines = [line for line in traceback.extract_tb(error.__traceback__) if "/octfm/" in line.filename]
        where = f"{Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else "outside octfm"
        return {"trace": name, "error": f"{type(error).__name__} at {where}: {str(error)[:400]}"}
    plain = {key: np.asarray(value, np.float64).ravel().tolist() for key, value in numbers.items()}
    return {"trace": name, "numbers": plain, "waits": waits}


def _count_waits(waited: list[str], per_step: list[list[str]]) -> None:
    """From when a batch is there to the end of its update: what the host has waited for, by step."""
    batches, exchange = Loader.batches, pretraining.exchange_results

    def begin(*args: Any) -> Any:
        found = batches(*args)
        waited.clear()
        return found

    def end(*args: Any) -> Any:
        per_step.append(list(waited))
        return exchange(*args)

    mock.patch.object(Loader, "batches", begin).start()
    mock.patch.object(pretraining, "exchange_results", end).start()


def apart(work: Callable[[], None]) -> int:
    """Do something in a process of its own, which has all modules imported already; its exit status."""
    sys.stdout.flush()
    if not (child := os.fork()):
        status = 1
        try:
            work()
            sys.stdout.flush()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def main() -> None:
    folder, jobs = Path(sys.argv[1]), [job.split(":") for job in sys.argv[2:]]
    made = folder / "made"
    import_all_of_a_step()
    # In this process neither the store nor the device is used: after that it could not be forked.
    if not made.is_dir():
        made.mkdir(parents=True)
        if apart(lambda: make(made, any(name == "embed and maps" for *_, name in jobs))):
            sys.exit("the runs could not be made")
    for device, precision, name in jobs:
        out = folder / f"{device}-{precision}-{name.replace(' ', '-')}"
        out.mkdir()
        place = Place(made, out, device, precision)
        if status := apart(lambda name=name, place=place: print(json.dumps(trace(name, place)))):
            print(json.dumps({"trace": name, "error": f"the process ended with status {status}"}))


if __name__ == "__main__":
    main()
