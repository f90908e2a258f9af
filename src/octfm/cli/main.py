"""The octfm command: typer verbs, each a thin call of the public functions; imports happen inside the verbs."""

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from octfm.addresses import mask
from octfm.cli.evaluation import register as register_evaluation
from octfm.cli.options import (
    Exclude,
    FileGB,
    FileSeconds,
    Verbs,
    limits_of,
    local_argument,
    local_option,
    place_argument,
)
from octfm.cli.report import parse_spacing
from octfm.cli.report import register as register_report
from octfm.cli.use import register as register_use
from octfm.errors import OctfmError, Preempted, one_line, shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from octfm.store.store import Store

UsageError: Any = typer.BadParameter.__bases__[0]
"""Typer brings its own copy of click, or uses click's, by its version."""

app = typer.Typer(
    name="octfm",
    cls=Verbs,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    help="A 3D foundation model for retinal OCT: DICOM in, audited shards, a JEPA that cannot cheat, a report you can believe.",
)


def _place(text: Any) -> Any:
    """A path, or an address in a bucket."""
    from octfm.io.location import location

    return location(text)


Place = Any
"""Path or BucketPath: typer knows no unions."""
Out = Annotated[Path, local_option("--out", help="Folder to write into.")]
OutPlace = Annotated[
    Place,
    typer.Option("--out", parser=_place, metavar="PLACE", help="Folder, or s3:// or gs:// address, to write into."),
]
Workers = Annotated[int | None, typer.Option(help="Parallel processes; default: all cores.", min=0, max=1024)]
MAX_SEED = 2**32 - 1
"""What NumPy, PyTorch and scikit-learn all take."""
KeepUpsideDown = Annotated[
    bool,
    typer.Option("--keep-upside-down", help="Keep scans that look upside down as they lie; else they are set aside."),
]


@app.command()
def demo(
    out: Out = Path("demo"),
    data: Annotated[
        Path | None, local_option(help="Your own folder of OCT files instead of the phantom cohort.")
    ] = None,
    max_samples: Annotated[
        int | None, typer.Option(help="Use at most so many acquisitions of --data.", min=1, max=10**9)
    ] = None,
    participant_from: Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Where paths below --data hold the participant, as for octfm scan."),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            help="Seed of the phantom cohort and of training; reported results use 100 and above.", min=0, max=MAX_SEED
        ),
    ] = 100,
    quick: Annotated[
        bool, typer.Option(help="A few participants and steps: shows the path in a minute, proves nothing.")
    ] = False,
    objective: Annotated[str, typer.Option(help="What is trained: mae (best in minutes) or vjepa2.")] = "mae",
    sabotage: Annotated[
        str | None,
        typer.Option(
            help="Plant a fault and watch it being named: teacher-frozen, context-unmasked, lr-restart or nan-volume."
        ),
    ] = None,
) -> None:
    """The whole path in ten minutes: cohort, catalog, store, pretraining, probe, report."""
    from octfm.demo import run_demo, run_sabotage
    from octfm.errors import ConfigError

    if sabotage is not None:
        if data is not None or max_samples is not None or participant_from or objective != "mae":
            raise ConfigError(
                "--sabotage trains vjepa2 on the quick phantom cohort; leave --data, --max-samples, --participant-from and --objective out"
            )
        run_sabotage(sabotage, out, echo=_say)
        return
    run_demo(
        out,
        data=data,
        max_samples=max_samples,
        participant_from=participant_from or (),
        seed=seed,
        quick=quick,
        objective=objective,
        echo=_say,
    )


