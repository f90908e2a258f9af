"""The loop: it learns, resumes bit for bit, logs what it should, and stops with a reason."""

import json
import os
import pickle
import signal
from dataclasses import replace

import numpy as np
import pytest
import torch

from octfm.catalog.catalog import Catalog
from octfm.encoder.encoder import load_encoder
from octfm.errors import CheckpointError, ConfigError
from octfm.models.objectives.jepa import JEPAConfig
from octfm.pretraining import step as forward
from octfm.pretraining.learner import Learner
from octfm.pretraining.masks import MaskConfig
from octfm.pretraining.monitors.measure import validate
from octfm.pretraining.pretrain import pretrain
from octfm.pretraining.settings import load_config
from octfm.run import checkpoint
from octfm.run.runtime import start
from octfm.store.selection import select
from support.callers import SET_OTHERWISE
from support.small_store import SIZE, edit_rows, small_store
from support.tiny_runs import TINY, Killed, assert_same_run, config, final, killed_at, quick_pretrain, quiet, rows


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["vjepa2", "data2vec"])
def test_loss_falls_in_bf16_in_training_and_on_held_out_participants(store, tmp_path, objective):
    """In float32: test_golden_curve.py."""
    settings = config(
        steps=50,
        objective={"name": objective},
        precision="bf16",
        log_every_steps=10,
        validate_every_steps=25,
        ckpt_every_steps=50,
    )
    run = quick_pretrain(settings, store, tmp_path / "run", echo=quiet)
    curve = [row["masked_over_baseline"] for row in rows(run)]
    assert curve[-1] < 0.9 * curve[0]
    held_out = [row["masked_over_baseline"] for row in rows(run, "validation")]
    assert held_out[-1] < held_out[0]
    assert rows(run, "incident") == [], "no false alarm"


def test_a_run_shortened_after_its_end_says_how_many_updates_it_made(store, tmp_path):
    said: list[str] = []
    quick_pretrain(config(steps=3), store, tmp_path / "run", echo=quiet)
    quick_pretrain(config(steps=2), store, tmp_path / "run", echo=said.append, override=True)
    assert said[-1].startswith("pretraining done: 3 updates, ") and said[-1].endswith("step-00000003.pt")


@pytest.mark.parametrize(
    "stop_at", [pytest.param(1, marks=pytest.mark.slow), 4, pytest.param(7, marks=pytest.mark.slow)]
)
def test_resumed_run_equals_uninterrupted_run(store, whole, tmp_path, monkeypatch, stop_at):
    """Weights, optimizer, teacher and every metric, bit for bit; the checks before step 0, which one of the resumed runs
    makes and the whole one does not, leave no trace. Neither draws any of the caller's random numbers: a head that is drawn
    afterwards would start from the same weights, whatever seed its author chose."""
    train = pretrain if stop_at == 4 else quick_pretrain
    torch.manual_seed(7)
    state = torch.get_rng_state()
    with monkeypatch.context() as patch, pytest.raises(Killed):
        killed_at(2 * stop_at, patch, forward, "make_inputs")
        train(config(), store, tmp_path / "halves", echo=quiet)
    assert_same_run(train(config(), store, tmp_path / "halves", echo=quiet), whole)
    assert torch.equal(torch.get_rng_state(), state)
    assert final(whole)["step"] == 8


@pytest.mark.parametrize(
    "setting",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in ("float64", "autocast"))) for name in SET_OTHERWISE],
)
def test_what_a_caller_has_set_in_torch_changes_no_run(store, one_update, tmp_path, setting):
    with SET_OTHERWISE[setting]():
        run = quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)
    assert_same_run(run, one_update)


@pytest.fixture(scope="module")
def one_update(store, tmp_path_factory):
    return quick_pretrain(config(steps=1), store, tmp_path_factory.mktemp("one") / "run", echo=quiet)


