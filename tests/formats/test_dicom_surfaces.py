"""Layer height maps become surfaces of their volume and of no other one; a scan skips them and says whose they are."""

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from pydicom import dcmread, uid
from pydicom.dataset import Dataset

from octfm.catalog.catalog import Catalog
from octfm.catalog.participants.pseudonyms import pseudonymise
from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_surfaces, read_volume
from octfm.formats.dicom.surfaces import HEIGHT_MAP, read_height_map, surfaces_of_volume
from octfm.phantom import phantom_volume
from support.dicom_files import item, save, write_oct_dicom

SPACING_MM = (0.12, 0.0039, 0.0115)
NAMES = ("ILM", "BM")


def write_height_map(
    path: Path, heights: np.ndarray, volume_uid: str, *, refer="series", edit=None, syntax=uid.ExplicitVRLittleEndian
) -> Path:
    """`heights` [S, D, W] in rows; refer: where the reference to the volume stands."""
    dataset = Dataset()
    dataset.SOPClassUID, dataset.SOPInstanceUID, dataset.Modality = HEIGHT_MAP, uid.generate_uid(), "SEG"
    dataset.PatientName, dataset.PatientID = "Planted^Secret", "1001"
    dataset.NumberOfFrames, dataset.Rows, dataset.Columns = heights.shape
    dataset.SamplesPerPixel, dataset.PhotometricInterpretation, dataset.BitsAllocated = 1, "MONOCHROME2", 32
    dataset.SegmentSequence = [item(SegmentNumber=n + 1, SegmentLabel=name) for n, name in enumerate(NAMES)]
    instance = item(ReferencedSOPClassUID=uid.OphthalmicTomographyImageStorage, ReferencedSOPInstanceUID=volume_uid)
    if refer == "series":
        dataset.ReferencedSeriesSequence = [item(SeriesInstanceUID="1.2.3", ReferencedInstanceSequence=instance)]
    elif refer == "image":
        dataset.ReferencedImageSequence = [instance]
    elif refer == "derivation":
        dataset.SharedFunctionalGroupsSequence = [item(DerivationImageSequence=item(SourceImageSequence=instance))]
    dataset.FloatPixelData = heights.astype(">f4" if syntax == uid.ExplicitVRBigEndian else "<f4").tobytes()
    if edit:
        edit(dataset)
    return save(dataset, path, syntax)


@pytest.fixture
def eye(tmp_path):
    """A phantom as DICOM, stored inferior first and shuffled, with its true surfaces as a height map of the stored
    frames."""
    volume, truth = phantom_volume(5, size=(9, 96, 64), scanner="zeiss_cirrus")
    volume = volume.superior_to_inferior()
    true = np.stack([truth.surface("ilm"), truth.surface("bm")])[:, ::-1]  # superior first, as the volume now is
    stored = [4, 0, 7, 1, 8, 2, 6, 3, 5]

    def shuffle(dataset):
        groups = dataset.PerFrameFunctionalGroupsSequence
        dataset.PerFrameFunctionalGroupsSequence = [groups[i] for i in stored]

    path = write_oct_dicom(
        tmp_path / "clinic" / "a.dcm",
        volume.voxels[stored],
        volume.spacing_mm,
        superior_first=True,
        edit=shuffle,
        sop_instance_uid="1.2.3.4",
    )
    return path, true, stored


@pytest.mark.parametrize("refer", ["series", "image", "derivation"])
@pytest.mark.parametrize(
    "syntax", [uid.ExplicitVRLittleEndian, uid.ImplicitVRLittleEndian, uid.ExplicitVRBigEndian], ids=str
)
def test_surfaces_lie_where_they_were_in_every_b_scan(eye, refer, syntax):
    path, true, stored = eye
    written = write_height_map(path.with_name("h.dcm"), true[:, stored], "1.2.3.4", refer=refer, syntax=syntax)
    found, uids = read_height_map(written)
    assert uids == ("1.2.3.4",) and found.names == NAMES
    surfaces = surfaces_of_volume(path, written)
    volume = read_volume(path)
    order = slice(None, None, 1 if volume.superior_first else -1)
    np.testing.assert_allclose(surfaces.heights_px[:, order], np.where(true < 0, np.nan, true), rtol=1e-6)
    np.testing.assert_allclose(surfaces.heights_mm, surfaces.heights_px * volume.spacing_mm[1])
    # Vitreous above the ILM is darker than the retina below it, in every B-scan: rows are B-scans and values are
    # depths.
    rows = np.arange(volume.shape[1])[None, :, None]
    ilm = surfaces.heights_px[0][:, None, :]
    above, below = ((rows > ilm - 12) & (rows < ilm - 2)), ((rows > ilm + 2) & (rows < ilm + 12))
    for b_scan, over, under in zip(volume.voxels, above, below, strict=True):
        assert b_scan[over].mean() < b_scan[under].mean()


