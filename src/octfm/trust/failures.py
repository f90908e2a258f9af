"""Where it was most wrong: the worst units of every target, and the one scan of each that was furthest off."""

from typing import Any

import numpy as np

from octfm.evaluation.scoring import softmax, to_units
from octfm.trust.study import Study

WORST = 8


def failures(study: Study, worst: int = WORST) -> list[dict[str, Any]]:
    """Per target, the units with the largest error: the probability that the true class was given, or the absolute error of a number."""
    found = []
    for task in study.tasks:
        said = study.said(task, study.encoders[0])
        units = to_units(task.cases, said)
        unit_ids = task.cases.unit[said.rows]
        ids, member = np.unique(unit_ids, return_inverse=True)
        if task.cases.classes is None:
            error = np.abs(units.value[:, 0] - units.truth)
            own = np.abs(said.value[:, 0] - units.truth[member])
        else:
            assert units.log_prior is not None and said.log_prior is not None
            truth = units.truth
            error = 1 - softmax(units.value + units.log_prior)[np.arange(len(truth)), truth]
            own = 1 - softmax(said.value + said.log_prior)[np.arange(len(member)), truth[member]]
        for place in np.lexsort((ids, -error))[:worst]:
            rows = np.flatnonzero(member == place)
            shown = rows[int(np.argmax(own[rows]))]
            truth_words, said_words = _words(task, units, int(place))
            found.append(
                {
                    "target": task.name,
                    "unit": task.cases.unit_name,
                    "acquisition": str(study.data.acquisition[task.cases.rows[said.rows[shown]]]),
                    "truth": truth_words,
                    "said": said_words,
                    "error": float(error[place]),
                    "wrong": bool(task.cases.classes is None or units.value[place].argmax() != units.truth[place]),
                }
            )
    return found


def _words(task: Any, units: Any, place: int) -> tuple[str, str]:
    classes = task.cases.classes
    if classes is None:
        return f"{units.truth[place]:.1f}", f"{units.value[place, 0]:.1f}"
    p = softmax(units.value[place : place + 1] + units.log_prior[place : place + 1])[0]
    return classes[int(units.truth[place])], f"{classes[int(p.argmax())]} (probability {p.max():.2f})"
