"""Real volumes, wrapped as DICOM, go scan, prepare, embed; their pictures are right side up. Skipped where the data
is absent."""

import json

import numpy as np
import pytest

import octfm
from octfm.encoder.embed import embed_store
from octfm.encoder.encoder import load_encoder
from octfm.volume.appearance import holds_two
from support.dicom_files import write_oct_dicom
from support.small_store import small_store
from support.tiny_runs import config, quick_pretrain, quiet

NOMINAL_MM = (0.12, 0.00387, 0.0115)
"""Declared for the macular hole, whose spacing is unknown; any result in mm depends on it."""


@pytest.fixture(scope="module")
def clinic(real_data, tmp_path_factory):
    """The two real volumes as DICOM in a temporary folder."""
    root = tmp_path_factory.mktemp("clinic")
    amd = json.loads((real_data / "medvisbonn_amd_spectralis_145.json").read_text())
    volumes = {
        "amd": (np.load(real_data / "medvisbonn_amd_spectralis_145.npz")["volume"], tuple(amd["spacing_mm_zyx"])),
        "hole": (np.load(real_data / "macular_hole_49.npz")["volume"], NOMINAL_MM),
    }
    for name, (voxels, spacing) in volumes.items():
        write_oct_dicom(root / f"{name}.dcm", np.ascontiguousarray(voxels), spacing, laterality="R", participant=name)
    return root, volumes


@pytest.mark.slow
def test_no_real_bscan_is_taken_for_two_pictures(clinic, real_data):
    _, volumes = clinic
    padded = np.load(real_data / "chiu2015_dme_subjects1to5.npz")["bscans"]  # white above and below
    assert not any(map(holds_two, padded[::5]))
    gap = np.full((padded.shape[1], 8), 255, np.uint8)
    assert holds_two(np.hstack([padded[4], padded[16]])) and holds_two(np.hstack([padded[4], gap, padded[16]]))
    assert not any(holds_two(bscan) for voxels, _ in volumes.values() for bscan in voxels[::8])
    assert holds_two(np.hstack([volumes["amd"][0][70], volumes["amd"][0][71]]))


@pytest.mark.slow
def test_real_volumes_go_from_scan_to_embedding(clinic, tmp_path):
    root, volumes = clinic
    run = quick_pretrain(config(steps=2), small_store(tmp_path / "synthetic"), tmp_path / "run", echo=quiet)
    encoder = load_encoder(run)

    catalog = octfm.scan(root)
    assert len(catalog.acquisitions) == 2 and not catalog.rejects
    for row in catalog.acquisitions:
        np.testing.assert_allclose(row.spacing_mm, volumes[row.participant][1], rtol=1e-3)
    store = octfm.prepare(catalog, tmp_path / "prepared", encoder.preprocessing, workers=1, progress=False)
    assert len(store) == 2 and not store.unprepared()

    import pyarrow.parquet as pq

    table = pq.read_table(embed_store(encoder, store, tmp_path / "embeddings", echo=quiet))
    vectors = np.array(table["vector"].to_pylist())
    assert vectors.shape == (2, 48) and np.isfinite(vectors).all() and not np.allclose(vectors[0], vectors[1])
    for row, vector in zip(catalog.acquisitions, vectors, strict=True):
        np.testing.assert_allclose(encoder.embed(octfm.read_volume(row.uri)), vector, rtol=1e-4, atol=1e-5)
