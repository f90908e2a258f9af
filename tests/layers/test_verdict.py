"""When a segmentation is refused, and in which words: every reason on a volume that has it, none on a good phantom."""

import re
from dataclasses import replace

import numpy as np
import pytest

import octfm
import octfm.layers.segment as segment_module
from octfm.errors import EvaluationError
from octfm.layers.finder import LayerFinder, Layers
from octfm.layers.rows import COLUMNS, describe, row_of
from octfm.layers.segment import ScanSegmentation
from octfm.layers.verdict import (
    ASCAN_UM,
    EDGE_ROWS,
    MOST_UM,
    OWN_SHARE,
    REASONS,
    Verdict,
    atrophy_um,
    decide,
    expected_error_um,
    judge,
    measure,
    membrane_um,
    shows_disc,
    waviness_um,
)
from octfm.models.layer_net import MASKS, SURFACES, LayerNet, LayerNetConfig
from octfm.phantom.native.bscans import render_native
from octfm.phantom.native.stream import Stream
from octfm.report.segmented.correct import correction_facts
from octfm.report.segmented.pictures import thickness_pictures
from octfm.volume.etdrs import measure_around
from octfm.volume.volume import Lines, Volume
from support.segmented import found_in

pytestmark = pytest.mark.usefixtures("remembered_bscans")
D, H, W = 10, 496, 64
UNTRAINED = LayerFinder(LayerNet(LayerNetConfig((8, 8))))


@pytest.fixture
def scan() -> tuple[Volume, Layers]:
    """A bright retina 300 µm thick in ten B-scans of 6 mm, and surfaces that fit it."""
    voxels = np.random.default_rng(0).integers(10, 40, (D, H, W), dtype=np.uint8)
    voxels[:, 200:277] += 90
    rows = np.array([200, 208, 230, 238, 244, 264, 272, 274, 277], np.float32)[:, None, None] + np.zeros(
        (1, D, W), "f4"
    )
    flat = np.zeros((D, W), np.float32)
    found = Layers(rows, np.full_like(rows, 6), np.full_like(rows, 0.95), flat, flat + 0.99, np.zeros_like(voxels))
    return Volume(voxels, (0.6, 0.0039, 6 / W), laterality="R"), found


def codes(volume: Volume, found: Layers) -> tuple[str, ...]:
    verdict = judge(volume, found, UNTRAINED)
    assert verdict.accepted == (not verdict.reasons) and (verdict.doubt >= 1) == bool(verdict.reasons)
    return verdict.codes


def test_nothing_speaks_against_a_good_scan(scan):
    assert codes(*scan) == ()


@pytest.mark.parametrize(
    ("spacing_mm", "reasons"),
    [
        ((0.6, 0.0039, 0.01), ("field", "aspect")),
        ((0.6, 0.0039, 12 / W), ("wide_field",)),
        ((0.6, 0.0039, 30 / W), ("field",)),
        ((2.0, 0.0039, 6 / W), ("aspect",)),
        ((0.6, 0.0078, 6 / W), ("thickness",)),
        ((0.6, 0.00156, 6 / W), ("thickness",)),
        ((0.6, 0.0005, 6 / W), ("frame", "thickness")),
        ((0.6, 0.0200, 6 / W), ("frame", "thickness")),
    ],
)
def test_implausible_millimetres_are_refused(scan, spacing_mm, reasons):
    volume, found = scan
    assert codes(replace(volume, spacing_mm=spacing_mm), found) == reasons


def test_line_scans_have_no_extent_across(scan):
    volume, found = scan
    assert codes(replace(volume, spacing_mm=(2.0, 0.0039, 6 / W), layout="line"), found) == ()


@pytest.mark.parametrize("rows", [-200, 218])
def test_a_retina_that_touches_the_first_or_last_rows_is_clipped(scan, rows):
    volume, found = scan
    moved = replace(volume, voxels=np.roll(volume.voxels, rows, axis=1))
    assert codes(moved, replace(found, rows=found.rows + np.float32(rows))) == ("clipped",)


