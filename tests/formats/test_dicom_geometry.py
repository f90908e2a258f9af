"""Whatever way a raster lies in space and is stored, its B-scans come back in order with their true distance; what
is no raster is told."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from pydicom.dataset import Dataset

from octfm.formats import ReadError, read_header, read_volume
from octfm.formats.dicom.geometry import check_bounds, looks_swapped, read_geometry
from octfm.volume.volume import LAYOUTS
from support.dicom_files import item, write_oct_dicom
from support.examples import examples

SHAPE = (9, 300, 400)
many = settings(max_examples=examples(60))


def dataset(frames: list[Dataset], spacing_mm, thickness: float | None = None) -> Dataset:
    measures = item(PixelSpacing=[spacing_mm[1], spacing_mm[2]])
    if thickness is not None:
        measures.SliceThickness = thickness
    whole = Dataset()
    whole.SharedFunctionalGroupsSequence = [item(PixelMeasuresSequence=measures)]
    whole.PerFrameFunctionalGroupsSequence = frames
    return whole


def decimal(values) -> list[str]:
    """Decimal strings as DICOM stores them."""
    return [f"{value:.9g}" for value in values]


def rotation(yaw: float, pitch: float, roll: float) -> np.ndarray:
    def turn(i, j, angle):
        matrix = np.eye(3)
        matrix[[i, i, j, j], [i, j, i, j]] = np.cos(angle), -np.sin(angle), np.sin(angle), np.cos(angle)
        return matrix

    return turn(0, 1, yaw) @ turn(1, 2, pitch) @ turn(0, 2, roll)


spacings = st.tuples(st.floats(0.04, 0.6), st.floats(0.0015, 0.012), st.floats(0.004, 0.03)).filter(
    lambda mm: mm[1] <= mm[2]
)
angles = st.floats(-np.pi, np.pi)


def planes(positions_mm, axes) -> list[Dataset]:
    return [
        item(
            PlanePositionSequence=item(ImagePositionPatient=decimal(position)),
            PlaneOrientationSequence=item(ImageOrientationPatient=decimal(np.concatenate(pair))),
        )
        for position, pair in zip(positions_mm, axes, strict=True)
    ]


@many
@given(
    spacing_mm=spacings,
    turned=st.tuples(angles, angles, angles),
    origin=st.tuples(*[st.floats(-80, 80)] * 3),
    order=st.permutations(range(9)),
)
def test_an_oblique_raster_in_any_order_keeps_distance_and_order(spacing_mm, turned, origin, order):
    """LPS axes: A-scans along x, the beam along y, B-scans along z, all turned; the true order is from superior to
    inferior."""
    axes = rotation(*turned)
    step = -spacing_mm[0] * axes[:, 2]
    positions = np.array([np.array(origin) + place * step for place in order])
    frames = planes(positions, [(axes[:, 0], axes[:, 1])] * 9)
    found = read_geometry(dataset(frames, spacing_mm, thickness=0.7), SHAPE, "any", "here")
    assert found.spacing_mm == pytest.approx(spacing_mm, rel=1e-3)
    stored = np.array(order)[list(found.frame_order)] if found.frame_order else np.array(order)
    assert (stored == np.arange(9)).all() or (stored == np.arange(9)[::-1]).all()
    upright = abs(axes[2, 2])
    if upright > 0.75:
        # z is superior: B-scan 0 is where the place with the largest z is.
        assert found.superior_first is bool(
            positions[list(found.frame_order) if found.frame_order else slice(None)][0, 2] > positions[:, 2].mean()
        )
    elif upright < 0.65:
        assert found.superior_first is None


@many
@given(
    spacing_mm=spacings, fundus_mm=st.floats(0.005, 0.03), tilt=st.floats(-0.6, 0.6), order=st.permutations(range(9)),
    backwards=st.lists(st.booleans(), min_size=9, max_size=9), middle=st.tuples(st.floats(200, 500), st.floats(200, 500)),
)  # fmt: skip
def test_lines_on_the_fundus_image_tell_the_same_at_any_scale_and_tilt(
    spacing_mm, fundus_mm, tilt, order, backwards, middle
):
    along, across = np.array([np.sin(tilt), np.cos(tilt)]), np.array([np.cos(tilt), -np.sin(tilt)])  # (row, column)
    half = SHAPE[2] * spacing_mm[2] / fundus_mm / 2 * along
    frames = []
    for place in order:
        centre = np.array(middle) + place * spacing_mm[0] / fundus_mm * across
        ends = [centre - half, centre + half]
        # A first frame scanned backwards would tell the raster's direction the other way round; the others may be.
        frames.append(location(ends[::-1] if backwards[place] and place != order[0] else ends))
    found = read_geometry(dataset(frames, spacing_mm), SHAPE, "any", "here")
    assert found.spacing_mm == pytest.approx(spacing_mm, rel=1e-3)
    assert ("bscans_to_and_fro" in found.flags) is any(backwards[place] for place in order[1:])
    stored = np.array(order)[list(found.frame_order)] if found.frame_order else np.array(order)
    rising = bool((stored == np.arange(9)).all())
    assert rising or (stored == np.arange(9)[::-1]).all()
    if abs(np.cos(tilt)) > 0.75:
        assert found.superior_first is rising  # place 0 is the uppermost row


def location(ends) -> Dataset:
    coordinates = [float(np.float32(value)) for end in ends for value in end]
    return item(
        OphthalmicFrameLocationSequence=item(ReferenceCoordinates=coordinates, OphthalmicImageOrientation="LINEAR")
    )


def star(count: int, turn: float) -> list[list[np.ndarray]]:
    directions = [np.array([np.sin(a), np.cos(a)]) for a in turn + np.pi * np.arange(count) / count]
    return [[np.array([300.0, 300.0]) - 150 * d, np.array([300.0, 300.0]) + 150 * d] for d in directions]


def circle(radius: float) -> list[np.ndarray]:
    return [
        np.array([300 + radius * np.sin(a), 300 + radius * np.cos(a)]) for a in (0, np.pi / 2, np.pi, 3 * np.pi / 2, 0)
    ]


@many
@given(count=st.integers(2, 24), turn=angles, circles=st.integers(0, 3))
def test_stars_are_told_by_their_lines_with_circles_around_them_or_not(count, turn, circles):
    ends = [*star(count, turn), *(circle(60.0 + 20 * n) for n in range(min(circles, count - 1)))]
    frames = [location(line) for line in ends]
    shape = (len(frames), *SHAPE[1:])
    with pytest.raises(ReadError) as refused:
        read_geometry(dataset(frames, (0.1, 0.0039, 0.0115), thickness=0.1), shape, "any", "triton_raster")
    assert refused.value.code == "not_raster"
    asked = read_geometry(dataset(frames, (0.1, 0.0039, 0.0115), thickness=0.1), shape, "any", "here", LAYOUTS)
    assert asked.layout == "radial" and asked.frame_order is None and asked.superior_first is None
    assert asked.spacing_mm == pytest.approx((0.0115, 0.0039, 0.0115))


@many
@given(radius=st.floats(20, 200), count=st.integers(1, 8))
def test_circles_are_told_by_their_lines(radius, count):
    frames = [location(circle(radius + 5 * n)) for n in range(count)]
    with pytest.raises(ReadError) as refused:
        read_geometry(dataset(frames, (0.1, 0.0039, 0.0115), thickness=0.1), (count, *SHAPE[1:]), "any", "here")
    assert refused.value.code == "not_raster"
    asked = read_geometry(
        dataset(frames, (0.1, 0.0039, 0.0115), thickness=0.1), (count, *SHAPE[1:]), "any", "here", LAYOUTS
    )
    assert asked.layout == "circle"


@many
@given(count=st.integers(3, 24), turned=st.tuples(angles, angles, angles))
def test_stars_in_patient_space_are_told_too(count, turned):
    axes = rotation(*turned)
    rows = [np.cos(a) * axes[:, 0] + np.sin(a) * axes[:, 2] for a in np.pi * np.arange(count) / count]
    frames = planes([-3 * row for row in rows], [(row, axes[:, 1]) for row in rows])
    with pytest.raises(ReadError) as refused:
        read_geometry(dataset(frames, (0.1, 0.0039, 0.0115), thickness=0.1), (count, *SHAPE[1:]), "any", "here")
    assert refused.value.code == "not_raster"


@many
@given(jitter=st.lists(st.floats(-0.04, 0.04), min_size=9, max_size=9), spacing_mm=spacings)
def test_eye_tracking_jitter_does_not_change_the_order(jitter, spacing_mm):
    dz = max(spacing_mm[0], 0.1)
    axes = np.eye(3)
    positions = np.array([[0, 0, -(n + shift) * dz] for n, shift in enumerate(jitter)])
    found = read_geometry(dataset(planes(positions, [(axes[:, 0], axes[:, 1])] * 9), spacing_mm), SHAPE, "any", "here")
    assert found.frame_order is None and found.superior_first is True and "uneven_positions" not in found.flags
    assert found.spacing_mm[0] == pytest.approx(dz, rel=0.1)


@many
@given(
    times=st.integers(2, 4),
    places=st.integers(3, 9),
    moved=st.lists(st.floats(-0.001, 0.001), min_size=36, max_size=36),
)
def test_repeated_places_are_no_raster_even_where_the_eye_moved(times, places, moved):
    """Repeats for angiography: a micrometre apart, and the next place some sixty further on."""
    at = -0.06 * np.repeat(np.arange(places), times) + moved[: times * places]
    frames = planes(np.outer(at, (0, 0, 1)), [(np.eye(3)[0], np.eye(3)[1])] * len(at))
    shape = (len(at), *SHAPE[1:])
    with pytest.raises(ReadError) as refused:
        read_geometry(dataset(frames, (0.06, 0.0039, 0.0115), thickness=0.06), shape, "any", "here")
    assert refused.value.code == "not_raster"
    asked = read_geometry(dataset(frames, (0.06, 0.0039, 0.0115), thickness=0.06), shape, "any", "here", LAYOUTS)
    assert asked.layout == "repeated"


WHERE = ("patient", "patient_shared", "fundus", "fundus_shared")


@many
@given(
    count=st.integers(8, 21),
    place=st.tuples(*[st.floats(-40, 40)] * 3).filter(any),
    jitter_mm=st.sampled_from([0, 0.005, 0.02]),
    where=st.sampled_from(WHERE),
    thickness=st.sampled_from([None, 0.047, 0.25]),
    seed=st.integers(0, 99),
)
def test_a_line_scanned_again_and_again_is_never_a_raster(count, place, jitter_mm, where, thickness, seed):
    """Whether its one position stands in every frame or once for all, and whether or not the eye moved a little in
    between."""
    jitter = np.random.default_rng(seed).normal(0, jitter_mm, (count, 3)).clip(-0.03, 0.03)
    if where.startswith("patient"):
        frames = planes(np.add(place, jitter), [(np.eye(3)[0], np.eye(3)[1])] * count)
    else:  # 400 columns of 11.5 µm on 800 pixels of the fundus image
        at = np.abs(place[:2]) * 10 + jitter[:, :2] * 800 / 4.6
        frames = [location((start, np.add(start, (0, 800)))) for start in at]
    whole = dataset(frames, (0.1, 0.0039, 0.0115), thickness)
    if where.endswith("shared"):
        (measures,) = whole.SharedFunctionalGroupsSequence
        for element in frames[0]:
            measures[element.tag] = element
        whole.PerFrameFunctionalGroupsSequence = [Dataset() for _ in range(count)]
    with pytest.raises(ReadError) as refused:
        read_geometry(whole, (count, *SHAPE[1:]), "any", "here")
    assert refused.value.code == "not_raster"
    assert read_geometry(whole, (count, *SHAPE[1:]), "any", "here", LAYOUTS).layout == "repeated"


@pytest.mark.parametrize("extent_mm, layout", [(0.08, "repeated"), (0.12, "raster")])
def test_a_line_is_no_raster_because_the_eye_drifts_one_way(extent_mm, layout):
    """Below 2 % of the B-scans' 4.6 mm."""
    at = extent_mm * np.array([0, 2, 3, 5, 9, 11, 12, 17, 20]) / 20
    frames = planes(np.outer(-at, (0, 0, 1)), [(np.eye(3)[0], np.eye(3)[1])] * 9)
    assert read_geometry(dataset(frames, (0.1, 0.0039, 0.0115)), SHAPE, "any", "here", LAYOUTS).layout == layout


