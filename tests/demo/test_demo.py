"""The demonstration, small: every part runs, a second call continues, mistakes are one line."""

import contextlib
import json
import re
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from octfm.catalog.acquisition import Acquisition
from octfm.catalog.catalog import Catalog
from octfm.catalog.labels import read_labels
from octfm.demo import clinic, own_scans, run, run_demo, run_sabotage, stages
from octfm.demo.questions import find_questions
from octfm.errors import CheckpointError, ConfigError, EvaluationError
from octfm.layers import sample
from octfm.phantom import phantom_volume, write_phantom
from octfm.pretraining.monitors.sabotage import NAMES
from octfm.store.store import Store
from support.command_line import octfm_here
from support.dicom_files import write_oct_dicom
from support.small_store import small_store

SMALLER = replace(
    clinic.QUICK,
    participants=16,
    fractions=(0.25, 0.125, 0.625),
    overrides=(
        "steps=4", "log_every_steps=1", "validate_every_steps=2", "ckpt_every_steps=2",
        "model.width=24", "model.depth=2", "predictor.width=24", "predictor.depth=1", "masks.budget=100",
    ),
)  # fmt: skip
"""A demonstration that takes a tenth as long as that of --quick, which only the slow tests run; its scans and its
prepared volumes are small."""


def run_smaller(out, **options):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "QUICK", SMALLER)
        patch.setattr(clinic, "PREPROCESSING", {"image_size": [16, 96, 64], "target_spacing": [0.1875, 0.0208, 0.062]})
        patch.setattr("octfm.phantom.write_phantom", partial(write_phantom, size=(16, 128, 96), workers=1))
        patch.setattr(run, "DRAWS", 1)
        patch.setattr(run, "LABELLED", (0.3, 1.0))
        patch.setattr(sample, "samples", few_bscans)
        return run_demo(out, quick=True, **options)


def few_bscans(conditions, samples=sample.samples):
    return [replace(s, volume=replace(s.volume, voxels=s.volume.voxels[::6])) for s in samples(conditions)]


@pytest.fixture(scope="module")
def finished(light_checks, tmp_path_factory):
    out, said = tmp_path_factory.mktemp("demo") / "demo", []
    report = run_smaller(out, seed=1, echo=said.append)
    return out, report, said


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """What users get from --quick."""
    out, said = tmp_path_factory.mktemp("quick") / "demo", []
    report = run_demo(out, seed=1, quick=True, echo=said.append)
    return out, report, said


@pytest.mark.timeout(600)
def test_the_whole_path_runs(finished):
    out, report, said = finished
    assert report.is_file() and report.stat().st_size < 10e6
    assert said[-1] == f"report: {report.resolve()}"
    assert [line.partition(":")[0] for line in said[-4:-1]] == ["Result", "Training", "Health"]
    probe = json.loads((out / "run" / "probe.json").read_text())
    compared = ["pretrained", "random_init", "histogram", "tissue_map", "map_and_encoder", "covariates"]
    assert list(dict.fromkeys(r["encoder"] for r in probe["results"])) == compared
    assert "disease" in {r["target"] for r in probe["results"]}
    # All 12 whom pretraining has not seen are tested, after learning from the others.
    assert {(r["design"], r["n_test_participants"]) for r in probe["results"] if r["target"] == "disease"} == {
        ("k-fold", 12)
    }
    assert {r["design"] for r in probe["label_efficiency"]} == {"k-fold"}
    page = report.read_text()
    assert re.search(r"The probe tested (\d+ to )?12 participants(, by target)?, each by a model fitted on", page)
    assert "every participant not seen in pretraining is tested by the one of 5 models" in page
    assert "drawn anew for every fold" in page
    assert "in every fold fitted on about 14 other participants" in (out / "model_card.md").read_text()
    assert (out / "catalog" / "rejects.parquet").is_file()


def test_a_stage_is_one_line_and_details_are_in_the_log(finished):
    out, _, said = finished
    begun = [line for line in said if re.match(r"\[ *\d+ s\] \d/6 ", line)]
    assert len(begun) == 6 and len(said) == 13
    log = (out / "demo.log").read_text()
    assert all(line in log for line in said)
    assert "preflight: " in log and "pretraining done: 4 updates" in log


def test_disk_and_time_come_first_and_a_picture_next(finished):
    out, _, said = finished
    assert "on two idle CPU cores, at most 0.20 GB in" in said[0] and "free" in said[0]
    page = out / "first_scan.html"
    assert "1/6 picture" in said[1] and said[2] == f"open now: {page.resolve()}"
    assert "Synthetic: no patient" in page.read_text()


