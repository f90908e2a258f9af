"""`octfm bench`: real steps are timed, nothing is written, and the advice follows from what was measured."""

from dataclasses import replace

import pytest

from octfm.errors import ConfigError
from octfm.pretraining import bench as module
from octfm.pretraining.bench import Bench, Trial, bench
from octfm.pretraining.data import given_store
from octfm.run.runtime import Runtime
from support.small_store import small_store
from support.tiny_runs import config, quiet

FAST = Trial("as configured", "bf16", 2, 1.0, 8.0, 0.4, 2.0)


def result(*others: Trial, read: float | None = 100.0, first: Trial = FAST, **settings) -> Bench:
    return Bench(config(steps=100, **settings), [first, *others], read)


@pytest.mark.slow
def test_every_variant_of_a_config_is_timed_on_its_own_store(tmp_path):
    store = small_store(tmp_path / "store")
    before = sorted(p.name for p in tmp_path.rglob("*"))
    measured = bench(config(steps=50), store, "cpu", steps=1, echo=quiet)
    assert [t.name for t in measured.trials][:2] == ["as configured", "bf16"]
    for trial in measured.trials:
        assert trial.step_s is not None and 0 < trial.mfu < 1.5
        assert trial.volumes_per_s == pytest.approx(measured.config.data.global_batch_size / trial.step_s)
    assert measured.read_volumes_per_s is not None and measured.read_volumes_per_s > 0
    reading = measured.config.data.global_batch_size / measured.read_volumes_per_s
    assert measured.run_s == pytest.approx(50 * max(measured.as_configured.step_s, reading))
    assert sorted(p.name for p in tmp_path.rglob("*")) == before, "nothing is written"
    assert measured.lines()[-1].startswith("change first: ")


@pytest.mark.slow
def test_a_share_of_phantoms_is_one_of_the_global_batch(tmp_path):
    """Micro-batches of one volume have no half."""
    data = {"global_batch_size": 2, "per_device_batch_size": 1, "phantoms": {"seed": 1, "volumes": 4, "share": 0.5}}
    settings = config(data=data, objective={"name": "anchored", "goal_average": [2, 1, 4]}, validation_volumes=1)
    mixed = given_store(settings, small_store(tmp_path / "store"))
    assert bench(settings, mixed, "cpu", steps=1, echo=quiet).as_configured.step_s is not None


def test_steps_are_compiled_as_a_run_would_compile_them(monkeypatch):
    """Each of masks.stages compiles anew, so a stage must be long enough, not the run."""
    lengths = []

    def for_run(runtime, _, updates):
        lengths.append(updates)
        return runtime

    monkeypatch.setattr(Runtime, "for_run", for_run)
    monkeypatch.setattr(module, "_trial", lambda *_: FAST)
    staged = config(steps=3000, masks={"budget": 64, "stages": [[0.3, 0.3], [0.6, 0.3]]})
    bench(staged, None, "cpu", steps=1, echo=quiet)
    assert set(lengths) == {1500}


def test_objectives_that_gather_statistics_are_timed_uncompiled_as_they_run(monkeypatch):
    monkeypatch.setattr(Runtime, "for_run", lambda runtime, _, updates: replace(runtime, compiles=updates >= 2000))
    monkeypatch.setattr(module, "_trial", lambda *_: FAST)
    lines = []
    whitened = config(steps=3000, masks={"budget": 64}, objective={"target_norm": "whiten"})
    bench(whitened, None, "cpu", steps=1, echo=lines.append)
    assert lines and all(line.startswith("timing ") and line.endswith(" ...") for line in lines)


@pytest.mark.slow
def test_without_a_store_nothing_is_said_about_reading():
    small = config(steps=10, masks={"budget": 64}, objective={"target_norm": "whiten"})
    measured = bench(small, None, "cpu", steps=1, echo=quiet)
    assert measured.read_volumes_per_s is None and measured.data_wait_share is None
    assert not any("store" in line for line in measured.lines()[:-1])


def test_advice_names_the_store_when_it_is_what_keeps_the_device_waiting():
    assert "store" in result(read=4.0).advice()
    assert result(read=4.0).run_s == pytest.approx(100 * config().data.global_batch_size / 4.0)


def test_advice_names_the_variant_that_is_clearly_faster():
    faster = replace(FAST, name="fp32", precision="fp32", volumes_per_s=12.0)
    assert result(faster).advice() == "precision=fp32: 1.50 times the volumes per second"
    larger = replace(FAST, name="micro-batch 4", micro_batch=4, volumes_per_s=12.0)
    assert "data.per_device_batch_size=4" in result(larger).advice()
    assert "nothing stands out" in result(replace(faster, volumes_per_s=8.2)).advice()


def test_what_does_not_fit_is_said_and_not_timed():
    none = replace(FAST, step_s=None, volumes_per_s=0.0, trouble="does not fit: 90 GB estimated, 10 GB free")
    assert "no variant fits" in result(first=none).advice()
    assert any("does not fit" in line for line in result(first=none).lines())
    fp32 = replace(FAST, name="fp32", precision="fp32")
    assert result(fp32, first=none).advice().startswith("precision=fp32")
    with pytest.raises(ConfigError, match="--steps: expected 1 or more"):
        bench(config(), None, "cpu", steps=0)