def test_the_distance_of_bscans_is_not_their_thickness():
    """Where both are stated and no positions are."""
    for own in ("SharedFunctionalGroupsSequence", "PerFrameFunctionalGroupsSequence"):
        whole = Dataset()
        measures = item(PixelSpacing=[0.0039, 0.0115], SliceThickness=0.01, SpacingBetweenSlices=0.12)
        setattr(whole, own, [item(PixelMeasuresSequence=measures)] * (1 if own.startswith("Shared") else 9))
        assert read_geometry(whole, SHAPE, "any", "here").spacing_mm == (0.12, 0.0039, 0.0115)


def test_what_a_header_declares_is_compared_with_positions_and_a_placeholder_of_neither_counts():
    """A thickness of 1 mm beside a true distance is nothing to refuse; a distance of 1 mm is."""
    frames = planes(-0.12 * np.outer(np.arange(9), (0, 0, 1)), [(np.eye(3)[0], np.eye(3)[1])] * 9)
    for thickness, flags in ((0.1, ("slice_thickness_contradicts_positions",)), (0.115, ()), (0.12, ())):
        found = read_geometry(dataset(frames, (0.12, 0.0039, 0.0115), thickness), SHAPE, "any", "here")
        assert found.spacing_mm[0] == pytest.approx(0.12) and found.flags == flags
    whole = dataset([], (0.12, 0.0039, 0.0115), thickness=1.0)
    measures = whole.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.SpacingBetweenSlices = 0.12
    assert read_geometry(whole, SHAPE, "any", "here").spacing_mm[0] == 0.12
    measures.SpacingBetweenSlices, measures.SliceThickness = 1.0, 0.12
    with pytest.raises(ReadError, match="exactly 1 mm is a placeholder"):
        read_geometry(whole, SHAPE, "any", "here")


