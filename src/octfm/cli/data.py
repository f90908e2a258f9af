"""The verbs that make and prepare data: phantom, scan, prepare."""

import shlex
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from octfm.cli import options as opt
from octfm.errors import ConfigError, OctfmError
from octfm.io.location import expect_writable, holds_other

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from octfm.catalog.catalog import Catalog
    from octfm.catalog.scan import Placed
    from octfm.io.location import Location


def phantom(
    out: Annotated[Path, opt.local_argument("FOLDER", "New folder for the cohort.")],
    participants: Annotated[
        int, opt.option("N", "Number of participants; both eyes of each are scanned.", min=1, max=10**6)
    ] = 20,
    seed: Annotated[
        int, opt.option("N", "0-99 for development, 200 and above for new reported results.", min=0, max=opt.MAX_SEED)
    ] = 0,
    size: Annotated[
        str, opt.option("SIZE", "B-scans x rows x columns, or `native` for the size each scanner writes.")
    ] = "32x256x192",
    defects: Annotated[float, opt.option("N", "Number of defective files per good one.", min=0, max=1)] = 0.0,
    zipped: Annotated[bool, opt.flag("One ZIP archive per scanner.", "--zip")] = False,
    diagnosis: Annotated[
        list[str] | None, opt.option("NAME", "Draw only this diagnosis; repeat for several. Default: all seven.")
    ] = None,
    scanner: Annotated[
        list[str] | None,
        opt.option("NAME", "Simulate this scanner; repeat for several. Default: the four of AI-READI."),
    ] = None,
    null_effect: Annotated[
        bool, opt.flag("Draw labels as usual, but render every eye as healthy.", "--null-effect")
    ] = False,
    version: Annotated[
        Literal["3", "4"],
        opt.option(
            "3|4",
            "4: outer retina, choroid and appearance of the streamed phantoms that the packaged networks were trained "
            "on.",
            "--phantom-version",
        ),
    ] = "3",
    workers: opt.Workers = None,
) -> None:
    """Write a synthetic cohort with known ground truth, in the folder layout of AI-READI.

    Examples:
    octfm phantom clinic --participants 40 --seed 1
    """
    from octfm.display import number
    from octfm.io.progress import Progress
    from octfm.phantom import DEFAULT_SCANNERS, DIAGNOSES, write_phantom

    wanted = "--size: expected B-scans x rows x columns such as 32x256x192, or native"
    with Progress("phantom", participants, "participants") as progress:
        path = write_phantom(
            out,
            participants,
            seed,
            size=None if size == "native" else opt.three(size, "x", int, wanted),
            scanners=scanner or DEFAULT_SCANNERS,
            diagnoses=diagnosis or DIAGNOSES,
            defects=defects,
            effect=not null_effect,
            version=version,
            zipped=zipped,
            workers=workers,
            progress=progress.up_to,
        )
    opt.echo_line(f"{path}: {number(participants, 'participant')}; truth in {path / 'ground_truth'}")


