"""A small store of layered synthetic volumes, written by the real writer, for tests that train."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

from octfm.store.layout import StoreRow, read_rows
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from octfm.volume.preprocessing import Prepared, Preprocessing
from octfm.volume.transform import Transform

SIZE = (8, 64, 32)
SCANNERS = ("heidelberg_spectralis", "topcon_triton")
GRADES = ("low", "middle", "high")
"""Of participants of a store that was `darkened`, over and over."""
SPLITS = ("train",) * 8 + ("val",) * 2 + ("test",) * 2


def small_preprocessing() -> Preprocessing:
    return Preprocessing(image_size=SIZE, target_spacing=(0.7, 0.03, 0.18))


def prepared_eye(seed: int, preprocessing: Preprocessing) -> Prepared:
    """Bright bands that follow a tilted, curved surface, with noise."""
    d, h, w = SIZE
    rng = np.random.default_rng(seed)
    z, y, x = np.meshgrid(np.arange(d), np.arange(h), np.arange(w), indexing="ij")
    top = (
        18
        + rng.uniform(-6, 6)
        + rng.uniform(-0.3, 0.3) * (x - w / 2)
        + rng.uniform(-0.6, 0.6) * (z - d / 2)
        + 0.01 * (x - w / 2) ** 2
    )
    layers = [np.exp(-((y - top - offset) ** 2) / 8) * gain for offset, gain in ((2, 0.7), (9, 0.4), (17, 1.0))]
    voxels = np.clip(255 * (0.1 + 0.7 * np.sum(layers, 0) + rng.normal(0, 0.06, SIZE)), 0, 255).astype(np.uint8)
    band = np.stack([top[:, 0] - 2, top[:, 0] + 22]).astype(np.float32).clip(0, h)
    valid = np.stack([np.zeros((d, w)), np.full((d, w), h)]).astype(np.int16)
    transform = Transform(SIZE, preprocessing.target_spacing, SIZE, (0, 0, 0), (1, 1, 1), (0.0,) * d, False, False)
    return Prepared(voxels, band, valid, True, {}, transform)


def darkened(seed: int, prepared: Prepared) -> Prepared:
    """Participants differ in brightness by three grades: something to learn in a second."""
    return replace(prepared, voxels=(prepared.voxels * (1.0, 0.7, 0.4)[(seed // 2) % 3]).astype(np.uint8))


def edit_rows(folder: Path, change: Callable[[StoreRow], dict]) -> None:
    """Rewrite the rows of a store as its writer would; `change` gives other values for some fields of a row."""
    rows = [replace(row, **change(row)) for row in read_rows(folder)[0]]
    (folder / "rows.jsonl").write_text("".join(row.to_line() for row in rows))


def small_store(
    folder: Path,
    edit=lambda seed, prepared: prepared,
    splits=SPLITS,
    preprocessing: Preprocessing | None = None,
    *,
    backwards: bool = False,
) -> Store:
    """One participant for every split named, with both eyes on two scanners; `edit` may change a prepared volume
    before it is written. `backwards`: the last participant is written first."""
    preprocessing = preprocessing or small_preprocessing()
    with StoreWriter(folder, preprocessing) as writer:
        people = list(enumerate(splits))
        for place, (number, split) in enumerate(people[::-1] if backwards else people):
            for side, laterality in enumerate("RL"):
                seed = 2 * number + side
                prepared = edit(seed, prepared_eye(seed, preprocessing))
                row = StoreRow(
                    index=2 * place + side,
                    acquisition=f"1.2.3.{seed}",
                    uri=f"{seed}.dcm",
                    participant=f"P{number:03d}",
                    eye_id=f"P{number:03d}_{laterality}",
                    laterality=laterality,
                    scanner=SCANNERS[number % 2],
                    protocol="macula",
                    split=split,
                    participant_labels={"study_group": "healthy"},
                    flags=(),
                    confident=True,
                    confidence={},
                    transform={**prepared.transform.to_dict(), "mirrored": laterality == "L"},
                    checksum=stage(prepared, writer.staging, str(seed), writer.compression),
                )
                writer.append(row, str(seed))
    return Store.open(folder)
