"""Every verb that reads a stranger's file does so within a scan's limits: it is refused in one line, and takes
neither memory nor time."""

import functools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from octfm.catalog.catalog import Catalog
from octfm.catalog.participants import pseudonyms
from octfm.catalog.scan import scan
from octfm.formats import ReadError, read_surfaces, read_volume, within
from octfm.formats.arrays.npy import named_arrays
from octfm.formats.reasons import REASONS
from octfm.io.isolation import Limits
from support.bombs import BOMBS, nifti_of_zeros
from support.command_line import invoke
from support.dicom_files import write_oct_dicom
from support.fuzz_files import deflated_bomb
from support.waiting import planted_delay

TIGHT = Limits(seconds=60, memory=3 * 10**8)
SPACING_MM = (0.12, 0.0039, 0.0115)


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> Path:
    """One of each bomb, and a volume."""
    folder = tmp_path_factory.mktemp("planted")
    for name, write in BOMBS.items():
        write(folder / name)
    voxels = np.random.default_rng(0).integers(0, 255, (8, 64, 48), dtype=np.uint8)
    write_oct_dicom(folder / "good.dcm", voxels, SPACING_MM)
    return folder


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory) -> Path:
    """An empty folder, the same for all files: a child serves those of one current folder."""
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture
def bytes_before() -> int:
    """Resident memory of this process, whose peak (VmHWM) is counted anew from here on."""
    size = _resident()
    Path("/proc/self/clear_refs").write_text("5")
    return size


def _resident(name: str = "VmRSS") -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


@pytest.fixture(scope="module")
def refused(planted) -> Callable[[str], ReadError]:
    """How reading a bomb ends; each is read once."""

    @functools.cache
    def refused(name: str) -> ReadError:
        with pytest.raises(ReadError, match=name) as caught:
            read_volume(planted / name, spacing_mm=SPACING_MM, raster_only=False, limits=TIGHT)
        return caught.value

    return refused


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_is_refused_with_a_code(refused, bytes_before, name):
    error = refused(name)
    assert error.code in REASONS and "\n" not in str(error)
    assert _resident("VmHWM") - bytes_before < 10**8, "this process reads none of it"


@pytest.mark.parametrize("name", ["items.dcm", "groups.dcm", "directories.e2e", "offset.nii.gz"])
def test_a_header_of_millions_of_items_is_refused_before_it_fills_the_memory(refused, name):
    """Also where nobody asks for limits."""
    assert refused(name).code in ("unreadable", "damaged_file")


def test_empty_fragments_are_not_listed_without_end(tmp_path):
    from pydicom import uid

    voxels = np.random.default_rng(0).integers(0, 255, (4, 40, 36), dtype=np.uint8)
    file = write_oct_dicom(tmp_path / "a.dcm", voxels, SPACING_MM, transfer_syntax=uid.RLELossless)
    content = file.read_bytes()
    end = content.rindex(b"\xfe\xff\xdd\xe0")
    file.write_bytes(content[:end] + b"\xfe\xff\x00\xe0\0\0\0\0" * 300_000 + content[end:])
    with pytest.raises(ReadError, match="more than 262,144 fragments") as caught:
        read_volume(file)
    assert caught.value.code == "decode_failed"


def test_a_topcon_image_larger_than_its_header_says_is_the_last_one_decoded(tmp_path, monkeypatch):
    from octfm.formats import topcon
    from support.vendor_files import write_topcon

    decoded, large = [], np.random.default_rng(0).integers(0, 255, (200, 300), dtype=np.uint8)
    voxels = np.random.default_rng(0).integers(0, 255, (8, 64, 48), dtype=np.uint8)
    file = write_topcon(tmp_path / "a.fda", voxels, SPACING_MM, compressed=True)
    monkeypatch.setattr(topcon, "decode_gray", lambda *_: decoded.append(1) or large)
    with pytest.raises(ReadError, match="B-scan 1 of 8 is 300 x 200, expected 48 x 64"):
        read_volume(file)
    assert len(decoded) == 1


def test_a_scan_reads_no_dicomdir_in_its_own_process(tmp_path, bytes_before):
    deflated_bomb(tmp_path / "DICOMDIR", 400)
    voxels = np.random.default_rng(0).integers(0, 255, (8, 64, 48), dtype=np.uint8)
    write_oct_dicom(tmp_path / "good.dcm", voxels, SPACING_MM)
    catalog = scan(tmp_path, limits=TIGHT, workers=1)
    assert len(catalog.acquisitions) == 1 and [reject.code for reject in catalog.rejects] == ["decoder_memory"]
    assert _resident("VmHWM") - bytes_before < 3 * 10**8


def test_view_refuses_what_is_left_of_four_gigabytes_in_little_memory(planted, tmp_path):
    """The real command and its children; 5.7 GB before."""
    command = [str(Path(sys.executable).with_name("octfm")), "view", str(planted / "more_behind.npz")]
    # A process counts what its parent held when it was forked: a small one starts the command, this one may hold
    # gigabytes.
    measured = (
        "import resource, subprocess, sys\n"
        "done = subprocess.run(sys.argv[1:], stderr=subprocess.PIPE, text=True)\n"
        "print(done.returncode, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
        "sys.stderr.write(done.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", measured, *command], cwd=tmp_path, capture_output=True, text=True)
    code, peak_kb = (int(number) for number in done.stdout.split())
    assert code == 1 and done.stderr.count("\n") == 1 and "save it again" in done.stderr
    assert 1024 * peak_kb < 6 * 10**8 and not list(tmp_path.iterdir())


