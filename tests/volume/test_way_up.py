"""A scan that is upside down is named and set aside, unless its sidecar or an option says how it lies; where nothing
tells, that is said."""

import itertools
import json
from dataclasses import replace

import numpy as np
import pytest

from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_volume
from octfm.formats.declared import doubtful_way_up
from octfm.io.location import write_whole
from octfm.phantom import DIAGNOSES, SCANNERS, phantom_volume
from octfm.store.prepare import prepare
from octfm.volume.appearance import layered_axis, native_way_up
from octfm.volume.preprocessing import Preprocessing
from octfm.volume.tissue import find_tissue
from octfm.volume.volume import Volume
from support.dicom_files import write_oct_dicom
from support.store_samples import content
from support.vendor_files import write_images

SIZE = (8, 200, 160)
ROUGH = Preprocessing(image_size=(8, 96, 64), target_spacing=(0.9, 0.02, 0.1))


def turned(voxels: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(voxels[:, ::-1])


def write(path, volume: Volume, upside_down: bool):
    voxels = turned(volume.voxels) if upside_down else volume.voxels
    return write_oct_dicom(path, voxels, volume.spacing_mm, participant=path.stem)


@pytest.fixture(scope="module")
def eyes() -> list[Volume]:
    return [phantom_volume(n, size=SIZE, scanner="heidelberg_spectralis")[0] for n in range(3)]


FIRST = ("heidelberg_spectralis",)


@pytest.mark.parametrize(
    "scanner", [pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST)) for name in SCANNERS]
)
def test_every_scanner_and_diagnosis_is_known_both_ways_up(scanner):
    for seed, diagnosis in enumerate(DIAGNOSES):
        volume, _ = phantom_volume(seed, size=SIZE, scanner=scanner, diagnosis=diagnosis, severity=1.0)
        noisy = np.clip(volume.voxels + np.random.default_rng(seed).normal(0, 20, SIZE), 0, 255).astype(np.uint8)
        for voxels in (volume.voxels, noisy)[seed % 2 :]:
            assert native_way_up(voxels, volume.spacing_mm) == "up"
            assert native_way_up(turned(voxels), volume.spacing_mm) == "down"


@pytest.mark.slow
def test_real_volumes_are_known_both_ways_up(real_data):
    volumes = [
        (np.load(real_data / "medvisbonn_amd_spectralis_145.npz")["volume"], (0.03, 0.003872, 0.011182)),
        (np.load(real_data / "macular_hole_49.npz")["volume"], (0.12, 0.00387, 0.0115)),
    ]
    dme = np.load(real_data / "chiu2015_dme_subjects1to5.npz")["bscans"]
    volumes += [(dme[11 * eye : 11 * eye + 11], (0.12, 0.00387, 0.0115)) for eye in range(5)]
    for n, (voxels, spacing_mm) in enumerate(volumes):
        assert native_way_up(voxels, spacing_mm) == "up"
        # The frame of the macular hole is cropped, and its choroid fills it to the border, so nothing tells.
        assert native_way_up(turned(voxels), spacing_mm) == ("unclear" if n == 1 else "down")


def test_a_real_retina_without_its_vitreous_is_not_called_upside_down(real_data):
    voxels = np.load(real_data / "macular_hole_49.npz")["volume"][::4]
    spacing_mm = (0.48, 0.00387, 0.0115)
    top = int(np.median(find_tissue(voxels, spacing_mm).ilm))
    for cut in (top - 10, top, top + 20):
        assert native_way_up(voxels[:, cut:], spacing_mm) == "unclear"


@pytest.mark.parametrize("scanner", SCANNERS)
def test_a_retina_that_begins_at_the_first_row_is_not_called_upside_down(scanner):
    """Flattened at the ILM or cropped there, as published data sets are."""
    volume, _ = phantom_volume(3, size=SIZE, scanner=scanner)
    ilm = find_tissue(volume.voxels, volume.spacing_mm).ilm.round().astype(int).clip(0)
    rows = np.arange(SIZE[1])[None, :, None] + ilm[:, None]
    flattened = np.take_along_axis(np.pad(volume.voxels, ((0, 0), (0, SIZE[1]), (0, 0))), rows, axis=1)
    for voxels in (flattened, flattened[:, :100], volume.voxels[:, int(np.median(ilm)) :]):
        assert native_way_up(voxels, volume.spacing_mm) != "down"
    fading = np.broadcast_to(np.linspace(200, 20, SIZE[1])[None, :, None], SIZE) + np.arange(8)[:, None, None]
    assert native_way_up(fading.astype(np.uint8), volume.spacing_mm) == "unclear"