@app.command()
def phantom(
    out: Annotated[Path, local_argument(help="New folder for the cohort.")],
    participants: Annotated[
        int, typer.Option(help="How many people; both eyes of each are scanned.", min=1, max=10**6)
    ] = 20,
    seed: Annotated[
        int, typer.Option(help="0-99 for development, 100 and above for reported results.", min=0, max=MAX_SEED)
    ] = 0,
    size: Annotated[
        str, typer.Option(help="B-scans x rows x columns, or `native` for each scanner's own.")
    ] = "32x256x192",
    defects: Annotated[float, typer.Option(help="Spoilt files per good one.", min=0, max=100)] = 0.0,
    zipped: Annotated[bool, typer.Option("--zip", help="One ZIP archive per scanner.")] = False,
    diagnosis: Annotated[
        list[str] | None, typer.Option(help="Draw only this diagnosis; repeat for several. Default: all seven.")
    ] = None,
    scanner: Annotated[
        list[str] | None,
        typer.Option(help="Scan on this instrument; repeat for several. Default: the four of AI-READI."),
    ] = None,
    null_effect: Annotated[
        bool, typer.Option("--null-effect", help="Draw labels as ever but render every eye healthy.")
    ] = False,
    workers: Workers = None,
) -> None:
    """Write a synthetic cohort with known truth, laid out like AI-READI."""
    from octfm.phantom import DEFAULT_SCANNERS, DIAGNOSES, write_phantom

    path = write_phantom(
        out,
        participants,
        seed,
        size=None if size == "native" else _size(size),
        scanners=scanner or DEFAULT_SCANNERS,
        diagnoses=diagnosis or DIAGNOSES,
        defects=defects,
        effect=not null_effect,
        zipped=zipped,
        workers=workers,
    )
    typer.echo(f"{path}: {participants} participants; truth in {path / 'ground_truth'}")