def test_a_finished_run_is_left_as_it_is(store, tmp_path):
    run = quick_pretrain(config(steps=3), store, tmp_path / "run", echo=quiet)
    before = (run / "metrics.jsonl").read_bytes()
    quick_pretrain(config(steps=3), store, tmp_path / "run", echo=quiet)
    assert (run / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("update", "says"),
    [
        ({"stepz": 6}, "unknown key stepz; did you mean steps"),
        ({"steps": "six"}, "steps: expected a whole number, got .six."),
        ({"masks": MaskConfig().model_copy(update={"num_block": 3})}, "unknown key masks.num_block"),
        ({"objective": JEPAConfig().model_copy(update={"frozen": "both"})}, "objective.frozen: expected "),
    ],
)
def test_settings_that_model_copy_let_pass_are_refused(store, tmp_path, update, says):
    with pytest.raises(ConfigError, match=says):
        pretrain(config(steps=1).model_copy(update=update), store, tmp_path / "run", echo=quiet)
    assert not (tmp_path / "run").exists()


def test_a_catalog_is_not_taken_for_a_store(tmp_path):
    with pytest.raises(TypeError, match=r"store: expected a Store, got Catalog; octfm\.prepare\(.*\) makes one"):
        pretrain(config(steps=1), Catalog("x", (), ()), tmp_path / "run", echo=quiet)


def test_F18_a_damaged_checkpoint_stops_with_the_reason(store, tmp_path):
    """The prototype swallowed the error and started again from epoch 1."""
    run = quick_pretrain(config(steps=3), store, tmp_path / "run", echo=quiet)
    newest = checkpoint.newest(run)
    newest.write_bytes(newest.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"step-00000003\.pt: damaged.*delete it to continue"):
        quick_pretrain(config(steps=3), store, tmp_path / "run", echo=quiet)


def test_nobody_is_advised_to_delete_a_file_that_is_no_checkpoint(tmp_path):
    for name, content in (("labels.csv", b"participant_id,diagnosis\n"), ("model.safetensors", b"\x08" + bytes(20))):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=f"{name}: .*not a.* checkpoint.*expected a run's folder") as error:
            load_encoder(tmp_path / name)
        assert "delete" not in str(error.value)


def test_a_resume_names_the_settings_that_changed_and_their_values(store, tmp_path):
    run = quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)
    with pytest.raises(
        CheckpointError, match=r"other values of seed \(3, now 4\), steps \(1, now 2\); restore them"
    ) as no:
        quick_pretrain(config(steps=2, seed=4), store, run, echo=quiet)
    # A preset may have other values in another version; those of the run are found nowhere else.
    assert f"({run / 'config.yaml'} has them)" in str(no.value)
    quick_pretrain(load_config(run / "config.yaml"), store, run, echo=quiet)
    # Other volumes because of a setting: the setting is named, not the store blamed.
    other = config(steps=1, data={**TINY["data"], "scanners": ["topcon_triton"]})
    with pytest.raises(CheckpointError, match=r"data\.scanners \(\[\], now \['topcon_triton'\]\)"):
        quick_pretrain(other, store, run, echo=quiet)


def test_a_resume_may_inspect_more_or_less_often(store, tmp_path):
    """Presets do so from one version to the next, and what is trained stays the same."""
    quick_pretrain(config(steps=2), store, tmp_path / "run", echo=quiet)
    rarely = config(steps=2, log_every_steps=50, health={"check_every_steps": 50, "margin": 60})
    quick_pretrain(rarely, store, tmp_path / "run", echo=quiet)


def test_F18_a_resume_on_other_hardware_says_so(store, tmp_path):
    """Not bit for bit: kernels of another processor, and sums of another number of threads, round otherwise."""
    run = quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)
    record = json.loads((run / "run.json").read_text())
    said: list[str] = []
    quick_pretrain(config(steps=1), store, run, echo=said.append)
    assert not any("rounding" in line for line in said)
    elsewhere = {**record["environment"], "kernels": "ZVECTOR", "threads": "96", "python": "3.0"}
    before = record | {"environment": elsewhere, "octfm": "0.1"}
    (run / "run.json").write_text(json.dumps(before))
    quick_pretrain(config(steps=1), store, run, echo=said.append)
    assert json.loads((run / "run.json").read_text()) == before, "it had finished, so nothing was trained here"
    assert not any("rounding" in line for line in said)
    quick_pretrain(config(steps=2), store, run, override=True, echo=said.append)
    (line,) = (line for line in said if "rounding" in line)
    assert f"kernels {record['environment']['kernels']} (before: ZVECTOR), threads " in line and "python" not in line
    now = json.loads((run / "run.json").read_text())
    assert {name: now[name] for name in ("environment", "octfm")} == {
        name: record[name] for name in ("environment", "octfm")
    }
    (run / "run.json").write_text(json.dumps(now | {"environment": None}))
    quick_pretrain(config(steps=3), store, run, override=True, echo=quiet)
    assert json.loads((run / "run.json").read_text())["environment"] == record["environment"]


