"""A phantom eye is anatomically in order, right side up, and its images have the statistics of the optics they
claim."""

import zlib
from dataclasses import replace
from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydicom import dcmread
from pydicom.dataset import Dataset

from octfm.phantom import (
    DIAGNOSES,
    LESIONS,
    PHANTOM_VERSION,
    SCANNERS,
    SURFACES,
    central_subfield_um,
    phantom_volume,
    sample_eye,
)
from octfm.phantom.anatomy import LAYER
from octfm.phantom.dicom import to_bytes, to_dataset
from octfm.phantom.eye import sector_um, surfaces_um
from octfm.phantom.normative import PUBLISHED_UM, sectors_um
from octfm.phantom.optics import detector_noise, log_display, speckle
from octfm.phantom.render import en_face_positions
from octfm.phantom.scanner import acquire
from support.examples import examples

SMALL = (10, 128, 64)


def an_eye(seed: int, laterality="R", diagnosis="healthy", severity=0.5, age=60.0):
    return sample_eye((seed, 0), laterality, participant="x", age=age, diagnosis=diagnosis, severity=severity)


@pytest.mark.slow
@settings(max_examples=examples(25))
@given(
    st.integers(0, 500),
    st.sampled_from(DIAGNOSES),
    st.floats(0, 1),
    st.sampled_from("RL"),
    st.sampled_from(sorted(SCANNERS)),
    st.floats(40, 88),
)
def test_surfaces_never_cross_and_lesions_stay_between_ilm_and_bm(seed, diagnosis, severity, laterality, scanner, age):
    volume, truth = phantom_volume(
        seed, diagnosis=diagnosis, severity=severity, laterality=laterality, scanner=scanner, size=SMALL, age=age
    )
    assert volume.voxels.shape == SMALL and volume.voxels.dtype == np.uint8
    assert volume.extent_mm == pytest.approx(SCANNERS[scanner].field_mm)
    assert truth.surfaces.shape == (len(SURFACES), SMALL[0], SMALL[2]) and np.isfinite(truth.surfaces).all()
    assert (np.diff(truth.surfaces, axis=0) >= -1e-3).all()
    row = np.arange(SMALL[1])[None, :, None]
    inside = (row >= truth.surface("ilm")[:, None] - 1) & (row <= truth.surface("bm")[:, None] + 1)
    above_ilm = np.isin(truth.lesions, [LESIONS["membrane"], LESIONS["hole"]])
    assert inside[(truth.lesions > 0) & ~above_ilm].all()
    assert (row <= truth.surface("bm")[:, None])[truth.lesions == LESIONS["hole"]].all()
    membrane = truth.lesions == LESIONS["membrane"]
    off_ilm_mm = (truth.surface("ilm")[:, None] - row) * volume.spacing_mm[1]
    assert not membrane.any() or (off_ilm_mm[membrane].min() > -0.03 and off_ilm_mm[membrane].max() < 0.06)
    assert truth.surface("ilm").min() > 0 and truth.surface("bm").max() < SMALL[1], (
        "the operator keeps the retina in the frame"
    )
    drusen, cysts = {LESIONS["drusen"]}, {LESIONS["intraretinal_fluid"]}
    possible = {
        "geographic_atrophy": {LESIONS["atrophy"]},
        "dme": cysts | {LESIONS["subretinal_fluid"]},
        "epiretinal_membrane": cysts | {LESIONS["membrane"]},
        "macular_hole": cysts | {LESIONS["subretinal_fluid"], LESIONS["hole"]},
    }
    assert set(np.unique(truth.lesions)) - {0} <= drusen | possible.get(diagnosis, set())


@pytest.mark.parametrize("scanner", sorted(SCANNERS))
@pytest.mark.parametrize("diagnosis", DIAGNOSES)
def test_F13_phantoms_are_right_side_up(scanner, diagnosis):
    """Dark vitreous on top, then the retina with the RPE as its brightest band, then a choroid that fades."""
    for seed in range(2):
        volume, truth = phantom_volume(seed, diagnosis=diagnosis, scanner=scanner, size=(3, 256, 128))
        row = np.arange(volume.shape[1])[None, :, None]
        ilm, rpe, bm = (truth.surface(name)[:, None] for name in ("ilm", "rpe", "bm"))

        def mean(mask, voxels=volume.voxels):
            return voxels[mask].mean()

        vitreous, retina = mean(row < ilm - 25), mean((row > ilm) & (row < rpe))
        band, below = mean((row >= rpe) & (row < bm)), mean(row > bm + 0.45 / volume.spacing_mm[1])
        assert vitreous < retina < band and below < retina


