"""Several runs on one page: what differs is shown, pairs are pairs, and where there are none the page says why."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest
import yaml

from octfm.encoder.embed import embed_store
from octfm.encoder.encoder import load_encoder, seen_by
from octfm.errors import EvaluationError
from octfm.evaluation.probe import probe, probe_together, write_probe
from octfm.evaluation.results import Result
from octfm.report.compare import labels_of, names_of, settings_that_differ, write_compare
from octfm.report.sources import gather
from octfm.trust.leaderboard import leaderboard
from support.accessible import assert_accessible
from support.browser import assert_renders, needs_chromium
from support.command_line import invoke, octfm_here
from support.run_folder import probe_result, write_run
from support.small_store import darkened, small_store
from support.tiny_runs import config, quick_pretrain, quiet

pytestmark = [pytest.mark.drawn, pytest.mark.usefixtures("remembered_charts")]


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The same run twice, but for a learning rate, its training volumes and a probe."""
    made = {}
    for name in ("a", "b"):
        run = write_run(tmp_path_factory.mktemp(name), figures=False, probe=name == "a", steps=60)
        base = {
            "model": {"width": 192, "depth": 6},
            "steps": 400,
            "schedule": {"base_lr": 1e-3 if name == "a" else 2e-3},
        }
        (run / "config.yaml").write_text(yaml.safe_dump(base))
        record = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(record | {"data": f"hash-{name}", "fingerprint": "same"}))
        made[name] = run
    return made


def words(page: Path) -> str:
    return " ".join(re.sub(r"<(style|svg).*?</\1>|<[^>]+>", " ", page.read_text(), flags=re.S).split())


def together() -> dict:
    """As if the runs had been probed together."""
    result = probe_result()
    names = {"pretrained": "a", "random_init": "b"}
    result["results"] = [r | {"encoder": names[r["encoder"]]} for r in result["results"] if r["encoder"] in names]
    kept = [c for c in result["comparisons"] if c["b"] in names]
    result["comparisons"] = [c | {"a": names[c["a"]], "b": names[c["b"]], "p_holm": 0.2} for c in kept]
    return result


def test_only_settings_that_differ_are_listed(runs):
    sources = {name: gather(run, None, None) for name, run in runs.items()}
    assert settings_that_differ(sources) == [("schedule.base_lr", ["0.001", "0.002"])]


def test_settings_name_no_file_or_folder(runs, tmp_path):
    """Folders may be called after people; trust.html withholds them as well."""
    named = {}
    for name, run in runs.items():
        named[name] = tmp_path / name
        shutil.copytree(run, named[name])
        scanners = ["zeiss_cirrus", "topcon_triton" if name == "a" else "meier_oct"]
        data = {"store": f"/clinic/Meier-{name}", "sampling": ["Meier", name], "scanners": scanners}
        settings = {"data": data, "precision": "bf16"}
        (named[name] / "config.yaml").write_text(yaml.safe_dump(settings | {"steps": 1 if name == "a" else 2}))
    page = write_compare(named, tmp_path / "compare.html").read_text()
    assert "meier" not in page.lower() and "/clinic" not in page
    sources = {name: gather(run, None, None) for name, run in named.items()}
    assert settings_that_differ(sources) == [
        ("data.sampling", [str(["…", "…"])] * 2),
        ("data.scanners", [str(["zeiss_cirrus", "topcon_triton"]), str(["zeiss_cirrus", "…"])]),
        ("data.store", ["…", "…"]), ("steps", ["1", "2"])
    ]  # fmt: skip


def test_page_shows_facts_curves_pairs_and_verdicts(runs, tmp_path):
    page = write_compare(runs, tmp_path / "c.html", together())
    text = words(page)
    assert "schedule.base_lr 0.001 0.002" in text and "model.width" not in text
    assert (
        "Training volumes (same letter: the same) A B" in text and "Preprocessing (same letter: the same) A A" in text
    )
    assert "hash-" not in text and "never-shown" not in text
    assert "central retinal thickness, scored on 252 eyes of 126 participants." in text
    assert (
        "a against b: better, but not after Holm, for disease, central retinal thickness; inconclusive for diagnosis, study group."
        in text
        and "no clear winner" in text
    )
    assert "disease auroc: a is better against b (+0.110, not after Holm)" in Result(together())._repr_html_()
    sure = together()
    sure["comparisons"] = [c | {"p_holm": 0.01} for c in sure["comparisons"] if c["verdict"] == "better"]
    assert "a against b: better for disease, central retinal thickness." in words(
        write_compare(runs, tmp_path / "d.html", sure)
    )
    assert "+0.11 (+0.06 to +0.16)" in text and "not after Holm" in text
    assert page.read_text().count("<svg") >= 7 and "<img" not in page.read_text()
    assert_accessible(page.read_text())
    assert not re.search('<th scope="row">[^<]*</th></tr>', page.read_text()), "a row without cells"