def test_view_and_segment_read_in_a_child(planted, elsewhere, monkeypatch):
    """Where reading fails, no encoder or segmenter is needed; the child is what has the limit."""
    monkeypatch.chdir(elsewhere)
    monkeypatch.setattr("octfm.formats.detect.find_reader", None)  # of this process
    monkeypatch.setattr("octfm.cli.segment_scans.load_segmenter", lambda *_: SimpleNamespace(segment=None))
    few, bomb = ["--file-gb", "0.3", "--file-seconds", "60"], str(planted / "frames.dcm")
    for words in (
        ["view", bomb, "--spacing", "0.12,0.0039,0.0115"],
        ["segment", "--apply", ".", bomb],
    ):
        with pytest.raises(ReadError, match=r"frames\.dcm"):
            invoke(*words, *few, catch_exceptions=False)
    assert not list(elsewhere.glob("*.html"))


@pytest.mark.slow
def test_a_scan_and_its_pseudonyms_go_on_past_all_bombs(planted, bytes_before):
    catalog = scan(planted, limits=TIGHT, workers=1)
    assert [Path(a.uri).name for a in catalog.acquisitions] == ["good.dcm"]
    assert {Path(reject.uri).name for reject in catalog.rejects} >= BOMBS.keys() - {"zeros.npz"}
    hidden = pseudonyms.pseudonymise(catalog, b"k" * 32)
    assert list(pseudonyms.locate(hidden, planted, b"k" * 32).values()) == [str(planted / "good.dcm")]
    assert _resident("VmHWM") - bytes_before < 3 * 10**8


def test_a_volume_too_large_for_the_limit_is_not_called_damaged(tmp_path):
    file = nifti_of_zeros(tmp_path / "huge.nii.gz")
    with pytest.raises(ReadError, match="limit") as caught:
        read_volume(file, limits=TIGHT)
    assert caught.value.code == "decoder_memory"


def test_a_file_that_takes_for_ever_is_given_up_and_named(tmp_path):
    (tmp_path / "slow.bin").write_bytes(b"x")
    with pytest.raises(ReadError, match=r"slow\.bin.*not done after 1 s") as caught:
        within(Limits(seconds=1), _sleep, str(tmp_path / "slow.bin"))
    assert caught.value.code == "decoder_timeout"


def _sleep(uri: str) -> None:
    planted_delay(600)


def test_what_is_read_in_a_child_is_what_is_read_here(planted):
    here, there = (read_volume(planted / "good.dcm", limits=limits) for limits in (None, Limits()))
    assert np.array_equal(here.voxels, there.voxels) and here.spacing_mm == there.spacing_mm
    assert here.acquisition == there.acquisition and here.source == there.source
    assert read_surfaces(planted / "good.dcm", Limits()) is None


def test_truth_for_a_segmentation_is_read_within_limits(planted, tmp_path):
    np.savez(tmp_path / "truth.npz", surfaces=np.ones((2, 4, 5)), surface_names=np.array(["ilm", "bm"]))
    assert within(TIGHT, named_arrays, str(tmp_path / "truth.npz"))["surfaces"].sum() == 40
    with pytest.raises(ReadError):
        within(TIGHT, named_arrays, str(planted / "zeros.npz"))


# ---- links
# ---------------------------------------------------------------------------------------------------------------------


def test_links_are_followed_unless_they_are_not(tmp_path):
    """To a file and a folder outside, in a circle, to nowhere, and of a B-scan and a sidecar."""
    from PIL import Image

    root, outside = tmp_path / "root", tmp_path / "outside"
    rng = np.random.default_rng(1)

    def dicom(path: Path, participant: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_oct_dicom(path, rng.integers(0, 255, (6, 64, 48), dtype=np.uint8), SPACING_MM, participant=participant)

    for path, participant in ((root / "own.dcm", "1"), (outside / "a.dcm", "2"), (outside / "more" / "b.dcm", "3")):
        dicom(path, participant)
    (root / "patient_4").mkdir()
    for number in range(4):
        place = (outside if number == 2 else root / "patient_4") / f"{number}.png"
        Image.fromarray(rng.integers(0, 255, (64, 48), dtype=np.uint8)).save(place)
    links = {
        "a.dcm": outside / "a.dcm", "more": outside / "more", "round": root, "nowhere": outside / "none", "patient_4/2.png": outside / "2.png",
    }  # fmt: skip
    for name, target in links.items():
        (root / name).symlink_to(target)

    followed = scan(root, nominal_spacing_mm=SPACING_MM, workers=1)
    assert _names(root, followed) == ["a.dcm", "more/b.dcm", "own.dcm", "patient_4"]
    assert [Path(reject.uri).name for reject in followed.rejects] == ["nowhere"]

    left = scan(root, nominal_spacing_mm=SPACING_MM, workers=1, follow_links=False)
    assert _names(root, left) == ["own.dcm"] and not left.rejects
    found = {str(Path(skip.uri).relative_to(root)) for skip in left.skipped if skip.code == "link_not_followed"}
    assert found == links.keys() | {"patient_4"}
    done = invoke("scan", root, "--no-follow-links", "--no-images", "--out", tmp_path / "catalog")
    assert done.exit_code == 0 and _names(root, Catalog.load(tmp_path / "catalog")) == ["own.dcm"]


def _names(root: Path, catalog: Catalog) -> list[str]:
    return [str(Path(a.uri).relative_to(root)) for a in catalog.acquisitions]