def test_a_disk_that_is_too_small_is_named_before_work_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(stages.shutil, "disk_usage", lambda _: SimpleNamespace(free=10**8))
    with pytest.raises(ConfigError, match=r"needs 1.3 GB there, 0.10 GB is free; .* --quick needs less"):
        run_demo(tmp_path / "demo", echo=lambda _: None)
    assert not (tmp_path / "demo").exists()


class Reached(BaseException):
    pass


@pytest.mark.parametrize("until", [pytest.param(until, marks=pytest.mark.slow) for until in ("probe", "the end")])
def test_a_second_call_does_only_what_is_missing(finished, until):
    """Probe and report are made anew by every call, which takes a third of its time."""
    out, _, _ = finished
    metrics, log = (out / "run" / "metrics.jsonl").read_bytes(), (out / "demo.log").read_text()
    rendered = (out / "clinic" / "participants.tsv").stat().st_mtime_ns

    def echo(line: str) -> None:
        if f"/6 {until}: " in line:
            raise Reached

    with pytest.raises(Reached) if until == "probe" else contextlib.nullcontext():
        run_smaller(out, seed=1, echo=echo)
    assert (out / "run" / "metrics.jsonl").read_bytes() == metrics
    assert (out / "clinic" / "participants.tsv").stat().st_mtime_ns == rendered, "the clinic is found again"
    assert "vectors of these weights and volumes are already there" in (out / "demo.log").read_text()[len(log) :]


def test_another_seed_in_the_same_folder_is_refused(finished):
    with pytest.raises(ConfigError, match="holds a cohort of 16 participants with seed 1"):
        run_smaller(finished[0], seed=2, echo=lambda _: None)


def test_other_scans_in_the_same_folder_are_refused(finished, tmp_path):
    """A store drops no row: phantoms and one's own scans would be trained on and probed together."""
    eye, _ = phantom_volume(0, size=(6, 64, 48))
    write_oct_dicom(tmp_path / "dicom" / "a.dcm", eye.voxels, eye.spacing_mm)
    before = Catalog.load(finished[0] / "catalog").root
    with pytest.raises(ConfigError, match="holds a demonstration with phantoms; choose another --out"):
        run_demo(finished[0], data=tmp_path / "dicom", echo=lambda _: None)
    assert Catalog.load(finished[0] / "catalog").root == before
    small_store(tmp_path / "mine" / "prepared")
    with pytest.raises(ConfigError, match=r"holds a demonstration with 24 scans not taken now, such as 0\.dcm; choose"):
        run_demo(tmp_path / "mine", data=tmp_path / "dicom", echo=lambda _: None)
    with pytest.raises(ConfigError, match="holds a demonstration on scans of your own; choose another --out"):
        run_demo(tmp_path / "mine", echo=lambda _: None)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["prepared"]


