"""Is it worse for some? Every group against everybody else, at the participants' own eyes and scans."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from octfm.catalog.labels import as_number
from octfm.errors import EvaluationError
from octfm.evaluation.scoring import LOWER_IS_BETTER
from octfm.evaluation.statistics import bootstrap_together
from octfm.trust.scanners import few
from octfm.trust.study import Study, claimed, difference, estimate, part, part_metric

AGE_BANDS = (50.0, 60.0, 70.0, 80.0)
"""Where one band of age ends and the next begins, in years."""
SITE = "clinical_site"


def subgroups(study: Study, columns: Sequence[str] = (), age_bands: Sequence[float] = AGE_BANDS) -> dict[str, Any]:
    """The run's probe on each site, age band, eye and scanner, and on each value of `columns`, against all others.

    Numbers by their absolute error: R² falls where a group is alike, whatever the errors. Holm over all gaps of all targets.
    """
    results, comparisons = [], []
    dimensions = group_columns(study, columns, age_bands)
    for task in study.tasks:
        said = study.said(task, study.encoders[0])
        metric = "mae" if task.cases.kind == "regression" else task.metric
        lower = metric in LOWER_IS_BETTER
        for name, of_row in dimensions.items():
            values = np.array([of_row[i] or "" for i in task.cases.rows[said.rows]], dtype=object)
            present = sorted({v for v in values if v})
            if len(present) < 2:
                continue
            for position, value in enumerate(present):
                inside = values == value
                rest = ~inside & (values != "")
                # A group may lack a class altogether; then there is nothing to compare.
                parts = [part_metric(task.cases, part(said, keep), metric) for keep in (inside, rest)]
                rare = parts[0].rare
                a, b = bootstrap_together(
                    [(p.metric, p.participants) for p in parts], resamples=study.resamples, seed=study.seed
                )
                facts = {"target": task.name, "metric": metric, "group": name, "value": value}
                row = {**facts, **estimate(None if rare else a, a.estimate), "n_participants": parts[0].n_participants}
                results.append(row | {"n_acquisitions": int(inside.sum()), "lower_is_better": lower, "note": few(rare)})
                if position and len(present) == 2:
                    continue  # the other one of two is the same comparison
                usable = not rare and not parts[1].rare
                gap = difference(
                    a if usable else None, b if usable else None, planned=True, lower_is_better=lower, **facts
                )
                against = "the others" if len(present) > 2 else present[1]
                comparisons.append(
                    gap | {"against": against, "lower_is_better": lower, "note": few(rare or parts[1].rare)}
                )
    return {
        "encoder": study.reference,
        "groups": list(dimensions),
        "results": results,
        "comparisons": claimed(comparisons),
        "sentence": None
        if results
        else "No column tells groups apart: no site, age, eye or scanner differs among those tested.",
    }


def group_columns(study: Study, columns: Sequence[str], age_bands: Sequence[float]) -> dict[str, list[str | None]]:
    """The group of every row, for every dimension that is known. EvaluationError for a named column that does not exist."""
    data, table = study.data, study.table
    bands = tuple(age_bands)
    if list(bands) != sorted(set(bands)) or not bands or not all(0 < band < 200 for band in bands):
        raise EvaluationError(
            f"--age-bands: expected rising years such as 50,60,70, got {', '.join(f'{b:g}' for b in bands) or 'none'}"
        )

    def column(name: str) -> list[str | None]:
        if table is not None and name in table.columns:
            return table.join(name, zip(data.acquisition, data.participant, data.laterality, strict=True))
        return [labels.get(name) or None for labels in data.participant_labels]

    found: dict[str, list[str | None]] = {
        "site": column(SITE),
        "age": [_band(as_number(v), bands) for v in column("age")],
        "eye": [{"R": "right", "L": "left"}.get(side or "") for side in data.laterality],
        "scanner": [str(name) for name in data.scanner],
    }
    for name in columns:
        found[name] = column(name)
        if not any(found[name]):
            known = sorted(
                {key for labels in data.participant_labels for key in labels} | set(table.columns if table else ())
            )
            raise EvaluationError(f"--group {name}: no label column {name}; columns: {', '.join(known) or 'none'}")
    return {name: values for name, values in found.items() if len({v for v in values if v}) > 1}


def _band(age: float | None, bands: tuple[float, ...]) -> str | None:
    if age is None:
        return None
    at = int(np.searchsorted(bands, age, side="right"))
    if at == 0:
        return f"under {bands[0]:g}"
    return f"{bands[-1]:g} and older" if at == len(bands) else f"{bands[at - 1]:g} to under {bands[at]:g}"