def test_page_names_the_checkpoints_that_were_probed(runs, tmp_path):
    """A run that went on after octfm embed is shown with the curves of now and the scores of then."""
    named = {name: Path(shutil.copytree(run, tmp_path / name)) for name, run in runs.items()}
    (named["a"] / "probe.json").write_text(json.dumps(probe_result() | {"embeddings": [{"encoder": "/Meier/x.pt"}]}))
    (named["b"] / "probe.json").write_text(
        json.dumps(probe_result() | {"embeddings": [{"encoder": "/Meier/checkpoints/step-00000020.pt"}]})
    )
    result = together()
    result["embeddings"] = [{"encoder": f"/Meier/checkpoints/step-000000{step}.pt"} for step in (30, 40)]
    text = words(write_compare(named, tmp_path / "c.html", result))
    assert "Checkpoint probed together step-00000030.pt step-00000040.pt" in text
    assert "Checkpoint probed apart – step-00000020.pt" in text and "Meier" not in text


def test_no_checkpoint_is_to_be_taken_if_none_is_better_than_chance(runs, tmp_path):
    row = {
        "kind": "probe",
        "target": "disease",
        "metric": "auroc",
        "score": 0.48,
        "chance": 0.5,
        "step": 9,
        "pool": "mean",
    }
    named = {name: Path(shutil.copytree(run, tmp_path / name)) for name, run in runs.items()}
    for score, run in zip((0.48, 0.7), named.values(), strict=True):
        with (run / "metrics.jsonl").open("a", encoding="utf-8") as metrics:
            metrics.write(json.dumps(row | {"score": score}) + "\n")
    text = words(write_compare(named, tmp_path / "c.html"))
    assert "Checkpoint to take none: none is better than chance Take step-00000010.pt" in text


@pytest.mark.slow
def test_ticks_of_curves_stand_at_whole_steps(tmp_path):
    short = {}
    for name in ("x", "y"):
        short[name] = write_run(tmp_path / name, figures=False, steps=3)
    page = write_compare(short, tmp_path / "c.html").read_text()
    charts = [svg for svg in re.findall(r"<svg.*?</svg>", page, re.S) if ">step</text>" in svg]
    ticks = [re.findall(r'id="[^"]*xtick_\d+".*?>([^<]+)</text>', svg, re.S) for svg in charts]
    assert charts and all(own and set(own) <= {"1", "2", "3"} for own in ticks), ticks


def test_without_pairs_the_page_says_why_and_warns_of_overlaps(runs, tmp_path):
    with pytest.raises(EvaluationError, match=r"no embeddings; make them with `octfm embed") as missing:
        probe_together(runs)
    text = words(write_compare(runs, tmp_path / "c.html", None, str(missing.value)))
    assert (
        "Which run is better was not tested" in text
        and "There are no paired intervals" in text
        and "no embeddings" in text
    )
    assert "two overlapping intervals settle nothing" in text and "0.91 (0.86 to 0.95)" in text


@pytest.mark.slow
def test_odd_names_of_runs_are_drawn_as_they_are(runs, tmp_path):
    odd = dict(zip((r"a$\frac$\x1b[2J", "实验_<b>&"), runs.values(), strict=True))
    result = together()
    for row in (*result["results"], *result["comparisons"]):
        row |= {key: dict(zip("ab", odd, strict=True))[row[key]] for key in ("encoder", "a", "b") if key in row}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib's, of letters that its own font lacks
        page = write_compare(odd, tmp_path / "c.html", result).read_text()
    assert r"a$\frac$" in page and "&lt;b&gt;&amp;" in page and "<b>" not in page


def test_runs_are_named_by_what_tells_them_apart():
    assert list(names_of([Path("x/a/run"), Path("x/b/run")])) == ["a/run", "b/run"]
    assert list(names_of([Path("runs/a"), Path("runs/b")])) == ["a", "b"]
    with pytest.raises(EvaluationError, match="name each once"):
        names_of([Path("runs/a"), Path("runs/../runs/a")])


