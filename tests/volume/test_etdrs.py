"""The ETDRS grid: known thickness functions, every way a raster can lie on the fundus, and phantoms whose zones are
known exactly."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octfm.phantom.anatomy import SURFACE
from octfm.phantom.eye import sample_eye, surfaces_um
from octfm.phantom.normative import sectors_um
from octfm.phantom.render import en_face_positions
from octfm.phantom.scanner import SCANNERS, acquire
from octfm.volume.etdrs import ZONES, EtdrsGrid, field_of, find_pits, measure_around, measure_grid
from octfm.volume.volume import Lines
from support.examples import examples

FOVEA = (0.15, -0.2)


def lopsided(x, y):
    """A retina with a pit at FOVEA, thicker to the right and below."""
    r = np.hypot(x - FOVEA[0], y - FOVEA[1])
    return 330 - 80 * np.exp(-((r / 0.5) ** 2)) + 12 * np.tanh(x - FOVEA[0]) + 7 * np.tanh(y - FOVEA[1])


def raster(angle: float, count: int, columns: int, extent: float, backwards: bool) -> Lines:
    """Parallel lines through the origin's surroundings; at angle 0 they run to the right and step downwards."""
    along = np.array([np.cos(angle), np.sin(angle)])
    across = np.array([-along[1], along[0]])
    at = np.linspace(-extent / 2, extent / 2, count)[:: -1 if backwards else 1]
    middle = at[:, None] * across
    return Lines(middle - along * extent / 2, middle + along * extent / 2)


def thickness_on(lines: Lines, columns: int) -> np.ndarray:
    share = np.linspace(0, 1, columns)[:, None]
    points = lines.start[:, None] + (lines.end - lines.start)[:, None] * share
    return lopsided(points[..., 0], points[..., 1])


def expected() -> dict[str, float]:
    """Zone means of `lopsided` for a right eye, on a grid of its own."""
    axis = np.arange(-3, 3, 0.01) + 0.005
    x, y = np.meshgrid(axis, axis)
    r, value = np.hypot(x, y), lopsided(x + FOVEA[0], y + FOVEA[1])
    sides = {
        "superior": (np.abs(x) <= np.abs(y)) & (y < 0),
        "nasal": (np.abs(x) > np.abs(y)) & (x > 0),
        "inferior": (np.abs(x) <= np.abs(y)) & (y > 0),
        "temporal": (np.abs(x) > np.abs(y)) & (x < 0),
    }
    found = {"centre": value[r < 0.5].mean()}
    for ring, a, b in (("inner", 0.5, 1.5), ("outer", 1.5, 3.0)):
        found |= {f"{ring} {side}": value[(r >= a) & (r < b) & inside].mean() for side, inside in sides.items()}
    return found


@settings(max_examples=examples(30))
@given(
    angle=st.floats(-np.pi, np.pi),
    count=st.integers(61, 128),
    columns=st.sampled_from([256, 512]),
    backwards=st.booleans(),
)
def test_zones_do_not_depend_on_how_the_raster_lies(angle, count, columns, backwards):
    lines = raster(angle, count, columns, 9.0, backwards)
    field = field_of((count, columns), (0.1, 0.004, 9.0 / (columns - 1)), None, lines)
    grid = measure_grid(thickness_on(lines, columns), field, "R")
    assert grid.centre == "pit"
    assert np.hypot(*(np.array(grid.centre_mm) - FOVEA)) < 0.05
    for zone, um in expected().items():
        assert grid.mean_um[zone] == pytest.approx(um, abs=2.0), zone


def horizontal(count=97, columns=256, extent=8.0, superior_first: bool | None = True, **changes):
    lines = raster(0.0, count, columns, extent, backwards=superior_first is False)
    spacing = (extent / (count - 1), 0.004, extent / (columns - 1))
    return thickness_on(lines, columns), field_of((count, columns), spacing, superior_first, **changes)


