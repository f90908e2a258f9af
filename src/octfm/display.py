"""What notebooks and terminals show of an object: one line, a small HTML table with pictures, a pandas table.

Nothing here shows names, ids or paths: notebooks are saved and passed on with what they printed.
"""

import base64
import io
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from octfm.errors import ConfigError, one_line
from octfm.threads import OneAtATime

if TYPE_CHECKING:
    from PIL.Image import Image

BOX = "font-family:system-ui,sans-serif;font-size:13px;line-height:1.45;max-width:56em;overflow-x:auto;text-align:left"
CELL = "text-align:left;vertical-align:top;padding:2px 14px 2px 0;border:0;overflow-wrap:break-word;max-width:34em"
TABLE = "border-collapse:collapse;margin:4px 0;font-size:13px"
PICTURE_WIDTH = 260
"""Pixels across of a picture; two stand side by side, and one below the other on a phone."""
LINES = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#0072B2", "#D55E00", "#CC79A7")
"""Colours of Okabe and Ito for surfaces, in turn; masks take them from the end."""
READABLE = {
    "heidelberg_spectralis": "Heidelberg Spectralis",
    "topcon_maestro2": "Topcon Maestro2",
    "topcon_triton": "Topcon Triton",
    "zeiss_cirrus": "Zeiss Cirrus",
    "cst_um": "central retinal thickness",
}

SIDES = {"R": "right", "L": "left"}
EYES = {"R": "right eye", "L": "left eye", None: "eye unknown"}
"""What is shown of a laterality."""

Picture = tuple[str, str]
"""A data: URI and what it shows."""


def brief(name: str, *facts: str) -> str:
    """`Name(fact, fact)`, without the empty ones."""
    return f"{name}({', '.join(fact for fact in facts if fact)})"


def fields_line(self: Any) -> str:
    """The fields of a dataclass on one line, arrays as type and shape: for classes that hold little but arrays."""
    return brief(type(self).__name__, *(f"{f.name} {_short(getattr(self, f.name))}" for f in fields(self)))


def _short(value: Any) -> str:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping | Sequence | set | frozenset) and not isinstance(value, str):
        return f"{len(value)} entries"
    return str(value) if isinstance(value, bool | int | float | None) else type(value).__name__


def number(count: int, what: str) -> str:
    """`1 volume`, `2,000 volumes`."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def duration(seconds: float) -> str:
    """`41 ms`, `12 s`, `3.5 h`, `4.2 days`."""
    for limit, unit, name in ((1, 1e-3, "ms"), (120, 1, "s"), (7200, 60, "min"), (48 * 3600, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds / 86400:.3g} days"


def readable(name: str) -> str:
    """A scanner or a column of a table as a reader would write it: `Topcon Triton`, `central retinal thickness`; any
    other name without underscores."""
    return READABLE.get(name) or name.replace("_", " ")


def p_value(p: float | None) -> str:
    """`0.012`, `< 0.001`, or a dash if there is none."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def interval(row: dict[str, Any], *, digits: int = 2) -> str:
    """`0.91 (0.87 to 0.95)`, the estimate alone without an interval, or a signed difference; with one more digit if
    `digits` would show only zeros, and as many as show that a score is below 1, that a difference without an interval
    is not 0, and that the interval of a difference excludes 0."""
    signed = "difference" in row
    value = row["difference"] if signed else row.get("estimate")
    if value is None:
        return "not measurable"
    numbers = [value] if row.get("low") is None else [value, row["low"], row["high"]]
    digits += any(abs(n) < 10**-digits for n in numbers)
    # Nor is a score of .997 a perfect 1; a micrometre is none.
    while 1 < digits < 8 and value < 1 and float(f"{value:.{digits}f}") == 1:
        digits += 1
    # What must not read as 0.
    ends = numbers[1:] or numbers
    least = min(map(abs, ends)) if signed and min(ends) * max(ends) > 0 else 1.0
    while 1e-8 <= least < 0.5 * 10**-digits:
        digits += 1
    estimate, *shown = (_signed(n, digits) if signed else f"{n:z.{digits}f}" for n in numbers)
    return f"{estimate} ({' to '.join(shown)})" if shown else estimate


def _signed(value: float, digits: int) -> str:
    """With its sign, unless it is rounded to 0."""
    text = f"{value:+.{digits}f}"
    return text if float(text) else text[1:]


def times(shape: Iterable[float]) -> str:
    """`64 × 384 × 384`, or with one decimal for lengths."""
    return " × ".join(f"{side:.1f}" if isinstance(side, float) else f"{side:,}" for side in shape)


def counted(counts: Mapping[str, int]) -> str:
    """`train 16, val 4`; of many, the first and how many are left out."""
    named, most = [f"{readable(name)} {count:,}" for name, count in counts.items()], 8
    return ", ".join([*named[:most], *([f"and {len(named) - most} more"] if len(named) > most else [])])


def box(
    title: str,
    facts: Mapping[str, str],
    *,
    pictures: Sequence[Picture] = (),
    table: tuple[Sequence[str], Sequence[Sequence[str]]] | None = None,
    note: str = "",
) -> str:
    """HTML of an object: a title, one row per fact that is not empty, pictures, a table (columns, rows), a last line.

    Colours are the page's own, so that it can be read on a light and on a dark one.
    """
    lines = "".join(
        f'<tr style="background:none"><th scope="row" style="{CELL};font-weight:400;opacity:.75">{escape(name)}</th>'
        f'<td style="{CELL}">{escape(value)}</td></tr>'
        for name, value in facts.items()
        if value
    )
    parts = [f"<b>{escape(title)}</b>", f'<table style="{TABLE}">{lines}</table>' if lines else ""]
    parts += [_figures(pictures)] if pictures else []
    parts += [_table(*table)] if table is not None and table[1] else []
    parts += [f'<div style="opacity:.75">{escape(note)}</div>'] if note else []
    return f'<div style="{BOX}">{"".join(parts)}</div>'


