"""Results of probe, finetune and segment: the content of probe.json, finetune.json and segment.json, as tables."""

from collections.abc import Iterable
from typing import Any

from octfm.display import box, brief, data_frame, interval, number
from octfm.errors import EvaluationError
from octfm.evaluation.scoring import HEADLINE, fails_holm
from octfm.io.location import Location, from_json, location

FILES = ("probe.json", "finetune.json", "segment.json")
FORMATS = {"octfm-probe": "probe", "octfm-finetune": "fine-tuning", "octfm-segment": "segmentation"}
SHOWN = (*HEADLINE, "mae", "dice")
"""Metrics of tables in a notebook: those of probes, and those of segmentations, which have mae without r2."""
MOST_ROWS = 40


class Result(dict):
    """What probe.json, finetune.json or segment.json holds, a dict; `results` and `comparisons` are lists of rows."""

    @property
    def kind(self) -> str:
        """What was measured: probe, fine-tuning or segmentation."""
        return FORMATS.get(self.get("format", ""), "result")

    def __repr__(self) -> str:
        rows = self.get("results", [])
        encoders = list(dict.fromkeys(row["encoder"] for row in rows))
        targets = list(dict.fromkeys(row["target"] for row in rows))
        first = next(iter(_headline(rows)), None)
        example = f"{first['target']} {first['metric']} of {first['encoder']} {_estimate(first)}" if first else ""
        return brief(
            "Result", self.kind, f"{number(len(targets), 'target')} × {number(len(encoders), 'encoder')}", example
        )

    def _repr_html_(self) -> str:
        rows = list(_headline(self.get("results", [])))
        table = [
            (row["target"], row["metric"].replace("_", " "), row["encoder"], _estimate(row), tested_people(row))
            for row in rows[:MOST_ROWS]
        ]
        settings = self.get("settings", {})
        facts = {
            "design": str(settings.get("design", "")).replace("_", " "),
            "readout": str(settings.get("readout", "")),
            "against the first": "; ".join(_verdicts(self.get("comparisons", []), rows[0]["encoder"] if rows else "")),
            "skipped": "; ".join(f"{s['target']}: {s['sentence']}" for s in self.get("skipped", [])),
            "more": f"{len(rows) - MOST_ROWS} rows, see to_pandas()" if len(rows) > MOST_ROWS else "",
        }
        columns = ("target", "metric", "encoder", "estimate (95 % interval)", "tested")
        return box(f"Result of a {self.kind}", facts, table=(columns, table), note="to_pandas() has every metric.")

    def to_pandas(self, *, comparisons: bool = False) -> Any:
        """A DataFrame with one row per target, metric and encoder: estimate, low and high of its 95 % interval,
        participants, note; or, with `comparisons`, one row per paired comparison. Raises ConfigError without pandas."""
        return data_frame(self["comparisons" if comparisons else "results"])


def read_result(where: str | Location) -> Result:
    """The result in a run's folder (probe.json, else finetune.json, else segment.json) or in such a file.

    Raises EvaluationError if there is none.
    """
    where = location(where)
    file = where if where.suffix == ".json" else next((where / n for n in FILES if (where / n).is_file()), None)
    if file is None or not file.is_file():
        raise EvaluationError(
            f"{where}: no result here ({', '.join(FILES)}); make one with octfm probe, finetune or segment"
        )
    try:
        content = from_json(file.read_bytes())
    except ValueError as error:
        raise EvaluationError(f"{file}: not valid JSON ({error}); compute the result again") from None
    if not isinstance(content, dict) or str(content.get("format")) not in FORMATS:
        raise EvaluationError(f"{file}: not a result of octfm probe, finetune or segment")
    return Result(content)


def _headline(rows: Iterable[dict[str, Any]]) -> Iterable[dict[str, Any]]:
    rows = list(rows)
    with_r2 = {row["target"] for row in rows if row["metric"] == "r2"}
    return (row for row in rows if row["metric"] in SHOWN and not (row["metric"] == "mae" and row["target"] in with_r2))


def _estimate(row: dict[str, Any]) -> str:
    if row["estimate"] is None:
        return "undefined"
    digits, unit = (2, " µm") if row.get("unit") == "µm" else (3, "")
    return interval(row, digits=digits) + unit


def tested_people(row: dict[str, Any]) -> str:
    """`40 participants, 3 of them seen in pretraining`."""
    return ", ".join(filter(None, (number(row["n_test_participants"], "participant"), seen_note(row))))


def seen_note(row: dict[str, Any]) -> str:
    """How many of a result's test participants pretraining has seen, or that nobody can tell; "" if none."""
    seen = row.get("seen_test_participants", 0)
    if seen is None:
        return "nobody can tell whether pretraining has seen them"
    return f"{seen} of them seen in pretraining" if seen else ""


def _verdicts(comparisons: Iterable[dict[str, Any]], first: str) -> list[str]:
    """`disease auroc: pretrained is better than random_init`, for the planned comparisons that have an interval."""
    return [
        f"{c['target']} {c['metric']}: {c['a']} is {c['verdict']} against {c['b']} "
        f"({interval({'difference': c['difference']}, digits=3)}"
        f"{', not after Holm' * fails_holm(c)})"
        for c in comparisons
        if c["low"] is not None and c["metric"] in SHOWN and c.get("planned", True) and c["a"] == first
    ]
