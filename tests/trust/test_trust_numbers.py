"""Numbers of the trust report are those that scikit-learn, SciPy or a loop over scans finds by another route."""

import csv
import io
from collections import defaultdict
from dataclasses import replace
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, logit
from scipy.stats import f_oneway
from sklearn.calibration import calibration_curve
from sklearn.metrics import r2_score, roc_auc_score
from sklearn.metrics.pairwise import cosine_similarity
from sklearn.preprocessing import StandardScaler

from octfm.encoder.embeddings import from_columns, of_store, take_rows
from octfm.evaluation.metrics import ECE_BINS
from octfm.evaluation.probe import predict
from octfm.evaluation.scoring import Predictions
from octfm.evaluation.statistics import MIN_PARTICIPANTS
from octfm.evaluation.tissue_map import tissue_map
from octfm.trust.calibration import _ece_if_calibrated, calibration
from octfm.trust.copies import _chance_threshold, _exact, _fine_detail, copies, same_speckle
from octfm.trust.failures import failures
from octfm.trust.leaderboard import ranked, to_csv
from octfm.trust.neighbours import nearest_scans, neighbours
from octfm.trust.same_eye import _ranks, same_eye
from octfm.trust.scanners import domains, leave_one_scanner_out, training_sets
from octfm.trust.study import Study, make_study
from octfm.trust.subgroups import subgroups
from support.trust_cohort import SCANNERS, Cohort


class Judged:
    """A study, and its test predictions by acquisition, with what the cohort says about each."""

    def __init__(self, cohort: Cohort):
        run = cohort.embeddings("run", signal=0.6, noise=1.0)
        self.study = make_study([run], {"run": "run"}, targets=["disease", "cst_um"], resamples=20)
        self.facts = {r["acquisition"]: r for r in cohort.rows}
        self.ill = {r["participant"]: r["ill"] for r in cohort.rows}
        self.um = {(r["participant"], r["laterality"]): round(r["cst"], 3) for r in cohort.rows}
        self.said = {}
        for task in self.study.tasks:
            found = self.study.predictions(task, run)
            names = run.acquisition[task.cases.rows[found.rows]].tolist()
            if found.log_prior is not None:
                self.prior = found.log_prior[0, 1] - found.log_prior[0, 0]
            value = found.value if found.log_prior is None else found.value + found.log_prior
            self.said[task.name] = dict(zip(names, value[:, -1] - value[:, 0] * (value.shape[1] > 1), strict=True))

    def eyes(self, target, keep=lambda r: True):
        """(participant, eye) → what was said of each of its scans that are kept."""
        found = defaultdict(list)
        for name, said in self.said[target].items():
            r = self.facts[name]
            if keep(r):
                found[r["participant"], r["laterality"]].append(said)
        return found

    def odds(self, keep=lambda r: True):
        """Participant → log-odds of disease: those of the eye where their mean over scans is higher."""
        worst = defaultdict(lambda: -np.inf)
        for (who, _), said in self.eyes("disease", keep).items():
            worst[who] = max(worst[who], float(np.mean(said)))
        return worst

    def auroc(self, keep=lambda r: True):
        odds = self.odds(keep)
        return roc_auc_score([self.ill[who] for who in odds], [*odds.values()])

    def fewest(self, target, keep):
        """Participants of the class that has the fewest."""
        people = {r["participant"] for name in self.said[target] if keep(r := self.facts[name])}
        ill = sum(self.ill[who] for who in people)
        return min(ill, len(people) - ill) if target == "disease" else len(people)

    def mae(self, keep=lambda r: True):
        return np.mean([abs(np.mean(said) - self.um[eye]) for eye, said in self.eyes("cst_um", keep).items()])


@pytest.fixture(scope="module")
def judged():
    """Some people have no site, two no label, and a few are in a study of their own; some eyes were scanned twice."""
    cohort = Cohort(150, SCANNERS[:2])
    for i, r in enumerate([*cohort.rows]):
        r["labels"]["study"] = "pilot" if int(r["participant"][1:]) % 30 < 3 else "main"
        if r["participant"] in ("P0001", "P0003"):
            r["labels"] |= {"diagnosis": "", "cst_um": ""}
        if int(r["participant"][1:]) % 7 == 0:
            r["labels"]["clinical_site"] = ""
        if i % 5 == 0:
            cohort.rows.append(r | {"acquisition": f"{r['acquisition']}.again"})
    return Judged(cohort)