@pytest.mark.slow
def test_layers_of_healthy_eyes_have_published_thicknesses():
    """Central subfield, inner and outer ring of the ETDRS grid in µm. Sources: anatomy.py."""
    eyes = [an_eye(seed) for seed in range(120)]
    central, inner, outer = (
        np.stack([sector_um(eye, *ring) for eye in eyes]) for ring in ((0, 0.5), (0.5, 1.5), (1.5, 3))
    )
    published = {"nfl": (12, 22), "gcl": (14, 50), "ipl": (20, 41), "inl": (18, 40), "opl": (24, 33), "onl": (92, 68)}
    for name, (centre, ring) in published.items():
        assert central[:, LAYER[name]].mean() == pytest.approx(centre, abs=5), name
        assert inner[:, LAYER[name]].mean() == pytest.approx(ring, abs=4), name
    retina = slice(0, LAYER["choroid"])
    cst = central[:, retina].sum(axis=1)
    assert cst.mean() == pytest.approx(270, abs=8) and 15 < cst.std() < 28
    assert inner[:, retina].sum(axis=1).mean() == pytest.approx(335, abs=12)
    assert outer[:, retina].sum(axis=1).mean() == pytest.approx(296, abs=10)
    assert central[:, LAYER["choroid"]].mean() == pytest.approx(285, abs=35)


@pytest.mark.slow
def test_every_sector_of_the_etdrs_grid_has_its_published_thickness():
    """Means of 60 eyes within 9 µm per layer and 15 µm for the retina, no more than published tables differ by."""
    found = [sectors_um(an_eye(seed, age=50)) for seed in range(60)]
    for name, (mean, _) in PUBLISHED_UM.items():
        off = np.mean([sectors[name] for sectors in found], axis=0) - np.array(mean)
        # At the centre tables differ by 20 µm (257 here, 270 and 278 elsewhere); the test above holds it to the middle
        # one.
        assert np.abs(off[1:] if name == "retina" else off).max() < (15 if name == "retina" else 9), (
            name,
            off.round(1),
        )


def test_central_subfield_thickness_is_that_of_the_eye_not_of_the_scanner():
    thickness = {phantom_volume(4, diagnosis="dme", scanner=scanner, size=SMALL)[1].cst_um for scanner in SCANNERS}
    assert len(thickness) == 1


def test_pit_is_a_pit_and_nerve_fibres_thicken_towards_the_disc():
    x = np.linspace(-2.5, 2.5, 101)[None, :]
    for seed in range(10):
        surfaces = surfaces_um(an_eye(seed), x, np.zeros_like(x))[:, 0]
        thickness = surfaces[SURFACES.index("bm")] - surfaces[SURFACES.index("ilm")]
        assert (
            thickness[48:53].max() < thickness[20:35].max() - 40
            and thickness[48:53].max() < thickness[65:80].max() - 40
        )
        nfl = surfaces[1] - surfaces[0]
        assert nfl[-20:].mean() > 1.3 * nfl[:20].mean()


@pytest.mark.parametrize("scanner", sorted(SCANNERS))
def test_disc_lies_to_the_right_in_right_eyes_and_to_the_left_in_left_eyes(scanner):
    for laterality, sense in (("R", 1), ("L", -1)):
        _, truth = phantom_volume(2, laterality=laterality, scanner=scanner, size=SMALL)
        nfl = truth.surface("nfl_gcl") - truth.surface("ilm")
        left, right = nfl[:, :20].mean(), nfl[:, -20:].mean()
        assert sense * (right - left) > 0


def test_first_b_scan_is_superior_only_where_the_scanner_says_so():
    eye = an_eye(0)
    for scanner in SCANNERS.values():
        _, y = en_face_positions(eye, scanner, acquire(np.random.default_rng(0), scanner, 10), SMALL)
        assert (y[0].mean() > y[-1].mean()) == scanner.superior_first


@pytest.mark.slow
def test_fellow_eyes_resemble_each_other_and_age_thins_ganglion_cells():
    cst = np.array([[central_subfield_um(an_eye(seed, side)) for side in "RL"] for seed in range(60)])
    assert np.corrcoef(cst.T)[0, 1] > 0.7
    gcl = [
        np.mean([sector_um(an_eye(seed, age=age), 0.5, 1.5)[LAYER["gcl"]] for seed in range(5)]) for age in (45, 60, 80)
    ]
    assert gcl[0] > gcl[1] > gcl[2]


