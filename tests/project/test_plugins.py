"""An objective, a reader and a metric that octfm does not know, written here and passed as objects."""

import json
import re
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import octfm
from octfm.catalog.catalog import NothingAccepted
from octfm.errors import CheckpointError, ConfigError, EvaluationError, ReadError
from octfm.evaluation.metrics import ExtraMetric
from octfm.evaluation.probe import probe
from octfm.formats.bscans import Bscans
from octfm.models.objectives.jepa import JEPAConfig
from octfm.models.objectives.mae import MAEConfig
from octfm.models.objectives.objective import Objective, ObjectiveConfig, ObjectiveOutput, move_average
from octfm.models.vit3d import VisionTransformer3D, take_tokens
from octfm.pretraining import step as forward
from octfm.pretraining.data import training_rows
from octfm.pretraining.inputs import make_inputs
from octfm.pretraining.learner import Learner
from octfm.pretraining.preflight import checks
from octfm.pretraining.pretrain import pretrain
from octfm.pretraining.settings import load_config, stored_config
from octfm.report.data_health import write_data_health
from octfm.report.html import write_report
from octfm.run.runtime import Runtime
from octfm.store.loader import Loader
from octfm.tasks.embed_run import embed_all
from support import ROOT
from support.pairs_reader import PairsReader, write_pairs
from support.probe_cohort import Cohort
from support.small_store import darkened, small_preprocessing, small_store
from support.tiny_runs import TINY, Killed, assert_same_run, config, final, killed_at, quick_pretrain, quiet, rows

HOST = Runtime(torch.device("cpu"))


class BrokenConfig(JEPAConfig):
    """An objective of a first try."""

    name: Literal["broken"] = "broken"
    fault: str = ""

    def build(self, model, predictor, grid):
        network = super().build(model, predictor, grid)
        whole, best = network.forward, network.baseline
        if self.fault == "no networks":
            return None
        if self.fault == "no encoder":
            del network.encoder
        if self.fault == "baseline":
            network.baseline = lambda goal: best(goal).mean()

        def forward(views, weight):
            output = whole(views, weight)
            changes = {
                "detached": {"loss": output.loss.detach()},
                "per volume": {"loss": output.masked_loss_B},
                "one number": {"masked_loss_B": output.masked_loss_B.mean()},
                "no context": {"context_loss_B": None},
                "one for all": {"masked_loss_B": output.masked_loss_B.mean(0, keepdim=True)},
                "below 0": {"masked_loss_B": output.masked_loss_B - 100},
                "whole numbers": {"masked_loss_B": output.masked_loss_B.int()},
                "pooled": {"features_BMD": output.features_BMD.mean(1)},
                "no features": {"features_BMD": None},
                "at random": {"masked_loss_B": output.masked_loss_B * torch.rand(1)},
            }
            return output.loss if self.fault == "loss alone" else output._replace(**changes.get(self.fault, {}))

        network.forward = forward
        return network


SLOW = partial(pytest.param, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("loss alone", "its forward returned a Tensor, expected an ObjectiveOutput"),
        ("detached", "expected a loss that is one number with a gradient, got one without a gradient"),
        SLOW("per volume", r"one number with a gradient, got one of shape \[1\]"),
        ("one for all", r"masked_loss_B of 4 volumes: expected a tensor of shape \[4\], got one of shape \[1\]"),
        SLOW("one number", r"masked_loss_B of 1 volume: expected a tensor of shape \[1\], got one of shape \[\]"),
        SLOW("no context", r"context_loss_B of 1 volume: expected a tensor of shape \[1\], got NoneType"),
        SLOW("baseline", r"baseline\(masked_goal_BTD\) of 1 volume: expected a tensor of shape \[1\]"),
        SLOW("below 0", r"masked_loss_B is -\d+.*; expected 0 or more"),
        SLOW("whole numbers", r"masked_loss_B of 1 volume: expected a tensor of shape \[1\], got torch.int32"),
        ("pooled", r"features_BMD: expected floating-point numbers .*, got torch.float32 of shape \[1, 48\]"),
        SLOW("no features", "features_BMD: expected floating-point numbers .*, got NoneType"),
        ("at random", "forward draws random numbers, which a resumed run would not repeat; take dropout"),
        SLOW("no networks", "build returned a NoneType, expected an Objective with an encoder"),
        SLOW("no encoder", "build returned a JEPA without one, expected an Objective with an encoder"),
    ],
)
def test_an_objective_that_cannot_be_trained_is_one_line_before_step_0(store, tmp_path, fault, words):
    with pytest.raises(ConfigError, match=f"objective broken: .*{words}"):
        pretrain(config(steps=1), store, tmp_path / "run", objective=BrokenConfig(fault=fault), echo=quiet)
    assert not (tmp_path / "run").exists()


