"""`octfm.segment`: layers, fluid and ETDRS thickness of one scan, by the packaged network, without a training run."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch

from octfm.display import Picture, box, brief, number, picture
from octfm.errors import ConfigError, CorrectionsError, EvaluationError, shown
from octfm.formats import read_volume
from octfm.formats.reasons import angiography
from octfm.io.location import local_path
from octfm.layers.corrections import AXIAL_LENGTH_MM, Corrections, require_order
from octfm.layers.edges import onto_edges
from octfm.layers.export import stem_of, write_files
from octfm.layers.finder import LayerFinder, Layers, load_finder
from octfm.layers.ranges import Ranges, packaged_ranges
from octfm.layers.verdict import (
    ANSWERED,
    ASCAN_UM,
    ZONE_UM,
    Verdict,
    believed_rows,
    dark_bscans,
    expected_error_um,
    judge,
    looks_like_other_eye,
    shows_disc,
)
from octfm.models.layer_net import MASKS, SURFACES
from octfm.volume.estimated import WHY
from octfm.volume.etdrs import (
    MOST_APART_MM,
    RINGS_MM,
    UNEVEN,
    Centre,
    EtdrsGrid,
    Field,
    field_of_volume,
    lateral_scale,
    means_around,
    measure_around,
    measure_grid,
)
from octfm.volume.segmentation import Segmentation
from octfm.volume.volume import Spacing3, Volume, eight_bit
from octfm.weights.packaged import NOTE, SHORT_NOTE

PLACE_UM = 10.0
"""A zone is withheld if its mean changes by more than this around another place that could be the fovea."""
FOVEA_MM: dict[Centre, float] = {"pit": 0.15, "fovea": 0.0, "device": 0.25, "scan": 0.25}
"""How far the fovea may lie from the centre of the grid, by how that was found. Chosen so that ranges contain the mean
around the true fovea in nine tenths of phantom zones (docs/log)."""


@dataclass(frozen=True, eq=False)
class ScanSegmentation(Segmentation):
    """Surfaces and masks of one scan, with a verdict on how far they can be believed."""

    volume: Volume
    """The scan, as the file has it."""
    found: Layers
    """What the network found, with its own uncertainty. `surfaces` are its rows moved onto the edges that define them;
    they lack dark B-scans, and ILM and BM at the edge of the image."""
    verdict: Verdict
    model: str
    """Name and hash of the network."""
    note: ClassVar[str] = SHORT_NOTE
    axial_length_mm: float | None = field(default=None)
    """Length of the eye, by which lateral distances are rescaled; None: they are the instrument's nominal ones."""
    ranges: Ranges | None = field(default=None, repr=False)
    """Ranges of the network; None if it has none."""
    corrections: Corrections | None = field(default=None, repr=False)
    """Corrections by hand. `surfaces` and `masks` include them; `found` is the network's own result."""

    def __repr__(self) -> str:
        facts = self._described()
        return brief(
            "ScanSegmentation", facts["size"], f"verdict: {facts['verdict']}", f"doubtful: {facts['doubtful']}"
        )

    def _repr_html_(self) -> str:
        facts, amounts = self._described(), [(name, self.volume_nl(name)) for name in self.masks]
        found = [f"{name.replace('_', ' ')} {nl:.1f} nl" for name, nl in amounts if nl]
        # Whatever makes zones doubtful, above all wrong millimetres, makes volumes wrong as well.
        facts["found"] = ", ".join(found) if self.verdict.accepted else ""
        facts["network"] = self.model
        grid = None if self.why_no_zones else self.etdrs()
        if self.verdict.accepted:
            facts["note"] = "; ".join(filter(None, (self.why_no_zones, self.note_on_scan)))
        means = grid.mean_um if grid is not None else {}
        ranges = self.zone_ranges(grid) if grid is not None else {}
        between = {name: f"{low:.0f} to {high:.0f} µm" for name, (low, high) in ranges.items()}
        zones = [
            (name, f"{mean:.0f} µm" if mean is not None else "not given", between.get(name, ""))
            for name, mean in means.items()
        ]
        columns = ("ETDRS zone", "retina, ILM to BM", "90 % range on synthetic eyes" if between else "")
        return box("Layers of a scan", facts, pictures=self.pictures(), table=(columns, zones), note=f"{self.note}.")

    def _described(self) -> dict[str, str]:
        reasons = "; ".join(self.verdict.reasons)
        return {
            "verdict": f"do not believe it: {reasons}" if reasons else "nothing speaks against it",
            "doubtful": f"{self.doubtful.mean():.0%} of A-scans",
            "note": self.note_on_scan,
            "corrected": ""
            if self.corrections is None
            else f"by hand, {number(len(self.corrections.touched), 'B-scan')}{self.corrections.and_fovea}",
            **super()._described(),
        }

    def corrected(self, corrections: Corrections) -> "ScanSegmentation":
        """This segmentation with surfaces and masks as somebody has corrected them; see octfm.layers.corrections.

        Where somebody has checked a B-scan, or corrected one of two surfaces in it, the expected error of their
        distance is 0. If that holds for ILM and BM in every B-scan, the verdict drops the reasons that concern only the
        network (ANSWERED). The axial length is this one's, or else that of the page. Raises CorrectionsError for
        corrections of another scan or network or with another axial length, for masks that the network does not report,
        and for lines out of order.
        """
        if not isinstance(corrections, Corrections):
            kind = type(corrections).__name__
            raise TypeError(f"expected Corrections, got {kind}; octfm.layers.corrections.read_corrections reads a file")
        corrections.require(self.volume, self.model)
        if (own := self.axial_length_mm) and (length := corrections.axial_length_mm) and own != length:
            raise CorrectionsError(
                f"{corrections.source}: made with an axial length of {length:g} mm, not {own:g}; leave it out, or "
                "correct a page with this one"
            )
        surfaces = {name: rows.copy() for name, rows in self.surfaces.items()}
        masks = {name: mask.copy() for name, mask in self.masks.items()}
        for name, by_bscan in corrections.surfaces.items():
            for bscan, rows in by_bscan.items():
                surfaces[name][bscan] = rows
        for bscan in sorted(corrections.touched):
            for upper, lower in combinations(surfaces, 2):
                above, below = surfaces[upper][bscan], surfaces[lower][bscan]
                require_order(corrections.source, bscan, upper, above, lower, below)
        for bscan, areas in corrections.areas.items():
            if unknown := areas.keys() - masks.keys():
                raise CorrectionsError(
                    f"{corrections.source}: {', '.join(sorted(unknown))}: not reported by {self.model}; save the file "
                    "again from the page"
                )
            labels = corrections.labels(bscan)
            for name, mask in masks.items():
                mask[bscan] = labels == 1 + MASKS.index(name)
        verdict = self.verdict
        if corrections.trusted("ilm", "bm").all():
            left = [
                (code, why) for code, why in zip(verdict.codes, verdict.reasons, strict=True) if code not in ANSWERED
            ]
            codes, reasons = tuple(code for code, _ in left), tuple(why for _, why in left)
            doubt = verdict.doubt if left else min(verdict.doubt, 0.99)
            verdict = replace(verdict, codes=codes, reasons=reasons, parts=(), doubt=doubt)
        return replace(
            self, surfaces=surfaces, masks=masks, verdict=verdict, corrections=corrections,
            axial_length_mm=self.axial_length_mm or corrections.axial_length_mm,
        )  # fmt: skip

    def save(self, folder: str | Path, stem: str | None = None, *, dicom: bool = False) -> list[Path]:
        """Write what `octfm segment --out FOLDER` writes: NIfTI heights and labels, a JSON with facts of the scan, and
        with `dicom` also DICOM SEG and height map, as `--dicom` does. Returns the paths of the images.

        stem: beginning of their names, by default the name of the scan's file. Raises ExportError if the folder has
        results of another scan under that name, and if DICOM files cannot refer to this scan; EvaluationError without
        nibabel or highdicom.
        """
        stem = stem_of(self.volume.source) if stem is None else stem
        return list(write_files(self, self.volume, local_path(folder), stem, dicom=dicom))

    def expected_error_um(self, upper: str = "ilm", lower: str = "bm") -> np.ndarray:
        """float32 [D, W]: expected absolute error, in µm, of the thickness between two surfaces
        (octfm.layers.verdict.expected_error_um); NaN in B-scans without these lines, 0 where somebody has checked or
        corrected them. Raises EvaluationError for an unknown surface."""
        empty = self._empty(upper, lower)  # first: it raises for an unknown surface
        error = expected_error_um(self.found, self.spacing_mm, upper, lower)
        error[empty] = np.nan
        if self.corrections is not None:
            error[self.corrections.trusted(upper, lower)] = 0
        return error

    def pictures(self) -> list[Picture]:
        """The middle B-scan with surfaces and masks; for notebooks."""
        _, y, x = self.volume.extent_mm
        middle = len(self.volume.voxels) // 2
        grey = eight_bit(self.volume)[middle]
        lines = np.stack([rows[middle] for rows in self.surfaces.values()])
        # The rows of the retina, and a fifth of their number above and below.
        seen = lines[np.isfinite(lines)]
        first, last = (seen.min(), seen.max()) if seen.size else (0, len(grey))
        margin = (last - first) / 5
        rows = slice(max(0, int(first - margin)), int(last + margin) + 1)
        shown, height_mm = grey[rows], y * len(grey[rows]) / len(grey)
        masks = [mask[middle][rows] for mask in self.masks.values()]
        what = "middle B-scan with surfaces and areas"
        return [picture(shown, (height_mm, x), what, lines=list(lines - rows.start), masks=masks, across=480)]

    @property
    def spread_um(self) -> dict[str, np.ndarray]:
        """float32 [D, W] for every surface: standard deviation, in µm, of the network's own distribution over rows, not
        calibrated. Raises EvaluationError if the millimetres of the scan are only estimated."""
        self._expect_um()
        return dict(zip(SURFACES, self.found.spread_um, strict=True))

    @cached_property
    def doubtful(self) -> np.ndarray:
        """bool [D, W]: A-scans whose thickness from ILM to BM should not be believed, because the expected error is
        above 12 µm or ILM or BM was not found; see octfm.layers.verdict.expected_error_um."""
        error = self.expected_error_um()
        # An error of 0 without a thickness: somebody has confirmed that there is no line.
        return ~(error <= ASCAN_UM) | (np.isnan(self.thickness_rows("ilm", "bm")) & (error > 0))

    def _empty(self, upper: str, lower: str) -> np.ndarray:
        """bool [D]: B-scans in which no A-scan has both surfaces."""
        return np.all(np.isnan(self.thickness_rows(upper, lower)), axis=1)

    @property
    def note_on_scan(self) -> str:
        """Remarks in words, empty if there are none: what is missing in parts of an accepted scan, a possible macular
        hole, an eye that looks like the other one, a circle scan."""
        notes = (
            [f"{', '.join(self.verdict.parts)}: zones there are blank, and volumes of fluid"]
            if self.verdict.parts
            else []
        )
        hole = self.found.hole
        if hole is not None and hole.any():
            bscans = number(int(hole.sum()), "B-scan")
            notes.append(f"a full-thickness macular hole may be in {bscans}: its opening is not counted as fluid")
        if self.looks_like_other_eye:
            stated, other = ("right", "left") if self.volume.laterality == "R" else ("left", "right")
            notes.append(
                f"stated as a {stated} eye, but nerve fibres are thicker on the {other}, as in a {other} eye: nasal "
                "and temporal may be exchanged"
            )
        if self.volume.layout == "circle":
            notes.append("no nerve fibre thickness: around the disc NFL/GCL and IPL/INL lie far too high")
        return "; ".join(notes)

    @cached_property
    def looks_like_other_eye(self) -> bool:
        """Whether an accepted raster with a fovea looks like a scan of the eye that was not stated."""
        if self.volume.laterality is None or not self.verdict.accepted:
            return False
        try:
            grid, lines = self._measured(), (self.surfaces["ilm"], self.surfaces["bm"])
        except EvaluationError:
            return False
        return grid.centre in ("pit", "fovea") and looks_like_other_eye(
            self.volume, *lines, self.place(), grid.centre_mm
        )

    @property
    def why_no_um(self) -> str:
        """Why nothing is given in µm, in words; empty if millimetres are known."""
        return WHY if self.volume.spacing_estimated else ""

    @property
    def why_no_zones(self) -> str:
        """Why ETDRS zones are not given, in words; empty if they are."""
        if self.verdict.accepted:
            return self.why_no_grid
        return self._no_raster() or "no zones: the verdict speaks against this segmentation"

    @property
    def why_no_grid(self) -> str:
        """`why_no_zones` without regard to the verdict, which corrections may change."""
        if why := self._no_raster():
            return why
        try:
            self._measured()
        except EvaluationError as error:
            return f"no zones: {str(error).removeprefix(f'{self.volume.source}: ')}"
        return ""

    def _no_raster(self) -> str:
        if self.volume.layout != "raster":
            return f"no zones: a {self.volume.layout} scan; the grid needs a raster of parallel B-scans over the macula"
        if self.volume.shape[0] == 1:
            return "no zones: a single B-scan; the grid needs a raster of parallel B-scans over the macula"
        return ""

    @property
    def retina_rows(self) -> float | None:
        """Median thickness from ILM to BM in rows of the image; None if no A-scan has both."""
        rows = self.thickness_rows("ilm", "bm")
        return float(np.nanmedian(rows)) if np.isfinite(rows).any() else None

    @property
    def image_rows(self) -> int:
        return self.volume.shape[1]

    @property
    def comments(self) -> str:
        """A line for files: the network, whether somebody corrected the result, and the limits of use."""
        by_hand = "" if self.corrections is None else "; corrected by hand"
        return f"octfm segment, {self.model}{by_hand}; {NOTE}"

    @property
    def by_hand(self) -> frozenset[str]:
        """Names of the surfaces and masks that somebody corrected or checked in some B-scan."""
        if self.corrections is None:
            return frozenset()
        # A correction of areas covers all masks of its B-scan.
        return frozenset((*self.corrections.surfaces, *(self.masks if self.corrections.areas else ())))

    def etdrs(self, upper: str = "ilm", lower: str = "bm", *, keep_doubtful: bool = False) -> EtdrsGrid:
        """Mean thickness in µm between two surfaces in the nine ETDRS zones, around the fovea that was found or set by
        hand. Retinal thickness is ILM to BM, as Heidelberg defines it.

        Unless `keep_doubtful`, a zone is None (withheld) if its mean expected error is above 12 µm, if it would change
        by more than 10 µm around another place that could be the fovea, or if B-scans are too far apart for its ring
        (MOST_APART_MM). The volume follows the same rules with the mean thickness within 3 mm and the inner ring.

        Raises EvaluationError for line, circle and radial scans, which do not cover zones, for B-scans whose positions
        contradict each other and, unless `keep_doubtful`, for scans of the optic disc.
        """
        grid = self._measured(upper, lower, keep_doubtful)
        if keep_doubtful:
            return grid
        thickness, expected = self.thickness_um(upper, lower), self._expected(upper, lower, grid)
        held = {name for name in grid.mean_um if (expected.mean_um[name] or 0) > ZONE_UM}
        held |= set(grid.too_sparse)
        per_mm3 = 1000 / (np.pi * RINGS_MM[-1] ** 2)
        trusted = (expected.volume_mm3 or 0) * per_mm3 <= ZONE_UM
        trusted &= not any(name.startswith("inner") for name in grid.too_sparse)
        for rival in grid.rivals_mm:
            other = self._means(thickness, rival)
            held |= {name for name, mean in grid.mean_um.items() if _apart(mean, other.mean_um[name]) > PLACE_UM}
            trusted &= _apart(grid.volume_mm3, other.volume_mm3) * per_mm3 <= PLACE_UM
        given = {name: None if name in held else mean for name, mean in grid.mean_um.items()}
        grid = replace(grid, mean_um=given, volume_mm3=grid.volume_mm3 if trusted else None)
        return replace(grid, place_um=self._place_um(grid, upper, lower))

    def _measured(self, upper: str = "ilm", lower: str = "bm", keep_doubtful: bool = False) -> EtdrsGrid:
        """`etdrs` before zones are withheld; raises in the same cases."""
        # The pit is clearest in the inner retina: drusen, fluid and atrophy below change the whole thickness.
        inner = self.thickness_um("ilm", "ipl_inl")
        thickness, place, laterality = self.thickness_um(upper, lower), self.place(), self.volume.laterality
        if self.corrections is not None and self.corrections.fovea is not None:
            grid = measure_around(place.to_mm(*self.corrections.fovea), thickness, place, laterality, "fovea")
        else:
            grid = measure_grid(thickness, place, laterality, pit_map_um=inner)
        if not keep_doubtful and shows_disc(self.found, place, grid.centre_mm, dark_bscans(self.volume)):
            raise EvaluationError(
                f"{self.volume.source}: the optic disc lies where the fovea should be; the grid needs a scan of the "
                "macula"
            )
        return grid

    def zone_ranges(self, grid: EtdrsGrid | None = None) -> dict[str, tuple[float, float]]:
        """Zone → low and high end in µm of its synthetic-calibrated range, for the zones of `etdrs()` that have a mean.
        `grid`: the result of `etdrs()`, if the caller has it.

        Three parts are added in quadrature: the range of the lines, which contains the mean of the true lines of the
        same B-scans in 90 % of phantom zones; the largest change of the mean if the grid moves as far as the fovea may
        lie away (FOVEA_MM); and the change to expect because B-scans are samples (`EtdrsGrid.sampling_um`). How often a
        range contains the true mean of a real eye is not known. Empty for networks without ranges, and if lines or
        areas were corrected. Raises EvaluationError as `etdrs` does.
        """
        if self.ranges is None or (self.corrections is not None and self.corrections.touched):
            return {}
        grid = self.etdrs() if grid is None else grid
        expected = self._expected("ilm", "bm", grid).mean_um
        fluid = self._means(self.fluid_um(), grid.centre_mm).mean_um
        ranges = {}
        for name, mean in grid.mean_um.items():
            if mean is not None:
                low, high = self.ranges.of(mean, expected[name] or 0.0, fluid[name] or 0.0)
                place_um = np.hypot(grid.place_um[name], grid.sampling_um[name])
                ranges[name] = (
                    mean - float(np.hypot(mean - low, place_um)),
                    mean + float(np.hypot(high - mean, place_um)),
                )
        return ranges

    def _place_um(self, grid: EtdrsGrid, upper: str, lower: str) -> dict[str, float]:
        """`EtdrsGrid.place_um` of the zones that have a mean."""
        thickness, (x, y), away = self.thickness_um(upper, lower), grid.centre_mm, FOVEA_MM[grid.centre]
        turns = np.arange(8) * np.pi / 4
        place, laterality = self.place(), self.volume.laterality
        places = ((x + away * np.cos(turn), y + away * np.sin(turn)) for turn in turns)
        moved = [means_around(centre_mm, thickness, place, laterality) for centre_mm in places]
        return {
            name: max((abs(other - mean) for means in moved if (other := means[name]) is not None), default=0.0)
            for name, mean in grid.mean_um.items()
            if mean is not None
        }

    def _expected(self, upper: str, lower: str, grid: EtdrsGrid) -> EtdrsGrid:
        """The expected error of the thickness between two surfaces, in the zones of its grid."""
        return self._means(self.expected_error_um(upper, lower), grid.centre_mm)

    def _means(self, values_DW: np.ndarray, centre_mm: tuple[float, float]) -> EtdrsGrid:
        """Means of a map in the zones around this place."""
        return measure_around(centre_mm, values_DW, self.place(), self.volume.laterality)

    def fluid_um(self) -> np.ndarray:
        """float32 [D, W]: height of intraretinal fluid in µm; 0 if the network does not report it, NaN in B-scans
        without ILM and BM. Raises EvaluationError if the millimetres are only estimated."""
        self._expect_um()
        if "intraretinal_fluid" not in self.masks:
            return np.zeros(self.found.present.shape, np.float32)
        rows = self.masks["intraretinal_fluid"].sum(axis=1, dtype=np.float32)
        rows[self._empty("ilm", "bm")] = np.nan
        return rows * np.float32(1000 * self.spacing_mm[1])

    def place(self) -> Field:
        """Where the A-scans lie on the fundus. Raises EvaluationError if they form no raster."""
        volume = self.volume
        if self._no_raster():
            raise EvaluationError(
                f"{volume.source}: a {volume.layout} scan of {volume.shape[0]} B-scans covers no ETDRS zone; "
                "a raster is needed"
            )
        try:
            return field_of_volume(volume, self.axial_length_mm)
        except ValueError as error:
            raise EvaluationError(f"{volume.source}: {error}") from None

    @cached_property
    def bscan_nl(self) -> np.ndarray | None:
        """float [D]: volume in nanolitres of a voxel of each B-scan, which reaches halfway to the neighbouring B-scans;
        None unless this is a raster whose B-scans are everywhere as close as the inner ring needs (MOST_APART_MM)."""
        volume, most = self.volume, MOST_APART_MM["inner"]
        if self._no_raster():
            return None
        # Zones need B-scans that all run the same way; their distances are known even if they run to and fro.
        one_way = replace(volume, lines=volume.lines and volume.lines.one_way)
        try:
            field = field_of_volume(one_way, self.axial_length_mm)
        except ValueError:
            return None
        apart = np.diff(field.bscans_mm)
        if apart.mean() > most + 1e-6 or apart.max() > UNEVEN * most:
            return None
        # 1 mm³ is 1,000 nl. Two of its three millimetres are lateral.
        _, dy, dx = self.spacing_mm
        return np.asarray(field.widths_mm * dy * dx * lateral_scale(self.axial_length_mm) * 1000)

    def volume_nl(self, mask: str) -> float | None:
        """Volume of a mask in nanolitres over the scan; None if B-scans have no distance (not a raster) or are too far
        apart, if the network does not report this mask, and if a part of the scan was not seen (`verdict.parts`).
        Raises EvaluationError for an unknown mask."""
        if mask not in MASKS:
            raise EvaluationError(f"no mask {shown(mask)}; masks: {', '.join(self.masks)}")
        if mask not in self.masks or self.bscan_nl is None or self.verdict.parts:
            return None
        return float(self.masks[mask].sum(axis=(1, 2)) @ self.bscan_nl)


