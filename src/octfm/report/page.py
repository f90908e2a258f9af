"""Self-contained pages: one template, one style sheet, no network; written whole or not at all."""

from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from octfm.io.location import BucketPath, write_whole

MAX_BYTES = 25_000_000
"""Of a page: what most mail servers let through."""
Place = TypeVar("Place", bound=Path | BucketPath)


def render(template: str, facts: dict[str, Any]) -> str:
    """The page of a template beside this file; every fact that it asks for must be given."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    folder = resources.files("octfm.report")
    style = (folder / "page.css").read_text(encoding="utf-8")
    return environment.from_string((folder / template).read_text(encoding="utf-8")).render(style=style, **facts)


def write_page(page: str, out: Place) -> Place:
    write_whole(out, page.encode("utf-8"))
    return out