def test_a_goal_that_is_trained_is_one_line_before_step_0(tmp_path):
    class Trained(MAEConfig):
        name: Literal["trained"] = "trained"

        def build(self, model, predictor, grid):
            network = super().build(model, predictor, grid)
            whole = network.forward

            def forward(views, weight):
                output = whole(views, weight)
                return output._replace(masked_goal_BTD=output.masked_goal_BTD + 0 * output.loss)

            network.forward = forward
            return network

    store = small_store(tmp_path / "prepared")
    with pytest.raises(ConfigError, match=r"objective trained: masked_goal_BTD carries a gradient .*; detach it"):
        pretrain(config(steps=1), store, tmp_path / "run", objective=Trained(), echo=quiet)


@pytest.mark.parametrize("wrong", [BrokenConfig, "broken"])
def test_settings_of_an_objective_are_an_object(wrong):
    with pytest.raises(ConfigError, match=r"objective: expected settings such as \w+Config\(\), which are an object"):
        config(steps=1).with_objective(wrong)


class TaughtConfig(JEPAConfig):
    """An objective whose teacher was copied without requires_grad_(False), or whose patch embedding is frozen."""

    name: Literal["taught"] = "taught"
    embeds: bool = True

    def build(self, model, predictor, grid):
        network = super().build(model, predictor, grid)
        network.target_encoder.requires_grad_(True)
        network.encoder.patch_embed.requires_grad_(self.embeds)
        return network


def test_a_teacher_that_was_left_trainable_is_averaged_and_not_decayed(store):
    settings = config(schedule={"weight_decay": 1.0, "ema_base": 0.9}).with_objective(TaughtConfig())
    learner = Learner(settings, store.preprocessing, HOST)
    before = learner.model.target_encoder.blocks[0].mlp[0].weight.clone()
    learner.set_rates(0.1, 1.0, 1.0)
    for p in learner.trained:
        p.grad = torch.zeros_like(p)
    learner.update(torch.ones((), dtype=torch.bool))
    assert torch.equal(before, learner.model.target_encoder.blocks[0].mlp[0].weight), "a momentum of 1 leaves it"


def test_a_run_with_a_frozen_part_of_its_encoder_resumes(store, tmp_path):
    quick = {"health": {"on_fault": "warn"}, "log_every_steps": 4}
    for steps in (3, 6):
        run = quick_pretrain(
            config(steps=steps, **quick), store, tmp_path / "run", echo=quiet, override=True,
            objective=TaughtConfig(embeds=False),
        )  # fmt: skip
    assert final(run)["step"] == 6


class DINOConfig(ObjectiveConfig):
    """Two views of the same tokens; the student's assignment of each to prototypes follows the teacher's of the
    other view."""

    name: Literal["dino"] = "dino"
    context_loss: float = 0.0
    prototypes: int = 32
    temperature: float = 0.2
    target_temperature: float = 0.1
    centre_momentum: float = 0.9

    def build(self, model, predictor, grid):
        return DINO(self, model, grid)

    @property
    def gathers(self):
        return True

    @property
    def num_views(self):
        return 2

    @property
    def shares_masks(self):
        return True