def _apart(one: float | None, other: float | None) -> float:
    """Absolute difference of two means; 0 if the first is None, infinite if only the second is."""
    if one is None:
        return 0.0
    return abs(one - other) if other is not None else float("inf")


def segment(
    source: str | Path | Volume,
    *,
    spacing_mm: Spacing3 | None = None,
    axial_length_mm: float | None = None,
    finder: LayerFinder | None = None,
    device: str | torch.device | None = None,
) -> ScanSegmentation:
    """Segment a scan of any layout and format, even a single B-scan, with the packaged network.

    spacing_mm: as for octfm.read_volume, for files that state none. Without any, the spacing of a single B-scan is
    estimated from its retina, and results are in rows and pixels instead of micrometres.
    axial_length_mm: length of the eye, by which lateral distances are rescaled; 14 to 40.
    finder: another network; default: the packaged one, on `device` (auto, cpu, cuda, mps).
    Raises ReadError if the file cannot be read, and for OCT angiography, which shows flow and no layers; ConfigError
    for another axial length, and for spacing_mm together with a Volume, which has its own.
    """
    low, high = AXIAL_LENGTH_MM
    if axial_length_mm is not None and not low <= axial_length_mm <= high:
        raise ConfigError(f"axial_length_mm: expected {low} to {high} mm, got {shown(axial_length_mm)}")
    if spacing_mm is not None and isinstance(source, Volume):
        raise ConfigError("spacing_mm: is for files; a Volume has its own, give Volume(…, spacing_mm=…)")
    finder = finder or load_finder(device=device)
    volume = source if isinstance(source, Volume) else read_volume(source, spacing_mm=spacing_mm, raster_only=False)
    if volume.modality != "structure":
        raise angiography(volume.source)
    found, dark = finder.find(volume), dark_bscans(volume)
    rows = onto_edges(volume.voxels, found.rows, volume.spacing_mm)
    first, last = believed_rows(volume)
    rows[0][rows[0] < first] = np.nan
    rows[-1][rows[-1] > last] = np.nan
    rows[:, dark] = np.nan
    lesions = np.where(dark[:, None, None], 0, found.lesions)
    return ScanSegmentation(
        surfaces=dict(zip(SURFACES, rows, strict=True)),
        masks={name: lesions == i for i, name in enumerate(MASKS, 1) if name in finder.masks},
        spacing_mm=volume.spacing_mm,
        volume=volume,
        found=found,
        verdict=judge(volume, found, finder),
        model=finder.model,
        axial_length_mm=axial_length_mm,
        ranges=packaged_ranges(finder.name, finder.digest),
    )
