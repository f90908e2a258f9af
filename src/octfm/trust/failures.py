"""The worst predictions of every target, each with the scan that contributed most to the error."""

from typing import Any

import numpy as np

from octfm.evaluation.scoring import Units, calibrated, to_units
from octfm.trust.study import Study, Task

WORST = 8
"""Units to show for each target."""


def failures(study: Study) -> list[dict[str, Any]]:
    """Per target, the units with the largest error: 1 − probability of the true class, or the absolute error."""
    found = []
    for task in study.tasks:
        predictions = study.predictions(task, study.encoders[0])
        units = to_units(task.cases, predictions)
        unit_ids = task.cases.unit[predictions.rows]
        ids, member = np.unique(unit_ids, return_inverse=True)
        if task.cases.classes is None:
            error = np.abs(units.value[:, 0] - units.truth)
            row_error = np.abs(predictions.value[:, 0] - units.truth[member])
        else:
            truth = units.truth
            error = 1 - calibrated(units)[np.arange(len(truth)), truth]
            row_error = 1 - calibrated(predictions)[np.arange(len(member)), truth[member]]
        for place in np.lexsort((ids, -error))[:WORST]:
            rows = np.flatnonzero(member == place)
            shown = rows[int(np.argmax(row_error[rows]))]
            truth, said, wrong = _words(task, units, int(place))
            found.append(
                {
                    "target": task.name,
                    "unit": task.cases.unit_name,
                    "acquisition": str(study.data.acquisition[task.cases.rows[predictions.rows[shown]]]),
                    "truth": truth,
                    "said": said,
                    "error": float(error[place]),
                    "wrong": wrong,
                }
            )
    return found


def _words(task: Task, units: Units, place: int) -> tuple[str, str, bool]:
    """Truth and prediction of one unit, for the page, and whether they differ."""
    classes = task.cases.classes
    if classes is None:
        return f"{units.truth[place]:.1f}", f"{units.value[place, 0]:.1f}", True
    p = calibrated(units)[place]
    truth, said = int(units.truth[place]), int(p.argmax())
    return classes[truth], f"{classes[said]} (probability {p.max():.2f})", truth != said
