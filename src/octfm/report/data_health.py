"""data_health.html: what a scan found, on one page for sharing.

It has no name of a file, folder or person, and no word of a header or table that octfm does not know
(octfm.report.shareable).
"""

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from octfm.catalog.acquisition import FLAGS, Acquisition, Reject
from octfm.catalog.catalog import Catalog
from octfm.catalog.participants.splits import SPLITS
from octfm.display import EYES, SIDES, readable
from octfm.errors import ReadError
from octfm.formats import read_volume
from octfm.formats.reasons import REASONS
from octfm.io.isolation import Limits
from octfm.io.location import Location
from octfm.io.spread import spread
from octfm.report.figures import MARKERS, SERIES, Chart, canvas, plain, plain_ticks, to_svg
from octfm.report.images import Picture, native_pictures
from octfm.report.page import render, write_page
from octfm.report.shareable import shareable_catalog
from octfm.report.sources import by_person
from octfm.volume.estimated import FLAG
from octfm.volume.laterality import CANNOT_TELL, NEEDS
from octfm.volume.radial import to_raster
from octfm.volume.volume import Spacing3

AXES = ("B-scan distance", "axial spacing", "lateral spacing")
EXTENTS = ("extent across B-scans", "axial extent", "lateral extent")
OUTLIERS = 8
"""Most volumes to show."""
UNLIKE = 1.15
"""Ratio to the median of its kind above which a volume is an outlier; differences between eyes are smaller."""
AUDITED = (
    "laterality_contradicts_anatomy",
    "laterality_conflict",
    "disc_on_the_right",
    "disc_on_the_left",
    "laterality_unknown",
)
"""Flags of the audit, the most serious first."""
SHOWN = 24
"""Rows of the page's table."""
OF_A_READER = "raised by a reader of your own"
"""What is said of flags that octfm does not have."""


@dataclass(frozen=True)
class Outlier:
    """A volume that is unlike others of its kind, or has a rare flag."""

    row: int
    """Row of catalog.parquet, from 0."""
    acquisition: Acquisition
    why: str
    distance: float
    """Largest ratio to the median of its kind; 0 for volumes with a flag only."""


@dataclass(frozen=True)
class Doubt:
    """A volume whose stated eye is doubtful."""

    row: int
    """Row of catalog.parquet, from 0."""
    acquisition: Acquisition
    flag: str
    stated: str
    anatomy: str

    @property
    def meaning(self) -> str:
        return FLAGS[self.flag]


def write_data_health(
    catalog: Catalog,
    out: Location,
    *,
    images: bool = True,
    max_reject: float | None = None,
    locations: Mapping[str, str] | None = None,
) -> Location:
    """Write counts, distributions, reasons, the audit of laterality, and the volumes least like their kind; returns the
    page's location. With `images`, these volumes and doubtful eyes are decoded and shown. `max_reject`: largest share
    of rejects that the user allows. `locations` maps the uris of a catalog with pseudonyms to files."""
    catalog = shareable_catalog(replace(catalog, acquisitions=by_person(catalog.acquisitions)[0]))
    doubts = laterality_doubts(catalog.acquisitions)
    facts = {
        "summary": catalog.summary(),
        "rejected_share": catalog.reject_share,
        "max_reject": max_reject,
        "groups": _groups(catalog.acquisitions),
        "sites": _sites(catalog.acquisitions),
        "splits": _splits(catalog.acquisitions),
        "shapes": _shapes(catalog.acquisitions),
        "rejects": _reasons(catalog.rejects),
        "skipped": _reasons(catalog.skipped),
        "two_ids": _two_ids(catalog),
        "flags": [(flag, n, FLAGS.get(flag, OF_A_READER)) for flag, n in catalog.summary()["flags"].items()],
        "charts": distribution_charts(catalog.acquisitions),
        "sides": by_scanner(catalog.acquisitions),
        "disc_sides": catalog.summary().get("disc_sides", {}),
        "disc_needs": NEEDS,
        "doubtful_sides": _sides(doubts[:SHOWN], images, locations or {}),
        "more_sides": max(0, len(doubts) - SHOWN),
        "looked": catalog.pixels,
        "outliers": _shown(outliers(catalog.acquisitions), images, locations or {}),
        "images": images,
    }
    return write_page(render("data_health.html.jinja", facts), out)


