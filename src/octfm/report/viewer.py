"""The offline viewer: volumes with overlays as self-contained HTML within a given size, to scroll through B-scans."""

import base64
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.colors import LinearSegmentedColormap
from PIL import Image

from octfm.display import SIDES, coded, readable
from octfm.errors import EvaluationError
from octfm.io.location import Location
from octfm.report.images import Picture, front, shown_spacing
from octfm.report.page import MAX_BYTES, render, write_page
from octfm.tasks.scene import ACROSS, BESIDE, Overlay, Scene
from octfm.volume.estimated import WHY
from octfm.volume.volume import Fundus, Volume

LINE_STEPS, NO_LINE = 16, -32768
"""Lines are int16 in sixteenths of a row. viewer_paint.js has the same numbers."""
LINE_COLUMNS = 512
"""Most points of a line."""
MEAN_EYE_SENTENCE = "those of a mean eye, because the file states degrees; usually right to within a tenth"
CODINGS = ((88, 4_000_000, 1), (75, 4_000_000, 1), (75, 400_000, 1), (75, 250_000, 1), (70, 150_000, 1),
           (60, 100_000, 1), (60, 100_000, 2), (60, 100_000, 3), (60, 80_000, 4), (60, 80_000, 6), (50, 60_000, 8),
           (50, 60_000, 16), (40, 40_000, 32), (40, 20_000, 64))  # fmt: skip
"""(JPEG quality, most pixels of a B-scan, one in this many B-scans), the finest first. To save bytes, pixels are
reduced before B-scans are left out."""


@dataclass(frozen=True)
class Viewer:
    """Parts of a page. Its Content-Security-Policy must allow `policy`, the hash of the viewer's script, and no other
    script."""

    body: str
    style: str
    policy: str