@pytest.mark.parametrize("superior_first", [True, False])
def test_without_positions_the_bscan_order_alone_tells_superior(superior_first):
    thickness, field = horizontal(superior_first=superior_first)
    grid = measure_grid(thickness, field, "R")
    assert tuple(grid.mean_um) == ZONES
    for zone, um in expected().items():
        assert grid.mean_um[zone] == pytest.approx(um, abs=1.0), zone


def test_a_left_eyes_nasal_side_is_the_right_eyes_temporal_side():
    thickness, field = horizontal()
    right, left = measure_grid(thickness, field, "R"), measure_grid(thickness, field, "L")
    for ring in ("inner", "outer"):
        assert left.mean_um[f"{ring} nasal"] == right.mean_um[f"{ring} temporal"]
        assert left.mean_um[f"{ring} superior"] == right.mean_um[f"{ring} superior"]


def test_what_is_not_known_is_not_named():
    thickness, field = horizontal(superior_first=None)
    grid = measure_grid(thickness, field, None)
    assert set(grid.mean_um) == {"centre", "inner left", "inner right", "outer left", "outer right"}
    assert grid.volume_mm3 is not None


def test_a_zone_covered_by_less_than_nine_tenths_stays_blank():
    thickness, field = horizontal()
    hidden = thickness.copy()
    hidden[:12] = np.nan  # the superior 1 mm of 8: part of the outer superior zone only
    hidden[:, 200:] = np.nan
    grid = measure_grid(hidden, field, "R")
    assert grid.mean_um["outer nasal"] is None and grid.coverage["outer nasal"] < 0.9
    assert grid.mean_um["centre"] is not None and grid.volume_mm3 is None
    assert all((um is None) == (grid.coverage[zone] < 0.9) for zone, um in grid.mean_um.items())


@settings(max_examples=examples(40))
@given(first=st.integers(0, 48), many=st.integers(1, 12))
@example(first=22, many=2)
def test_a_gap_of_bscans_changes_nothing_or_blanks_the_zones_that_it_crosses(first, many):
    """49 B-scans over 7 mm: a single one is bridged; a wider gap leaves what it does not touch as it was."""
    lines = raster(0.0, 49, 256, 7.0, False)
    thickness, place = thickness_on(lines, 256), field_of((49, 256), (7 / 48, 0.004, 7 / 255), True, lines)
    whole = measure_around(FOVEA, thickness, place, "R")
    gap = thickness.copy()
    gap[first : first + many] = np.nan
    found = measure_around(FOVEA, gap, place, "R")
    at = np.linspace(-3.5, 3.5, 49)
    before, after = at[max(first - 1, 0)], at[min(first + many, 48)]
    for name, mean in found.mean_um.items():
        if mean is not None:
            assert mean == pytest.approx(whole.mean_um[name], abs=1.0 if many == 1 else 8.0)
    if many == 1 and 0 < first < 48:
        assert found.coverage == whole.coverage
    elif before < FOVEA[1] < after:
        assert found.mean_um["centre"] is None
    if before > FOVEA[1] + 0.5 + at[1] - at[0]:
        assert found.mean_um["centre"] == pytest.approx(whole.mean_um["centre"], abs=0.01)


def test_a_zone_is_too_sparse_where_its_own_bscans_are_too_far_apart():
    """B-scans .1 mm apart, but the last one, below the fovea, 2.8 mm from the one before."""
    y = np.r_[np.arange(-3.5, 2.25, 0.1), 5.0]
    lines = Lines(np.stack([0 * y - 3.5, y], axis=1), np.stack([0 * y + 3.5, y], axis=1))
    field = field_of((len(y), 256), (0.1, 0.004, 7 / 255), None, lines)
    grid = measure_around((0.0, 0.0), thickness_on(lines, 256), field, "R")
    assert grid.too_sparse == ["outer inferior"] and grid.furthest_mm == pytest.approx(2.8)
    assert grid.bscans_per_mm == pytest.approx(58 / 8.5)