def scan(
    root: Annotated[
        str,
        opt.place_argument(
            "FOLDER", "Folder, or s3:// or gs:// address, of DICOM, vendor or image files; any folder layout."
        ),
    ],
    out: opt.OutPlace = Path("catalog"),
    seed: Annotated[
        int,
        opt.option(
            "N", "Seed of the split by participant, where the data set does not recommend one.", min=0, max=opt.MAX_SEED
        ),
    ] = 0,
    fractions: Annotated[
        str | None,
        opt.option(
            "TRAIN,VAL,TEST",
            "Shares of participants, where the data set does not recommend a split. Default: 0.8,0.1,0.1.",
        ),
    ] = None,
    table: Annotated[
        opt.Place, opt.option("TABLE", "Your own CSV or TSV with one row per file.", parser=opt.place)
    ] = None,
    splits_of: Annotated[
        opt.Place,
        opt.option(
            "FOLDER",
            "Earlier catalog, or store, whose participants keep their split; splits of others are drawn.",
            parser=opt.place,
        ),
    ] = None,
    participants: Annotated[
        opt.Place, opt.option("TABLE", "Your own CSV or TSV with one row per participant.", parser=opt.place)
    ] = None,
    columns: Annotated[
        list[str] | None,
        opt.option("FIELD=COLUMN", "Their column names, as FIELD=COLUMN: participant=pid,file=path,laterality=eye"),
    ] = None,
    participant_from: opt.ParticipantFrom = None,
    nominal_spacing: Annotated[
        str | None,
        opt.option(
            "DZ,DY,DX",
            "Millimetres between B-scans, rows and A-scans, for images and arrays that state none: 0.12,0.0039,0.0115.",
        ),
    ] = None,
    layouts: Annotated[
        str,
        opt.option(
            "LAYOUTS",
            "raster; raster,radial to accept radial (star) scans as well, which octfm prepare resamples; raster,line "
            "to accept single images as B-scans as well; or line: every image is a single B-scan.",
        ),
    ] = "raster",
    modalities: Annotated[
        str,
        opt.option(
            "MODALITIES",
            "structure, or structure,octa to accept OCT angiography as well; training uses it only on request.",
        ),
    ] = "structure",
    extract: Annotated[
        Path | None,
        opt.local_option("FOLDER", "Unpack ZIP archives into this folder; default: read inside the archives."),
    ] = None,
    pixels: Annotated[
        bool,
        opt.flag(
            "Also decode every volume: finds copies, mislabelled eyes (by the optic disc's side) and upside-down scans."
        ),
    ] = False,
    keep_upside_down: opt.KeepUpsideDown = False,
    follow_links: Annotated[
        bool, opt.flag("Follow symbolic links below FOLDER, including links that lead out of it.")
    ] = True,
    max_reject: Annotated[
        float | None,
        opt.option("SHARE", "Exit with 1 if more than this share is rejected, for example 0.2.", min=0, max=1),
    ] = None,
    images: Annotated[bool, opt.flag("Show outliers on the data-health page.")] = True,
    pseudonymise: Annotated[
        Path | None,
        opt.local_option(
            "FILE",
            "Key file, created if missing: hash ids, UIDs and paths with it, shift dates, and keep only those "
            "table values that are known to identify nobody.",
        ),
    ] = None,
    keep_columns: Annotated[
        list[str] | None,
        opt.option("COLUMNS", "With --pseudonymise: participant columns to keep unchanged: visus,lens_type"),
    ] = None,
    workers: opt.Workers = None,
    file_seconds: opt.FileSeconds = 10,
    file_gb: opt.FileGB = 2,
) -> None:
    """List every OCT acquisition in a catalog, and every unusable file with a reason; data_health.html shows both.

    Examples:
    octfm scan my_scans/ --out catalog
    octfm scan my_scans/ --participant-from '{participant}/{eye}/*' --pixels
    octfm scan my_bscans/ --layouts line --participant-from '{label}/*-{participant}-*'
    """
    from octfm.catalog.catalog import CatalogError, NothingAccepted
    from octfm.catalog.columns import Columns
    from octfm.catalog.participants import pseudonyms
    from octfm.catalog.participants.people import AmbiguousPeople
    from octfm.catalog.participants.splits import FRACTIONS
    from octfm.catalog.scan import scan as scan_root
    from octfm.io.progress import Progress
    from octfm.report.data_health import write_data_health

    if pseudonymise is not None:
        _expect_pseudonymous(pseudonymise, out, extract)
    elif keep_columns:
        raise ConfigError("--keep-columns: only applies with --pseudonymise; add --pseudonymise KEYFILE")
    # A scan that is saving, or was killed while it saved, may have written rejects.parquet only.
    if holds_other(out, "catalog.parquet") and holds_other(out, "rejects.parquet"):
        raise CatalogError(f"{out}: the folder is not empty and holds no catalog; choose a new --out")
    # Before hours of work.
    expect_writable(out)
    key = pseudonyms.read_key(pseudonymise) if pseudonymise is not None else None
    placed = _rows_of(splits_of) if splits_of is not None else ()
    shares = "--fractions: expected three shares for train, val and test, such as 0.7,0.1,0.2"
    failure = None
    try:
        with Progress("scan", 1, "files") as progress:
            catalog = scan_root(
                root,
                seed=seed,
                fractions=FRACTIONS if fractions is None else opt.three(fractions, ",", float, shares),
                splits_of=placed,
                key=key,
                table=table,
                participants=participants,
                columns=Columns.parse(columns or []).of_field,
                participant_from=participant_from or (),
                extract=extract,
                nominal_spacing_mm=opt.parse_spacing(nominal_spacing, "--nominal-spacing"),
                layouts=layouts.replace(" ", "").split(","),  # type: ignore[arg-type]
                modalities=modalities.replace(" ", "").split(","),  # type: ignore[arg-type]
                pixels=pixels,
                keep_upside_down=keep_upside_down,
                follow_links=follow_links,
                workers=workers,
                limits=opt.limits_of(file_seconds, file_gb),
                progress=progress.up_to,
            )
    except AmbiguousPeople as ambiguous:
        opt.echo_line(*ambiguous.guess.table().split("\n"))
        accept = [word for pattern in ambiguous.guess.patterns for word in ("--participant-from", pattern)]
        if accept and not ambiguous.guess.without_person:
            opt.echo_line(f"if the guess is right: {shlex.join(['octfm', *sys.argv[1:], *accept])}")
        raise
    except NothingAccepted as nothing:
        # Write catalog and page nevertheless: they have the reason of every reject.
        catalog, failure = nothing.catalog, nothing
    locations = {}
    if key is not None:
        kept = [name.strip() for text in keep_columns or [] for name in text.split(",") if name.strip()]
        _print_withheld(pseudonyms.withheld(catalog, kept))
        catalog = pseudonyms.pseudonymise(catalog, key, kept)
        locations = pseudonyms.locate(catalog, root, key)
    remarks = _about_replaced(out, catalog, splits_kept=splits_of is not None)
    # Before it is saved: the next scan is compared with this catalog, and could not say so again.
    try:
        opt.echo_line(*remarks)
    finally:  # also where nobody reads them, as with `| head`
        catalog.save(out)
        page = write_data_health(
            catalog, out / "data_health.html", images=images, max_reject=max_reject, locations=locations
        )
    if failure is not None:
        opt.echo_line(page)
        raise failure
    _print_summary(catalog, out)
    opt.echo_line(page)
    if max_reject is not None:
        catalog.expect_few_rejects(max_reject, f"see {page}")


