"""What the packaged network measures in a scan, as numbers: the arm that any encoder of the same scan should beat.

Every layer, RPE to Bruch's membrane, fluid and drusen, by ETDRS zone and as spread over the scan. The scans are read in
their native geometry, not from the prepared store.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from octfm.encoder.embeddings import Embeddings, of_store, take_rows
from octfm.errors import Echo, EvaluationError
from octfm.formats import read_volume
from octfm.io.location import from_json, write_whole
from octfm.io.progress import Progress
from octfm.layers.finder import LayerFinder, load_finder
from octfm.layers.segment import ScanSegmentation, segment
from octfm.models.layer_net import MASKS, SURFACES
from octfm.store.store import Store
from octfm.tasks.segment import transform_of
from octfm.volume.etdrs import ZONES, means_around, measure_grid
from octfm.volume.volume import Laterality, Spacing3, Volume

LAYERS = (*pairwise(SURFACES), ("ilm", "bm"), ("rpe_peak", "bm"))
"""Every layer between neighbouring surfaces, the retina, and the height of the RPE above Bruch's membrane."""
SPREADS = ("mean", "sd", "p5", "p95", "between_bscans")
"""Of a map over the scan: its mean, standard deviation and two percentiles, and the standard deviation of the means of
its B-scans."""
COLUMNS = (
    *(f"{a}_{b}:{z}" for a, b in LAYERS for z in ZONES),
    *(f"{a}_{b}:{s}" for a, b in LAYERS for s in SPREADS),
    *(f"{m}:{z}" for m in MASKS for z in ZONES),
    *(f"{m}:{s}" for m in MASKS for s in ("area", "largest", "between_bscans")),
)  # fmt: skip
"""Channels: µm of thickness or height, except two of each mask: `area`, the share of A-scans that have it, and
`between_bscans`, the standard deviation of this share over B-scans."""


@dataclass(frozen=True)
class Source:
    """One acquisition to measure."""

    acquisition: str
    uri: str
    laterality: Laterality | None
    spacing_mm: Spacing3 | None = None
    """For a file that states none; features may be in estimated micrometres."""
    pixels: str = ""
    """Fingerprint of the voxels, if it is known."""

    @property
    def key(self) -> str:
        """Everything that the numbers depend on: those of another eye or in other millimetres are not reused."""
        return json.dumps([self.acquisition, self.laterality, self.spacing_mm, self.pixels])


def sources_of(store: Store) -> list[Source]:
    """The native files of a store's volumes, with its millimetres."""
    return [
        Source(row.acquisition, row.uri, row.laterality, transform_of(row).native_spacing_mm, row.pixels)
        for row in store.rows
    ]


def layer_map(
    store: Store,
    file: str | Path,
    *,
    bscans: int | None = None,
    echo: Echo = print,
) -> Embeddings:
    """Embeddings whose `vectors`, float64 [N, len(COLUMNS)], are the measurements of every volume of a store, in the
    order of embeddings.

    `file`, a JSON Lines file, keeps what is measured: the same call goes on where it stopped, measures again what has
    other voxels, another eye or other millimetres since, and refuses a file made by another network or with other
    B-scans. `bscans`: about so many of each volume, evenly spaced; None for all. A number that a scan does not allow
    is NaN, which a probe takes for the mean of its training rows. Raises EvaluationError for a file of another kind,
    ReadError for an unreadable scan.
    """
    finder = load_finder()
    rows = measured(sources_of(store), file, bscans=bscans, finder=finder, echo=echo)
    data = of_store(store)
    values = np.array([rows[name] for name in data.acquisition.tolist()]).reshape(len(data.acquisition), len(COLUMNS))
    order = np.argsort(data.acquisition)
    facts = {"encoder": f"layers, fluid and drusen by {finder.model}, no encoder"}
    arm = replace(data, name="layers", path=str(file), metadata=facts, vectors=values)
    return take_rows(arm, order)


def measured(
    sources: Sequence[Source],
    file: str | Path,
    *,
    bscans: int | None,
    finder: LayerFinder,
    echo: Echo = print,
) -> dict[str, np.ndarray]:
    """Acquisition → float64 [len(COLUMNS)], NaN where a scan does not allow a number; see `layer_map`."""
    file = Path(file)
    head = {"format": "octfm-layer-map", "version": 1, "model": finder.model, "bscans": bscans, "columns": [*COLUMNS]}
    found = _read(file, head)
    wanted = [source for source in sources if source.key not in found]
    if len(wanted) < len(sources):
        echo(f"{file}: {len(sources) - len(wanted):,} of {len(sources):,} volumes are measured already")
    with file.open("a", encoding="utf-8") as out, Progress("layers", len(wanted)) as progress:
        for source in wanted:
            volume = read_volume(source.uri, spacing_mm=source.spacing_mm, raster_only=False)
            scan = segment(spaced(replace(volume, laterality=source.laterality), bscans), finder=finder)
            values = np.round(describe(scan), 4)
            found[source.key] = values
            numbers = [None if np.isnan(v) else float(v) for v in values]
            out.write(f"{json.dumps([source.key, numbers])}\n")
            out.flush()
            progress.advance(1)
    return {source.acquisition: found[source.key] for source in sources}


