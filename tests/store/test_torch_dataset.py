"""A store as a dataset of PyTorch: in a DataLoader with workers, with labels, and with participants kept apart."""

import pickle
import re
import shutil

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from octfm.errors import ConfigError, EvaluationError, StoreError
from octfm.pretraining.preflight import data as preflight
from octfm.store.layout import read_rows
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from support import ROOT
from support.dicom_files import write_oct_dicom
from support.small_store import GRADES, darkened, edit_rows, small_store
from support.untrained import untrained_encoder, write_export
from support.volumes import eye


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    """Brightness in three grades, a label of each participant, and one eye less with a label."""
    folder = tmp_path_factory.mktemp("store")
    small_store(folder, darkened)

    def labels(row):
        number = int(row.participant[1:])
        found = {"grade": GRADES[number % 3], "age": str(40 + number)}
        return {"participant_labels": {} if number == 7 else found}

    edit_rows(folder, labels)
    return Store.open(folder)


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "labels.csv"
    people = "".join(f"P{n:03d},{('healthy', 'dme')[n % 2]}\n" for n in range(12) if n != 2)
    path.write_text("participant_id,diagnosis\n" + people)
    return path


def first(item):
    """Of the module, because a spawned worker imports it."""
    return item["voxels"].float().mean(), item["label"]


def test_it_is_a_dataset_of_prepared_volumes(store):
    data = store.as_torch(target="grade", split="train")
    assert isinstance(data, Dataset) and len(data) == 14
    item = data[3]
    assert {name: (value.dtype, tuple(value.shape)) for name, value in item.items() if name != "index"} == {
        "voxels": (torch.uint8, (1, 8, 64, 32)),
        "band": (torch.float32, (2, 8, 32)),
        "valid": (torch.int16, (2, 8, 32)),
        "label": (torch.int64, ()),
    }
    stored = store[item["index"]]
    np.testing.assert_array_equal(item["voxels"][0], stored.voxels)
    assert data.classes == tuple(sorted(GRADES)), "grades of no known order are sorted"
    assert data.classes[item["label"]] == stored.row.participant_labels["grade"]
    assert set(store.as_torch()[0]) == {"voxels", "band", "valid", "index"} and len(store.as_torch()) == 24
    with pytest.raises(IndexError):
        data[14]


@pytest.mark.parametrize("how", ["fork", pytest.param("spawn", marks=pytest.mark.slow), None])
def test_workers_give_the_same_batches_as_no_worker(store, how):
    data = store.as_torch(target="grade", split="train")
    data[0]  # opened in this process, whose readers a forked worker must not use
    options = {"num_workers": 2, "multiprocessing_context": how, "timeout": 120} if how else {}
    batches = list(DataLoader(data, batch_size=4, **options))
    assert [len(batch["index"]) for batch in batches] == [4, 4, 4, 2]
    index = torch.cat([batch["index"] for batch in batches])
    assert index.tolist() == data.rows.tolist()
    np.testing.assert_array_equal(torch.cat([b["voxels"] for b in batches])[:, 0], store.read(index).voxels)
    assert torch.cat([batch["label"] for batch in batches]).tolist() == data.labels.tolist()


def test_splits_keep_participants_apart_and_number_classes_alike(store, table):
    parts = [store.as_torch(table, split=split) for split in ("train", "val", "test")]
    people = [set(part.participants) for part in parts]
    assert not people[0] & people[1] and not people[1] & people[2] and not people[0] & people[2]
    assert {part.classes for part in parts} == {("healthy", "dme")}, "healthy first, as in probes"
    assert sum(map(len, parts)) == 22 and "P002" not in set().union(*people), "no label, no item"