@app.command()
def scan(
    root: Annotated[
        str,
        place_argument(
            help="Folder or s3:// or gs:// address, in AI-READI layout or any tree of DICOM, vendor or image files."
        ),
    ],
    out: OutPlace = Path("catalog"),
    seed: Annotated[
        int,
        typer.Option(help="Seed of the participant-level split where the data recommends none.", min=0, max=MAX_SEED),
    ] = 0,
    table: Annotated[
        Place, typer.Option(parser=_place, metavar="FILE", help="Your own CSV or TSV with one row per file.")
    ] = None,
    participants: Annotated[
        Place, typer.Option(parser=_place, metavar="FILE", help="Your own CSV or TSV with one row per person.")
    ] = None,
    columns: Annotated[
        list[str] | None, typer.Option(help="What their columns hold: participant=pid,file=path,laterality=eye")
    ] = None,
    participant_from: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATTERN",
            help="Where paths hold the participant of files that name none: '{participant}/{eye}/*'; repeat for several layouts.",
        ),
    ] = None,
    nominal_spacing: Annotated[
        str | None,
        typer.Option(
            help="dz,dy,dx in mm for images and arrays that nothing states any for, such as 0.12,0.0039,0.0115."
        ),
    ] = None,
    layouts: Annotated[
        str,
        typer.Option(help="raster, or raster,radial: take stars of B-scans, too; octfm prepare makes rasters of them."),
    ] = "raster",
    extract: Annotated[
        Path | None, local_option(help="Unpack ZIP archives into this folder; without it they are read in place.")
    ] = None,
    pixels: Annotated[
        bool,
        typer.Option(help="Decode every volume, too: finds copies, discs on the wrong side, and what is upside down."),
    ] = False,
    keep_upside_down: KeepUpsideDown = False,
    follow_links: Annotated[
        bool,
        typer.Option(help="Also read what symbolic links below ROOT lead to, even out of it; else they are skipped."),
    ] = True,
    max_reject: Annotated[
        float | None,
        typer.Option(help="Exit with 1 where a larger share than this is rejected, for example 0.2.", min=0, max=1),
    ] = None,
    images: Annotated[bool, typer.Option(help="Show outliers on the data-health page.")] = True,
    pseudonymise: Annotated[
        Path | None,
        local_option(
            help="Key file, made where there is none: hash ids, UIDs and paths with it, shift dates, and keep of tables only what is "
            "known to name nobody."
        ),
    ] = None,
    keep_columns: Annotated[
        list[str] | None,
        typer.Option(help="With --pseudonymise: columns of participants to keep as they are: visus,lens_type"),
    ] = None,
    workers: Workers = None,
    file_seconds: FileSeconds = 10,
    file_gb: FileGB = 2,
) -> None:
    """Find every OCT acquisition; each file ends as an accepted row or as a reject with a reason, and data_health.html shows it all."""
    from octfm.catalog.catalog import NothingAccepted
    from octfm.catalog.catalog import scan as scan_root
    from octfm.catalog.columns import Columns
    from octfm.catalog.participants.people import AmbiguousPeople
    from octfm.errors import ConfigError
    from octfm.report.data_health import write_data_health

    if pseudonymise is not None and extract is not None:
        raise ConfigError(
            "--pseudonymise and --extract: unpacked files keep their names; archives are read in place without --extract"
        )
    if keep_columns and pseudonymise is None:
        raise ConfigError("--keep-columns: says what --pseudonymise keeps; give it with --pseudonymise KEYFILE")
    mapped = Columns.parse(columns or []).of_field
    failure = None
    try:
        limits = limits_of(file_seconds, file_gb)
        catalog = scan_root(
            root,
            seed=seed,
            table=table,
            participants=participants,
            columns=mapped,
            participant_from=participant_from or (),
            extract=extract,
            nominal_spacing_mm=parse_spacing(nominal_spacing, "--nominal-spacing") if nominal_spacing else None,
            layouts=layouts.replace(" ", "").split(","),  # type: ignore[arg-type]
            pixels=pixels,
            keep_upside_down=keep_upside_down,
            follow_links=follow_links,
            workers=workers,
            limits=limits,
        )
    except AmbiguousPeople as ambiguous:
        typer.echo(ambiguous.guess.table())
        accept = [word for pattern in ambiguous.guess.patterns for word in ("--participant-from", pattern)]
        if accept and not ambiguous.guess.without_person:
            typer.echo(f"if the guess is right: {shlex.join(['octfm', *sys.argv[1:], *accept])}")
        raise
    except NothingAccepted as nothing:
        catalog, failure = nothing.catalog, nothing  # catalog and page say what is wrong with every file
    locations = {}
    if pseudonymise is not None:
        from octfm.catalog.participants import pseudonyms

        kept = [name.strip() for text in keep_columns or [] for name in text.split(",") if name.strip()]
        lost = pseudonyms.withheld(catalog, kept)
        key = pseudonyms.read_key(pseudonymise)
        catalog = pseudonyms.pseudonymise(catalog, key, kept)
        _print_withheld(lost)
        locations = pseudonyms.locate(catalog, root, key)
    catalog.save(out)
    options = {"images": images, "max_reject": max_reject, "locations": locations}
    page = write_data_health(catalog, out / "data_health.html", **options)
    if failure is not None:
        typer.echo(str(page))
        raise failure
    counts = f"{len(catalog.acquisitions)} accepted, {len(catalog.rejects)} rejected, {len(catalog.skipped)} skipped"
    summary = catalog.summary()
    discs = summary.pop("disc_sides", {})
    _print_counts(f"{out}: {counts}", summary)
    _print_disc_sides(discs)
    of_two = [reject for reject in catalog.rejects if reject.code == "pixels_of_two_participants"]
    for reject in of_two[:3]:
        typer.echo(reject.sentence)
    typer.echo(str(page))
    if max_reject is not None:
        catalog.expect_few_rejects(max_reject, f"see {page}")


