"""What a page needs to correct a segmentation by hand and to measure it again: lines, areas, doubt and geometry."""

import base64
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib import colormaps

from octfm.errors import EvaluationError
from octfm.report.segmented.pictures import RANGE_UM
from octfm.report.viewer import colour_steps
from octfm.version import __version__
from octfm.volume import etdrs
from octfm.volume.etdrs import lateral_scale
from octfm.volume.pixel_copies import fingerprint
from octfm.volume.segmentation import words_of

if TYPE_CHECKING:
    from octfm.layers.segment import ScanSegmentation

ABSENT = 65535
"""The uint16 that marks a gap of a line. viewer_correct.js has the same number."""
ERROR_STEPS = 256
"""Expected errors are uint16 in units of 1 / ERROR_STEPS µm."""


def correction_facts(found: "ScanSegmentation") -> dict[str, Any]:
    """The data of viewer_correct.js for one scan, in the order of the file. Lines are uint16 in units of 1 / `steps`
    rows, so fine that the frame just fits; areas are run lengths per B-scan."""
    from octfm.layers.corrections import FORMAT, OUTSIDE_ROWS
    from octfm.layers.ranges import SYNTHETIC
    from octfm.layers.segment import PLACE_UM
    from octfm.layers.verdict import ANSWERED, ZONE_UM
    from octfm.layers.zones import grid_of, unsteady
    from octfm.models.layer_net import MASKS, SURFACES

    volume = found.volume
    depth, height, width = volume.shape
    steps = 2 ** int(np.log2(ABSENT / (height + 2 * OUTSIDE_ROWS)))
    rows = (np.stack([found.surfaces[name] for name in SURFACES]) + OUTSIDE_ROWS) * steps
    known = np.isfinite(rows) & (rows >= 0) & (rows < ABSENT)
    coded = np.where(known, np.rint(np.nan_to_num(rows)), ABSENT).astype("<u2")
    error = np.rint(np.clip(found.expected_error_um() * ERROR_STEPS, 0, ABSENT - 1))
    expected = np.where(np.isnan(error), ABSENT, error).astype("<u2")
    (dz, dy, dx), scale = volume.spacing_mm, lateral_scale(found.axial_length_mm)
    grid = grid_of(found)
    return {
        "format": FORMAT,
        "scan": fingerprint(volume.voxels),
        "network": found.model,
        "octfm": __version__,
        "shape": [depth, height, width],
        "axialLength": found.axial_length_mm,
        "reversed": volume.superior_first is False,
        "mm": [dz * scale, dy, dx * scale],
        "surfaces": list(SURFACES),
        "steps": steps,
        "outside": OUTSIDE_ROWS,
        "rows": base64.b64encode(coded.tobytes()).decode(),
        "areas": list(MASKS),
        "reported": list(found.masks),
        "named": {name: words_of(name) for name in (*SURFACES, *MASKS)},
        "labels": [_runs({MASKS.index(name): mask[d] for name, mask in found.masks.items()}) for d in range(depth)],
        "expected": base64.b64encode(expected.tobytes()).decode(),
        "errorSteps": ERROR_STEPS,
        "nlPerVoxel": None if found.bscan_nl is None else found.bscan_nl.tolist(),
        "parts": list(found.verdict.parts),
        "field": _field(found),
        "whyNoZones": found.why_no_grid,
        "ranges": {} if grid is None else {name: list(ends) for name, ends in found.zone_ranges(grid).items()},
        "rangeKind": SYNTHETIC,
        "unsteady": [] if grid is None else unsteady(grid),
        "reasons": [
            {"text": text, "answered": code in ANSWERED}
            for code, text in zip(found.verdict.codes, found.verdict.reasons, strict=True)
        ],
        "rules": {
            "rings": etdrs.RINGS_MM, "covered": etdrs.LEAST_COVERED, "bridged": etdrs.BRIDGED_MM, "cell": etdrs.CELL_MM,
            "mostApart": etdrs.MOST_APART_MM, "unevenBy": etdrs.UNEVEN,
            "pit": etdrs.PIT_UM, "radius": etdrs.PIT_MM, "around": etdrs.AROUND_MM, "step": etdrs.STEP_MM,
            "reach": etdrs.REACH_MM, "leastFit": etdrs.LEAST_FIT, "independent": etdrs.INDEPENDENT,
            "offCentre": etdrs.OFF_CENTRE_MM, "apart": etdrs.APART_MM, "rival": etdrs.RIVAL,
            "zones": etdrs.ZONES, "sides": etdrs.SIDES[volume.laterality], "zoneUm": ZONE_UM, "placeUm": PLACE_UM,
        },
        "viridis": colour_steps(colormaps["viridis"]),
        "range": RANGE_UM,
    }  # fmt: skip


def _runs(masks: dict[int, np.ndarray]) -> list[int]:
    """Areas of a B-scan, bool [H, W] by their index, as a flat list of runs: first voxel, count, 1 + index."""
    if not masks:
        return []
    labels = np.zeros(next(iter(masks.values())).shape, np.uint8)
    for index, mask in masks.items():
        labels[mask] = 1 + index
    flat = np.concatenate([[0], labels.ravel(), [0]]).astype(np.int16)
    edges = np.flatnonzero(np.diff(flat))
    runs = np.stack([edges[:-1], np.diff(edges), flat[edges[:-1] + 1]], axis=1) if len(edges) else np.zeros((0, 3), int)
    return runs[runs[:, 2] > 0].ravel().tolist()


def _field(found: "ScanSegmentation") -> dict[str, Any] | None:
    """Where A-scans lie on the fundus; None if the scan is no raster."""
    try:
        field = found.place()
    except EvaluationError:
        return None
    return {
        "origin": field.origin.tolist(), "along": field.along.tolist(), "across": field.across.tolist(),
        "bscans": field.bscans_mm.tolist(), "starts": field.starts_mm.tolist(), "columns": field.columns,
        "ascan": field.ascan_mm, "upright": field.upright, "centre": field.centre.tolist(),
    }  # fmt: skip