@pytest.mark.parametrize(("apart_mm", "sparse"), [(0.5, []), (0.52, ["centre"]), (0.76, ["centre", *ZONES[1:5]])])
def test_evenly_spaced_bscans_are_too_far_apart_from_a_little_above_the_limit_of_a_ring(apart_mm, sparse):
    """Single distances may exceed it by a tenth, but not their mean."""
    count = round(6.6 / apart_mm) + 1
    field = field_of((count, 64), (apart_mm, 0.004, 0.11), True)
    assert measure_around((0.0, 0.0), np.full((count, 64), 300.0), field, "R").too_sparse == sparse


def test_a_flat_retina_is_measured_around_the_devices_centre_or_the_scans():
    thickness, field = horizontal()
    flat = np.full_like(thickness, 300.0)
    assert find_pits(flat, field) == []
    assert measure_grid(flat, field, "R").centre == "scan"
    grid = measure_around((0.4, 0.1), flat, field, "R")
    assert grid.centre == "device" and grid.centre_mm == (0.4, 0.1)
    assert grid.volume_mm3 == pytest.approx(0.3 * np.pi * 9, rel=1e-6)


def two_pits(depths=(80.0, 78.0), places=((0.1, -0.2), (0.9, 0.9))):
    """A thickness map with two depressions, and its field."""
    _, field = horizontal(count=97, columns=256, extent=8.0)
    x, y = np.meshgrid(np.linspace(-4, 4, 256), np.linspace(-4, 4, 97))
    away = [np.hypot(x - px, y - py) for px, py in places]
    return 330 - sum(depth * np.exp(-((r / 0.5) ** 2)) for depth, r in zip(depths, away, strict=True)), field


def test_of_two_pits_the_one_nearer_to_the_middle_is_taken_and_both_named():
    for depths in ((80.0, 78.0), (78.0, 80.0)):
        grid = measure_grid(*two_pits(depths, ((0.1, -0.4), (-0.3, 0.65))), "R")
        assert grid.centre_mm == pytest.approx((0.1, -0.4), abs=0.1)
        ((x, y),) = grid.rivals_mm
        assert (x, y) == pytest.approx((-0.3, 0.65), abs=0.1)


def test_a_pit_far_from_the_middle_counts_where_it_is_the_only_one():
    grid = measure_grid(*two_pits((80.0, 0.0), ((1.1, 0.8), (0, 0))), "R")
    assert grid.centre_mm == pytest.approx((1.1, 0.8), abs=0.06) and grid.rivals_mm == ()


def test_a_mirrored_eye_with_two_pits_has_a_mirrored_grid():
    thickness, field = two_pits((80.0, 79.0))
    grid, mirrored = measure_grid(thickness, field, "R"), measure_grid(thickness[:, ::-1], field, "L")
    assert mirrored.centre_mm == pytest.approx((-grid.centre_mm[0], grid.centre_mm[1]), abs=1e-6)
    assert mirrored.mean_um == pytest.approx(grid.mean_um, abs=0.6)


def test_axial_length_scales_lateral_distances_by_bennetts_formula():
    thickness, field = horizontal(axial_length_mm=26.0)
    _, nominal = horizontal()
    assert field.ascan_mm / nominal.ascan_mm == pytest.approx((26.0 - 1.82) / (24.46 - 1.82))
    grid = measure_grid(thickness, field, "R")
    assert grid.centre_mm[0] == pytest.approx(FOVEA[0] * field.ascan_mm / nominal.ascan_mm, abs=0.02)