def age_band(r):
    age = int(r["labels"]["age"])
    return "under 60" if age < 60 else "75 and older" if age >= 75 else "60 to under 75"


GROUPS = {
    "site": lambda r: r["labels"]["clinical_site"],
    "age": age_band,
    "eye": lambda r: {"R": "right", "L": "left"}[r["laterality"]],
    "scanner": lambda r: r["scanner"],
    "study": lambda r: r["labels"]["study"],
}


def test_a_group_is_scored_as_if_it_were_alone_and_compared_with_all_others_of_a_known_group(judged):
    found = subgroups(judged.study, ["study"], age_bands=(60, 75))
    for row in found["results"]:
        of = GROUPS[row["group"]]
        measure = judged.auroc if row["target"] == "disease" else judged.mae
        own = [r for n in judged.said[row["target"]] if of(r := judged.facts[n]) == row["value"]]
        assert row["estimate"] == pytest.approx(measure(lambda r, of=of, row=row: of(r) == row["value"]))
        assert (row["n_acquisitions"], row["n_participants"]) == (len(own), len({r["participant"] for r in own}))
    assert {row["value"] for row in found["results"]} == {of(r) for of in GROUPS.values() for r in judged.facts.values()} - {""}  # fmt: skip
    for c in found["comparisons"]:
        of, measure = GROUPS[c["group"]], judged.auroc if c["target"] == "disease" else judged.mae
        inside, outside = (
            lambda r, of=of, c=c: of(r) == c["value"],
            lambda r, of=of, c=c: of(r) not in (c["value"], ""),
        )
        if (
            judged.fewest(c["target"], inside) < MIN_PARTICIPANTS
            or judged.fewest(c["target"], outside) < MIN_PARTICIPANTS
        ):
            assert c["difference"] is None
        else:
            assert c["difference"] == pytest.approx(measure(inside) - measure(outside))
        if c["verdict"] != "inconclusive":
            assert (c["verdict"] == "better") == ((c["difference"] > 0) == (c["target"] == "disease"))
        assert c["against"] in {"the others", *map(of, judged.facts.values())} - {c["value"]}
    assert sum(c["difference"] is not None for c in found["comparisons"]) > 6


def test_the_worst_cases_are_those_of_the_largest_errors_each_with_its_worst_scan(judged):
    found = failures(judged.study)
    wrong = sorted((-abs(np.mean(said) - judged.um[eye]), eye) for eye, said in judged.eyes("cst_um").items())[:8]
    shown = [judged.facts[f["acquisition"]] for f in found if f["target"] == "cst_um"]
    assert [(r["participant"], r["laterality"]) for r in shown] == [eye for _, eye in wrong]
    for f, r, (error, eye) in zip((f for f in found if f["target"] == "cst_um"), shown, wrong, strict=True):
        assert f["error"] == pytest.approx(-error)
        scans = [n for n in judged.said["cst_um"] if judged.facts[n]["acquisition"].startswith(r["acquisition"][:10])]
        assert f["acquisition"] == max(scans, key=lambda n, eye=eye: abs(judged.said["cst_um"][n] - judged.um[eye]))
    doubt = {who: 1 / (1 + np.exp(odds if judged.ill[who] else -odds)) for who, odds in judged.odds().items()}
    shown = [f for f in found if f["target"] == "disease"]
    assert [judged.facts[f["acquisition"]]["participant"] for f in shown] == sorted(doubt, key=lambda w: -doubt[w])[:8]
    assert [f["error"] for f in shown] == pytest.approx(sorted(doubt.values(), reverse=True)[:8])
    for f in shown:
        who = judged.facts[f["acquisition"]]["participant"]
        scans = {n: said for n, said in judged.said["disease"].items() if judged.facts[n]["participant"] == who}
        assert f["acquisition"] == (min if judged.ill[who] else max)(scans, key=scans.__getitem__)