@pytest.mark.slow
def test_labels_are_those_of_the_probes(runs, tmp_path):
    said = []
    assert labels_of(runs, said.append) is None and not said
    table = tmp_path / "labels.tsv"
    table.write_text("participant_id\n")
    run = write_run(tmp_path / "c", figures=False)
    (run / "probe.json").write_text(json.dumps(probe_result() | {"labels": str(table)}))
    assert labels_of({"c": run, "b": runs["b"]}, said.append) == table and not said
    other = write_run(tmp_path / "d", figures=False)
    for labels, what in (("DataFrame", f"{table} and DataFrame, not one table"), (str(table), f"{table}, which is no")):
        (other / "probe.json").write_text(json.dumps(probe_result() | {"labels": labels}))
        if labels == str(table):
            table.unlink()
        assert labels_of({"c": run, "d": other}, said.append) is None
        assert what in said.pop() and not said, "the labels of the scans may be others"
    for place, told in ((tmp_path, True), (Path("/proc/octfm"), False)):
        done = invoke("compare", run, other, "--out", place / "c.html")
        assert (bool(done.exit_code), "which is no file here" in done.output) == (not told, told), done.output


@needs_chromium
def test_page_renders(runs, tmp_path):
    assert_renders(write_compare(runs, tmp_path / "c.html", together()), "Probed together", tmp_path)


def test_runs_are_probed_on_the_same_participants_and_a_twin_is_equal(tmp_path):
    store = small_store(tmp_path / "prepared", darkened, ("train",) * 6 + ("val",) * 2 + ("test",) * 12)
    labels = tmp_path / "labels.tsv"
    labels.write_text(
        "participant_id\tbrightness\n" + "".join(f"P{i:03d}\t{(1.0, 0.7, 0.4)[i % 3] + i / 1000}\n" for i in range(20))
    )
    run = quick_pretrain(config(steps=2), store, tmp_path / "a", echo=quiet)
    embed_store(load_encoder(run), store, run / "embeddings", echo=quiet)
    twin = Path(shutil.copytree(run, tmp_path / "b"))
    result = probe_together({"a": run, "b": twin}, labels, targets=["brightness"], resamples=200)
    scores = {(r["encoder"], r["metric"]): r for r in result["results"] if r["target"] == "brightness"}
    assert {name for name, _ in scores} == {"a", "b"} and scores["a", "r2"]["n_test_participants"] == 12
    assert scores["a", "r2"]["estimate"] == scores["b", "r2"]["estimate"]
    pairs = [c for c in result["comparisons"] if c["target"] == "brightness"]
    assert pairs and all(c["difference"] == 0 and c["verdict"] == "inconclusive" for c in pairs)
    assert result["settings"]["design"] == "recommended_split"
    # One of the runs has seen who is tested.
    lenient = small_store(tmp_path / "other", darkened, ("train",) * 16 + ("val",) * 2 + ("test",) * 2)
    seen = quick_pretrain(config(steps=1), lenient, tmp_path / "c", echo=quiet)
    shutil.copytree(run / "embeddings", seen / "embeddings")
    with pytest.raises(EvaluationError, match="seen"):
        probe_together({"a": run, "c": seen}, labels, targets=["brightness"], resamples=200)
    # Where the runs were probed by folds, so are they together: val and test participants, whom pretraining has not
    # seen.
    for one in (run, twin):
        write_probe(
            one / "probe.json",
            probe(
                [one / "embeddings" / "pretrained.parquet"],
                labels,
                design="k-fold",
                folds=3,
                seen=seen_by(one),
                targets=["brightness"],
                readout="knn",
                seeds=2,
                seed=7,
                resamples=50,
            ),
        )
    folded = probe_together({"a": run, "b": twin}, labels, targets=["brightness"], resamples=50)
    assert (folded["settings"]["design"], folded["settings"]["folds"]) == ("k-fold", 3)
    assert {r["n_test_participants"] for r in folded["results"]} == {14}
    own = [row for one in (run, twin) for row in json.loads((one / "probe.json").read_text())["results"]]
    columns = ("metric", "readout", "seeds", "estimate", "low", "high")
    vectors = run / "embeddings" / "pretrained.parquet"
    vectors.write_bytes(vectors.read_bytes().replace(b"step-00000002.pt", b"step-00000001.pt"))  # it went on
    done = invoke("compare", run, twin, "--labels", labels, "--target", "brightness", "--out", tmp_path / "c.html")
    assert done.exit_code == 0 and done.output.count("vectors of step-00000001.pt; the newest checkpoint") == 1
    assert [[row[c] for c in columns] for row in own] == [[row[c] for c in columns] for row in folded["results"]]
    for mistyped in ("--order=brightnes=low,middle,high", "--target=brightnes"):
        done = invoke("compare", run, twin, "--labels", labels, mistyped, "--out", tmp_path / "d.html")
        assert done.exit_code == 1 and "no label column brightnes; did you mean brightness?" in str(done.exception)
    assert not (tmp_path / "d.html").exists(), "a mistyped column is an error, not a page without intervals"


