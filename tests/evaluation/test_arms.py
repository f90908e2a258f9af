"""The arms of a result: what an encoder is compared with, and a joint arm that its parts cannot drag down."""

import sys
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.labels import read_labels
from octfm.encoder.embed import QUALITY, histogram, image_quality
from octfm.encoder.embeddings import joined, take_rows
from octfm.errors import EvaluationError
from octfm.evaluation.arms import covariates, make_arms, with_table
from octfm.evaluation.efficiency import label_efficiency
from octfm.evaluation.probe import probe, summary_lines
from octfm.evaluation.readouts import fit_predict
from octfm.report.words import score_rows
from octfm.store.layout import Arrays
from support.trust_cohort import SCANNERS, Cohort


@pytest.fixture(scope="module")
def cohort():
    return Cohort(90, SCANNERS[:1])


@pytest.fixture(scope="module")
def files(cohort):
    named = {"pretrained": 0.6, "random_init": 0.1, "random_init_2": 0.2, "random_init_3": 0.3, "histogram": 0.1}
    found = [cohort.embeddings(name, signal=s, noise=1.0, seed=i) for i, (name, s) in enumerate(named.items())]
    knows = cohort.embeddings("tissue_map", signal=1.2, noise=1.0, seed=9)
    return [*found, knows, replace(knows, name="image_quality", vectors=knows.vectors[:, :4])]


def test_arms_are_the_encoder_and_all_that_it_must_beat(files):
    arms = {arm.name: arm for arm in make_arms(files)}
    assert [*arms] == ["pretrained", "random_init", "histogram", "tissue_map", "map_and_encoder", "covariates"]
    assert len(arms["random_init"].draws) == 2
    assert arms["map_and_encoder"].parts == (("tissue_map", 12), ("pretrained", 12))
    assert arms["covariates"].columns == ("scanner", "age", *["clinical_site"] * 3, *["image quality"] * 4)
    few = take_rows(arms["random_init"], np.arange(5))
    assert few.vectors.shape == (5, 12) and few.draws[1].shape == (5, 12)
    assert [arm.name for arm in make_arms([files[0], files[4]])] == ["pretrained", "histogram"]


def test_a_terminal_is_told_once_why_there_are_no_intervals(files):
    few = [take_rows(e, np.flatnonzero(np.array(e.split) != "test")) for e in files[:2]]
    few = [replace(e, split=np.array(["test"] * 8 + ["train"] * (len(e.split) - 8))) for e in few]
    lines = summary_lines(probe(make_arms(few), targets=["disease"], resamples=100))
    told = [line for line in lines if "No interval" in line]
    assert len(told) == 1 and told[0].endswith("fewer than 10. --design k-fold tests every participant.")


def test_a_result_shows_every_draw_and_what_the_encoder_adds_to_the_map(files):
    result = probe(make_arms(files), targets=["disease"], resamples=100)
    rows = {r["encoder"]: r for r in result["results"] if r["metric"] == "auroc"}
    untrained = rows["random_init"]
    assert len(untrained["per_draw"]) == 3 and len(set(untrained["per_draw"])) == 3 and untrained["seeds"] == 1
    low, high = min(untrained["per_draw"]), max(untrained["per_draw"])
    assert f"; 3 draws: {low:.2f} to {high:.2f}" in score_rows([untrained], ["random_init"])[0]["cells"][0]
    assert f", 3 draws from {low:.3f} to {high:.3f}" in "\n".join(summary_lines(result))
    assert untrained["estimate"] == pytest.approx(np.mean(untrained["per_draw"]))
    alone = probe([files[0], files[1]], targets=["disease"], resamples=100)["results"]
    one = next(r for r in alone if (r["encoder"], r["metric"]) == ("random_init", "auroc"))
    assert one["estimate"] == pytest.approx(untrained["per_draw"][0])
    assert untrained["high"] - untrained["low"] > one["high"] - one["low"], "another network might have been drawn"
    pairs = {(c["a"], c["b"]): c for c in result["comparisons"] if c["metric"] == "auroc"}
    assert pairs.keys() == {("pretrained", name) for name in rows if name != "pretrained"} | {
        ("map_and_encoder", "tissue_map")
    }
    assert all(c["p_holm"] is not None for c in pairs.values())