def test_a_participant_in_two_splits_is_refused(tmp_path):
    small_store(tmp_path / "s", splits=("train", "test"))
    edit_rows(tmp_path / "s", lambda row: {"split": "test" if row.index == 0 else row.split})
    with pytest.raises(StoreError, match="P000 is in split test and in train"):
        Store.open(tmp_path / "s").as_torch(split="train")
    names = {"P000": "1001", "P001": "00001001"}
    edit_rows(tmp_path / "s", lambda row: {"participant": names[row.participant], "split": "train"})
    assert len(Store.open(tmp_path / "s").as_torch(split="train")) == 4, "one person"
    edit_rows(tmp_path / "s", lambda row: {"split": "test" if row.participant == "1001" else "train"})
    with pytest.raises(StoreError, match="1001 is in split test and as 00001001 in train"):
        Store.open(tmp_path / "s").as_torch(split="train")
    store = Store.open(tmp_path / "s")
    check = preflight.splits(store, np.array([0, 1]), np.array([2, 3]))
    assert (check.status, check.measured) == ("FAIL", "1 participants are in training and validation")


def test_labels_may_be_a_data_frame_and_numbers_are_float32(store):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(
        {"participant_id": [f"P{n:03d}" for n in range(12)], "cst_um": [250.5 + n for n in range(11)] + [None]}
    )
    data = store.as_torch(frame, split=None)
    assert data.classes is None and data.labels.dtype == np.float32 and len(data) == 22
    assert data[4]["label"] == torch.tensor(252.5) and data[4]["label"].dtype == torch.float32
    with pytest.raises(EvaluationError, match=r"DataFrame: expected a column participant_id"):
        store.as_torch(frame[["cst_um"]])


def test_labels_may_be_a_series_or_a_table_of_another_library(store):
    pandas, pyarrow = pytest.importorskip("pandas"), pytest.importorskip("pyarrow")
    people = [f"P{n:03d}" for n in range(12)]
    frame = pandas.DataFrame({"participant_id": people, "months": [10.5 + n for n in range(12)]})
    expected = store.as_torch(frame)
    for labels in (frame.set_index("participant_id").months, pyarrow.Table.from_pandas(frame)):
        data = store.as_torch(labels)
        assert data.target == "months" and data.labels.tolist() == expected.labels.tolist()
    grades = {"participant_id": people, "grade": [n % 3 if n else None for n in range(12)]}
    assert store.as_torch(pyarrow.table(grades)).classes == ("0", "1", "2"), "as in a file"
    with pytest.raises(EvaluationError, match=r"got months; rename the column or index that says whose labels"):
        store.as_torch(frame.set_index("participant_id", drop=True).rename_axis(None).months)


def test_ordered_categories_are_numbered_in_their_order(store):
    """By name, advanced would be graded below early."""
    pandas = pytest.importorskip("pandas")
    grades = ["early", "middle", "advanced"]
    frame = pandas.DataFrame({"participant_id": [f"P{n:03d}" for n in range(12)], "stage": [*grades] * 4})
    kind = pandas.CategoricalDtype([*grades, "blind", "unknown"], ordered=True)
    assert store.as_torch(frame).classes == ("advanced", "early", "middle")
    assert store.as_torch(frame.astype({"stage": kind})).classes == ("early", "middle", "advanced")
    assert store.as_torch(frame.astype({"stage": "category"})).classes == ("advanced", "early", "middle"), "not ordered"
    numbers = frame.assign(stage=pandas.Categorical([2, 3, 1] * 4, [3, 2, 1], ordered=True))
    assert store.as_torch(numbers.set_index("participant_id").stage).classes == ("3", "2", "1")


@pytest.mark.parametrize(
    "wrong, error, says",
    [
        ({"split": "training"}, ConfigError, "splits present: test, train, val"),
        ({"target": "iop"}, EvaluationError, "no label column iop; columns: age, grade"),
        ({"target": 0}, EvaluationError, "target: expected the name of a label column, got 0; columns: age, grade"),
        ({"target": ["a"], "labels": "two"}, EvaluationError, r"got \['a'\]; columns: a, age, b, grade"),
        ({"target": ""}, EvaluationError, "target: expected the name of a label column, got ''"),
        ({"modalities": "octa"}, ConfigError, r'modalities: expected \("structure",\).* got \'octa\''),
        ({"transform": "flip"}, ConfigError, "transform: expected a function of an item, got 'flip'"),
        ({"labels": "two"}, EvaluationError, "target: name one of the label columns: a, b"),
        ({"labels": "two", "target": "a"}, EvaluationError, "matches these scans"),
        ({"labels": "nowhere.csv"}, EvaluationError, "no such label table"),
    ],
)
def test_what_does_not_fit_is_said_in_one_line(store, tmp_path, wrong, error, says):
    if wrong.get("labels") == "two":
        (tmp_path / "two.csv").write_text("participant_id,a,b\nX,1,2\n")
        wrong = {**wrong, "labels": tmp_path / "two.csv"}
    with pytest.raises(error, match=says) as raised:
        store.as_torch(**wrong)
    assert "\n" not in str(raised.value)


