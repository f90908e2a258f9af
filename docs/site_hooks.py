"""What `make docs` does besides: README and changelog become pages, links between them and docs/ hold in both places,
pages of commands and settings are made from the code, and search works without a server and ranks the guide first."""

import importlib.util
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}
"""Files beside docs/, and what they are called on the site."""
ELSEWHERE = re.compile(
    r"\[([^\]]+)\]\((?:\.\./)*(LICENSE|CONTRIBUTING\.md|RELEASING\.md|CITATION\.cff|src/[^)]*|tests/[^)]*|launch/[^)]*)\)"
)
"""Links to files of the repository that are no pages: the site shows their names alone."""

RANKS = (
    ("guide/", 2.0),
    ("index.md", 2.0),
    ("commands.md", 0.5),
    ("log/", 1e-6),
    ("changelog.md", 1e-6),
    ("readme.md", 1e-6),
)
"""How much a page counts in a search, by the beginning of its path; every other page counts 0.002. A word in a title counts
1,000 times as much as one in the text, so pages that come later need a smaller factor than that."""


def on_config(config):
    # Before the theme's own script, which starts the search.
    config.extra["polyfills"] = ["offline_search.js"]
    return config


def on_files(files, config):
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    for page, write in reference().PAGES.items():
        files.append(File.generated(config, page, content=write()))
    return files


def on_post_page(output, page, config):
    """Name the search dialog, which the theme leaves without a name for screen readers."""
    return output.replace('role="dialog"', 'role="dialog" aria-label="Search"', 1)


def on_post_build(config):
    """Write the search index as a script as well, which the theme loads from file:// where it may not fetch."""
    folder = Path(config.site_dir) / "search"
    (folder / "search_index.js").write_text(f"var __index = {(folder / 'search_index.json').read_text()}")


on_post_build.mkdocs_priority = -100  # after the plugin that writes the index


def reference():
    """The module docs/reference.py."""
    spec = importlib.util.spec_from_file_location("reference", Path(__file__).parent / "reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def on_page_markdown(markdown, page, config, files):
    boost = next((rank for beginning, rank in RANKS if page.file.src_uri.startswith(beginning)), 0.002)
    page.meta.setdefault("search", {})["boost"] = boost
    markdown = ELSEWHERE.sub(r"\1", markdown)
    if page.file.src_uri in PAGES.values():
        markdown = re.sub(r"\]\(docs/", "](", markdown)
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = re.sub(
            rf"\]\((?:\.\./)*{re.escape(name)}(#[\w-]+)?\)", lambda m, t=target: f"]({up}{t}{m[1] or ''})", markdown
        )
    return markdown
