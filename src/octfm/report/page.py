"""Self-contained pages: one template, one style sheet, no script and no network; written whole or not at all."""

import os
from importlib import resources
from pathlib import Path
from typing import Any

MAX_BYTES = 10_000_000


def render(template: str, facts: dict[str, Any]) -> str:
    """The page of a template beside this file; every fact that it asks for must be given."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    folder = resources.files("octfm.report")
    style = (folder / "page.css").read_text(encoding="utf-8")
    return environment.from_string((folder / template).read_text(encoding="utf-8")).render(style=style, **facts)


def write_page(page: str, out: Path) -> Path:
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.write_text(page, encoding="utf-8")
    partial.replace(out)
    return out