def _expect_pseudonymous(key_file: Path, out: "Location", extract: Path | None) -> None:
    """Raises ConfigError for options that would give names or the key away with the catalog."""
    if extract is not None:
        raise ConfigError(
            "--pseudonymise and --extract: unpacked files would keep their names; leave out --extract to read the "
            "archives without unpacking"
        )
    if isinstance(out, Path) and key_file.resolve().is_relative_to(out.resolve()):
        raise ConfigError(
            f"--pseudonymise {key_file}: whoever gets the catalog would get its key with it; keep the key outside {out}"
        )


def _rows_of(folder: "Location") -> "Sequence[Placed]":
    """Rows of a catalog or a store."""
    from octfm.catalog.catalog import Catalog, HalfReplaced
    from octfm.store.store import Store

    if (folder / "catalog.parquet").is_file():
        try:
            return Catalog.load(folder).acquisitions
        except HalfReplaced as half:
            # Else a scan into the catalog whose splits it keeps could not be repeated.
            opt.echo_line(
                f"--splits-of {folder}: a scan was stopped while it saved; splits are those of catalog.parquet"
            )
            return half.catalog.acquisitions
    if (folder / "store.json").is_file():
        return Store.open(folder).rows
    raise ConfigError(f"--splits-of {folder}: expected the folder of a catalog or of a store, found neither")


def _about_replaced(out: "Location", catalog: "Catalog", *, splits_kept: bool) -> list[str]:
    """Remarks on the catalog that this scan replaces: on participants in another split than before, and on those
    without a scan now. That catalog is kept if there are any."""
    from octfm.display import number

    before, remarks = _catalog_in(out)
    moved, gone = _moved_and_gone(before, catalog) if before is not None else (0, 0)
    moved = 0 if splits_kept else moved
    option = _keep(before, out) if before is not None and moved + gone else ""
    about_moved = (
        f"in another split than before: {number(moved, 'participant')}. Splits are drawn anew from all files, so "
        f"runs on the old split have seen some of those who are tested now. To keep it, scan again with {option}"
    )
    about_gone = (
        f"without a scan now: {number(gone, 'participant')} of the catalog that was here. If they may come back, "
        f"keep their split: give that later scan {option}"
    )
    return [*remarks, *[about_moved] * (moved > 0), *[about_gone] * (gone > 0)]