def test_F18_other_training_volumes_are_not_the_same_run(store, tmp_path):
    """Resuming on another split would train on test participants and then deny it."""
    import shutil

    from octfm.run.folder import OtherVolumes
    from octfm.store.store import Store

    moved = shutil.copytree(store.path, tmp_path / "moved")
    quick_pretrain(config(steps=3), Store.open(moved), tmp_path / "run", echo=quiet)
    swap = {"train": "test", "test": "train"}
    edit_rows(moved, lambda row: {"split": swap.get(row.split, row.split)})
    with pytest.raises(OtherVolumes, match="training volumes of the store are not those it began on"):
        quick_pretrain(config(steps=3), Store.open(moved), tmp_path / "run", echo=quiet)


def test_validation_does_not_depend_on_the_micro_batch(store, tmp_path):
    found = []
    for size in (1, 4):
        settings = config(steps=1, data={"global_batch_size": 4, "per_device_batch_size": size})
        found.append(
            rows(quick_pretrain(settings, store, tmp_path / str(size), echo=quiet), "validation")[0][
                "masked_over_baseline"
            ]
        )
    assert found[0] == pytest.approx(found[1], rel=1e-3)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_damaged_run_record_is_named(store, tmp_path, content):
    run = quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)
    (run / "run.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"run\.json: missing or damaged"):
        quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)


class Hostile:
    def __reduce__(self):
        return print, ("executed",)


def write_script(value, path):
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), path)


@pytest.mark.parametrize("write", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value)), write_script])
def test_nobody_is_advised_to_run_the_code_in_a_checkpoint(tmp_path, write, recwarn, capsys):
    write({"model": Hostile()}, path := tmp_path / "step-00000001.pt")
    recwarn.clear()  # of torch, which deprecates scripts
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint") as refused:
        checkpoint.load(path)
    assert "weights_only" not in str(refused.value) and not recwarn.list and not capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"some text\n" * 50])
def test_a_file_that_is_no_checkpoint_is_named(tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match="damaged or not a checkpoint"):
        checkpoint.load(tmp_path / "x.pt")


@pytest.mark.parametrize("kept", [0, 40, 300_000])
def test_a_checkpoint_that_was_cut_off_lacks_its_end(tmp_path, kept):
    torch.save({"weights": torch.zeros(100_000)}, path := tmp_path / "step-00000001.pt")
    os.truncate(path, kept)
    with pytest.raises(
        CheckpointError, match=r"it lacks the end of a torch file\); delete it to continue from the one"
    ):
        checkpoint.load(path)


