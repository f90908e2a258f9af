"""Volumes without image are set aside or named, and a list leaves out volumes wherever they are chosen."""

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octfm.catalog.columns import composed
from octfm.encoder.embed import embed_store
from octfm.encoder.embeddings import read_embeddings, without_excluded_vectors
from octfm.encoder.encoder import load_encoder
from octfm.errors import CheckpointError, ConfigError, StoreError
from octfm.pretraining.preflight import examine
from octfm.pretraining.pretrain import pretrain
from octfm.store.exclusion import excluded, named_lines, without_excluded
from octfm.store.prepare import prepare
from octfm.volume.volume import Volume
from support.command_line import COMMAND, invoke
from support.small_store import small_store
from support.store_samples import NATIVE, SMALL, SPACING_MM, acquisition, catalog, read_sample
from support.tiny_runs import config, quick_pretrain, quiet

EMPTY = 3
"""The volume of `store_with_an_empty_one` that holds no image: the left eye of P001."""


def empty(seed, prepared):
    return replace(prepared, valid=0 * prepared.valid, band=0 * prepared.band) if seed == EMPTY else prepared


def silent(_: str) -> None:
    pass


def read_stripes(uri: str) -> Volume:
    """A volume whose A-scans have one value each; the others are as ever."""
    stripes = np.broadcast_to(np.arange(NATIVE[2], dtype=np.uint8), NATIVE)
    return Volume(np.ascontiguousarray(stripes), SPACING_MM) if uri.endswith("stripes") else read_sample(uri)


def read_corner(uri: str) -> Volume:
    """Image in a corner that the prepared field does not reach, one value elsewhere."""
    voxels = np.full((30, 40, 200), 7, np.uint8)
    voxels[:3, :, :10] = np.random.default_rng(0).integers(0, 255, (3, 40, 10))
    return Volume(voxels, SPACING_MM)


def test_a_volume_without_image_is_set_aside(tmp_path):
    rows = [acquisition(0), acquisition(1, "stripes"), acquisition(2)]
    store = prepare(catalog(rows), tmp_path / "s", SMALL, workers=0, progress=False, read=read_stripes)
    assert [row.acquisition for row in store.rows] == ["1.2.3.0", "1.2.3.2"]
    (left,) = store.unprepared()
    assert (left.code, left.acquisition) == ("no_image", "1.2.3.1") and left.uri in left.sentence


def test_image_outside_the_prepared_field_is_no_image(tmp_path):
    rows = [acquisition(0, shape=(30, 40, 200))]
    with pytest.raises(StoreError, match=r"1 with no_image, for example: sample:0:reads: expected image"):
        prepare(catalog(rows), tmp_path / "s", SMALL, workers=0, progress=False, read=read_corner)


@pytest.fixture(scope="module")
def run_and_old_store(tmp_path_factory):
    """A finished run, and a store of before `no_image` that holds an empty volume."""
    folder = tmp_path_factory.mktemp("old")
    run = quick_pretrain(config(steps=2), small_store(folder / "sound"), folder / "run", echo=quiet)
    return run, small_store(folder / "prepared", edit=empty)


def test_an_empty_volume_of_an_old_store_is_named(run_and_old_store, tmp_path):
    run, store = run_and_old_store
    named = r"acquisition 1\.2\.3\.3: expected two or more tokens.*leave it out .*data\.exclude or --exclude"
    with pytest.raises(StoreError, match=named):
        embed_store(load_encoder(run), store, tmp_path, echo=quiet)
    with pytest.raises(StoreError, match=named):
        examine(config(data={**config().data.model_dump(), "store": str(store.path)}), tmp_path / "run")


def test_exclude_leaves_it_out_of_embed_doctor_and_pretrain(light_checks, run_and_old_store, tmp_path, capsys):
    run, store = run_and_old_store
    listed = tmp_path / "exclude.txt"
    listed.write_text("# blank export\n1.2.3.3 # left eye\nPP001\n")
    out = tmp_path / "vectors"
    result = invoke("embed", run, "--store", store.path, "--exclude", listed, "--no-baselines", "--out", out)
    assert result.exit_code == 0, result.output
    assert "1.2.3.3" not in read_embeddings(out / "pretrained.parquet").acquisition
    assert "line 3" in result.stderr and "PP001; did you mean P001?" in result.stderr

    chosen = config(steps=1, data={**config().data.model_dump(), "exclude": str(listed)})
    trained = pretrain(chosen, store, tmp_path / "run", echo=quiet)
    pretrain(chosen, store, tmp_path / "run", echo=quiet)  # the same list goes on
    listed.write_text("1.2.3.3\nP002\n")
    with pytest.raises(CheckpointError, match="training volumes"):
        pretrain(chosen, store, trained, echo=quiet)
    listed.write_text("1.2.3.3\nP009\n")  # only validated on
    with pytest.raises(CheckpointError, match="training volumes"):
        pretrain(chosen, store, trained, echo=quiet)
    assert "exclude.txt" in (trained / "config.yaml").read_text()
    with pytest.raises(CheckpointError, match=r"other values of data\.exclude") as refused:
        pretrain(config(steps=1), store.part([0, 1, 2, 4, 5, 6, 7]), trained, echo=quiet)
    assert "--override" not in str(refused.value), "which is refused for other volumes"


