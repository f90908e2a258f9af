"""A planted fault in the quick demonstration, and whether the monitors name it while the run trains."""

from pathlib import Path

from octfm.demo.clinic import QUICK, prepared_clinic
from octfm.demo.stages import Stages
from octfm.errors import ConfigError, Echo, EvaluationError
from octfm.io.location import local_path

SABOTAGED_AT = 40
"""Step, of 60, at which the fault is planted."""
SEED = 1


def run_sabotage(name: str, out: str | Path, *, echo: Echo = print) -> Path:
    """Train the quick demonstration with a planted fault of octfm.pretraining.monitors.sabotage.NAMES, and return the
    path of its report.

    Raises EvaluationError if the monitors do not name the fault while the run trains.
    """
    from octfm.errors import TrainingError
    from octfm.pretraining.monitors.sabotage import NAMES, sabotage
    from octfm.pretraining.pretrain import pretrain
    from octfm.pretraining.settings import load_config
    from octfm.report.html import write_report
    from octfm.run.tracking import read_metrics
    from octfm.store.store import Store

    if name not in NAMES:
        raise ConfigError(f"--sabotage: expected one of {', '.join(NAMES)}; got {name!r}")
    out, steps, at = local_path(out), 60, SABOTAGED_AT
    stages = Stages(out, echo, 2)
    with stages.stage("clinic", f"{QUICK.participants} phantom participants, listed and prepared"):
        prepared_clinic(out, QUICK, SEED)
    config = load_config(
        "demo_vjepa2",
        (f"seed={SEED}", f"steps={steps}", "log_every_steps=5", "validate_every_steps=20", "ckpt_every_steps=20"),
    )
    run, store = out / f"run-{name}", Store.open(out / "prepared")
    with stages.stage("pretraining", f"{steps} steps, {name} after step {at}; what the monitors report:"):
        try:
            with sabotage(name, at):
                pretrain(config, store, run, echo=lambda line: stages.say(f"   {line}"))
        except TrainingError as error:
            stages.say(f"   the run stopped: {error}")
    incidents = [row for row in read_metrics(run / "metrics.jsonl") if row["kind"] == "incident"]
    report = out / f"report-{name}.html"
    write_report(run, report, catalog=out / "catalog", store_path=store.path)
    named = next((row for row in incidents if row["what"] == NAMES[name]), None)
    if named is None:
        raise EvaluationError(
            f"{run}: {name} was planted after step {at}, but the monitors reported only "
            f"{[row['what'] for row in incidents]}"
        )
    stages.say(
        f"planted {name} after step {at}; named at step {named['step'] + 1}: {named['what']}: {named['sentence']}"
    )
    stages.say(f"report: {report.resolve()}")
    return report