@pytest.mark.slow
def test_grades_that_the_runs_were_probed_with_are_grades_in_the_comparison(tmp_path):
    store = small_store(tmp_path / "prepared", darkened, ("train",) * 9 + ("val",) * 3 + ("test",) * 12)
    labels = tmp_path / "labels.tsv"
    rows = "".join(f"P{i:03d}\t{('low', 'middle', 'high')[i % 3]}\n" for i in range(24))
    labels.write_text(f"participant_id\tbrightness\n{rows}")
    run = quick_pretrain(config(steps=1), store, tmp_path / "a", echo=quiet)
    file = embed_store(load_encoder(run), store, run / "embeddings", echo=quiet)
    grades = {"brightness": ("low", "middle", "high")}

    def kinds(**options):
        result = probe_together({"a": run, "b": run}, labels, targets=["brightness"], resamples=50, **options)
        return {row["kind"] for row in result["results"]}

    assert kinds() == {"multiclass"} and kinds(orders=grades) == {"ordinal"}
    own = probe([file], labels, seen=seen_by(run), targets=["brightness"], orders=grades, resamples=50)
    write_probe(run / "probe.json", own)
    assert kinds() == {"ordinal"}
    whole = (run / "probe.json").read_text()
    for damaged in (whole[:100], "[" * 100_000):
        (run / "probe.json").write_text(damaged)
        with pytest.raises(EvaluationError, match=r"probe\.json: not valid JSON .*; compute the result again"):
            kinds()


def test_the_page_says_why_without_paths_or_ids(runs, tmp_path):
    """The reason of an error is on the page, which may be passed around; what it names stays on the terminal."""
    with pytest.raises(EvaluationError) as missing:
        probe_together(runs)
    assert "a has no embeddings: octfm embed makes them" in missing.value.public
    code, _, err = octfm_here("compare", *runs.values(), "--out", tmp_path / "c.html", cwd=tmp_path)
    assert code == 0 and str(runs["a"]) in err
    assert "has no embeddings: octfm embed makes them" in words(tmp_path / "c.html")
    assert str(runs["a"].parent) not in (tmp_path / "c.html").read_text()


def test_a_wrong_label_table_stops_the_comparison(runs, tmp_path):
    code, _, err = octfm_here("compare", *runs.values(), "--labels", "nowhere.tsv", cwd=tmp_path)
    assert code == 1 and "nowhere.tsv: no such label table" in err and not list(tmp_path.iterdir())


def test_the_leaderboard_checks_labels_before_it_embeds(tmp_path):
    store = small_store(tmp_path / "prepared", splits=("train",) * 6 + ("val",) * 2 + ("test",) * 4)
    run = quick_pretrain(config(steps=1), store, tmp_path / "a", echo=quiet)
    labels = tmp_path / "labels.tsv"
    rows = {
        "No acquisition has a label in column grade.*labels.tsv": ["P{i:03d}\t"],
        r"Of the classes .* \(high, low\), the test has only low": ["P{i:03d}\t{grade}"],
        "no participant_id matches": ["Q{i:03d}\t{grade}"],
    }
    for message, (row,) in rows.items():
        text = "".join(row.format(i=i, grade="high" if i < 8 and i % 2 else "low") + "\n" for i in range(12))
        labels.write_text("participant_id\tgrade\n" + text)
        with pytest.raises(EvaluationError, match=message):
            leaderboard([run], [store.path], "grade", tmp_path / "out", labels=labels, echo=quiet)
        assert not (tmp_path / "out").exists(), "nothing embedded, nothing written"


def test_the_leaderboard_names_the_entry_that_cannot_be_pooled_as_the_first(tmp_path):
    """The packaged encoder has a summary, and all scans were embedded before a run without one ended the command."""
    store = small_store(tmp_path / "prepared", splits=("train",) * 6 + ("val",) * 2 + ("test",) * 4)
    run = quick_pretrain(config(steps=1), store, tmp_path / "mine", echo=quiet)
    labels = tmp_path / "labels.tsv"
    rows = "".join(f"P{i:03d}\t{'high' if i % 2 else 'low'}\n" for i in range(12))
    labels.write_text("participant_id\tgrade\n" + rows)
    refusal = "mine: cannot be pooled as the first encoder is: pool=summary.*; name mine first, or leave it out"
    with pytest.raises(EvaluationError, match=refusal):
        leaderboard(["encoder-2", run], [store.path], "grade", tmp_path / "out", labels=labels, echo=quiet)
    assert not (tmp_path / "out").exists(), "nothing embedded, nothing written"