def _read(file: Path, head: dict) -> dict[str, np.ndarray]:
    """Key of a source → its numbers in the file, without a last line that a kill left half-written; begins the file if
    there is none."""
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True) if file.is_file() else []
    if not lines:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, f"{json.dumps(head)}\n".encode())
        return {}
    try:
        known = from_json(lines[0])
    except ValueError:
        known = {}
    if known != head:
        was = {key: known.get(key) for key in ("model", "bscans")} if isinstance(known, dict) else {}
        raise EvaluationError(
            f"{file}: expected layers measured by {head['model']} in {head['bscans'] or 'all'} B-scans, got "
            f"{was.get('model') or 'another file'} in {was.get('bscans') or 'all'}; delete it, or name another file"
        )
    whole = [line for line in lines[1:] if line.endswith("\n")]
    if len(whole) + 1 < len(lines):
        write_whole(file, "".join([lines[0], *whole]).encode())
    found = {}
    for place, line in enumerate(whole, 2):
        try:
            name, values = from_json(line)
            found[name] = np.array([np.nan if v is None else v for v in values], float)
            found[name].reshape(len(COLUMNS))
        except (ValueError, TypeError):
            raise EvaluationError(
                f"{file}: line {place} is damaged; delete the line, and its scan is measured again"
            ) from None
    return found


def spaced(volume: Volume, bscans: int | None) -> Volume:
    """The volume with every n-th B-scan, so that about `bscans` remain, with about as many left out at both ends; the
    volume itself for None, or if fewer than two would remain."""
    depth = len(volume.voxels)
    step = 1 if bscans is None else max(1, round(depth / bscans))
    if step == 1 or depth // step < 2:
        return volume
    kept = slice((depth - 1) % step // 2, None, step)
    dz, dy, dx = volume.spacing_mm
    lines = None if volume.lines is None else volume.lines[kept]
    return replace(volume, voxels=volume.voxels[kept], spacing_mm=(dz * step, dy, dx), lines=lines)


def describe(scan: ScanSegmentation) -> np.ndarray:
    """float64 [len(COLUMNS)] of one scan; NaN for zones that it does not cover."""
    um = 1000 * scan.spacing_mm[1]
    maps = [scan.thickness_um(a, b) for a, b in LAYERS]
    heights = [
        scan.masks[name].sum(axis=1) * um if name in scan.masks else np.full(scan.found.present.shape, np.nan)
        for name in MASKS
    ]
    return np.array(
        [
            *_zones(scan, maps),
            *(value for values in maps for value in _spread(values)),
            *_zones(scan, heights),
            *(value for values in heights for value in _amounts(values)),
        ],
        float,
    )


def _zones(scan: ScanSegmentation, maps: Iterable[np.ndarray]) -> Iterator[float]:
    """Means per zone of ZONES around one fovea, of all A-scans, the doubtful ones too: a probe can judge for itself."""
    maps = list(maps)
    try:
        place = scan.place()
        inner = scan.thickness_um("ilm", "ipl_inl")
        centre = measure_grid(inner, place, scan.volume.laterality).centre_mm
    except EvaluationError:
        yield from np.full(len(maps) * len(ZONES), np.nan)
        return
    for values in maps:
        means = means_around(centre, values, place, scan.volume.laterality)
        yield from (np.nan if means.get(zone) is None else float(means[zone] or 0.0) for zone in ZONES)


def _spread(values_DW: np.ndarray) -> list[float]:
    known = values_DW[np.isfinite(values_DW)]
    if not known.size:
        return [np.nan] * len(SPREADS)
    lines = [line[np.isfinite(line)].mean() for line in values_DW if np.isfinite(line).any()]
    low, high = np.percentile(known, (5, 95))
    return [float(known.mean()), float(known.std()), float(low), float(high), float(np.std(lines))]


def _amounts(values_DW: np.ndarray) -> list[float]:
    """Share of A-scans that have some, its greatest height in µm, and the spread of the share over B-scans."""
    if not np.isfinite(values_DW).all():
        return [np.nan] * 3
    some = values_DW > 0
    return [float(some.mean()), float(values_DW.max()), float(some.mean(1).std())]