def test_a_part_of_a_store_reads_as_a_store(tmp_path):
    whole = small_store(tmp_path / "s")
    part = pickle.loads(pickle.dumps(whole.part([5, 0, 7])))
    assert [row.index for row in part.rows] == [0, 1, 2] and len(part) == 3
    np.testing.assert_array_equal(part.read([2, 0]).voxels, whole.read([7, 5]).voxels)
    assert part.read([1]).acquisition == (whole.rows[0].acquisition,)
    assert part.verify() == 3 and len(part.left_out) == len(whole) - 3
    with pytest.raises(StoreError, match="no row 3"):
        part.read([3])
    shard = next((tmp_path / "s" / "voxels").glob("c.7.*"))
    shard.write_bytes(b"")
    assert list(part.damaged()) == [2]


@pytest.mark.parametrize("name", ["1.2.3.4", "4.dcm", "P002"])
def test_a_line_names_an_acquisition_a_uri_or_a_participant(tmp_path, name):
    store, listed = small_store(tmp_path / "s"), tmp_path / "list"
    listed.write_bytes(f"\ufeff  {name}\t# why\r\n\r\n#P001\r\n".encode())
    lines = []
    part = without_excluded(store, listed, lines.append)
    gone = {row.acquisition for row in store.rows} - {row.acquisition for row in part.rows}
    assert gone == ({"1.2.3.4", "1.2.3.5"} if name == "P002" else {"1.2.3.4"})
    assert len(lines) == 1 and "are left out" in lines[0]


def test_a_participant_who_is_listed_is_left_out_under_the_id_of_another_scanner_too(tmp_path):
    """As whoever withdraws consent would expect; a uri or acquisition that looks like an id is nobody."""
    (tmp_path / "list").write_text("1001\n7\np-44\n11-1\n")
    volumes = [
        ("1.2.3", "a", "1001"),
        ("1.2.4", "b", "00001001"),
        ("1.2.5", "c", "1002"),
        ("7", "d", "8"),
        ("1.2.6", "e", "007"),
        ("1.2.7", "f", "0044"),
        ("1.2.8", "g", "1-11"),
        ("1.2.9", "h", "11_01"),
        ("1.2.0", "i", "111"),
    ]
    lines = []
    out = excluded(tmp_path / "list", volumes, "here", echo=lines.append)
    assert out.tolist() == [True, True, False, True, False, True, False, True, False] and not lines
    (tmp_path / "set_aside").write_text("0002\n")
    volumes = [("a", "/a", "2"), ("b", "/b", "3")]
    out = excluded(tmp_path / "set_aside", volumes, "here", ("0002", "/c"), lines.append)
    assert not out.any(), "0002 is a scan that could not be prepared, and nobody's id"


def test_prepare_leaves_out_what_is_listed(tmp_path):
    listed = tmp_path / "list"
    listed.write_text("P000\nsample:3:truncated\nP7\n")
    rows = catalog([*(acquisition(i) for i in range(3)), acquisition(3, "truncated")])
    common = {"workers": 0, "progress": False, "read": read_sample}
    store = prepare(rows, tmp_path / "s", SMALL, exclude=listed, **common)
    assert [row.participant for row in store.rows] == ["P001"] and not store.unprepared()
    assert len(prepare(rows, tmp_path / "s", SMALL, **common)) == 3


def test_vectors_of_listed_participants_are_left_out(run_and_old_store, tmp_path):
    run, store = run_and_old_store
    path = embed_store(load_encoder(run), store.part([0, 1, 2]), tmp_path, echo=quiet)
    (tmp_path / "list").write_text("P000\n")
    kept = without_excluded_vectors(read_embeddings(path), tmp_path / "list", silent)
    assert kept.participant.tolist() == ["P001"] and kept.vectors.shape[0] == len(kept.laterality) == 1


