"""The notebooks run from top to bottom, offline and in one folder, hold no output, and show what they say."""

import ast
import json
from pathlib import Path

import pytest

from support import ROOT

BOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
ORDER = ("first_scan", "pretrain_on_your_own", "what_is_it_worth")


def code_of(book: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(book.read_text())["cells"] if cell["cell_type"] == "code"]


def execute(book: Path) -> list[object]:
    """Run the cells in one namespace, as Jupyter does; what the last expression of each one gives, or None."""
    space: dict[str, object] = {"__name__": "__main__"}
    shown = []
    for number, source in enumerate(code_of(book)):
        tree = ast.parse(source)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        where = f"{book.name}, cell {number}"
        exec(compile(tree, where, "exec"), space)
        shown.append(eval(compile(ast.Expression(last.value), where, "eval"), space) if last is not None else None)
    return shown


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One for all, as the third continues what the second has made."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.fixture(autouse=True)
def without_a_screen(folder, monkeypatch):
    import matplotlib

    matplotlib.use("Agg")
    monkeypatch.chdir(folder)


def kinds(shown: list[object]) -> list[str]:
    return [type(thing).__name__ for thing in shown if thing is not None]


def test_notebooks_are_valid_and_hold_no_output():
    """What a notebook printed may name people, and differs with every run."""
    assert [book.stem for book in BOOKS] == sorted(ORDER)
    for book in BOOKS:
        content = json.loads(book.read_text())
        assert (content["nbformat"], content["nbformat_minor"]) == (4, 5)
        ids = [cell["id"] for cell in content["cells"]]
        assert len(set(ids)) == len(ids) and content["cells"][0]["cell_type"] == "markdown"
        for cell in content["cells"]:
            assert cell["cell_type"] == "markdown" or (cell["outputs"] == [] and cell["execution_count"] is None)


def test_the_links_of_notebooks_lead_somewhere():
    import re

    for book in BOOKS:
        text = "".join("".join(cell["source"]) for cell in json.loads(book.read_text())["cells"])
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert (book.parent / target).exists(), f"{book.name}: {target}"


@pytest.mark.slow
def test_the_first_scan_is_measured_and_shown(capsys):
    pytest.importorskip("pandas")
    shown = execute(ROOT / "docs" / "notebooks" / "first_scan.ipynb")
    assert kinds(shown) == ["Volume", "ScanSegmentation", "DataFrame"]
    found = shown[2]
    assert found.verdict.accepted and "inner nasal" in found._repr_html_()
    assert "centre:" in capsys.readouterr().out


@pytest.mark.slow
def test_pretraining_and_ones_own_loop_run(folder, capsys):
    pytest.importorskip("pandas")
    shown = execute(ROOT / "docs" / "notebooks" / "pretrain_on_your_own.ipynb")
    wanted = ["Catalog", "DataFrame", "Store", "StoredVolume", "Encoder", "tuple", "VolumeDataset"]
    assert kinds(shown) == wanted
    assert "epoch 3: loss" in capsys.readouterr().out and (folder / "notebook" / "run" / "run.json").is_file()


@pytest.mark.slow
def test_what_it_is_worth_is_told_with_intervals():
    """Also by itself: what it continues is made if it is not there."""
    pytest.importorskip("pandas")
    shown = execute(ROOT / "docs" / "notebooks" / "what_is_it_worth.ipynb")
    assert kinds(shown) == ["Store", "list", "Result", "DataFrame", "DataFrame"]
    result = next(thing for thing in shown if type(thing).__name__ == "Result")
    assert {"pretrained", "random_init", "histogram", "tissue_map"} <= {row["encoder"] for row in result["results"]}
    assert all(row["low"] is not None for row in result["results"]) and result["comparisons"]