def test_a_zone_that_rests_on_single_bscans_says_by_how_much_it_may_be_off():
    """Eight B-scans per mm, one of them 80 µm thicker; a tilted retina is even, also between uneven B-scans."""
    field = field_of((49, 64), (0.125, 0.0039, 0.1), True)
    tilted = 300 + np.arange(49.0)[:, None] + np.zeros(64)
    assert max(measure_grid(tilted, field, "R").sampling_um.values()) < 1e-9
    moved = replace(field, bscans_mm=field.bscans_mm + 0.04 * (np.arange(49) % 2))
    slope = 300 + 8 * moved.bscans_mm[:, None] + np.zeros(64)
    assert max(measure_grid(slope, moved, "R").sampling_um.values()) < 1e-9
    tilted[24] += 80
    grid = measure_grid(tilted, field, "R")
    through = (np.abs(field.bscans_mm - 3) < 0.5).sum()
    assert grid.sampling_um["centre"] == pytest.approx(0.5 * np.sqrt((80**2 + 2 * 40**2) / through / through))
    assert grid.sampling_um["outer superior"] == pytest.approx(0, abs=1e-9)
    assert grid.sampling_um["inner nasal"] > 2
    tilted[25] = np.nan
    assert np.isfinite(list(measure_grid(tilted, field, "R").sampling_um.values())).all()


