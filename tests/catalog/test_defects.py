"""Every way in which an archive is wrong ends with the reason that it was planted for: no good file is lost, no bad
one gets in."""

import csv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from pydicom import uid

from octfm.catalog.catalog import Catalog
from octfm.catalog.scan import scan
from octfm.formats.reasons import REASONS
from octfm.phantom import write_phantom
from octfm.phantom.defects import DEFECTS
from octfm.store.prepare import prepare
from octfm.volume.preprocessing import Preprocessing
from support.dicom_files import write_oct_dicom

SIZE = (8, 64, 48)
SPACING_MM = (0.12, 0.0039, 0.0115)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def assert_classified_without_a_mistake(root: Path, catalog: Catalog) -> None:
    """Each file of the cohort against its ground truth: outcome, code, and for good files that nothing is doubtful."""
    planted = {str(root / row["filepath"].lstrip("/")): row for row in table(root / "ground_truth" / "defects.tsv")}
    good = {str(root / row["filepath"].lstrip("/")): row for row in table(root / "ground_truth" / "labels.tsv")}
    expected = {uri: (row["outcome"], row["code"]) for uri, row in planted.items()} | dict.fromkeys(
        good, ("accepted", "")
    )
    for uri, row in planted.items():
        if row["kind"] == "reused_sop_uid":
            expected[uri.replace("0_copy_", "")] = (
                "flagged",
                "reused_sop_uid",
            )  # the good file, which the manifest lists, stays
    found = {a.uri: ("flagged", " ".join(a.flags)) if a.flags else ("accepted", "") for a in catalog.acquisitions}
    found |= {r.uri: ("rejected", r.code) for r in catalog.rejects} | {
        s.uri: ("skipped", s.code) for s in catalog.skipped
    }
    assert found == expected
    for a in catalog.acquisitions:
        if a.uri in good:
            truth = good[a.uri]
            assert (a.participant, a.laterality, a.scanner) == (
                truth["participant_id"],
                truth["laterality"],
                truth["scanner"],
            )
        else:
            assert a.laterality is None, "which of two stated eyes it is would be a guess"


def test_every_kind_is_planted_and_has_a_known_reason():
    assert len(DEFECTS) == len({defect.kind for defect in DEFECTS}) >= 12
    for defect in DEFECTS:
        assert defect.outcome == "flagged" or REASONS[defect.code].expected == (defect.outcome == "skipped")


def test_a_cohort_full_of_defects_is_classified_without_a_mistake(tmp_path):
    root = write_phantom(tmp_path / "cohort", 13, 3, size=SIZE, defects=1.0, workers=1)
    kinds = {row["kind"] for row in table(root / "ground_truth" / "defects.tsv")}
    assert kinds == {defect.kind for defect in DEFECTS}
    assert_classified_without_a_mistake(root, scan(root))


@pytest.mark.slow
def test_a_thousand_files_with_12_percent_defects_are_all_classified(tmp_path):
    root = write_phantom(tmp_path / "cohort", 360, 3, size=SIZE, defects=0.12)
    catalog = scan(root)
    assert len(catalog.acquisitions) + len(catalog.rejects) + len(catalog.skipped) >= 1000
    assert_classified_without_a_mistake(root, catalog)


def test_defects_do_not_change_the_good_files(tmp_path):
    clean, spoilt = (
        write_phantom(tmp_path / name, 3, 3, size=SIZE, defects=share, workers=1)
        for name, share in (("a", 0.0), ("b", 1.0))
    )
    files = [path.relative_to(clean) for path in clean.rglob("*.dcm")]
    assert files and all((clean / path).read_bytes() == (spoilt / path).read_bytes() for path in files)
    manifest = [row["filepath"] for row in table(clean / "retinal_oct" / "manifest.tsv")]
    assert {str(path) for path in files} == {path.lstrip("/") for path in manifest}


def volume(seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 255, (4, 32, 36), dtype=np.uint8)


def test_without_a_manifest_the_first_of_either_duplicate_is_kept(tmp_path):
    def write(name, seed, **other):
        return str(write_oct_dicom(tmp_path / name, volume(seed), SPACING_MM, sop_instance_uid="1.2.3", **other))

    first, transcoded = write("b.dcm", 0), write("c.dcm", 0, transfer_syntax="1.2.840.10008.1.2.5")
    copy, other = write("a/copy.dcm", 0), write("d.dcm", 1)
    catalog = scan(tmp_path)
    (kept,) = catalog.acquisitions
    assert kept.uri == copy and "reused_sop_uid" in kept.flags
    assert {r.uri: r.code for r in catalog.rejects} == {
        first: "duplicate_sop_uid",
        transcoded: "duplicate_sop_uid",
        other: "reused_sop_uid",
    }
    assert all(copy in r.sentence for r in catalog.rejects), "the sentence names the file that was kept"
    Path(other).unlink()
    assert "reused_sop_uid" not in scan(tmp_path).acquisitions[0].flags


def test_other_sop_classes_beside_oct_are_counted_but_are_no_error(tmp_path):
    write_oct_dicom(tmp_path / "good.dcm", volume(), SPACING_MM)
    others = {
        uid.OphthalmicOpticalCoherenceTomographyBscanVolumeAnalysisStorage: "angiography",
        uid.OphthalmicOpticalCoherenceTomographyEnFaceImageStorage: "en_face",
        uid.OphthalmicPhotography8BitImageStorage: "photograph",
        uid.OphthalmicPhotography16BitImageStorage: "photograph",
        uid.WideFieldOphthalmicPhotographyStereographicProjectionImageStorage: "photograph",
        uid.WideFieldOphthalmicPhotography3DCoordinatesImageStorage: "photograph",
        "1.2.840.10008.5.1.4.1.1.66.8": "layer_heights",
        uid.EncapsulatedPDFStorage: "not_oct",
        uid.RawDataStorage: "not_oct",
    }
    for sop_class in others:
        write_oct_dicom(tmp_path / sop_class, volume(), SPACING_MM, sop_class=sop_class, protocol="macular cube")
    catalog = scan(tmp_path)
    assert catalog.rejects == () and {Path(s.uri).name: s.code for s in catalog.skipped} == others
    assert catalog.summary()["rejects"] == {} and catalog.reject_share == 0
    assert catalog.summary()["skips"] == {
        "photograph": 4,
        "not_oct": 2,
        "angiography": 1,
        "en_face": 1,
        "layer_heights": 1,
    }
    assert Catalog.load(catalog.save(tmp_path / "out")) == catalog


def test_an_eye_of_contradicted_laterality_is_never_mirrored(tmp_path):
    root = write_phantom(tmp_path / "cohort", 13, 3, size=SIZE, defects=1.0, workers=1)
    catalog = scan(root)
    doubtful = tuple(a for a in catalog.acquisitions if "laterality_conflict" in a.flags)
    assert doubtful and all(a.eye_id.endswith("_unknown") for a in doubtful)
    small = Preprocessing(image_size=(8, 64, 48), target_spacing=(0.9, 0.03, 0.15))
    store = prepare(replace(catalog, acquisitions=doubtful), tmp_path / "prepared", small, workers=1, progress=False)
    assert len(store) == len(doubtful)
    assert all(row.laterality is None and not row.transform["mirrored"] for row in store.rows)
