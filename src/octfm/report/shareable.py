"""Make a run or catalog fit for sharing: without ids, paths, dates, UIDs, or words that might name somebody.

Text passes only if its form is known to be harmless; nothing is searched for and removed. Unknown names of columns,
classes, scanners and protocols are numbered, sentences that quote files are replaced by the meaning of their code, and
settings and commands keep numbers and choices.
"""

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import yaml

from octfm.catalog.acquisition import Acquisition
from octfm.catalog.catalog import Catalog
from octfm.catalog.participants.safe_values import (
    SITES,
    is_known_class,
    is_known_name,
    is_known_protocol,
    is_known_scanner,
    is_plain_word,
    meaning,
    numbered,
    safe_value,
    vocabulary,
)
from octfm.report.sources import Sources
from octfm.report.words import ENCODERS, METRICS
from octfm.store.layout import StoreRow
from octfm.store.prepare import meaning_of
from octfm.volume.volume import eye_id_of

NAME = "OCT encoder"
"""Name of a model for which no public name was given; its folder's name may be private."""
WITHHELD = "…"
BY_NUMBERS = frozenset({"masked loss", "effective rank", "teacher", "gradient", "targets", "data"})
"""Health checks whose sentences consist only of numbers and octfm's own words."""
CHOICES = vocabulary("""
    anchored bf16 bscan constant context cosine data2vec ddp dense enface extremes fp32 fsdp inner layer learned line
    mae mean octa offline online radial raster rotary stop structure summary tails target tissue tpu vjepa2
    warn whiten xla_spmd
""")
"""All words that settings can have as a value; any other text in a config was written by the user."""
NUMBERED = vocabulary("""
    --defects --epochs --every --file-gb --file-seconds --folds --from-scratch-epochs --hours --max-reject --max-samples
    --ranks --seed --seeds --steps --workers
""")
"""Options whose value is a number. In other places a number may be the name of a folder: a day or a patient."""
NAMED = vocabulary("""
    band_network ckpt_second_dir conditions encoder exclude init labels leave_out_scanners mask_name name order project
    scanners store surfaces target truth
""")
"""Settings that hold text; a number in them may be a name."""
RECORDED = (
    "octfm", "parameters", "environment", "store", "inherited_participants", "inherited_unknown", "precision",
)  # fmt: skip
"""Keys of run.json that are shown; apart from them only the commit, fingerprints and the year are."""

Row = TypeVar("Row", Acquisition, StoreRow)
_FACT = re.compile(r"[\w .,+()-]{0,60}")
_HEX = re.compile(r"[0-9a-f]{7,64}")
_KEY = re.compile(r"[a-z][a-z0-9_]{0,30}(\.[a-z][a-z0-9_]{0,30})?")
_SWITCHES = frozenset({"true", "false", "null"})
_OPTION = re.compile(r"--[a-z][a-z-]*")
_NUMBER = re.compile(r"[-+]?\d{1,9}(\.\d+)?(e[-+]?\d+)?")


class Words:
    """The names on one page: known ones pass, others become "scanner 1", "scanner 2" in order of appearance."""

    def __init__(self) -> None:
        kinds = ("scanner", "protocol", "site", "target", "class", "encoder", "metric")
        self._numbered = {kind: numbered(kind) for kind in kinds}

    def scanner(self, name: str) -> str:
        return name if is_known_scanner(name) else self._numbered["scanner"](name)

    def protocol(self, name: str) -> str:
        return name if is_known_protocol(name) else self._numbered["protocol"](name)

    def target(self, name: str) -> str:
        """The name of a column, or column:label if its cells hold several labels."""
        return name if is_known_name(name) else self._numbered["target"](name)

    def one_class(self, name: str) -> str:
        return name if is_known_class(name) else self._numbered["class"](name)

    def encoder(self, name: str) -> str:
        return name if name in ENCODERS or is_plain_word(name) else self._numbered["encoder"](name)

    def metric(self, name: str) -> str:
        """The name of a metric; a user's own metric may be named after a clinic."""
        return name if name in METRICS or is_plain_word(name) else self._numbered["metric"](name)

    def labels(self, labels: Mapping[str, str]) -> dict[str, str]:
        """A participant's columns with values that may be shown, without dates."""
        passed = {}
        for column, value in labels.items():
            safe = safe_value(column, value)
            if safe is None and meaning(column) in SITES and value:
                safe = self._numbered["site"](value)
            if safe:
                passed[column] = safe
        return passed

    def row(self, row: Row) -> Row:
        """The row with scanner, protocol and labels that may be shown; ids are kept, to count people."""
        named: dict[str, Any] = {"scanner": self.scanner(row.scanner), "protocol": self.protocol(row.protocol)}
        return replace(row, **named, participant_labels=self.labels(row.participant_labels))