@pytest.mark.slow
def test_severity_grows_lesions_and_early_disease_has_normal_thickness():
    healthy = np.array([central_subfield_um(an_eye(seed)) for seed in range(40)])

    def burden(diagnosis: str, severity: float) -> float:
        return float(
            np.mean(
                [
                    (phantom_volume(s, diagnosis=diagnosis, severity=severity, size=SMALL)[1].lesions > 0).sum()
                    for s in range(5)
                ]
            )
        )

    for diagnosis in ("drusen", "geographic_atrophy", "dme", "epiretinal_membrane", "macular_hole"):
        early, middle, late = (burden(diagnosis, severity) for severity in (0.05, 0.5, 1.0))
        assert early < middle < late
    early = np.array([central_subfield_um(an_eye(seed, diagnosis="dme", severity=0.08)) for seed in range(40)])
    late = np.array([central_subfield_um(an_eye(seed, diagnosis="dme", severity=0.9)) for seed in range(40)])
    assert (early < np.percentile(healthy, 97.5)).mean() > 0.5
    assert 350 < np.median(late) < 650


@pytest.mark.slow
@pytest.mark.parametrize("scanner", sorted(SCANNERS))
def test_fluid_is_darker_than_the_retina_around_it(scanner):
    dark = 0
    for seed in range(4):
        volume, truth = phantom_volume(seed, diagnosis="dme", severity=0.9, scanner=scanner, size=(16, 256, 192))
        row = np.arange(volume.shape[1])[None, :, None]
        retina = (row > truth.surface("ilm")[:, None]) & (row < truth.surface("rpe")[:, None]) & (truth.lesions == 0)
        dark += (
            volume.voxels[truth.lesions == LESIONS["intraretinal_fluid"]].mean() < 0.7 * volume.voxels[retina].mean()
        )
    assert dark == 4


@pytest.mark.parametrize("looks", [1, 3, 9])
def test_speckle_has_the_contrast_and_distribution_of_theory(looks):
    """Goodman: one look is exponential; averaging N looks divides the contrast by √N."""
    for field in (
        speckle(np.random.default_rng(0), (16, 128, 128), (0.6, 0.9), looks),
        detector_noise(np.random.default_rng(1), SMALL, looks),
    ):
        assert field.mean() == pytest.approx(1, abs=0.03)
        assert field.std() == pytest.approx(looks**-0.5, rel=0.05)
        if looks == 1:
            for level in (0.1, 0.5, 1.0, 3.0):
                assert (field > level).mean() == pytest.approx(np.exp(-level), abs=0.01)


@pytest.mark.parametrize("looks", [1, 4])
def test_speckle_has_the_psf_size_and_is_independent_between_b_scans(looks):
    axial, lateral = 1.5, 2.5
    field = speckle(np.random.default_rng(0), (16, 192, 192), (axial, lateral), looks) - 1
    power = (field**2).mean()
    for axis, sigma in ((1, axial), (2, lateral)):
        for lag in (1, 2, 4):
            a = np.take(field, range(192 - lag), axis)
            b = np.take(field, range(lag, 192), axis)
            # The intensity's correlation is the square of the field's, whose Gaussian filter is correlated over sigma
            # √2.
            assert (a * b).mean() / power == pytest.approx(np.exp(-((lag / sigma) ** 2) / 2), abs=0.05)
    assert abs((field[1:] * field[:-1]).mean() / power) < 0.02


@pytest.mark.parametrize("scanner", SCANNERS.values(), ids=lambda scanner: scanner.name)
def test_speckle_of_every_scanner_has_its_looks_and_psf_size(scanner):
    """At the instrument's own sampling: contrast 1/√looks, and an autocovariance whose full width at half maximum is
    √2 times the point spread function's, however many looks were averaged."""
    _, height, width = scanner.vendor_size
    _, dy, dx = (1000 * mm for mm in scanner.spacing_mm(scanner.vendor_size))
    psf_um, pixel_um = (scanner.axial_psf_um, scanner.lateral_psf_um), (dy, dx)
    sigma = tuple(2**0.5 * psf / 2.3548 / pixel for psf, pixel in zip(psf_um, pixel_um, strict=True))
    looks = scanner.looks(scanner.vendor_size)
    field = speckle(np.random.default_rng(0), (2, height, width), sigma, looks)
    assert field.std() / field.mean() == pytest.approx(looks**-0.5, rel=0.05)
    field = field - field.mean()
    for axis, psf, pixel in zip((1, 2), psf_um, pixel_um, strict=True):
        for lag in (1, 2):
            a, b = (np.take(field, range(s, field.shape[axis] - lag + s), axis) for s in (0, lag))
            assert (a * b).mean() / field.var() == pytest.approx(0.5 ** (2 * (lag * pixel / psf) ** 2), abs=0.06)