@pytest.mark.parametrize(("count", "doubted"), [(150, True), (199, True), (201, False), (400, False)])
def test_a_thickness_like_the_distance_of_a_scans_is_doubted_where_the_field_would_be_flat(count, doubted):
    found = read_geometry(dataset([], (0.0115, 0.0039, 0.0115), 0.0115), (count, *SHAPE[1:]), "any", "here")
    assert found.flags == ("slice_thickness_equals_lateral_spacing",) * doubted


@pytest.mark.parametrize("vertical", [False, True])
@pytest.mark.parametrize("stretched", [0.7, 0.92, 1.08, 1.3])
def test_lines_on_a_fundus_image_whose_pixels_are_not_square_do_not_change_the_distance(vertical, stretched):
    """Patient space has the true distance of B-scans. Where the image shows another one, horizontal lines are not used,
    and vertical ones, without which superior would be taken for nasal, are moved to their true distance."""
    (dz, dy, dx), fundus_mm, count = (0.24, 0.0039, 0.0115), 0.01, 6
    pixels = np.array([SHAPE[2] * dx, 0]) / fundus_mm  # (along a B-scan, across)
    step = np.array([0, dz * stretched / fundus_mm])
    frames = planes(dz * np.outer(-np.arange(count), np.eye(3)[0 if vertical else 2]),
                    [(np.eye(3)[2 if vertical else 0], np.eye(3)[1])] * count)  # fmt: skip
    for n, frame in enumerate(frames):
        ends = np.array([(100, 200) + n * step, (100, 200) + pixels + n * step])
        frame.OphthalmicFrameLocationSequence = location(
            ends if vertical else ends[:, ::-1]
        ).OphthalmicFrameLocationSequence
    found = read_geometry(dataset(frames, (dz, dy, dx)), (count, *SHAPE[1:]), "any", "here")
    assert found.spacing_mm == pytest.approx((dz, dy, dx)) and found.frame_order is None
    assert found.superior_first is (None if vertical else True)
    far = abs(stretched - 1) > 0.1
    if far and not vertical:
        assert found.lines is None
        return
    assert found.lines is not None
    shown = dz * (1 if far else stretched)
    across, along = (0, 1) if vertical else (1, 0)  # (x to the right, y downwards)
    for ends in (found.lines.start, found.lines.end):
        np.testing.assert_allclose(np.diff(ends[:, across]), shown, rtol=1e-4)
        np.testing.assert_allclose(np.diff(ends[:, along]), 0, atol=1e-6)
    np.testing.assert_allclose((found.lines.end - found.lines.start)[:, along], SHAPE[2] * dx, rtol=1e-5)