def test_a_retina_that_leaves_the_frame_is_noted_with_its_share_and_refused_where_most_of_it_does(scan):
    volume, found = scan
    found.rows[:, :, : W // 4] = np.nan
    verdict = judge(volume, found, UNTRAINED)
    assert verdict.accepted and "25%" in verdict.parts[0]
    found.rows[:, :, : W * 5 // 8] = np.nan
    verdict = judge(volume, found, UNTRAINED)
    assert verdict.codes[0] == "clipped" and "62%" in verdict.reasons[0] and not verdict.parts


@pytest.mark.parametrize("level", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (128, 255))])
def test_a_retina_that_a_margin_cuts_off_is_clipped_there(scan, level, monkeypatch):
    """Where a margin cut it off, the ILM of a real eye was given at the cut, 130 µm too deep, without a word."""
    volume, found = scan
    edge = np.linspace(232, 140, W).astype(int)
    voxels = np.where(np.arange(H)[:, None] < edge, level, volume.voxels).astype(np.uint8)
    found.rows[0] = np.maximum(found.rows[0], edge)
    cut = edge + EDGE_ROWS > 200
    padded = replace(volume, voxels=voxels)
    verdict = judge(padded, found, UNTRAINED)
    assert verdict.accepted and f"{cut.mean():.0%}" in verdict.parts[0]
    monkeypatch.setattr(LayerFinder, "find", lambda *_: found)
    measured = segment_module.segment(padded, finder=UNTRAINED)
    assert (
        np.array_equal(np.isnan(measured.surfaces["ilm"]), np.broadcast_to(cut, (D, W)))
        and measured.doubtful[:, cut].all()
    )
    assert not np.isnan(measured.surfaces["bm"]).any()