def test_lists_that_cannot_be_meant_are_refused(tmp_path):
    listed = tmp_path / "list"
    with pytest.raises(ConfigError, match="No such file"):
        named_lines(listed)
    listed.write_text("# nothing\n\n")
    with pytest.raises(ConfigError, match="names nothing"):
        named_lines(listed)
    listed.write_bytes(b"\xff\xfe\x00P")
    with pytest.raises(ConfigError, match="not text in UTF-8"):
        named_lines(listed)
    listed.write_text("a\nb\n")
    with pytest.raises(ConfigError, match="all 2 volumes of here"):
        excluded(listed, [("a",), ("b",)], "here", echo=silent)


def test_a_name_with_an_umlaut_is_found_however_it_is_written(tmp_path):
    """macOS writes folders with u and two dots of their own: their volumes were not left out, to `did you mean` the
    same name."""
    (tmp_path / "list").write_text("/oct/M\u00fcller/a.e2e\nGro\u0308n\n/oct/Zo\u0308e.e2e\n", "utf-8")
    volumes = [("1.2.3", "/oct/Mu\u0308ller/a.e2e", "P1"), ("1.2.4", "/oct/b.e2e", "Gr\u00f6n"), ("1.2.5", "c", "P2"),
               ("1.2.6", "/oct/Z\u00f6e.e2e", "P3")]  # fmt: skip
    lines = []
    assert excluded(tmp_path / "list", volumes, "here", echo=lines.append).tolist() == [True, True, False, True]
    assert not lines


def test_a_long_list_of_another_cohort_is_not_compared_with_every_name(tmp_path):
    """Each such comparison takes six seconds in 500,000 volumes, and a list may have thousands of lines."""
    (tmp_path / "list").write_text("P0000\n" + "".join(f"q{i:04d}\n" for i in range(100)))
    lines = []
    out = excluded(tmp_path / "list", [(f"P{i:04d}",) for i in range(1000)], "here", echo=lines.append)
    assert out.sum() == 1 and len(lines) == 100
    assert [i for i, line in enumerate(lines) if "did you mean" in line] == [0, 1, 2]


NAMES = (
    st.text(st.characters(codec="utf-8", categories=("L", "N", "P", "S")), min_size=1, max_size=12)
    .map(composed)
    .filter(lambda name: not name.startswith("#"))
)


@settings(max_examples=25)
@given(names=st.lists(NAMES, min_size=2, max_size=6, unique=True), absent=NAMES)
def test_any_name_can_be_listed(tmp_path_factory, names, absent):
    file = tmp_path_factory.getbasetemp() / "names.txt"
    file.write_text("\n".join([*names[:-1], absent]), encoding="utf-8")
    lines = []
    if absent == names[-1]:
        return
    out = excluded(file, [(name, "nobody") for name in names], "the store", echo=lines.append)
    assert out.tolist() == [True] * (len(names) - 1) + [False]
    assert len(lines) == (absent not in names)


READ = {
    "prepare": "CATALOG --exclude LIST --out OUT --workers 0",
    "embed": "RUN --store STORE --exclude LIST --out OUT",
    "embed --catalog": "RUN --catalog CATALOG --exclude LIST --out OUT --workers 0",
    "probe": "RUN --embeddings VECTORS --exclude LIST --out OUT",
    "leaderboard": "RUN --store STORE --exclude LIST --out OUT",
    "trust": "RUN --store STORE --exclude LIST --out OUT",
    "finetune": "study_group_linear encoder=RUN store=STORE exclude=LIST --out OUT",
    "segment": "encoder=RUN store=STORE truth=OUT exclude=LIST --out OUT",
    "doctor": "vit_s data.store=STORE data.exclude=LIST --out OUT",
}


@pytest.mark.parametrize("verb", READ)
def test_every_verb_that_chooses_volumes_reads_the_list(run_and_old_store, tmp_path, verb):
    run, store = run_and_old_store
    assert READ.keys() >= {
        name for name, own in COMMAND.commands.items() if any(p.name == "exclude" for p in own.params)
    }
    catalog([acquisition(n) for n in range(3)]).save(tmp_path / "catalog")
    (tmp_path / "list").write_text("# nobody\n")
    if verb == "probe":
        embed_store(load_encoder(run), store.part([0, 1, 2]), tmp_path / "vectors", echo=quiet)
    places = {name: tmp_path / name.lower() for name in ("CATALOG", "VECTORS", "LIST", "OUT")}
    places |= {"RUN": run, "STORE": store.path}
    words = [verb.split()[0], *READ[verb].split()]
    for name, place in places.items():
        words = [word.replace(name, str(place)) for word in words]
    done = invoke(*words)
    assert isinstance(done.exception, ConfigError) and "names nothing" in str(done.exception), done
