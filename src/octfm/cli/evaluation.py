"""The verbs that evaluate an encoder: probe, finetune, leaderboard, trust."""

from pathlib import Path
from typing import Annotated

from octfm.cli import options as opt
from octfm.errors import ConfigError
from octfm.io.location import expect_writable, location, write_whole


def probe(
    run: Annotated[
        str,
        opt.place_argument(
            "RUN", "Run that has embeddings (see `octfm embed`); with --embeddings any encoder: encoder-2."
        ),
    ],
    labels: Annotated[
        Path | None,
        opt.local_option("TABLE", "CSV or TSV with participant_id (and laterality) and one column per target."),
    ] = None,
    target: opt.Targets = None,
    exclude: opt.Exclude = None,
    allow_seen: opt.AllowSeen = False,
    readout: Annotated[
        str, opt.option("READOUT", "linear (logistic, ridge), knn (nearest neighbours) or trees (boosted trees).")
    ] = "linear",
    order: opt.Order = None,
    embeddings: Annotated[
        str | None,
        opt.place_option(
            "FOLDER", "Folder of embeddings (octfm embed --out), also in a bucket; default: RUN/embeddings."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        opt.local_option("FOLDER", "Folder for probe.json; default: --embeddings if given, else RUN.", "--out"),
    ] = None,
    design: Annotated[
        str,
        opt.option(
            "DESIGN",
            "recommended_split (fit on train and val, test on test), k-fold (test every participant that "
            "pretraining has not seen), or auto.",
        ),
    ] = "auto",
    folds: Annotated[int | None, opt.option("N", "Number of folds for k-fold; default: 5.", min=2, max=1000)] = None,
    seeds: Annotated[int, opt.option("N", "Repeat folds and subsets with this many seeds.", min=1, max=1000)] = 1,
    label_efficiency: Annotated[
        bool, opt.flag("Also fit on 1, 5, 10, 25, 50 and 100 % of the training participants.")
    ] = False,
) -> None:
    """Fit probes on frozen embeddings; confidence intervals resample participants.

    Examples:
    octfm probe runs/vit_s --labels labels.tsv --target diagnosis
    """
    from octfm.catalog.labels import read_labels
    from octfm.encoder.embed import embedding_files, older_vectors, other_vectors
    from octfm.encoder.embeddings import read_embeddings, without_excluded_vectors
    from octfm.encoder.encoder import seen_if_known
    from octfm.evaluation.arms import make_arms
    from octfm.evaluation.cases import TARGETS
    from octfm.evaluation.efficiency import curve_lines
    from octfm.evaluation.efficiency import label_efficiency as curve
    from octfm.evaluation.probe import probe as run_probe
    from octfm.evaluation.probe import summary_lines, write_probe
    from octfm.evaluation.readouts import choose_readout
    from octfm.io.progress import say
    from octfm.run.bucket import local_run
    from octfm.weights.exported import refuse_inside_export

    chosen = choose_readout(readout)
    folder = location(out or embeddings or run)
    refuse_inside_export(folder)
    files = embedding_files(run, embeddings) if embeddings is not None else embedding_files(local_run(run))
    if remark := older_vectors(run, files[0]) if embeddings is None else other_vectors(run, files[0]):
        opt.echo_line(remark)
    expect_writable(folder)  # after RUN is known to exist: else a mistyped one is named as a folder to write into
    if exclude is not None:
        # Warnings about unmatched lines of --exclude are the same for every encoder: print them once.
        files = [
            without_excluded_vectors(read_embeddings(file), exclude, (lambda line: None) if i else say)
            for i, file in enumerate(files)
        ]
    arms = make_arms(files)
    common = {
        "targets": target,
        "orders": opt.parse_orders(order),
        "readout": chosen,
        "seen": seen_if_known(run, allow_seen=allow_seen),
        "allow_seen": allow_seen,
        "design": design,
        "folds": folds,
    }
    # Once: the file may be replaced before the label curve.
    table = read_labels(labels) if labels is not None else None
    if table is not None and not target:
        probed = {known.column for known in TARGETS}
        if others := [column for column in table.columns if column not in probed]:
            opt.echo_line(f"{labels}: not probed: {', '.join(others)}; name a column with --target")
    result = run_probe(arms, table, seeds=seeds, commands=[opt.command_line()], **common)
    opt.echo_line(*summary_lines(result))
    if label_efficiency:
        # A single draw of a few participants says little: intervals must also cover other draws.
        rows, compared = curve(arms, table, seeds=max(3, seeds), **common)
        result |= {"label_efficiency": rows, "label_efficiency_comparisons": compared}
        opt.echo_line(*curve_lines(rows, compared))
    opt.echo_line(write_probe(folder / ("probe.json" if chosen == "linear" else f"probe-{chosen}.json"), result))


def finetune(
    config: Annotated[
        str,
        opt.config_argument(
            "finetune",
            "YAML file, or packaged config: study_group_linear, study_group_attentive or study_group_finetune.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        opt.argument("KEY=VALUE", "key=value, for example encoder=runs/a store=prepared/ target=diagnosis"),
    ] = None,
    store: opt.Store = None,
    epochs: opt.Epochs = None,
    out: opt.OutPlace = Path("runs/finetune"),
    device: opt.Device = None,
    allow_seen: opt.AllowSeen = False,
) -> None:
    """Train for one label: a head on a frozen encoder, or the head and then the encoder; the same command resumes.

    Examples:
    octfm finetune study_group_linear encoder=runs/vit_s --store prepared labels=labels.tsv target=diagnosis
    octfm finetune study_group_finetune encoder=runs/vit_s --store prepared --epochs 10 --out runs/tuned
    """
    from octfm.config import load
    from octfm.io.ranks import rank
    from octfm.tasks.finetune import finetune as tune
    from octfm.tasks.finetune import summary
    from octfm.tasks.finetune_settings import FinetuneConfig

    settings = load(FinetuneConfig, config, opt.with_options(overrides, {"store": store, "epochs": epochs}))
    run = tune(settings, out, device, allow_seen=allow_seen, echo=opt.echo_line)
    # Every rank runs this command; only the first one prints the result.
    if rank() != 0:
        return
    opt.echo_line(*summary(run))
    opt.echo_line(out / "finetune.json")


def leaderboard(
    entries: Annotated[
        list[Path],
        opt.local_argument(
            "RUN",
            "Runs of pretraining or fine-tuning, checkpoints, exports and packaged encoders; the others are "
            "compared with the first.",
        ),
    ],
    store: Annotated[
        list[str], opt.place_option("STORE", "Prepared store, also s3:// or gs://; repeat, one per preprocessing.")
    ],
    target: Annotated[str, opt.option("COLUMN", "Label column.")] = "study_group",
    labels: opt.StoreLabels = None,
    order: opt.Order = None,
    exclude: opt.Exclude = None,
    allow_seen: opt.AllowSeen = False,
    out: opt.Out = Path("leaderboard"),
) -> None:
    """Compare checkpoints, fine-tuned models and baselines on identical data and splits: CSV, Markdown, HTML.

    Examples:
    octfm leaderboard runs/vit_s runs/mae --store prepared --labels labels.tsv --target diagnosis
    """
    from octfm.evaluation.probe import write_probe
    from octfm.report.leaderboard import write_leaderboard
    from octfm.trust import leaderboard as board

    result = board.leaderboard(
        entries,
        store,
        target,
        out,
        labels=labels,
        orders=opt.parse_orders(order),
        exclude=exclude,
        allow_seen=allow_seen,
        commands=[opt.command_line()],
        echo=opt.echo_line,
    )
    text = board.to_markdown(result)
    opt.echo_line(*text.split("\n"))
    write_probe(out / "leaderboard.json", result)
    write_whole(out / "leaderboard.csv", board.to_csv(result).encode())
    write_whole(out / "leaderboard.md", text.encode())
    names = [row["encoder"] for row in board.ranked(result)]
    opt.echo_line(write_leaderboard(result, names, out / "leaderboard.html"))


def trust(
    run: Annotated[Path, opt.local_argument("RUN", "Pretraining run or checkpoint.")],
    store: Annotated[
        list[str],
        opt.place_option("STORE", "Prepared store of RUN, also s3:// or gs://; repeat, one per preprocessing."),
    ],
    labels: opt.StoreLabels = None,
    target: opt.Targets = None,
    order: opt.Order = None,
    other: Annotated[
        list[Path] | None,
        opt.local_option("RUN", "Another run for paired comparison, for example one pretrained on a single scanner."),
    ] = None,
    external: Annotated[
        list[str] | None,
        opt.option("FUNCTION", "Your own encoder, FILE.py:FUNCTION or module:FUNCTION; its code is executed."),
    ] = None,
    group: Annotated[
        list[str] | None,
        opt.option("COLUMN", "Column of subgroups to compare, besides site, age, eye and scanner; repeat for several."),
    ] = None,
    age_bands: Annotated[str, opt.option("YEARS", "Boundaries between age bands, in years.")] = "50,60,70,80",
    from_scratch_epochs: Annotated[
        float,
        opt.option(
            "N", "Epochs of the supervised baseline trained for every target; 0: no such baseline.", min=0, max=100_000
        ),
    ] = 60,
    images: Annotated[bool, opt.flag("Show B-scans on the page.")] = True,
    exclude: opt.Exclude = None,
    allow_seen: opt.AllowSeen = False,
    out: opt.Out = Path("trust"),
) -> None:
    """Evaluate an encoder against every baseline, by subgroup and scanner, with intervals: trust.html, trust.json.

    Examples:
    octfm trust runs/vit_s --store prepared --labels labels.tsv --target diagnosis
    """
    from octfm.evaluation.probe import write_probe
    from octfm.report.trust.page import summary_lines, write_trust
    from octfm.store.store import Store
    from octfm.trust.report import trust as judge

    try:
        bands = [float(year) for year in age_bands.split(",")]
    except ValueError:
        raise ConfigError(
            f"--age-bands: expected years in ascending order such as 50,60,70, got {age_bands!r}"
        ) from None
    pictured = Store.open(store[0])  # now: pictures are of what is judged, also if it is replaced meanwhile
    result = judge(
        run,
        store,
        out,
        labels=labels,
        targets=target,
        orders=opt.parse_orders(order),
        others=other or (),
        external=external or (),
        groups=group or (),
        age_bands=bands,
        from_scratch_epochs=from_scratch_epochs,
        exclude=exclude,
        allow_seen=allow_seen,
        commands=[opt.command_line()],
        echo=opt.echo_line,
    )
    write_probe(out / "trust.json", result)
    opt.echo_line(*summary_lines(result))
    opt.echo_line(write_trust(result, pictured, out / "trust.html", images=images))