def outliers(acquisitions: Sequence[Acquisition]) -> list[Outlier]:
    """At most OUTLIERS volumes whose spacing or extent differs from the median of their kind (scanner, protocol, layout
    and modality), furthest first; then volumes with flags."""
    kinds: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for row, a in enumerate(acquisitions):
        if FLAG in a.flags:
            continue  # estimated millimetres are those of a group
        kinds[a.scanner, a.protocol, a.layout, a.modality].append(row)
    found = {}
    for rows in kinds.values():
        measures = np.array([(*acquisitions[row].spacing_mm, *_extent_mm(acquisitions[row])) for row in rows])
        # Six ratios per volume to the median of its kind; the largest decides.
        ratio = measures / np.median(measures, axis=0)
        far = np.maximum(ratio, 1 / ratio)
        # measures / ratio is the median again, once for every row.
        for row, values, unlike, usually in zip(rows, measures, far, measures / ratio, strict=True):
            worst = int(unlike.argmax())
            if unlike[worst] > UNLIKE:
                usual = float(usually[worst])
                why = f"{(*AXES, *EXTENTS)[worst]} {values[worst]:.3g} mm, usual for its kind {usual:.3g} mm"
                found[row] = Outlier(row, acquisitions[row], why, float(unlike[worst]))
    rare = Counter(flag for a in acquisitions for flag in a.flags)
    for row, a in enumerate(acquisitions):
        # A flag on more than a tenth of the rows concerns the archive, not this volume. Flags of sides have a table.
        own_table = (*AUDITED, *CANNOT_TELL)
        doubts = [flag for flag in a.flags if rare[flag] <= len(acquisitions) / 10 and flag not in own_table]
        if doubts and row not in found:
            found[row] = Outlier(row, a, "; ".join(FLAGS.get(flag, f"{flag}: {OF_A_READER}") for flag in doubts), 0.0)
    return sorted(found.values(), key=lambda outlier: (-outlier.distance, outlier.row))[:OUTLIERS]


def laterality_doubts(acquisitions: Sequence[Acquisition]) -> list[Doubt]:
    """Every volume whose side is doubtful, the most serious first; a side that is merely unknown comes last."""
    found = []
    for row, a in enumerate(acquisitions):
        flag = next((flag for flag in AUDITED if flag in a.flags), None)
        if flag is not None:
            stated = "two eyes" if "laterality_conflict" in a.flags else SIDES.get(a.laterality or "", "nothing")
            found.append(Doubt(row, a, flag, stated, _anatomy(a)))
    return sorted(found, key=lambda doubt: (AUDITED.index(doubt.flag), doubt.row))


def _anatomy(a: Acquisition) -> str:
    # Anatomy shows the eye that was not stated.
    if "laterality_contradicts_anatomy" in a.flags:
        return {"R": "left", "L": "right"}.get(a.laterality or "", "unclear")
    if "disc_on_the_right" in a.flags:
        return "right"
    if "disc_on_the_left" in a.flags:
        return "left"
    return next((f"cannot tell: {CANNOT_TELL[flag]}" for flag in a.flags if flag in CANNOT_TELL), "unclear")


def by_scanner(acquisitions: Sequence[Acquisition]) -> list[tuple[str, int, int]]:
    """(scanner, volumes with a stated side, volumes without one); by scanner, since a faulty export affects all of its
    volumes."""
    stated = Counter(a.scanner for a in acquisitions if a.laterality)
    unknown = Counter(a.scanner for a in acquisitions if not a.laterality)
    return [(s, stated[s], unknown[s]) for s in sorted(stated.keys() | unknown.keys())]


