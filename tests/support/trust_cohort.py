"""Participants with both eyes on several scanners, as embeddings that know what they are told to know."""

from dataclasses import replace

import numpy as np

from octfm.encoder.embeddings import Embeddings
from octfm.store.layout import StoreRow
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from support.small_store import prepared_eye, small_preprocessing

SCANNERS = ("heidelberg_spectralis", "topcon_triton", "zeiss_cirrus")
WIDTH = 12


class Cohort:
    """`participants` people, 40 % of them in the test, both eyes on every scanner named; every third is ill, and ill
    eyes are thicker."""

    def __init__(self, participants=120, scanners=SCANNERS, seed=0, effect=True, test=0.4):
        rng = np.random.default_rng(seed)
        self.seed, self.rows = seed, []
        for i in range(participants):
            ill, age, site = i % 3 == 0, int(rng.integers(45, 90)), ("UW", "UAB", "UCSD")[rng.integers(3)]
            split = "test" if (i // 3) % 10 < 10 * test else "val" if (i // 3) % 10 == 9 else "train"
            for side in "RL":
                thickness = 270 + 15 * rng.normal() + 60 * (ill and effect)
                identity = rng.normal(size=WIDTH)
                for scanner in scanners:
                    self.rows.append(
                        {
                            "acquisition": f"1.2.{i:04d}.{side}.{scanner}", "participant": f"P{i:04d}", "laterality": side,
                            "scanner": scanner, "split": split, "ill": ill, "cst": thickness, "identity": identity,
                            "labels": {
                                "age": str(age), "clinical_site": site, "diagnosis": "dme" if ill else "healthy",
                                "cst_um": f"{thickness:.3f}",
                            },
                        }
                    )  # fmt: skip

    def embeddings(self, name="run", signal=2.0, identity=0.5, scanner=1.0, noise=0.3, seed=None) -> Embeddings:
        """Vectors of disease and thickness (`signal`), of the eye, of the instrument, and noise."""
        rng = np.random.default_rng([len(name), self.seed if seed is None else seed])
        ways = rng.normal(size=(2, WIDTH))
        offset = {s: rng.normal(size=WIDTH) for s in SCANNERS}
        vectors = [
            signal * np.array([r["ill"] - 0.3, (r["cst"] - 280) / 30]) @ ways + identity * r["identity"] + scanner * offset[r["scanner"]]
            + noise * rng.normal(size=WIDTH)
            for r in self.rows
        ]  # fmt: skip
        data = Embeddings(
            name=name,
            path=name,
            metadata={"encoder": name},
            acquisition=np.array([r["acquisition"] for r in self.rows]),
            participant=np.array([r["participant"] for r in self.rows]),
            eye_id=np.array([f"{r['participant']}_{r['laterality']}" for r in self.rows]),
            laterality=tuple(r["laterality"] for r in self.rows),
            scanner=np.array([r["scanner"] for r in self.rows]),
            split=tuple(r["split"] for r in self.rows),
            participant_labels=tuple(r["labels"] for r in self.rows),
            vectors=np.array(vectors),
        )
        order = np.argsort(data.acquisition)
        return replace(
            data, **{n: getattr(data, n)[order] for n in ("acquisition", "participant", "eye_id", "scanner", "vectors")},
            **{n: tuple(np.array(getattr(data, n), dtype=object)[order]) for n in ("laterality", "split", "participant_labels")},
        )  # fmt: skip

    def store(self, folder, edit=lambda index, prepared: prepared, pixels=lambda index: "") -> Store:
        """The same people as prepared volumes: an eye looks alike on every scanner, but for speckle, gain, and more
        layers where it is ill.

        `edit` may change the volume of a row before it is written, `pixels` names its fingerprint.

        """
        preprocessing = small_preprocessing()
        with StoreWriter(folder, preprocessing) as writer:
            for index, r in enumerate(self.rows):
                eye = int(r["participant"][1:]) * 2 + (r["laterality"] == "L")
                prepared = prepared_eye(eye, preprocessing)
                rng = np.random.default_rng([7, index])
                gain = 1 - 0.25 * SCANNERS.index(r["scanner"])
                speckle = 25 * rng.normal(size=prepared.voxels.shape)
                voxels = np.clip(gain * (prepared.voxels * (0.6 if r["ill"] else 1.0) + speckle), 0, 255).astype(
                    np.uint8
                )
                prepared = edit(index, replace(prepared, voxels=voxels))
                checksum = stage(prepared, writer.staging, str(index), writer.compression)
                writer.append(
                    StoreRow(
                        index=index, acquisition=r["acquisition"], uri=f"{index}.dcm", participant=r["participant"],
                        eye_id=f"{r['participant']}_{r['laterality']}", laterality=r["laterality"], scanner=r["scanner"], protocol="macula",
                        split=r["split"], participant_labels=r["labels"], flags=(), confident=True, confidence={},
                        transform=prepared.transform.to_dict(), checksum=checksum, pixels=pixels(index),
                    ),
                    str(index),
                )  # fmt: skip
        return Store.open(folder)
