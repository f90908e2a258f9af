"""No secret of a clinic is in anything that octfm writes under a pseudonym, nor in what is meant to be shared
without one."""

import contextlib
import gzip
import io
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from PIL.PngImagePlugin import PngInfo

from octfm.store.store import Store
from support.canaries import MARK, leaks, write_clinic

pytestmark = pytest.mark.drawn

SMALL = ("image_size=[16,96,96]", "target_spacing=[0.24,0.015,0.05]")


def octfm(*words) -> str:
    """A verb in this process; what it printed."""
    from octfm.cli.main import app

    command, printed = [str(word) for word in words], io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(printed),
    ):
        patch.setattr(sys, "argv", ["octfm", *command])
        app(command, standalone_mode=False)
    return printed.getvalue()


@pytest.fixture(scope="module")
def clinic(tmp_path_factory) -> Path:
    return write_clinic(tmp_path_factory.mktemp("raw"))


def test_the_search_finds_secrets_in_every_container(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    np.savez_compressed(tmp_path / "a.npz", text=np.array(f"x {MARK}"))
    pq.write_table(pa.table({"name": [MARK.upper()] * 50}), tmp_path / "b.parquet", compression="zstd")
    text = PngInfo()
    text.add_text("about", f"{MARK} " * 40, zip=True)
    Image.new("L", (4, 4)).save(tmp_path / "c.png", pnginfo=text)
    (tmp_path / "d.gz").write_bytes(gzip.compress(MARK.encode()))
    (tmp_path / f"{MARK}.txt").write_text("")
    (tmp_path / "e.html").write_text("born 1957-12-03")
    (tmp_path / "f.txt").write_text("harmless")
    assert sorted({Path(leak.split(": ")[0]).name for leak in leaks(tmp_path)}) == [
        "a.npz", "b.parquet", "c.png", "d.gz", "e.html", f"{MARK}.txt",
    ]  # fmt: skip
    assert leaks(tmp_path / "f.txt") == []


def run_all(clinic: Path, work: Path, key: Path | None) -> tuple[Path, str]:
    """scan, prepare, pretrain, embed, probe on this clinic; the folder of all that was written, and all that was
    printed."""
    work.mkdir()
    hidden = ("--pseudonymise", key) if key else ()
    where = ("--key", key, "--root", clinic) if key else ()
    said = octfm("scan", clinic, "--out", work / "catalog", "--workers", 0, *hidden)
    changed = next(clinic.rglob(f"{MARK}-5.dcm"))
    before = changed.read_bytes()
    changed.write_bytes(before[:5000])  # one that can no longer be prepared
    said += octfm("prepare", work / "catalog", *SMALL, "--out", work / "prepared", "--workers", 0, *where)
    changed.write_bytes(before)
    assert len(Store.open(work / "prepared").unprepared()) == 1
    said += octfm(
        "pretrain", "vit_s", "--smoke", f"data.store={work / 'prepared'}", "--out", work / "run", "--device", "cpu"
    )
    said += octfm("embed", work / "run", "--store", work / "prepared")
    columns = ["study_group", "scanner", *([] if key else ["diagnosis", f"{MARK}_column"])]
    targets = [word for column in columns for word in ("--target", column)]
    said += octfm("probe", work / "run", *targets, "--allow-seen", "--out", work / "run")
    return work, said


@pytest.fixture(scope="module")
def pseudonymous(clinic, light_checks, tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("written")
    return run_all(clinic, folder / "out", folder / "key")


@pytest.fixture(scope="module")
def plain(clinic, tmp_path_factory) -> Path:
    """Without pseudonyms, below folders whose names are secrets as well; only what is written is looked at, so that
    nothing is checked before step 0."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("octfm.pretraining.preflight.checks", lambda *_, **__: [])
        return run_all(clinic, tmp_path_factory.mktemp("written") / f"{MARK} 1957-12-03", None)[0]


@pytest.mark.slow
def test_no_file_written_under_a_pseudonym_holds_a_secret(pseudonymous):
    out, said = pseudonymous
    run, store, catalog = out / "run", out / "prepared", out / "catalog"
    said += octfm("report", run, "--catalog", catalog, "--store", store)
    said += octfm(
        "trust",
        run,
        "--store",
        store,
        "--target",
        "study_group",
        "--from-scratch-epochs",
        0,
        "--allow-seen",
        "--out",
        out / "trust",
    )
    said += octfm("leaderboard", run, "--store", store, "--allow-seen", "--out", out / "leaderboard")
    said += octfm("card", run, "--catalog", catalog, "--store", store)
    said += octfm("export", run, "--out", out / "export")
    assert leaks(out) == []
    printed = "\n".join(line for line in said.splitlines() if "withheld" not in line).lower()
    assert MARK not in printed and "998877" not in printed, "logs hold no more than files"


def test_nothing_meant_to_be_shared_holds_a_secret(plain, tmp_path):
    shared = tmp_path / "shared"
    octfm(
        "report",
        plain / "run",
        "--catalog",
        plain / "catalog",
        "--store",
        plain / "prepared",
        "--no-images",
        "--out",
        shared / "report.html",
    )
    octfm("card", plain / "run", "--catalog", plain / "catalog", "--store", plain / "prepared", "--out", shared)
    octfm("export", plain / "run", "--out", shared / "export")
    shutil.copy(plain / "catalog" / "data_health.html", shared)
    assert len(leaks(plain)) > 10, "the secrets were there to leak"
    assert leaks(shared) == []
