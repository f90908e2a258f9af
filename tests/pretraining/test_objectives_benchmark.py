"""benchmarks/objectives.py: the table says what was planted in it, and a run that was killed goes on where it was."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from support import BENCHMARKS

sys.path.insert(0, str(BENCHMARKS))

import objectives_table as table
from objectives_cohort import preprocessing_of, scans
from octfm.volume.resampling import resample, seen_rows

PEOPLE, TWICE = 240, 60
"""Test participants, and those of them who are on the held-out scanner, too."""


def planted(name, seed, skill, drop=0.0):
    """An arm whose probes find severity with this much skill, and with less of it on the held-out scanner."""
    truth = np.random.default_rng(5).normal(size=PEOPLE)
    rng = np.random.default_rng((seed, 1))
    truth, held_out = np.concatenate([truth, truth[:TWICE]]), np.arange(PEOPLE + TWICE) >= PEOPLE
    found = skill * truth + (1 - skill) * rng.normal(size=len(truth))
    found[held_out] = (1 - drop) * found[held_out] + drop * rng.normal(size=TWICE)
    classes = ["drusen", "healthy"]
    ill = truth > 0
    return {
        "arm": name, "says": "planted", "seed": seed, "steps": 3, "effective_rank": 5.0, "volumes_per_s": 1.0,
        "readout": "all tissue tokens, mean",
        "probes": {
            "participant": [f"P{i % PEOPLE}" for i in range(len(truth))],
            "held_out": held_out.tolist(),
            "disease": {"truth": ill.tolist(), "score": found.tolist()},
            "diagnosis": {"classes": classes, "truth": [classes[not x] for x in ill], "log_p": [[x, -x] for x in found]},
            "scanner": {"classes": classes, "truth": [classes[i % 2] for i in range(len(truth))], "log_p": [[0.0, 0.0]] * len(truth)},
            "severity": {"truth": truth.tolist(), "predicted": found.tolist()},
            "cst_um": {"truth": truth.tolist(), "predicted": found.tolist()},
        },
        "dense": {"surfaces": ["ilm"], "participant": [f"P{i}" for i in range(40)], "um": [[10 * (1 - skill)]] * 40},
    }  # fmt: skip


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(table, "RESAMPLES", 300)

    def write(*arms):
        folder = tmp_path / "arms"
        folder.mkdir(exist_ok=True)
        for file in folder.glob("*.json"):
            file.unlink()
        for arm in arms:
            (folder / f"{arm['arm']}-{arm['seed']}.json").write_text(json.dumps(arm))
        text = table.write_table(tmp_path).read_text()
        gains = json.loads((tmp_path / "objectives.json").read_text())["gains"]
        return text, {(g["arm"], g["metric"]): g for g in gains}

    return write


@pytest.mark.slow
def test_a_better_arm_is_told_from_an_equal_one_and_from_a_worse_one(out):
    text, gains = out(
        *[planted("ours", seed, 0.6) for seed in range(3)],
        *[planted("equal", seed, 0.601) for seed in range(3)],
        *[planted("worse", seed, 0.3, drop=0.6) for seed in range(3)],
        *[planted("better", seed, 0.8) for seed in range(3)],
    )
    for metric in ("disease AUROC", "severity R²", "surfaces µm"):
        assert gains["worse", metric]["low"] > 0 > gains["better", metric]["high"], metric
        assert -0.05 < gains["equal", metric]["low"] <= gains["equal", metric]["high"] < 0.05
    assert gains["worse", "disease, drop"]["gain_of_ours"] > 0.05, "ours falls less on a scanner nobody has seen"
    against = {
        line.split("|")[1].strip(): line for line in text[text.index("Gain of") :].splitlines() if line.startswith("| ")
    }
    assert against["worse"].count("**no loss**") == against["equal"].count("**no loss**") == 4, (
        "the planned metrics; others have no margin"
    )
    assert "**no loss**" not in against["better"]
    assert "240 test participants, one eye each; 60 of them on the held-out scanner" in text


@pytest.mark.slow
def test_arms_are_compared_over_the_seeds_that_both_have(out):
    """Seed 7 of ours is far better; an arm that has not come to it must not be held against it."""
    _, gains = out(planted("ours", 0, 0.5), planted("ours", 7, 0.9), planted("other", 0, 0.5))
    assert gains["other", "disease AUROC"]["gain_of_ours"] == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_seeds_that_differ_widen_an_interval(out):
    def width(skills):
        _, gains = out(
            *[planted("ours", seed, skill) for seed, skill in enumerate(skills)],
            *[planted("other", seed, 0.5) for seed in range(3)],
        )
        gain = gains["other", "disease AUROC"]
        return gain["high"] - gain["low"]

    assert width((0.2, 0.5, 0.8)) > 1.5 * width((0.55, 0.5, 0.45))


def test_arms_that_read_other_tokens_are_not_put_into_one_table(out):
    with pytest.raises(SystemExit, match=r"read from the tokens of its training.*cannot be compared"):
        out(planted("ours", 0, 0.5), planted("old", 0, 0.5) | {"readout": "the tokens of its training"})


def test_without_an_arm_the_table_says_what_to_do(tmp_path):
    with pytest.raises(SystemExit, match="no arm is finished yet"):
        table.write_table(tmp_path)


def test_native_bscans_are_neither_registered_nor_averaged_with_another():
    volume = next(scans(1, 1, 0)).acquire()[0]
    placed = preprocessing_of("native")(volume).transform
    assert placed.scale[0] == 1 and placed.origin[0] == 4 and not any(placed.displacement)
    seen = seen_rows(volume.voxels)
    for changed in (4, 11, 19):
        voxels = volume.voxels.copy()
        voxels[changed] //= 2
        before, after = (resample(v, seen, placed)[0] for v in (volume.voxels, voxels))
        assert np.flatnonzero((before != after).any(axis=(1, 2))).tolist() == [changed - 4]
    assert any(preprocessing_of("registered")(volume).transform.displacement)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_killed_comparison_goes_on_and_gives_every_arm_the_same_compute(tmp_path):
    """The whole benchmark at a size of seconds, stopped in the middle of an arm."""
    command = [
        sys.executable,
        str(BENCHMARKS / "objectives.py"),
        "--train",
        "6",
        "--test",
        "12",
        "--held-out",
        "4",
        "--seeds",
        "1",
    ]
    command += ["--arms", "random,prototype,vjepa2_budget,ours", "--out", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def run(steps):
        return subprocess.run(
            [*command, "--steps", str(steps)], env=environment, capture_output=True, text=True, timeout=1500
        )

    with subprocess.Popen(
        [*command, "--steps", "9"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        for line in process.stdout:
            if line.startswith("prototype, seed 0"):
                process.kill()
                break
    first = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "arms").glob("*.json")}
    assert first.keys() == {"random-0.json"}
    done = run(9)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "arms" / "random-0.json").stat().st_mtime_ns == first["random-0.json"]
    found = {p.name.removesuffix("-0.json"): json.loads(p.read_text()) for p in (tmp_path / "arms").glob("*.json")}
    assert found.keys() == {"random", "prototype", "vjepa2_budget", "ours"}
    assert (
        {"teacher frozen", "context unmasked"} & set(found["prototype"]["incidents"])
        and not found["ours"]["incidents"]
        and not found["vjepa2_budget"]["incidents"]
    )
    assert found["vjepa2_budget"]["steps"] == 9 < found["ours"]["steps"] and found["random"]["flops"] == 0
    for name in ("prototype", "ours"):
        assert found[name]["flops"] == pytest.approx(found["vjepa2_budget"]["flops"], rel=0.6 / found[name]["steps"]), (
            "to half an update"
        )
    text = (tmp_path / "objectives.md").read_text()
    assert "| prototype |" in text and (tmp_path / "objectives.png").stat().st_size > 5000
    otherwise = subprocess.run(
        [*command, "--steps", "9", "--pool", "extremes"], env=environment, capture_output=True, timeout=900
    )
    assert otherwise.returncode == 0
    again = {
        p.name.removesuffix("-0.json"): json.loads(p.read_text())
        for p in (tmp_path / "extremes" / "arms").glob("*.json")
    }
    assert all(
        again[name]["dense"] == arm["dense"] and again[name]["probes"] != arm["probes"] for name, arm in found.items()
    )
    assert (tmp_path / "extremes" / "objectives.md").is_file()
    changed = run(10)
    assert changed.returncode != 0 and "made with other settings" in changed.stderr
