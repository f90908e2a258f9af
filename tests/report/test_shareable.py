"""What a page to share is made of passes by form: no text that a user, a header or a table wrote gets through."""

from dataclasses import asdict, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from octfm.cli.main import VERBS
from octfm.config import Config, dump
from octfm.evaluation.scoring import BUILT_IN
from octfm.models.objectives import builtin
from octfm.pretraining.settings import PretrainConfig
from octfm.report.html import write_report
from octfm.report.shareable import BY_NUMBERS, CHOICES, NAMED, NUMBERED, WITHHELD, Words, shareable, shareable_command
from octfm.report.sources import gather
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.segment_settings import SegmentConfig
from support.run_folder import write_catalog, write_run, write_store

pytestmark = pytest.mark.drawn

SECRET = "Zqxanna"


def words_of(value) -> set[str]:
    """Every text inside a structure, keys included."""
    if isinstance(value, dict):
        return set().union(*(words_of(part) for pair in value.items() for part in pair))
    if isinstance(value, list | tuple):
        return set().union(*map(words_of, value))
    return {value} if isinstance(value, str) else set()


def choices_of(annotation) -> set[str]:
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return {choice for choice in parts if isinstance(choice, str)}
    if isinstance(annotation, type) and issubclass(annotation, Config):
        return set().union(*(choices_of(field.annotation) for field in annotation.model_fields.values()))
    return set().union(*(choices_of(part) for part in parts))


def test_every_choice_of_a_setting_is_known():
    assert choices_of(PretrainConfig).union(*map(choices_of, builtin.BUILT_IN.values())) == CHOICES


@given(
    words=st.lists(
        st.text(min_size=1, max_size=12)
        | st.from_regex(
            r"--[a-z]{2,8}=Zqx[a-z/]+|[a-z]{3,8}\.[a-z]{3,8}=Zqx[a-z/.]+|/home/Zqx[a-z]+|'Zqx [a-z]+'", fullmatch=True
        )
        | st.sampled_from(
            ["zqxanna", "octfm", "--seed", "--seed zqxanna", "octfm zqxanna", "--seed=zqxanna", "steps=zqx"]
        )
    )
)
def test_a_command_keeps_no_name_and_no_place(words):
    shown = shareable_command(" ".join(["octfm", "embed", *words]))
    assert "zqx" not in shown.lower() and "/" not in shown
    assert shown.startswith("octfm embed")
    assert "zqx" not in shareable_command(" ".join(["zqxanna.sh", "octfm", *words])).lower(), "of one's own, in Python"


def test_a_command_keeps_its_verb_options_and_numbers():
    command = "octfm pretrain vit_s data.store=/home/x/prepared steps=200 masks.mask_ratio=0.6 schedule.lr_shape=constant --out runs/a"
    assert shareable_command(command) == (
        f"octfm pretrain {WITHHELD} data.store={WITHHELD} steps=200 masks.mask_ratio=0.6 schedule.lr_shape=constant "
        f"--out {WITHHELD}"
    )


def test_a_number_that_names_a_folder_is_withheld():
    """Runs and folders of scans are called after days and patients."""
    command = "octfm probe 20240131 --seed 3 --out 4711 --labels=8812345 data.store=20240131 steps=20240131 --seeds=2"
    assert shareable_command(command) == (
        f"octfm probe {WITHHELD} --seed 3 --out {WITHHELD} --labels={WITHHELD} data.store={WITHHELD} steps=20240131 "
        "--seeds=2"
    )


def test_options_and_settings_are_known_by_what_they_take():
    hints = [(name, hint) for verb in VERBS for name, hint in get_type_hints(verb).items()]
    numbers, texts = (
        {f"--{name.replace('_', '-')}" for name, hint in hints if kinds & parts_of(hint)}
        for kinds in ({int, float}, {str, Path, Any})
    )
    assert numbers - texts - {"--axial-length"} == NUMBERED, "the length of an eye is a patient's"
    settings = (PretrainConfig, FinetuneConfig, SegmentConfig)
    assert {"band_network"}.union(*map(texts_of, settings)) == NAMED


