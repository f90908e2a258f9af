"""One eye scanned by rasters that lie and are stored in every way: the ETDRS zones stay the same in every format that
states where its B-scans lie."""

from dataclasses import replace

import numpy as np
import pytest

from octfm.formats import read_header, read_volume
from octfm.volume.etdrs import CELL_MM, EtdrsGrid, field_of_volume, measure_grid
from octfm.volume.volume import Lines, Volume
from support.dicom_files import item, write_oct_dicom
from support.vendor_files import write_heyex_xml, write_vol

COUNT, WIDTH, EXTENT_MM, FUNDUS_MM = 65, 200, 8.4, 0.0115
SPACING_MM = (EXTENT_MM / (COUNT - 1), 0.0039, EXTENT_MM / (WIDTH - 1))
MIDDLE, FOVEA = np.array([4.6, 4.4]), np.array([4.75, 4.2])


def thickness_um(x, y):
    """A retina with a pit at FOVEA, thicker to the right and below."""
    x, y = x - FOVEA[0], y - FOVEA[1]
    return 330 - 80 * np.exp(-(x**2 + y**2) / 0.7) + 12 * np.tanh(x) + 7 * np.tanh(y)


def raster(degrees: float, backwards: bool = False) -> Lines:
    """At 0 degrees B-scans run to the right and the first is superior; `backwards`: the last comes first."""
    angle = np.deg2rad(degrees)
    along = np.array([np.cos(angle), np.sin(angle)]) * EXTENT_MM / 2
    across = np.array([-np.sin(angle), np.cos(angle)])
    middle = MIDDLE + np.linspace(-1, 1, COUNT)[:: -1 if backwards else 1, None] * across * EXTENT_MM / 2
    return Lines(middle - along, middle + along)


def thickness_of(lines: Lines) -> np.ndarray:
    share = np.linspace(0, 1, WIDTH)[:, None]
    points = lines.start[:, None] + (lines.end - lines.start)[:, None] * share
    return thickness_um(points[..., 0], points[..., 1])


def gray() -> np.ndarray:
    """Each B-scan has a gray value of its own."""
    return np.broadcast_to((1 + np.arange(COUNT, dtype=np.uint8))[:, None, None], (COUNT, 16, WIDTH)).copy()


def as_vol(folder, lines: Lines):
    return write_vol(folder / "a.vol", gray(), SPACING_MM, ends=np.hstack([lines.start, lines.end]))


def as_xml(folder, lines: Lines):
    return write_heyex_xml(folder / "a", gray(), SPACING_MM, ends=np.hstack([lines.start, lines.end]))


def on_fundus(folder, lines: Lines):
    def positions(dataset):
        for frame, (x0, y0), (x1, y1) in zip(
            dataset.PerFrameFunctionalGroupsSequence, lines.start, lines.end, strict=True
        ):
            ends = [float(mm / FUNDUS_MM) for mm in (y0, x0, y1, x1)]
            frame.OphthalmicFrameLocationSequence = [
                item(ReferenceCoordinates=ends, OphthalmicImageOrientation="LINEAR")
            ]

    return write_oct_dicom(folder / "a.dcm", gray(), SPACING_MM, edit=positions)


def in_patient(folder, lines: Lines):
    def positions(dataset):
        frames = dataset.PerFrameFunctionalGroupsSequence
        for frame, start, end in zip(frames, lines.start, lines.end, strict=True):
            right, down = (end - start) / EXTENT_MM
            place, axes = (start[0], 7, -start[1]), (right, 0, -down, 0, 1, 0)
            frame.PlanePositionSequence = [item(ImagePositionPatient=[f"{v:.9g}" for v in place])]
            frame.PlaneOrientationSequence = [item(ImageOrientationPatient=[f"{v:.9g}" for v in axes])]

    return write_oct_dicom(folder / "a.dcm", gray(), SPACING_MM, edit=positions)


