"""The model card: what the hub can read, the run's own numbers, what is not known said aloud, and nobody to be
recognised."""

import json
import re

import pytest
import yaml

from octfm.catalog.catalog import Catalog
from octfm.display import interval
from octfm.errors import EvaluationError
from octfm.report.card.model_card import Statements, model_card
from octfm.report.card.paper import CLAIM, OPEN, paper
from octfm.report.participants import guarded
from support.command_line import invoke
from support.run_folder import probe_result, write_catalog, write_run, write_store


@pytest.fixture(scope="module")
def parts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("card")
    return {"run": write_run(folder), "catalog": write_catalog(folder), "store": write_store(folder)}


@pytest.fixture(scope="module")
def card(parts) -> str:
    return model_card(**parts)


def front(text: str) -> dict:
    return yaml.safe_load(text.split("---\n")[1])


def test_the_hub_reads_the_card_and_gets_the_numbers_of_the_probe(card):
    hub = pytest.importorskip("huggingface_hub")
    data = hub.ModelCard(card).data
    assert (data.library_name, data.license, data.license_name) == ("octfm", "other", "not-stated")
    told = {(r.task_name.split(": ")[1], r.metric_type): r.metric_value for r in data.eval_results}
    measured = {
        (r["target"], r["metric"]): round(r["estimate"], 4)
        for r in probe_result()["results"]
        if r["encoder"] == "pretrained" and not r["leakage"]
    }
    assert told == measured


def test_every_estimate_with_its_interval_and_every_verdict_is_in_the_card(card):
    for row in probe_result()["results"]:
        assert interval(row) in card
    assert "0.999 (0.990 to 1.000)" in card, "is not shown as perfect"
    assert "| disease | AUROC | pretrained − random_init | +0.11 (+0.06 to +0.16) | better |" in card
    assert "inconclusive" in card and "tell scanner apart with AUROC 0.97" in card
    assert "not a medical device" in card


@pytest.mark.parametrize(
    ("licence", "found"),
    [
        ("Apache-2.0", {"license": "apache-2.0"}),
        ("Our terms: 1", {"license": "other", "license_name": "our-terms-1"}),
        ("Our terms, https://a.example/1.", {"license_name": "our-terms", "license_link": "https://a.example/1"}),
        ("https://a.example/1", {"license_name": "https-a.example-1", "license_link": "https://a.example/1"}),
    ],
)
def test_licence_and_agreement_are_what_was_stated_or_said_to_be_missing(parts, card, licence, found):
    assert "licence of the weights is not stated" in card and "data agreement is not stated" in card
    text = model_card(
        parts["run"], statements=Statements(licence, "AI-READI v3, weights stay here", "AI-READI v3", "a@b.example")
    )
    assert found.items() <= front(text).items() and front(text)["datasets"] == ["AI-READI-v3"]
    assert (
        "not stated" not in text.split("## Licence")[1].split("## Data")[0]
        and "weights stay here" in text
        and "a@b.example" in text
    )


@pytest.mark.parametrize(
    ("named", "found"),
    [
        ("https://huggingface.co/datasets/clinic/oct", ["clinic/oct"]),
        ("AMD/healthy eyes", ["AMD-healthy-eyes"]),
        ("Müller's OCT (2.0), https://a.example/b/c", ["M-ller-s-OCT-2.0-https-a.example-b-c"]),
        ("OCT of 2019..2021, https://a.example/oct.git", ["OCT-of-2019-2021-https-a.example-oct"]),
        ("oct " * 50, ["-".join(["oct"] * 24)]),
        ("眼底", None),
    ],
)
def test_the_hub_gets_no_data_set_that_it_would_reject(parts, named, found):
    text = model_card(parts["run"], statements=Statements(dataset=named))
    assert front(text).get("datasets") == found and f"Data set: {named[0]}" in text
    if found:
        pytest.importorskip("huggingface_hub").utils.validate_repo_id(found[0])


def test_nobody_and_no_place_is_named(parts, card):
    both = card + paper(**parts)
    for secret in ("never-shown", "/clinic", "p001", "1.2.3", str(parts["run"].parent)):
        assert secret not in both, secret


def test_small_groups_do_not_follow_from_the_total():
    assert guarded({"a": 20, "b": 3, "c": 9}) == {"a": "20 (62%)", "b": "withheld", "c": "withheld"}
    assert guarded({"a": 20, "b": 3, "c": 2}) == {"a": "20 (80%)", "b": "withheld", "c": "withheld"}
    assert guarded({"a": 20, "b": 0}) == {"a": "20 (100%)", "b": "0 (0%)"}


