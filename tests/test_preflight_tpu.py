"""`octfm doctor --tpu` without its libraries: what is tried after a step that does not fit. The compiler's answers are invented here;
those of libtpu itself are tested in tests/xla/test_tpu.py."""

import pytest

from octfm.data.preprocessing import Preprocessing
from octfm.errors import ConfigError
from octfm.training.preflight import tpu
from octfm.training.settings import PretrainConfig

FITS = tpu.Compiled(arguments=2**30, temporaries=2**31, seconds=60.0)
CONFIG = PretrainConfig.model_validate(
    {
        "data": {"global_batch_size": 96, "per_device_batch_size": 6},
        "model": {"activation_checkpointing": False},
        "masks": {"budget": None},
    }
)
TRIED = [
    "data.per_device_batch_size=3",
    "data.per_device_batch_size=1",
    "data.per_device_batch_size=1 model.activation_checkpointing=true",
    "data.per_device_batch_size=1 model.activation_checkpointing=true masks.budget=3072",
]


@pytest.fixture
def answers(monkeypatch):
    """Answers of the compiler, the configs that it was asked for, and what the user read."""

    def give(*troubles: str | None, config: PretrainConfig = CONFIG):
        left, asked, read = list(troubles), [], []

        def compile_step(config, preprocessing, slice_):
            asked.append(config)
            trouble = left.pop(0)
            return FITS if trouble is None else tpu.Compiled(trouble=trouble)

        monkeypatch.setattr(tpu, "slice_of", tpu.SLICES.__getitem__)
        monkeypatch.setattr(tpu, "compile_step", compile_step)
        found = tpu.examine(config, Preprocessing(), "v4-32", read.append)
        assert left == [], "the search asked for less than it was given"
        return found[-1], asked, read[1:]

    return give


def test_a_step_that_fits_is_the_only_one_that_is_compiled(answers):
    check, asked, read = answers(None)
    assert check.status == "PASS" and check.measured.startswith("3.00 of 30.75 GiB") and asked == [CONFIG] and read == []


def test_the_first_smaller_step_that_fits_is_the_advice_and_each_refusal_is_told_as_it_comes(answers):
    check, asked, read = answers("needs 60", "needs 40", "needs 35", None)
    assert (check.status, check.measured) == ("FAIL", "needs 60"), "what is measured is the step that was asked about"
    assert check.advice.startswith(f"{TRIED[2]} fits: 3.00 of 30.75 GiB")
    assert read == [f"needs {n}; trying {words}" for n, words in zip((60, 40, 35), TRIED, strict=False)]
    assert [(c.data.per_device_batch_size, c.model.activation_checkpointing, c.masks.budget) for c in asked] == [
        (6, False, None), (3, False, None), (1, False, None), (1, True, None),
    ]  # fmt: skip


def test_a_search_that_finds_nothing_ends_with_the_last_answer(answers):
    check, asked, read = answers("needs 60", "needs 40", "needs 35", "needs 34", "needs 33")
    assert len(asked) == 5 and asked[-1].masks.budget == tpu.BUDGET and read[-1] == f"needs 34; trying {TRIED[3]}"
    assert (check.status, check.measured) == ("FAIL", "needs 60")
    assert check.advice.startswith(f"nothing that was tried fits either, {TRIED[3]} last (needs 33): a smaller model.width")


def test_where_nothing_smaller_is_left_to_try_nothing_is_said_to_have_been_tried(answers):
    check, asked, read = answers("needs 60", config=smallest())
    assert len(asked) == 1 and read == [] and check.advice.startswith("a smaller model.width")


def smallest() -> PretrainConfig:
    return list(tpu.smaller_steps(CONFIG, Preprocessing()))[-1][1]


def test_whitened_goals_are_refused_as_in_a_run_with_xla_and_before_any_library_is_looked_for():
    config = PretrainConfig.model_validate({"objective": {"target_norm": "whiten"}})
    with pytest.raises(ConfigError, match="whiten needs an eigendecomposition, which XLA does not compile; use layer with xla_spmd"):
        tpu.examine(config, Preprocessing(), "v4-32", print)
