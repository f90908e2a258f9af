"""Performance by subgroup (site, age, eye, scanner, other columns), each compared with everybody else."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from octfm.catalog.labels import as_number
from octfm.display import SIDES
from octfm.errors import EvaluationError
from octfm.evaluation.cases import column_values, label_columns
from octfm.evaluation.scoring import LOWER_IS_BETTER, estimate, rare_note
from octfm.trust.study import Study, add_claims, difference, part, part_metric

AGE_BANDS = (50.0, 60.0, 70.0, 80.0)
"""Boundaries between age bands, in years."""
SITE = "clinical_site"
NO_GROUPS = "No column tells groups apart: no site, age, eye or scanner differs among those tested."


def subgroups(study: Study, columns: Sequence[str] = (), age_bands: Sequence[float] = AGE_BANDS) -> dict[str, Any]:
    """Score the run's probe in each subgroup and compare it with all other test rows. Groups are site, age band, eye,
    scanner and the values of `columns`. Regression is scored by absolute error, because R² is low in a homogeneous
    group whatever the errors. p values are corrected over all gaps of all targets. Raises EvaluationError as
    `group_columns`."""
    results, comparisons = [], []
    dimensions = group_columns(study, columns, age_bands)
    for task in study.tasks:
        predictions = study.predictions(task, study.encoders[0])
        metric = "mae" if task.cases.kind == "regression" else task.metric
        lower = metric in LOWER_IS_BETTER
        for name, of_row in dimensions.items():
            values = np.array([of_row[i] or "" for i in task.cases.rows[predictions.rows]], dtype=object)
            present = sorted({v for v in values if v})
            if len(present) < 2:
                continue
            for position, value in enumerate(present):
                inside = values == value
                rest = ~inside & (values != "")
                parts = [part_metric(task.cases, part(predictions, keep), metric) for keep in (inside, rest)]
                rare = parts[0].rare
                a, b = study.bootstrap_together(parts)
                facts = {"target": task.name, "metric": metric, "group": name, "value": value}
                row = {**facts, **estimate(None if rare else a, a.estimate), "n_participants": parts[0].n_participants}
                results.append(
                    row | {"n_acquisitions": int(inside.sum()), "lower_is_better": lower, "note": rare_note(rare)}
                )
                if position and len(present) == 2:
                    continue  # of two groups, the second comparison repeats the first
                # No comparison if the group or the rest has too few participants, or none, of some class.
                too_few = rare or parts[1].rare
                pair = (None, None) if too_few else (a, b)
                gap = difference(*pair, planned=True, lower_is_better=lower, **facts)
                against = "the others" if len(present) > 2 else present[1]
                comparisons.append(gap | {"against": against, "lower_is_better": lower, "note": rare_note(too_few)})
    return {
        "encoder": study.reference,
        "groups": list(dimensions),
        "results": results,
        "comparisons": add_claims(comparisons),
        "sentence": None if results else NO_GROUPS,
    }


def group_columns(study: Study, columns: Sequence[str], age_bands: Sequence[float]) -> dict[str, list[str | None]]:
    """The group of every row, by dimension; dimensions with one group are left out. Raises EvaluationError for age
    bands that do not ascend, and for a name in `columns` without any value."""
    data, table = study.data, study.table
    bands = tuple(age_bands)
    if list(bands) != sorted(set(bands)) or not bands or not all(0 < band < 200 for band in bands):
        raise EvaluationError(
            "--age-bands: expected years in ascending order such as 50,60,70, "
            f"got {', '.join(f'{b:g}' for b in bands) or 'none'}"
        )

    found: dict[str, list[str | None]] = {
        "site": column_values(SITE, data, table),
        "age": [_band(as_number(v), bands) for v in column_values("age", data, table)],
        "eye": [SIDES.get(side or "") for side in data.laterality],
        "scanner": [str(name) for name in data.scanner],
    }
    for name in columns:
        found[name] = column_values(name, data, table)
        if not any(found[name]):
            known = ", ".join(sorted(label_columns(data, table))) or "none"
            raise EvaluationError(f"--group {name}: no label column {name}; columns: {known}")
    return {name: values for name, values in found.items() if len({v for v in values if v}) > 1}


def _band(age: float | None, bands: tuple[float, ...]) -> str | None:
    if age is None:
        return None
    at = int(np.searchsorted(bands, age, side="right"))
    if at == 0:
        return f"under {bands[0]:g}"
    return f"{bands[-1]:g} and older" if at == len(bands) else f"{bands[at - 1]:g} to under {bands[at]:g}"
