"""Every named failure is planted again in a copy of the source, and the test that bears its name must turn red."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass

import pytest

from support import ROOT, TESTS


@dataclass(frozen=True)
class Bug:
    """One old behaviour: what to write instead of what, and who must notice."""

    name: str
    file: str
    old: str
    new: str
    test: str


BUGS = (
    Bug(
        "F1-schedule-restarts",
        "pretraining/schedule.py",
        "_cosine(peak, end, self._progress(step))",
        "_cosine(peak, end, 2 * self._progress(step) % 1)",
        "test_schedule.py::test_F1_learning_rate_rises_once_and_falls_once",
    ),
    Bug(
        "F2-learning-rate-0-without-a-decay",
        "pretraining/schedule.py",
        'return peak if self.config.lr_shape == "constant"',
        'return 0.0 if self.config.lr_shape == "constant"',
        "test_schedule.py::test_F2_learning_rate_is_never_zero",
    ),
    Bug(
        "F3-gradient-norm-after-zero-grad",
        "run/runtime.py",
        "norm = torch.nn.utils.clip_grad_norm_(",
        "[p.grad.zero_() for p in parameters]\n        norm = torch.nn.utils.clip_grad_norm_(",
        "test_pretrain.py::test_F3_gradient_norm_is_measured_before_clipping_and_zero_grad",
    ),
    Bug(
        "F4-masks-count-voxels",
        "pretraining/masks.py",
        "np.sort(np.resize(order[:split], num_target))",
        "np.sort(np.resize(order[:split], num_target)) * 64",
        "test_masks.py::test_F4_masks_are_token_indices_never_voxels",
    ),
    Bug(
        "F5-step-result-is-a-bare-tuple",
        "models/objectives/jepa.py",
        "return ObjectiveOutput(",
        "return (lambda *several: several)(",
        "test_objectives.py::test_F5_step_result_is_typed",
    ),
    Bug(
        "F6-the-destination-is-not-written-to",
        "pretraining/preflight/resources.py",
        "return fail(name, problem, advice) if problem else passed(",
        "return passed(",
        "test_preflight.py::test_F6_destination_is_write_tested",
    ),
    Bug(
        "F7-accumulated-gradients-are-summed",
        "pretraining/step.py",
        "(output.loss / count).backward()",
        "output.loss.backward()",
        "test_pretrain.py::test_F7_accumulation_does_not_change_the_maths",
    ),
    Bug(
        "F9-shared-functional-groups-are-ignored",
        "formats/dicom/geometry.py",
        '("shared", [_first(shared, "PixelMeasuresSequence")])',
        '("shared", [])',
        "test_dicom.py::test_F9_spacing_is_read_from_shared_functional_groups",
    ),
    Bug(
        "F9-missing-spacing-becomes-1",
        "formats/dicom/geometry.py",
        "return _Measures((float(dy), float(dx)), between, thickness, source)\n    raise ReadError(",
        "return _Measures((float(dy), float(dx)), between, thickness, source)\n"
        '    return _Measures((0.01, 0.01), 0.1, 0.1, "guessed")\n    raise ReadError(',
        "test_dicom.py::test_F9_missing_spacing_is_refused_never_one",
    ),
    Bug(
        "F10-every-rank-reads-the-same",
        "store/loader.py",
        "self.rank * share",
        "0 * share",
        "test_loader.py::test_F10_ranks_see_disjoint_data",
    ),
    Bug(
        "F11a-teacher-never-moves",
        "models/objectives/objective.py",
        "move_average(self.target_encoder, self.encoder, momentum)",
        "pass",
        "test_objectives.py::test_F11_teacher_moves_and_gets_no_gradient",
    ),
    Bug(
        "F11a-teacher-never-moves-is-stopped-by-the-loop",
        "pretraining/learner.py",
        "self.model.update_target(torch.where(made, self.ema, torch.ones_like(self.ema)))",
        "pass",
        "test_pretrain.py::test_F11_teacher_moves_in_every_update_and_context_cannot_see",
    ),
    Bug(
        "F11b-context-encoder-sees-the-answers",
        "models/predictor.py",
        "return seen, predictor(seen, ",
        "seen = take_tokens(encoder(patches_BKP, index.kept, table), index.context)\n    return seen, predictor(seen, ",
        "test_objectives.py::test_F11_context_encoder_cannot_see_target_voxels",
    ),
    Bug(
        "F11c-goals-of-other-places",
        "models/objectives/jepa.py",
        "masked_goals.append(take_tokens(goal, index.target))",
        "masked_goals.append(take_tokens(goal, index.target).roll(1, 1))",
        "test_objectives.py::test_F11_goals_are_the_targets_own_features",
    ),
    Bug(
        "F11d-loss-shrinks-with-the-width",
        "models/objectives/objective.py",
        "(2 - 2 * F.cosine_similarity(prediction_BMD.float(), goal_BMD.float(), dim=-1)).mean(1)",
        "(F.normalize(prediction_BMD.float(), dim=-1) - F.normalize(goal_BMD.float(), dim=-1)).pow(2).mean((1, 2))",
        "test_objectives.py::test_F11_loss_is_told_relative_to_a_content_free_baseline",
    ),
    Bug(
        "F12-validation-loss-is-0",
        "pretraining/monitors/measure.py",
        '"masked_loss": float(masked_B.mean()),',
        '"masked_loss": 0.0,',
        "test_pretrain.py::test_F12_validation_has_real_masks_and_the_same_ones_every_time",
    ),
    Bug(
        "F12-validation-on-volumes-of-training",
        "pretraining/validation.py",
        "store, rows, metrics = self.data.store, self.data.validation_rows, session.metrics",
        "store, rows, metrics = self.data.store, self.data.train_rows[:4], session.metrics",
        "test_pretrain.py::test_F12_validation_has_real_masks_and_the_same_ones_every_time",
    ),
    Bug(
        "F12-validation-masks-are-drawn-anew",
        "pretraining/inputs.py",
        "generators(config.seed, VALIDATION, positions, view))",
        "[np.random.default_rng() for _ in positions])",
        "test_pretrain.py::test_F12_validation_has_real_masks_and_the_same_ones_every_time",
    ),
    Bug(
        "F13-augmentation-flips-the-axial-axis",
        "pretraining/augment.py",
        "torch.arange(height, device=voxels.device) - shift_B.unsqueeze(1)",
        "torch.arange(height, device=voxels.device).flip(0) - shift_B.unsqueeze(1)",
        "test_augment.py::test_F13_augmentation_never_flips_an_axis",
    ),
    Bug(
        "F13-an-affine-turns-the-retina-upside-down",
        "pretraining/augment.py",
        "maps[:, 1, 1] = 1 / self.axial_scale",
        "maps[:, 1, 1] = -1 / self.axial_scale",
        "test_augment.py::test_F13_no_setting_flips_the_retina_or_an_eye_of_known_side",
    ),
    Bug(
        "F13-eyes-that-are-known-are-mirrored",
        "pretraining/augment.py",
        "config.mirror_unknown and unknown and",
        "config.mirror_unknown and",
        "test_augment.py::test_F13_no_setting_flips_the_retina_or_an_eye_of_known_side",
    ),
    Bug(
        "F11b-autoencoder-sees-the-answers",
        "models/predictor.py",
        "take_tokens(patches_BKP, index.context),",
        "take_tokens(patches_BKP + patches_BKP.mean(1, keepdim=True), index.context),",
        "test_objectives.py::test_F11_context_encoder_cannot_see_target_voxels",
    ),
    Bug(
        "F15-evaluation-normalises-in-its-own-way",
        "encoder/encoder.py",
        "return self.preprocessing(volume, ",
        'return self.preprocessing.model_copy(update={"target_spacing": (0.1, 0.02, 0.02)})(volume, ',
        "test_encoder.py::test_F15_preprocessing_travels_with_the_weights",
    ),
    Bug(
        "F16-eyes-are-split-not-participants",
        "evaluation/cases.py",
        "names, member = np.unique(people(participant), return_inverse=True)",
        "names, member = np.arange(len(participant)), np.arange(len(participant))",
        "test_probe.py::test_F16_folds_never_share_a_participant",
    ),
    Bug(
        "F17-attention-is-materialised",
        "models/attention.py",
        "return F.scaled_dot_product_attention(q_BHNK, k_BHNK, v_BHNK)",
        "return (q_BHNK @ k_BHNK.mT * q_BHNK.shape[-1] ** -0.5).softmax(-1) @ v_BHNK",
        "test_objectives.py::test_F17_positions_cost_no_parameters_and_attention_is_fused",
    ),
    Bug(
        "F18-an-unreadable-checkpoint-starts-anew",
        "run/folder.py",
        "problems.append((path, error))",
        "pass",
        "test_pretrain.py::test_F18_a_damaged_checkpoint_stops_with_the_reason",
    ),
    Bug(
        "F19-depth-never-reaches-the-model",
        "models/vit3d.py",
        "for _ in range(config.depth)",
        "for _ in range(6)",
        "test_objectives.py::test_F19_prototype_preset_counts_its_29_457_million_parameters",
    ),
    Bug(
        "a-check-that-preflight-does-not-ask",
        "pretraining/preflight/__init__.py",
        "yield cohort.checks(store, store.recorded(train_rows))",
        "yield []",
        "test_preflight.py::test_a_sound_run_passes_everything",
    ),
    Bug(
        "a-tensor-of-the-host-beside-those-of-the-device",
        "pretraining/augment.py",
        "source_BH = torch.arange(height, device=voxels.device)",
        "source_BH = torch.arange(height)",
        "test_other_device.py::test_pretraining_on_another_device_mixes_none_and_never_waits",
    ),
    Bug(
        "the-host-reads-a-number-within-the-update",
        "pretraining/step.py",
        "    return Outcome(loss, grad_norm,",
        "    grad_norm.item()\n    return Outcome(loss, grad_norm,",
        "test_other_device.py::test_pretraining_on_another_device_mixes_none_and_never_waits",
    ),
)


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_the_text_to_replace_is_still_there(bug):
    """Without this a refactoring would be noticed only by the slow test below."""
    assert (ROOT / "src" / "octfm" / bug.file).read_text().count(bug.old) == 1, "bring this table up to date"


@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.name)
def test_planted_bug_turns_its_test_red(bug, tmp_path):
    shutil.copytree(ROOT / "src" / "octfm", tmp_path / "octfm", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "octfm" / bug.file
    source = path.read_text()
    assert source.count(bug.old) == 1, (
        f"{bug.file} holds the text to replace {source.count(bug.old)} times; bring this table up to date"
    )
    path.write_text(source.replace(bug.old, bug.new))
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    file, name = bug.test.split("::", 1)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:xdist",
        f"{next(TESTS.rglob(file))}::{name}",
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240)
    # A fixture may already stop on it; what cannot be collected exits with 2.
    assert done.returncode == 1 and (" failed" in done.stdout or " error" in done.stdout), (
        f"{bug.test} did not notice {bug.name}:\n{done.stdout[-2000:]}{done.stderr[-999:]}"
    )
