"""The demonstration, small: every part runs, a second call continues, mistakes are one line."""

import contextlib
import json
import re

import pytest

from octfm.demo import SABOTAGE, run_demo, run_sabotage
from octfm.errors import CheckpointError, ConfigError


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out, said = tmp_path_factory.mktemp("demo") / "demo", []
    report = run_demo(out, seed=1, quick=True, echo=said.append)
    return out, report, said


@pytest.mark.timeout(600)
def test_the_whole_path_runs(finished):
    out, report, said = finished
    assert report.is_file() and report.stat().st_size < 10e6
    assert said[-1] == f"report: {report.resolve()}"
    summary = [line.partition(":")[0] for line in said[-6:-1]]
    assert summary == ["Data", "Preparation", "Training", "Probe", "Health"], "a five-line summary"
    probe = json.loads((out / "run" / "probe.json").read_text())
    assert {r["encoder"] for r in probe["results"]} == {"pretrained", "random_init", "histogram"}
    assert "disease" in {r["target"] for r in probe["results"]}
    # All 18 whom pretraining has not seen are tested, after learning from the others.
    assert {(r["design"], r["n_test_participants"]) for r in probe["results"] if r["target"] == "disease"} == {
        ("k-fold", 18)
    }
    assert {r["design"] for r in probe["label_efficiency"]} == {"k-fold"}
    page = report.read_text()
    assert re.search(r"The probe tested (\d+ to )?18 participants(, by target)?, each by a model that had", page)
    assert "everyone whom pretraining has not seen is judged by the one of 5 models" in page
    assert "drawn anew for every fold" in page
    assert "in every fold fitted on about 26 other participants" in (out / "model_card.md").read_text()
    assert (out / "catalog" / "rejects.parquet").is_file()


class Reached(BaseException):
    pass


@pytest.mark.parametrize("until", ["probe", pytest.param("the end", marks=pytest.mark.slow)])
def test_a_second_call_does_only_what_is_missing(finished, until):
    """Probe and report are made anew by every call, which takes a third of its time."""
    out, _, _ = finished
    metrics = (out / "run" / "metrics.jsonl").read_bytes()
    said: list[str] = []

    def echo(line: str) -> None:
        said.append(line)
        if f"] {until}: " in line:
            raise Reached

    with pytest.raises(Reached) if until == "probe" else contextlib.nullcontext():
        run_demo(out, seed=1, quick=True, echo=echo)
    assert (out / "run" / "metrics.jsonl").read_bytes() == metrics
    assert not any("phantom participants" in line for line in said), "the cohort is found again"
    assert any("vectors of these weights and volumes are already there" in line for line in said)


def test_another_seed_in_the_same_folder_is_refused(finished):
    with pytest.raises(ConfigError, match="holds a cohort of 30 participants with seed 1"):
        run_demo(finished[0], seed=2, quick=True, echo=lambda _: None)


def test_the_other_objective_is_a_run_of_its_own(finished):
    """Its settings are V-JEPA 2's, so the finished run of masked voxels is refused, not overwritten."""
    metrics = (finished[0] / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"objective\.name.*choose another --out"):
        run_demo(finished[0], seed=1, quick=True, objective="vjepa2", echo=lambda _: None)
    assert (finished[0] / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_the_users_own_scans(finished, tmp_path):
    out, _, _ = finished
    said: list[str] = []
    report = run_demo(
        tmp_path / "mine", data=out / "clinic" / "retinal_oct", max_samples=24, seed=1, quick=True, echo=said.append
    )
    assert report.is_file()
    assert any("24 accepted" in line for line in said)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", SABOTAGE)
def test_a_planted_fault_is_named_live(finished, name):
    said: list[str] = []
    report = run_sabotage(name, finished[0], echo=said.append)
    assert report.is_file()
    assert said[-2].startswith(f"planted {name} at step 40; named at step 4"), said