def viewer(
    scenes: Sequence[Scene],
    budget: int = MAX_BYTES - 1_000_000,
    *,
    alone: bool = False,
    on: Sequence[str] = (),
    corrections: Mapping[int, dict[str, Any]] | None = None,
) -> Viewer:
    """One viewer for all scenes in at most `budget` bytes.

    alone: nothing else is on its page, so it takes the keyboard focus.
    on: keys of the overlays that are shown from the beginning.
    corrections: index of a scene → `correction_facts` of its segmentation, for correcting it by hand.

    Raises EvaluationError if not even few, coarse B-scans fit.
    """
    folder = resources.files("octfm.report")
    names = ("viewer_paint.js", *(("viewer_etdrs.js", "viewer_correct.js") if corrections else ()), "viewer.js")
    script = "\n" + "".join((folder / name).read_text(encoding="utf-8") for name in names)
    facts = {"colourMaps": _colour_maps(), "volumes": [], "on": list(on)}
    room = (budget - len(script) - 20_000) // max(1, len(scenes))
    for i, scene in enumerate(scenes):
        facts["volumes"].append(_volume(scene.as_seen(), room, (corrections or {}).get(i)))
    # A "</script>" in the data would end the element that holds it.
    data = json.dumps(facts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    page = {"data": data, "script": script, "alone": alone, "correct": bool(corrections)}
    body = render("viewer.html.jinja", {"viewer": page})
    if len(body.encode()) > budget:
        raise EvaluationError(
            f"the viewer takes {len(body.encode()):,} bytes, expected at most {budget:,}; show fewer volumes"
        )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return Viewer(body, (folder / "viewer.css").read_text(encoding="utf-8"), f"sha256-{digest}")


def write_view(
    scene: Scene,
    out: Location,
    facts: Sequence[tuple[str, str]] = (),
    detail: str = "",
    pictures: Sequence[Picture] = (),
    corrections: dict[str, Any] | None = None,
    verdict: Sequence[tuple[str, str, str]] = (),
) -> Location:
    """Write a page for one volume, under 25 MB: `verdict`, (class, word, sentence), then the viewer, `pictures` and
    `facts`. A segmentation and overlays from other files are shown from the beginning."""
    by_hand = {0: corrections} if corrections else None
    on = ("segmentation", "lesions", *(o.key for o in scene.overlays if o.key.startswith(BESIDE)))
    shown = viewer([scene], alone=True, on=on, corrections=by_hand)
    page = {"title": scene.title, "detail": detail, "viewer": shown, "facts": facts, "pictures": pictures}
    page |= {"verdict": verdict}
    return write_page(render("view.html.jinja", page), out)


def view_facts(volume: Volume, scene: Scene, axial_length_mm: float | None = None) -> list[tuple[str, str]]:
    """(name, value) of the facts in a volume's file, except its participant; sizes are those of `scene`.
    axial_length_mm: the length by which lateral millimetres were rescaled; None if they are nominal."""
    order = {True: "superior to inferior", False: "inferior to superior in the file, shown superior first"}
    facts = [
        ("Scanner", readable(volume.scanner)),
        ("Protocol", readable(volume.protocol)),
        ("Eye", SIDES.get(volume.laterality or "", "unknown")),
        ("B-scans × rows × A-scans", " × ".join(f"{n:,}" for n in scene.voxels.shape)),
        ("Millimetres", f"unknown: {WHY}"),
    ]
    if scene.has_mm:
        of, steps = ("step", scene.spacing_mm) if scene.is_raster else ("row and A-scan", scene.spacing_mm[1:])
        facts[-1] = (f"Millimetres per {of}", " × ".join(f"{mm:.4g}" for mm in steps))
    if volume.mean_eye and axial_length_mm is None:
        facts.append(("Lateral millimetres", MEAN_EYE_SENTENCE))
    facts += [("Modality", "OCT angiography (flow)")] if volume.modality == "octa" else []
    if not scene.is_raster:
        return [*facts, ("Layout", f"{volume.layout}; the distance between B-scans means nothing")]
    field = " × ".join(f"{n * mm:.2f}" for n, mm in zip(scene.voxels.shape, scene.spacing_mm, strict=True))
    facts.append(("Field", f"{field} mm"))
    if volume.layout != "raster":
        made = f"interpolated from {volume.shape[0]} {volume.layout} B-scans, as an encoder gets it; black beyond"
        return [*facts, ("Layout", made)]
    if not volume.left_to_right:
        way = "vertical on the fundus, not from side to side" if volume.vertical else "from right to left on the fundus"
        return [*facts, ("Direction of B-scans", way)]
    if volume.superior_first is None:
        return [*facts, ("Order of B-scans", "the file does not say which is superior")]
    return [*facts, ("Order of B-scans", order[volume.superior_first])]


def eye_of(scene: Scene) -> str:
    """Which eye a scene shows, as a sentence."""
    return {"R": "Right eye.", "L": "Left eye, shown as it is."}.get(scene.laterality or "", "Which eye is not known.")


def _volume(scene: Scene, room: int, correct: dict[str, Any] | None = None) -> dict[str, Any]:
    """The data that viewer.js needs for one scene, in at most about `room` characters."""
    depth = len(scene.voxels)
    plain = ACROSS.get(scene.laterality or "")
    upright = ("S", "I") if scene.superior_first else None
    facts: dict[str, Any] = {
        "title": scene.title,
        "eye": eye_of(scene),
        "shape": list(scene.voxels.shape),
        "mm": list(scene.spacing_mm),
        "hasMm": scene.has_mm,
        "shownMm": list(shown_spacing(scene.voxels.shape, scene.spacing_mm, 4)),
        # A circle ends where it began, and in a star sides differ between B-scans: neither has `ends`.
        "sides": plain if scene.is_raster and not scene.turned else scene.ends,
        "vertical": scene.edges if scene.turned and scene.edges else upright,
        "frontAbout": _about_front(scene),
        "front": _png(front(scene)) if scene.is_raster and depth > 1 else None,
    }
    if correct is not None:
        facts["correct"] = correct
    if scene.placement is not None:
        grid = next((o.values.shape[:3] for o in scene.overlays if o.on_tokens), None)
        facts["grid"] = [int(n) for n in grid] if grid else None
        rows = [[round(edge, 3) for edge in pair] for pair in scene.placement.rows]
        facts["placement"] = {"bscans": scene.placement.bscans, "columns": scene.placement.columns, "rows": rows}
    if scene.features is not None:
        facts |= {
            "features": _base64(scene.features),
            "directions": scene.features.shape[-1],
            "aboutFeatures": scene.about_features,
        }
        tissue = scene.overlay("tokens")
        if tissue is not None:
            facts["tissue"] = _base64((tissue != 255).astype(np.uint8))
    if scene.fundus is not None:
        facts["fundus"] = _fundus(scene.fundus)
    # Base64 takes 4/3 of the bytes; 3 leaves room for the rest of an overlay.
    room -= len(json.dumps(facts)) + 3 * sum(o.values.nbytes for o in scene.overlays if o.on_tokens)
    # viewer_correct.js draws lines and areas that can be corrected from its own data.
    return facts | _coded(scene, room, drawn_elsewhere=("segmentation", "lesions") if correct is not None else ())


def _coded(scene: Scene, room: int, drawn_elsewhere: Collection[str]) -> dict[str, Any]:
    """B-scans and overlays in the best coding that fits into `room` characters, else EvaluationError; and a note."""
    depth, height, width = scene.voxels.shape
    for quality, most, skip in CODINGS:
        kept = list(range(0, depth, skip))
        # About four B-scans show whether all would be far too large.
        few = kept[:: max(1, len(kept) // 4)]
        if 0.8 * sum(len(_jpeg(scene.voxels[k], quality, most)) for k in few) / len(few) * len(kept) > room:
            continue
        coded = [_jpeg(scene.voxels[k], quality, most) for k in kept]
        overlays = [_overlay(o, kept, empty=o.key in drawn_elsewhere) for o in scene.overlays]
        if sum(map(len, coded)) + sum(len(json.dumps(o)) for o in overlays if o["kind"] in ("lines", "voxels")) <= room:
            break
    else:
        raise EvaluationError(
            f"{scene.title}: {depth} B-scans of {height} x {width} do not fit into {room:,} bytes; show fewer volumes"
        )
    note = []
    if skip > 1:
        note.append(
            f"To keep this page small, one in {skip} B-scans is shown, {len(kept)} of {depth}. The view from the front "
            "has all."
        )
    if (size := _size(scene.voxels[0], most)) != (width, height):
        note.append(
            f"B-scans are shown at {size[0]} × {size[1]} of {width} × {height} pixels; distances are those of the file."
        )
    if depth == 1:
        note.append("A single B-scan: there is no view from the front.")
    elif not scene.is_raster:
        note.append(
            "These B-scans do not lie side by side, so there is no view from the front and no distance between them."
        )
    return {"kept": kept, "bscans": coded, "overlays": overlays, "note": " ".join(note)}


def _about_front(scene: Scene) -> str:
    """How the view from the front is turned against the fundus; empty if it is not."""
    if not (scene.is_raster and scene.turned):
        return ""
    if scene.ends and scene.ends[0] in "SI":
        side = "left" if scene.ends[0] == "S" else "right"
        return f"B-scans run up or down the fundus, so this view lies on its side: superior is on the {side}."
    return "B-scans run from right to left on the fundus, so this view is mirrored."


def _fundus(fundus: Fundus) -> dict[str, Any]:
    """The picture of the fundus; a line is x and y of its ends, in shares of width and height."""
    height, width = fundus.image.shape
    facts: dict[str, Any] = {"image": _jpeg(fundus.image, 85, 500_000), "size": [width, height], "about": fundus.about}
    if fundus.lines is not None:
        ends = np.concatenate([fundus.lines.start, fundus.lines.end], axis=1) / (width, height, width, height)
        facts["lines"] = [[round(share, 4) for share in line] for line in np.nan_to_num(ends, nan=-1).tolist()]
    return facts


def _overlay(overlay: Overlay, kept: list[int], *, empty: bool) -> dict[str, Any]:
    facts: dict[str, Any] = {n: getattr(overlay, n) for n in ("key", "name", "kind", "about", "unit")}
    facts["legend"] = [{"name": name, "colour": colour} for name, colour in overlay.legend]
    values = overlay.values
    if empty:
        return facts
    if overlay.kind == "lines":
        columns = np.unique(np.linspace(0, values.shape[2] - 1, min(values.shape[2], LINE_COLUMNS)).round().astype(int))
        rows = values[:, kept][:, :, columns] * LINE_STEPS
        # int16 in sixteenths reaches row 2,047; lines beyond row 2,000 are drawn as gaps.
        inside = np.isfinite(rows) & (np.abs(rows) < 32000)
        return facts | {
            "data": _base64(np.where(inside, np.nan_to_num(rows).round(), NO_LINE).astype("<i2")),
            "columns": len(columns),
        }
    if overlay.kind == "voxels":
        return facts | {"data": [_area(values[k], overlay) for k in kept]}
    if overlay.kind == "scalar":
        known = values[np.isfinite(values)]
        low, high = (float(known.min()), float(known.max())) if known.size else (0.0, 1.0)
        if low < 0:  # a diverging map is grey at 0
            high = max(high, -low)
            low = -high
        return facts | {"data": _base64(values.astype("<f4")), "low": min(low, 0.0), "high": high}
    return facts | {"data": _base64(values)}


def _jpeg(bscan: np.ndarray, quality: int, most: int) -> str:
    image = Image.fromarray(np.ascontiguousarray(bscan))
    if (size := _size(bscan, most)) != image.size:
        image = image.resize(size, Image.Resampling.BOX)
    return coded(image, format="JPEG", quality=quality)


def _size(bscan: np.ndarray, most: int) -> tuple[int, int]:
    """(width, height) of a B-scan reduced to about `most` pixels."""
    height, width = bscan.shape
    share = min(1.0, (most / (height * width)) ** 0.5)
    return max(1, round(width * share)), max(1, round(height * share))


def _area(bscan: np.ndarray, overlay: Overlay) -> str | None:
    """The mask of one B-scan as a transparent PNG in the colours of its legend; None if it is empty."""
    if not bscan.any():
        return None
    image = Image.fromarray(np.ascontiguousarray(bscan))
    image.putpalette([0, 0, 0, *(channel for _, colour in overlay.legend for channel in colour)])
    return coded(image, format="PNG", transparency=0, optimize=True)


def _png(image: np.ndarray) -> str:
    return coded(Image.fromarray(image), format="PNG", optimize=True)


def _base64(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def colour_steps(colours: Callable[[float], Sequence[float]]) -> list[list[int]]:
    """64 steps of a colour map for the viewer's scripts, as red, green and blue from 0 to 255."""
    return [[round(255 * c) for c in colours(i / 63)[:3]] for i in range(64)]


def _colour_maps() -> dict[str, list[list[int]]]:
    """64 steps each of inferno, for values from 0 up, and of a map from blue through grey at 0 to orange."""
    two_sided = LinearSegmentedColormap.from_list("two_sided", ["#1b6ca8", "#8fc1e3", "#808080", "#f2b36b", "#d55e00"])
    return {"sequential": colour_steps(colormaps["inferno"]), "diverging": colour_steps(two_sided)}