def grid_of(volume: Volume, lines: Lines) -> EtdrsGrid:
    """`lines`: where the B-scans of the file lie; the volume may hold them in another order."""
    order = volume.voxels[:, 0, 0].astype(int) - 1
    return measure_grid(thickness_of(lines)[order], field_of_volume(volume), volume.laterality)


WRITERS = [as_vol, as_xml, on_fundus, in_patient]
WAYS = {
    "horizontal": raster(0),
    "bottom-up": raster(0, backwards=True),
    "vertical": raster(90),
    "vertical, upwards, to the right": raster(-90),
    "rotated": raster(-31, backwards=True),
    "from right to left": raster(180),
    "jumbled": raster(12)[np.random.default_rng(3).permutation(COUNT)],
}


@pytest.mark.parametrize(
    "write", [as_vol, in_patient, *(pytest.param(write, marks=pytest.mark.slow) for write in (as_xml, on_fundus))]
)
def test_zones_do_not_depend_on_how_a_file_was_scanned(tmp_path, write):
    flat = Volume(gray(), SPACING_MM, "R", superior_first=True)
    expected = grid_of(flat, WAYS["horizontal"])
    assert expected.centre == "pit" and None not in expected.mean_um.values()
    for way, lines in WAYS.items():
        volume = read_volume(write(tmp_path / way, lines))
        for turned in (volume, volume.superior_to_inferior()):
            found = grid_of(turned, lines)
            assert found.mean_um == pytest.approx(expected.mean_um, abs=1.0), way
            assert found.volume_mm3 == pytest.approx(expected.volume_mm3, rel=2e-3), way


@pytest.mark.parametrize("write", WRITERS)
def test_lines_lie_in_the_order_of_the_voxels(tmp_path, write):
    lines = WAYS["jumbled"]
    volume = read_volume(write(tmp_path, lines))
    assert len(volume.lines.start) == COUNT
    order = volume.voxels[:, 0, 0].astype(int) - 1
    np.testing.assert_allclose(volume.lines.start - volume.lines.start[0], (lines[order]).start - lines[order].start[0], atol=0.06)  # fmt: skip
    back = replace(volume, superior_first=False).superior_to_inferior()
    np.testing.assert_array_equal(back.lines.end, volume.lines.end[::-1])


def test_a_mirrored_volume_has_the_zones_of_the_other_eye(tmp_path):
    lines = WAYS["rotated"]
    volume = read_volume(as_vol(tmp_path, lines))
    order = volume.voxels[:, 0, 0].astype(int) - 1
    thickness = thickness_of(lines)[order]
    expected = grid_of(volume, lines)
    mirrored = measure_grid(thickness[:, ::-1], field_of_volume(volume.mirrored()), "L")
    # The pit is looked for on a grid of 25 µm, which lies differently in the mirror image.
    assert mirrored.centre_mm == pytest.approx((-expected.centre_mm[0], expected.centre_mm[1]), abs=CELL_MM)
    assert mirrored.mean_um == pytest.approx(expected.mean_um, abs=0.5)


def test_unevenly_spaced_bscans_are_measured_where_they_lie(tmp_path):
    lines, place = raster(0), np.linspace(-1, 1, COUNT)
    moved = np.sign(place) * np.abs(place) ** 1.2 * EXTENT_MM / 2 + MIDDLE[1]
    lines = Lines(np.stack([lines.start[:, 0], moved], 1), np.stack([lines.end[:, 0], moved], 1))
    expected = grid_of(Volume(gray(), SPACING_MM, "R", superior_first=True), WAYS["horizontal"])
    assert grid_of(read_volume(as_vol(tmp_path, lines)), lines).mean_um == pytest.approx(expected.mean_um, abs=1.0)


def test_positions_that_are_not_millimetres_on_the_fundus_are_left_out(tmp_path):
    lines = raster(0)
    ends = np.hstack([lines.start, lines.end])
    still = np.repeat(ends[:1], COUNT, axis=0)
    still[:, 2:] = still[:, :2]
    assert read_volume(write_vol(tmp_path / "b.vol", gray(), SPACING_MM, ends=still)).lines is None, "placeholders"


