"""OCT angiography: left out unless asked for, then a modality of its own that structural networks never get."""

import numpy as np
import pyarrow.parquet as pq
import pytest
from pydicom import uid

import octfm
from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.scan import scan
from octfm.config import load
from octfm.errors import ConfigError, EvaluationError
from octfm.formats import ReadError, read_volume
from octfm.phantom import phantom_volume
from octfm.pretraining import preflight
from octfm.pretraining.data import training_rows
from octfm.pretraining.settings import PretrainConfig
from octfm.store.prepare import prepare
from octfm.store.selection import select, to_evaluate
from octfm.store.store import Store
from octfm.tasks.embed_run import embed_all
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import MODALITIES
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.small_store import edit_rows, small_store
from support.tiny_runs import config, quick_pretrain
from support.vendor_files import write_npy, write_sidecar

FLOW = uid.OphthalmicOpticalCoherenceTomographyBscanVolumeAnalysisStorage
SMALL = Preprocessing(image_size=(16, 96, 64), target_spacing=(0.4, 0.02, 0.09))


@pytest.fixture(scope="module")
def clinic(tmp_path_factory):
    """Structure and flow of one left eye as DICOM, and flow of another that only its sidecar declares."""
    root = tmp_path_factory.mktemp("clinic")
    eye, _ = phantom_volume(3, scanner="topcon_maestro2", size=(16, 124, 64))
    flow = np.where(eye.voxels > np.quantile(eye.voxels, 0.9), eye.voxels, 0).astype(np.uint8)
    both = {"participant": "a", "laterality": "L", "superior_first": True}
    write_oct_dicom(root / "a" / "structure.dcm", eye.voxels, eye.spacing_mm, **both)
    write_oct_dicom(root / "a" / "flow.dcm", flow, eye.spacing_mm, sop_class=FLOW, **both)
    write_npy(root / "b" / "angio.npy", flow[:, :, ::-1].copy())
    write_sidecar(root / "b" / "angio.npy", eye.spacing_mm, participant="b", modality="OCTA")
    return root


def test_flow_is_skipped_unless_the_scan_asks_for_it(clinic, tmp_path):
    plain = scan(clinic, workers=0)
    assert [a.modality for a in plain.acquisitions] == ["structure"] and not plain.rejects
    assert [s.code for s in plain.skipped] == ["angiography"] * 2
    assert all("--modalities structure,octa" in s.sentence for s in plain.skipped), "it says how to get them"
    catalog = Catalog.load(scan(clinic, modalities=MODALITIES, workers=0).save(tmp_path / "catalog"))
    assert catalog.summary()["modalities"] == {"octa": 2, "structure": 1} and not catalog.skipped
    assert {a.laterality for a in catalog.acquisitions if a.participant == "a"} == {"L"}
    table = pq.read_table(plain.save(tmp_path / "old") / "catalog.parquet")
    pq.write_table(table.drop_columns(["modality"]), tmp_path / "old" / "catalog.parquet")
    assert Catalog.load(tmp_path / "old") == plain, "catalogs of before there were modalities"
    for asked in (["octa"], ["structure", "fundus"], []):
        with pytest.raises(CatalogError, match="expected structure or structure,octa"):
            scan(clinic, modalities=asked)


def test_flow_keeps_its_modality_from_file_to_store_and_no_band(clinic, tmp_path):
    catalog = scan(clinic, modalities=MODALITIES, pixels=True, workers=0)
    flow = [a for a in catalog.acquisitions if a.modality == "octa"]
    about_eyes = ("disc", "anatomy", "way_up", "upside")
    assert len(flow) == 2 and not [f for a in flow for f in a.flags if any(word in f for word in about_eyes)]
    store = prepare(catalog, tmp_path / "store", SMALL, workers=0, progress=False)
    assert sorted(row.modality for row in store.rows) == ["octa", "octa", "structure"] and not store.unprepared()
    for row in store.rows:
        if row.modality == "octa":
            arrays = store.read([row.index])
            assert not row.confident and "laterality_contradicts_anatomy" not in row.found
            np.testing.assert_array_equal(arrays.band, arrays.valid)
            assert row.transform["mirrored"] is (row.laterality == "L") and not any(row.transform["displacement"])