class DINO(Objective):
    """DINO (arXiv:2104.14294) on tokens: EMA teacher, sharpened and centred."""

    def __init__(self, settings, model, grid):
        super().__init__()
        self.settings = settings
        self.encoder = VisionTransformer3D(model, grid)
        self.head = nn.Linear(model.width, settings.prototypes, bias=False)
        self.target_encoder = deepcopy(self.encoder).requires_grad_(False)
        self.target_head = deepcopy(self.head).requires_grad_(False)
        self.register_buffer("centre", torch.zeros(settings.prototypes))
        self.gathered, self.sum_over_ranks = [], lambda *tensors: None

    def forward(self, views, context_weight):
        settings, guesses, goals, kept = self.settings, [], [], []
        for patches, target_patches, index, _ in views:
            places = torch.gather(index.kept, 1, index.context)
            seen = self.encoder(take_tokens(patches, index.context), places)
            guesses.append(F.log_softmax(self.head(seen).float() / settings.temperature, -1))
            with torch.no_grad():
                kept.append(self.target_encoder(target_patches, index.kept))
                logits = self.target_head(take_tokens(kept[-1], index.context)).float()
                goals.append(F.softmax((logits - self.centre) / settings.target_temperature, -1))
            if torch.is_grad_enabled():
                self.gathered.append((logits.flatten(0, 1).sum(0), torch.tensor(float(logits[..., 0].numel()))))
        goal = torch.cat(goals[::-1], 1)
        loss_B = -(goal * torch.cat(guesses, 1)).sum(-1).mean(1)
        return ObjectiveOutput(loss_B.mean(), loss_B, torch.zeros_like(loss_B), goal, goal, kept[0])

    def baseline(self, goal_BMD):
        """Cross-entropy with the mean assignment, which needs no look at a volume."""
        constant = goal_BMD.float().flatten(0, 1).mean(0).clamp_min(1e-12).log()
        return -(goal_BMD * constant).sum(-1).mean(1)

    def update_target(self, momentum):
        super().update_target(momentum)
        move_average(self.target_head, self.head, momentum)
        if self.gathered:
            total, count = (torch.stack(x).sum(0) for x in zip(*self.gathered, strict=True))
            self.gathered.clear()
            self.sum_over_ranks(total, count)
            self.centre.lerp_(total / count, 1 - self.settings.centre_momentum)

    def discard_step(self):
        self.gathered.clear()

    def connect(self, sum_over_ranks):
        self.sum_over_ranks = sum_over_ranks


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return small_store(tmp_path_factory.mktemp("plugins") / "store", darkened)


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    out = tmp_path_factory.mktemp("plugins") / "run"
    return quick_pretrain(config(steps=24), store, out, echo=quiet, objective=DINOConfig())


@pytest.mark.slow
def test_an_objective_of_ones_own_is_examined_before_step_0(store, tmp_path):
    settings = config(steps=40).with_objective(DINOConfig())
    found = {c.name: c for c in checks(settings, store, HOST, *training_rows(settings, store), tmp_path)}
    assert not [check for check in found.values() if check.status == "FAIL"], found
    assert {"context is blind to targets", "teacher moves", "objective learns", "memory"} <= found.keys()


def test_an_objective_of_ones_own_learns_and_is_judged_by_its_own_baseline(run):
    assert rows(run, "validation")[-1]["masked_over_baseline"] < 0.4, "0.26; at a learning rate of 0 it is 0.52"
    assert rows(run, "incident") == []
    assert all(row["target_gradient"] == 0 for row in rows(run))
    assert final(run)["model"]["centre"].abs().sum() > 0


@pytest.mark.slow
def test_an_objective_of_ones_own_resumes_bit_for_bit(store, tmp_path, monkeypatch):
    whole = quick_pretrain(config(), store, tmp_path / "whole", echo=quiet, objective=DINOConfig(prototypes=16))
    killed_at(11, monkeypatch, forward, "make_inputs")
    with pytest.raises(Killed):
        quick_pretrain(config(), store, tmp_path / "halves", echo=quiet, objective=DINOConfig(prototypes=16))
    halves = quick_pretrain(config(), store, tmp_path / "halves", echo=quiet, objective=DINOConfig(prototypes=16))
    assert_same_run(whole, halves)
    with pytest.raises(CheckpointError, match=r"other values of objective\.prototypes"):
        quick_pretrain(config(), store, tmp_path / "halves", echo=quiet, objective=DINOConfig())