def test_a_zone_between_missing_bscans_may_be_off_as_if_the_file_had_only_the_others():
    """Without this, a scan that lacks every other B-scan would have the narrowest ranges of all."""
    um = 300 + 40.0 * (np.arange(49)[:, None] // 2 % 2) + np.zeros(64)
    others = measure_around((0.0, 0.0), um[::2], field_of((25, 64), (0.25, 0.0039, 0.1), True), "R")
    um[1::2] = np.nan
    found = measure_around((0.0, 0.0), um, field_of((49, 64), (0.125, 0.0039, 0.1), True), "R")
    assert found.mean_um == pytest.approx(others.mean_um) and found.sampling_um == pytest.approx(others.sampling_um)
    assert min(found.sampling_um.values()) > 3


@pytest.mark.parametrize("apart_mm", [pytest.param(0.25, marks=pytest.mark.slow), 0.5])
def test_a_zone_is_off_by_about_what_its_sampling_says(apart_mm):
    """A cyst .8 mm wide anywhere within the inner ring, B-scans that begin anywhere."""
    rng, x = np.random.default_rng(0), np.linspace(-3.2, 3.2, 129)

    def measured(y, spot):
        lines = Lines(np.stack([x[0] + 0 * y, y], axis=1), np.stack([x[-1] + 0 * y, y], axis=1))
        um = 300 + 200.0 * (np.hypot(x - spot[0], y[:, None] - spot[1]) < 0.4)
        return measure_around((0.0, 0.0), um, field_of(um.shape, (y[1] - y[0], 0.004, x[1] - x[0]), True, lines), "R")

    off, said = [], []
    for _ in range(40):
        spot = rng.uniform(-1, 1, 2)
        whole, part = (measured(np.arange(-3.5 + d * rng.random(), 3.5, d), spot) for d in (0.03, apart_mm))
        off += [part.mean_um[name] - whole.mean_um[name] for name in ZONES]
        said += [part.sampling_um[name] for name in ZONES]
    assert 0.3 < np.sqrt(np.mean(np.square(off)) / np.mean(np.square(said))) < 1


def test_a_single_bscan_has_no_grid():
    field = field_of((1, 256), (0.1, 0.004, 0.02), True)
    grid = measure_grid(np.full((1, 256), 300.0), field, "R")
    assert grid.volume_mm3 is None and set(grid.mean_um.values()) == {None}


def on_phantom(diagnosis: str, seed: int, scanner: str, size) -> tuple[EtdrsGrid, dict[str, float]]:
    laterality = "RL"[seed % 2]
    eye = sample_eye((3, seed), laterality, participant="p", age=65, diagnosis=diagnosis, severity=0.7)
    instrument = SCANNERS[scanner]
    x, y = en_face_positions(eye, instrument, acquire(np.random.default_rng(seed), instrument, size[0]), size)
    depth = surfaces_um(eye, x, y)
    field = field_of((size[0], size[2]), instrument.spacing_mm(size), instrument.superior_first)
    retina, inner = (depth[SURFACE[name]] - depth[SURFACE["ilm"]] for name in ("bm", "ipl_inl"))
    grid = measure_grid(retina, field, laterality, pit_map_um=inner)
    return grid, dict(zip(ZONES, sectors_um(eye)["retina"], strict=True))


@pytest.mark.parametrize("diagnosis", ["healthy", "drusen", "dme", "glaucoma"])
def test_phantom_zones_are_those_of_the_eye_whatever_the_scanner(diagnosis):
    errors = []
    for seed, (scanner, size) in enumerate(
        [
            ("heidelberg_spectralis", (49, 496, 256)),
            ("topcon_triton", (64, 992, 128)),
            ("zeiss_cirrus", (128, 1024, 128)),
        ]
    ):
        grid, truth = on_phantom(diagnosis, seed, scanner, size)
        assert grid.centre == "pit"
        errors += [um - truth[zone] for zone, um in grid.mean_um.items() if um is not None]
    # Not 0: fixation, torsion and eye motion are the scan's, the zones are the eye's.
    assert np.abs(errors).mean() < (2.5 if diagnosis == "dme" else 1.5)


def test_bscans_out_of_order_are_refused():
    lines = raster(0.3, 12, 40, 6.0, False)
    mixed = np.random.default_rng(0).permutation(12)
    with pytest.raises(ValueError, match="order of their positions"):
        field_of((12, 40), (0.5, 0.004, 0.15), True, Lines(lines.start[mixed], lines.end[mixed]))


@pytest.mark.parametrize("angle", [0.0, 0.7])
def test_a_field_is_the_same_whether_a_file_states_the_edges_or_the_middles_of_outer_a_scans(angle):
    """Its middle is that of its extent, however unevenly B-scans lie in it."""
    middles = raster(angle, 9, 60, 5.9, backwards=False)
    along = np.array([np.cos(angle), np.sin(angle)])
    edges = Lines(middles.start - 0.05 * along, middles.end + 0.05 * along)
    one, other = (field_of((9, 60), (0.7375, 0.004, 0.1), True, lines) for lines in (middles, edges))
    for bscan, ascan in ((0, 0), (8, 59), (3, 20)):
        at = middles.start[bscan] + along * 0.1 * ascan
        assert one.to_mm(bscan, ascan) == pytest.approx(at) and other.to_mm(bscan, ascan) == pytest.approx(at)
    scale = (30.0 - 1.82) / (24.46 - 1.82)
    for lines in (middles, edges):
        longer = field_of((9, 60), (0.7375, 0.004, 0.1), True, lines, axial_length_mm=30.0)
        assert longer.to_mm(3, 20) == pytest.approx(scale * (middles.start[3] + 2.0 * along))
    few = [0, 1, 2, 8]
    shifted = Lines(middles.start[few] + np.array([0, 0, 0, 0.4])[:, None] * along, middles.end[few] + np.array([0, 0, 0, 0.4])[:, None] * along)  # fmt: skip
    assert field_of((4, 60), (0.7375, 0.004, 0.1), True, shifted).centre == pytest.approx(0.1 * along, abs=1e-6)


def test_a_volume_is_the_mean_of_what_was_measured_over_the_whole_circle():
    """A tenth of the circle less than LEAST_COVERED blanks it; a gap in a flat retina does not make it smaller."""
    thickness, field = np.full((61, 61), 250.0), field_of((61, 61), (0.11, 0.004, 0.11), True)
    thickness[20:24, 10:16] = np.nan
    grid = measure_around((0.0, 0.0), thickness, field, "R")
    assert grid.volume_mm3 == pytest.approx(0.25 * np.pi * 3**2) and min(grid.coverage.values()) < 1