@app.command()
def prepare(
    catalog: Annotated[Place, typer.Argument(parser=_place, metavar="CATALOG", help="Folder written by `octfm scan`.")],
    out: OutPlace = Path("prepared"),
    settings: Annotated[
        list[str] | None, typer.Argument(help="Preprocessing settings, for example image_size=[64,384,384].")
    ] = None,
    like: Annotated[Path | None, local_option(help="Use the Preprocessing of this run, checkpoint or export.")] = None,
    compression: Annotated[
        str | None, typer.Option(help="none (fastest, what a local disk gets) or zstd (smaller, what a bucket gets).")
    ] = None,
    key: Annotated[Path | None, local_option(help="Key file of a pseudonymised catalog; give its --root too.")] = None,
    root: Annotated[
        Place, typer.Option(parser=_place, metavar="PLACE", help="Where a pseudonymised catalog was scanned.")
    ] = None,
    keep_upside_down: KeepUpsideDown = False,
    exclude: Exclude = None,
    workers: Workers = None,
    file_seconds: FileSeconds = 10,
    file_gb: FileGB = 2,
    dask: Annotated[
        str | None, typer.Option(help="Work on this dask cluster (tcp://host:port), which sees the same paths.")
    ] = None,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify",
            help="Prepare nothing: read the whole store at --out, name what is damaged, and set it to be prepared again by the next call.",
        ),
    ] = False,
) -> None:
    """Turn a catalog into a store of uniform volumes; a second call does only what is missing."""
    from octfm.catalog.catalog import Catalog
    from octfm.config import load
    from octfm.errors import ConfigError
    from octfm.store.prepare import prepare as prepare_catalog
    from octfm.volume.preprocessing import Preprocessing

    if compression not in (None, "none", "zstd"):
        raise ConfigError(f"--compression: expected none or zstd, got {compression!r}")
    base = {}
    if like is not None:
        from octfm.encoder.encoder import preprocessing_of

        base = preprocessing_of(like)
    preprocessing = load(Preprocessing, base, settings or [])
    scanned, locations = Catalog.load(catalog), None
    if key is not None or root is not None:
        from octfm.catalog.participants import pseudonyms

        if key is None or root is None:
            raise ConfigError(
                "--key and --root: a pseudonymised catalog needs both to find its files; any other needs neither"
            )
        locations = pseudonyms.locate(scanned, root, pseudonyms.read_key(key, make=False))
    if verify:
        from octfm.store import verify as store_verify

        found = store_verify.verify(out, scanned.acquisitions, locations, typer.echo)
        store_verify.require_whole(found, out)
        typer.echo(f"{out}: all {found.volumes:,} volumes are as they were written")
        return
    limits = limits_of(file_seconds, file_gb)
    store = prepare_catalog(
        scanned,
        out,
        preprocessing,
        workers=workers,
        compression=compression,
        locations=locations,
        limits=limits,
        cluster=dask,
        keep_upside_down=keep_upside_down,
        exclude=exclude,
    )
    typer.echo(f"{store.path}: {len(store)} volumes")