def test_a_file_or_checkpoint_names_an_objective_and_never_imports_its_code(run, tmp_path, monkeypatch):
    """Names are looked up among the built-in objectives and the one that is passed; a module of that name stays
    unopened."""
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    text = json.dumps({**TINY, "objective": {"name": "evil", "prototypes": 8}})
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"name 'evil' is none of the built-in objectives .*pass .* as an object"):
        load_config(tmp_path / "run.yaml")
    unknown = stored_config(json.loads(text))
    with pytest.raises(ConfigError, match="pass an objective of your own as an object"):
        unknown.objective.build(unknown.model, unknown.predictor, None)
    assert "evil" not in sys.modules
    loaded = load_config(run / "config.yaml", ["objective.prototypes=8"], objective=DINOConfig)
    assert loaded.objective == DINOConfig(prototypes=8)
    with pytest.raises(ConfigError, match=r"unknown key objective\.prototipes; did you mean objective\.prototypes"):
        load_config(run / "config.yaml", ["objective.prototipes=8"], objective=DINOConfig)
    with pytest.raises(ConfigError, match=r"unknown key objective\.prototypes: a setting of another objective\.name"):
        load_config("vit_s", ["objective.prototypes=8"], objective=DINOConfig)
    with pytest.raises(ConfigError, match=r"^DINOConfig: unknown key prototipes; did you mean prototypes\?$"):
        DINOConfig(**{"prototipes": 8})
    begun = octfm.load_encoder(run, random_init=True, objective=DINOConfig)
    assert begun.source.endswith("random initialisation")
    assert octfm.load_encoder(run, random_init=True).digest == begun.digest, "DINO draws its encoder first"


def test_the_name_of_a_built_in_objective_is_taken():
    class Impostor(ObjectiveConfig):
        name: Literal["mae"] = "mae"

    with pytest.raises(ConfigError, match="name mae is that of a built-in objective; give Impostor another"):
        config().with_objective(Impostor())

    class Heir(JEPAConfig):
        """Its checkpoints would say vjepa2, and be read as that."""

    with pytest.raises(ConfigError, match="name vjepa2 is that of a built-in objective; give Heir another"):
        config().with_objective(Heir())


@pytest.mark.slow
def test_a_run_with_an_own_objective_is_embedded_and_reported_without_code(run, store, tmp_path):
    """Only training needs the objective: its encoder is a VisionTransformer3D like any other."""
    encoder = octfm.load_encoder(run)
    teacher = {k.removeprefix("target_encoder."): v for k, v in final(run)["model"].items() if "target_encoder." in k}
    assert all(torch.equal(tensor, teacher[name]) for name, tensor in encoder.network.state_dict().items())
    paths = embed_all(run, store.path, tmp_path / "embeddings", echo=quiet)
    result = probe(paths, targets=["scanner"], resamples=50)
    assert {"pretrained", "random_init"} <= {row["encoder"] for row in result["results"]}
    assert write_report(run, tmp_path / "report.html").stat().st_size > 10_000


def test_views_are_functions_of_seed_position_and_view(store):
    """View 0 is what a single view is; another view has its own augmentation and, unless they are shared, its own
    masks."""

    class Apart(DINOConfig):
        name: Literal["apart"] = "apart"

        @property
        def shares_masks(self):
            return False

    with Loader(store, np.arange(8), 4, 3, 0, 1, 0) as loader:
        batch = loader.batches(2)
    single = make_inputs(config(), store.preprocessing, HOST, batch).views[0]
    for plug_in in (DINOConfig(), Apart()):
        settings = config().with_objective(plug_in)
        first, second = make_inputs(settings, store.preprocessing, HOST, batch).views
        again = make_inputs(settings, store.preprocessing, HOST, batch).views[1]
        assert torch.equal(first.patches_BKP, single.patches_BKP) and torch.equal(
            first.index.target, single.index.target
        )
        assert torch.equal(second.patches_BKP, again.patches_BKP)
        assert not torch.equal(first.patches_BKP, second.patches_BKP)
        assert torch.equal(first.target_patches_BKP, second.target_patches_BKP) == plug_in.shares_masks
        assert torch.equal(first.index.target, second.index.target) == plug_in.shares_masks


