"""The pages of all commands and of all settings, made from the code whenever the site is built.

`python docs/reference.py FOLDER` writes them as Markdown.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import typer.main
from pydantic_core import PydanticUndefined

from octfm.cli.main import app
from octfm.config import Config

COMMANDS = """# Commands

What `octfm VERB --help` prints, for every verb. Words like `model.depth=6` after a config are [settings](settings.md). Every verb ends with 0
(done), 1 (failed; one line says what to do), 2 (wrong usage), 75 (stopped and saved; run it again to continue) or 130
(interrupted).
"""
SETTINGS = """# Settings

Every setting of every verb, with its type, its default and what it means. In a YAML file they are nested by section; on the command line, write
`section.key=value`. An unknown key is an error that names the nearest one. How to write values is under [Pretrain](guide/training.md#writing-settings).
"""


def commands_page() -> str:
    """Usage, arguments, options and examples of every verb, in the order of `octfm --help`."""
    verbs = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    listed = "\n".join(f"| [`{name}`](#{name}) | {_first_sentence(verb.help)} |" for name, verb in verbs.items())
    return "\n".join([COMMANDS, "| verb | does |", "|---|---|", listed, "", *(_verb(*pair) for pair in verbs.items())])


def _verb(name: str, verb: Any) -> str:
    about, _, examples = (verb.help or "").partition("\n\nExamples:\n")
    context = verb.make_context(name, [], resilient_parsing=True)
    usage = " ".join(["octfm", name, *verb.collect_usage_pieces(context)])
    # Some versions of the verbs keep the examples of their docstring apart.
    lines = [*getattr(verb, "examples", ()), *(line.strip() for line in examples.splitlines())]
    text = [f"## {name}", "", about, "", "```text", usage, "```", ""]
    for kind in ("argument", "option"):
        parameters = [p for p in verb.params if p.param_type_name == kind and not getattr(p, "hidden", False)]
        if parameters:
            text += [f"| {kind} | meaning |", "|---|---|"]
            text += [_row(parameter, context) for parameter in parameters]
            text.append("")
    if any(lines):
        text += ["```bash", *filter(None, lines), "```", ""]
    return "\n".join(text)


def _row(parameter: Any, context: Any) -> str:
    """Name and meaning as the help prints them, with defaults and limits."""
    name, meaning = parameter.get_help_record(context) or (parameter.name, "")
    written = name if parameter.param_type_name == "option" else parameter.metavar or parameter.name.upper()
    return f"| `{written}` | {_cell(meaning)} |"


def settings_page() -> str:
    """All settings of pretraining, fine-tuning, segmentation and preparation, section by section."""
    from octfm.pretraining.settings import PretrainConfig
    from octfm.tasks.finetune_settings import FinetuneConfig
    from octfm.tasks.segment_settings import SegmentConfig
    from octfm.volume.preprocessing import Preprocessing

    verbs: tuple[tuple[str, type[Config]], ...] = (
        ("octfm pretrain, doctor, bench", PretrainConfig),
        ("octfm finetune", FinetuneConfig),
        ("octfm segment, trained on your own labels", SegmentConfig),
        ("octfm prepare", Preprocessing),
    )
    text, seen = [SETTINGS], set()
    for verb, cls in verbs:
        text += [f"## {verb}", ""]
        for prefix, part in sections(cls):
            section = prefix.rstrip(".")
            if part in seen:
                text += [f"`{section}`: [as above](#{section}).", ""]
                continue
            seen.add(part)
            if section:
                about = _cell((part.__doc__ or "").split("\n\n")[0])
                title = f"{section}: {part.model_fields['name'].default}" if "name" in part.model_fields else section
                text += [f"### {title}", "", about, ""]
            text += ["| setting | type | default | meaning |", "|---|---|---|---|", *_rows(prefix, part), ""]
    return "\n".join(text)


def sections(cls: type[Config], prefix: str = "") -> Iterator[tuple[str, type[Config]]]:
    """A settings model and those nested in it, as (dotted section, model); of objectives, every built-in one."""
    from octfm.models.objectives.builtin import BUILT_IN
    from octfm.models.objectives.objective import ObjectiveConfig

    yield prefix, cls
    for name, field in cls.model_fields.items():
        if isinstance(field.default, ObjectiveConfig):
            for objective in BUILT_IN.values():
                yield from sections(objective, f"{prefix}{name}.")
        elif section := _section(field):
            yield from sections(section, f"{prefix}{name}.")


def _section(field: Any) -> type[Config] | None:
    """The settings model that a field holds, also where it may be null."""
    kinds = (type(field.default), *get_args(field.annotation))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Config)), None)


def _rows(section: str, cls: type[Config]) -> list[str]:
    schema = cls.model_json_schema()
    rows = []
    for name, field in cls.model_fields.items():
        if _section(field):
            continue
        kind = _kind(schema["properties"][name], schema)
        default = "required" if field.default is PydanticUndefined else f"`{_value(field.default)}`"
        rows.append(f"| `{section}{name}` | {_cell(kind)} | {default} | {_cell(field.description or '')} |")
    return rows


def _kind(schema: dict[str, Any], whole: dict[str, Any]) -> str:
    """A JSON schema in words: number > 0, whole number from 1 to 200, a or b, [number, number], or null."""
    if "$ref" in schema:
        return _kind(whole["$defs"][schema["$ref"].rpartition("/")[2]], whole)
    if "anyOf" in schema:
        return " or ".join(_kind(part, whole) for part in schema["anyOf"])
    if "const" in schema or "enum" in schema:
        return " or ".join(f"`{_value(value)}`" for value in schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "integer" | "number" as number:
            word = "whole number" if number == "integer" else "number"
            limits = [
                f"{sign} {schema[key]:,.12g}"
                for key, sign in (
                    ("minimum", "≥"),
                    ("exclusiveMinimum", ">"),
                    ("maximum", "≤"),
                    ("exclusiveMaximum", "<"),
                )
                if key in schema
            ]
            return " ".join([word, ", ".join(limits)]).strip()
        case "array" if "prefixItems" in schema:
            parts = [_kind(part, whole) for part in schema["prefixItems"]]
            return f"{len(parts)} of: {parts[0]}" if len(set(parts)) == 1 else f"[{'; '.join(parts)}]"
        case "array":
            return f"list of: {_kind(schema['items'], whole)}"
        case "boolean":
            return "true or false"
        case "string":
            return "text"
        case "null":
            return "null"
        case kind:
            return str(kind or "any")


def _value(value: Any) -> str:
    """As it is written in YAML."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, tuple | list):
        return f"[{', '.join(_value(part) for part in value)}]"
    return str(value)


def _first_sentence(text: str | None) -> str:
    return _cell(re.split(r"(?<=[.;])\s", " ".join((text or "").split()))[0].rstrip(";"))


def _cell(text: str) -> str:
    """Text on one line of a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


PAGES = {"commands.md": commands_page, "settings.md": settings_page}
"""Name of a generated page, and what writes its text."""

if __name__ == "__main__":
    for page, write in PAGES.items():
        (Path(sys.argv[1]) / page).write_text(write())