def test_padding_and_impossible_heights_are_no_surface(eye):
    path, true, stored = eye
    heights = true[:, stored].copy()
    heights[0, 0, :4] = (-1, np.nan, np.inf, 999)
    written = write_height_map(
        path.with_name("h"), heights, "1.2.3.4", edit=lambda ds: setattr(ds, "FloatPixelPaddingValue", 999.0)
    )
    found = read_height_map(written)[0].heights_px
    assert np.isnan(found[0, 0, :4]).all() and np.isfinite(found[0, 0, 4:]).all()


def test_row_height_comes_from_the_real_world_mapping_if_present(eye):
    path, true, _ = eye

    def mapping(dataset):
        unit = item(CodeValue="um", CodingSchemeDesignator="UCUM", CodeMeaning="um")
        world = item(RealWorldValueSlope=1.96, RealWorldValueIntercept=0.0, MeasurementUnitsCodeSequence=unit)
        dataset.SharedFunctionalGroupsSequence = [item(RealWorldValueMappingSequence=world)]

    found = read_surfaces(write_height_map(path.with_name("h"), true, "1.2.3.4", edit=mapping))
    assert found is not None and found.axial_mm == pytest.approx(0.00196)
    plain = read_surfaces(write_height_map(path.with_name("g"), true, "1.2.3.4"))
    assert plain is not None and plain.axial_mm is None
    assert read_surfaces(path) is None


def test_surfaces_of_another_volume_or_size_are_refused(eye):
    path, true, _ = eye
    for heights, of in ((true, "1.2.3.5"), (true[:, :-1], "1.2.3.4"), (true[:, :, 1:], "1.2.3.4")):
        with pytest.raises(ReadError) as refused:
            surfaces_of_volume(path, write_height_map(path.with_name("h"), heights, of))
        assert refused.value.code == "other_volume"


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda ds: setattr(ds, "FloatPixelData", ds.FloatPixelData[:-8]), "truncated_pixel_data"),
        (lambda ds: setattr(ds, "FloatPixelData", ds.FloatPixelData + bytes(8)), "frame_count_mismatch"),
        (lambda ds: delattr(ds, "FloatPixelData"), "missing_pixel_data"),
        (lambda ds: setattr(ds, "Rows", 0), "absurd_size"),
        (lambda ds: setattr(ds, "SOPClassUID", uid.SegmentationStorage), "not_layer_heights"),
    ],
)
def test_a_bad_height_map_has_a_code(eye, edit, code):
    path, true, _ = eye
    with pytest.raises(ReadError) as refused:
        read_height_map(write_height_map(path.with_name("h"), true, "1.2.3.4", edit=edit))
    assert refused.value.code == code


def test_a_cut_height_map_has_a_code(eye):
    path, true, _ = eye
    written = write_height_map(path.with_name("h"), true, "1.2.3.4")
    for keep in (0, 200, 600, -50):
        cut = written.with_name("cut")
        cut.write_bytes(written.read_bytes()[: keep or 0])
        with pytest.raises(ReadError):
            read_height_map(cut)


def test_a_scan_skips_height_maps_and_links_them_to_their_volume(eye, tmp_path):
    path, true, stored = eye
    written = write_height_map(path.with_name("h.dcm"), true[:, stored], "1.2.3.4")
    catalog = scan(path.parent, workers=0)
    (row,) = catalog.acquisitions
    assert not catalog.rejects and catalog.summary()["skips"] == {"layer_heights": 1}
    assert catalog.layer_heights(row) == (str(written),)
    loaded = Catalog.load(catalog.save(tmp_path / "catalog"))
    assert loaded.layer_heights(loaded.acquisitions[0]) == (str(written),)
    assert dcmread(written).SOPInstanceUID not in catalog.skipped[0].sentence

    hidden = pseudonymise(catalog, b"k" * 32)
    assert len(hidden.layer_heights(hidden.acquisitions[0])) == 1
    assert "1.2.3.4" not in str(asdict(hidden))