def test_it_pickles_as_a_path_and_transforms_in_the_worker(store):
    data = store.as_torch(target="grade", split="val", transform=first)
    assert len(pickle.dumps(data)) < 3000
    (means, labels), *_ = DataLoader(pickle.loads(pickle.dumps(data)), batch_size=4)
    assert means.shape == labels.shape == (4,)


def moved_here(folder, made):
    """A store in which the same rows are other volumes takes the place of `folder`, as of one prepared again."""
    shutil.rmtree(folder)
    small_store(made, darkened)
    edit_rows(made, lambda row: {"acquisition": f"1.2.3.{23 - row.index}"})
    made.rename(folder)


def test_a_worker_refuses_a_store_that_was_replaced(tmp_path):
    """It would read the volumes of the new store and label them as those of the old one."""
    whole = small_store(tmp_path / "own", darkened)
    sent = [pickle.dumps(each) for each in (whole, whole.part([3, 1]), whole.as_torch())]
    moved_here(tmp_path / "own", tmp_path / "again")
    for each in sent:
        with pytest.raises(StoreError, match="own: another store is here than was opened"):
            pickle.loads(each)


def test_a_store_that_was_replaced_is_not_read_on(tmp_path):
    """Its shards are whole, and volumes that have been read before are not compared with rows.jsonl again."""
    whole = small_store(tmp_path / "own", darkened)
    data = whole.as_torch()
    first_time = data[3]["voxels"]
    moved_here(tmp_path / "own", tmp_path / "again")
    with pytest.raises(StoreError, match="own: another store is here than was opened"):
        data[3]
    shutil.rmtree(tmp_path / "own")
    small_store(tmp_path / "own", darkened)
    assert torch.equal(Store.open(tmp_path / "own").as_torch()[3]["voxels"], first_time)


def test_a_store_that_has_grown_is_read_as_before(tmp_path):
    small_store(tmp_path / "own", darkened, splits=("train", "test"))
    whole = Store.open(tmp_path / "own")
    data, sent = whole.as_torch(), pickle.dumps(whole.as_torch())
    before = [data[row]["voxels"] for row in range(4)]
    small_store(tmp_path / "more", darkened)
    rows = read_rows(tmp_path / "more")[0][4:]
    with StoreWriter(tmp_path / "own", whole.preprocessing) as writer:
        for row in rows:
            stage(Store.open(tmp_path / "more")[row.index], writer.staging, "new", writer.compression)
            writer.append(row, "new")
    for each in (data, pickle.loads(sent)):
        assert all(torch.equal(each[row]["voxels"], before[row]) for row in range(4))


def test_a_part_of_a_store_gives_its_own_volumes(store):
    part = store.part([20, 3, 4])
    data = part.as_torch(target="grade")
    (batch,) = DataLoader(data, batch_size=3, num_workers=1, multiprocessing_context="fork", timeout=120)
    np.testing.assert_array_equal(batch["voxels"][:, 0], store.read([20, 3, 4]).voxels)


@pytest.fixture(scope="module")
def workplace(store, tmp_path_factory):
    """A folder as the guide's examples expect it: prepared, exported, labels.csv and scan.dcm."""
    folder = tmp_path_factory.mktemp("workplace")
    (folder / "prepared").symlink_to(store.path)
    write_export(folder / "exported", untrained_encoder())
    people = "".join(f"P{n:03d},{10 + 3 * n},{n % 2}\n" for n in range(12))
    (folder / "labels.csv").write_text("participant_id,months,event\n" + people)
    volume = eye()
    write_oct_dicom(folder / "scan.dcm", volume.voxels, volume.spacing_mm)
    return folder