def shareable_catalog(catalog: Catalog) -> Catalog:
    """The catalog with names that may be shown; ids and uris are kept, to count people and to read pictures."""
    words = Words()
    return replace(catalog, acquisitions=tuple(words.row(a) for a in catalog.acquisitions))


def shareable(sources: Sources) -> Sources:
    """The run without anything that names a person, place or day, and without scenes."""
    words = Words()
    people = numbered("participant")
    catalog, store = sources.catalog, sources.store
    if catalog is not None:
        accepted = tuple(_nameless(words.row(a), people) for a in catalog.acquisitions)
        rejects, skipped = (
            tuple(replace(r, uri="", sentence=meaning_of(r.code), refers_to="") for r in left_out)
            for left_out in (catalog.rejects, catalog.skipped)
        )
        catalog = replace(catalog, root="", acquisitions=accepted, rejects=rejects, skipped=skipped)
    if store is not None:
        store = store.with_rows(tuple(_nameless(words.row(row), people) for row in store.rows))
    unprepared = tuple(
        replace(u, acquisition="", uri="", scanner=words.scanner(u.scanner), sentence=meaning_of(u.code))
        for u in sources.unprepared
    )
    return replace(
        sources,
        run=Path(NAME),
        record=_record(sources.record),
        config=_config(sources.config, words),
        train=[_by_scanner(row, words) for row in sources.train],
        validation=[_by_scanner(row, words) for row in sources.validation],
        health=[_health(row) for row in sources.health],
        online=[row | {"target": words.target(str(row.get("target", "")))} for row in sources.online],
        probe=_probe(sources.probe, words) if sources.probe is not None else None,
        catalog=catalog,
        store=store,
        unprepared=unprepared,
        scenes=(),
    )


def shareable_command(command: str) -> str:
    """A command with its verb, options, choices and true numbers; names and paths are withheld."""
    try:
        words = shlex.split(command)
    except ValueError:
        words = command.split()
    shown = [_word(word, before) for before, word in pairwise(["", *words])]
    if words[:1] == ["octfm"]:
        verb = [word for word in words[1:2] if re.fullmatch(r"[a-z]{3,12}", word)]
        shown[: 1 + len(verb)] = ["octfm", *verb]
    return " ".join(shown)


def shareable_setting(value: Any) -> Any:
    """A setting with its numbers, choices and known scanners; other text, such as a path, is withheld."""
    if isinstance(value, dict):
        return {name: shareable_setting(inner) for name, inner in value.items() if _KEY.fullmatch(str(name))}
    if isinstance(value, list):
        return [shareable_setting(inner) for inner in value]
    if value is None or isinstance(value, bool | int | float) or value in CHOICES or is_known_scanner(str(value)):
        return value
    return WITHHELD


def _nameless(row: Row, people: Callable[[str], str]) -> Row:
    participant = people(row.participant)
    named: dict[str, Any] = {"uri": "", "participant": participant}
    if isinstance(row, StoreRow):
        named |= {"acquisition": "", "eye_id": eye_id_of(participant, row.laterality)}
    else:
        named |= {"sop_instance_uid": ""}
    return replace(row, **named)


def _record(record: dict[str, Any]) -> dict[str, Any]:
    git = record.get("git") or {}
    shown: dict[str, Any] = {name: _facts(record[name]) for name in RECORDED if name in record}
    shown |= {name: record[name] for name in ("fingerprint", "data") if _HEX.fullmatch(str(record.get(name, "")))}
    # The year alone: a date could be matched with a clinic's records.
    shown["started"] = year if re.fullmatch(r"20\d\d", year := str(record.get("started", ""))[:4]) else ""
    shown["git"] = {
        "commit": git["commit"] if _HEX.fullmatch(str(git.get("commit"))) else None,
        "dirty": bool(git.get("dirty")),
    }
    return shown