@pytest.mark.parametrize("stretched", [0.7, 1, 1.3])
def test_lines_on_a_fundus_image_order_counted_positions_and_do_not_change_their_distance(stretched):
    frames = planes(np.outer(np.arange(9), (0, 0, 0.24)), [(np.eye(3)[0], np.eye(3)[1])] * 9)
    for place, frame in enumerate(frames):
        line = [(100 + 24 * stretched * place, 50), (100 + 24 * stretched * place, 510)]  # 4.6 mm, 0.01 mm a column
        frame.OphthalmicFrameLocationSequence = location(line).OphthalmicFrameLocationSequence
    found = read_geometry(dataset(frames, (0.24, 0.0039, 0.0115), thickness=0.24), SHAPE, "any", "here")
    assert (found.spacing_mm[0], found.superior_first, found.flags) == (pytest.approx(0.24), True, ())


@pytest.mark.parametrize(("tilt", "known"), [(0.6, True), (0.9, False), (1.4, False)])
def test_b_scans_that_run_up_more_than_sideways_have_no_superior_end(tilt, known):
    along, across = np.array([np.sin(tilt), np.cos(tilt)]), np.array([np.cos(tilt), -np.sin(tilt)])
    frames = [location([(300, 300) + 20 * n * across, (300, 300) + 20 * n * across + 400 * along]) for n in range(9)]
    found = read_geometry(dataset(frames, (0.23, 0.0039, 0.0115)), SHAPE, "any", "here")
    assert found.superior_first is (True if known else None)