@pytest.mark.parametrize(
    ("unit", "why"),
    [
        ("eye", "those whose eyes differ count in two"),
        ("acquisition", "those whose scans differ count in each of their"),
    ],
)
def test_shares_of_classes_are_of_the_people_who_were_tested(tmp_path, unit, why):
    run, result = write_run(tmp_path, figures=False), probe_result()
    for r in result["results"]:
        own = r["target"] == "diagnosis"
        r |= {"test_participants_per_class": {"healthy": 90, "dme": 60} if own else None, "unit": unit}
    (run / "probe.json").write_text(json.dumps(result))
    found = f"healthy 90 (71%), dme 60 (48%); {why}"
    assert found in paper(run) and found in model_card(run, store=write_store(tmp_path)), "of 126"


@pytest.mark.parametrize(("auroc", "leaks"), [(0.97, True), (0.52, False)])
def test_features_that_hardly_show_the_scanner_are_no_shortcut(tmp_path, auroc, leaks):
    run, result = write_run(tmp_path, figures=False), probe_result()
    row = next(r for r in result["results"] if (r["target"], r["encoder"]) == ("scanner", "pretrained"))
    row.update(estimate=auroc, low=auroc - 0.02, high=auroc + 0.02)
    (run / "probe.json").write_text(json.dumps(result))
    text = model_card(run)
    assert f"tell scanner apart with AUROC {auroc}" in text and ("a shortcut" in text) == leaks


def test_limits_name_only_comparisons_of_the_table_and_targets_with_too_few_people(tmp_path):
    run, result = write_run(tmp_path, figures=False), probe_result()
    first = next(r for r in result["results"] if r["target"] == "disease")
    result["results"].append(
        {**first, "metric": "ece", "estimate": None, "low": None, "high": None, "note": "Not defined."}
    )
    own = next(c for c in result["comparisons"] if c["target"] == "disease")
    result["comparisons"] = [
        {**c, "verdict": "better", "low": 0.1, "p": 0.001} for c in result["comparisons"] if c["target"] == "disease"
    ]
    result["comparisons"].append({**own, "metric": "ece", "verdict": "inconclusive", "low": -0.1, "p": 0.5})
    (run / "probe.json").write_text(json.dumps(result))
    text = model_card(run)
    assert "comparisons with the baselines are inconclusive" not in text
    assert "Too few participants for an interval: study_group." in text


def test_flow_and_table_are_those_of_the_catalog(parts, card):
    catalog = Catalog.load(parts["catalog"])
    accepted, people = len(catalog.acquisitions), len({a.participant for a in catalog.acquisitions})
    assert f"| Accepted OCT volumes | {accepted} | {people} |" in card
    assert f"| − Rejected, each with a reason | {len(catalog.rejects)} |" in card and "truncated_pixel_data 3" in card
    assert f"comprised {accepted} OCT volumes of {people} participants" in paper(**parts)


def of_phantoms(parts, folder):
    (folder / "ground_truth").mkdir()
    (folder / "ground_truth" / "phantom.json").write_text("{}")
    return Catalog(str(folder), Catalog.load(parts["catalog"]).acquisitions, ()).save(folder / "catalog")


def test_phantoms_are_said_to_be_phantoms(parts, tmp_path):
    folder = of_phantoms(parts, tmp_path)
    text = model_card(parts["run"], catalog=folder)
    assert "measured on synthetic phantoms" in text and "Nothing is known about real eyes" in text
    assert "agreement is not stated" not in text
    assert "synthetic OCT volumes (phantoms)" in paper(parts["run"], catalog=folder)
    text = model_card(write_run(tmp_path / "unprobed", probe=False, figures=False), catalog=folder)
    assert "measured on synthetic phantoms" not in text and "Trained on synthetic phantoms only." in text


def test_phantoms_are_not_all_that_weights_have_seen_that_began_with_other_ones(parts, tmp_path):
    """It said that no agreement binds them, and that no person can be found in them."""
    folder = of_phantoms(parts, tmp_path)
    run = write_run(tmp_path, probe=False, figures=False)
    assert "| Weights at the beginning | random |" in model_card(run, catalog=folder)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("model:\n", "model:\n  init: /data/anna/runs/a\n"))
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"inherited_participants": 31}))
    text = model_card(run, catalog=folder)
    assert "| Weights at the beginning | those of another network |" in text and "anna" not in text
    assert "no person can be found" not in text and "whose agreements bind it as well" in text
    assert "Trained on synthetic phantoms, beginning with weights that had seen other scans." in text


def test_missing_parts_give_a_sentence(tmp_path):
    run = write_run(tmp_path, probe=False, figures=False)
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").unlink()
    text = model_card(run)
    for sentence in ("No probe has been run", "is not described", "No health verdict has been logged yet"):
        assert sentence in text, sentence
    assert "Tested on" not in text and "tested on" not in text, "nothing was tested"
    assert "model-index" not in front(text)
    assert "Neither a catalog nor a store was given" in paper(run)
    # Without its settings nobody knows what the run was trained for.
    assert "| Objective | unknown |" in text and "jepa" not in (text + paper(run)).lower()


