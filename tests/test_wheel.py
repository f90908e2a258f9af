"""The wheel holds what a run needs, and runs outside the clone."""

import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from support import ROOT


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT],
        check=True,
        capture_output=True,
    )
    return next(out.glob("*.whl"))


def test_wheel_carries_configs_and_templates_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("octfm/configs/demo.yaml", "octfm/configs/vit_s.yaml", "octfm/cli/main.py", "octfm/py.typed"):
        assert needed in names
    package = ROOT / "src" / "octfm"
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(Path("octfm") / path.relative_to(package)) in names, path
    assert not [n for n in names if n.startswith(("tests", "shared")) or n.endswith((".npz", ".dcm", ".vol"))]


def test_command_runs_from_the_wheel_outside_the_clone(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}
    code = "import octfm, sys; from octfm.cli.main import main; sys.argv = ['octfm', *sys.argv[1:]]; main()"

    def octfm(*words):
        done = subprocess.run(
            [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "pretrain" in octfm("--help")
    octfm("phantom", "clinic", "--participants", "2", "--size", "8x96x64", "--workers", "1")
    assert "4 accepted, 0 rejected" in octfm("scan", "clinic", "--out", "catalog")
    where = [sys.executable, "-c", "import octfm; print(octfm.__file__)"]
    found = subprocess.run(where, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert found.startswith(str(tmp_path / "site")), "the clone was tested, not the wheel"


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_demo_runs_from_a_wheel_in_an_empty_environment(wheel, tmp_path):
    """No clone, no make, no gcc: pip install, octfm demo."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX")}
    pip = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-c", ROOT / "constraints.txt"]
    subprocess.run([*pip, "torch"], check=True, env=clean)
    subprocess.run([*pip, wheel], check=True, env=clean)
    done = subprocess.run(
        [tmp_path / "venv" / "bin" / "octfm", "demo", "--quick", "--out", "demo"],
        cwd=tmp_path,
        env=clean,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "report:" in done.stdout and (tmp_path / "demo" / "report.html").is_file()