def test_lines_in_patient_space_run_to_the_left_and_down_unless_the_beam_is_not_seen_from_the_front():
    """LPS: x is the patient's left, to the right on a fundus image, and z goes up; the A-scans go back, along y."""
    origin, (dz, dy, dx) = np.array([10.0, 5.0, 3.0]), (0.2, 0.0039, 0.0115)
    positions = origin - dz * np.outer(np.arange(9), (0, 0, 1))
    lines = read_geometry(dataset(planes(positions, [np.eye(3)[:2]] * 9), (dz, dy, dx)), SHAPE, "any", "here").lines
    assert lines is not None
    np.testing.assert_allclose(lines.start, [(10, dz * n - 3) for n in range(9)], atol=1e-6)
    np.testing.assert_allclose(lines.end, [(10 + 399 * dx, dz * n - 3) for n in range(9)], atol=1e-6)
    for degrees, known in ((0, True), (30, True), (60, False)):
        x, y, z = rotation(0, np.deg2rad(degrees), 0).T
        frames = planes(dz * np.outer(np.arange(9), x), [(-z, y)] * 9)
        found = read_geometry(dataset(frames, (dz, dy, dx)), SHAPE, "any", "here")
        assert (found.lines is not None) is known and found.superior_first is None


def test_lines_of_a_star_are_as_long_as_from_the_first_to_the_last_a_scan():
    data = dataset([location(ends) for ends in star(6, 0.2)], (0.1, 0.0039, 0.0115))
    lines = read_geometry(data, (6, *SHAPE[1:]), "any", "here", LAYOUTS).lines
    assert lines is not None
    np.testing.assert_allclose(np.linalg.norm(lines.end - lines.start, axis=1), 399 * 0.0115, rtol=1e-5)


def test_positions_counted_from_zero_do_not_say_which_end_is_superior():
    """OCT-Converter writes them, whatever the file that it converts says."""
    counted = planes(np.outer(np.arange(9), (0, 0, 0.05)), [(np.eye(3)[0], np.eye(3)[1])] * 9)
    found = read_geometry(dataset(counted, (0.1, 0.0039, 0.0115), thickness=0.05), SHAPE, "any", "here")
    assert (found.spacing_mm[0], found.superior_first, found.lines) == (0.05, None, None)
    assert found.flags == ("positions_placeholder",)
    with pytest.raises(ReadError, match=r"OCT-Converter writes for every \.e2e") as refused:
        read_geometry(dataset(counted, (0.1, 0.0039, 0.01), thickness=0.05), SHAPE, "any", "here")
    assert refused.value.code == "absurd_spacing"


def test_zero_slice_spacing_is_refused_and_zero_positions_flagged():
    zeros = planes(np.zeros((9, 3)), [(np.eye(3)[0], np.eye(3)[1])] * 9)
    whole = dataset(zeros, (0.1, 0.0039, 0.0115), thickness=0.05)
    found = read_geometry(whole, SHAPE, "any", "here")
    assert (found.spacing_mm[0], found.superior_first, found.flags) == (0.05, None, ("positions_placeholder",))
    whole.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].SpacingBetweenSlices = 0
    with pytest.raises(ReadError, match="SpacingBetweenSlices is 0"):
        read_geometry(whole, SHAPE, "any", "here")


@pytest.mark.parametrize("odd", [0.04, 0.4])
def test_one_wide_or_narrow_gap_is_flagged_and_changes_no_other_distance(odd):
    at = np.cumsum([0, 0.1, 0.1, 0.1, odd, 0.1, 0.1, 0.1, 0.1])
    frames = planes(-np.outer(at, (0, 0, 1)), [(np.eye(3)[0], np.eye(3)[1])] * 9)
    found = read_geometry(dataset(frames, (0.1, 0.0039, 0.0115)), SHAPE, "any", "here")
    assert found.spacing_mm[0] == pytest.approx(0.1) and found.flags == ("uneven_positions",)


@pytest.mark.parametrize("described", [8, 10])
def test_positions_of_more_or_fewer_frames_are_flagged(described):
    """As where a program kept some of the frames and the header of all."""
    places = 0.1 * np.eye(3)[2] * np.arange(described)[:, None]
    whole = dataset(planes(places, [(np.eye(3)[0], np.eye(3)[1])] * described), (0.1, 0.0039, 0.0115), thickness=0.05)
    found = read_geometry(whole, SHAPE, "any", "here")
    assert (found.spacing_mm[0], found.flags) == (0.05, ("positions_of_other_frames",))