# A reader
# ----------------------------------------------------------------------------------------------------------------------------


class BuggyReader:
    """One volume per file, were it not for a fault in a method or in a field of its Bscans."""

    def __init__(self, fault="open_bscans", **fields):
        self.fault, self.fields = fault, fields

    def fits(self, head, uri):
        return head.startswith(b"BUG") and (self.fault != "fits" or uri.suffix == ".bug")  # the bug in fits

    def volumes(self, uri):
        return [] if self.fault != "volumes" else [self.nmae]  # the bug in volumes

    def open_bscans(self, uri, name):
        if self.fault == "code":
            raise ReadError("my_code", f"{uri}: odd")
        if self.fault == "type":
            return len(None)  # the bug in type
        if self.fault == "open_bscans":
            return {"Jane Doe": 1}[uri]  # the bug in open_bscans
        voxels = np.arange(5 * 20 * 30, dtype=np.uint16).reshape(5, 20, 30)
        decodes = {
            "decode": lambda: voxels.reshape(7, 7),  # the bug in decode
            "float": lambda: voxels.astype(np.float32),
            "list": voxels.tolist,
        }
        fields = {"shape": voxels.shape, "decode": decodes.get(self.fault, lambda: voxels), "uid": "2.25.1"}
        return Bscans(uri, **fields | {"in_plane_mm": (0.01, 0.05), "between_mm": 0.3} | self.fields)


@pytest.mark.parametrize(
    ("fault", "raised"),
    [
        ("open_bscans", "KeyError"),
        ("type", "TypeError"),
        ("fits", "AttributeError"),
        ("volumes", "AttributeError"),
        ("decode", "ValueError"),
    ],
)
def test_a_bug_in_a_reader_is_named_by_its_line_and_never_by_its_words(tmp_path, fault, raised):
    (tmp_path / "a.bug").write_bytes(b"BUG" + bytes(5000))
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.endswith(f"# the bug in {fault}"))
    words = rf"BuggyReader raised {raised} in test_plugins\.py, line {line};"
    with pytest.raises(ReadError, match=words) as error:
        octfm.read_volume(tmp_path / "a.bug", readers=[BuggyReader(fault)])
    assert error.value.code == "damaged_file" and "Jane" not in str(error.value)
    with pytest.raises(NothingAccepted, match=f"1 damaged_file .*; for example .*{words}") as nothing:
        octfm.scan(tmp_path, readers=[BuggyReader(fault)], workers=0, pixels=True)
    assert nothing.value.catalog.rejects[0].code == "damaged_file", "one odd file does not end a scan"


def test_an_unknown_reason_code_of_a_reader_is_named(tmp_path):
    (tmp_path / "a.bug").write_bytes(b"BUG" + bytes(5000))
    with pytest.raises(ReadError, match=r"odd .BuggyReader gave it the unknown reason code my_code") as error:
        octfm.read_volume(tmp_path / "a.bug", readers=[BuggyReader("code")])
    assert error.value.code == "damaged_file", "a code without a remedy would stop a scan"


