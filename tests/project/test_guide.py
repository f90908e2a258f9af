"""The guide says what the code does: its tables of codes are those of the code, its commands and fields exist."""

import importlib.util
import re
from pathlib import Path

import pytest

from octfm.catalog.acquisition import FLAGS
from octfm.catalog.columns import FIELDS
from octfm.formats import detect as formats
from octfm.formats.reasons import REASONS
from support import ROOT

FOLDER = ROOT / "docs" / "guide"
CODES = (FOLDER / "data-codes.md").read_text()
LAYOUTS = sorted(set(FOLDER.glob("data-*.md")) - {FOLDER / "data-codes.md"})
"""One page per layout; data.md leads to them, data-codes.md has the tables."""
GUIDE = "\n".join(page.read_text() for page in [FOLDER / "data.md", FOLDER / "data-codes.md", *LAYOUTS])


def test_tables_of_codes_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("data_tables", ROOT / "docs" / "data_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.with_tables(CODES) == CODES, "run: python docs/data_tables.py"


def test_every_option_of_scan_that_it_names_exists():
    import typer.main

    from octfm.cli.main import app

    verbs = typer.main.get_command(app).commands
    parameters = [parameter for verb in verbs.values() for parameter in getattr(verb, "params", [])]
    options = {option for parameter in parameters for option in (*parameter.opts, *parameter.secondary_opts)}
    named = set(
        re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", GUIDE, flags=re.S))
    )
    assert named and named <= options, named - options


def test_every_field_of_a_table_is_there():
    fields = GUIDE.split("Fields:")[1].split("\n\n")[0]
    assert re.findall(r"`(\w+)`", fields) == list(FIELDS)


def test_every_layout_is_led_to_from_the_entry_page():
    table = re.findall(r"^\| .* \| \[.*\]\(([\w-]+\.md)\) \|$", (FOLDER / "data.md").read_text(), re.M)
    assert sorted(table) == [page.name for page in LAYOUTS]


@pytest.mark.parametrize("page", LAYOUTS, ids=lambda page: page.stem)
def test_a_layout_has_its_folder_its_command_and_its_codes(page):
    text = page.read_text()
    title, _, body = text.partition("\n\n")
    assert title.startswith("# ") and body.startswith("```\n"), "first what the folder looks like"
    assert re.search(r"^```bash\n(.*\n)?octfm scan ", text, re.M), "then the command"
    rows = re.findall(r"^\| (.*?) \|", text.split("## Codes to expect")[1].split("\n## ")[0], re.M)[1:]
    named = [code for row in rows for code in re.findall(r"`(\w+)`", row)]
    assert len(rows) >= 2 and all(re.fullmatch(r"`\w+`(, `\w+`)*", row) for row in rows)
    assert set(named) <= {*REASONS, *FLAGS}, set(named) - {*REASONS, *FLAGS}
    assert len(named) == len(set(named))


def test_formats_without_a_real_file_say_so():
    rows = [line for line in GUIDE.splitlines() if line.startswith("|") and "verified on a real file" in line]
    assert {word for row in rows for word in re.findall(r"e2e|fda|img|Optovue|Bioptigen", row)} == {
        "e2e",
        "fda",
        "img",
        "Optovue",
        "Bioptigen",
    }
    for page in ("data-dicom.md", "data-aireadi.md"):
        assert "*Not verified on a " in (FOLDER / page).read_text(), page
    for module in ("heidelberg_e2e", "topcon", "zeiss_img", "optovue", "bioptigen"):
        source = Path(formats.__file__).with_name(f"{module}.py").read_text().split('"""')[1]
        assert "not verified on a real file" in " ".join(source.lower().split()), module