def parts_of(annotation) -> set:
    if get_origin(annotation) is Literal:
        return set()
    return set().union(*map(parts_of, get_args(annotation))) if get_args(annotation) else {annotation}


def texts_of(config: type[Config]) -> set[str]:
    """Names of settings that are text and no choice."""
    parts = {name: parts_of(field.annotation) for name, field in config.model_fields.items()}
    inner = (each for own in parts.values() for each in own if isinstance(each, type) and issubclass(each, Config))
    return {name for name, own in parts.items() if str in own}.union(*map(texts_of, inner))


def test_settings_and_record_keep_numbers_and_choices_only(tmp_path):
    run = write_run(tmp_path)
    config = PretrainConfig()
    config = config.model_copy(
        update={
            "data": config.data.model_copy(update={"store": f"/{SECRET}", "scanners": ("topcon_triton", SECRET)}),
            "tracking": config.tracking.model_copy(update={"project": SECRET}),
            "ckpt_second_dir": f"/mnt/{SECRET}",
        }
    )
    (run / "config.yaml").write_text(dump(config))
    found = gather(run, None, None)
    found.record.update(
        second_destination=f"/mnt/{SECRET}", host=SECRET, overrides=[{"settings": {"data.store": SECRET}}]
    )
    found.record["environment"]["device"] = f"/dev/{SECRET}"
    shown = shareable(found)
    assert shown.config is not None
    settings = yaml.safe_load(shown.config)
    assert settings["steps"] == config.steps and settings["objective"]["name"] == config.objective.name
    assert settings["data"]["scanners"] == ["topcon_triton", "other_scanner_1"]
    assert settings["data"]["store"] == settings["ckpt_second_dir"] == WITHHELD
    assert not any(SECRET in word for word in words_of([shown.record, settings]))
    assert shown.record["parameters"] == found.record["parameters"] and len(shown.record["started"]) in (0, 4)


def spoilt(value: Any) -> Any:
    """The same with a name in every text that comes from a user, a header or a table, and in the keys of mappings."""
    names = (
        "uri",
        "participant",
        "sop_instance_uid",
        "acquisition",
        "eye_id",
        "scanner",
        "protocol",
        "sentence",
        "refers_to",
    )
    if is_dataclass(value) and not isinstance(value, type):
        labels = {"participant_labels": {SECRET: SECRET}} if hasattr(value, "participant_labels") else {}
        texts = {f.name: f"{SECRET} {getattr(value, f.name)}" for f in fields(value) if f.name in names}
        return replace(value, **texts, **labels)
    if isinstance(value, dict):
        return {key: spoilt_of(key, inner) for key, inner in value.items()}
    return type(value)(map(spoilt, value)) if isinstance(value, list | tuple) else value


def spoilt_of(key: str, value: Any) -> Any:
    if key in ("by_scanner", "test_participants_per_class"):
        return {f"{SECRET} {name}": inner for name, inner in (value or {}).items()}
    if key in ("classes", "left_out_classes", "commands"):
        return [SECRET, *(f"{word} {SECRET}" for word in value or ())]
    if key in ("target", "column", "encoder", "a", "b", "metric", "note", "sentence", "labels"):
        return f"{SECRET} {value}"
    return spoilt(value)