@pytest.mark.parametrize(("fault", "got"), [("float", r"float32 \[5, 20, 30\]"), ("list", "list")])
def test_voxels_of_another_type_are_named_with_the_reader(tmp_path, fault, got):
    (tmp_path / "a.bug").write_bytes(b"BUG" + bytes(5000))
    with pytest.raises(ReadError, match=rf"BuggyReader: decode: expected a uint8 or uint16 array .*, got {got};"):
        octfm.read_volume(tmp_path / "a.bug", readers=[BuggyReader(fault)])


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("shape", (5, 20), r"expected three whole numbers, .*, got \(5, 20\)"),
        ("shape", (5.0, 20.0, 30.0), r"expected three whole numbers, .*, got \(5.0, 20.0, 30.0\)"),
        ("decode", np.zeros((5, 20, 30), np.uint8), "expected a function that returns the voxels, .*, got ndarray"),
        ("uid", None, "expected text, .*, got NoneType"),
        ("in_plane_mm", ("0.01", "0.05"), r"expected two numbers, \(dy, dx\), or None, got \('0.01', '0.05'\)"),
        ("between_mm", "0.3", "expected a number or None, got '0.3'"),
        ("layout", "volume", "expected None or one of raster, .*, got 'volume'"),
        ("modality", "oct", "expected None or one of structure, octa, got 'oct'"),
        ("bits", "12", "expected None or 1 to 16, got '12'"),
        ("participant", 1001, "expected text or None, got int"),
        ("lines", "oblique", "expected octfm.volume.volume.Lines or None, got 'oblique'"),
        ("flags", None, "expected a tuple of texts, got NoneType"),
        ("set_aside", ("a.png", "no scan"), r"expected pairs \(uri, why\), got \('a.png', 'no scan'\)"),
        ("aside", "labels", "expected None or a ReadError, got 'labels'"),
        ("surfaces", None, "expected a function that returns Surfaces or None, got NoneType"),
    ],
)
def test_a_field_of_another_type_is_one_line(tmp_path, field, value, says):
    (tmp_path / "a.bug").write_bytes(b"BUG" + bytes(5000))
    with pytest.raises(ConfigError, match=f"^reader BuggyReader: open_bscans: {field}: {says}$"):
        octfm.read_volume(tmp_path / "a.bug", readers=[BuggyReader("", **{field: value})])


def test_facts_that_a_reader_leaves_as_none_are_unknown(tmp_path):
    (tmp_path / "a.bug").write_bytes(b"BUG" + bytes(5000))
    unknown = dict.fromkeys(("laterality", "scanner", "protocol", "participant"))
    volume = octfm.read_volume(tmp_path / "a.bug", readers=[BuggyReader("", shape=[5, 20, 30], **unknown)])
    assert (volume.laterality, volume.scanner, volume.participant) == (None, "unknown", "unknown")


def test_a_flag_of_a_reader_is_on_the_health_page(tmp_path):
    (tmp_path / "a.bug").write_bytes(b"BUG" + bytes(5000))
    catalog = octfm.scan(tmp_path, readers=[BuggyReader("", flags=["weak_signal"], participant="1001")], workers=0)
    page = write_data_health(catalog, tmp_path / "health.html", images=False).read_text()
    assert "weak_signal" in page and "raised by a reader of your own" in page


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ([BuggyReader], r"got the class BuggyReader; write BuggyReader\(\)"),
        (BuggyReader(), r"write readers=\[MyReader\(\)\]"),
        ([3], "int has no method fits, volumes, open_bscans"),
    ],
)
def test_what_is_no_reader_is_named_before_any_file_is_read(tmp_path, wrong, words):
    (tmp_path / "a.bug").write_bytes(b"BUG" + bytes(5000))
    for read in (octfm.scan, octfm.read_volume):
        with pytest.raises(ConfigError, match=words):
            read(tmp_path, readers=wrong)


@pytest.mark.parametrize("workers", [pytest.param(0, marks=pytest.mark.slow), 1], ids=["here", "in a child"])
def test_a_format_of_ones_own_is_scanned_and_prepared_volume_by_volume(tmp_path, workers):
    eyes = {f"P{n}": write_pairs(tmp_path / f"P{n}.pairs", n) for n in range(3)}
    whole = (tmp_path / "P2.pairs").read_bytes()
    (tmp_path / "P2.pairs").write_bytes(whole[:-100])
    reader = PairsReader()
    with pytest.raises(octfm.OctfmError, match="none of 3 files"):
        octfm.scan(tmp_path, workers=workers)
    catalog = octfm.scan(tmp_path, readers=[reader], workers=workers, pixels=True)
    found = {(a.participant, a.laterality): a for a in catalog.acquisitions}
    assert found.keys() == {(f"P{n}", side) for n in range(2) for side in "RL"}
    assert [reject.code for reject in catalog.rejects] == ["truncated_pixel_data"] * 2
    assert len({a.sop_instance_uid for a in catalog.acquisitions}) == 4
    volume = octfm.read_volume(found["P1", "L"].uri, readers=[reader])
    assert volume.source == f"{tmp_path}/P1.pairs!/left" and np.array_equal(volume.voxels, eyes["P1"][1])
    with pytest.raises(ReadError, match="which of its 2 volumes"):
        octfm.read_volume(tmp_path / "P0.pairs", readers=[reader])
    out = tmp_path / "store"
    prepared = octfm.prepare(catalog, out, small_preprocessing(), readers=[reader], workers=workers, progress=False)
    assert len(prepared) == 4 and {row.scanner for row in prepared.rows} == {"pairs"}


