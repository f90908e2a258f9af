"""octfm plan proposes a run that the doctor accepts, within the hours given; the doctor warns of far too long ones."""

import shlex
from dataclasses import replace

import pytest
import torch

from octfm.errors import StoreError
from octfm.pretraining.preflight import data, resources
from octfm.pretraining.preflight import plan as planning
from octfm.pretraining.preflight.plan import EPOCHS, Candidate, Plan, plan
from octfm.pretraining.settings import load_config
from octfm.run.runtime import Runtime
from octfm.store.store import Store
from support.command_line import octfm_here
from support.odd_values import verbs
from support.small_store import edit_rows, small_store


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Two scanners write an id in two spellings."""
    folder = small_store(tmp_path_factory.mktemp("store") / "prepared").path
    edit_rows(folder, lambda row: {"participant": row.participant.lower()} if row.laterality == "L" else {})
    return Store.open(folder)


@pytest.fixture
def one_preset(monkeypatch):
    """The cost of each preset takes seconds to estimate, and one goes the way of all."""
    monkeypatch.setattr(planning, "PRESETS", ("demo",))


def candidate(preset: str, steps: int, step_s: float) -> Candidate:
    return Candidate(preset, load_config(preset, [f"steps={steps}"]), (), step_s)


def made(hours: float, *candidates: Candidate) -> Plan:
    return Plan("prepared", 320, 160, 10, "cpu", hours, candidates)


def test_the_command_it_proposes_fits_store_and_length(store, one_preset):
    with torch.no_grad():  # as in a notebook's cell
        found = plan(store, "cpu")
    assert found.volumes == sum(row.split == "train" for row in store.rows) and found.participants == 8
    chosen = found.chosen
    assert chosen is not None and chosen.hours <= 24
    assert found.epochs(chosen) == pytest.approx(EPOCHS, rel=0.02)
    assert chosen.config.data.global_batch_size == 4, "small cohorts get small batches"
    *_, run = found.lines()
    words = shlex.split(run.partition("octfm pretrain ")[2])
    parsed = verbs()["pretrain"].make_context("pretrain", words).params
    settings = load_config(parsed["config"], [*parsed["overrides"], f"steps={parsed['steps']}"])
    assert settings == chosen.config and parsed["store"] == str(store.path)
    assert parsed["device"] == "cpu", "what was measured is what runs"
    assert data.arithmetic(settings, store, 1, found.volumes).status == "PASS"


def test_a_store_of_single_bscans_is_refused_with_a_command_that_takes_it(tmp_path):
    made = small_store(tmp_path / "prepared")
    edit_rows(made.path, lambda row: {"layout": "line"})
    with pytest.raises(StoreError, match=r"octfm doctor vit_s --store \S+ 'data.layouts=\[line\]'"):
        plan(Store.open(made.path), "cpu")


@pytest.mark.slow
def test_the_plan_counts_compiled_steps_where_the_run_compiles_them(store, one_preset, monkeypatch):
    """Their graphs need memory: the largest micro-batch without them would not pass the doctor."""
    lengths, counted, cost = [], [], resources.step_cost

    def for_run(runtime, _, updates):
        lengths.append(updates)
        return replace(runtime, compiles=True)

    monkeypatch.setattr(Runtime, "for_run", for_run)
    monkeypatch.setattr(Runtime, "graphs", property(lambda runtime: runtime.compiles))
    monkeypatch.setattr(resources, "step_cost", lambda *words: counted.append(words[-1]) or cost(*words))
    found = plan(store, "cpu").candidates[0].config
    assert found is not None and lengths == [found.steps] and counted and all(counted)


def test_the_preferred_preset_that_fits_the_hours_is_chosen():
    slow, quick = candidate("mae", 3000, 60.0), candidate("demo", 3000, 1.0)
    assert made(100, slow, quick).chosen is slow
    assert made(2, slow, quick).chosen is quick
    unfit = Candidate("mae", load_config("mae"), trouble="does not fit")
    assert made(2, unfit, quick).chosen is quick and made(2, unfit).chosen is None


def test_too_few_hours_shorten_the_run_and_are_said():
    found = made(0.5, candidate("mae", 3000, 60.0), candidate("demo", 3600, 1.0))
    assert found.chosen is not None and found.chosen.preset == "demo"
    assert found.chosen.config.steps == 1800 and found.chosen.hours == 0.5
    text = "\n".join(found.lines())
    assert "no preset makes its whole length in 0.5 hours" in text and "--steps 1800" in text


def test_a_run_of_minutes_is_set_next_to_the_packaged_encoder():
    short, long = (made(hours, candidate("demo", 3600, 1.0)) for hours in (0.25, 2))
    said = "worth less than those of the packaged encoder"
    assert said in "\n".join(short.lines()) and said not in "\n".join(long.lines())


def test_plan_prints_volumes_machine_and_commands(store, one_preset, tmp_path):
    code, out, err = octfm_here("plan", store.path, "--device=cpu", cwd=tmp_path)
    assert (code, err) == (0, ""), err
    assert "16 training volumes of 8 participants" in out and "8 participants are few to learn from" in out
    assert f"octfm doctor demo --store {store.path} --steps 1200" in out and out.count("--device cpu") == 2
    assert "first:   octfm prepare CATALOG --like encoder-2 " in out
    assert list(tmp_path.iterdir()) == []


def test_the_doctor_warns_of_96_000_epochs_on_20_volumes(store):
    found = data.arithmetic(load_config("vit_s"), store, 1, 20)
    assert found.status == "WARN" and "60,000 steps = 96,000.0 epochs" in found.measured
    assert "--steps 1000 or fewer" in found.advice
    assert data.arithmetic(load_config("vit_s", ["steps=1000"]), store, 1, 20).status == "PASS"