def distribution_charts(acquisitions: Sequence[Acquisition]) -> list[Chart]:
    """One chart per axis with the spacings and extents of each scanner; the larger the mark, the more volumes have it.
    Rasters only: the B-scans of a radial scan lie at angles and have no distance."""
    acquisitions = [a for a in acquisitions if a.layout == "raster"]
    charts: list[Chart] = []
    if not acquisitions:
        return charts
    for title, caption, names, measure in (
        ("Spacing", "Distance between neighbours, in µm.", AXES, lambda a: [1000 * mm for mm in a.spacing_mm]),
        ("Extent", "Field of view, in mm: the number of pixels times their spacing.", EXTENTS, _extent_mm),
    ):
        charts += [_distribution(acquisitions, name, title, caption, i, measure) for i, name in enumerate(names)]
    return charts


def _distribution(
    acquisitions: Sequence[Acquisition],
    name: str,
    title: str,
    caption: str,
    axis: int,
    measure: Callable[[Acquisition], Sequence[float]],
) -> Chart:
    scanners = sorted({a.scanner for a in acquisitions})
    unit = "µm" if title == "Spacing" else "mm"
    spoken, every = [], []
    with canvas(f"{title} {axis}", 4.2, 0.8 + 0.34 * len(scanners)) as (figure, axes):
        for i, scanner in enumerate(scanners):
            values = Counter(float(f"{measure(a)[axis]:.3g}") for a in acquisitions if a.scanner == scanner)
            size = [14 + 90 * n / max(values.values()) for n in values.values()]
            style: dict[str, Any] = {"color": SERIES[i % len(SERIES)], "marker": MARKERS[i % len(MARKERS)]}
            axes.scatter(list(values), [i] * len(values), size, **style, alpha=0.75, linewidths=0, zorder=3)
            usual = values.most_common(1)[0][0]
            spoken.append(f"{scanner} {min(values):g} to {max(values):g} {unit}, mostly {usual:g}")
            every += list(values)
        # A wide range gets a logarithmic axis; a single value gets some room on either side.
        if max(every) > 4 * min(every):
            axes.set_xscale("log")
            plain_ticks(axes.xaxis)
        elif max(every) < 1.02 * min(every):
            axes.set_xlim(0.9 * min(every), 1.1 * max(every))
        axes.set_yticks(range(len(scanners)), [plain(scanner) for scanner in scanners])
        axes.set_ylim(len(scanners) - 0.5, -0.5)
        axes.set_xlabel(unit)
        svg = to_svg(figure, f"{name}: " + "; ".join(spoken))
    return Chart(name[0].upper() + name[1:], caption, svg)


def _extent_mm(a: Acquisition) -> list[float]:
    return [n * mm for n, mm in zip(a.shape, a.spacing_mm, strict=True)]


def _groups(acquisitions: Sequence[Acquisition]) -> list[dict[str, Any]]:
    kinds: dict[tuple[str, str], list[Acquisition]] = defaultdict(list)
    for a in acquisitions:
        unusual = [word for word in (a.layout, a.modality) if word not in ("raster", "structure")]
        kinds[a.scanner, f"{a.protocol} ({', '.join(unusual)})" if unusual else a.protocol].append(a)
    rows = []
    for (scanner, protocol), own in sorted(kinds.items()):
        eyes = Counter(a.laterality or "unknown" for a in own)
        people = len({a.participant for a in own})
        row = {"scanner": scanner, "protocol": protocol, "volumes": len(own), "participants": people}
        rows.append(row | {side: eyes[side] for side in ("R", "L", "unknown")})
    return rows


def _sites(acquisitions: Sequence[Acquisition]) -> list[dict[str, Any]]:
    places: dict[str, list[Acquisition]] = defaultdict(list)
    for a in acquisitions:
        places[a.participant_labels.get("clinical_site", "")].append(a)
    if set(places) == {""}:
        return []
    return [
        {
            "site": site or "not stated",
            "volumes": len(own),
            "participants": len({a.participant for a in own}),
            "scanners": Counter(a.scanner for a in own).most_common(),
        }
        for site, own in sorted(places.items())
    ]


