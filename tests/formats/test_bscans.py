"""Single B-scans in class folders go through every verb; estimated millimetres never become micrometres."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from octfm.catalog.acquisition import Reject
from octfm.catalog.catalog import Catalog, CatalogError
from octfm.catalog.estimation import axial_mm_by_height
from octfm.catalog.participants.folders import split_folders
from octfm.catalog.participants.patterns import Pattern, PeopleError, place_of
from octfm.catalog.scan import scan
from octfm.encoder.embed import embed_store
from octfm.encoder.embeddings import read_embeddings
from octfm.encoder.encoder import load_encoder
from octfm.encoder.export import settings_of, tensors_of, write_files
from octfm.encoder.tuned import load_tuned
from octfm.errors import ConfigError, EvaluationError, ReadError
from octfm.formats import read_volume
from octfm.layers.export import write_nifti
from octfm.layers.rows import describe, read_table, row_of
from octfm.phantom.native.stream import Stream
from octfm.pretraining.data import training_rows
from octfm.store.prepare import prepare
from octfm.tasks.view import scene_of
from octfm.volume.appearance import holds_two
from octfm.volume.estimated import FLAG, WHY, retina_rows, spacing_of
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.volume import Volume
from support.bscan_set import CONDITIONS, PATTERN, layered, phantom_image, write_image, write_set
from support.command_line import invoke, octfm_here
from support.segmented import found_in
from support.small_store import small_store
from support.tiny_runs import config, quick_pretrain, quiet
from support.untrained import untrained_encoder

SIZE = Preprocessing(image_size=(8, 64, 32), target_spacing=(0.7, 0.03, 0.18))


@pytest.fixture(scope="module")
def bscans(tmp_path_factory):
    """(root, planted files, catalog) of a small set."""
    root = tmp_path_factory.mktemp("bscans") / "set"
    planted = write_set(
        root, 3, lambda label, place: layered(place + 7 * sum(map(ord, label)), retina=46 + 3 * (place % 5))
    )
    return root, planted, scan(root, layouts=("line",), participant_from=PATTERN, workers=0)


@pytest.fixture(scope="module")
def store(bscans, tmp_path_factory):
    return prepare(bscans[2], tmp_path_factory.mktemp("store") / "s", SIZE, workers=0, progress=False)


def test_every_image_in_a_folder_is_a_row_with_its_class(bscans):
    _, _, catalog = bscans
    assert len(catalog.acquisitions) == 3 * 3 * 2 + 1 and {a.layout for a in catalog.acquisitions} == {"line"}
    # One B-scan is also there as another patient's, in another class.
    (doubtful,) = [a for a in catalog if "label_conflict" in a.flags]
    assert "pixels_of_two_participants" in doubtful.flags and "label" not in doubtful.participant_labels
    assert all(a.participant_labels["label"] == a.uri.split("/")[-2] for a in catalog if a is not doubtful)
    assert all(a.participant == Path(a.uri).stem.split("-")[1] for a in catalog.acquisitions)
    assert all(a.shape == (1, 200, 120) for a in catalog.acquisitions)


def test_the_same_pixels_are_found_whatever_their_file(bscans):
    _, planted, catalog = bscans
    found = {reject.code for reject in catalog.rejects}
    assert found == {"pixels_of_two_participants", "duplicate_pixels"}
    assert str(planted["resaved"]) in {reject.uri for reject in catalog.rejects}
    # Both ids of the copied B-scan are in one split.
    assert "split_with_another_id" in {flag for a in catalog.acquisitions for flag in a.flags}


def test_a_bscan_in_the_folders_of_two_classes_has_no_label(tmp_path):
    for place, name in enumerate(["CNV/a_1.png", "CNV/b_1.png", "NORMAL/b_2.png", "NORMAL/c_1.png"]):
        write_image(tmp_path / name, layered(place))
    write_image(tmp_path / "NORMAL" / "a_1.bmp", np.asarray(Image.open(tmp_path / "CNV" / "a_1.png")))
    catalog = scan(tmp_path, layouts=("line",), participant_from="{label}/{participant}_*", workers=0)
    (copy,) = catalog.rejects
    assert "with label NORMAL instead of CNV; find out which is right" in copy.sentence
    labels = {Path(a.uri).name: (a.participant_labels.get("label"), "label_conflict" in a.flags) for a in catalog}
    known = {"b_1.png": ("CNV", False), "b_2.png": ("NORMAL", False), "c_1.png": ("NORMAL", False)}
    assert labels == {"a_1.png": (None, True), **known}


def test_a_bscan_whose_label_is_doubtful_makes_that_of_a_copy_with_other_bytes_doubtful(tmp_path):
    for place, name in enumerate(["CNV/a_1.png", "CNV/b_1.png", "AMD/b_2.png", "NORMAL/c_1.png"]):
        write_image(tmp_path / name, layered(place))
    write_image(tmp_path / "AMD" / "a_1.bmp", np.asarray(Image.open(tmp_path / "CNV" / "a_1.png")))
    (tmp_path / "NORMAL" / "a_1.png").write_bytes((tmp_path / "CNV" / "a_1.png").read_bytes())
    catalog = scan(tmp_path, layouts=("line",), participant_from="{label}/{participant}_*", workers=0)
    (kept,) = [a for a in catalog if a.participant == "a"]
    assert kept.uri.endswith("a_1.bmp") and "label" not in kept.participant_labels
    assert any("with label unclear instead of AMD; find out which" in copy.sentence for copy in catalog.rejects)


def test_folders_of_splits_are_overruled_where_patients_leak(bscans):
    root, planted, catalog = bscans
    splits = {a.participant: set() for a in catalog.acquisitions}
    for a in catalog.acquisitions:
        splits[a.participant].add(a.split)
    assert all(len(own) == 1 for own in splits.values())
    (leaked,) = (a for a in catalog.acquisitions if a.uri == str(planted["both"]))
    assert leaked.split == "train" and "several_splits" in leaked.flags
    # All others are where their folder says.
    others = [a for a in catalog.acquisitions if "several_splits" not in a.flags]
    assert others and all(a.split == a.uri.removeprefix(str(root)).split("/")[1] for a in others)
    said = split_folders(catalog.root, catalog.acquisitions).sentence
    assert "are used as splits" in said and ": 2 of 10 participants" in said and "of each count as train" in said


def test_without_split_in_the_pattern_folders_are_only_reported(bscans):
    catalog = bscans[2]
    drawn = [replace(a, participant_labels={}, flags=()) for a in catalog.acquisitions]
    found = split_folders(catalog.root, drawn)
    assert "not used as splits" in found.sentence and found.on_both_sides == 1
    assert split_folders(catalog.root, [a for a in drawn if "/train/" in a.uri]) is None


@pytest.mark.parametrize(
    ("pattern", "path", "labels"),
    [
        ("{split}/{label}/*-{participant}-*", "train/CNV/CNV-1016042-1.jpeg", ("CNV", "train", "1016042")),
        ("{label}/{participant}_*", "No disease/p7_b.png", ("No disease", None, "p7")),
        ("{split}/{participant}/*", "validation/9/a.png", (None, "val", "9")),
    ],
)
def test_patterns_give_label_and_split(pattern, path, labels, tmp_path):
    found = Pattern.parse(pattern).match(place_of(str(tmp_path / path), tmp_path))
    assert (found.labels.get("label"), found.labels.get("recommended_split"), found.participant) == labels


def test_patterns_that_leave_it_open_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"\{label\} occurs twice"):
        Pattern.parse("{label}/{label}-{participant}-*")
    write_image(tmp_path / "images" / "a" / "p1-1.png", layered(1))
    with pytest.raises(PeopleError, match="1 of 1 files"):
        scan(tmp_path, layouts=("line",), participant_from="{split}/*/{participant}-*", workers=0)


def test_estimated_millimetres_are_marked_everywhere(bscans, store, tmp_path):
    catalog = Catalog.load(bscans[2].save(tmp_path / "catalog"))
    assert {a.spacing_source for a in catalog.acquisitions} == {"estimated"}
    assert all(FLAG in a.flags for a in catalog.acquisitions) and all(FLAG in row.flags for row in store.rows)
    # One estimate for all of a size: a thicker retina stays thicker.
    assert len({a.spacing_mm for a in catalog.acquisitions}) == 1
    volume = read_volume(catalog.acquisitions[0].uri, raster_only=False)
    assert volume.spacing_estimated and "(estimated)" in repr(volume)
    assert not scene_of(volume).has_mm


def test_images_of_as_many_rows_have_the_median_of_a_sample_and_all_are_tried_where_it_shows_only_damage():
    """A sample by content, of those whose millimetres nothing states."""
    values, headers = {}, []

    def add(rows: int, number: int, value, **other) -> None:
        uri = f"{rows}/{99 - number}.png"
        facts = {
            "layout": "line",
            "spacing_mm": None,
            "shape": (1, rows, 700),
            "sop_instance_uid": f"{rows}.{number:02d}",
        }
        headers.append(SimpleNamespace(uri=uri, **(facts | other)))
        values[uri] = Reject(uri, "damaged", "it is cut", 1) if value == "damaged" else value

    for number in range(60):
        add(100, number, 30 + number**2 / 10)
        add(300, number, "damaged" if number in (0, 48, 59) else None)
        add(400, number, "damaged" if number in (0, 48) else 50.0 if number == 1 else None)
        add(500, number, None)
    add(200, 1, 40.0, layout="raster")
    add(200, 2, 40.0, spacing_mm=(0.01, 0.004, 0.01))
    add(200, 3, 40.0)
    listed = headers[-1].uri
    row = SimpleNamespace(spacing_mm=(1.0, 1.0, 1.0))
    tables: Any = SimpleNamespace(find=lambda uri, uid: row if uri == listed else None)
    tried: list[str] = []

    def in_children(function, chosen, lost, deadline):
        tried.extend(header.sop_instance_uid for header in chosen)
        return [values[header.uri] for header in chosen]

    found, undecoded = axial_mm_by_height(headers, tables, in_children, ())  # pyright: ignore[reportArgumentType]
    assert found == pytest.approx({100: 0.3 / np.median([30 + n**2 / 10 for n in range(48)]), 400: 0.3 / 50})
    assert sorted(undecoded) == sorted(["300/99.png", "300/51.png", "300/40.png", "400/99.png"])
    expected = [f"{rows}.{n:02d}" for rows in (100, 300, 400, 500) for n in range(60 if rows == 300 else 48)]
    assert sorted(tried) == expected
    assert spacing_of(0.004, (1, 500, 700)) == pytest.approx((0.01, 0.004, 0.01))


def test_millimetres_that_something_states_are_not_estimated(tmp_path):
    path = write_image(tmp_path / "p1" / "a.png", layered(1))
    path.with_suffix(".json").write_text(json.dumps({"spacing_mm": [0.01, 0.004, 0.03]}))
    write_image(tmp_path / "p2" / "b.png", layered(2))
    rows = scan(tmp_path, layouts=("line",), participant_from="{participant}/*", workers=0).acquisitions
    assert [a.spacing_source for a in rows] == ["sidecar", "estimated"]
    rows = scan(
        tmp_path, layouts=("line",), participant_from="{participant}/*", nominal_spacing_mm=(1, 0.0039, 0.01), workers=0
    ).acquisitions
    assert [a.spacing_source for a in rows] == ["sidecar", "nominal"] and not any(FLAG in a.flags for a in rows)


@pytest.mark.parametrize("retina", [36, 50, 75])
def test_the_retina_is_measured_in_rows_whatever_the_scale(retina):
    rows = np.median([retina_rows(layered(seed, retina=retina)[None]) for seed in range(3)])
    assert rows == pytest.approx(retina, rel=0.12)


@pytest.mark.parametrize("white", [255, 250], ids=["exact", "as JPEG keeps it"])
def test_white_padding_does_not_hide_the_retina(white):
    """As Spectralis exports frames of which A-scans were shifted; public sets are full of them."""
    bscan = layered(0, retina=50)
    height, width = bscan.shape
    padded = bscan.copy()
    padded[: height // 6, : width // 2] = padded[-height // 6 :, width // 2 :] = white
    assert retina_rows(padded[None]) == pytest.approx(retina_rows(bscan[None]), rel=0.1)


@pytest.mark.slow
def test_millimetres_of_real_scans_with_white_margins_are_estimated(real_data):
    """55 B-scans of eyes with oedema, of which 45 seemed to show no retina."""
    with np.load(real_data / "chiu2015_dme_subjects1to5.npz") as file:
        rows = [retina_rows(bscan[None]) for bscan in file["bscans"]]
    known = [each for each in rows if each is not None]
    assert len(known) >= 50 and all(60 < each < 140 for each in known)


def test_an_image_without_retina_has_no_millimetres(tmp_path):
    noise = np.random.default_rng(0).integers(0, 40, (200, 150)).astype(np.uint8)
    assert retina_rows(noise[None]) is None
    with pytest.raises(
        ReadError, match="no retina to estimate them from, vitreous on top and bright on dark;"
    ) as caught:
        read_volume(write_image(tmp_path / "a.png", noise), raster_only=False)
    assert caught.value.code == "missing_spacing"


def test_a_segmentation_without_millimetres_has_no_micrometres(tmp_path):
    found = found_in(1, fluid_in=0)
    found = replace(found, volume=replace(found.volume, layout="line", spacing_estimated=True))
    row = row_of(found)
    assert not [name for name, cell in row.items() if cell and (name.endswith(("_um", "_mm3", "_nl")))]
    assert row["zones_note"].endswith(WHY) and float(row["retina_rows"]) == pytest.approx(found.retina_rows, abs=0.05)
    assert row["intraretinal_fluid_pixels"] == str(found.masks["intraretinal_fluid"].sum()) != "0"
    said = describe(found)
    assert " rows (median)" in said and not re.search(r"\d µm(?! thick)", said)
    for ask in (lambda: found.thickness_um("ilm", "bm"), lambda: found.heights_um("ilm"), lambda: found.spread_um,
                found.fluid_um):  # fmt: skip
        with pytest.raises(EvaluationError, match="no micrometres: its millimetres are estimated"):
            ask()
    import nibabel

    heights, labels = (nibabel.load(path) for path in write_nifti(found, tmp_path, "a"))
    assert heights.get_filename().endswith("a_heights_rows.nii.gz")
    assert all(
        i.header.get_xyzt_units()[0] == "unknown" and i.header.get_zooms()[:2] == (1, 1) for i in (heights, labels)
    )


def test_the_encoder_reads_a_bscan_as_its_repetition_over_a_patch():
    """Summed kernels: the tokens of a B-scan are those of a volume that repeats it over the depth of a patch."""
    encoder = untrained_encoder()
    bscan, (depth, rows, columns) = encoder.of_bscans(), encoder.config.model.patch_size
    size = encoder.preprocessing.image_size
    image = np.random.default_rng(1).integers(0, 256, (1, 1, *size[1:]), np.uint8)
    found = bscan.encode_grid(image)
    d, h, w = encoder.network.grid.shape
    assert found.shape == (1, 1, h, w, encoder.width) and bscan.config.model.patch_size == (1, rows, columns)
    volume = np.zeros((1, *size), np.uint8)
    for place in (0, d - 1):
        volume[:, place * depth : (place + 1) * depth] = image
        index = (np.arange(h * w) + place * h * w)[None]
        assert np.allclose(encoder.some_tokens(volume, index), found.reshape(1, h * w, -1), atol=2e-5)
    before = encoder.network.patch_embed.weight.clone()
    with torch.no_grad():
        bscan.network.patch_embed.weight.zero_()
    assert torch.equal(before, encoder.network.patch_embed.weight)


def test_a_store_of_bscans_is_embedded_as_single_scans_are(bscans, store, tmp_path):
    encoder = untrained_encoder()
    assert store.image_size == (1, 64, 32) and store.fingerprint == SIZE.of_bscans().fingerprint()
    data = read_embeddings(embed_store(encoder, store, tmp_path, echo=quiet))
    place = {name: i for i, name in enumerate(data.acquisition.tolist())}
    vectors = data.vectors[[place[row.acquisition] for row in store.rows]]
    assert np.allclose(vectors, encoder.embed(store), atol=1e-6)
    assert np.allclose(vectors[3], encoder.embed(store[3]), atol=1e-5)
    assert set(data.participant_labels[0]) >= {"label"}
    acquisition = bscans[2].acquisitions[0]
    volume = replace(read_volume(acquisition.uri, raster_only=False), spacing_mm=acquisition.spacing_mm)
    assert np.allclose(encoder.embed([volume])[0], vectors[0], atol=1e-5)


def test_what_was_made_of_the_packaged_encoder_for_bscans_is_read_again(tmp_path):
    """Its objective averages two B-scans of a patch, and its patches for single ones are one deep."""
    of_volumes = load_encoder(device="cpu")
    encoder = of_volumes.of_bscans()
    voxels = torch.zeros((1, 1, *encoder.preprocessing.image_size), dtype=torch.uint8)
    with pytest.raises(ConfigError, match=r"network of encoder\.of_bscans\(\)"):
        of_volumes.network.forward_features(voxels)
    assert encoder.network.forward_features(voxels).shape[0] == 1
    write_files(tmp_path / "exported", settings_of(encoder), tensors_of(encoder), {"hashes": []})
    assert load_encoder(tmp_path / "exported", device="cpu").key == encoder.key


def test_python_is_told_how_it_reads_a_single_image(tmp_path):
    write_image(tmp_path / "a.png", layered(1))
    with pytest.raises(ReadError, match="raster_only=False"):
        read_volume(tmp_path / "a.png")
    assert read_volume(tmp_path / "a.png", raster_only=False).layout == "line"


def test_view_of_a_folder_of_bscans_names_a_command_that_view_has(tmp_path):
    for name in ("a 1.png", "b 7.png"):
        write_image(tmp_path / "set" / name, layered(1))
    shown = invoke("view", tmp_path / "set", "--out", tmp_path / "set.html")
    assert str(shown.exception).endswith(f"if each image is a separate scan: octfm view {tmp_path / 'set'}/IMAGE")


def _screenshots() -> dict[str, np.ndarray]:
    """Two pictures in one, as instruments and figures show them."""
    left, right, later = (phantom_image(5, place, "dme", (384, 300)) for place in (1, 2, 3))
    coarse = np.random.default_rng(0).integers(60, 200, (16, 16)).astype(np.uint8)
    fundus = np.asarray(Image.fromarray(coarse).resize((300, 300)))
    gap = np.full((300, 10), 255, np.uint8)
    neighbour = np.roll(left, 1, axis=0) // 2 + left // 2  # almost the same B-scan: they meet without a step
    return {
        "fundus": np.hstack([fundus, left]),
        "framed": np.pad(np.hstack([fundus, gap, right]), 30, constant_values=255),
        "eyes": np.hstack([right, gap, later]),
        "neighbours": np.hstack([left, neighbour]),
    }


@pytest.mark.parametrize("shown", ["fundus", "framed", "eyes", "neighbours"])
def test_a_screenshot_of_two_pictures_is_never_read_as_one_bscan(shown, tmp_path):
    """Neither an infrared image next to a B-scan, nor two B-scans."""
    file = write_image(tmp_path / "p1" / "a.png", _screenshots()[shown])
    for given in (None, (0.1, 0.004, 0.012)):  # millimetres of a whole folder do not say that anyone looked at it
        with pytest.raises(ReadError, match=r"a\.png: looks like two pictures next to each other.*crop it") as error:
            read_volume(file, spacing_mm=given, raster_only=False)
        assert error.value.code == "side_by_side"
    with pytest.raises(CatalogError, match="1 side_by_side"):
        scan(tmp_path, layouts=("line",), participant_from="{participant}/*", workers=0)
    file.with_suffix(".json").write_text('{"spacing_mm": [0.1, 0.004, 0.012]}')
    assert read_volume(file, raster_only=False).shape[0] == 1


@pytest.mark.slow
def test_no_bscan_is_taken_for_two_pictures():
    """Whatever it shows, centred on the disc and wide ones among them, also with a reflection over its whole height."""
    images = [Stream(31, row_um=None, ascan_um=(8, 40))(place).voxels[0] for place in range(40)]
    streaked = [image.copy() for image in images]
    for image in streaked:
        image[:, image.shape[1] // 3 : image.shape[1] // 3 + 2] = 200
    assert not any(map(holds_two, images))
    assert sum(map(holds_two, streaked)) <= 1


def test_nothing_trains_on_bscans_unless_asked(store):
    with pytest.raises(ConfigError, match=r"data\.layouts=\[line\] takes them"):
        training_rows(config(), store)
    asked = config(data={"layouts": ["line"]})
    assert len(training_rows(asked, store)[0]) == sum(row.split == "train" for row in store.rows)


def test_bscans_and_volumes_do_not_share_a_store():
    volume = Volume(np.repeat(layered(1)[None], 4, 0), (0.3, 0.005, 0.03))
    with pytest.raises(ReadError, match=r"image_size .* is for single ones"):
        SIZE.of_bscans()(volume)
    with pytest.raises(ReadError, match="octfm scan --layouts line"):
        SIZE(replace(volume, voxels=volume.voxels[:1], layout="line"))


def test_volumes_are_left_out_where_only_bscans_are_taken(tmp_path):
    write_image(tmp_path / "p1" / "a.png", layered(1))
    np.savez(tmp_path / "p2.npz", volume=np.repeat(layered(2)[None], 4, 0), spacing_mm=(0.3, 0.005, 0.03))
    catalog = scan(tmp_path, layouts=("line",), participant_from=["{participant}/*", "{participant}"], workers=0)
    assert len(catalog.acquisitions) == 1 and [s.code for s in catalog.skipped] == ["several_bscans"]
    with pytest.raises(CatalogError, match="raster,line or line"):
        scan(tmp_path, layouts=("line", "radial"), workers=0)


@pytest.mark.slow
def test_bscans_walk_through_every_verb(tmp_path):
    """Folders of images, as public sets have them, from scan to report."""
    write_set(tmp_path / "set", 10, lambda label, place: phantom_image(5, place, CONDITIONS[label]))
    volumes = small_store(tmp_path / "volumes")
    run = quick_pretrain(config(steps=2), volumes, out=tmp_path / "run", echo=quiet)

    def octfm(*words: object) -> str:
        code, said, err = octfm_here(*words, cwd=tmp_path)
        assert code == 0, (words, said, err)
        return said + err

    said = octfm("scan", "set", "--layouts", "line", "--participant-from", PATTERN, "--workers", 0, "--out", "catalog")
    assert "estimated_spacing 6" in said and "train and test are used as splits" in said
    octfm("prepare", "catalog", "--like", run, "--out", "prepared", "--workers", 0)
    octfm("embed", run, "--store", "prepared")
    octfm("embed", run, "--catalog", "catalog", "--out", "vectors", "--workers", 0)
    one, other = (read_embeddings(f / "pretrained.parquet") for f in (run / "embeddings", tmp_path / "vectors"))
    assert np.allclose(one.vectors, other.vectors, atol=1e-5)
    assert "label" in octfm("probe", run, "--target", "label", "--design", "k-fold", "--folds", 3)
    octfm(
        *("finetune", "study_group_finetune", f"encoder={run}", "--store", "prepared", "target=label", "batch_size=4"),
        *("per_device_batch_size=4", "--epochs", 1, "--device", "cpu", "--out", "tuned"),
    )
    tuned = load_tuned(tmp_path / "tuned").encoder
    assert tuned.takes_bscans and tuned.config.model.patch_size[0] == 1
    # Two of the twenty show no retina that a lone B-scan could be scaled by.
    octfm_here("embed", run, "set/test", "--layouts", "line", "--out", "single", cwd=tmp_path)
    single = read_embeddings(tmp_path / "single/pretrained.parquet")
    assert single.vectors.shape == (18, one.vectors.shape[1])
    said = octfm("segment", "set/test", "--layouts", "line", "--out", "bscans.csv")
    rows = read_table(tmp_path / "bscans.csv")
    assert rows and all(WHY in row["zones_note"] and not row["centre_um"] for row in rows if not row["problem"])
    octfm("view", rows[0]["source"], "--layers", "--out", "view.html")
    page = (tmp_path / "view.html").read_text()
    assert "<h1>B-scan</h1>" in page and WHY in page and '"hasMm":false' in page.replace(" ", "")
    octfm("report", run, "--catalog", "catalog", "--store", "prepared")
    assert (run / "report.html").is_file()
