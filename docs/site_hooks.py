"""What `make docs` does besides: README and changelog become pages, and links between them and docs/ hold in both
places."""

import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"README.md": "readme.md", "CHANGELOG.md": "changelog.md"}
"""Files beside docs/, and what they are called on the site."""
ELSEWHERE = re.compile(r"\[([^\]]+)\]\((?:\.\./)*(LICENSE|CITATION\.cff|src/[^)]*|tests/[^)]*|launch/[^)]*)\)")
"""Links to files of the repository that are no pages: the site shows their names alone."""


def on_files(files, config):
    for name, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / name).read_text()))
    return files


def on_page_markdown(markdown, page, config, files):
    markdown = ELSEWHERE.sub(r"\1", markdown)
    if page.file.src_uri in PAGES.values():
        markdown = re.sub(r"\]\(docs/", "](", markdown)
    up = "../" * page.file.src_uri.count("/")
    for name, target in PAGES.items():
        markdown = re.sub(
            rf"\]\((?:\.\./)*{re.escape(name)}(#[\w-]+)?\)", lambda m, t=target: f"]({up}{t}{m[1] or ''})", markdown
        )
    return markdown