def test_dicom_positions_that_contradict_the_distance_are_left_out(tmp_path):
    """A fundus image whose pixels are not square shows positions in another scale than patient space does."""
    squeezed = raster(0)
    path = in_patient(tmp_path, squeezed)
    assert read_volume(path).lines is not None

    def on_narrow_image(dataset):
        frames = dataset.PerFrameFunctionalGroupsSequence
        for number, frame in enumerate(frames):
            ends = [2.0 * number, 10.0, 2.0 * number, 700.0]
            frame.OphthalmicFrameLocationSequence = [
                item(ReferenceCoordinates=ends, OphthalmicImageOrientation="LINEAR")
            ]

    path = write_oct_dicom(tmp_path / "b.dcm", gray(), SPACING_MM, superior_first=True, edit=on_narrow_image)
    volume = read_volume(path)
    assert volume.spacing_mm[0] == pytest.approx(SPACING_MM[0], rel=1e-4) and volume.lines is None


@pytest.mark.parametrize("way", ["vertical", "vertical, upwards, to the right"])
def test_vertical_bscans_on_a_fundus_image_of_another_scale_are_not_measured_as_horizontal(tmp_path, way):
    lines = WAYS[way]

    def positions(dataset):
        frames = dataset.PerFrameFunctionalGroupsSequence
        for frame, (x0, y0), (x1, y1) in zip(frames, lines.start, lines.end, strict=True):
            frame.PlanePositionSequence = [item(ImagePositionPatient=[f"{v:.9g}" for v in (x0, 7, -y0)])]
            ends = [float(mm / FUNDUS_MM) for mm in (y0, 1.4 * x0, y1, 1.4 * x1)]
            frame.OphthalmicFrameLocationSequence = [
                item(ReferenceCoordinates=ends, OphthalmicImageOrientation="LINEAR")
            ]

    volume = read_volume(write_oct_dicom(tmp_path / "a.dcm", gray(), SPACING_MM, edit=positions))
    assert volume.vertical and volume.spacing_mm[0] == pytest.approx(SPACING_MM[0], rel=1e-4)
    expected = grid_of(Volume(gray(), SPACING_MM, "R", superior_first=True), WAYS["horizontal"])
    assert grid_of(volume, lines).mean_um == pytest.approx(expected.mean_um, abs=1.0)


def test_positions_of_another_number_of_bscans_are_refused(tmp_path):
    volume = read_volume(as_vol(tmp_path, raster(0)))
    with pytest.raises(ValueError, match="33 B-scans, but positions of 65"):
        field_of_volume(replace(volume, voxels=volume.voxels[::2]))


def test_only_a_raster_has_a_field():
    with pytest.raises(ValueError, match="a radial scan; an ETDRS grid needs a raster"):
        field_of_volume(Volume(gray(), SPACING_MM, layout="radial"))


def test_bscans_of_alternating_direction_are_refused(tmp_path):
    lines = raster(0)
    odd = (np.arange(COUNT) % 2 == 1)[:, None]
    both = Lines(np.where(odd, lines.end, lines.start), np.where(odd, lines.start, lines.end))
    with pytest.raises(ValueError, match="must run in one direction"):
        field_of_volume(read_volume(as_vol(tmp_path, both)))


@pytest.mark.parametrize("turned", [[], [3], range(COUNT)])
def test_bscans_that_run_to_and_fro_are_flagged(tmp_path, turned):
    whole = raster(0)
    turn = np.isin(np.arange(COUNT), list(turned))[:, None]
    lines = Lines(np.where(turn, whole.end, whole.start), np.where(turn, whole.start, whole.end))
    assert ("bscans_to_and_fro" in read_header(as_vol(tmp_path, lines)).flags) is (list(turned) == [3])