@pytest.mark.parametrize(
    ("method", "found", "says"),
    [
        ("open_bscans", np.zeros((4, 8, 8), np.uint8), "open_bscans: expected Bscans, got ndarray"),
        ("open_bscans", None, "open_bscans: expected Bscans, got NoneType"),
        ("volumes", "right", "volumes: expected a list of names, got str"),
        ("volumes", [0, 1], "volumes: expected a list of names, got list"),
    ],
)
def test_a_reader_that_returns_something_else_is_named(tmp_path, monkeypatch, method, found, says):
    write_pairs(tmp_path / "P0.pairs", 0)
    monkeypatch.setattr(PairsReader, method, lambda *_: found)
    with pytest.raises(ConfigError, match=f"^reader PairsReader: {says}$"):
        octfm.read_volume(tmp_path / f"P0.pairs{'!/left' * (method == 'open_bscans')}", readers=[PairsReader()])


# A metric
# ----------------------------------------------------------------------------------------------------------------------------


def sensitivity_at_half(truth, probability, weights):
    """Share of the diseased whose probability is above one half."""
    ill = weights * (truth == 1)
    return (ill * (probability[:, 1] > 0.5)).sum(1) / np.maximum(ill.sum(1), 1e-12)


def test_a_metric_of_ones_own_appears_with_its_interval(tmp_path):
    cohort = Cohort()
    one, other = (cohort.embeddings(tmp_path / f"{n}.parquet", n, s) for n, s in (("one", 4.0), ("other", 0.0)))
    metric = ExtraMetric("sensitivity", sensitivity_at_half, chance=0.5)
    result = probe([one, other], targets=["study_group"], design="k-fold", resamples=200, metrics=[metric])
    rows = {r["encoder"]: r for r in result["results"] if r["metric"] == "sensitivity"}
    assert len(rows) == 2
    for row in rows.values():
        assert 0 <= row["low"] <= row["estimate"] <= row["high"] <= 1 and row["chance"] == 0.5
    (compared,) = (c for c in result["comparisons"] if c["metric"] == "sensitivity")
    assert compared["low"] < compared["high"] and not compared["planned"]
    with pytest.raises(EvaluationError, match="auroc is a built-in metric"):
        probe([one], metrics=[ExtraMetric("auroc", sensitivity_at_half, chance=0.5)])


@pytest.mark.parametrize(
    ("measure", "got"),
    [
        (lambda truth, probability, weights: 0.8, "float"),
        (lambda truth, probability, weights: None, "NoneType"),
        (lambda truth, probability, weights: (probability.argmax(1) == truth).astype(float), r"shape \[12\]"),
        (lambda truth, probability, weights: ["high"] * len(weights), "list"),
    ],
)
def test_a_metric_that_does_not_score_every_resample_is_one_line(tmp_path, measure, got):
    file = Cohort().embeddings(tmp_path / "one.parquet")
    with pytest.raises(EvaluationError, match=f"metric mine: expected an array of 1 numbers, one for .*, got {got}$"):
        probe([file], targets=["study_group"], metrics=[ExtraMetric("mine", measure, chance=0.5)])


def test_a_bug_in_a_metric_is_named_by_its_line(tmp_path):
    def buggy(truth, probability, weights):
        return (weights * (probability > 0.5)).sum(1)  # the bug in the metric

    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(i for i, text in enumerate(lines) if text.endswith("# the bug in the metric"))
    file = Cohort().embeddings(tmp_path / "one.parquet")
    words = rf"metric mine: ValueError in test_plugins\.py, line {line}: .*predicted \[12, 2\] and weights \[1, 12\]"
    with pytest.raises(EvaluationError, match=words):
        probe([file], targets=["study_group"], metrics=[ExtraMetric("mine", buggy, chance=0.5)])