def test_frames_of_several_spacings_are_refused():
    def frames(in_plane, distance=0.1):
        return [item(PixelMeasuresSequence=item(PixelSpacing=mm, SpacingBetweenSlices=distance)) for mm in in_plane]

    whole = Dataset()
    whole.PerFrameFunctionalGroupsSequence = frames([[0.0039, 0.0115], [0.0039, 0.01151], [0.0039, 0.0115]] * 3)
    found = read_geometry(whole, SHAPE, "any", "here")
    assert found.spacing_mm == (0.1, 0.0039, 0.0115), "rounding is no difference"
    whole.PerFrameFunctionalGroupsSequence = frames([[0.0039, 0.0115]] * 8 + [[0.0039, 0.0119]])
    with pytest.raises(
        ReadError, match=r"differs between frames, 0\.0039 to 0\.0039 x 0\.0115 to 0\.0119 mm"
    ) as refused:
        read_geometry(whole, SHAPE, "any", "here")
    assert refused.value.code == "mixed_spacing"
    whole.PerFrameFunctionalGroupsSequence = frames([[0.0039, 0.0115]] * 4) + frames([[0.0039, 0.0115]] * 5, 0.2)
    with pytest.raises(ReadError, match="state one distance between B-scans"):
        read_geometry(whole, SHAPE, "any", "here")


def test_a_distance_that_only_frames_state_goes_with_the_pixels_of_the_shared_group():
    whole = Dataset()
    whole.SharedFunctionalGroupsSequence = [item(PixelMeasuresSequence=item(PixelSpacing=[0.0039, 0.0115]))]
    whole.PerFrameFunctionalGroupsSequence = [item(PixelMeasuresSequence=item(SliceThickness=0.2))] * 9
    assert read_geometry(whole, SHAPE, "any", "here").spacing_mm == (0.2, 0.0039, 0.0115)


@pytest.mark.parametrize("distance", ["SpacingBetweenSlices", "SliceThickness"])
def test_pixels_that_only_frames_state_go_with_the_distance_of_the_shared_group(distance):
    whole = Dataset()
    whole.SharedFunctionalGroupsSequence = [item(PixelMeasuresSequence=item(**{distance: 0.2}))]
    whole.PerFrameFunctionalGroupsSequence = [item(PixelMeasuresSequence=item(PixelSpacing=[0.0039, 0.0115]))] * 9
    assert read_geometry(whole, SHAPE, "any", "here").spacing_mm == (0.2, 0.0039, 0.0115)
    whole.PerFrameFunctionalGroupsSequence = [*whole.PerFrameFunctionalGroupsSequence[:8], Dataset()]
    with pytest.raises(ReadError, match="no PixelSpacing"):  # of all frames
        read_geometry(whole, SHAPE, "any", "here")


def test_frames_are_ordered_by_their_lines_on_the_fundus_image_before_their_positions():
    """Converters number positions in the order of storage."""
    stored = [4, 0, 3, 1, 2, 8, 6, 5, 7]
    frames = planes(np.outer(-np.arange(9), (0, 0, 1)), [(np.eye(3)[0], np.eye(3)[1])] * 9)
    for frame, place in zip(frames, stored, strict=True):
        line = [(100 + 20 * place, 50), (100 + 20 * place, 450)]
        frame.OphthalmicFrameLocationSequence = location(line).OphthalmicFrameLocationSequence
    found = read_geometry(dataset(frames, (0.23, 0.0039, 0.0115)), SHAPE, "any", "here")
    assert found.frame_order is not None and [stored[n] for n in found.frame_order] == list(range(9))
    assert found.superior_first and found.spacing_mm[0] == pytest.approx(0.23)


def test_a_shared_group_that_frames_contradict_is_refused():
    frames = [item(PixelMeasuresSequence=item(PixelSpacing=[0.0039, 0.0115])) for _ in range(9)]
    whole = dataset(frames, (0.1, 0.0039, 0.0115), 0.1)
    assert read_geometry(whole, SHAPE, "any", "here").spacing_mm == (0.1, 0.0039, 0.0115)
    whole.PerFrameFunctionalGroupsSequence[4].PixelMeasuresSequence[0].PixelSpacing = [0.0039, 0.006]
    with pytest.raises(ReadError, match=r"differs between frames, .* x 0\.006 to 0\.0115 mm") as refused:
        read_geometry(whole, SHAPE, "any", "here")
    assert refused.value.code == "mixed_spacing"


@pytest.mark.parametrize("in_plane", [[0, 0], [0.0039, 0], [-0.0039, 0.0115]])
def test_pixels_without_size_are_absurd_and_not_unreadable(in_plane):
    whole = dataset([], (0.1, 0.0039, 0.0115), 0.1)
    whole.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing = in_plane
    with pytest.raises(ReadError, match="PixelSpacing is") as refused:
        read_geometry(whole, SHAPE, "any", "here")
    assert refused.value.code == "absurd_spacing"