def test_a_reliability_curve_is_that_of_scikit_learn(judged):
    odds = judged.odds()
    share, said = calibration_curve([judged.ill[who] for who in odds], expit([*odds.values()]), n_bins=ECE_BINS)
    curve = calibration(judged.study)["results"][0]["curve"]
    np.testing.assert_allclose([[each["observed"], each["predicted"]] for each in curve], np.stack([share, said], 1))


def test_true_probabilities_are_called_wrong_in_few_cohorts(judged):
    task, run = judged.study.tasks[0], judged.study.encoders[0]
    rows = judged.study.predictions(task, run).rows
    _, first, member = np.unique(task.cases.participant[rows], return_index=True, return_inverse=True)
    ill = np.array([judged.ill[who] for who in task.cases.participant[rows][first]])
    wrong = 0
    for seed in range(12):
        # Log-odds whose distribution given the label makes them true: N(±d²/2, d²) and the prevalence.
        odds = np.random.default_rng(seed).normal(np.where(ill, 0.5, -0.5), 1.0) + logit(ill.mean())
        value = odds[member, None] / 2 * np.array([-1, 1])
        said = {(task.name, run.name): Predictions(rows, value, np.zeros_like(value))}
        found = calibration(replace(judged.study, tasks=(task,), resamples=2, _predictions=said))["results"][0]
        wrong += found["verdict"] != "no miscalibration shown"
    assert wrong <= 2


@pytest.mark.parametrize("eyes", [1, 2])
def test_the_error_of_true_probabilities_is_that_of_a_loop_over_cohorts(eyes):
    """Both eyes of a person are right or wrong together, so that their error is that of one eye."""
    rng = np.random.default_rng(1)
    sure, person = np.tile(rng.uniform(0.5, 1, 30), eyes), np.tile(np.arange(30), eyes)
    found = _ece_if_calibrated(sure, person, 0)
    errors, gaps = [], []
    for _ in range(1500):
        right = rng.random(30) < sure[:30]
        edges = np.clip((sure[:30] * ECE_BINS).astype(int), 0, ECE_BINS - 1)
        errors.append(sum(abs((sure[:30] - right)[edges == b].sum()) for b in range(ECE_BINS)) / 30)
        gaps.append(abs(sure[:30].mean() - right.mean()))
    expected = {"mean": np.mean(errors), "high": np.quantile(errors, 0.975), "gap": np.quantile(gaps, 0.95)}
    assert found == pytest.approx(expected, rel=0.06)


def similarity(judged):
    """bool [N] whether a scan was trained on, and the cosine of each pair, standardised by the training scans."""
    data = judged.study.data
    trained = np.array([split != "test" for split in data.split])
    x = StandardScaler().fit(data.vectors[trained]).transform(data.vectors)
    return trained, cosine_similarity(x)


def test_neighbours_share_a_label_or_a_scanner_as_often_as_a_loop_over_scans_says(judged):
    trained, alike = similarity(judged)
    facts = [judged.facts[n] for n in judged.study.data.acquisition.tolist()]
    kinds = {"disease": lambda r: r["labels"]["diagnosis"], "scanner": lambda r: r["scanner"]}
    shares = defaultdict(list)
    for i, r in enumerate(facts):
        if not trained[i]:
            near = sorted(np.flatnonzero(trained), key=lambda j, i=i: -alike[i, j])[:5]
            for name, kind in kinds.items():
                if kind(r):
                    shares[name].append(np.mean([kind(facts[j]) == kind(r) for j in near]))
    rows = {row["target"]: row for row in neighbours(judged.study)["results"]}
    assert {name: row["estimate"] for name, row in rows.items()} == pytest.approx({n: np.mean(s) for n, s in shares.items()})  # fmt: skip
    assert rows["scanner"]["n_queries"] == sum(~trained)
    # Intervals are over participants, of whom some have more scans than others.
    person = np.array(
        [r["participant"] for r, known in zip(facts, trained, strict=True) if not known and r["labels"]["diagnosis"]]
    )
    _, member = np.unique(person, return_inverse=True)
    sums, counts = np.bincount(member, weights=shares["disease"]), np.bincount(member)
    drawn = np.random.default_rng(0).integers(0, len(sums), (3000, len(sums)))
    low, high = np.quantile(sums[drawn].sum(1) / counts[drawn].sum(1), (0.025, 0.975))
    row = neighbours(replace(judged.study, resamples=1500))["results"][0]
    assert row["high"] - row["low"] == pytest.approx(high - low, rel=0.12)