def run_example(title, space):
    page = (ROOT / "docs" / "guide" / "notebooks.md").read_text()
    (code,) = re.findall(rf'^```python title="{title}"\n(.*?)^```', page, re.S | re.M)
    exec(compile(code, title, "exec"), space)


@pytest.mark.parametrize("title", ["vectors.py", "monai_decoder.py"])
def test_the_examples_of_the_guide_run(workplace, title, monkeypatch):
    if title.startswith("monai"):
        pytest.importorskip("monai", reason="MONAI is optional; pip install 'octfm[bench]'")
    monkeypatch.chdir(workplace)
    space: dict = {}
    run_example(title, space)
    if title == "vectors.py":
        assert space["one"].shape == (48,) and space["some"].shape == (2, 48) and space["all_of_them"].shape == (24, 48)
    else:
        assert space["loss"].isfinite() and space["model"].network.norm.weight.grad.abs().sum() > 0


def test_the_task_of_ones_own_in_the_guide_runs_and_reads_tokens_as_heads_do(workplace, store, monkeypatch, capsys):
    monkeypatch.chdir(workplace)
    space: dict = {}
    run_example("own_task.py", space)
    network, model = space["network"], space["model"]
    assert network.norm.weight.grad.abs().sum() > 0 and not model.training
    (said,) = re.findall(r"test: off by ([\d.]+) months in (\d+) participants", capsys.readouterr().out)
    assert np.isfinite(float(said[0])) and int(said[1]) == len(set(space["test"].participants))
    assert not {*space["train"].participants} & {*space["val"].participants, *space["test"].participants}

    space["head"] = torch.nn.Identity()
    batch = next(iter(DataLoader(space["test"], batch_size=3)))
    with torch.no_grad():
        vectors = space["predict"](batch)
    tokens, tissue = space["encoder"].tissue_tokens(store.read(batch["index"].numpy()))
    means = [own[chosen].mean(0) for own, chosen in zip(tokens, tissue, strict=True)]
    np.testing.assert_allclose(vectors, means, atol=1e-5)

    space["head"] = torch.nn.Linear(network.num_features, 1)
    run_example("layer_rates.py", space)
    rates = {p: group["lr"] for group in space["optimizer"].param_groups for p in group["params"]}
    first, last = network.blocks
    ordered = (network.patch_embed.bias, first.norm1.bias, last.norm1.bias, network.norm.bias)
    assert [rates[p] for p in ordered] == pytest.approx([1e-4 * 0.75**level for level in (3, 2, 1, 0)])
    assert rates[space["head"].bias] == 1e-3
    assert rates.keys() == {*network.parameters(), *space["head"].parameters()}

    run_example("survival_loss.py", space)
    rates = torch.zeros(3, requires_grad=True)
    space["loss_of"](rates, batch).backward()
    events = np.array([int(store[int(row)].row.participant[1:]) % 2 for row in batch["index"]])
    np.testing.assert_allclose(rates.grad * 3, batch["label"].numpy() - events, err_msg="expected minus seen events")


def test_a_plain_loop_learns_what_is_to_be_seen(store):
    """Three grades of brightness by the network and a linear layer on it, in a loop without octfm's."""
    torch.manual_seed(0)
    network = untrained_encoder().network
    head = torch.nn.Linear(network.num_features, 3)
    optimizer = torch.optim.AdamW([*network.parameters(), *head.parameters()], lr=3e-3)
    for _ in range(12):
        for batch in DataLoader(store.as_torch(target="grade", split="train"), batch_size=7, shuffle=True):
            logits = head(network.forward_features(batch["voxels"]).mean(1))
            loss = torch.nn.functional.cross_entropy(logits, batch["label"])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    with torch.no_grad():
        (test,) = DataLoader(store.as_torch(target="grade", split="test"), batch_size=4)
        answers = head(network.forward_features(test["voxels"]).mean(1)).argmax(1)
    assert (answers == test["label"]).float().mean() >= 0.75