def _facts(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _facts(inner) for name, inner in value.items() if _FACT.fullmatch(str(name))}
    plain = value is None or isinstance(value, bool | int | float) or _FACT.fullmatch(str(value))
    return value if plain else WITHHELD


def _config(text: str | None, words: Words) -> str | None:
    """config.yaml with numbers and choices; text that a user wrote (paths, projects, columns) is withheld."""
    values = yaml.safe_load(text) if text else None
    if not isinstance(values, dict):
        return None
    shown = shareable_setting(values)
    for name in ("scanners", "leave_out_scanners"):
        listed = values["data"].get(name) if isinstance(values.get("data"), dict) else None
        if isinstance(listed, list):
            shown["data"][name] = [words.scanner(str(scanner)) for scanner in listed]
    return yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)


def _by_scanner(row: dict[str, Any], words: Words) -> dict[str, Any]:
    shown: dict[str, Any] = {n: value for n, value in row.items() if isinstance(value, bool | int | float | None)}
    shown |= {name: row[name] for name in row if row[name] in ("nan", "inf", "-inf")}
    if isinstance(row.get("by_scanner"), dict):
        shown["by_scanner"] = {words.scanner(name): value for name, value in row["by_scanner"].items()}
    return shown | {"kind": row["kind"]}


def _health(row: dict[str, Any]) -> dict[str, Any]:
    what, verdict = str(row.get("what", "")), str(row.get("verdict", ""))
    what = what if re.fullmatch(r"[a-z][a-z -]{0,40}", what) else "another check"
    # Sentences of incidents can quote paths and names of volumes.
    known = row.get("kind") == "health" and what in BY_NUMBERS
    sentence = row.get("sentence", "") if known else "The run's metrics.jsonl says more."
    verdict = verdict if verdict in ("ok", "watch", "bad") else "watch"
    return {"kind": row.get("kind"), "step": row.get("step"), "what": what, "verdict": verdict, "sentence": sentence}


def _probe(probe: dict[str, Any], words: Words) -> dict[str, Any]:
    results = [_result(r, words) for r in probe["results"]]
    shown = {**probe, "results": results, "labels": None}
    for name in ("comparisons", "label_efficiency", "label_efficiency_comparisons"):
        if name in probe:
            shown[name] = [_result(r, words) for r in probe[name]]
    shown["skipped"] = [
        {"target": words.target(str(s["target"])), "sentence": "The probe says why when it runs."}
        for s in probe.get("skipped", [])
    ]
    shown["embeddings"] = []
    shown["commands"] = [shareable_command(command) for command in probe.get("commands", [])]
    return shown


def _result(row: dict[str, Any], words: Words) -> dict[str, Any]:
    named = {"target": words.target, "metric": words.metric, "column": words.target}
    named |= dict.fromkeys(("encoder", "a", "b"), words.encoder)
    shown = row | {name: public(str(row[name])) for name, public in named.items() if name in row}
    shown |= {
        name: [words.one_class(str(c)) for c in row[name]] for name in ("classes", "left_out_classes") if row.get(name)
    }
    if counts := row.get("test_participants_per_class"):
        shown["test_participants_per_class"] = {words.one_class(str(name)): n for name, n in counts.items()}
    # A note may quote a class, so it is replaced if a class had to be numbered, or is not known here.
    renamed = [c for c in row.get("classes") or () if words.one_class(str(c)) != c]
    if (renamed or "classes" not in row) and row.get("note"):
        shown["note"] = "No interval, or one not to be believed; probe.json says why."
    return shown


def _word(word: str, before: str) -> str:
    name, equals, value = word.partition("=")
    number = _NUMBER.fullmatch(value)
    if _OPTION.fullmatch(name) and equals:
        return f"{name}={value if number and name in NUMBERED else WITHHELD}"
    if _OPTION.fullmatch(word):
        return word
    if _NUMBER.fullmatch(word) and before in NUMBERED:
        return word
    if equals and _KEY.fullmatch(name):
        harmless = value in CHOICES | _SWITCHES or (number and name.rpartition(".")[2] not in NAMED)
        return f"{name}={value if harmless else WITHHELD}"
    return WITHHELD