def test_where_nothing_tells_it_is_said_and_nothing_is_set_aside(eyes):
    noise = np.random.default_rng(0).integers(0, 255, SIZE, dtype=np.uint8)
    assert doubtful_way_up(replace(eyes[0], voxels=noise), 0.0) == ("way_up_unclear",)
    assert doubtful_way_up(eyes[0], 0.5) == ()
    assert doubtful_way_up(replace(eyes[0], voxels=turned(eyes[0].voxels)), 0.5, keep=True) == ("looks_upside_down",)
    with pytest.raises(ReadError, match="looks upside down") as caught:
        doubtful_way_up(replace(eyes[0], voxels=turned(eyes[0].voxels)), 0.5)
    assert caught.value.code == "upside_down"


@pytest.mark.parametrize("order", list(itertools.permutations("DHW")), ids="".join)
def test_layers_across_another_axis_than_rows_are_named(order, eyes):
    """An array of another order of axes would be trained on as en face images, or as B-scans on their side."""
    for volume in eyes:
        stored = volume.voxels.transpose(["DHW".index(axis) for axis in order])
        for voxels in (stored, stored[:, ::-1]):
            assert layered_axis(voxels) == order.index("H")
            if order[1] == "H":
                continue
            with pytest.raises(ReadError, match="en face" if order[0] == "H" else "turned by 90 degrees") as caught:
                doubtful_way_up(replace(volume, voxels=voxels), 0.8, keep=True)
            assert caught.value.code == "unknown_axes"
            assert doubtful_way_up(replace(volume, voxels=voxels), 0.8, flags=("declared_upright",)) == ()


def test_a_scan_that_was_ended_early_is_not_taken_for_en_face_images():
    rng = np.random.default_rng(0)
    for scanner in ("topcon_triton", "heidelberg_spectralis"):
        volume, _ = phantom_volume(3, size=SIZE, scanner=scanner, diagnosis="dme", severity=1.0)
        for rest in (np.zeros_like(volume.voxels), rng.integers(0, 30, SIZE, dtype=np.uint8)):
            for imaged in (1, 2, 4):
                voxels = np.concatenate([volume.voxels[:imaged], rest[imaged:]])
                assert layered_axis(voxels) == 1
    assert layered_axis(np.zeros(SIZE, np.uint8)) == 1


def test_a_real_retina_lies_across_its_rows(real_data):
    for name in ("medvisbonn_amd_spectralis_145", "macular_hole_49"):
        voxels = np.load(real_data / f"{name}.npz")["volume"]
        assert layered_axis(voxels) == 1 and layered_axis(voxels.transpose(1, 0, 2)) == 0


def test_an_array_of_another_order_is_set_aside_until_its_axes_are_declared(tmp_path, eyes):
    (tmp_path / "oct").mkdir()
    for n, volume in enumerate(eyes):
        np.save(tmp_path / "oct" / f"P100{n}.npy", volume.voxels.transpose(0, 2, 1))
    options = {"workers": 0, "participant_from": "{participant}", "nominal_spacing_mm": eyes[0].spacing_mm}
    (tmp_path / "oct" / "P1000.json").write_text('{"axes": "DWH"}')
    looked = scan(tmp_path / "oct", pixels=True, **options)
    assert [a.participant for a in looked.acquisitions] == ["P1000"] and looked.acquisitions[0].shape == SIZE
    assert {r.code for r in looked.rejects} == {"unknown_axes"}
    store = prepare(scan(tmp_path / "oct", **options), tmp_path / "a", ROUGH, workers=0, progress=False)
    assert len(store) == 1 and {u.code for u in store.unprepared()} == {"unknown_axes"}
    (tmp_path / "oct" / "P1002.json").write_text('{"upside_down": false}')
    assert [a.participant for a in scan(tmp_path / "oct", pixels=True, **options).acquisitions] == ["P1000", "P1002"]


