"""Command lines of benchmarks/ that pages and docstrings print are taken by the scripts as they are today."""

import argparse
import ast
import re
import runpy
import shlex

import pytest

from support import BENCHMARKS, ROOT

DOCS = ROOT / "docs"
PAGES = [page.read_text() for folder in (DOCS, DOCS / "guide", ROOT) for page in sorted(folder.glob("*.md"))]
"""Not the log: its commands are those of their day."""
SCRIPTS = {
    path.name: text for path in sorted(BENCHMARKS.glob("*.py")) if "ArgumentParser" in (text := path.read_text())
}


def command_lines(text: str) -> list[tuple[str, str, str]]:
    """Variables, script and arguments of each command, in code blocks, on lines of their own, or in backticks.
    Comments are dropped; what is optional ([--x]) is kept."""
    text = re.sub(r"\\\n\s*", " ", text)
    inline = re.findall(r"`([^`]*)`", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M))
    lines = [*text.splitlines(), *(" ".join(code.split()) for code in inline)]
    found = [re.match(r"((?:\w+=\S+ )*)python benchmarks/(\w+\.py)(.*)", line.strip()) for line in lines]
    return [(match[1], match[2], re.sub(r" #.*|[\[\]]", "", match[3])) for match in found if match]


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_script_takes_every_command_line_that_is_printed_of_it(script, monkeypatch):
    class Made(Exception):
        """Raised with the parser where the script would read its arguments."""

    def made(parser):
        raise Made(parser)

    docstring = ast.get_docstring(ast.parse(SCRIPTS[script])) or ""
    printed = {line for text in (docstring, *PAGES) for line in command_lines(text)}
    mine = sorted((before, arguments) for before, name, arguments in printed if name == script)
    assert mine, "its docstring does not say how to call it"
    monkeypatch.syspath_prepend(BENCHMARKS)
    with monkeypatch.context() as patch, pytest.raises(Made) as stopped:
        patch.setattr(argparse.ArgumentParser, "parse_args", made)
        runpy.run_path(str(BENCHMARKS / script), run_name="__main__")
    (parser,) = stopped.value.args
    assert parser.format_help()  # a lone % in a help text raises
    for before, arguments in mine:
        try:
            parser.parse_args(shlex.split(arguments))
        except SystemExit:
            pytest.fail(f"python benchmarks/{script}{arguments}: refused; see the captured error")
        if "set OMP_NUM_THREADS=1" in SCRIPTS[script]:  # an error of the script
            assert "OMP_NUM_THREADS=1" in before, f"python benchmarks/{script}{arguments}"


def test_no_page_names_a_script_that_is_not_there():
    named = {name for text in PAGES for name in re.findall(r"benchmarks/(\w+\.py)", text)}
    assert len(named) > 15
    assert not [name for name in sorted(named) if not (BENCHMARKS / name).exists()]
