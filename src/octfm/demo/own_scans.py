"""The demonstration on a user's own scans: prepared, pretrained on if there are enough, probed for columns of a
table."""

from dataclasses import replace
from pathlib import Path

from octfm.catalog.acquisition import Acquisition
from octfm.catalog.catalog import Catalog
from octfm.catalog.labels import read_labels
from octfm.catalog.participants.people import AmbiguousPeople
from octfm.catalog.participants.splits import FRACTIONS
from octfm.catalog.scan import scan
from octfm.demo.clinic import PREPROCESSING, QUICK
from octfm.demo.features import FEWEST, pretrained_features, untrained_features
from octfm.demo.pages import first_picture, last_page
from octfm.demo.questions import find_questions
from octfm.demo.request import Request
from octfm.demo.stages import Stages, gigabytes, require_room
from octfm.display import number
from octfm.encoder.encoder import seen_by
from octfm.errors import BAD_INPUT, ConfigError, Echo, EvaluationError
from octfm.evaluation.probe import probe, write_probe
from octfm.formats import read_volume
from octfm.io.progress import Progress
from octfm.pretraining.settings import load_config
from octfm.store.layout import volume_bytes
from octfm.store.prepare import prepare
from octfm.store.store import Store
from octfm.volume.preprocessing import Preprocessing

SHARES = (0.5, 0.1, 0.4)
"""Shares of participants for pretraining, its validation and the probe, if there are labels."""
PASSES = 40
"""Most passes of pretraining over its scans, in batches of 8."""


