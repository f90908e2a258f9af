"""Render and write self-contained HTML pages: a template and a style sheet, no network."""

from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from octfm.display import number, p_value, readable
from octfm.errors import EvaluationError
from octfm.io.location import BucketPath, Location, location, write_whole

if TYPE_CHECKING:
    from jinja2 import Environment

MAX_BYTES = 25_000_000
"""Largest size of a page; most mail servers accept it."""
Place = TypeVar("Place", bound=Path | BucketPath)


def html_file(out: str | Location, example: str) -> Location:
    """The location of a page to write. Raises EvaluationError if it is a folder."""
    out = location(out)
    if isinstance(out, Path) and out.is_dir():
        raise EvaluationError(
            f"{out}: expected the name of an HTML file, got a folder; give for example {out / example}"
        )
    return out


@cache
def _pages() -> "Environment":
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    pages = Environment(
        loader=FunctionLoader(_text), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    pages.filters |= {"readable": readable, "p": p_value, "number": number}
    return pages


def _text(name: str) -> str:
    return (resources.files("octfm.report") / name).read_text(encoding="utf-8")


def render(template: str, facts: dict[str, Any]) -> str:
    """Fill a template of this folder. Raises jinja2.UndefinedError if a fact that it uses is missing."""
    return _pages().get_template(template).render(style=_text("page.css"), **facts)


def write_page(page: str, out: Place) -> Place:
    """Write a page atomically; returns its location."""
    write_whole(out, page.encode("utf-8"))
    return out