def test_whatever_holds_a_name_no_part_of_a_shared_run_does(tmp_path):
    found = gather(write_run(tmp_path, figures=False, steps=120), write_catalog(tmp_path), write_store(tmp_path))
    assert found.catalog and found.store and found.unprepared and found.probe
    catalog = replace(
        found.catalog, root=SECRET, acquisitions=spoilt(found.catalog.acquisitions), rejects=spoilt(found.catalog.rejects),
        skipped=spoilt(found.catalog.rejects),
    )  # fmt: skip
    found.store.rows = spoilt(found.store.rows)
    online = [{"kind": "online", "step": 1, "target": SECRET, "score": 0.5}]
    probe = spoilt(found.probe | {"embeddings": [{"name": SECRET}], "labels": SECRET})
    shown = shareable(
        replace(
            found,
            run=Path(SECRET),
            catalog=catalog,
            unprepared=spoilt(found.unprepared),
            probe=probe,
            online=online,
            **{name: spoilt(getattr(found, name)) for name in ("train", "validation")},
        )
    )
    assert shown.catalog and shown.store and shown.probe and not shown.scenes
    parts = {f.name: getattr(shown, f.name) for f in fields(shown) if f.name not in ("catalog", "store", "unprepared")}
    parts |= {"store": [asdict(row) for row in shown.store.rows], "unprepared": [asdict(u) for u in shown.unprepared]}
    for name in ("acquisitions", "rejects", "skipped"):
        parts[name] = [asdict(each) for each in getattr(shown.catalog, name)]
    parts["root"] = shown.catalog.root
    for name, part in parts.items():
        assert not [text for text in words_of(part) if SECRET in text or "/clinic" in text], name
    own = [found.probe["results"][0] | {"metric": name} for name in (*BUILT_IN, SECRET)]
    kept = shareable(replace(found, probe=found.probe | {"results": own})).probe
    assert kept and [row["metric"] for row in kept["results"]] == [*BUILT_IN, "other_metric_1"]
    assert SECRET not in str(shown.run) and len(shown.catalog.acquisitions) == len(catalog.acquisitions)
    for before, after in ((catalog.acquisitions, shown.catalog.acquisitions), (found.store.rows, shown.store.rows)):
        assert len({row.eye_id for row in after}) == len({row.eye_id for row in before}), "counted as before"
        assert len({row.participant for row in after}) == len({row.participant for row in before})


@given(rows=st.lists(st.fixed_dictionaries({"what": st.text(), "sentence": st.text()})))
def test_a_health_row_never_quotes(rows):
    from octfm.report.shareable import _health

    for row in rows:
        shown = _health({"kind": "incident", "step": 1, "verdict": "bad", **row, "volumes": [SECRET]})
        assert shown["sentence"] == "The run's metrics.jsonl says more."
        assert shown["what"] == row["what"] or shown["what"] == "another check"
        assert shown["verdict"] == "bad"
        inspected = _health({"kind": "health", "step": 1, "verdict": "bad", **row})
        assert inspected["sentence"] == shown["sentence"] or row["what"] in BY_NUMBERS
        assert SECRET not in repr(shown)


def test_a_site_has_a_number_and_no_other_word_of_a_participants_columns_is_shown():
    words = Words()
    texts = {
        "clinical_site": SECRET,
        "diagnosis": SECRET,
        "age": "57",
        "seen_on": "2026-11-28",
        SECRET: "healthy",
        "sex": "",
    }
    for site in (SECRET, f"{SECRET} 2", SECRET):
        shown = words.labels(texts | {"clinical_site": site, "diagnosis": "healthy"})
        assert shown == {"clinical_site": f"other_site_{1 + (site != SECRET)}", "diagnosis": "healthy", "age": "57"}
    assert not any(SECRET in text for text in words_of(words.labels(texts)))


def test_a_page_without_pictures_names_no_file_run_or_day(tmp_path, monkeypatch):
    (tmp_path / SECRET).mkdir()
    run = write_run(tmp_path / SECRET).rename(tmp_path / f"{SECRET} 2026-11-28")
    catalog = write_catalog(tmp_path, sentence=f"{SECRET}.dcm: PatientName is {SECRET}")
    shared = write_report(run, tmp_path / "a.html", catalog=catalog, images=False).read_text()
    assert SECRET not in shared and str(tmp_path) not in shared
    assert str(gather(run, None, None).record["started"]) not in shared
    monkeypatch.setattr("octfm.report.figures.training_charts", lambda sources: [])  # most of the time of a page
    own = write_report(run, tmp_path / "b.html", catalog=catalog).read_text()
    assert SECRET in own, "one's own page has the details"