def _catalog_in(folder: "Location") -> tuple["Catalog | None", list[str]]:
    """The catalog that a scan into this folder replaces, None without one that can be read; and what is wrong with
    it."""
    from octfm.catalog.catalog import Catalog, CatalogError, HalfReplaced

    try:
        return Catalog.load(folder) if (folder / "catalog.parquet").is_file() else None, []
    except HalfReplaced as half:
        # The scan that was stopped may have kept it with its rejects.
        with suppress(OctfmError, OSError):
            return Catalog.load(half.catalog.beside(folder)), []
        remark = f"{folder}: a scan was stopped while it saved; splits are compared with those of catalog.parquet"
        return half.catalog, [remark]
    except CatalogError as error:
        remark = (
            "warning: the catalog that this scan replaces cannot be read, so whether participants are in another split "
            f"than before is unknown: {error}"
        )
        return None, [remark]


def _keep(before: "Catalog", out: "Location") -> str:
    """Save the catalog that a scan replaces; returns the option that keeps its split. A parent folder that cannot be
    written, as of a folder that is mounted alone, must not cost the new catalog."""
    try:
        aside = before.save(before.beside(out))
    except (OctfmError, OSError) as error:
        return f"--splits-of and the store prepared from the old catalog, which could not be kept: {error}"
    return f"--splits-of {shlex.quote(str(aside))}, where the old catalog is now"


def _moved_and_gone(before: "Catalog", now: "Catalog") -> tuple[int, int]:
    """Participants of both catalogs whose drawn split is another one now, and those who are in `before` only; of
    another cohort, with nobody in common, none."""
    from octfm.catalog.participants.ids import person_key

    was = {person_key(a.participant): a.split for a in before.acquisitions}
    here = {person_key(a.participant) for a in now.acquisitions}
    drawn = {
        person_key(a.participant): a.split
        for a in now.acquisitions
        if not a.participant_labels.get("recommended_split")
    }
    moved = sum(was.get(person, split) != split for person, split in drawn.items())
    return moved, len(was.keys() - here) if was.keys() & here or not here else 0


def prepare(
    catalog: Annotated[opt.Place, opt.argument("CATALOG", "Folder written by `octfm scan`.", parser=opt.place)],
    out: opt.OutPlace = Path("prepared"),
    settings: Annotated[
        list[str] | None, opt.argument("KEY=VALUE", "Preprocessing settings, for example image_size=[64,384,384].")
    ] = None,
    like: Annotated[
        Path | None,
        opt.local_option("RUN", "Use the preprocessing settings of this run, checkpoint, export or packaged encoder."),
    ] = None,
    reuse: Annotated[
        opt.Place,
        opt.option(
            "STORE",
            "Take over the settings of this store, and its volumes of scans that the catalog describes as before.",
            parser=opt.place,
        ),
    ] = None,
    compression: Annotated[
        Literal["none", "zstd"] | None,
        opt.option("CODEC", "none (fastest; default on a local disk) or zstd (smaller; default in a bucket)."),
    ] = None,
    key: Annotated[
        Path | None, opt.local_option("FILE", "Key file of a pseudonymised catalog; requires --root.")
    ] = None,
    root: Annotated[
        opt.Place, opt.option("FOLDER", "Folder from which a pseudonymised catalog was scanned.", parser=opt.place)
    ] = None,
    keep_upside_down: opt.KeepUpsideDown = False,
    exclude: opt.Exclude = None,
    workers: opt.Workers = None,
    file_seconds: opt.FileSeconds = 10,
    file_gb: opt.FileGB = 2,
    dask: Annotated[
        str | None, opt.option("ADDRESS", "Address of a dask cluster (tcp://host:port) that sees the same paths.")
    ] = None,
    verify: Annotated[
        bool,
        opt.flag(
            "Only check the store at --out: read all of it, list damaged volumes, mark them for the next prepare.",
            "--verify",
        ),
    ] = False,
) -> None:
    """Convert the volumes of a catalog to one size and spacing; run it again to add only what is missing.

    Examples:
    octfm prepare catalog --out prepared
    octfm prepare catalog --out prepared --verify
    octfm prepare catalog --out without-p17 --reuse prepared
    """
    from octfm.catalog.catalog import Catalog
    from octfm.config import load
    from octfm.display import number
    from octfm.store.prepare import prepare as prepare_catalog
    from octfm.volume.preprocessing import Preprocessing

    base = {}
    if like is not None:
        from octfm.encoder.encoder import preprocessing_of

        base = preprocessing_of(str(like))
    elif reuse is not None:
        from octfm.store.store import Store

        base = Store.open(reuse).preprocessing.model_dump(mode="json")
    preprocessing, find_band = load(Preprocessing, base, settings or []), None
    if preprocessing.band != "classic":
        from octfm.layers.band import band_finder, with_network

        preprocessing = with_network(preprocessing)
        find_band = band_finder(preprocessing, str(like or "band"))
    scanned, locations, secret = Catalog.load(catalog), None, None
    if key is not None or root is not None:
        from octfm.catalog.participants import pseudonyms

        if key is None or root is None:
            raise ConfigError(
                "--key and --root: a pseudonymised catalog needs both to find its files; any other needs neither"
            )
        secret = pseudonyms.read_key(key, make=False)
        locations = pseudonyms.locate(scanned, root, secret)
        if gone := len(scanned.acquisitions) - len(locations):
            opt.echo_line(
                f"{root}: {gone} of {number(len(scanned.acquisitions), 'scan')} of the catalog not found below it"
            )
    if verify:
        from octfm.store import verify as store_verify

        found = store_verify.verify(out, scanned.acquisitions, locations, opt.echo_line)
        store_verify.require_whole(found, out)
        opt.echo_line(f"{out}: all {found.volumes:,} volumes are as they were written")
        return
    store = prepare_catalog(
        scanned,
        out,
        preprocessing,
        workers=workers,
        compression=compression,
        locations=locations,
        key=secret,
        limits=opt.limits_of(file_seconds, file_gb),
        cluster=dask,
        keep_upside_down=keep_upside_down,
        exclude=exclude,
        find_band=find_band,
        reuse=reuse,
    )
    opt.echo_line(f"{store.path}: {number(len(store), 'volume')}")