# B-scans, rows, columns and [axial, lateral] mm of what instruments export: the published protocols of AI-READI, and
# others.
PROTOCOLS = {
    "spectralis": ((61, 496, 768), (0.00387, 0.0115)),
    "spectralis_hr": ((61, 496, 1536), (0.00387, 0.00575)),
    "spectralis_onh": ((27, 496, 768), (0.00387, 0.0115)),
    "spectralis_cropped": ((61, 200, 512), (0.00387, 0.0112)),
    "maestro2_macula": ((128, 885, 512), (0.0026, 0.0118)),
    "maestro2_wide": ((128, 885, 512), (0.0026, 0.0235)),
    "triton": ((256, 992, 512), (0.0026, 0.0137)),
    "triton_12": ((256, 992, 512), (0.0026, 0.0234)),
    "cirrus_512": ((128, 1024, 512), (0.00196, 0.0117)),
    "cirrus_200": ((200, 1024, 200), (0.00196, 0.03)),
    "angiography_3x3": ((320, 640, 320), (0.003, 0.0094)),
    "angiography_dense": ((500, 1024, 1024), (0.00196, 0.00293)),
}


@pytest.mark.parametrize("name", PROTOCOLS)
def test_swapped_spacing_is_found_for_every_protocol_and_true_accepted(name):
    (depth, height, width), (dy, dx) = PROTOCOLS[name]
    # Spectralis scales per eye, laterally.
    for scale in (0.9, 1.0, 1.1):
        check_bounds((0.05, dy, scale * dx), (depth, height, width), "here")
        assert looks_swapped((scale * dx, dy), (depth, height, width)) or name == "angiography_dense"


@many
@given(
    shape=st.tuples(st.integers(5, 200), st.integers(64, 1024), st.integers(64, 1024)),
    depth_mm=st.floats(1.6, 3.0),
    width_mm=st.floats(3.0, 12.0),
)
def test_no_resampled_scan_is_taken_for_a_swapped_one(shape, depth_mm, width_mm):
    dy, dx = depth_mm / shape[1], width_mm / shape[2]
    assume(dx >= 0.0057)  # the densest raster of an instrument; pixels may be as coarse as anybody likes
    assert not looks_swapped((dy, dx), shape)


@pytest.mark.parametrize(
    ("shape", "in_plane_mm"),
    [
        ((131, 496, 1024), (0.00387, 0.0028)),
        ((250, 512, 500), (0.0033, 0.002)),
        ((250, 400, 500), (0.0047, 0.0025)),
        ((5, 1024, 4096), (0.00196, 6 / 4096)),
        ((5, 1024, 1024), (0.00196, 6 / 1024)),
    ],
)
def test_dense_scans_are_not_taken_for_swapped(shape, in_plane_mm):
    """Of a small field, or of thousands of A-scans: the other way round these would be closer than any instrument's."""
    assert not looks_swapped(in_plane_mm, shape)


def test_a_dicom_whose_pixel_spacing_is_swapped_is_a_reject(tmp_path):
    voxels = np.random.default_rng(0).integers(0, 255, (5, 496, 768), dtype=np.uint8)
    path = write_oct_dicom(tmp_path / "a.dcm", voxels, (0.12, 0.0115, 0.0039), superior_first=True)
    for read in (read_header, read_volume):
        with pytest.raises(ReadError, match="look exchanged") as refused:
            read(path)
        assert refused.value.code == "swapped_spacing"


@pytest.mark.parametrize(("degrees", "raster"), [(3, True), (8, False)])
def test_a_fan_is_no_raster_and_torsion_of_the_eye_makes_none(degrees, raster):
    turned = np.deg2rad(np.linspace(0, degrees, 9))
    ends = [
        (np.array([n * 20.0, 0]), np.array([n * 20.0 + 400 * np.sin(a), 400 * np.cos(a)])) for n, a in enumerate(turned)
    ]
    data = dataset([location(pair) for pair in ends], (0.24, 0.0039, 0.0115), thickness=0.24)
    found = read_geometry(data, SHAPE, "any", "here", LAYOUTS)
    assert (found.layout == "raster") is raster


# Cirrus


def cirrus(tmp_path, frames: int, columns: int, thickness: float, **options):
    voxels = np.random.default_rng(0).integers(0, 255, (frames, 34, columns), dtype=np.uint8)
    maker = {"manufacturer": "Carl Zeiss Meditec", "model": "CIRRUS HD-OCT 5000", "protocol": "cube"}
    return write_oct_dicom(tmp_path / "a.dcm", voxels, (thickness, 0.00196, 6 / columns), **maker, **options)


def test_the_cirrus_cube_with_a_quarter_of_its_thickness_is_corrected(tmp_path):
    header = read_header(cirrus(tmp_path, 128, 512, 6 / 512))
    assert header.spacing_mm[0] == pytest.approx(6 / 128) and header.flags == ("slice_thickness_corrected",)
    assert read_volume(tmp_path / "a.dcm").extent_mm[0] == pytest.approx(6)