def test_a_difference_that_holm_rejects_is_listed_as_inconclusive(tmp_path):
    run = write_run(tmp_path)
    result = probe_result()
    for c in result["comparisons"]:
        c.update(verdict="better", low=0.01, high=0.2, p=0.04, p_holm=0.2 if c["target"] == "disease" else 0.01)
    (run / "probe.json").write_text(json.dumps(result))
    assert "Some comparisons with the baselines are inconclusive: disease." in model_card(run)


@pytest.mark.parametrize("jump_s", [0.0, -86400.0, 3.15e8])
def test_the_time_of_training_survives_a_clock_that_jumps(tmp_path, jump_s):
    run = write_run(tmp_path)
    rows = [{"kind": "train", "step": n, "time": 1.8e9 + 60.0 * n + (jump_s if n > 4 else 0)} for n in range(10)]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), "utf-8")
    assert "About 10 min of training" in model_card(run)


def test_words_from_outside_open_no_element_and_end_no_cell(tmp_path):
    attack = "<img src=x onerror=alert(1)>|a\n\n# heading"
    run = write_run(tmp_path, figures=False)
    result = probe_result()
    for r in [*result["results"], *result["comparisons"]]:
        r["target"] = attack if r["target"] == "disease" else r["target"]
    (run / "probe.json").write_text(json.dumps(result))
    text = model_card(run, statements=Statements(dataset=attack, contact=attack), name="oct [v2]")
    assert "# oct \\[v2\\]: a 3-D encoder" in text and 'load_encoder("oct [v2]")' in text, "code has no escapes"
    body = text.split("---\n", 2)[2]
    assert "<img" not in body and "\n# heading" not in body
    tables = re.findall(r"(?:^\|.*\n)+", body, re.M)
    assert len(tables) >= 2
    for block in tables:
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1, block


def test_claim_has_its_42_items_and_leaves_to_authors_what_only_they_know(parts):
    text = paper(**parts)
    rows = re.findall(r"^\| (\d+) \| (.*?) \| (.*) \|$", text, re.M)
    assert [int(n) for n, *_ in rows] == list(range(1, 43)) and len(CLAIM) == 42
    answers = {what: answer for _, what, answer in rows}
    assert answers["Funding"] == answers["De-identification"] == OPEN
    assert "disjoint by participant" in answers["Level at which partitions are disjoint"]
    assert text.count("@") >= 4 and text.count("{") == text.count("}")


def test_a_draft_names_the_baselines_that_were_probed_and_claims_no_choice_of_a_checkpoint(tmp_path):
    run = write_run(tmp_path, figures=False)
    text = paper(run)
    assert "next to the same encoder at random initialisation; a plain intensity histogram" in text
    result = probe_result()
    result["results"] = [r for r in result["results"] if r["encoder"] == "pretrained"]
    (run / "probe.json").write_text(json.dumps(result | {"comparisons": []}))
    online = {"kind": "probe", "step": 99, "target": "disease", "metric": "balanced_accuracy", "score": 0.8, "knn": 0.7}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(online) + "\n")
    text = paper(run)
    assert "beside" not in text and "paired" not in text
    assert f"the best was the one after 100 steps. Whether it or the last one was evaluated: {OPEN}." in text


@pytest.mark.parametrize(
    ("init", "begun"),
    [("null", "were initialised at random"), ("encoder_dense", f"began from those of another network: {OPEN}")],
)
def test_a_draft_does_not_guess_which_network_the_weights_began_from(tmp_path, init, begun):
    run = write_run(tmp_path, probe=False, figures=False)
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("model:\n", f"model:\n  init: {init}\n"))
    assert f"Weights {begun}." in paper(run)


@pytest.mark.parametrize(("name", "known"), [("vjepa2", True), ("my_contrast", False)])
def test_an_objective_of_ones_own_is_not_called_v_jepa(tmp_path, name, known):
    run = write_run(tmp_path, figures=False)
    with (run / "config.yaml").open("a") as file:
        file.write(f"objective:\n  name: {name}\n")
    tags = front(model_card(run))["tags"]
    assert ("v-jepa" in tags) == ("self-supervised" in tags) == ("V-JEPA" in paper(run)) == known


def test_verb_writes_card_and_drafts(parts, tmp_path):

    words = ["card", str(parts["run"]), "--catalog", str(parts["catalog"]), "--licence", "mit", "--out", str(tmp_path)]
    done = invoke(*words, catch_exceptions=False)
    assert done.output.split() == [str(tmp_path / "model_card.md"), str(tmp_path / "paper.md")]
    assert front((tmp_path / "model_card.md").read_text())["license"] == "mit"
    with pytest.raises(EvaluationError, match="expected a run folder"):
        model_card(tmp_path)