def test_an_eye_is_found_on_another_scanner_at_the_rank_that_a_loop_over_scans_says(judged):
    trained, alike = similarity(judged)
    facts = [judged.facts[n] for n in judged.study.data.acquisition.tolist()]
    rng, ranks, people_ranks, sizes, drawn = np.random.default_rng(0), [], [], [], []
    for i in np.flatnonzero(~trained):
        r = facts[i]
        (other,) = {*SCANNERS[:2]} - {r["scanner"]}
        there = [j for j in np.flatnonzero(~trained) if facts[j]["scanner"] == other]
        same = [j for j in there if (facts[j]["participant"], facts[j]["laterality"]) == (r["participant"], r["laterality"])]  # fmt: skip
        person = [j for j in there if facts[j]["participant"] == r["participant"]]
        for own, found in ((same, ranks), (person, people_ranks)):
            best = max(alike[i, j] for j in own)
            found.append(1 + sum(alike[i, j] > best + 1e-12 for j in there if j not in own))
        sizes.append(len(there) - len(same) + 1)
        # Where random vectors would find the first of the eye's scans.
        own, others = np.split(rng.random((100, len(there))), [len(same)], axis=1)
        drawn.append(1 + (others > own.max(axis=1, keepdims=True)).sum(axis=1))
    (row,) = same_eye(judged.study)["retrieval"]
    assert row["n_queries"] == len(ranks)
    assert row["reciprocal_rank"]["estimate"] == pytest.approx(np.mean(1 / np.array(ranks)))
    assert row["first"]["estimate"] == pytest.approx(np.mean(np.array(ranks) == 1))
    assert row["same_participant_first"]["estimate"] == pytest.approx(np.mean(np.array(people_ranks) == 1))
    assert (row["median_rank"], row["median_gallery"]) == (np.median(ranks), np.median(sizes))
    assert row["chance"]["first"] == pytest.approx(np.mean(np.array(drawn) == 1), abs=0.0025)
    assert row["chance"]["reciprocal_rank"] == pytest.approx(np.mean(1 / np.array(drawn)), abs=0.0025)
    assert row["chance"]["median_rank"] == pytest.approx(np.median(drawn), abs=2)


def test_vectors_that_are_all_alike_find_an_eye_in_the_middle_of_the_gallery(judged):
    run = judged.study.encoders[0]
    (row,) = same_eye(replace(judged.study, encoders=(replace(run, vectors=np.ones_like(run.vectors)),)))["retrieval"]
    assert row["median_rank"] == (row["median_gallery"] + 1) / 2


def kinds_of(people, scans, width):
    """A study of so many people and scans of each, whose vectors are of four kinds, and the kind of each scan."""
    who = np.tile(np.array([f"p{n:03d}" for n in range(people)]), scans)
    kind = np.tile(np.arange(people) % 4, scans)
    scanner = np.repeat([f"s{n}" for n in range(scans)], people)
    data = SimpleNamespace(participant=who, eye_id=who, scanner=scanner)
    study: Any = SimpleNamespace(data=data, tested=np.ones(len(who), bool), scanners=("s0", "s1"))
    encoder: Any = SimpleNamespace(vectors=np.random.default_rng(width).normal(size=(4, width))[kind])
    return study, encoder, kind


@pytest.mark.parametrize("width", [12, 100])
def test_equal_vectors_are_equally_near_though_their_products_differ_in_the_last_bit(width):
    study, encoder, kind = kinds_of(37, 2, width)
    ranks = _ranks(study, encoder, np.arange(74), [(n, "s1") for n in range(37)])[0]
    assert ranks.tolist() == [1 + (np.sum(kind[:37] == own) - 1) / 2 for own in kind[:37]]
    study, encoder, kind = kinds_of(331, 1, width)
    for row, nearest in zip(*nearest_scans(study, encoder)[:2], strict=True):
        alike = np.flatnonzero(kind == kind[row])
        assert nearest.tolist() == alike[alike != row][:5].tolist(), "the first of its kind"


