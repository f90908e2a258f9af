"""Illnesses of a store are named before step 0; sound stores, small ones included, are left alone."""

from dataclasses import replace

import numpy as np
import pytest

from octfm.phantom import DIAGNOSES, SCANNERS, phantom_volume
from octfm.pretraining.preflight import cohort
from octfm.store.layout import StoreRow
from octfm.store.store import Store
from octfm.store.writer import StoreWriter, stage
from octfm.volume import appearance
from octfm.volume.preprocessing import Prepared, Preprocessing
from octfm.volume.volume import Volume

PREPROCESSING = Preprocessing(image_size=(8, 96, 64), target_spacing=(0.375, 0.0208, 0.062))
EYES = 10


def prepared_phantom(seed: int, *, turned: bool = False) -> Prepared:
    volume, _ = phantom_volume(
        seed,
        scanner=list(SCANNERS)[seed % 2],
        diagnosis=DIAGNOSES[seed % len(DIAGNOSES)],
        laterality="RL"[seed % 2],
        size=(16, 192, 96),
    )
    if turned:
        volume = replace(volume, voxels=np.ascontiguousarray(volume.voxels[:, ::-1]))
    return PREPROCESSING(volume)


@pytest.fixture(scope="module")
def eyes() -> list[Prepared]:
    return [prepared_phantom(seed) for seed in range(EYES)]


def written(folder, eyes, participant=lambda number: f"P{number:02d}", flags=()) -> Store:
    """A store of these volumes of two scanners, one participant each unless `participant` says otherwise."""
    with StoreWriter(folder, PREPROCESSING) as writer:
        for number, eye in enumerate(eyes):
            name = participant(number)
            row = StoreRow(
                number, f"1.2.{number}", f"{number}.dcm", name, f"{name}_R", "R", list(SCANNERS)[number % 2], "macula",
                "train", {}, flags, eye.confident, eye.confidence, eye.transform.to_dict(),
                stage(eye, writer.staging, str(number), writer.compression),
            )  # fmt: skip
            writer.append(row, str(number))
    return Store.open(folder)


def found(store):
    return {check.name: check for check in cohort.checks(store, np.arange(len(store)))}


def test_a_sound_store_passes_every_look(tmp_path, eyes):
    checks = found(written(tmp_path / "store", eyes))
    assert {check.status for check in checks.values()} == {"PASS"}, checks


@pytest.mark.parametrize("volumes", [1, 2, 3])
def test_a_store_of_a_few_volumes_passes_every_look(tmp_path, eyes, volumes):
    checks = found(written(tmp_path / "store", eyes[:volumes]))
    assert {check.status for check in checks.values()} == {"PASS"}, checks


def test_a_store_of_noise_is_named(tmp_path, eyes):
    rng = np.random.default_rng(0)
    noise = [replace(eye, voxels=rng.integers(0, 256, eye.voxels.shape, np.uint8)) for eye in eyes]
    check = found(written(tmp_path / "all", noise))["volumes show tissue"]
    assert check.status == "FAIL" and "10 of 10 volumes show noise and no layers (0.dcm, 1.dcm" in check.measured
    check = found(written(tmp_path / "one", [noise[0], *eyes[1:]]))["volumes show tissue"]
    assert check.status == "WARN" and "1 of 10 volumes" in check.measured


def test_one_scanner_upside_down_is_named(tmp_path, eyes):
    turned = [prepared_phantom(n, turned=True) if n % 2 else eye for n, eye in enumerate(eyes)]
    check = found(written(tmp_path / "store", turned))["right side up"]
    assert check.status == "FAIL" and check.measured == "5 of 5 volumes of topcon_triton are upside down"
    assert "prepare again" in check.advice


def test_voxels_upside_down_after_preparation_are_named(tmp_path, eyes):
    """The band knows nothing of it: it was found before."""
    turned = [replace(eye, voxels=np.ascontiguousarray(eye.voxels[:, ::-1])) for eye in eyes]
    check = found(written(tmp_path / "store", turned))["right side up"]
    assert check.status == "FAIL" and "heidelberg_spectralis" in check.measured and "topcon_triton" in check.measured


@pytest.mark.parametrize("flags", [("declared_upright",), ("looks_upside_down",)])
def test_volumes_kept_upside_down_on_purpose_are_named_and_stop_no_run(tmp_path, eyes, flags):
    turned = [replace(eye, voxels=np.ascontiguousarray(eye.voxels[:, ::-1])) for eye in eyes]
    check = found(written(tmp_path / "store", turned, flags=flags))["right side up"]
    assert check.status == "WARN" and "volumes are upside down" in check.measured


def test_one_volume_upside_down_is_a_warning(tmp_path, eyes):
    check = found(written(tmp_path / "store", [prepared_phantom(0, turned=True), *eyes[1:]]))["right side up"]
    assert check.status == "WARN" and "1 of 10 volumes are upside down (0.dcm)" in check.measured


def test_bands_of_other_volumes_are_named(tmp_path, eyes):
    """The bands stand at other rows of the store than the voxels that they were found in."""
    mixed = [replace(eye, band=other.band) for eye, other in zip(eyes, eyes[1:] + eyes[:1], strict=True)]
    check = found(written(tmp_path / "store", mixed))["bands fit their volumes"]
    assert check.status == "FAIL" and "µm off the retina of their volume" in check.measured


def test_most_bands_of_a_scanner_unsure_are_named(tmp_path, eyes):
    unsure = [replace(eye, confident=n % 2 == 0) for n, eye in enumerate(eyes)]
    check = found(written(tmp_path / "store", unsure))["tissue bands"]
    assert check.status == "WARN" and "5 of 5 volumes of topcon_triton" in check.measured
    some = [replace(eye, confident=n not in (1, 3)) for n, eye in enumerate(eyes)]
    assert found(written(tmp_path / "some", some))["tissue bands"].status == "PASS"


def test_one_participant_in_a_fifth_of_all_rows_is_named(tmp_path, eyes):
    many = eyes * 2
    store = written(tmp_path / "store", many, lambda n: ("OD", "od")[n % 2] if n < 4 else f"P{n:02d}")
    check = found(store)["participants"]
    assert check.status == "WARN" and "participant OD has 4 of 20 volumes" in check.measured
    twice = written(tmp_path / "twice", many, lambda n: f"P{n // 2}")
    assert found(twice)["participants"].status == "PASS"


@pytest.mark.slow
def test_real_volumes_look_sound(real_data):
    """Unusual ones included: cropped, flattened, with oedema. Upside down, the whole one is seen to be."""
    amd = np.load(real_data / "medvisbonn_amd_spectralis_145.npz")["volume"]
    dme = np.load(real_data / "chiu2015_dme_subjects1to5.npz")["bscans"][:11]
    volumes = [
        (amd, (0.03, 0.003872, 0.011182)),
        (amd[:, ::-1], (0.03, 0.003872, 0.011182)),
        (np.load(real_data / "macular_hole_49.npz")["volume"], (0.12, 0.00387, 0.0115)),
        (dme, (0.12, 0.00387, 0.0115)),
    ]
    looks = []
    for voxels, spacing in volumes:
        eye = PREPROCESSING(Volume(np.ascontiguousarray(voxels), spacing, laterality="R", source="real"))
        looks.append(appearance.inspect(eye.voxels, eye.band, eye.valid, PREPROCESSING.target_spacing))
    assert [look.up for look in looks] == ["up", "down", "unclear", "unclear"]
    assert not any(look.noise or look.strange_band(PREPROCESSING.target_spacing) for look in looks)