def test_a_folder_that_is_not_a_run_is_never_overwritten(store, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(CheckpointError, match="exists and is not a run folder"):
        quick_pretrain(config(), store, tmp_path, echo=quiet)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_F2_learning_rate_is_set_from_the_function_at_every_update(whole):
    from octfm.pretraining.schedule import Schedule

    schedule = Schedule(config().schedule, 8)
    assert [row["lr"] for row in rows(whole)] == [schedule.lr(step) for step in range(8)]
    assert final(whole)["optimizer"]["param_groups"][0]["lr"] == schedule.lr(7) > 0


def test_F3_gradient_norm_is_measured_before_clipping_and_zero_grad(store, tmp_path):
    loose = quick_pretrain(config(steps=2, clip_grad_norm=1e9), store, tmp_path / "loose", echo=quiet)
    tight = quick_pretrain(config(steps=2, clip_grad_norm=1e-3), store, tmp_path / "tight", echo=quiet)
    norms = [[row["grad_norm"] for row in rows(run)] for run in (loose, tight)]
    assert norms[0][0] == norms[1][0] > 0.01, "clipping must not change what is logged"


def test_F11_teacher_moves_in_every_update_and_context_cannot_see(whole):
    assert all(row["teacher_step"] > 0 for row in rows(whole))


def test_F12_validation_has_real_masks_and_the_same_ones_every_time(store, whole):
    """The prototype's validation mask was all zeros, so its loss was 0 and the best checkpoint was always the first."""
    found = rows(whole, "validation")
    assert [row["step"] for row in found] == [3, 7]
    assert all(row["masked_loss"] > 0.01 and row["volumes"] == 4 for row in found)
    assert found[0]["masked_loss"] != found[1]["masked_loss"]
    learner = Learner(config(), store.preprocessing, start())
    learner.model.load_state_dict(final(whole)["model"])
    again = validate(learner, store, select(store, "val"))
    assert again["masked_loss"] == found[1]["masked_loss"], "of participants held out, with masks drawn as before"


def test_blank_validation_volumes_do_not_stop_a_run(tmp_path):
    """Each of their patches less its mean is 0, so that a constant answer has no error to be compared with."""

    def blank(seed, prepared):
        return replace(prepared, voxels=np.full_like(prepared.voxels, 90))

    store = small_store(tmp_path / "prepared", blank)
    learner = Learner(config(objective={"name": "mae"}), store.preprocessing, start())
    assert np.isfinite(validate(learner, store, np.arange(4))["masked_over_baseline"])


def test_F16_no_participant_is_trained_and_validated_on(store, tmp_path):
    run = quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)
    kept = final(run)["participants"]
    train = {r.participant for r in store.rows if r.split == "train"}
    other = {r.participant for r in store.rows if r.split != "train"}
    assert set(checkpoint.participant_hashes(sorted(train), kept["key"])) == set(kept["hashes"])
    assert not set(checkpoint.participant_hashes(sorted(other), kept["key"])) & set(kept["hashes"])
    assert not any(p in json.dumps(kept) for p in train), "ids must not be readable"


def test_F7_accumulation_does_not_change_the_maths(store, tmp_path):
    """Halving the micro-batch after an out-of-memory must give the same run."""
    halves = quick_pretrain(config(steps=3), store, tmp_path / "a", echo=quiet)
    whole = quick_pretrain(
        config(steps=3, data={"global_batch_size": 4, "per_device_batch_size": 4}), store, tmp_path / "b", echo=quiet
    )
    at_once = final(whole)["model"]
    for name, tensor in final(halves)["model"].items():
        torch.testing.assert_close(tensor, at_once[name], rtol=1e-4, atol=1e-5)


def test_F7_a_global_batch_that_does_not_divide_is_refused_before_step_0(store, tmp_path):
    with pytest.raises(ConfigError, match="global_batch_size 4"):
        pretrain(config(data={"global_batch_size": 4, "per_device_batch_size": 3}), store, tmp_path / "run", echo=quiet)
    assert not (tmp_path / "run").exists()


def test_F19_parameter_count_is_stored_with_the_run(store, tmp_path):
    run = quick_pretrain(config(steps=1), store, tmp_path / "run", echo=quiet)
    facts = json.loads((run / "run.json").read_text())["parameters"]
    assert facts["total"] == sum(tensor.numel() for tensor in final(run)["model"].values())
    assert facts["total"] == facts["encoder"] + facts["target_encoder"] + facts["predictor"]


def test_metrics_tell_losses_apart_per_scanner(store, tmp_path):
    run = quick_pretrain(
        config(steps=6, data={"global_batch_size": 8, "per_device_batch_size": 4}), store, tmp_path / "run", echo=quiet
    )
    row = rows(run)[-1]
    assert set(row["by_scanner"]) <= {"heidelberg_spectralis", "topcon_triton"} and row["by_scanner"]
    for key in (
        "masked_loss",
        "context_loss",
        "weight_decay",
        "ema",
        "effective_rank",
        "feature_std",
        "data_wait_share",
        "peak_memory_gb",
    ):
        assert np.isfinite(row[key]), key
    assert rows(run, "health"), "verdicts in words"


def test_store_given_twice_is_refused(store, tmp_path):
    with pytest.raises(ConfigError, match="give one of them"):
        quick_pretrain(config(data={"store": str(store.path)}), store, tmp_path / "run", echo=quiet)


def test_old_checkpoint_can_still_be_read():
    """A version-1 checkpoint of synthetic numbers, committed: made by `pretrain(config(steps=1))` at width 8 on
    `small_store`."""
    from support import ROOT

    content = checkpoint.load(ROOT / "tests" / "fixtures" / "checkpoint_v1.pt")
    assert content["version"] == 1 and content["step"] == 1
    from octfm.encoder.encoder import load_encoder

    encoder = load_encoder(ROOT / "tests" / "fixtures" / "checkpoint_v1.pt")
    tokens = encoder.encode_grid(np.zeros((1, *SIZE), np.uint8))
    assert tokens.shape == (1, 4, 8, 4, 8) and np.isfinite(tokens).all()