def _splits(acquisitions: Sequence[Acquisition]) -> list[dict[str, Any]]:
    scanners = sorted({a.scanner for a in acquisitions})
    rows = []
    for split in SPLITS:
        own = [a for a in acquisitions if a.split == split]
        volumes = Counter(a.scanner for a in own)
        people, eyes = len({a.participant for a in own}), len({a.eye_id for a in own if a.laterality})
        counts = [(s, volumes[s]) for s in scanners]
        rows.append({"split": split, "participants": people, "eyes": eyes, "volumes": counts})
    return rows


def _shapes(acquisitions: Sequence[Acquisition]) -> list[tuple[str, str, int]]:
    """(scanner, B-scans x rows x columns, volumes), most frequent first."""
    sizes = Counter((a.scanner, " × ".join(map(str, a.shape))) for a in acquisitions)
    return [(scanner, shape, n) for (scanner, shape), n in sizes.most_common(20)]


def _reasons(left_out: Sequence[Reject]) -> list[dict[str, Any]]:
    by_code: dict[str, list[Reject]] = defaultdict(list)
    for reject in left_out:
        by_code[reject.code].append(reject)
    return [
        {
            "code": code,
            "count": len(own),
            "megabytes": sum(reject.bytes for reject in own) / 1e6,
            "meaning": REASONS[code].meaning,
            "fix": REASONS[code].fix,
        }
        for code, own in sorted(by_code.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def _two_ids(catalog: Catalog) -> list[tuple[int, int]]:
    """(row of catalog.parquet, row of rejects.parquet) with the same voxels under two participants."""
    rows = {a.sop_instance_uid: row for row, a in enumerate(catalog.acquisitions)}
    left_out = enumerate((*catalog.rejects, *catalog.skipped))
    of_two = [(row, reject) for row, reject in left_out if reject.code == "pixels_of_two_participants"]
    return [(rows[reject.refers_to], row) for row, reject in of_two if reject.refers_to in rows]


def _shown(found: Sequence[Outlier], images: bool, locations: Mapping[str, str]) -> list[dict[str, Any]]:
    rows = []
    for outlier, pictures in zip(found, _pictures_of([o.acquisition for o in found], images, locations), strict=True):
        a = outlier.acquisition
        eye = EYES[a.laterality]
        kind = f"{readable(a.scanner)}, {readable(a.protocol)}"
        title = f"Row {outlier.row}: {kind}, {eye}, {' × '.join(map(str, a.shape))}"
        rows.append({"title": title, "why": outlier.why, **pictures})
    return rows


def _sides(doubts: Sequence[Doubt], images: bool, locations: Mapping[str, str]) -> list[dict[str, Any]]:
    pictures = _pictures_of([d.acquisition for d in doubts], images, locations)
    return [{"doubt": doubt, **own} for doubt, own in zip(doubts, pictures, strict=True)]


def _pictures_of(
    acquisitions: Sequence[Acquisition], images: bool, locations: Mapping[str, str]
) -> list[dict[str, Any]]:
    """`pictures` of each volume, and a `note` if it could not be decoded; both empty without `images`."""
    if not images:
        return [{"pictures": [], "note": ""} for _ in acquisitions]
    files = [(locations.get(a.uri, a.uri), a.spacing_mm, a.scanner) for a in acquisitions]
    # In a child process with a deadline: the scan may have read headers only, and pixels can crash a decoder.
    seconds = [Limits().deadline(math.prod(a.shape), a.uri) for a in acquisitions]
    found = spread(_pictures, files, lambda _, lost: lost.code, workers=1, deadline=lambda *_: max(seconds), chunk=1)
    return [
        {"pictures": [], "note": f"It could not be decoded: {REASONS[own].meaning}."}
        if isinstance(own, str)
        else {"pictures": own, "note": ""}
        for own in found
    ]


def _pictures(file: tuple[str, Spacing3, str]) -> list[Picture] | str:
    """Pictures of a volume, or the code of the reason why there are none; `file`: (uri, spacing, public scanner
    name)."""
    uri, spacing_mm, scanner = file
    try:
        volume = read_volume(uri, spacing_mm=spacing_mm, raster_only=False, structure_only=False)
        volume = replace(volume, scanner=scanner)
        return native_pictures(to_raster(volume) if volume.layout == "radial" else volume)
    except ReadError as error:
        return error.code
