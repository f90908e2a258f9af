"""The phantom cohort of benchmarks/objectives.py, rendered directly into a store with the production axial pitch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octfm.phantom.cohort import Participant, draw_cohort, eye_of
from octfm.phantom.eye import central_subfield_um
from octfm.phantom.render import GroundTruth, render
from octfm.phantom.scanner import DEFAULT_SCANNERS, SCANNERS
from octfm.phantom.write import PHANTOM_VERSION, SIDES
from octfm.store.layout import StoreRow
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.transform import Transform
from octfm.volume.volume import Laterality, Volume

NATIVE = (24, 384, 192)
"""Rendered B-scans, rows and columns: 5.0 to 6.7 µm per row, as after preparation."""
PREPROCESSING = Preprocessing(image_size=(16, 384, 128), target_spacing=(0.25, 0.0052, 0.0352))
"""The central 4 x 2 x 4.5 mm at the axial pitch of the default Preprocessing."""
Bscans = Literal["registered", "unregistered", "native"]
HELD_OUT = "synthetic_held_out"
TRAIN_SEED, TEST_SEED = 30, 31
"""Defaults are chosen from this table, so its seeds are those of development (docs/phantom.md). Test participants are
another cohort's, or the balance of one would make chance level differ."""
VALIDATION = 16
"""Number of validation participants, numbered after the training ones."""


@dataclass(frozen=True)
class Scan:
    """One acquisition to render; these fields determine it completely."""

    person: Participant
    seed: int
    laterality: Laterality
    scanner: str
    split: str

    @property
    def name(self) -> str:
        return f"phantom{PHANTOM_VERSION}.{self.seed}.{self.person.index}.{self.laterality}.{self.scanner}"

    def acquire(self) -> tuple[Volume, GroundTruth]:
        eye = eye_of(self.person, self.laterality, self.seed)
        stream = [self.seed, 21, self.person.index, list(SCANNERS).index(self.scanner), SIDES.index(self.laterality)]
        return render(eye, SCANNERS[self.scanner], np.random.default_rng(stream), NATIVE)

    def labels(self) -> dict[str, str]:
        diagnosis, severity = self.person.eye_diagnosis[self.laterality], self.person.severity[self.laterality]
        cst = central_subfield_um(eye_of(self.person, self.laterality, self.seed))
        return {"diagnosis": diagnosis, "severity": f"{severity:.4f}", "cst_um": f"{cst:.2f}"}


def scans(train: int, test: int, held_out: int) -> Iterator[Scan]:
    """Both eyes of `train` participants, one eye of `test` others; `held_out` of these again, on an unseen scanner."""
    draw = partial(draw_cohort, scanners=DEFAULT_SCANNERS, second_scanner=0.0, fractions=(1.0, 0.0, 0.0))
    for person in draw(train + VALIDATION, TRAIN_SEED):
        split = "train" if person.index < train else "val"
        yield from (Scan(person, TRAIN_SEED, side, person.scanners[0], split) for side in SIDES)
    tested = draw(test, TEST_SEED)
    # In half of the diseased participants only one eye is diseased: take that one, so that severities vary.
    sides = [max(SIDES, key=lambda s, p=p: (p.severity[s], hash_of(p, s))) for p in tested]
    yield from (
        Scan(person, TEST_SEED, side, person.scanners[0], "test") for person, side in zip(tested, sides, strict=True)
    )
    yield from (
        Scan(person, TEST_SEED, side, HELD_OUT, "test") for person, side in zip(tested[:held_out], sides, strict=False)
    )


def hash_of(person: Participant, side: Laterality) -> int:
    """Eye to use if both are equally diseased, balanced over participants."""
    return (person.index * 7919 + SIDES.index(side) * 104729) % 97


class NativeBscans(Preprocessing):
    """Preprocessing without averaging across B-scans, which keep the scanner's spacing of .25 to .30 mm.

    The field is therefore 4.0 to 4.8 mm deep.
    """

    def _place(self, *args: Any, **kwargs: Any) -> tuple[Transform, float]:
        placed, in_crop = super()._place(*args, **kwargs)
        middle = placed.origin[0] + (placed.shape[0] - 1) / 2 * placed.scale[0]
        first = round(middle - (placed.shape[0] - 1) / 2)
        last = placed.native_shape[0] - placed.shape[0]
        origin = (float(min(max(first, 0), last)), *placed.origin[1:])
        return replace(placed, origin=origin, scale=(1.0, *placed.scale[1:])), in_crop


def preprocessing_of(bscans: Bscans) -> Preprocessing:
    if bscans == "native":
        return NativeBscans.model_validate(PREPROCESSING.model_dump() | {"register_bscans": False})
    return PREPROCESSING.model_copy(update={"register_bscans": bscans == "registered"})


def make_store(
    folder: Path,
    train: int,
    test: int,
    held_out: int,
    *,
    bscans: Bscans = "registered",
    echo: Callable[[str], None] = print,
) -> Store:
    """Render what the store still lacks; bytes do not depend on interruptions.

    A second store holds the same scans with other B-scans.
    """
    preprocessing = preprocessing_of(bscans)
    folder = folder if bscans == "registered" else folder.with_name(f"{folder.name}-{bscans}")
    wanted = list(scans(train, test, held_out))
    with StoreWriter(folder, preprocessing) as writer:
        have = [row.acquisition for row in writer.rows]
        if have != [scan.name for scan in wanted[: len(have)]]:
            raise SystemExit(
                f"{folder}: holds the volumes of another cohort; delete it, or give the numbers it was made with"
            )
        for index in range(len(have), len(wanted)):
            scan = wanted[index]
            prepared = preprocessing(scan.acquire()[0])
            digest = stage(prepared, writer.staging, str(index), writer.compression)
            writer.append(
                StoreRow(
                    index=index,
                    acquisition=scan.name,
                    uri=f"{scan.name}.phantom",
                    participant=scan.person.participant,
                    eye_id=f"{scan.person.participant}_{scan.laterality}",
                    laterality=scan.laterality,
                    scanner=scan.scanner,
                    protocol=SCANNERS[scan.scanner].protocol,
                    split=scan.split,
                    participant_labels=scan.labels(),
                    flags=(),
                    confident=prepared.confident,
                    confidence=dict(prepared.confidence),
                    transform=prepared.transform.to_dict(),
                    checksum=digest,
                ),
                str(index),
            )
            if (index + 1) % 100 == 0 or index + 1 == len(wanted):
                echo(f"cohort: {index + 1:,} of {len(wanted):,} volumes")
    return Store.open(folder)