def test_checkpoint_of_a_newer_version_is_refused(tmp_path):
    torch.save({"format": checkpoint.FORMAT, "version": 99, "step": 1}, tmp_path / "step-00000001.pt")
    with pytest.raises(CheckpointError, match="version 99, this octfm reads up to 3; upgrade"):
        checkpoint.load(tmp_path / "step-00000001.pt")


def test_a_step_in_which_a_stage_of_masking_would_end_has_one_shape(store, tmp_path):
    """Half of three updates: the micro-batches of the second one must not fall into different stages."""
    settings = config(steps=3, masks={"budget": 64, "stages": [[0.4, 0.5], [0.6, 0.35]]})
    assert len(rows(quick_pretrain(settings, store, tmp_path / "run", echo=quiet))) == 3


@pytest.mark.parametrize(
    "signals",
    [
        "TERM HUP",
        *(pytest.param(signals, marks=pytest.mark.slow) for signals in ("HUP HUP", "INT HUP HUP", "HUP TERM")),
    ],
)
def test_a_run_whose_terminal_is_closed_is_saved(store, tmp_path, signals):
    """The kernel sends SIGHUP, and then the shell does; systemd sends it right after the SIGTERM that ends a session."""
    from octfm.errors import Preempted

    numbers = [signal.Signals[f"SIG{name}"] for name in signals.split()]

    def stop_at_once(*_):
        raise KeyboardInterrupt

    def hang_up(line):
        if line.startswith("step ") and "1/3" in line:
            for number in numbers:
                signal.raise_signal(number)

    before = {number: signal.signal(number, stop_at_once) for number in {*numbers}}
    try:
        with pytest.raises(Preempted, match=rf"{numbers[-1].name}: saved after [12] of 3 updates"):
            quick_pretrain(config(steps=3), store, tmp_path / "run", echo=hang_up)
    finally:
        after = {number: signal.signal(number, handler) for number, handler in before.items()}
    assert set(after.values()) == {stop_at_once}
    assert len(rows(quick_pretrain(config(steps=3), store, tmp_path / "run", echo=quiet))) == 3


@pytest.mark.parametrize("signals", ["", "TERM"])
def test_a_run_whose_lines_are_read_no_further_is_saved(store, tmp_path, signals):
    """After `octfm pretrain … | head`, or Ctrl-C in `octfm pretrain … | tee log`, the next line ended the run with its
    updates since the last checkpoint."""
    from octfm.errors import Preempted

    left = [signal.Signals[f"SIG{name}"] for name in signals.split()]

    def echo(line):
        if line.startswith("step "):
            if left:
                signal.raise_signal(left.pop())
            raise BrokenPipeError

    with pytest.raises(Preempted, match=rf"SIG{signals or 'PIPE'}: saved after [12] of 3 updates"):
        quick_pretrain(config(steps=3), store, tmp_path / "run", echo=echo)
    assert len(rows(quick_pretrain(config(steps=3), store, tmp_path / "run", echo=quiet))) == 3


def test_a_run_under_nohup_goes_on(store, tmp_path):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        run = quick_pretrain(
            config(steps=4), store, tmp_path / "run", echo=lambda _: signal.raise_signal(signal.SIGHUP)
        )
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(rows(run)) == 4


@pytest.mark.slow
def test_stages_of_masking_train_and_resume(store, tmp_path):
    """Each stage is another shape; a run that is stopped in the second goes on as if it had not been."""
    from octfm.errors import Preempted

    settings = config(steps=6, masks={"budget": 64, "stages": [[0.4, 0.5], [0.6, 0.35]]})
    whole = quick_pretrain(settings, store, tmp_path / "whole", echo=quiet)

    def stop(line):
        if line.startswith("step ") and "4/6" in line:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(Preempted):
        quick_pretrain(settings, store, tmp_path / "halves", echo=stop)
    resumed = quick_pretrain(settings, store, tmp_path / "halves", echo=quiet)
    assert_same_run(resumed, whole)