def test_cirrus_200_b_scans_and_a_true_thickness_are_left_alone(tmp_path):
    assert read_header(cirrus(tmp_path, 200, 200, 6 / 200)).flags == ()
    assert read_header(cirrus(tmp_path, 128, 512, 6 / 128)).spacing_mm[0] == pytest.approx(6 / 128)


def test_a_cirrus_raster_of_few_lines_without_distance_is_rejected(tmp_path):
    with pytest.raises(ReadError, match="repeats the lateral spacing") as refused:
        read_header(cirrus(tmp_path, 21, 1024, 6 / 1024))
    assert refused.value.code == "absurd_spacing"


# Scans that are no raster, when they are asked for


@pytest.mark.parametrize("layout", ["radial", "circle", "line"])
def test_what_is_no_raster_is_read_when_asked_for_and_only_then(tmp_path, layout):
    count = {"radial": 6, "circle": 3, "line": 1}[layout]
    ends = {"radial": star(6, 0.2), "circle": [circle(50.0 + n) for n in range(3)], "line": star(1, 0.0)}[layout]
    voxels = np.random.default_rng(1).integers(0, 255, (count, 40, 36), dtype=np.uint8)

    def lines(dataset):
        for frame, line in zip(dataset.PerFrameFunctionalGroupsSequence, ends, strict=True):
            frame.OphthalmicFrameLocationSequence = location(line).OphthalmicFrameLocationSequence

    path = write_oct_dicom(tmp_path / "a.dcm", voxels, (0.12, 0.0039, 0.0115), edit=lines)
    with pytest.raises(ReadError) as refused:
        read_volume(path)
    assert refused.value.code == "not_raster"
    volume = read_volume(path, raster_only=False)
    assert volume.layout == layout and volume.spacing_mm == pytest.approx((0.0115, 0.0039, 0.0115))
    np.testing.assert_array_equal(volume.voxels, voxels)


def test_a_running_number_is_no_position_in_millimetres(tmp_path):
    """Some converters write 0, 1, 2, ... where millimetres belong, and the true lines on the fundus image."""
    voxels, fundus_mm = np.random.default_rng(1).integers(0, 255, (9, 40, 100), dtype=np.uint8), 0.0115

    def places(dataset):
        for number, frame in enumerate(dataset.PerFrameFunctionalGroupsSequence):
            row = 50 + number * 0.24 / fundus_mm
            frame.PlanePositionSequence = [item(ImagePositionPatient=[0, 0, -number])]
            frame.OphthalmicFrameLocationSequence = location([(row, 20), (row, 120)]).OphthalmicFrameLocationSequence

    spacing_mm = (0.24, 0.0039, 0.0115)
    path = write_oct_dicom(tmp_path / "a.dcm", voxels, spacing_mm, spacing_in="per_frame", edit=places)
    header = read_header(path)
    assert header.spacing_mm == pytest.approx(spacing_mm, rel=1e-4) and header.superior_first
    assert read_volume(path).lines is not None


@pytest.mark.parametrize(
    ("count", "dx", "thickness", "expected"),
    [
        (19, 0.0115, 0.24, (0.24, ("positions_placeholder",))),
        (12, 0.0115, 0.24, (1.0, ("slice_thickness_contradicts_positions",))),  # 12 mm can be real
        (19, 0.05, None, (1.0, ())),  # so can a field as high as it is wide
    ],
)
def test_b_scans_exactly_1_mm_apart_are_believed_in_a_plausible_field_only(count, dx, thickness, expected):
    positions = np.zeros((count, 3))
    positions[:, 2] = -np.arange(count)
    whole = dataset(planes(positions, [(np.eye(3)[0], np.eye(3)[1])] * count), (1.0, 0.0039, dx), thickness)
    found = read_geometry(whole, (count, *SHAPE[1:]), "any", "here")
    assert (found.spacing_mm[0], found.flags) == expected


@pytest.mark.parametrize(("thickness", "code"), [(None, "missing_spacing"), (1.0, "absurd_spacing")])
def test_19_b_scans_1_mm_apart_with_no_other_distance_are_refused(thickness, code):
    positions = np.zeros((19, 3))
    positions[:, 2] = -np.arange(19)
    whole = dataset(planes(positions, [(np.eye(3)[0], np.eye(3)[1])] * 19), (1.0, 0.0039, 0.0115), thickness)
    with pytest.raises(ReadError) as refused:
        read_geometry(whole, (19, *SHAPE[1:]), "any", "here")
    assert refused.value.code == code
