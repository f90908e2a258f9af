"""Surfaces and masks: found on what they were trained for, judged in µm, and back in the frame the scan was made in."""

import json
import re
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import octfm
from octfm.config import load
from octfm.encoder import embed as embedding
from octfm.encoder.encoder import load_encoder
from octfm.errors import CheckpointError, ConfigError, EvaluationError, StoreError
from octfm.evaluation.scoring import compare_scored
from octfm.layers.export import label_map, write_dicom, write_nifti
from octfm.models.dense import DenseDecoder, mask_loss, surface_loss, surface_rows
from octfm.phantom import phantom_volume
from octfm.report.html import write_report
from octfm.store.layout import Arrays
from octfm.store.store import Store
from octfm.tasks.embed_run import embed_all
from octfm.tasks.finetune import finetune
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.scene import load_scenes
from octfm.tasks.segment import Fit, Labelled, Segmenter, load_segmenter, to_prepared
from octfm.tasks.segment_score import _rows, dice, errors_of, mean_height, score_errors, segment, summary_lines
from octfm.tasks.segment_settings import SegmentConfig
from octfm.volume.segmentation import Segmentation
from octfm.volume.transform import Transform
from support import ROOT
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.small_store import SIZE, edit_rows, small_preprocessing, small_store
from support.tiny_runs import config as pretrain_config
from support.tiny_runs import quick_pretrain, quiet


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Volumes whose band is known to the row, a bright blob in half of them, and truth beside the store."""
    folder = tmp_path_factory.mktemp("seg")
    (folder / "truth").mkdir()
    z, y, x = np.meshgrid(*(np.arange(n) for n in SIZE), indexing="ij")

    def edit(seed, prepared):
        top = prepared.band[0].astype(np.float64) + 2
        centre = top[SIZE[0] // 2, SIZE[2] // 2] + 12
        blob = ((z - SIZE[0] / 2) / 2) ** 2 + ((y - centre) / 5) ** 2 + ((x - SIZE[2] / 2) / 6) ** 2 < 1
        surfaces = np.stack([top + 2, top + 19])
        np.savez(
            folder / "truth" / f"1.2.3.{seed}.npz", surfaces=surfaces, surface_names=np.array(["ilm", "bm"]),
            lesions=(blob * np.uint8(seed % 2)), spacing_mm=np.array(prepared.transform.native_spacing_mm),
        )  # fmt: skip
        return replace(prepared, voxels=np.where(blob & bool(seed % 2), np.uint8(250), prepared.voxels))

    return small_store(folder / "prepared", edit), folder / "truth"


@pytest.fixture(scope="module")
def run(store, tmp_path_factory):
    return quick_pretrain(pretrain_config(steps=3), store[0], tmp_path_factory.mktemp("runs") / "run", echo=quiet)


def settings(run, made, **changes) -> SegmentConfig:
    base = {
        "encoder": str(run), "store": str(made[0].path), "truth": str(made[1]), "surfaces": ["ilm", "bm"], "mask_values": [1],
        "steps": 100, "lr": 1e-2,
    }  # fmt: skip
    return load(SegmentConfig, base | changes)


@pytest.mark.parametrize(
    "changes",
    [{}, *(pytest.param(changes, marks=pytest.mark.slow) for changes in ({"decoder": "light"}, {"lr_encoder": 1e-3}))],
    ids=["linear", "light", "finetuned"],
)
def test_surfaces_and_masks_are_found_on_unseen_participants(run, store, tmp_path, changes):
    fewer = {"steps": 60} if changes else {}  # these learn faster
    result = segment(settings(run, store, **changes, **fewer), tmp_path / "seg", baselines=not changes, echo=quiet)
    found = {(r["target"], r["encoder"]): r["estimate"] for r in result["results"]}
    row_um = store[0].preprocessing.target_spacing[1] * 1000
    assert found["ilm", "pretrained"] < 1.5 * row_um and found["bm", "pretrained"] < 1.5 * row_um
    assert found["fluid", "pretrained"] > (0.3 if changes else 0.15)
    if not changes:
        assert {e for _, e in found} == {"pretrained", "random_init", "voxels", "mean_height"}
        assert found["ilm", "mean_height"] > 2 * found["ilm", "pretrained"]
        for name in ("random_init", "voxels"):
            assert found["ilm", name] != found["ilm", "pretrained"], "an encoder of its own"
        assert all(c["low"] is None for c in result["comparisons"]), "two test participants are no interval"
        differences = {(c["target"], c["b"]): c["difference"] for c in result["comparisons"] if c["planned"]}
        assert len(differences) == len(result["comparisons"]) and differences == {
            (target, name): found[target, "pretrained"] - other
            for (target, name), other in found.items()
            if name != "pretrained"
        }
        assert any("fluid" in line for line in summary_lines(result))
        with pytest.raises(CheckpointError, match="holds a finished segmentation"):
            segment(settings(run, store), tmp_path / "seg", echo=quiet)
    again = load_segmenter(tmp_path / "seg")
    rows, mask = again.predict(store[0].read([22]).voxels[0])
    truth = np.load(store[1] / "1.2.3.22.npz")
    assert np.abs(rows - truth["surfaces"]).mean() < 1.5 and mask is not None and mask.shape == SIZE


def test_the_statistics_of_tokens_keep_no_graph_of_an_encoder_that_learns(run, store, monkeypatch):
    random = torch.get_rng_state()
    segmenter = Segmenter(settings(run, store, lr_encoder=1e-3), load_encoder(run))
    assert torch.equal(random, torch.get_rng_state()), "the caller's random numbers go on as they were"
    with_graph, grid = [], segmenter.grid

    def watched(voxels):
        with_graph.append((found := grid(voxels)).requires_grad)
        return found

    monkeypatch.setattr(segmenter, "grid", watched)
    size = SIZE[0], SIZE[2]
    truth = [Labelled(np.full((2, *size), 9, np.float32), np.zeros(SIZE, bool)) for _ in range(3)]
    fit = Fit(segmenter, lambda i: store[0].read([i]).voxels[0], truth)
    fit.begin()
    assert with_graph == [False] * 3, "eight graphs at once need far more memory than a step"
    fit.update(0)
    assert with_graph[3:] == [True] * 2


def test_decoders_answer_for_their_own_voxels():
    torch.manual_seed(0)
    decoder = DenseDecoder(5, 2, (2, 8, 4), "linear")
    torch.nn.init.normal_(decoder.answer.weight)
    tokens = torch.randn(1, 3, 4, 5, 5)
    before = decoder(tokens)
    assert before.shape == (1, 2, 6, 32, 20)
    tokens[0, 1, 2, 3] += 1
    changed = (decoder(tokens) != before).any(1)[0]
    expected = torch.zeros(6, 32, 20, dtype=torch.bool)
    expected[2:4, 16:24, 12:16] = True
    assert torch.equal(changed, expected)


def test_surface_rows_have_fractions_and_stay_in_order():
    rows = torch.tensor([[10.3, 20.75], [15.0, 14.0]])[:, :, None, None]
    offset = torch.arange(40)[None, None, None, :, None] - rows[:, :, :, None]
    logits = -0.5 * (offset / 1.5) ** 2
    found = surface_rows(logits, logits.argmax(3).float())
    torch.testing.assert_close(found[0], rows[0], atol=0.02, rtol=0)
    assert found[1, 1] == found[1, 0] >= 15 - 1e-3


def test_a_surface_does_not_jump_to_a_likelier_layer_for_a_few_a_scans(run, store):
    """Two layers look alike; in three A-scans the wrong one is brighter."""
    segmenter = Segmenter(settings(run, store, mask_values=[], surfaces=["ilm"]), load_encoder(run))
    d, h, w = SIZE
    offset = torch.arange(h)[:, None, None] - torch.tensor([20.4, 50.0])
    peaks = (-0.5 * (offset / 1.5) ** 2).exp() * torch.tensor([6.0, 5.0])
    logits = peaks.sum(-1).expand(1, 1, d, h, w).clone()
    logits[..., 10:13] = (peaks * torch.tensor([0.5, 1.5])).sum(-1)
    segmenter.decoder.forward = lambda _: logits
    rows, _ = segmenter.predict(np.zeros(SIZE, np.uint8))
    np.testing.assert_allclose(rows, 20.4, atol=0.2)


def test_unknown_rows_teach_nothing():
    logits = torch.zeros(1, 1, 1, 8, 2, requires_grad=True)
    surface_loss(logits, torch.tensor([[[[float("nan"), 3.0]]]])).backward()
    assert logits.grad is not None and logits.grad[..., 0].abs().max() == 0 < logits.grad[..., 1].abs().max()
    assert surface_loss(logits, torch.full((1, 1, 1, 2), float("nan"))) == 0
    perfect = mask_loss(torch.full((1, 1, 2, 2, 2), 20.0), torch.ones(1, 1, 2, 2, 2))
    assert perfect < 1e-6


class Oracle(Segmenter):
    """Answers with the truth, in the prepared frame: what is left is the way there and back."""

    def __init__(self, config, encoder, answer: Labelled):
        super().__init__(config, encoder)
        self.answer = answer

    def predict(self, voxels):
        return self.answer.rows.copy(), self.answer.mask


@pytest.mark.parametrize("laterality", ["R", "L"])
@pytest.mark.parametrize("superior_first", [True, False])
def test_results_come_back_to_the_native_frame(run, store, laterality, superior_first):
    volume, truth = phantom_volume(5, size=(24, 160, 96), laterality=laterality, diagnosis="dme", severity=0.9)
    volume = replace(volume, superior_first=superior_first)
    config = settings(run, store, mask_values=[1, 2])
    encoder = load_encoder(run)
    names = [truth.surface_names.index(name) for name in ("ilm", "bm")]
    native = {"rows": truth.surfaces[names].astype(float), "mask": np.isin(truth.lesions, (1, 2))}
    pre = encoder.preprocessing.model_copy(update={"image_size": (24, 160, 96), "target_spacing": volume.spacing_mm})
    encoder = replace(encoder, preprocessing=pre, fingerprint=pre.fingerprint())
    prepared = pre(volume)
    oracle = Oracle(config, encoder, to_prepared(native, prepared.transform))
    found = oracle.in_native(
        Arrays(prepared.voxels[None], prepared.band[None], prepared.valid[None]), prepared.transform
    )
    gap = np.abs(found.surfaces["ilm"] - native["rows"][0])
    assert np.nanmedian(gap) < 0.1 and np.isfinite(gap).mean() > 0.9
    errors = errors_of(config, found, native, prepared.transform)
    both, answer, real = errors["fluid"]
    assert 2 * both / (answer + real) > 0.95 and errors["bm"] < 0.5 * volume.spacing_mm[1] * 1000
    height = found.heights_um("ilm")
    np.testing.assert_allclose(height, (found.surfaces["ilm"] + 0.5) * volume.spacing_mm[1] * 1000)
    assert 100 < np.nanmean(found.thickness_um("ilm", "bm")) < 600


@given(seed=st.integers(0, 2**32 - 1), shown=st.sampled_from([0.0, 0.2, 0.9]))
def test_errors_count_where_truth_is_in_the_image_and_something_was_found(seed, shown):
    """In µm of the scan, and of masks only the voxels that the encoder saw."""
    rng, (depth, height, width) = np.random.default_rng(seed), (4, 30, 10)
    # The prepared field holds rows 6 to 25 and A-scans 2 to 9.
    transform = Transform(
        (depth, height, width), (0.1, 0.004, 0.01), (4, 20, 8), (0.0, 6.0, 2.0), (1.0, 1.0, 1.0), (0.0,) * 4, False, False
    )  # fmt: skip
    rows = rng.choice([-4.0, -0.6, 0.0, 12.5, height - 1, height + 2, np.nan], (depth, width))
    answer = np.where(rng.random((depth, width)) < shown, rng.uniform(0, height, (depth, width)), np.nan)
    masks = rng.random((2, depth, height, width)) < 0.3
    config = load(SegmentConfig, {"surfaces": ["ilm"], "mask_values": [1]})
    found = Segmentation({"ilm": answer}, {config.mask_name: masks[0]}, (0.1, 0.004, 0.01))
    errors = errors_of(config, found, {"rows": rows[None], "mask": masks[1]}, transform)
    apart = [
        4 * abs(answer[z, x] - rows[z, x])
        for z, x in np.ndindex(depth, width)
        if 0 <= rows[z, x] <= height - 1 and np.isfinite(answer[z, x])
    ]
    assert errors["ilm"] == pytest.approx(np.mean(apart) if apart else np.nan, nan_ok=True)
    seen = masks[:, :, 6:26, 2:]
    assert errors[config.mask_name] == ((seen[0] & seen[1]).sum(), seen[0].sum(), seen[1].sum())


def test_dice_is_of_all_voxels_together_under_weights():
    counts = np.array([[5.0, 10.0, 8.0], [0.0, 0.0, 4.0], [0.0, 0.0, 0.0]])
    weights = np.array([[1.0, 1, 1], [2, 0, 1], [0, 0, 3]])
    np.testing.assert_allclose(dice(counts, weights)[:2], [10 / 22, 20 / 36])
    assert np.isnan(dice(counts, weights)[2])


def test_a_dice_of_nothing_says_why_it_is_undefined():
    config, nothing = load(SegmentConfig, {"surfaces": [], "mask_values": [1]}), [{"fluid": (0, 0, 0)}] * 3
    (found,) = score_errors(config, {"pretrained": nothing}, np.array(["a", "b", "c"]), {}, 100)["pretrained"]
    assert found.row["estimate"] is None
    assert summary_lines({"results": [found.row], "comparisons": []}) == [
        "fluid        dice  pretrained   undefined, 3 participants",
        "fluid        Undefined: no test volume has fluid, and none was found in any.",
    ]
    alone = found.row | {"n_test_participants": 1}
    assert summary_lines({"results": [alone], "comparisons": []})[0].endswith("undefined, 1 participant")


def test_segmenters_are_compared_on_the_volumes_that_all_of_them_measured():
    rng = np.random.default_rng(0)
    people, hard = np.array([f"P{i}" for i in range(20)]), rng.normal(20, 8, 20)
    errors = {name: [{"ilm": x + gap} for x in hard] for name, gap in (("pretrained", 0.0), ("voxels", 0.5))}
    errors["voxels"][3]["ilm"] = float("nan")
    found = score_errors(load(SegmentConfig, {"surfaces": ["ilm"]}), errors, people, {}, 500)
    a, b = (found[name][0] for name in errors)
    assert a.row["n_test_participants"] == b.row["n_test_participants"] == 19
    assert 10 < a.row["low"] < a.row["estimate"] < a.row["high"] < 30
    (line,) = summary_lines({"results": [a.row], "comparisons": []})
    assert line.endswith(f"({a.row['low']:.2f} to {a.row['high']:.2f}) µm, 19 participants")
    compared = compare_scored(a, b, leakage=False)
    assert compared["low"] == pytest.approx(-0.5) == compared["high"] and compared["verdict"] == "better"


def test_the_mean_surface_has_its_mean_row_where_no_training_volume_has_one(store):
    """As the first row it would be off by hundreds of µm, and any encoder better."""
    rows = np.full((1, SIZE[0], SIZE[2]), np.nan, np.float32)
    rows[:, ::2] = 9
    predict = mean_height(load(SegmentConfig, {"surfaces": ["ilm"]}), store[0], [Labelled(rows, None)])
    full = mean_height(load(SegmentConfig, {"surfaces": ["ilm"]}), store[0], [Labelled(np.full_like(rows, 9), None)])
    np.testing.assert_allclose(predict(0).surfaces["ilm"], full(0).surfaces["ilm"])
    # Elsewhere it is the mean over the volumes that have one.
    two = [Labelled(rows, None), Labelled(np.where(np.isnan(rows), 5, 3).astype(np.float32), None)]
    mean = mean_height(load(SegmentConfig, {"surfaces": ["ilm"]}), store[0], two)
    one = mean_height(load(SegmentConfig, {"surfaces": ["ilm"]}), store[0], [Labelled(np.where(np.isnan(rows), 5, 6), None)])  # fmt: skip
    np.testing.assert_allclose(mean(0).surfaces["ilm"], one(0).surfaces["ilm"])


def test_seen_participants_and_absent_truth_are_refused(run, store, tmp_path):
    for row in store[0].rows:
        assert (store[1] / f"{row.acquisition}.npz").is_file()
    with pytest.raises(EvaluationError, match="no surface called ez; surfaces: ilm, bm"):
        segment(settings(run, store, surfaces=["ez"]), tmp_path / "a", echo=quiet)
    with pytest.raises(EvaluationError, match=r"no truth for this acquisition.* exclude=FILE"):
        segment(settings(run, store, truth=str(tmp_path)), tmp_path / "b", echo=quiet)
    moved = tmp_path / "moved"
    moved.mkdir()
    for item in store[0].path.iterdir():
        if item.name != "rows.jsonl":
            (moved / item.name).symlink_to(item)
    swap = {"P000": "test", "P010": "train", "P011": "train"}
    shutil.copy(store[0].path / "rows.jsonl", moved)
    edit_rows(moved, lambda row: {"split": swap.get(row.participant, row.split)})
    edit_rows(moved, lambda row: {"participant": row.participant.lower()} if row.laterality == "L" else {})
    with pytest.raises(EvaluationError, match="1 test participants were in the encoder's pretraining"):
        segment(settings(run, store, store=str(moved)), tmp_path / "c", echo=quiet)
    quick = settings(run, store, store=str(moved), surfaces=["ilm"], mask_values=[], steps=1)
    allowed = segment(quick, tmp_path / "d", baselines=False, allow_seen=True, echo=quiet)
    assert [row["seen_test_participants"] for row in allowed["results"]] == [1], "and says so"


def test_a_person_in_two_splits_is_refused_and_fewer_volumes_to_learn_from_are_the_same_every_time(
    run, store, tmp_path
):
    folder = shutil.copytree(store[0].path, tmp_path / "leaky")
    first = next(row for row in store[0].rows if row.split == "test")
    edit_rows(folder, lambda row: {"split": "train"} if row.index == first.index else {})
    with pytest.raises(StoreError, match=f"{first.participant} is in split train and in test"):
        segment(settings(run, store, store=str(folder)), tmp_path / "seg", echo=quiet)
    whole = _rows(store[0], settings(run, store))
    trained = {store[0].rows[i].split for i in whole["train"]}
    assert trained == {"train", "val"} and {store[0].rows[i].split for i in whole["test"]} == {"test"}
    nowhere = shutil.copytree(store[0].path, tmp_path / "nowhere")
    edit_rows(nowhere, lambda row: {"split": None} if row.participant == store[0].rows[0].participant else {})
    others = _rows(Store.open(nowhere), settings(run, store))["train"]
    assert others == [i for i in whole["train"] if store[0].rows[i].participant != store[0].rows[0].participant]
    for most in (1, 2, 5, 10**6):
        some = _rows(store[0], settings(run, store, max_volumes=most))
        assert some["test"] == whole["test"] and len(some["train"]) == min(most, len(whole["train"]))
        assert sorted(set(some["train"]) & set(whole["train"])) == some["train"]
        assert most == 1 or (some["train"][0], some["train"][-1]) == (whole["train"][0], whole["train"][-1])


def test_results_count_an_id_in_two_spellings_as_one_participant(run, store, tmp_path):
    folder = shutil.copytree(store[0].path, tmp_path / "spelt")
    edit_rows(folder, lambda row: {"participant": row.participant.lower()} if row.laterality == "L" else {})
    made = settings(run, store, store=str(folder), surfaces=["ilm"], mask_values=[], steps=1)
    rows = segment(made, tmp_path / "seg", baselines=False, echo=quiet)["results"]
    counts = [(row["n_train_participants"], row["n_test_participants"]) for row in rows]
    assert counts == [(10, 2)] and len({row.participant for row in Store.open(folder).rows}) == 24


WRONG_TRUTH = {
    "masks in another order of axes": ({"lesions": np.zeros((3, 2, 1), np.uint8)}, "expected lesions of shape"),
    "fewer surfaces than names": ({"surfaces": np.ones((1, SIZE[0], SIZE[2]))}, "expected surfaces of shape"),
    "masks of other values": ({"lesions": np.full(SIZE, 255, np.uint8)}, "no training volume has a voxel of mask_val"),
    "masks alone": (
        {"surface_names": np.array([], str)},
        r"no surface called ilm, bm; it holds none; surfaces=\[\] learns",
    ),
    "surfaces without rows": ({"surfaces": np.full((2, SIZE[0], SIZE[2]), np.nan)}, "no training volume has a row of"),
}


@pytest.mark.parametrize(("changes", "message"), WRONG_TRUTH.values(), ids=WRONG_TRUTH)
def test_truth_that_teaches_nothing_or_does_not_fit_is_refused_before_the_training(
    run, store, tmp_path, changes, message
):
    rewrite_truth(store, tmp_path / "truth", lambda file, _: file | changes)
    with pytest.raises(EvaluationError, match=message):
        segment(settings(run, (store[0], tmp_path / "truth")), tmp_path / "seg", baselines=False, echo=quiet)
    assert not (tmp_path / "seg").exists()


def test_surfaces_that_are_not_named_from_the_top_are_refused_before_the_training(run, store, tmp_path):
    """No surface is placed above the one before it: the upper one would be drawn along the lower."""
    with pytest.raises(EvaluationError, match="ilm lies above bm in the truth; name them from the vitreous downwards"):
        segment(settings(run, store, surfaces=["bm", "ilm"]), tmp_path / "seg", baselines=False, echo=quiet)
    assert not (tmp_path / "seg").exists()


def test_truth_of_test_volumes_is_read_before_the_training(run, store, tmp_path):
    test = next(row.acquisition for row in store[0].rows if row.split == "test")
    rewrite_truth(store, tmp_path / "truth", lambda file, _: file)
    (tmp_path / "truth" / f"{test}.npz").unlink()
    with pytest.raises(EvaluationError, match="no truth for this acquisition"):
        segment(settings(run, (store[0], tmp_path / "truth")), tmp_path / "seg", baselines=False, echo=quiet)
    assert not (tmp_path / "seg").exists()

    known = {row.acquisition for row in store[0].rows if row.split != "test"}
    unknown = {"surfaces": np.full((2, SIZE[0], SIZE[2]), np.nan)}
    rewrite_truth(store, tmp_path / "blank", lambda file, name: file if name in known else file | unknown)
    with pytest.raises(EvaluationError, match="no test volume has a row of ilm, bm"):
        segment(settings(run, (store[0], tmp_path / "blank")), tmp_path / "seg", baselines=False, echo=quiet)


def rewrite_truth(store, folder, change):
    folder.mkdir()
    for path in store[1].glob("*.npz"):
        with np.load(path) as file:
            np.savez(folder / path.name, **change(dict(file), path.stem))


def test_a_mask_may_not_be_called_like_a_surface(run, store):
    with pytest.raises(ConfigError, match="ilm occurs twice"):
        settings(run, store, mask_name="ilm")


def test_the_command_trains_and_applies(run, store, tmp_path):
    from octfm.phantom import write_phantom

    words = [f"encoder={run}", f"store={store[0].path}", f"truth={store[1]}", "surfaces=[ilm, bm]", "steps=3"]
    done = invoke("segment", *words, "--out", tmp_path / "seg")
    assert done.exit_code == 0 and "mean_height" in done.output, done.output
    clinic = write_phantom(tmp_path / "clinic", 1, 3, size=(6, 160, 48), scanners=["heidelberg_spectralis"], workers=1)
    source = str(next(iter(sorted(clinic.rglob("*.dcm")))))
    done = invoke("segment", source, "--apply", tmp_path / "seg", "--dicom", "--out", tmp_path / "found")
    assert done.exit_code == 0, done.output
    kinds = sorted("".join(p.name.rpartition("_")[2]) for p in (tmp_path / "found").iterdir())
    assert kinds == ["heights.dcm", "labels.json", "labels.nii.gz", "seg.dcm", "um.nii.gz"]
    for own in (["export", str(tmp_path / "seg")], ["segment", f"encoder={tmp_path / 'seg'}", *words[1:]]):
        done = invoke(*own, "--out", tmp_path / "no")
        assert "a run of octfm segment, which octfm segment FILE --apply RUN uses" in str(done.exception), done.output


@pytest.mark.slow
def test_the_example_of_the_guide_uses_a_training_and_trains_it_on(run, store, tmp_path, monkeypatch):
    segment(settings(run, store, steps=3), tmp_path / "runs" / "a_layers", baselines=False, echo=quiet)
    (tmp_path / "prepared").symlink_to(store[0].path)
    volume, _ = phantom_volume(7, size=(6, 160, 48))
    write_oct_dicom(tmp_path / "scan.dcm", volume.voxels, volume.spacing_mm)
    page = (ROOT / "docs" / "guide" / "evaluate.md").read_text()
    (code,) = re.findall(r'^```python title="own_segmenter.py"\n(.*?)^```', page, re.S | re.M)
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    exec(compile(code, "own_segmenter.py", "exec"), space)
    before, model = load_segmenter("runs/a_layers"), space["model"]
    assert space["found"].surfaces["ilm"].shape == volume.shape[::2]

    def loss_of(segmenter):
        with torch.no_grad():
            return float(segmenter.loss(segmenter.decoder(space["tokens"]), [space["truth"][space["k"]]]))

    assert loss_of(model) < loss_of(before)
    before.load_weights(torch.load("layers.pt"))
    assert loss_of(before) == loss_of(model)
    with pytest.raises(CheckpointError, match=r"--apply RUN uses, and octfm\.load_segmenter in Python"):
        octfm.export("runs/a_layers", "exported")


def test_a_training_is_applied_to_a_folder_with_the_eyes_that_its_paths_name(run, store, tmp_path, monkeypatch):
    nibabel = pytest.importorskip("nibabel")
    segment(settings(run, store, steps=3), tmp_path / "seg", baselines=False, echo=quiet)
    for name, seed in (("p1_OD", 3), ("p1_OS", 4)):
        volume, _ = phantom_volume(seed, size=(6, 160, 48))
        image = nibabel.Nifti1Image(volume.voxels.transpose(2, 1, 0), np.diag([*volume.spacing_mm[::-1], 1.0]))
        image.header.set_xyzt_units("mm")
        (tmp_path / "scans").mkdir(exist_ok=True)
        nibabel.save(image, tmp_path / "scans" / f"{name}.nii.gz")
    seen, found = [], Segmenter.segment
    monkeypatch.setattr(
        Segmenter, "segment", lambda self, volume: seen.append(volume.laterality) or found(self, volume)
    )
    (tmp_path / "no_scan.nii.gz").write_text("nothing")
    flat = np.tile(np.arange(48, dtype=np.uint8)[:, None, None], (1, 160, 6))  # in A-scans of one value
    image = nibabel.Nifti1Image(flat, np.diag([*volume.spacing_mm[::-1], 1.0]))
    image.header.set_xyzt_units("mm")
    nibabel.save(image, tmp_path / "flat.nii.gz")
    files = [str(tmp_path / name) for name in ("no_scan.nii.gz", "flat.nii.gz", "scans")]
    words = ["segment", *files, "--apply", str(tmp_path / "seg"), "--out", str(tmp_path / "found")]
    done = invoke(*words)
    assert done.exit_code == 1 and "2 of 4 scans could not be read" in done.output, done.output
    assert "found only A-scans of one value" in done.output
    assert f"{tmp_path / 'scans' / 'p1_OS.nii.gz'}\n" in done.output, "names of results may not say whose they are"
    assert seen == [None, "R", "L"]
    assert len(list((tmp_path / "found").glob("p1_O[DS]_labels.nii.gz"))) == 2


def test_scans_that_cannot_be_written_do_not_stop_a_folder_nor_overwrite_others(run, store, tmp_path):
    """Such as NIfTI files with --dicom, and a scan of the same name as one that was segmented before."""
    nibabel = pytest.importorskip("nibabel")
    pytest.importorskip("highdicom")
    from octfm.phantom import write_phantom

    segment(settings(run, store, steps=3), tmp_path / "seg", baselines=False, echo=quiet)
    clinic = write_phantom(tmp_path / "made", 1, 3, size=(6, 160, 48), scanners=["heidelberg_spectralis"], workers=1)
    dicom = sorted(clinic.rglob("*.dcm"))
    for folder, seed, source in (("p1", 3, dicom[0]), ("p2", 4, dicom[1])):
        volume, _ = phantom_volume(seed, size=(6, 160, 48))
        image = nibabel.Nifti1Image(volume.voxels.transpose(2, 1, 0), np.diag([*volume.spacing_mm[::-1], 1.0]))
        image.header.set_xyzt_units("mm")
        (tmp_path / folder).mkdir()
        nibabel.save(image, tmp_path / folder / "a.nii.gz")
        (tmp_path / folder / "z.dcm").write_bytes(source.read_bytes())
    out = tmp_path / "found"

    def applied(folder, *options):
        words = ["segment", str(tmp_path / folder), "--apply", str(tmp_path / "seg"), "--out", str(out)]
        return invoke(*words, *options)

    done = applied("p1", "--dicom")
    assert done.exit_code == 1 and "1 of 2 scans could not be read or written" in done.output, done.output
    assert "a.nii.gz: no DICOM file on this disk" in done.output
    names = {p.name for p in out.iterdir()}
    assert {"z_labels.nii.gz", "z_seg.dcm"} <= names and not list(out.glob("a_*")), "a refused scan has no results"
    before = {p.name: p.read_bytes() for p in out.iterdir()}
    done = applied("p2", "--dicom")
    assert done.exit_code == 1 and "2 of 2 scans could not be read or written" in done.output, done.output
    assert "z_labels.json: results of a scan other than" in done.output and "choose another --out" in done.output
    assert {p.name: p.read_bytes() for p in out.iterdir()} == before
    assert applied("p1").exit_code == 0, "a scan may overwrite its own results"


def test_labels_of_surfaces_alone_have_the_size_of_the_scan(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    volume, truth = phantom_volume(5, size=(6, 160, 48))
    found = replace(found_in(volume, truth), masks={})
    assert found.image_rows is None and np.nanmax(found.surfaces["bm"]) < 150
    _, labels = write_nifti(found, tmp_path, "eye", volume)
    assert nibabel.load(labels).shape == (48, 160, 6)


def found_in(volume, truth) -> Segmentation:
    surfaces = {name: truth.surface(name).astype(float) for name in ("ilm", "rpe", "bm")}
    return Segmentation(surfaces, {"fluid": np.isin(truth.lesions, (1, 2))}, volume.spacing_mm)


def test_label_maps_are_the_layers_between_surfaces():
    volume, truth = phantom_volume(5, size=(6, 160, 48), diagnosis="dme", severity=0.9)
    labels, meaning = label_map(found_in(volume, truth))
    assert labels.shape == volume.shape and meaning == {1: "ilm to rpe", 2: "rpe to bm", 3: "fluid"}
    thickness = ((labels > 0).sum(1) * volume.spacing_mm[1] * 1000).mean()
    expected = ((truth.surface("bm") - truth.surface("ilm")) * volume.spacing_mm[1] * 1000).mean()
    assert thickness == pytest.approx(expected, rel=0.03)


def test_surfaces_above_the_image_give_a_label_map_without_layers():
    above = {name: np.full((2, 5), row) for name, row in (("ilm", -9.0), ("bm", -4.0))}
    labels, meaning = label_map(Segmentation(above, {}, (0.1, 0.004, 0.01)))
    assert not labels.any() and labels.shape[::2] == (2, 5) and meaning == {1: "ilm to bm"}


def test_nifti_is_read_back_with_its_spacing(tmp_path):
    nibabel = pytest.importorskip("nibabel")
    volume, truth = phantom_volume(5, size=(6, 160, 48), diagnosis="dme", severity=0.9)
    found = found_in(volume, truth)
    heights, labels = (nibabel.load(path) for path in write_nifti(found, tmp_path, "eye"))
    assert heights.shape == (48, 6, 3) and labels.shape == (48, 160, 6)
    dz, dy, dx = volume.spacing_mm
    np.testing.assert_allclose(labels.header.get_zooms(), (dx, dy, dz), rtol=1e-5)
    np.testing.assert_allclose(heights.get_fdata()[:, :, 0].T, found.heights_um("ilm"), rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(labels.dataobj).transpose(2, 1, 0), label_map(found)[0])


def test_dicom_segments_and_heights_refer_to_the_file_they_came_from(tmp_path):
    highdicom = pytest.importorskip("highdicom")
    from pydicom import dcmread

    from octfm.formats import read_volume
    from octfm.phantom import write_phantom

    clinic = write_phantom(
        tmp_path / "clinic", 1, 3, size=(6, 160, 48), scanners=["heidelberg_spectralis"], diagnoses=["dme"], workers=1
    )
    source = next(iter(sorted(clinic.rglob("*.dcm"))))
    volume = read_volume(str(source))
    with np.load(clinic / "ground_truth" / f"{volume.acquisition}.npz") as file:
        names = file["surface_names"].tolist()
        surfaces = {name: file["surfaces"][names.index(name)].astype(float) for name in ("ilm", "rpe", "bm")}
        found = Segmentation(surfaces, {"fluid": np.isin(file["lesions"], (1, 2))}, volume.spacing_mm)
    seg_path, height_path = write_dicom(found, source, tmp_path)
    seg = highdicom.seg.segread(seg_path)
    labels, meaning = label_map(found)
    assert [seg.get_segment_description(n).segment_label for n in seg.segment_numbers] == list(meaning.values())
    frames = seg.get_pixels_by_source_frame(volume.acquisition, list(range(1, 7)), combine_segments=True)
    np.testing.assert_array_equal(frames, labels)
    heights = dcmread(height_path)
    assert heights.ReferencedImageSequence[0].ReferencedSOPInstanceUID == volume.acquisition
    assert [s.SegmentLabel for s in heights.SegmentSequence] == ["ilm", "rpe", "bm"]
    values = np.frombuffer(heights.FloatPixelData, "<f4").reshape(3, 6, 48)
    np.testing.assert_allclose(values[0], surfaces["ilm"], rtol=1e-5)


@pytest.mark.slow
def test_the_report_of_a_run_shows_its_head_and_its_segmentation(run, store, tmp_path, monkeypatch):
    """octfm finetune (a pooling probe), octfm segment, octfm embed --head --segment, octfm report: both are in the
    viewer."""
    labels = tmp_path / "labels.tsv"
    labels.write_text("participant_id\tsick\n" + "".join(f"P{i:03d}\t{('yes', 'no')[i % 2]}\n" for i in range(12)))
    base = {
        "encoder": str(run),
        "store": str(store[0].path),
        "labels": str(labels),
        "target": "sick",
        "epochs": 1,
        "tokens_per_volume": 16,
    }
    head = finetune(load(FinetuneConfig, base | {"lr_encoder": 0, "pool": "attention"}), tmp_path / "head", echo=quiet)
    segment(settings(run, store, steps=5), tmp_path / "seg", baselines=False, echo=quiet)
    embed = ["embed", str(run), "--store", str(store[0].path), "--no-baselines"]
    assert invoke(*embed).exit_code == 0
    before = (run / "embeddings" / "pretrained.parquet").read_bytes()
    monkeypatch.setattr(
        embedding, "_in_batches", lambda *_: pytest.fail("vectors that are there are not computed again")
    )
    done = invoke(*embed, "--head", head, "--segment", tmp_path / "seg")
    assert done.exit_code == 0, done.output
    assert (run / "embeddings" / "pretrained.parquet").read_bytes() == before
    scenes, found = load_scenes(run / "figures" / "scenes.npz"), load_segmenter(tmp_path / "seg")
    assert {"L", "R"} == {scene.laterality for scene in scenes}
    for scene in scenes:
        rows, mask = found.predict(scene.voxels)
        drawn = scene.overlay("segmentation")
        np.testing.assert_array_equal(drawn[np.isfinite(drawn)], rows[np.isfinite(drawn)])
        np.testing.assert_array_equal(scene.overlay("lesions") > 0, mask)
        seen = scene.as_seen().overlay("segmentation")
        np.testing.assert_array_equal(seen, drawn[..., ::-1] if scene.laterality == "L" else drawn)
    page = write_report(run, tmp_path / "report.html").read_text()
    data = json.loads(re.search(r'<script type="application/json"[^>]*>(.*?)</script>', page, re.S)[1])
    for volume in data["volumes"]:
        assert {"attention", "segmentation", "lesions", "pca", "mask", "band"} <= {
            overlay["key"] for overlay in volume["overlays"]
        }
    other = small_preprocessing().model_copy(update={"margin_mm": 0.02})
    changed = small_store(tmp_path / "other", splits=("train",) * 2, preprocessing=other)
    unlike = quick_pretrain(pretrain_config(steps=1), changed, tmp_path / "unlike", echo=quiet)
    with pytest.raises(EvaluationError, match=r"prepared with other settings than .* was trained on \(margin_mm"):
        embed_all(str(unlike), changed.path, segmenter=tmp_path / "seg", echo=quiet)
    assert not (unlike / "embeddings").exists()