def test_dark_or_lost_bscans_are_counted_and_a_scan_is_refused_where_most_are(scan):
    volume, found = scan
    voxels = volume.voxels.copy()
    voxels[3:5] //= 16
    dark = replace(volume, voxels=voxels)
    verdict = judge(dark, found, UNTRAINED)
    assert verdict.accepted and verdict.parts[0].startswith("2 of 10 B-scans")
    found.present[7], found.rows[:, 7] = 0, np.nan
    assert judge(dark, found, UNTRAINED).parts[0].startswith("3 of 10 B-scans")
    found.present[5:9, : W * 5 // 8], found.rows[:, 5:9, : W * 5 // 8] = 0, np.nan
    verdict = judge(dark, found, UNTRAINED)
    assert verdict.codes == ("blinked",) and verdict.reasons[0].startswith("6 of 10 B-scans") and not verdict.parts


def test_what_was_found_in_lost_bscans_counts_in_no_other_measure(scan):
    """Lines across a blink may lie anywhere: too thick, wavy or cut off."""
    volume, found = scan
    voxels, lost = volume.voxels.copy(), np.isin(np.arange(D), (0, 1, 2, 4, 5, 9))
    voxels[4:6] //= 16
    found.present[[0, 1, 2, 9]] = 0
    found.rows[0, lost] -= 120
    found.rows[-1, 4, ::2] += 150
    found.rows[:, 5, : W // 2] = np.nan
    found.near[0, lost], found.spread_um[0, lost] = 0.5, 90
    measures = measure(replace(volume, voxels=voxels), found)
    parts = {name: getattr(found, name)[:, ~lost] for name in ("rows", "spread_um", "near")}
    parts |= {name: getattr(found, name)[~lost] for name in ("disorder_um", "present", "lesions")}
    others = measure(replace(volume, voxels=voxels[~lost]), replace(found, **parts))
    assert (measures.lost, others.lost) == (6, 0)
    for name in ("clipped", "thickness_um", "doubtful"):
        assert getattr(measures, name) == pytest.approx(getattr(others, name)), name


def test_dark_images_and_images_without_contrast_are_refused(scan):
    volume, found = scan
    assert "dark" in codes(replace(volume, voxels=volume.voxels // 16), found)
    noise = np.random.default_rng(1).integers(0, 120, volume.shape, dtype=np.uint8)
    assert codes(replace(volume, voxels=noise), found) == ("dark",), "not inverted as well"
    deep = replace(volume, voxels=volume.voxels.astype(np.uint16) * 16, full_scale=16 * 255)
    assert codes(deep, found) == ()
    assert measure(deep, found).levels == pytest.approx(measure(volume, found).levels)


def test_contrast_is_that_to_the_vitreous_within_a_quarter_of_the_frame_above_the_retina(scan):
    """A bright membrane or reflection far above it says nothing."""
    volume, found = scan
    voxels = volume.voxels.copy()
    voxels[:, : 200 - H // 4] += 90
    vitreous, retina = voxels[:, 200 - H // 4 + 1 : 197].astype(float), voxels[:, 201:277].astype(float)
    expected = (retina.mean() - vitreous.mean()) / vitreous.std()
    assert measure(replace(volume, voxels=voxels), found).contrast == pytest.approx(expected, rel=0.02)


def test_images_of_inverted_grey_levels_are_refused(scan):
    """The network finds their layers, but none of their fluid, which is bright."""
    volume, found = scan
    assert codes(replace(volume, voxels=255 - volume.voxels), found) == ("inverted",)


def test_a_scan_in_a_frame_is_judged_inside_of_it(scan):
    volume, found = scan
    frame = slice(120, 120 + H), slice(40, 40 + W)
    framed = replace(volume, voxels=np.pad(volume.voxels, ((0, 0), (120, 90), (40, 50)), constant_values=128))
    assert judge(framed, found.placed(frame, framed.shape), UNTRAINED) == judge(volume, found, UNTRAINED)


def test_an_unsure_network_is_refused(scan):
    volume, found = scan
    most = slice(0, W * 5 // 8)
    found.near[0, :, most], found.spread_um[0, :, most] = 0.5, 90
    assert codes(volume, found) == ("unfamiliar",)


def test_the_expected_error_grows_with_what_the_distribution_implies(scan):
    """The share of the distribution that lies elsewhere, times its distance."""
    volume, found = scan
    assert expected_error_um(found, volume.spacing_mm).max() < ASCAN_UM / 4
    found.near[-1, 0, 0], found.spread_um[-1, 0, 0] = 0.75, 160 * 0.25**0.5
    found.disorder_um[1, 1], found.rows[0, 2, 2] = 90, np.nan
    found.near[3, 5, 5], found.spread_um[3, 5, 5] = 0.1, 200  # an inner layer, which thickness does not depend on
    error = expected_error_um(found, volume.spacing_mm)
    share = OWN_SHARE
    assert error[0, 0] == pytest.approx(160 * 0.25 * share, abs=2) and error[1, 1] == pytest.approx(90 * share, abs=2)
    assert error[2, 2] == pytest.approx(MOST_UM * share)
    assert np.argwhere(error > ASCAN_UM).tolist() == [[0, 0], [1, 1], [2, 2]]
    assert expected_error_um(found, volume.spacing_mm, "ilm", SURFACES[3])[5, 5] == pytest.approx(MOST_UM * share)


def test_a_wavy_membrane_is_unexpected_and_a_tilted_or_curved_one_is_not(scan):
    """A network that follows another line for a while, and is sure of it."""
    volume, found = scan
    spacing, columns = volume.spacing_mm, np.arange(volume.shape[2])
    tilted = 60 + 0.3 * columns + np.zeros((3, 1))
    assert waviness_um(tilted, spacing).max() < 1e-6
    half = spacing[2] * (columns - columns.mean())
    curved = 60 + half**2 / (2 * 12 * spacing[1]) + np.zeros((3, 1))  # of an eyeball, mm
    assert waviness_um(curved, spacing).max() < 8
    found.rows[-1, 4, 22:28] += 60 / (1000 * spacing[1])  # 60 µm down over half a millimetre
    error = expected_error_um(found, spacing)
    assert (error[4, 22:28] > ASCAN_UM).all() and error[3].max() < ASCAN_UM / 4
    gap = tilted.copy()
    gap[:, 10:20] = np.nan
    assert waviness_um(gap, spacing).max() < 1e-6 and not waviness_um(np.full((2, 50), np.nan), spacing).any()
    assert not waviness_um(np.ones((2, 1)), spacing).any()


def test_a_thick_and_folded_inner_retina_is_suspected_of_a_membrane_and_other_swelling_is_not(scan):
    """The ILM may then lie on the membrane, which the network does not know."""
    volume, found = scan
    spacing, row_um = volume.spacing_mm, 1000 * volume.spacing_mm[1]
    inner, columns = SURFACES.index("ipl_inl"), np.arange(volume.shape[2])
    found.rows[inner] = found.rows[0] + 110 / row_um
    found.rows[inner + 1 :, 1] += 150 / row_um  # oedema of the layers below
    found.rows[inner, 2] += 40 / row_um  # a thick inner retina
    found.rows[inner:, 3] += 40 / row_um
    found.rows[inner, 3] += 25 / row_um * np.sin(2 * np.pi * columns * spacing[2] / 0.5)  # and folded
    found.rows[:, 5], found.lesions[5, 220] = found.rows[:, 3], 1 + MASKS.index("intraretinal_fluid")  # cysts
    found.rows[0, 4] -= 0.05 * columns  # tilted
    found.rows[inner, 4] -= 0.05 * columns
    error = membrane_um(found, spacing)
    assert not error[[0, 1, 2, 4, 5]].any() and error[3].mean() > ASCAN_UM
    # It says nothing of layers that do not begin at the ILM, and does not make an image unfamiliar.
    assert expected_error_um(found, spacing, "ez", "bm").max() < ASCAN_UM
    found.rows[inner:] = found.rows[inner:, 3:4]
    assert (expected_error_um(found, spacing) > ASCAN_UM).mean() > 0.7 and codes(volume, found) == ()


def test_a_thin_outer_nuclear_layer_makes_bruchs_membrane_doubtful(scan):
    """In atrophy the network may take a line in the choroid for it, and be sure."""
    volume, found = scan
    spacing, row_um = volume.spacing_mm, 1000 * volume.spacing_mm[1]
    opl, ez = SURFACES.index("opl_onl"), SURFACES.index("ez")
    found.rows[opl, 1] = found.rows[ez, 1] - 25 / row_um
    found.rows[opl, 2, 30:32] = found.rows[ez, 2, 30:32] - 25 / row_um  # a fifth of a millimetre is no atrophy
    error = atrophy_um(found, spacing)
    assert not error[[0, 2]].any() and error[1] == pytest.approx(16, abs=0.1)
    assert (expected_error_um(found, spacing)[1] > ASCAN_UM).all()
    assert (expected_error_um(found, spacing, "ilm", "ez")[1] < ASCAN_UM).all()
    found.rows[opl] = found.rows[ez] - 25 / row_um
    assert codes(volume, found) == ()  # no reason to call the whole image unfamiliar


def test_every_reason_is_a_sentence_of_what_was_measured(scan):
    measures = measure(*scan)
    for sentence in REASONS.values():
        assert "{" not in sentence.format(**vars(measures))
    assert decide(measures) == decide(replace(measures))


@pytest.fixture(scope="module")
def phantom() -> Volume:
    stream = Stream(203, bscans=3, randomised=0.0, conditions=("healthy",), ascan_um=(16.0, 16.0))
    image = next(image for place in range(50) if (image := stream(place)).accident == "none")
    spacing_mm = (0.45, *image.spacing_mm[1:])  # or B-scans are too far apart for the centre
    return Volume(image.voxels, spacing_mm, laterality="R", source="phantom")


def test_a_good_phantom_passes_and_its_doubtful_share_is_shown(phantom):
    found = octfm.segment(phantom)
    assert found.verdict.accepted, found.verdict.reasons
    assert found.doubtful.shape == found.surfaces["bm"].shape and found.doubtful.mean() < 0.05
    row = row_of(found)
    assert set(row) == set(COLUMNS) and float(row["doubtful_ascans"]) == pytest.approx(found.doubtful.mean(), abs=1e-3)
    assert "of A-scans are doubtful" in describe(found)
    kept = found.etdrs(keep_doubtful=True).mean_um
    assert all(mean is None or mean == kept[zone] for zone, mean in found.etdrs().mean_um.items())


def test_a_zone_is_withheld_where_the_network_is_unsure(phantom):
    found = octfm.segment(phantom)
    found.found.near[-1, 1, 100:300], found.found.spread_um[-1, 1, 100:300] = 0.3, 120
    whole, grid = found.etdrs(keep_doubtful=True), found.etdrs()
    assert whole.mean_um["centre"] and grid.mean_um["centre"] is None
    assert "centre" in row_of(found)["withheld"] and "centre" in describe(found).split("withheld")[1]
    assert whole.centre_mm == grid.centre_mm and whole.coverage == grid.coverage


@pytest.fixture(scope="module")
def dense() -> Volume:
    """23 B-scans of 3.4 mm, .15 mm apart, around a fovea."""
    stream = Stream(
        204,
        bscans=49,
        randomised=0.0,
        conditions=("healthy",),
        scanners=("heidelberg_spectralis",),
        ascan_um=(24, 24),
        row_um=6.0,
    )
    image = next(image for place in range(50) if (image := stream(place)).accident == "none")
    half = round(1.7 / image.spacing_mm[2])
    middle = slice(image.voxels.shape[2] // 2 - half, image.voxels.shape[2] // 2 + half)
    # The retina lies in rows 100 to 260, and the network takes time for every row.
    return Volume(
        image.voxels[13:36, 60:300, middle], image.spacing_mm, laterality="R", superior_first=True, source="dense"
    )


@pytest.mark.slow
def test_a_blink_blanks_the_zones_that_it_crosses_and_no_more(dense):
    """One dark B-scan is bridged by its neighbours, four are not; volumes of fluid are given in the first case only."""

    def darkened(bscans: slice) -> ScanSegmentation:
        voxels = dense.voxels.copy()
        voxels[bscans] //= 60
        found = octfm.segment(replace(dense, voxels=voxels))
        assert found.verdict.accepted, found.verdict
        assert np.isnan(found.surfaces["bm"][bscans]).all() and found.doubtful[bscans].all()
        return found

    found = octfm.segment(dense)
    row, shown, whole = row_of(found), found._repr_html_(), found.etdrs()
    assert row["inner_superior_um"] and "inner superior" in shown and "disc" not in row["zones_note"] + shown
    inner = [name for name in whole.mean_um if name == "centre" or name.startswith("inner")]
    assert all(whole.mean_um[name] for name in inner)
    one, four = darkened(slice(11, 12)), darkened(slice(7, 11))
    assert one.etdrs().mean_um == pytest.approx(whole.mean_um, abs=3) and one.volume_nl("drusen") is not None
    crossed = four.etdrs().mean_um
    blank = [name for name in inner if crossed[name] is None]
    assert "inner superior" in blank and "inner inferior" not in blank and four.volume_nl("drusen") is None
    assert all(crossed[name] == pytest.approx(whole.mean_um[name], abs=3) for name in set(inner) - {*blank})
    note = row_of(four)["zones_note"]
    assert (
        "4 of 23 B-scans are dark" in note and "measured: " in note and "inner superior" in note.split("measured: ")[1]
    )
    assert "4 of 23 B-scans are dark" in describe(four)


def test_a_scan_of_the_optic_disc_has_no_zones_and_says_why():
    stream = Stream(
        205,
        bscans=9,
        randomised=0.0,
        conditions=("healthy",),
        scanners=("zeiss_cirrus",),
        ascan_um=(24, 24),
        row_um=6.0,
    )
    shot, size, _ = next(shown for place in range(50) if (shown := stream.shot(place))[0].placement.accident == "none")
    at_mm = -4.2 if shot.eye.laterality == "R" else 4.2
    shot = replace(shot, acquisition=replace(shot.acquisition, fixation_mm=(at_mm, 0.0)))
    image = render_native(shot, np.random.default_rng(1), size)
    found = octfm.segment(Volume(image.voxels, image.spacing_mm, laterality="R", superior_first=True, source="a scan"))
    assert found.verdict.accepted, found.verdict
    assert found.etdrs(keep_doubtful=True).mean_um["inner superior"]
    row, shown = row_of(found), found._repr_html_()
    assert not row["inner_superior_um"] and "inner superior" not in shown
    assert "no zones: the optic disc lies where the fovea should be" in row["zones_note"]
    assert "optic disc lies" in shown and "a scan:" not in shown
    with pytest.raises(EvaluationError, match=r"^a scan: the optic disc lies where the fovea should be"):
        found.etdrs()
    assert not thickness_pictures(found) and "optic disc" in describe(found)
    unfamiliar = replace(found, verdict=Verdict(("unfamiliar",), 1.5, ("unfamiliar",)))
    why = correction_facts(unfamiliar)["whyNoZones"]
    assert "optic disc" in why, "the page has no zones either once its lines are checked"


def test_signs_of_an_optic_disc_are_unsure_outer_layers_below_a_sure_ilm():
    """Not a blink, and not outer layers that are unsure where a retina is."""
    found = found_in()
    place, layers, lit = found.place(), found.found, np.zeros(25, bool)
    x, y = np.meshgrid(np.linspace(-3, 3, 120), np.linspace(-3, 3, 25))
    here = np.hypot(x, y) < 0.9

    def seen(
        ilm: float = 0.98,
        outer: float = 0.7,
        present: float = 0.6,
        disorder_um: float = 20.0,
        dark: np.ndarray = lit,
    ) -> bool:
        near, there, disorder = layers.near.copy(), layers.present.copy(), layers.disorder_um.copy()
        near[0, here], near[5:8, here], there[here], disorder[here] = ilm, outer, present, disorder_um
        return shows_disc(replace(layers, near=near, present=there, disorder_um=disorder), place, (0.0, 0.0), dark)

    assert seen()
    assert not seen(present=1.0) and not seen(outer=0.9) and not seen(ilm=0.6) and not seen(disorder_um=1.0)
    assert not seen(dark=here.any(axis=1)), "in a blink the network may be sure of anything"
    assert not shows_disc(layers, place, (0.0, 0.0), lit) and not shows_disc(layers, place, (50.0, 0.0), lit)
    near, there, disorder = layers.near.copy(), layers.present.copy(), layers.disorder_um.copy()
    here = np.hypot(x - 1.8, y) < 0.9
    near[5:8, here], there[here], disorder[here] = 0.5, 0.6, 20.0
    beside = replace(layers, near=near, present=there, disorder_um=disorder)
    assert shows_disc(beside, place, (1.8, 0.0), lit) and not shows_disc(beside, place, (0.0, 1.8), lit)


def test_a_wide_field_is_believed_where_the_disc_is_seen_at_its_place(scan):
    """A field of 6 mm whose lateral millimetres are doubled has no disc 4.5 mm from its middle."""
    volume, found = scan

    def codes_with_disc(at_mm: float, field_mm=12.0, bscans=slice(4, 6), dz=0.9) -> tuple[str, ...]:
        wide = replace(volume, spacing_mm=(dz, 0.0039, field_mm / W))
        near, present, disorder = found.near.copy(), found.present.copy(), found.disorder_um.copy()
        here = np.abs((np.arange(W) - W / 2) * field_mm / W - at_mm) < 0.8
        near[5:8, bscans, here], present[bscans, here], disorder[bscans, here] = 0.3, 0.5, 40.0
        return codes(wide, replace(found, near=near, present=present, disorder_um=disorder))

    assert codes_with_disc(4.5) == codes_with_disc(-4.5) == ()
    assert codes_with_disc(2.0) == ("wide_field",), "in the middle nothing shows the scale"
    assert codes_with_disc(4.5, 13.0) == ("wide_field",), "not tested"
    assert codes_with_disc(4.5, bscans=slice(4, 5), dz=0.3) == ("wide_field",), "a disc is as high as it is wide"
    line = replace(volume, voxels=volume.voxels[:1], spacing_mm=(0.9, 0.0039, 12 / W), layout="line")
    one = replace(found, rows=found.rows[:, :1], spread_um=found.spread_um[:, :1], near=found.near[:, :1])
    one = replace(one, disorder_um=one.disorder_um[:1], present=one.present[:1], lesions=one.lesions[:1])
    assert codes(line, one) == (), "no zones, so no lateral millimetres that could be wrong"


def with_a_rival(monkeypatch, apart_mm: float) -> None:
    """Every grid has another place that could be the fovea."""
    measure = segment_module.measure_grid

    def with_rival(values, place, laterality, pit_map_um=None):
        grid = measure(values, place, laterality, pit_map_um)
        x, y = grid.centre_mm
        return replace(grid, rivals_mm=((x + apart_mm, y),))

    monkeypatch.setattr(segment_module, "measure_grid", with_rival)


def test_a_volume_that_another_fovea_would_change_is_withheld(monkeypatch):
    found = found_in()
    assert found.etdrs().volume_mm3
    with_a_rival(monkeypatch, 0.1)
    assert found.etdrs().volume_mm3
    with_a_rival(monkeypatch, 2.0)  # the scan does not cover the 6 mm around it
    assert found.etdrs().volume_mm3 is None and found.etdrs(keep_doubtful=True).volume_mm3


def test_a_note_says_by_how_much_other_bscans_would_change_a_mean():
    even, uneven, few = found_in(49), found_in(49), found_in(17)
    uneven.surfaces["ilm"][24] -= 40  # 160 µm
    said = [
        re.findall(r"if other B-scans are taken, (.*?) per mm: centre by (\d+) µm", row_of(f)["zones_note"])
        for f in (even, uneven, few)
    ]
    assert said[0] == [], "8 per mm"
    (per_mm, change), ((few_per_mm, _),) = said[1][0], said[2]
    assert per_mm == "8.2" and float(change) == round(uneven.etdrs().sampling_um["centre"]) > 5, "one B-scan is thick"
    assert few_per_mm == "2.8", "few, of a retina with a pit"


def test_a_note_says_by_how_much_a_swollen_centre_changes_if_the_fovea_lies_beside_it():
    """A cone beside the fovea, 400 µm high, as large cysts make it; the pit of the inner retina stays."""
    healthy, swollen = found_in(49), found_in(49)
    depth, width = swollen.surfaces["bm"].shape
    off_mm = np.hypot(*np.meshgrid(np.linspace(-3.4, 2.6, width), np.linspace(-3, 3, depth)))
    swollen.surfaces["bm"] += np.clip(400 * (1 - off_mm / 0.8), 0, None) / 1000 / swollen.spacing_mm[1]
    said = [
        re.findall(r"fovea lies (.*?) mm from.*?centre by (\d+) µm", row_of(f)["zones_note"])
        for f in (healthy, swollen)
    ]
    assert said[0] == []
    ((away, change),) = said[1]
    grid = swollen.etdrs()
    assert away == "0.15" and float(change) == round(grid.place_um["centre"]) > 10
    x, y = grid.centre_mm
    beside = measure_around((x - 0.15, y), swollen.thickness_um("ilm", "bm"), swollen.place(), "R")
    assert abs(beside.mean_um["centre"] - grid.mean_um["centre"]) == pytest.approx(grid.place_um["centre"], rel=0.2)


def test_a_circle_as_long_as_a_wide_field_is_not_refused_for_its_length(scan):
    """12° are 3.5 mm across and 11 mm around; a raster of that width is refused."""
    volume, found = scan
    wide = replace(volume, spacing_mm=(0.6, 0.0039, 11.3 / W))
    assert codes(wide, found) == ("wide_field",)
    assert codes(replace(wide, layout="circle"), found) == ()


def test_a_circle_says_that_its_nerve_fibres_are_not_measured():
    found = found_in(1)
    circle = replace(found, volume=replace(found.volume, layout="circle"))
    assert "no nerve fibre thickness" in row_of(circle)["zones_note"] and "no nerve" not in row_of(found)["zones_note"]


@pytest.mark.parametrize(("bscans", "given"), [(12, True), (8, True), (7, False)])
def test_areas_of_bscans_far_apart_do_not_add_up_to_a_volume(bscans, given):
    found = found_in(bscans, fluid_in=bscans // 2)
    row = row_of(found)
    assert (found.volume_nl("intraretinal_fluid") is not None) == given == bool(row["intraretinal_fluid_nl"])
    assert ("volumes" in row["zones_note"]) != given
    assert (correction_facts(found)["nlPerVoxel"] is not None) == given


def placed(found, at_mm):
    """The scan with its B-scans at these positions from superior to inferior."""
    x, y = np.full(len(at_mm), 3.0), np.asarray(at_mm, float)
    lines = Lines(np.stack([-x, y], axis=1), np.stack([x, y], axis=1))
    spacing = (float(np.median(np.diff(y))), *found.spacing_mm[1:])
    return replace(found, spacing_mm=spacing, volume=replace(found.volume, lines=lines, spacing_mm=spacing))


@pytest.mark.parametrize(("beside_mm", "blank"), [(0.15, False), (0.55, True)])
def test_zones_and_volumes_across_missing_bscans_are_blank(beside_mm, blank):
    """A file may lack B-scans where its others state their places: the mean distance is still that of a dense raster."""
    at = np.linspace(-3, 3, 61)
    kept = np.abs(at) > beside_mm
    found = placed(found_in(kept.sum(), fluid_in=2), at[kept])
    grid, row = found.etdrs(), row_of(found)
    within = {name.split()[0] for name, mean in grid.mean_um.items() if mean is None}
    assert within == ({"centre", "inner"} if blank else set())
    assert (found.volume_nl("intraretinal_fluid") is None) == (grid.volume_mm3 is None) == blank
    assert ("B-scans 1.20 mm apart are too far apart for: centre" in row["zones_note"]) == blank


def test_bscans_that_all_have_one_position_have_no_volume():
    """As volumes of 0.0 nl they would say that there is no fluid."""
    found = placed(found_in(25, fluid_in=2), 2e-6 * np.arange(25))
    row = row_of(found)
    assert found.volume_nl("intraretinal_fluid") is None and row["intraretinal_fluid_nl"] == row["volume_mm3"] == ""
    assert "no zones: all B-scans have one and the same position" in row["zones_note"]


def test_a_bscan_counts_for_what_lies_halfway_to_its_neighbours():
    """Every other B-scan of one half is missing: fluid there has twice the volume per B-scan."""
    at = np.r_[np.arange(-3, 0, 0.1), np.arange(0, 3.01, 0.2)]
    dense, sparse = (placed(found_in(len(at), fluid_in=d), at).volume_nl("intraretinal_fluid") for d in (10, 40))
    assert dense == pytest.approx(20 * 20 * 0.1 * 0.004 * 0.05 * 1000, rel=1e-6)
    assert sparse == pytest.approx(2 * dense, rel=1e-6)


def test_positions_that_contradict_the_millimetres_give_neither_zones_nor_volumes():
    """A sidecar may state both; zones went by one and volumes by the other."""
    found = placed(found_in(61, fluid_in=30), np.linspace(-3, 3, 61))
    assert found.etdrs().mean_um["centre"] and found.volume_nl("intraretinal_fluid")
    lines = Lines(2 * found.volume.lines.start, 2 * found.volume.lines.end)
    twice = replace(found, volume=replace(found.volume, lines=lines))
    assert "12.0 mm long by their positions, but 6.0 mm by the distance of A-scans" in row_of(twice)["zones_note"]
    assert twice.volume_nl("intraretinal_fluid") is None


def test_bscans_that_run_to_and_fro_have_volumes_by_their_places():
    """As if all ran one way: neither across a gap nor where positions contradict the millimetres."""
    at = np.r_[np.arange(-3, 0, 0.1), np.arange(0, 3.01, 0.2)]

    def fluid_nl(at_mm, times=1.0, to_and_fro=True):
        found = placed(found_in(len(at_mm), fluid_in=len(at_mm) - 6), at_mm)
        lines, against = found.volume.lines, (to_and_fro & (np.arange(len(at_mm)) % 2 == 1))[:, None]
        turned = Lines(
            times * np.where(against, lines.end, lines.start), times * np.where(against, lines.start, lines.end)
        )
        return replace(found, volume=replace(found.volume, lines=turned)).volume_nl("intraretinal_fluid")

    assert fluid_nl(at) == pytest.approx(fluid_nl(at, to_and_fro=False))
    assert fluid_nl(at, times=2) is None
    assert fluid_nl(at[np.abs(at) > 0.55]) is None


def test_a_gap_outside_all_zones_says_why_volumes_are_blank():
    at = np.linspace(-3, 4, 71)
    found = placed(found_in(62, fluid_in=2), np.r_[at[:61], at[-1]])
    assert found.volume_nl("intraretinal_fluid") is None
    assert row_of(found)["zones_note"] == "B-scans 1.00 mm apart are too far apart for: volumes"


def test_zones_around_the_middle_of_the_scan_are_said_to_lie_there():
    found = found_in()
    flat = {name: np.full_like(rows, rows.mean()) for name, rows in found.surfaces.items()}
    text = describe(replace(found, surfaces=flat))
    assert "in ETDRS zones around the middle of the scan\n" in text


@pytest.mark.parametrize(
    ("bscans", "blank"),
    [(25, ()), (10, ("centre",)), (7, ("centre", "inner")), (3, ("centre", "inner", "outer"))],
)
def test_zones_between_bscans_far_apart_are_blank_with_the_reason(bscans, blank):
    found = found_in(bscans)
    grid, row = found.etdrs(), row_of(found)
    rings = {name.split()[0] for name, mean in grid.mean_um.items() if mean is None}
    assert rings == set(blank) and (grid.volume_mm3 is None) == ("inner" in blank)
    assert all(found.etdrs(keep_doubtful=True).mean_um.values())
    assert ("too far apart for: centre" in row["zones_note"]) == bool(blank) and not row["withheld"]


def test_zones_that_another_fovea_would_change_are_withheld_with_the_reason(phantom, monkeypatch):
    found = octfm.segment(phantom)
    with_a_rival(monkeypatch, 1.2)
    whole, grid, row = found.etdrs(keep_doubtful=True), found.etdrs(), row_of(found)
    assert whole.mean_um["centre"] and grid.mean_um["centre"] is None and "centre" in row["withheld"]
    assert "could also lie 1.2 mm away" in row["zones_note"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda v: replace(v, voxels=v.voxels[:, ::-1]), "upside down"),
        (lambda v: replace(v, voxels=v.voxels // 60), "too dark"),
        (lambda v: replace(v, spacing_mm=(v.spacing_mm[0], v.spacing_mm[1] / 2, v.spacing_mm[2])), "axial millimetres"),
        (lambda v: replace(v, voxels=np.where(np.arange(3)[:, None, None] > 0, 0, v.voxels)), "no retina"),
    ],
)
def test_a_spoilt_phantom_is_refused_in_words_and_has_no_zones(phantom, spoil, reason):
    found = octfm.segment(spoil(phantom))
    assert any(reason in sentence for sentence in found.verdict.reasons), found.verdict
    row = row_of(found)
    assert row["verdict"] == "; ".join(found.verdict.reasons) and not row["centre_um"]


@pytest.mark.slow
def test_the_same_eye_shown_differently_has_the_same_central_thickness(phantom):
    """Within 4 µm in the central millimetre of the middle B-scan: mirrored, brighter, darker, shifted, tilted by 3°."""
    voxels = phantom.voxels[1:2]
    _, height, width = voxels.shape
    row, rise = np.arange(height), np.tan(np.radians(3)) * phantom.spacing_mm[2] / phantom.spacing_mm[1]
    tilt = np.rint(rise * (np.arange(width) - width / 2)).astype(int)
    shown = {
        "as it is": voxels,
        "mirrored": voxels[:, :, ::-1],
        "gamma 0.8": np.rint(255 * (voxels / 255) ** 0.8).astype(np.uint8),
        "gamma 1.25": np.rint(255 * (voxels / 255) ** 1.25).astype(np.uint8),
        "shifted": np.roll(voxels, 20, axis=1),
        "tilted": np.take_along_axis(voxels, np.clip(row[:, None] - tilt, 0, height - 1)[None], axis=1),
    }
    middle = np.abs((np.arange(width) - (width - 1) / 2) * phantom.spacing_mm[2]) < 0.5
    thickness = {}
    for name, array in shown.items():
        found = octfm.segment(replace(phantom, voxels=np.ascontiguousarray(array)))
        assert found.verdict.accepted, (name, found.verdict)
        thickness[name] = float(np.nanmean(found.thickness_um("ilm", "bm")[:, middle]))
    assert max(thickness.values()) - min(thickness.values()) < 4, thickness
