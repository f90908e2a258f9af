"""The guide says what the code does: its tables of codes are those of the code, its commands and fields exist."""

import importlib.util
import re
from pathlib import Path

from octfm.data.columns import FIELDS
from octfm.data.readers import formats

ROOT = Path(__file__).parent.parent
GUIDE = (ROOT / "docs" / "guide" / "data.md").read_text()


def test_tables_of_codes_are_those_of_the_code():
    spec = importlib.util.spec_from_file_location("data_tables", ROOT / "docs" / "data_tables.py")
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert tables.with_tables(GUIDE) == GUIDE, "run: python docs/data_tables.py"


def test_every_option_of_scan_that_it_names_exists():
    import typer.main

    from octfm.cli import app

    verbs = typer.main.get_command(app).commands
    options = {option for verb in ("scan", "prepare") for parameter in verbs[verb].params for option in parameter.opts}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", re.sub(r"<!-- (\w+) -->.*?<!-- end of \1 -->", "", GUIDE, flags=re.S)))
    assert named and named <= options, named - options


def test_every_field_of_a_table_and_every_link_is_there():
    fields = GUIDE.split("Fields:")[1].split("\n\n")[0]
    assert re.findall(r"`(\w+)`", fields) == list(FIELDS)
    anchors = {re.sub(r"[^a-z0-9 -]", "", title.lower()).strip().replace(" ", "-") for title in re.findall(r"^## (.*)$", GUIDE, re.M)}
    assert set(re.findall(r"\]\(#([\w-]+)\)", GUIDE)) <= anchors


def test_formats_without_a_real_file_say_so():
    rows = [line for line in GUIDE.splitlines() if line.startswith("|") and "verified on a real file" in line]
    assert {word for row in rows for word in re.findall(r"e2e|fda|img|Optovue|Bioptigen", row)} == {
        "e2e",
        "fda",
        "img",
        "Optovue",
        "Bioptigen",
    }
    for module in ("heidelberg_e2e", "topcon", "zeiss_img", "optovue", "bioptigen"):
        source = Path(formats.__file__).with_name(f"{module}.py").read_text().split('"""')[1]
        assert "not verified on a real file" in " ".join(source.lower().split()), module