def test_the_other_objective_is_a_run_of_its_own(finished):
    """Its settings are V-JEPA 2's, so the finished run of masked voxels is refused, not overwritten."""
    metrics = (finished[0] / "run" / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"objective\.name.*choose another --out"):
        run_smaller(finished[0], seed=1, objective="vjepa2", echo=lambda _: None)
    assert (finished[0] / "run" / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.slow
def test_a_clinic_in_parts_is_the_same_and_goes_on_after_a_kill(tmp_path, monkeypatch):
    """Killed while the files of the first scanner are removed."""
    whole = clinic.Size(10, (0.4, 0.2, 0.4), 0, keeps_files=True)
    parts = clinic.Size(10, (0.4, 0.2, 0.4), 0)
    labels, counted = clinic.prepared_clinic(tmp_path / "whole", whole, 5), []
    with monkeypatch.context() as patch:
        patch.setattr(clinic.shutil, "rmtree", killed_at(".partial"))
        with pytest.raises(Reached):
            clinic.prepared_clinic(tmp_path / "parts", parts, 5)
    joined = clinic.prepared_clinic(tmp_path / "parts", parts, 5, lambda *count: counted.append(count))
    assert counted == sorted(counted) and counted[-1] == (10, 10), "some are imaged twice, and count once"
    kept = [(row.checksum, row.participant, row.split) for row in Store.open(tmp_path / "whole" / "prepared").rows]
    assert [
        (row.checksum, row.participant, row.split) for row in Store.open(tmp_path / "parts" / "prepared").rows
    ] == kept
    assert sorted(joined.read_text().splitlines()) == sorted(labels.read_text().splitlines())
    counts = [Catalog.load(tmp_path / name / "catalog").summary() for name in ("whole", "parts")]
    assert {key for key in counts[0] if counts[0][key] != counts[1][key]} <= {"companions"}
    assert not list((tmp_path / "parts").rglob("*.dcm")) and list((tmp_path / "whole").rglob("*.dcm"))
    with pytest.raises(ConfigError, match="holds a cohort of 10 participants with seed 5"):
        clinic.prepared_clinic(tmp_path / "parts", parts, 6)


def killed_at(ending: str):
    """shutil.rmtree that never comes back from a folder with this ending that has files."""

    def rmtree(folder, ignore_errors=False):
        if str(folder).endswith(ending) and folder.is_dir() and any(folder.rglob("*.dcm")):
            raise Reached

    return rmtree


def cohort_of(count: int) -> list[Acquisition]:
    """One right eye each of p00, p01, …; the first half is the training split."""
    facts = {"laterality": "R", "scanner": "s", "protocol": "p", "shape": (8, 64, 48), "spacing_mm": (0.1, 0.01, 0.01)}
    return [
        Acquisition(
            f"/x/{i}",
            f"p{i:02}",
            **facts,
            spacing_source="header",
            sop_instance_uid=f"u{i:02}",
            split="train" if i < count // 2 else "test",
        )
        for i in range(count)
    ]


def table_of(path, header: str, rows: list[str]):
    path.write_text("\n".join([header, *rows]) + "\n")
    return read_labels(path)


def test_columns_that_scans_cannot_answer_are_left_out_with_a_reason(tmp_path):
    rows = [
        f"p{i:02},{'ill' if i % 2 else 'healthy'},{300 + i},{'rare' if i == 3 else 'usual'},note {i}" for i in range(24)
    ]
    table = table_of(tmp_path / "labels.csv", "participant_id,diagnosis,cst_um,kind,comment", rows)
    found = find_questions(cohort_of(24), table, trains=False)
    assert found.targets == ("disease", "diagnosis", "cst_um")
    assert {s["target"]: s["sentence"][:5] for s in found.skipped} == {"kind": "Fewer", "comment": "Colum"}
    # Half of the participants are pretrained on: 12 remain, enough for a number, and for classes of six.
    assert find_questions(cohort_of(24), table, ["cst_um"], trains=True).targets == ("cst_um",)


@pytest.mark.parametrize("count, rows", [(6, "p{i:02},{i}"), (24, "p{i:02},same"), (24, "p{i:02},{i}x")])
def test_too_few_participants_for_any_question_is_an_error(tmp_path, count, rows):
    table = table_of(tmp_path / "labels.csv", "participant_id,grade", [rows.format(i=i) for i in range(count)])
    with pytest.raises(EvaluationError, match=r"cannot answer any question .* grade: .* at least 5 participants each"):
        find_questions(cohort_of(count), table, trains=False)


def test_who_is_pretrained_on_is_said_where_too_few_are_left(tmp_path):
    table = table_of(tmp_path / "t.csv", "participant_id,ill", [f"p{i:02},{i % 2}" for i in range(16)])
    assert find_questions(cohort_of(16), table, trains=False).targets == ("ill",)
    with pytest.raises(EvaluationError, match="8 of 16 participants are pretrained on, so they cannot be tested"):
        find_questions(cohort_of(16), table, trains=True)
    other_scanner = [replace(a, participant=a.participant.replace("p", "P-0")) for a in cohort_of(16)]
    with pytest.raises(EvaluationError, match="8 of 16 participants are pretrained on, so they cannot be tested"):
        find_questions([*cohort_of(16), *other_scanner], table, trains=True)


def test_a_table_of_many_questions_wants_them_named(tmp_path):
    names = [f"a{k}" for k in range(9)]
    table = table_of(
        tmp_path / "t.csv", ",".join(["participant_id", *names]), [f"p{i:02}" + f",{i % 2}" * 9 for i in range(24)]
    )
    with pytest.raises(EvaluationError, match=r"9 columns could be probed .* --target COLUMN"):
        find_questions(cohort_of(24), table, trains=False)
    assert find_questions(cohort_of(24), table, ["a3"], trains=False).targets == ("a3",)


BAD_LABELS = {
    "no table": (None, (), "no such label table"),
    "no such column": (
        "participant_id,grade\n1,2\n",
        ("--target", "stage"),
        "has no such column; label columns: grade",
    ),
    "others' labels": ("participant_id,grade\n1,2\n2,3\n", (), "no participant_id matches"),
    "one class": ("person_id,grade\n{ids}", (), "cannot answer any question"),
}


@pytest.mark.parametrize("name", BAD_LABELS)
def test_wrong_labels_are_refused_before_any_scan_is_prepared(finished, tmp_path, name):
    text, options, expected = BAD_LABELS[name]
    scans = finished[0] / "clinic" / "retinal_oct"
    if text is not None:
        people = sorted({row.participant for row in Store.open(finished[0] / "prepared").rows})
        (tmp_path / "labels.csv").write_text(text.replace("{ids}", "".join(f"{p},1\n" for p in people)))
    words = ("--data", scans, "--labels", "labels.csv", *options, "--out", "mine")
    code, _, err = octfm_here("demo", *words, cwd=tmp_path)
    assert code == 1 and err.count("\n") == 1 and expected in err, err
    assert not (tmp_path / "mine" / "prepared").exists()


def test_a_missing_folder_is_refused_and_leaves_none(tmp_path):
    code, _, err = octfm_here("demo", "--data", "nothere", "--out", "mine", cwd=tmp_path)
    assert code == 1 and "nothere: no such folder" in err, err
    assert not (tmp_path / "mine").exists()


def test_a_first_scan_without_a_picture_is_said_on_the_terminal(tmp_path, monkeypatch):
    eye, _ = phantom_volume(0, size=(6, 64, 48))
    write_oct_dicom(tmp_path / "dicom" / "a.dcm", eye.voxels, eye.spacing_mm)
    said: list[str] = []

    def refused(*_):
        raise EvaluationError("its layers cannot be drawn")

    def echo(line: str) -> None:
        said.append(line)
        if " store: " in line:
            raise Reached

    monkeypatch.setattr(own_scans, "first_picture", refused)
    with pytest.raises(Reached):
        run_demo(tmp_path / "mine", data=tmp_path / "dicom", quick=True, echo=echo)
    assert [line for line in said if line.endswith("a.dcm: no picture: its layers cannot be drawn")]


@pytest.mark.parametrize(("held", "options"), [("not_pretrained", {}), ("participant_key", {"labels": "labels.csv"})])
def test_a_folder_that_has_grown_past_the_least_or_shrunk_is_refused_at_once(tmp_path, held, options):
    """After hours of preparing, pretraining would refuse the folder, or the record of a pretrained run would be lost."""
    eye, _ = phantom_volume(0, size=(6, 64, 48))
    write_oct_dicom(tmp_path / "dicom" / "a.dcm", eye.voxels, eye.spacing_mm)
    (tmp_path / "labels.csv").write_text("participant_id,grade\n1,2\n")
    record = tmp_path / "mine" / "run" / "run.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({held: "some text"}))
    given = {name: tmp_path / value for name, value in options.items()}
    with pytest.raises(
        ConfigError, match=r"with(out)? pretraining, and this one, of [01] training scans, .* another --out"
    ):
        run_demo(tmp_path / "mine", data=tmp_path / "dicom", echo=lambda line: None, **given)
    assert not (tmp_path / "mine" / "prepared").exists() and json.loads(record.read_text()) == {held: "some text"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_on_the_users_own_scans(quick, tmp_path):
    out, _, _ = quick
    said: list[str] = []
    report = run_demo(
        tmp_path / "mine", data=out / "clinic" / "retinal_oct", max_samples=24, seed=1, quick=True, echo=said.append
    )
    assert report.is_file()
    assert any("24 scans accepted" in line for line in said)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("short", [True, False])
def test_a_question_to_ones_own_scans_is_answered(quick, tmp_path, short):
    """Pretrained (short), or too few for it: layers of the packaged network against the tissue map."""
    out, _, _ = quick
    truth = read_labels(out / "clinic" / "ground_truth" / "labels.tsv")
    rows = {f"{row['participant_id']},{row['laterality']},{row['cst_um']}" for row in truth.rows}
    first = {row.rsplit(",", 1)[0]: row for row in sorted(rows)}
    (tmp_path / "labels.csv").write_text("\n".join(["participant_id,laterality,thickness", *first.values()]) + "\n")
    said: list[str] = []
    report = run_demo(
        tmp_path / "mine",
        data=out / "clinic" / "retinal_oct",
        labels=tmp_path / "labels.csv",
        max_samples=24,
        quick=short,
        echo=said.append,
    )
    probe = json.loads((tmp_path / "mine" / "run" / "probe.json").read_text())
    assert {r["target"] for r in probe["results"]} == {"thickness"}
    assert probe["results"][0]["encoder"] == ("pretrained" if short else "layers")
    page = report.read_text()
    assert "From files to results" in page and ("too few to learn from" in page) != short
    best = {r["encoder"]: r["estimate"] for r in probe["results"] if r["metric"] == "r2"}
    assert short or best["layers"] > 0.5, best


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_named_live(quick, name):
    said: list[str] = []
    report = run_sabotage(name, quick[0], echo=said.append)
    assert report.is_file()
    assert said[-2].startswith(f"planted {name} after step 40; named at step 4"), said