@pytest.mark.parametrize("wrong", [turned, lambda voxels: voxels.transpose(0, 2, 1)])
def test_a_store_from_before_a_check_passes_it_before_its_volumes_are_reused(tmp_path, eyes, wrong, monkeypatch):
    for n, volume in enumerate([eyes[0], replace(eyes[1], voxels=wrong(eyes[1].voxels)), eyes[2]]):
        write(tmp_path / "oct" / f"p{n}.dcm", volume, upside_down=False)
    catalog = scan(tmp_path / "oct", workers=0)
    with monkeypatch.context() as earlier:
        earlier.setattr("octfm.store.prepare.doubtful_way_up", lambda *_: ())
        before = prepare(catalog, tmp_path / "before", ROUGH, workers=0, progress=False)
    assert len(before) == 3
    store = prepare(catalog, tmp_path / "now", ROUGH, workers=0, progress=False)
    reused = prepare(catalog, tmp_path / "reused", ROUGH, workers=0, progress=False, reuse=before)
    assert len(store.unprepared()) == 1 and reused.unprepared() == store.unprepared()
    assert content(reused.folder) == content(store.folder)
    sidecar = tmp_path / "oct" / "p1.json"
    sidecar.write_text('{"upside_down": false}')
    declared = prepare(scan(tmp_path / "oct", workers=0), tmp_path / "declared", ROUGH, workers=0, progress=False)
    sidecar.unlink()
    undeclared = prepare(catalog, tmp_path / "undeclared", ROUGH, workers=0, progress=False, reuse=declared)
    assert len(declared) == 3 and undeclared.unprepared() == store.unprepared()


def test_prepare_and_a_look_at_pixels_set_an_upside_down_scan_aside(tmp_path, eyes):
    for n, volume in enumerate(eyes):
        write(tmp_path / "oct" / f"p{n}.dcm", volume, upside_down=n == 1)
    catalog = scan(tmp_path / "oct", workers=0)
    assert len(catalog.acquisitions) == 3, "a header cannot know"
    store = prepare(catalog, tmp_path / "a", ROUGH, workers=0, progress=False)
    assert [(u.code, u.uri.endswith("p1.dcm")) for u in store.unprepared()] == [("upside_down", True)]
    kept = prepare(catalog, tmp_path / "b", ROUGH, workers=0, progress=False, keep_upside_down=True)
    assert [row.found for row in kept.rows] == [(), ("looks_upside_down",), ()]
    reused = prepare(catalog, tmp_path / "d", ROUGH, workers=0, progress=False, reuse=kept)
    assert len(reused) == 2 and reused.unprepared() == store.unprepared()

    looked = scan(tmp_path / "oct", workers=0, pixels=True)
    assert [(r.code, r.uri.endswith("p1.dcm")) for r in looked.rejects] == [("upside_down", True)]
    looked = scan(tmp_path / "oct", workers=0, pixels=True, keep_upside_down=True)
    assert [("looks_upside_down" in row.flags) for row in looked.acquisitions] == [False, True, False]
    assert len(prepare(looked, tmp_path / "c", ROUGH, workers=0, progress=False)) == 3, "the catalog says to keep it"


@pytest.mark.parametrize("form", ["dicom", "images"])
def test_a_sidecar_has_it_flipped_or_accepted(tmp_path, eyes, form):
    for name, declared in (("flip", True), ("keep", False)):
        place = tmp_path / "oct" / name
        if form == "dicom":
            write(place.with_suffix(".dcm"), eyes[0 if declared else 1], upside_down=True)
            place.with_suffix(".json").write_text(json.dumps({"upside_down": declared}))
        else:
            write_images(
                place,
                turned(eyes[0 if declared else 1].voxels),
                eyes[0].spacing_mm,
                upside_down=declared,
                participant=name,
            )
    catalog = scan(tmp_path / "oct", workers=0)
    store = prepare(catalog, tmp_path / "store", ROUGH, workers=0, progress=False)
    assert len(store) == 2 and not any(row.found for row in store.rows)
    flipped, kept = (read_volume(row.uri).voxels for row in catalog.acquisitions)
    np.testing.assert_array_equal(flipped, eyes[0].voxels)
    np.testing.assert_array_equal(kept, turned(eyes[1].voxels))


@pytest.mark.parametrize("place", ["s3", "gs"], indirect=True)
def test_the_sidecar_of_a_dicom_counts_in_a_bucket_as_on_a_disk(place, tmp_path, eyes):
    for name, declared in (("flip", True), ("keep", False), ("bare", None)):
        file = write(tmp_path / f"{name}.dcm", eyes[0], upside_down=True)
        write_whole(place / file.name, file.read_bytes())
        if declared is not None:
            write_whole(place / f"{name}.json", json.dumps({"upside_down": declared}).encode())
    np.testing.assert_array_equal(read_volume(str(place / "flip.dcm")).voxels, eyes[0].voxels)
    kept = read_volume(str(place / "keep.dcm"))
    np.testing.assert_array_equal(kept.voxels, turned(eyes[0].voxels))
    assert doubtful_way_up(kept, 0.5) == ()
    with pytest.raises(ReadError, match="looks upside down"):
        doubtful_way_up(read_volume(str(place / "bare.dcm")), 0.5)