def test_covariates_never_hold_the_answer(files):
    arm = covariates(files[0])
    ages = probe([files[0], arm], targets=["age"], resamples=100)["results"]
    score = next(r for r in ages if (r["encoder"], r["metric"]) == ("covariates", "r2"))
    assert score["estimate"] < 0.2, "age is among the covariates, but not where age is asked for"


def test_covariates_know_the_ages_and_sexes_of_the_label_table(files, tmp_path):
    """A label that age and sex explain entirely; in the scans' own table nobody's sex is stated, and other ages are."""
    people = {who: int(who[1:]) % 2 for who in files[0].participant.tolist()}
    lines = [f"{who},{('well', 'ill')[ill]},{50 + 20 * ill},{'MF'[ill]}" for who, ill in people.items()]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["participant_id,state,Age,sex", *lines]))
    arms = [files[0], covariates(files[0])]
    result = probe(arms, table, targets=["state"], resamples=100)
    rows = {r["encoder"]: r["estimate"] for r in result["results"] if r["metric"] == "auroc"}
    assert rows["pretrained"] < rows["covariates"] == 1
    assert result["embeddings"][1]["encoder"] == "scanner, site, age, sex; no retina"
    curve, _ = label_efficiency(arms, table, targets=["state"], resamples=100, fractions=[1.0], seeds=1)
    assert next(r["estimate"] for r in curve if r["encoder"] == "covariates") == 1
    table.write_text("\n".join(["participant_id,Age", *(f"{who},{int(who[1:]) * 37 % 50 + 40}" for who in people)]))
    ages = probe(arms, table, targets=["Age"], resamples=100)["results"]
    assert next(r["estimate"] for r in ages if (r["encoder"], r["metric"]) == ("covariates", "r2")) < 0.2
    first = min(people)
    table.write_text(f"participant_id,age\n{first},33\n")
    some = with_table(arms[1], read_labels(table))
    age, before = (arm.vectors[:, arm.columns.index("age")] for arm in (some, arms[1]))
    of_first = files[0].participant == first
    assert set(age[of_first]) == {33}, "others have no row"
    np.testing.assert_array_equal(age[~of_first], before[~of_first])
    twice = [f"{who},{'ab'[ill]},{sex}" for who, ill in people.items() for sex in "MF"]
    table.write_text("\n".join(["participant_id,state,sex", *twice]))
    of_visits = probe(arms, table, targets=["state"], resamples=100)["embeddings"]
    assert of_visits[1]["encoder"] == "scanner, age, site; no retina", "which of two values is it?"


def test_an_age_that_is_not_stated_is_left_to_the_probe(files):
    labels = [dict(each) for each in files[0].participant_labels]
    labels[0]["age"] = labels[1]["age"] = ""
    data = replace(files[0], participant_labels=tuple(labels))
    ages = covariates(data).vectors[:, covariates(data).columns.index("age")]
    assert np.isnan(ages[:2]).all() and np.isfinite(ages[2:]).all()


def made_up(rng, n, widths, informative):
    """Rows of parts with these widths, of which only `informative` knows the label."""
    y = rng.integers(0, 2, n)
    parts = [rng.normal(size=(n, w)) for w in widths]
    parts[informative][:, 0] += 1.5 * y
    return np.hstack(parts), y