def test_reading_and_segmenting_flow_needs_a_word(clinic):
    place = clinic / "a" / "flow.dcm"
    with pytest.raises(ReadError) as caught:
        read_volume(place)
    assert caught.value.code == "angiography"
    volume = read_volume(place, structure_only=False)
    assert volume.modality == "octa" and "OCT angiography" in volume._repr_html_()
    assert read_volume(clinic / "b" / "angio.npy", structure_only=False).modality == "octa"
    with pytest.raises(ReadError, match="angiography"):
        octfm.segment(volume)


@pytest.fixture
def mixed(tmp_path) -> Store:
    """A store in which every third row is flow."""
    store = small_store(tmp_path / "prepared")
    edit_rows(store.path, lambda row: {"modality": "octa" if row.index % 3 == 0 else "structure"})
    return Store.open(store.path)


def test_structural_training_never_takes_flow_unless_asked(mixed):
    data = {"store": str(mixed.path), "global_batch_size": 4}
    for asked in (["structure"], ["octa"], ["structure", "octa"]):
        settings = load(PretrainConfig, {"data": data if asked == ["structure"] else data | {"modalities": asked}})
        for rows in training_rows(settings, mixed):
            assert len(rows) and {mixed.rows[row].modality for row in rows} == set(asked)
    said = preflight.data.arithmetic(load(PretrainConfig, {"data": data}), mixed, 1, 10).measured
    assert "6 left out: data.modalities is structure" in said
    assert {mixed.rows[i].modality for i in mixed.as_torch().rows} == {"structure"}
    assert {mixed.rows[i].modality for i in mixed.as_torch(modalities=("octa",)).rows} == {"octa"}
    with pytest.raises(ConfigError, match=r"data\.modalities"):
        load(PretrainConfig, {"data": {"modalities": ["fundus"]}})


def test_a_store_of_one_modality_says_why_nothing_fits(mixed):
    edit_rows(mixed.path, lambda row: {"modality": "octa"})
    flow = Store.open(mixed.path)
    with pytest.raises(ConfigError, match=r"data\.modalities \['structure'\]"):
        select(flow, "train")
    with pytest.raises(ConfigError, match="no volume is of modality structure, all are octa"):
        to_evaluate(flow, modalities=["structure"])
    assert len(to_evaluate(flow)) == len(flow), "without a wish, a store of flow alone is taken as it is"


@pytest.mark.slow
def test_a_run_is_evaluated_on_the_modality_it_was_trained_on(mixed, tmp_path, clinic):

    lines: list[str] = []
    for name, modality in (("structural", "structure"), ("flow", "octa")):
        run = quick_pretrain(config(steps=2, data={**config().data.model_dump(), "modalities": [modality]}),
                             mixed, out=tmp_path / name)  # fmt: skip
        embed_all(run, mixed.path, tmp_path / name / "out", baselines=False, echo=lines.append)
        embedded = pq.read_table(tmp_path / name / "out" / "pretrained.parquet").column("acquisition").to_pylist()
        assert set(embedded) == {row.acquisition for row in mixed.rows if row.modality == modality}
        encoder = octfm.load_encoder(run)
        one, other = (clinic / "a" / f"{kind}.dcm" for kind in ("structure", "flow"))
        own, foreign = (one, other) if modality == "structure" else (other, one)
        assert encoder.embed(own).shape == (encoder.vector_width,)
        with pytest.raises((ReadError, EvaluationError), match=r"angiography|modality is structure"):
            encoder.embed(foreign)


@pytest.mark.slow
def test_the_commands_scan_and_show_flow(clinic, tmp_path):
    told = invoke("scan", clinic, "--modalities", "structure,octa", "--out", tmp_path / "c", "--workers", "0")
    assert told.exit_code == 0 and "modalities: octa 2, structure 1" in told.output, told.output
    assert "(octa)" in (tmp_path / "c" / "data_health.html").read_text()
    page = tmp_path / "flow.html"
    told = invoke("view", clinic / "a" / "flow.dcm", "--out", page)
    assert told.exit_code == 0 and "OCT angiography (flow)" in page.read_text(), told.output