def test_axial_motion_is_what_follows_the_eye_between_b_scans():
    for scanner in SCANNERS.values():
        for seed in range(10):
            motion = acquire(np.random.default_rng(seed), scanner, 32).axial_motion_um
            assert 9 < motion.std() < 61


def test_same_arguments_give_the_same_voxels_and_other_seeds_other_people():
    first, again, other = (phantom_volume(seed, diagnosis="dme", size=SMALL) for seed in (3, 3, 4))
    assert np.array_equal(first[0].voxels, again[0].voxels) and np.array_equal(first[1].surfaces, again[1].surfaces)
    assert first[1].cst_um == again[1].cst_um != other[1].cst_um


def test_display_is_the_logarithm_of_power():
    power = np.geomspace(1e-5, 1e3, 4001, dtype=np.float32).reshape(1, -1, 1)
    exact = np.clip((10 * np.log10(power.astype(np.float64)) + 25) * 255 / 30, 0, 255)
    assert np.abs(log_display(power, -25, 30).astype(float) - exact).max() < 0.6
    assert log_display(np.array([[[-1e-9, 0, 1e30]]], np.float32), -25, 30).tolist() == [[[0, 0, 255]]]


def test_phantoms_are_frozen():
    """A change that alters bytes raises PHANTOM_VERSION, because results name it; then, and only then, these numbers
    change."""
    frozen: dict[str, int] = {
        "healthy heidelberg_spectralis": 3793041260,
        "drusen topcon_triton": 208847181,
        "geographic_atrophy topcon_maestro2": 3862436163,
        "dme zeiss_cirrus": 66653614,
        "epiretinal_membrane synthetic_held_out": 1699536153,
        "macular_hole heidelberg_spectralis": 3932529665,
        "glaucoma topcon_triton": 2244268349,
    }
    got = {}
    for number, diagnosis in enumerate(DIAGNOSES):
        scanner = list(SCANNERS)[number % len(SCANNERS)]
        volume, truth = phantom_volume(7, diagnosis=diagnosis, severity=0.7, scanner=scanner, size=SMALL)
        got[f"{diagnosis} {scanner}"] = zlib.crc32(truth.lesions.tobytes(), zlib.crc32(volume.voxels.tobytes()))
    assert PHANTOM_VERSION == "3" and got == frozen


@pytest.mark.parametrize("scanner", SCANNERS)
def test_frame_groups_are_the_bytes_that_pydicom_writes(scanner):
    """They are put together without it, because a dozen objects per B-scan took a tenth of the time of a cohort."""
    person = SimpleNamespace(participant="1001", study_date="20240102")
    volume = phantom_volume(4, scanner=scanner, laterality="L", size=(5, 64, 33))[0]
    dataset = to_dataset(replace(volume, acquisition="1.2.3"), SCANNERS[scanner], person, PHANTOM_VERSION)  # type: ignore[arg-type]
    written = to_bytes(dataset)
    again = dcmread(BytesIO(written))
    for frame in again.PerFrameFunctionalGroupsSequence:  # looked at, every element is parsed and then encoded anew
        assert [len(group.value) for group in frame] == [1, 1, 1]
        for group in frame:
            group.value = [Dataset({element.tag: element for element in group.value[0]})]
    again.set_original_encoding(None, None)
    assert to_bytes(again) == written


def test_files_are_frozen():
    """As phantoms are, header and all; uncompressed, because another version of a codec may choose other bytes."""
    frozen = {
        "heidelberg_spectralis": 743278151,
        "topcon_triton": 555977580,
        "topcon_maestro2": 2527019161,
        "zeiss_cirrus": 980447996,
    }
    person, got = SimpleNamespace(participant="1001", study_date="20240102"), {}
    for scanner in frozen:
        volume = phantom_volume(4, scanner=scanner, laterality="L", size=(5, 64, 33))[0]
        dataset = to_dataset(
            replace(volume, acquisition="1.2.3"), SCANNERS[scanner], person, PHANTOM_VERSION, rle=False
        )  # type: ignore[arg-type]
        got[scanner] = zlib.crc32(to_bytes(dataset))
    assert PHANTOM_VERSION == "3" and got == frozen
