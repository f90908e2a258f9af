"""Embeddings and labels of participants whose vectors encode the diagnosis to a chosen degree."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

SCANNERS = ("heidelberg_spectralis", "topcon_triton")


class Cohort:
    """Participants with two eyes on one of two scanners; vectors that know the diagnosis as well as `signal` says."""

    def __init__(self, participants=60, width=16, seed=0, split=(0.7, 0.1)):
        rng = np.random.default_rng(seed)
        self.rng, self.width, self.rows = rng, width, []
        for i in range(participants):
            diagnosis = ("healthy", "drusen", "dme")[i % 3]
            part = ("train", "val", "test")[
                int(np.searchsorted(np.cumsum(split), (i // 3) / (participants / 3), side="right"))
            ]
            for laterality in "RL":
                self.rows.append(
                    {
                        "acquisition": f"1.2.{i}.{laterality}",
                        "participant": str(1000 + i),
                        "laterality": laterality,
                        "eye_id": f"{1000 + i}_{laterality}",
                        "scanner": SCANNERS[i % 2],
                        "protocol": "macula",
                        "split": part,
                        "participant_labels": json.dumps({"study_group": ("a", "b")[i // 6 % 2]}),
                        "diagnosis": diagnosis,
                        "cst_um": 270 + 60 * (diagnosis == "dme") + 15 * rng.normal(),
                    }
                )

    def embeddings(self, path, name="pretrained", signal=4.0, order=None, encoder="vit"):
        rng = np.random.default_rng(len(name))
        direction = rng.normal(size=(4, self.width))
        vectors = []
        for row in self.rows:
            known = [
                row["diagnosis"] == "drusen",
                row["diagnosis"] == "dme",
                (row["cst_um"] - 270) / 30,
                row["scanner"] == SCANNERS[0],
            ]
            vectors.append(signal * np.array(known, float) @ direction / 4 + rng.normal(size=self.width))
        keep = [
            "acquisition",
            "participant",
            "eye_id",
            "laterality",
            "scanner",
            "protocol",
            "split",
            "participant_labels",
        ]
        table = pa.table({k: [r[k] for r in self.rows] for k in keep}).append_column(
            "vector", pa.array([v.astype(np.float32) for v in vectors], pa.list_(pa.float32()))
        )
        if order is not None:
            table = table.take(order)
        meta = {"name": name, "key": f"key-{name}", "encoder": encoder, "precision": "float32", "width": self.width}
        pq.write_table(table.replace_schema_metadata({"octfm": json.dumps(meta)}), path)
        return path

    def labels(self, path, *, by="eye", order=None, header="participant_id"):
        rows = self.rows if order is None else [self.rows[i] for i in order]
        columns = {"eye": [header, "laterality"], "acquisition": [header, "sop_instance_uid"]}[by] + [
            "diagnosis",
            "cst_um",
        ]
        lines = ["\t".join(columns)]
        for r in rows:
            ids = [r["participant"], r["laterality"] if by == "eye" else r["acquisition"]]
            lines.append("\t".join([*ids, r["diagnosis"], f"{r['cst_um']:.3f}"]))
        path.write_text("\n".join(lines) + "\n")
        return path
