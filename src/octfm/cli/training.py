"""The verbs that train: demo, plan, doctor, pretrain, bench, watch."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from octfm.cli import options as opt
from octfm.errors import ConfigError

if TYPE_CHECKING:
    from octfm.store.store import Store


def demo(
    context: typer.Context,
    out: opt.Out = Path("demo"),
    data: Annotated[
        Path | None, opt.local_option("FOLDER", "Your own folder of OCT files instead of the phantom cohort.")
    ] = None,
    labels: Annotated[
        Path | None,
        opt.local_option(
            "TABLE", "Your question: CSV or TSV with participant_id (and laterality) and one column per target."
        ),
    ] = None,
    target: Annotated[
        list[str] | None, opt.option("COLUMN", "Column of --labels to ask about; repeat for several. Default: all.")
    ] = None,
    max_samples: Annotated[
        int | None, opt.option("N", "Use at most this many acquisitions of --data.", min=1, max=10**9)
    ] = None,
    participant_from: opt.ParticipantFrom = None,
    seed: Annotated[
        int,
        opt.option(
            "N",
            "Seed of the phantom cohort and of training; 0-99 are for development.",
            min=0,
            max=opt.MAX_SEED,
        ),
    ] = 100,
    quick: Annotated[bool, opt.flag("Few participants and steps, in a minute; the results mean nothing.")] = False,
    objective: Annotated[
        str, opt.option("NAME", "Pretraining objective: mae (best within minutes) or vjepa2.")
    ] = "mae",
    sabotage: Annotated[
        str | None,
        opt.option(
            "FAULT", "Plant a fault and see it detected: teacher-frozen, context-unmasked, lr-restart or nan-volume."
        ),
    ] = None,
) -> None:
    """Show everything on a phantom clinic: a first picture at once, then pretraining, probe and report; or ask a
    question about your own scans.

    Examples:
    octfm demo --quick
    octfm demo --data my_scans/ --labels labels.csv --target diagnosis --out mine
    """
    from octfm.demo import run_demo, run_sabotage

    if sabotage is None:
        run_demo(
            out,
            data=data,
            labels=labels,
            targets=tuple(target or ()),
            max_samples=max_samples,
            participant_from=tuple(participant_from or ()),
            seed=seed,
            quick=quick,
            objective=objective,
            echo=opt.echo_line,
        )
        return
    others = ("data", "labels", "target", "max_samples", "participant_from", "seed", "objective")
    opt.refuse(context, others, "--sabotage trains vjepa2 on the quick phantom cohort of seed 1")
    run_sabotage(sabotage, out, echo=opt.echo_line)


def plan(
    store: Annotated[str, opt.place_argument("STORE", "Prepared store, also s3:// or gs://.")],
    hours: Annotated[float, opt.option("HOURS", "Time that the run may take.", min=0.01, max=1e5)] = 24,
    device: opt.Device = None,
) -> None:
    """Propose preset, batch, steps and hours of a pretraining run for this store and machine.

    Examples:
    octfm plan prepared
    octfm plan prepared --hours 8 --device cpu
    """
    from octfm.pretraining.preflight.plan import plan as propose
    from octfm.store.store import Store

    opt.echo_line(*propose(Store.open(store), device, hours).lines())


def doctor(
    context: typer.Context,
    config: opt.Config,
    overrides: Annotated[list[str] | None, opt.argument("KEY=VALUE", "section.key=value")] = None,
    store: opt.Store = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    out: opt.OutPlace = Path("runs/run"),
    device: opt.Device = None,
    plot: Annotated[
        Path | None, opt.local_option("FILE", "Also draw the schedules and the mask coverage into this PNG file.")
    ] = None,
    ranks: Annotated[
        int, opt.option("N", "Check for a job of this many ranks, each on a device like this one.", min=1, max=100_000)
    ] = 1,
    tpu: Annotated[
        str | None,
        opt.option(
            "SLICE",
            "Instead of the checks, compile the step for this TPU slice (v4-32), without a TPU, and print the "
            "memory per device. Takes minutes.",
        ),
    ] = None,
) -> None:
    """Check a config before step 0: PASS, WARN or FAIL, what was measured and what to do.

    Examples:
    octfm doctor vit_s --store prepared
    octfm doctor vit_s --store prepared --epochs 300 --plot curves.png
    """
    from octfm.pretraining.preflight import examine, examine_tpu
    from octfm.pretraining.settings import load_config

    if tpu is not None:
        opt.refuse(context, ("out", "device", "plot", "ranks"), "--tpu compiles the step for a slice")
    settings = load_config(config, opt.pretraining_words(overrides, store, steps, epochs))
    checks = examine(settings, out, device, plot, ranks) if tpu is None else examine_tpu(settings, tpu, opt.echo_line)
    width = max(len(check.name) for check in checks)
    for check in checks:
        opt.echo_line(f"{check.status}  {check.name:<{width}}  {check.measured}")
        if check.advice:
            opt.echo_line(f"{'':{width + 6}}  -> {check.advice}")
    count = {status: sum(check.status == status for check in checks) for status in ("PASS", "WARN", "FAIL")}
    opt.echo_line(f"{len(checks)} checks: {count['PASS']} passed, {count['WARN']} to look at, {count['FAIL']} failed")
    if plot is not None and plot.is_file():
        opt.echo_line(plot)
    if count["FAIL"]:
        raise typer.Exit(1)


def pretrain(
    config: opt.Config,
    overrides: Annotated[
        list[str] | None, opt.argument("KEY=VALUE", "section.key=value, for example data.store=prepared/ model.depth=6")
    ] = None,
    store: opt.Store = None,
    steps: opt.Steps = None,
    epochs: opt.Epochs = None,
    out: opt.OutPlace = Path("runs/run"),
    device: opt.Device = None,
    override: Annotated[
        bool, opt.flag("Resume although settings differ from the run's; run.json records both.", "--override")
    ] = False,
    smoke: Annotated[
        bool, opt.flag("A tiny version of the run, under a minute on a CPU; on phantoms if no store is set.", "--smoke")
    ] = False,
) -> None:
    """Pretrain an encoder; the same command resumes an interrupted run.

    Self-supervised on your scans, without labels; dense is synthetic-supervised: it learns from the truth of synthetic
    scans that are rendered as they are needed.

    Examples:
    octfm pretrain vit_s --store prepared --out runs/vit_s
    octfm pretrain vit_s --store prepared --steps 20000 model.depth=6 --out runs/small
    octfm pretrain dense --out runs/dense
    octfm pretrain vit_s --smoke
    """
    from octfm.io.ranks import rank, world_size
    from octfm.pretraining.initial_weights import read_initial
    from octfm.pretraining.pretrain import pretrain as train
    from octfm.pretraining.settings import load_config
    from octfm.pretraining.settings import smoke as shrink

    settings, prepared = load_config(config, opt.pretraining_words(overrides, store, steps, epochs)), None
    if smoke:
        phantoms = settings.data.phantoms
        needs_store = settings.data.store is None and (phantoms is None or phantoms.share < 1)
        if world_size() > 1 and needs_store:
            raise ConfigError(
                "--smoke with several ranks: every rank would write phantoms into the same folder; set data.store"
            )
        if init := settings.model.init:
            read_initial(init, settings)  # a misspelt name or another size would stop the run itself
        settings = shrink(settings, world_size())
        size = f"{settings.model.depth} block{'s' * (settings.model.depth > 1)} of {settings.model.width} channels"
        batch = settings.data.global_batch_size
        if rank() == 0:
            opt.echo_line(f"smoke: {settings.steps} steps of {batch} volumes, {size}, whatever the settings say")
            if init:
                opt.echo_line(f"smoke: {init} has the sizes of the settings; these small networks begin at random")
        if needs_store:
            # The phantoms of a run in a bucket lie in the working directory.
            local_out = out if isinstance(out, Path) else Path(out.name)
            prepared = _phantom_store(local_out.with_name(f"{out.name}_phantoms"))
    train(settings, prepared, out, device, echo=opt.echo_line, override=override)


def bench(
    config: opt.Config,
    overrides: Annotated[
        list[str] | None, opt.argument("KEY=VALUE", "section.key=value; without data.store, random volumes are used.")
    ] = None,
    store: opt.Store = None,
    steps: Annotated[int, opt.option("N", "Timed steps per trial.", min=1, max=10_000)] = 3,
    device: opt.Device = None,
) -> None:
    """Measure a config on this machine: volumes/s, MFU, data wait, memory, hours, and what to change first.

    Examples:
    octfm bench vit_s --store prepared
    """
    from octfm.pretraining.bench import bench as measure
    from octfm.pretraining.data import given_store
    from octfm.pretraining.settings import load_config

    settings, prepared = load_config(config, opt.with_options(overrides, {"data.store": store})), None
    if settings.data.store is not None or settings.data.phantoms is not None:
        prepared = given_store(settings)
    opt.echo_line(*measure(settings, prepared, device, steps, echo=opt.echo_line).lines())


def watch(
    run: Annotated[
        opt.Place, opt.argument("RUN", "Folder or address of a run, in progress or finished.", parser=opt.place)
    ],
    once: Annotated[bool, opt.flag("Print the dashboard once and exit, for scripts.", "--once")] = False,
    every: Annotated[float, opt.option("SECONDS", "Seconds between updates.", min=0.05, max=86_400)] = 2.0,
) -> None:
    """Show a run live in the terminal: curves, verdicts, events, time left.

    Examples:
    octfm watch runs/vit_s
    """
    from octfm.report.watch import watch as follow

    follow(run, once=once, every_s=every)


def _phantom_store(folder: Path) -> "Store":
    """Two dozen small phantom volumes, prepared: the training data of `--smoke` if no store is set."""
    from octfm.catalog.scan import scan as scan_root
    from octfm.config import load
    from octfm.phantom import write_phantom
    from octfm.pretraining.settings import SMOKE_IMAGE_SIZE, SMOKE_SPACING
    from octfm.store.prepare import prepare as prepare_catalog
    from octfm.volume.preprocessing import Preprocessing

    # write_phantom names the folder so only when it is complete.
    if not (folder / "clinic").is_dir():
        write_phantom(folder / "clinic", 12, 0, size=(16, 160, 128), fractions=(0.6, 0.25, 0.15))
    preprocessing = load(Preprocessing, {"image_size": SMOKE_IMAGE_SIZE, "target_spacing": SMOKE_SPACING})
    return prepare_catalog(scan_root(str(folder / "clinic")), folder / "prepared", preprocessing, progress=False)
