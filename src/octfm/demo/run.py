"""The demonstration, stage by stage, on a phantom clinic; own_scans.py has the one on a user's own scans."""

from pathlib import Path
from typing import Any

from octfm.demo.clinic import FULL, QUICK, prepared_clinic
from octfm.demo.request import DESIGN, Request
from octfm.demo.stages import Stages, gigabytes, require_room
from octfm.errors import ConfigError, Echo, EvaluationError
from octfm.io.location import local_path

LABELLED, DRAWS = (0.1, 0.3, 1.0), 3
"""Fractions of labelled training participants, and random draws of each: pretraining gains most with few labels
(docs/log)."""
FEW_LABELS = ("pretrained", "random_init", "tissue_map")
"""Encoders that are probed with fewer labels as well."""


def run_demo(out: str | Path, *, quick: bool = False, echo: Echo = print, **options: Any) -> Path:
    """Run or continue a demonstration in `out` and return the path of its report; `options` are fields of Request.

    Without `data`, a phantom clinic is made; pretraining never uses its validation and test participants, and the probe
    tests only these. With `data`, the same is done with the user's own scans, and `labels` is a table whose columns, or
    those named in `targets`, are the questions; scans that are too few to pretrain on (FEWEST) are measured by the
    packaged network of octfm segment instead. Details go to OUT/demo.log. Raises ConfigError, EvaluationError or
    AmbiguousPeople before work begins if the request cannot be met.
    """
    request = Request(local_path(out), size=QUICK if quick else FULL, **options)
    if request.data is None:
        return _phantoms(request, echo)
    from octfm.demo.own_scans import own_scans

    return own_scans(request, echo)


def _phantoms(request: Request, echo: Echo) -> Path:
    from octfm.demo.features import pretrained_features
    from octfm.demo.pages import first_picture, last_page
    from octfm.encoder.encoder import seen_by
    from octfm.evaluation.efficiency import label_efficiency
    from octfm.evaluation.probe import probe, write_probe
    from octfm.io.progress import Progress
    from octfm.layers.sample import samples
    from octfm.pretraining.settings import load_config
    from octfm.store.store import Store

    out, size, seed = request.out, request.size, request.seed
    run = out / "run"
    begun = (out / "prepared").is_dir()
    if begun and not (out / "clinic").is_dir():
        raise ConfigError(f"{out}: holds a demonstration on scans of your own; choose another --out")
    quick = "; --quick needs less" if size is FULL else ""
    free = require_room(out, 0 if begun else size.peak_bytes, quick)
    stages = Stages(out, echo, 6)
    stages.say(
        f"{size.time} on two idle CPU cores, at most {gigabytes(size.peak_bytes)} in {out} ({gigabytes(free)} free); "
        f"details in {stages.log}; stopped, the same command continues"
    )
    with stages.stage("picture", "a synthetic scan and the layers that the packaged network finds in it"):
        page = first_picture(samples(["dme"])[0].volume, out, "Synthetic: no patient's scan.")
    stages.say(f"open now: {page.resolve()}")
    what = f"{size.participants:,} phantom participants, both eyes, four scanners: render, list and prepare their files"
    with stages.stage("clinic", what), Progress("clinic", size.participants, "participants") as progress:
        labels = prepared_clinic(out, size, seed, progress.up_to)
    store = Store.open(out / "prepared")

    config = load_config(request.preset, (f"seed={seed}", *size.overrides))
    encoders = pretrained_features(stages, request, config, store, "the training participants")

    commands = request.commands(labels, DESIGN)
    with stages.stage("probe", "linear models on these features, tested on participants that pretraining has not seen"):
        try:
            seen = seen_by(run)
            result = probe(encoders, labels, design=DESIGN, seen=seen, commands=commands)
            write_probe(run / "probe.json", result)  # kept even if the label-efficiency curve below fails
            with_fewer = [e for e in encoders if e.name in FEW_LABELS]
            rows, compared = label_efficiency(
                with_fewer, labels, targets=["disease"], design=DESIGN, seen=seen, fractions=LABELLED, seeds=DRAWS
            )
            result |= {"label_efficiency": rows, "label_efficiency_comparisons": compared}
            write_probe(run / "probe.json", result)
        except EvaluationError as error:
            stages.say(f"   probe incomplete: {error}")
    return last_page(stages, run, out, store)