def test_what_is_no_metric_is_named_before_any_probe(tmp_path):
    with pytest.raises(EvaluationError, match="metric mine: measure: expected a function, got 3"):
        ExtraMetric("mine", 3, chance=0.5)
    with pytest.raises(EvaluationError, match="metric mine: chance: expected a number, got 'half'"):
        ExtraMetric("mine", sensitivity_at_half, chance="half")
    one = ExtraMetric("mine", sensitivity_at_half, chance=0.5)
    with pytest.raises(EvaluationError, match="metrics: mine is there twice"):
        probe([tmp_path / "none.parquet"], metrics=[one, one])
    with pytest.raises(EvaluationError, match="metrics: mine is there twice"):
        probe([tmp_path / "none.parquet"], metrics=(m for m in (one, one)))
    with pytest.raises(TypeError, match="expected a list, got the metric mine itself"):
        probe([tmp_path / "none.parquet"], metrics=one)


def test_a_metric_cannot_change_the_others_and_has_known_kinds(tmp_path):
    def spoils(truth, probability, weights):
        truth[:], probability[:], weights[:] = 0, 0.5, 0
        return np.full(len(weights), 0.5)

    file = Cohort().embeddings(tmp_path / "one.parquet")
    own = [ExtraMetric("spoils", spoils, chance=0.5), ExtraMetric("own", sensitivity_at_half, chance=0.5)]
    after, alone = (probe([file], targets=["study_group"], resamples=50, metrics=m)["results"] for m in (own, own[1:]))
    assert [row for row in after if row["metric"] != "spoils"] == alone
    with pytest.raises(EvaluationError, match=r"metric own: kinds: expected a tuple of binary, .* got 'binary'"):
        ExtraMetric("own", sensitivity_at_half, chance=0.5, kinds="binary")
    with pytest.raises(TypeError, match=r"metrics: expected ExtraMetric\(name, function, chance=…\), got <function"):
        probe([file], metrics=[sensitivity_at_half])


# The guide
# ---------------------------------------------------------------------------------------------------------------------------


def test_the_plug_ins_of_the_guide_work(tmp_path, store, monkeypatch):
    page = (ROOT / "docs" / "guide" / "plug-ins.md").read_text()
    for name, source in re.findall(r'^```python title="([\w.]+)"\n(.*?)^```', page, re.S | re.M):
        (tmp_path / name).write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    from gradient_monitor import GradientMonitor
    from grey_objective import GreyConfig
    from raw_pair_reader import VOXELS, RawPairReader
    from sensitivity import SENSITIVITY

    with pytest.warns(UserWarning, match="gradient norm .*, above 0"):
        run = pretrain(
            config(steps=20),
            store,
            tmp_path / "run",
            echo=quiet,
            objective=GreyConfig(),
            listeners=[GradientMonitor(0)],
        )
    assert rows(run, "validation")[-1]["masked_over_baseline"] < 0.7, "0.39; at a learning rate of 0 it is 0.93"
    octfm.load_encoder(run)

    (tmp_path / "clinic").mkdir()
    pixels = np.random.default_rng(0).integers(0, 255, 2 * VOXELS, dtype=np.uint8).tobytes()
    (tmp_path / "clinic" / "P1.pair").write_bytes(b"PAIR" + pixels)
    readers, pattern = [RawPairReader()], "{participant}.pair"
    catalog = octfm.scan(tmp_path / "clinic", readers=readers, participant_from=pattern, workers=0)
    assert sorted((a.participant, a.laterality) for a in catalog.acquisitions) == [("P1", "L"), ("P1", "R")]
    assert octfm.read_volume(tmp_path / "clinic" / "P1.pair!" / "left", readers=readers).laterality == "L"

    files = [Cohort().embeddings(tmp_path / "one.parquet", "one")]
    result = probe(files, targets=["study_group"], design="k-fold", resamples=100, metrics=[SENSITIVITY])
    (row,) = (row for row in result["results"] if row["metric"] == "sensitivity")
    assert row["low"] <= row["estimate"] <= row["high"]