@pytest.mark.parametrize("informative", [0, 1])
def test_a_part_that_knows_nothing_hardly_hurts_the_joint_arm(informative):
    """150 channels of noise, joined with 5 that know the label; with one penalty for all they drown it."""
    widths = [5, 150][:: -1 if informative else 1]
    own = slice(150, 155) if informative else slice(0, 5)
    people = np.array([f"P{i}" for i in range(150)])
    losses = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        (x, y), (new, truth) = (made_up(rng, n, widths, informative) for n in (150, 400))
        alone, _ = fit_predict("linear", x[:, own], y, people, new[:, own], 2, 0)
        together, strengths = fit_predict("linear", x, y, people, new, 2, 0, widths)
        as_one, _ = fit_predict("linear", x, y, people, new, 2, 0)
        losses.append([-found[np.arange(400), truth].mean() for found in (alone, together, as_one)])
        assert strengths[1 - informative] < strengths[informative]
    alone, together, as_one = np.mean(losses, axis=0)
    assert together < alone + 0.03 < as_one


@pytest.mark.parametrize("readout", ["linear", "knn", "trees"])
def test_every_readout_takes_joint_arms_numbers_and_grades(files, readout):
    arm = joined("both", [files[0], files[5]])
    result = probe([arm], targets=["disease", "cst_um"], readout=readout, resamples=50)
    found = {r["metric"]: r["estimate"] for r in result["results"]}
    assert found["auroc"] > 0.8 and found["r2"] > 0.3


def test_trees_without_scikit_learn_say_what_to_install(files, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.ensemble", None)
    with pytest.raises(EvaluationError, match="trees needs scikit-learn: pip install"):
        probe([files[0]], targets=["disease"], readout="trees", resamples=50)


@settings(max_examples=15)
@given(st.integers(0, 3), st.integers(0, 16), st.integers(0, 255))
def test_image_quality_is_finite_for_any_volume(first, upper, grey):
    """No vitreous, no image, one grey level: a number in every column."""
    voxels = np.full((1, 2, 16, 3), grey, np.uint8)
    band = np.stack([np.full((2, 3), upper), np.full((2, 3), 16)])[None]
    valid = np.stack([np.full((2, 3), first), np.full((2, 3), 16 if first < 3 else first)])[None]
    found = image_quality(Arrays(voxels, band, valid))
    assert found.shape == (1, len(QUALITY)) and np.isfinite(found).all()


def test_histogram_and_image_quality_are_those_of_a_loop_over_the_image_of_every_a_scan():
    rng = np.random.default_rng(0)
    voxels = rng.integers(0, 256, (2, 3, 40, 5), np.uint8)
    voxels[rng.random(voxels.shape) < 0.05] = 255
    first, ilm, end = (rng.integers(low, low + 10, (2, 3, 5)) for low in (0, 14, 30))
    arrays = Arrays(voxels, np.stack([ilm, ilm + 9], 1).astype(np.float32), np.stack([first, end], 1))
    for volume, shares, quality in zip(range(2), histogram(arrays), image_quality(arrays), strict=True):
        image, dark = [], []
        for bscan, ascan in np.ndindex(3, 5):
            at = volume, bscan, ascan
            image += voxels[volume, bscan, first[at] : end[at], ascan].tolist()
            dark += voxels[volume, bscan, first[at] : max(first[at], ilm[at] - 8), ascan].tolist()  # not its edge
        np.testing.assert_allclose(shares, np.histogram(image, 64, (0, 256))[0] / len(image), rtol=1e-6)
        signal, noise = np.percentile(image, 99) - np.median(dark), np.std(dark)
        expected = [signal, noise, signal / noise, image.count(255) / len(image)]
        np.testing.assert_allclose(quality, expected, rtol=1e-5)


def test_image_quality_knows_noise_from_signal():
    rng = np.random.default_rng(0)
    band, valid = (np.stack([np.full((4, 32), a), np.full((4, 32), 64)])[None] for a in (32, 0))
    quiet, loud = np.full((1, 4, 64, 32), 20.0), np.full((1, 4, 64, 32), 20.0)
    for voxels, noise in ((quiet, 4), (loud, 15)):
        voxels[:, :, 32:] = 160
        voxels += noise * rng.normal(size=voxels.shape)
    calm, noisy = (image_quality(Arrays(v.clip(0, 255).astype(np.uint8), band, valid))[0] for v in (quiet, loud))
    assert noisy[1] > 3 * calm[1] and calm[2] > 2 * noisy[2]
