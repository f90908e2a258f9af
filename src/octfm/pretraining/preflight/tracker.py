"""Those who watch the run: are trackers there and do they answer, does the online probe find its labels?"""

import numpy as np

from octfm.errors import OctfmError
from octfm.pretraining.monitors.online_probe import find_cases
from octfm.pretraining.preflight.check import Check, fail, passed, warn
from octfm.pretraining.settings import PretrainConfig
from octfm.run.trackers import missing, mode, unusable
from octfm.store.store import Store


def tracker(config: PretrainConfig, *, resumed: bool = False) -> Check:
    """metrics.jsonl needs nothing; TensorBoard its package; W&B its package, a key and a server, or to be offline.

    A run that is resumed goes on without its server: what it has learned is worth more than its curves.
    """
    tracking = config.tracking
    if absent := missing(tracking):
        return fail(
            "tracker",
            f"{absent[0]} is not installed",
            f"pip install octfm[{absent[0]}], or turn tracking.{absent[0]} off",
        )
    told = ["metrics.jsonl", *(["TensorBoard"] if tracking.tensorboard else [])]
    if tracking.wandb is None:
        return passed("tracker", " and ".join(told))
    if mode(tracking) == "offline":
        return passed("tracker", f"{' and '.join(told)}; Weights & Biases offline, `wandb sync` uploads it later")
    if why := unusable():
        if resumed:
            return warn("tracker", why, "it goes on offline; `wandb sync` uploads it later")
        return fail("tracker", why, "set tracking.wandb=offline and `wandb sync` later, or run `wandb login`")
    return passed("tracker", f"{' and '.join(told)}; Weights & Biases answers")


def probed(config: PretrainConfig, store: Store, train_rows: np.ndarray, validation_rows: np.ndarray) -> list[Check]:
    """The labelled volumes of the online probe; nothing to say when none was asked for (F12)."""
    try:
        cases = find_cases(config.probe, store, train_rows, validation_rows)
    except OctfmError as error:
        measured, _, advice = str(error).partition("; ")
        return [fail("online probe", measured, advice or "set probe.target=null to train without it")]
    if cases is None:
        return []
    kind = f"{len(cases.classes)} classes" if cases.classes else "a number"
    return [
        passed(
            "online probe",
            f"{cases.target} ({kind}): {len(cases.train)} training and {len(cases.held_out)} validation volumes",
        )
    ]
