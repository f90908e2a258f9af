"""Tiny synthetic volumes, catalogs and stores for the tests of store, prepare and loader; no pixel comes from a real
eye."""

import os
import signal
from pathlib import Path

import numpy as np

from octfm.catalog.catalog import Acquisition, Catalog
from octfm.errors import ReadError
from octfm.store.store import Store
from octfm.store.writer import stage
from octfm.volume.preprocessing import Prepared, Preprocessing
from octfm.volume.transform import Transform
from octfm.volume.volume import Volume
from support.waiting import planted_delay

NATIVE = (6, 40, 20)
SPACING_MM = (0.25, 0.05, 0.25)
SMALL = Preprocessing(image_size=(4, 32, 16), target_spacing=(0.375, 0.0625, 0.3125))
SCANNERS = ("heidelberg_spectralis", "topcon_triton", "zeiss_cirrus")


def acquisition(number: int, does: str = "reads", **other) -> Acquisition:
    """Participant number // 2, both eyes; the uri tells `read_sample` what to do."""
    person = number // 2
    values = {
        "uri": f"sample:{number}:{does}",
        "participant": f"P{person:03d}",
        "laterality": "RL"[number % 2],
        "scanner": SCANNERS[number % len(SCANNERS)],
        "protocol": "macula",
        "shape": NATIVE,
        "spacing_mm": SPACING_MM,
        "spacing_source": "shared",
        "sop_instance_uid": f"1.2.3.{number}",
        "split": ("train", "train", "val", "test")[person % 4],
        "participant_labels": {"study_group": "healthy" if person % 2 else "drusen"},
        "flags": (),
    }
    return Acquisition(**{**values, **other})


def catalog(acquisitions) -> Catalog:
    return Catalog(root="sample:", acquisitions=tuple(acquisitions), rejects=())


def read_sample(uri: str) -> Volume:
    """Stands in for `read_volume`: the uri's last word is how reading ends."""
    _, number, does = uri.split(":", 2)
    if does == "truncated":
        raise ReadError("truncated_pixel_data", f"{uri}: frame 3 of 6 is cut; fetch it again")
    if does == "breaks":
        raise IndexError("index 7 is out of bounds")
    ends = {"kills": signal.SIGKILL, "crashes": signal.SIGSEGV}
    if does in ends:
        os.kill(os.getpid(), ends[does])
    if does == "hangs":
        planted_delay(600)
    if does == "swallows":
        np.ones(3 * 2**30, np.uint8)
    if does == "slow":
        planted_delay(0.3)
    shape = (NATIVE[0] - 1, *NATIVE[1:]) if does == "shrank" else NATIVE
    voxels = np.random.default_rng(int(number)).integers(0, 255, shape, dtype=np.uint8)
    return Volume(voxels, SPACING_MM, source=uri)


def prepared(number: int, image_size=SMALL.image_size) -> Prepared:
    rng = np.random.default_rng(number)
    d, h, w = image_size
    valid = np.stack([np.zeros((d, w), np.int16), np.full((d, w), h, np.int16)])
    band = np.stack([rng.uniform(0, h / 2, (d, w)), rng.uniform(h / 2, h, (d, w))]).astype(np.float32)
    transform = Transform(
        NATIVE, SPACING_MM, image_size, (0.0, 0.0, 0.0), (1.5, 1.25, 1.25), (0.0,) * NATIVE[0], False, bool(number % 2)
    )
    return Prepared(
        rng.integers(0, 255, image_size, dtype=np.uint8), band, valid, number % 3 > 0, {"contrast": 0.5}, transform
    )


def write_store(path: Path, count: int, preprocessing: Preprocessing = SMALL, compression="none", change=None) -> Store:
    """A store of `count` volumes, written volume by volume; `change(number)` gives other fields of the acquisition."""
    from octfm.store.prepare import row_of
    from octfm.store.writer import StoreWriter

    with StoreWriter(path, preprocessing, compression) as writer:
        for number in range(count):
            sample = prepared(number, preprocessing.image_size)
            digest = stage(sample, writer.staging, str(number), writer.compression)
            words = acquisition(number, **(change(number) if change else {}))
            writer.append(row_of(words, sample, digest), str(number))
    return Store.open(path)


def content(path: Path) -> dict[str, bytes]:
    """Every file that a reader of the store may look at."""
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and not p.name.startswith(".")
    }