def changed(study, keep, vectors, **more):
    """A study of the rows that are kept, with other vectors."""
    run = study.encoders[0]
    own = {n: getattr(run, n)[keep] for n in ("acquisition", "participant", "eye_id", "scanner")}
    own |= {n: tuple(np.array(getattr(run, n), object)[keep]) for n in ("split", "participant_labels", "laterality")}
    run = replace(run, vectors=vectors[keep], **(own | more))
    return make_study([run], {"run": "run"}, targets=["disease", "cst_um"], resamples=200)


def test_a_fellow_eye_that_looks_alike_narrows_no_interval_of_agreement(judged):
    run = judged.study.encoders[0]
    place = {name: i for i, name in enumerate(run.acquisition.tolist())}
    right = np.array([side == "R" for side in run.laterality])
    # Scans that have no twin, because only one eye was scanned again, stay out.
    twin = [place.get(name.replace(".L.", ".R.")) for name in run.acquisition.tolist()]
    back = [place.get(name.replace(".R.", ".L.")) for name in run.acquisition.tolist()]
    paired = np.array([None not in pair for pair in zip(twin, back, strict=True)])
    vectors = run.vectors[[i if t is None else t for i, t in enumerate(twin)]]
    one, two = (same_eye(changed(judged.study, keep, vectors))["agreement"][0] for keep in (paired & right, paired))
    assert two["n_eyes"] == 2 * one["n_eyes"]
    assert two["high"] - two["low"] > 0.85 * (one["high"] - one["low"])


def test_scans_of_an_unknown_eye_change_no_agreement_and_no_retrieval(judged):
    run = judged.study.encoders[0]
    keep = np.array([not (s == "test" and w.endswith("1")) for s, w in zip(run.split, run.participant, strict=True)])
    without, unknown = (
        same_eye(changed(judged.study, kept, run.vectors, **more))
        for kept, more in (
            (keep, {}),
            (np.ones(len(keep), bool), {"laterality": tuple(np.where(keep, run.laterality, None))}),
        )
    )
    for part in ("agreement", "pairs", "retrieval"):
        assert unknown[part] == without[part] != []


def test_scanners_agree_on_an_eye_as_analysis_of_variance_says(judged):
    found = same_eye(judged.study)
    by_scanner = [judged.eyes("cst_um", lambda r, s=s: r["scanner"] == s) for s in SCANNERS[:2]]
    values = np.array([[np.mean(each[eye]) for each in by_scanner] for eye in by_scanner[0]])
    f = f_oneway(*values).statistic
    row = next(r for r in found["agreement"] if r["target"] == "cst_um")
    assert row["estimate"] == pytest.approx((f - 1) / (f + 1)) and row["n_eyes"] == len(values)
    ill, pair = found["pairs"]
    odds = [judged.eyes("disease", lambda r, s=s: r["scanner"] == s) for s in SCANNERS[:2]]
    assert np.mean([m for m, _ in ill["points"]]) == pytest.approx(
        np.mean([np.mean(said) for each in odds for said in each.values()]) - judged.prior
    )
    apart = values[:, 0] - values[:, 1]
    assert (pair["a"], pair["b"]) == SCANNERS[:2]
    np.testing.assert_allclose(sorted(pair["points"]), sorted([m, d] for m, d in zip(values.mean(1), apart, strict=True)))  # fmt: skip
    assert pair["bland_altman"]["bias"]["estimate"] == pytest.approx(apart.mean())