def own_scans(request: Request, echo: Echo) -> Path:
    """Run or continue the demonstration on the user's scans; returns the path of its report.

    Raises AmbiguousPeople, CatalogError, ConfigError or EvaluationError before anything is prepared, if the folder, the
    labels or the space on the disk do not suffice.
    """
    out = request.out
    table = read_labels(request.labels) if request.labels is not None else None
    if table is not None and (unknown := [t for t in request.targets if t != "disease" and t not in table.columns]):
        raise EvaluationError(
            f"--target {unknown[0]}: {table.path} has no such column; label columns: {', '.join(table.columns)}"
        )
    stages = Stages(out, echo)
    with stages.stage("catalog", f"every file of {request.data}: accepted, or rejected with a reason"):
        catalog = _scan(request)
        trained = sum(a.split == "train" for a in catalog.acquisitions)
        pretrains = table is None or trained >= FEWEST or request.size is QUICK
        _require_same(out, catalog, trained, pretrains)
        catalog.save(out / "catalog")
    questions = None
    if table is not None:
        # If nothing is pretrained, everybody can be tested.
        questions = find_questions(catalog.acquisitions, table, request.targets, trains=pretrains)
        stages.say(f"   questions: {', '.join(questions.targets)}")
    volumes = len(catalog.acquisitions)
    needed = volumes * volume_bytes(PREPROCESSING["image_size"]) * 1.2
    free = require_room(out, 0 if (out / "prepared").is_dir() else needed, " or --max-samples")
    stages.say(
        f"   {volumes:,} scans accepted, {len(catalog.rejects)} rejected; about {gigabytes(needed)} in {out} "
        f"({gigabytes(free)} free); details in {stages.log}; stopped, the same command continues"
    )
    with stages.stage("picture", "the first scan and the layers that the packaged network finds in it"):
        stages.say(_picture(catalog.acquisitions[0], out))
    with stages.stage("store", "mirror left eyes, register B-scans, find the tissue band, resample to one spacing"):
        store = prepare(catalog, out / "prepared", Preprocessing.model_validate(PREPROCESSING))

    steps = min(load_config(request.preset).steps, max(1, trained * PASSES // 8))
    config = load_config(request.preset, (f"seed={request.seed}", *(request.size.overrides or (f"steps={steps}",))))
    run = out / "run"
    if pretrains:
        on = f"{trained:,} scans of the training participants"
        encoders = pretrained_features(stages, request, config, store, on)
    else:
        reason = f"Not pretrained: {trained} training scans are too few to learn from; at least {FEWEST} are needed."
        stages.say(f"   {reason[0].lower()}{reason[1:]}")
        with stages.stage(
            "features", "layers by the packaged network, some ten seconds per scan; tissue map; an untrained encoder"
        ):
            encoders = untrained_features(config, store, run, reason, stages.note)

    design = "auto" if table is None else "k-fold"
    commands = request.commands(request.labels, design, pretrains)
    with stages.stage("probe", "linear models on these features, each tested on participants it was not fitted on"):
        try:
            result = probe(
                encoders,
                request.labels,
                targets=questions.targets if questions is not None else None,
                design=design,
                seen=seen_by(run) if pretrains else (),
                commands=commands,
            )
            result["skipped"] = [*result["skipped"], *(questions.skipped if questions is not None else ())]
            write_probe(run / "probe.json", result)
        except EvaluationError as error:
            stages.say(f"   probe incomplete: {error}")
    return last_page(stages, run, out, store, card=pretrains)


def _scan(request: Request) -> Catalog:
    """The scans to demonstrate on, and their splits."""
    try:
        with Progress("scan", 1, "files") as progress:
            catalog = scan(
                str(request.data),
                # With labels, four in ten participants are kept for the test, unless the data set recommends a split.
                fractions=FRACTIONS if request.labels is None else SHARES,
                participant_from=request.participant_from,
                progress=progress.up_to,
            )
    except AmbiguousPeople as ambiguous:
        raise AmbiguousPeople(
            f"{ambiguous}; octfm demo --data takes the same --participant-from", ambiguous.guess
        ) from None
    if request.max_samples is not None:
        catalog = replace(catalog, acquisitions=_spread(catalog.acquisitions, request.max_samples))
    return catalog


def _require_same(out: Path, catalog: Catalog, trained: int, pretrains: bool) -> None:
    """Raise ConfigError if the demonstration in `out` cannot go on as this one: it is on other scans, which its store
    would keep, or it `pretrains` and this one does not, or the other way round, as after scans were added."""
    rows = Store.open(out / "prepared").rows if (out / "prepared" / "store.json").is_file() else ()
    known = {a.sop_instance_uid for a in catalog.acquisitions}
    others = [row.uri for row in rows if row.acquisition not in known]
    record = out / "run" / "run.json"
    if (out / "clinic").is_dir():
        held = "with phantoms"
    elif others:
        held = f"with {number(len(others), 'scan')} not taken now, such as {others[0]}"
    elif record.is_file() and ('"not_pretrained"' in record.read_text("utf-8")) == pretrains:
        before, now = ("without", "with") if pretrains else ("with", "without")
        needed = f"{FEWEST} are needed"
        held = f"{before} pretraining, and this one, of {trained:,} training scans, would be {now} it ({needed})"
    else:
        return
    raise ConfigError(f"{out}: holds a demonstration {held}; choose another --out, or remove this folder")


def _picture(first: Acquisition, out: Path) -> str:
    """Write the page of one scan; returns what to say about it."""
    try:
        volume = read_volume(first.uri, spacing_mm=first.spacing_mm, raster_only=first.layout == "raster")
        page = first_picture(volume, out, "As it is in its file.")
    except BAD_INPUT as error:
        return f"   {first.uri}: no picture: {error}"
    return f"open now: {page.resolve()} (it shows a scan: protect it like the file)"


def _spread(acquisitions: tuple, count: int) -> tuple:
    """About `count` acquisitions, evenly spaced within every split, in proportion to its size, at least one each."""
    if count >= len(acquisitions):
        return acquisitions
    chosen = set()
    for split in dict.fromkeys(a.split for a in acquisitions):
        own = [a.uri for a in acquisitions if a.split == split]
        quota = max(1, round(count * len(own) / len(acquisitions)))
        chosen |= {own[i * len(own) // quota] for i in range(quota)}
    return tuple(a for a in acquisitions if a.uri in chosen)