@app.command()
def doctor(
    context: typer.Context,
    config: Annotated[str, typer.Argument(help="YAML file or the name of a packaged config.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="section.key=value")] = None,
    out: OutPlace = Path("runs/run"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what there is.")] = None,
    plot: Annotated[
        Path | None, local_option(help="Also draw schedule curves and mask coverage into this PNG.")
    ] = None,
    ranks: Annotated[
        int, typer.Option(min=1, max=100_000, help="For a job of so many ranks, each with a device like this one.")
    ] = 1,
    tpu: Annotated[
        str | None,
        typer.Option(
            help="Instead: compile the step for this TPU slice (v4-32), without a TPU, and print the memory of a device. Minutes."
        ),
    ] = None,
) -> None:
    """Everything that can be known to be wrong before step 0: PASS, WARN or FAIL, what was measured and what to do."""
    from octfm.errors import ConfigError
    from octfm.pretraining.preflight import examine, examine_tpu
    from octfm.pretraining.settings import load_config

    sources = {name: context.get_parameter_source(name) for name in ("out", "device", "plot", "ranks")}
    given = [f"--{name}" for name, source in sources.items() if source is not None and source.name != "DEFAULT"]
    if tpu is not None and given:
        raise ConfigError(
            f"--tpu compiles the step for a slice and does nothing with {', '.join(given)}; leave out one or the other"
        )
    settings = load_config(config, overrides or [])
    found = examine(settings, out, device, plot, ranks) if tpu is None else examine_tpu(settings, tpu, typer.echo)
    width = max(len(check.name) for check in found)
    for check in found:
        typer.echo(f"{check.status}  {check.name:<{width}}  {one_line(check.measured)}")
        if check.advice:
            typer.echo(f"{'':{width + 6}}  -> {one_line(check.advice)}")
    count = {status: sum(check.status == status for check in found) for status in ("PASS", "WARN", "FAIL")}
    typer.echo(f"{len(found)} checks: {count['PASS']} passed, {count['WARN']} to look at, {count['FAIL']} failed")
    if plot is not None and plot.is_file():
        typer.echo(str(plot))
    if count["FAIL"]:
        raise typer.Exit(1)


@app.command()
def pretrain(
    config: Annotated[
        str, typer.Argument(help="YAML file or the name of a packaged config (vit_s, data2vec_prototype, demo).")
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value, for example data.store=prepared/ model.depth=6")
    ] = None,
    out: OutPlace = Path("runs/run"),
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what there is.")] = None,
    override: Annotated[
        bool, typer.Option("--override", help="Resume with settings other than the run's; recorded in run.json.")
    ] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="The same run in under a minute on a CPU; on phantoms if no store is named.")
    ] = False,
) -> None:
    """Pretrain an encoder; the same command resumes an interrupted run."""
    from octfm.cli.progress import Progress, on_terminal
    from octfm.errors import ConfigError
    from octfm.pretraining.pretrain import pretrain as train
    from octfm.pretraining.settings import load_config
    from octfm.pretraining.settings import smoke as shrink

    settings, store = load_config(config, overrides or []), None
    if smoke:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and settings.data.store is None:
            raise ConfigError(
                "--smoke with several ranks needs data.store: each of them would make phantoms in the same folder"
            )
        settings = shrink(settings)
        beside = out if isinstance(out, Path) else Path(out.name)
        store = _phantom_store(beside.with_name(f"{out.name}_phantoms")) if settings.data.store is None else None
    if not on_terminal() or os.environ.get("RANK", "0") != "0":
        train(settings, store, out, device, echo=_say, override=override)
        return
    bar = Progress(settings.steps if settings.epochs is None else None)
    try:
        train(settings, store, out, device, echo=bar.echo, override=override, listeners=[bar])
    finally:
        bar.close()


@app.command()
def bench(
    config: Annotated[str, typer.Argument(help="YAML file or the name of a packaged config.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="section.key=value; without data.store random volumes are used.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each trial.", min=1, max=10_000)] = 3,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what there is.")] = None,
) -> None:
    """What this machine does with a config: volumes per second, MFU, data wait, memory, hours, and what to change first."""
    from octfm.pretraining.bench import bench as measure
    from octfm.pretraining.settings import load_config
    from octfm.store.exclusion import without_excluded
    from octfm.store.store import Store

    settings = load_config(config, overrides or [])
    store = Store.open(settings.data.store) if settings.data.store is not None else None
    store = without_excluded(store, settings.data.exclude) if store is not None else None
    for line in measure(settings, store, device, steps, echo=typer.echo).lines():
        typer.echo(line)


@app.command()
def watch(
    run: Annotated[
        Place,
        typer.Argument(parser=_place, metavar="RUN", help="Run folder or address, of a run that is going on or done."),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the dashboard once and return, for scripts.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks.", min=0.05, max=86_400)] = 2.0,
) -> None:
    """A live dashboard in the terminal: curves, verdicts in words, what happened, time to go."""
    from octfm.report.watch import watch as follow

    follow(run, once=once, every_s=every)


def _say(line: str) -> None:
    """One line, whatever the names in it hold."""
    typer.echo(one_line(line))


def _phantom_store(folder: Path) -> "Store":
    """Two dozen phantom volumes, small and prepared: what `--smoke` trains on when no store is named."""
    from octfm.catalog.catalog import scan as scan_root
    from octfm.config import load
    from octfm.phantom import write_phantom
    from octfm.pretraining.settings import SMOKE_IMAGE_SIZE, SMOKE_SPACING
    from octfm.store.prepare import prepare as prepare_catalog
    from octfm.volume.preprocessing import Preprocessing

    if not (folder / "clinic").is_dir():
        write_phantom(folder / "clinic", 12, 0, size=(16, 160, 128), fractions=(0.6, 0.25, 0.15))
    preprocessing = load(Preprocessing, {"image_size": SMOKE_IMAGE_SIZE, "target_spacing": SMOKE_SPACING})
    return prepare_catalog(scan_root(str(folder / "clinic")), folder / "prepared", preprocessing, progress=False)


def _size(text: str) -> tuple[int, int, int]:
    from octfm.errors import ConfigError

    try:
        d, h, w = (int(n) for n in text.split("x"))
    except ValueError:
        raise ConfigError(
            f"--size: expected B-scans x rows x columns such as 32x256x192, or native; got {text!r}"
        ) from None
    return d, h, w


def _print_counts(title: str, counts: dict) -> None:
    typer.echo(title)
    for name, value in counts.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count}" for key, count in value.items()) or "none"
        typer.echo(f"  {name.replace('_', ' ')}: {value}")


def _print_disc_sides(of_scanner: dict[str, dict[str, int]]) -> None:
    """One line per scanner, then what the check needs where it could not tell."""
    from octfm.volume.laterality import CANNOT_TELL, NEEDS

    for scanner, counts in of_scanner.items():
        why = ", ".join(f"{name} {counts[name]}" for name in CANNOT_TELL.values() if counts[name])
        told = ", ".join(f"{name} {n}" for name, n in counts.items() if name not in CANNOT_TELL.values())
        typer.echo(f"  side of the optic disc, {scanner}: {told}{f' ({why})' if why else ''}")
    if any(counts["cannot tell"] for counts in of_scanner.values()):
        typer.echo(f"  where it cannot tell, a wrong eye goes unnoticed; to tell, it needs {NEEDS}")


def _print_withheld(lost: "Mapping[str, tuple[int, int]]") -> None:
    """On the terminal only: the name of a column may itself be private."""
    if not lost:
        return
    names = ", ".join(f"{column!a} {few} of {many}" for column, (few, many) in lost.items())
    typer.echo(
        f"withheld, as not known to be safe, in {len(lost)} columns (values of so many participants): {names}; "
        "--keep-columns NAME,NAME keeps a column as it is",
        err=True,
    )


register_use(app)
register_evaluation(app)
register_report(app)


def main() -> None:
    """Exit code 0, or one line and an exit code: 1 for a problem the user can act on, 2 for wrong usage, 75 for a run that was stopped and
    saved. Anything else is a fault of octfm, and a traceback.

    torchrun makes 1 of every exit code but 0. Where OCTFM_EXIT_FILE names a file, one rank per host leaves its 75 there for
    launch/torchrun.sh.
    """
    # No process that a library starts imports from the current folder, where strangers' files may lie.
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    word = os.environ.get("OCTFM_EXIT_FILE") if os.environ.get("LOCAL_RANK", "0") == "0" else None
    if word:
        Path(word).unlink(missing_ok=True)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # names of files need not be text
    code, message = _run()
    if code == 75 and word:
        Path(word).write_text("75\n")
    if message:
        sys.stderr.write(f"octfm: {one_line(mask(message))}\n")
    sys.exit(code)


def _run() -> tuple[int, str]:
    """Exit code of the command line, and the line to end with; an empty one where another rank has it, or all is said."""
    try:
        code = app(prog_name="octfm", standalone_mode=False) or 0
        return code, "interrupted; the same command continues" if code == 130 else ""
    except UsageError as error:
        if not sys.argv[1:]:
            error.show()  # the help: octfm alone is no mistake to explain
            return 2, ""
        verbs = {getattr(command.callback, "__name__", "") for command in app.registered_commands}
        verb = f"{sys.argv[1]} " if sys.argv[1] in verbs else ""
        reason = error.format_message().rstrip(".")
        return 2, f"{verb.replace(' ', ': ')}{reason}; try octfm {verb}--help"
    except Preempted as error:
        return 75, str(error) if os.environ.get("RANK", "0") == "0" else ""
    except OctfmError as error:
        return 1, "" if error.elsewhere else str(error)
    except OSError as error:
        # A full disk, a folder without permission, a file where a folder was expected: the system names the path and the reason.
        where = f"{error.filename}: " if error.filename is not None else ""
        return 1, f"{where}{error.strerror or error}; mend that, or choose another path, and run the same command again"
    except UnicodeEncodeError as error:
        return 1, f"{shown(error.object)}: expected text, found bytes that are no UTF-8 ({error.reason}); rename it"
    except MemoryError as error:
        return 1, f"out of memory: {error or 'the system gave no more'}; choose smaller sizes or fewer workers"
    except (KeyboardInterrupt, typer.Abort):
        return 130, "interrupted; the same command continues"