@pytest.fixture(scope="module")
def uneven():
    """A scanner that two people in three have seen, and one for everybody."""
    cohort = Cohort(150, SCANNERS[:2])
    cohort.rows = [r for r in cohort.rows if r["scanner"] == SCANNERS[0] or (int(r["participant"][1:]) // 3) % 3]
    return Judged(cohort).study


def test_probes_of_an_uncommon_and_a_common_scanner_learn_from_equally_many_people(uneven):
    for task in uneven.tasks:
        person, scanner = task.cases.participant, uneven.data.scanner[task.cases.rows]
        trained = np.array([uneven.data.split[row] != "test" for row in task.cases.rows])
        for here in SCANNERS[:2]:
            sets = training_sets(task, uneven, here)
            on = {False: np.flatnonzero(trained & (scanner != here)), True: np.flatnonzero(trained & (scanner == here))}
            fewer = min(len(set(person[own])) for own in on.values())
            for regime, is_here in (("within", True), ("left_out", False)):
                draws = [set(r.train.tolist()) for (r,) in sets[regime]]
                # The share of each class, or of each fifth of a number, is rounded up.
                assert all(fewer <= len(set(person[[*own]])) <= fewer + 5 for own in draws)
                assert all(own <= set(on[is_here].tolist()) for own in draws)
                reduced = len(set(person[on[is_here]])) > fewer
                assert len(draws) == (3 if reduced else 1) and all(a != b for a, b in combinations(draws, 2))
            assert [set(r.train.tolist()) for (r,) in sets["left_out_all"]] == [set(on[False].tolist())]
            assert [set(r.train.tolist()) for (r,) in sets["every"]] == [{*on[False].tolist(), *on[True].tolist()}]


def test_scores_of_a_scanner_are_of_probes_of_their_own_training_sets(uneven):
    """The drop is that of the others, and the mean is over scanners."""
    task, run = uneven.tasks[1], uneven.encoders[0]
    noisy = replace(run, name="noisy", vectors=run.vectors + np.random.default_rng(0).normal(size=run.vectors.shape))
    found = leave_one_scanner_out(replace(uneven, tasks=(task,), encoders=(run, noisy)))
    score = {(r["encoder"], r["scanner"], r["regime"]): r["estimate"] for r in found["results"]}
    for (name, scanner, regime), estimate in score.items():
        if scanner is None:
            assert estimate == pytest.approx(np.mean([score[name, each, regime] for each in SCANNERS[:2]]))
            continue
        r2 = []
        for draw, rounds in enumerate(training_sets(task, uneven, scanner)[regime]):
            said = predict(task.cases, rounds, run if name == "run" else noisy, "linear", draw)
            _, eye = np.unique(task.cases.unit[said.rows], return_inverse=True)
            true, mean = (np.bincount(eye, weights=of) / np.bincount(eye) for of in (task.cases.label[said.rows], said.value[:, 0]))  # fmt: skip
            r2.append(r2_score(true, mean))
        assert estimate == pytest.approx(np.mean(r2)), (name, scanner, regime)
    for c in found["comparisons"]:
        at = c["encoder"], c["scanner"]
        assert c["difference"] == pytest.approx(score[*at, "left_out"] - score[*at, "within"])


def test_two_runs_differ_on_each_scanner_as_scikit_learn_says(judged):
    run = judged.study.encoders[0]
    other = replace(run, name="other", vectors=run.vectors + np.random.default_rng(0).normal(size=run.vectors.shape))
    study = make_study([run, other], {"run": "run", "other": "other run"}, targets=["cst_um"], resamples=20)
    (task,) = study.tasks
    found = {c["scanner"]: c for c in domains(study)["comparisons"]}
    assert [*found] == [None, *SCANNERS[:2]]
    for scanner, c in found.items():
        scores = []
        for encoder in (run, other):
            said, eyes = study.predictions(task, encoder), defaultdict(list)
            for name, value in zip(run.acquisition[task.cases.rows[said.rows]].tolist(), said.value[:, 0], strict=True):
                if scanner in (None, judged.facts[name]["scanner"]):
                    eyes[judged.facts[name]["participant"], judged.facts[name]["laterality"]].append(value)
            scores.append(r2_score([judged.um[eye] for eye in eyes], [np.mean(own) for own in eyes.values()]))
        assert c["difference"] == pytest.approx(scores[0] - scores[1])


def test_people_of_pretraining_are_tested_in_folds_only_where_that_is_allowed(judged):
    """Under whatever spelling of their ids, of which pretraining knew one."""
    run = judged.study.encoders[0]
    spelt = np.where(run.scanner == SCANNERS[0], np.char.replace(run.participant, "P", "p-"), run.participant)
    labels = tuple({"grade": str(int(who[1:]) % 3)} for who in run.participant)
    run = replace(run, split=(None,) * len(spelt), participant=spelt, participant_labels=labels)
    person = np.array([int(who.strip("Pp-")) for who in spelt])
    seen = (person < 50) & (spelt != np.char.lower(spelt))
    for allowed in (False, True):
        study = make_study([run], {"run": "run"}, targets=["grade"], seen=seen, allow_seen=allowed, resamples=20)
        assert np.array_equal(study.tested, (person >= 50) | allowed) and np.array_equal(study.seen, person < 50)
    assert study.tasks[0].metric == "kappa", "which knows the order of grades"


def test_the_tissue_map_is_the_mean_of_every_cell_in_micrometres_whatever_the_order(tmp_path):
    rng = np.random.default_rng(0)

    def uneven(index, prepared):
        band, valid = prepared.band.copy(), prepared.valid.copy()
        band[1] = (band[0] + rng.uniform(3, 20, band[0].shape)).clip(0, 64)
        valid[1, rng.random(valid[0].shape) < 0.3] = 0
        valid[1, index] = 0  # cells without image
        return replace(prepared, band=band, valid=valid)

    store = Cohort(2, SCANNERS[:2]).store(tmp_path / "prepared", uneven)
    data = take_rows(of_store(store), rng.permutation(len(store)))
    place = {row.acquisition: row.index for row in store.rows}
    for name, found in zip(data.acquisition.tolist(), tissue_map(store, data).vectors, strict=True):
        arrays = store.read([place[name]])
        upper, lower = (np.where(arrays.valid[0, 1] > 0, edge, np.nan) * 30.0 for edge in arrays.band[0].astype(float))
        expected = []
        for surface in (lower - upper, upper - np.nanmean(upper)):
            cells = [surface[i // 8, i % 8 * 4 : i % 8 * 4 + 4] for i in range(64)]
            mean = [np.nanmean(cell if np.isfinite(cell).any() else surface) for cell in cells]
            expected += [*mean, np.nanstd(surface)]
        np.testing.assert_allclose(found, expected, atol=1e-3)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(st.sampled_from(["", "a", "b"]), st.sampled_from("xyz"), st.booleans(), st.sampled_from("PQR")),
        max_size=9,
    )
)
def test_a_copy_is_a_pair_of_one_fingerprint_of_a_tested_scan_and_another_part_or_person(scans):
    rows: Any = [SimpleNamespace(pixels=pixels, checksum=checksum) for pixels, checksum, *_ in scans]
    tested = [own for *_, own, _ in scans]
    data = {"acquisition": range(len(scans)), "participant": [who for *_, who in scans]}
    data |= {"split": tested, "scanner": tested}
    study: Any = SimpleNamespace(tested=tested, data=SimpleNamespace(**data))
    expected = {
        (i, j)
        for (i, one), (j, other) in combinations(enumerate(scans), 2)
        if (one[0] == other[0] != "" or one[1] == other[1])
        and (one[2] or other[2])
        and (one[2] != other[2] or one[3] != other[3])
    }
    found = [tuple(map(int, pair["acquisitions"])) for pair in _exact(rows, study)]
    assert len(found) == len(expected) and {*found} == expected


@pytest.mark.parametrize(("alike", "found"), [((0, 1), 0), ((0, 2), 1)])
def test_scans_of_a_person_are_no_copies_however_scanners_spell_the_id(alike, found):
    rng, names = np.random.default_rng(0), ["a", "b", "c", "d"]
    columns: dict[str, list] = {"acquisition": names, "participant": ["P1", "p1", "P2", "P3"], "eye_id": names}
    columns |= {"scanner": ["x"] * 4, "laterality": ["R"] * 4, "split": ["test"] * 3 + ["train"]}
    columns["participant_labels"] = [{}] * 4
    data, tested = from_columns("run", "run", {}, columns, rng.normal(size=(4, 3))), np.array([True] * 3 + [False])
    study = Study((data,), {"run": "run"}, (), (), None, "recommended_split", ~tested, tested, {})
    rows = [
        SimpleNamespace(index=i, acquisition=name, pixels="same" if i in alike else name, checksum=name)
        for i, name in enumerate(names)
    ]
    voxels, band = rng.integers(0, 255, (4, 3, 40, 30)).astype(np.uint8), np.zeros((1, 2, 3, 30))
    band[:, 1] = 40
    store: Any = SimpleNamespace(rows=rows, read=lambda at: SimpleNamespace(voxels=voxels[at], band=band))
    part = copies(study, store)
    assert [pair["same_participant"] for pair in part["exact"]] == [False] * found and part["near"] == []


@settings(max_examples=25)
@given(st.integers(-6, 6), st.integers(-6, 6), st.booleans(), st.integers(0, 99))
def test_speckle_is_recognised_up_to_four_rows_and_columns_away_and_mirrored(down, right, mirrored, seed):
    whole = np.random.default_rng(seed).normal(size=(3, 60, 52)).astype(np.float32)
    one, other = whole[:, 6:54, 6:46], whole[:, 6 + down : 54 + down, 6 + right : 46 + right]
    found = same_speckle(one, other[:, :, ::-1] if mirrored else other)
    assert (found > 0.5) == (max(abs(down), abs(right)) <= 4)


def test_speckle_is_compared_within_the_retina_of_the_middle_bscans():
    rng = np.random.default_rng(0)
    voxels, band = rng.integers(0, 255, (1, 7, 40, 30)).astype(np.uint8), np.zeros((1, 2, 7, 30))
    band[:, 0], band[:, 1] = 10, 25

    def detail(pixels):
        arrays = SimpleNamespace(voxels=pixels, band=band)
        return _fine_detail(SimpleNamespace(read=lambda _: arrays), SimpleNamespace(index=0))  # pyright: ignore[reportArgumentType]

    found = detail(voxels)
    assert found.shape == (3, 40, 30) and not found[:, :10].any() and not found[:, 25:].any()
    assert (found[:, 10:25] != 0).mean() > 0.99 and found.std() == pytest.approx(1, rel=1e-5)
    other = voxels.copy()
    other[0, [0, 1, 5, 6]], other[:, :, :5], other[:, :, 30:] = 0, 9, 200  # B-scans further out, vitreous, choroid
    np.testing.assert_array_equal(detail(other), found)


def test_what_is_chance_comes_from_pairs_of_different_people():
    """Two scans of one person are alike for other reasons."""
    own = np.random.default_rng(1).normal(size=(4, 3, 40, 30))

    def threshold(*people):
        data = SimpleNamespace(participant=np.array(people), scanner=np.array(["x"] * len(people)))
        study = SimpleNamespace(seed=0, data=data)
        detail = [own[ord(person) - ord("a")] for person in people]
        return _chance_threshold(study, lambda i: detail[i], "x", "x")  # pyright: ignore[reportArgumentType]

    assert threshold("a", "a", "a") == 0
    assert 0 < threshold("a", "a", "b", "c", "d") < 0.2


def test_a_leaderboard_lists_the_best_first_the_unmeasured_last_and_each_metrics_own_difference():
    """R² of two entries is below 0, and still above what could not be measured."""
    score = {"a": -0.2, "b": 0.6, "c": None, "d": -0.5}
    row = {"what": "frozen", "target": "cst_um", "low": None, "high": None, "n_test_participants": 9, "seeds": 1}
    gaps = {("mae", "b"): 7.0, ("r2", "b"): -0.8, ("r2", "d"): 0.3}
    result = {
        "results": [row | {"encoder": n, "metric": m, "estimate": score[n]} for n in score for m in ("mae", "r2")],
        "comparisons": [{"metric": m, "b": n, "difference": gap} for (m, n), gap in gaps.items()],
    }
    assert [row["encoder"] for row in ranked(result)] == ["b", "a", "d", "c"]
    lines = list(csv.DictReader(io.StringIO(to_csv(result))))
    assert [line["entry"] for line in lines[::2]] == ["b", "a", "d", "c"]
    found = {(line["metric"], line["entry"]): float(line["difference"]) for line in lines if line["difference"]}
    assert found == gaps