def _print_summary(catalog: "Catalog", out: opt.Place) -> None:
    counts = f"{len(catalog.acquisitions)} accepted, {len(catalog.rejects)} rejected, {len(catalog.skipped)} skipped"
    opt.echo_line(f"{out}: {counts}")
    from octfm.catalog.participants.folders import doubts_about_people, split_folders

    summary = catalog.summary()
    disc_sides = summary.pop("disc_sides", {})
    for name, value in summary.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {count}" for key, count in value.items()) or "none"
        opt.echo_line(f"  {name.replace('_', ' ')}: {value}")
    _print_disc_sides(disc_sides)
    if (folders := split_folders(catalog.root, catalog.acquisitions)) is not None:
        opt.echo_line(f"  {folders.sentence}")
    for doubt in doubts_about_people(catalog.acquisitions):
        opt.echo_line(f"  {doubt}")
    of_two = [reject.sentence for reject in catalog.rejects if reject.code == "pixels_of_two_participants"]
    opt.echo_line(*of_two[:3])


def _print_disc_sides(of_scanner: dict[str, dict[str, int]]) -> None:
    """Print verdicts per scanner and, if some eyes could not be checked, what the check needs."""
    from octfm.volume.laterality import CANNOT_TELL, NEEDS

    for scanner, counts in of_scanner.items():
        unclear = ", ".join(f"{name} {counts[name]}" for name in CANNOT_TELL.values() if counts[name])
        verdicts = ", ".join(f"{name} {n}" for name, n in counts.items() if name not in CANNOT_TELL.values())
        opt.echo_line(f"  side of the optic disc, {scanner}: {verdicts}{f' ({unclear})' if unclear else ''}")
    if any(counts["cannot tell"] for counts in of_scanner.values()):
        opt.echo_line(f"  where it cannot tell, a wrong eye label goes unnoticed; the check needs {NEEDS}")


def _print_withheld(withheld: "Mapping[str, tuple[int, int]]") -> None:
    """Print to stderr only, never into the catalog: a column's name may itself be private."""
    if not withheld:
        return
    columns = ", ".join(f"{column!a} ({few} of {many} participants)" for column, (few, many) in withheld.items())
    opt.echo_line(
        f"withheld values that are not known to be safe, in {len(withheld)} columns: {columns}; "
        "--keep-columns NAME,NAME keeps a column unchanged",
        err=True,
    )