def _figures(pictures: Sequence[Picture]) -> str:
    each = "".join(
        f'<figure style="margin:0"><img src="{src}" alt="{escape(what, quote=True)}" '
        f'style="display:block;max-width:100%"><figcaption style="opacity:.75">{escape(what)}</figcaption></figure>'
        for src, what in pictures
    )
    return f'<div style="display:flex;flex-wrap:wrap;gap:10px;align-items:flex-start;margin:6px 0">{each}</div>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    row_of = '<tr style="background:none">{}</tr>'.format
    cell_of = f'<td style="{CELL};border-top:1px solid rgba(128,128,128,.4)">{{}}</td>'.format
    head = "".join(f'<th scope="col" style="{CELL};font-weight:600">{escape(name)}</th>' for name in columns)
    body = "".join(row_of("".join(cell_of(escape(cell)) for cell in row)) for row in rows)
    return f'<table style="{TABLE}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'


def picture(
    grey: np.ndarray,
    size_mm: tuple[float, float],
    what: str,
    *,
    lines: Sequence[np.ndarray] = (),
    masks: Sequence[np.ndarray] = (),
    across: int = PICTURE_WIDTH,
) -> Picture:
    """A PNG of `grey` uint8 [H, W], `across` pixels wide, in the proportions of `size_mm` (height, width) or near.

    `lines` are drawn at these rows [W], NaN where there is none; `masks` bool [H, W] are tinted.
    """
    from PIL import Image, ImageDraw

    height, width = grey.shape
    share = float(np.clip(size_mm[0] / size_mm[1], 1 / 4, 4 / 3))
    shown = (across, round(across * share))
    image = Image.fromarray(np.ascontiguousarray(grey)).resize(shown, Image.Resampling.BILINEAR).convert("RGB")
    for mask, colour in zip(masks, LINES[::-1], strict=False):
        over = Image.fromarray(mask.astype(np.uint8) * 140).resize(shown, Image.Resampling.BILINEAR)
        image.paste(Image.new("RGB", shown, colour), (0, 0), over)
    draw = ImageDraw.Draw(image)
    columns = np.linspace(0, width - 1, shown[0])
    for place, rows in enumerate(lines):
        y = (np.interp(columns, np.arange(width), rows) + 0.5) * shown[1] / height
        for x in range(shown[0] - 1):
            if np.isfinite(y[x : x + 2]).all():
                draw.line([(x, y[x]), (x + 1, y[x + 1])], fill=LINES[place % len(LINES)])
    # In 64 colours: a third of the bytes, which stay in every notebook that shows it.
    return f"data:image/png;base64,{coded(image.quantize(64), format='PNG', optimize=True)}", what


def coded(image: "Image", **options: Any) -> str:
    """An image file in base64; `options` are those of its `save`."""
    content = io.BytesIO()
    image.save(content, **options)
    return base64.b64encode(content.getvalue()).decode()


def stretched(values: np.ndarray, among: np.ndarray | None = None) -> np.ndarray:
    """uint8 [H, W] of numbers whose first and last percent (`among` others) become black and white, so that vessel
    shadows show."""
    low, high = np.percentile(values if among is None else among, (1, 99))
    return np.clip(255 * (values - low) / max(float(high - low), 1e-6), 0, 255).astype(np.uint8)


def with_labels(row: Mapping[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    """A row with its participant's labels as columns; one that is called like a column of the row gets a prefix."""
    return {**row, **{f"participant_labels.{name}" if name in row else name: label for name, label in labels.items()}}


def data_frame(rows: Sequence[Mapping[str, Any]], columns: Sequence[str] | None = None) -> Any:
    """A pandas DataFrame of these rows. Raises ConfigError without pandas, which octfm itself does not need."""
    try:
        import pandas
    except ImportError:
        raise ConfigError("to_pandas() needs pandas, which octfm itself does not; pip install pandas") from None
    return pandas.DataFrame(list(rows), columns=None if columns is None else list(columns))


_DRAWING = OneAtATime()


@contextmanager
def drawing(style: Mapping[Any, Any]) -> Iterator[None]:
    """matplotlib with its defaults and this style: a matplotlibrc, the user's or a stranger's in the current folder,
    could make it call LaTeX. One thread at a time, since the style is the whole process's."""
    import matplotlib as mpl

    with _DRAWING(), mpl.rc_context():
        mpl.rcdefaults()
        mpl.rcParams.update(style)
        yield


def markdown(text: str, links: bool = False) -> str:
    """One line that neither ends a cell of a Markdown table nor opens an HTML element, whatever the text contains; nor,
    unless `links`, for what the card's author states, a link with words of its own, an image or emphasis."""
    text = escape(one_line(" ".join(text.split())), quote=False)
    return re.sub(r"[|]" if links else r"[\\`*~\[\]|]|(?<![^\W_])_|_(?![^\W_])", r"\\\g<0>", text)  # a_b stays


_FORMULA = re.compile(r"'*[=+\-@\t\r\n＝＋－＠]")
"""How a text begins that a spreadsheet would read as a formula (East Asian ones also with full-width signs), or that
`csv_cell` has prefixed with an apostrophe."""


def csv_cell(text: str) -> str:
    """The text as a cell of a CSV, with an apostrophe before what a spreadsheet would run as a formula: names of files
    and facts of headers may be anything. Numbers stay as they are."""
    return f"'{text}" if _FORMULA.match(text) and not _is_number(text) else text


def from_csv_cell(cell: str) -> str:
    """The text that `csv_cell` was given."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False
