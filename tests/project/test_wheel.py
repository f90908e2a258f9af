"""Wheel and source distribution hold what a run needs and nothing else, and run outside the clone."""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, metadata
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from octfm.weights.packaged import CURRENT_ENCODER
from support import ROOT

ENCODER = {
    f"octfm/weights/{CURRENT_ENCODER}/{file}" for file in ("config.json", "model.safetensors", "seen_participants.json")
}


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """As `make wheel` does: the source distribution, and the wheel built from it."""
    out = tmp_path_factory.mktemp("dist")
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", out, ROOT], check=True, capture_output=True
    )
    return out


@pytest.fixture(scope="module")
def wheel(dist) -> Path:
    return next(dist.glob("*.whl"))


@pytest.mark.slow
def test_source_distribution_has_the_package_and_no_tests_or_data(dist):
    with tarfile.open(next(dist.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames()}
    assert {f"src/{name}" for name in ENCODER} <= names
    beside = {name for name in names if not name.startswith("src/octfm/")}
    assert beside == {
        ".gitignore", "CHANGELOG.md", "CITATION.cff", "LICENSE", "PKG-INFO", "README.md", "constraints.txt", "pyproject.toml",
    }  # fmt: skip


def test_every_dependency_is_explained_once():
    """The tables of docs/guide/dependencies.md name what pyproject.toml names, the extras by their own names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    page = (ROOT / "docs" / "guide" / "dependencies.md").read_text()
    core, extras = page.split("## Extras")
    needed = {re.match(r"[\w.-]+", line)[0].lower() for line in project["dependencies"]}
    assert sorted(re.findall(r"^\| `([\w.-]+)` \|", core, re.M)) == sorted(needed)
    assert set(re.findall(r"^\| `([\w-]+)` \|", extras, re.M)) == set(project["optional-dependencies"])


@pytest.mark.parametrize("python", ["3.11.0", "3.12.0", "3.13.0"])
def test_pinned_versions_take_the_pythons_of_linux_distributions(python):
    """Debian 12 has 3.11.2: pip calls a pin that needs a later one a conflict, and names another package."""
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    needs = {}
    for pin in pins:
        with suppress(PackageNotFoundError):
            needs[pin] = metadata(pin).get("Requires-Python") or ""
    assert len(needs) > 100
    assert [pin for pin, range_ in needs.items() if not SpecifierSet(range_).contains(python)] == []


@pytest.mark.slow
def test_wheel_carries_configs_and_templates_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for needed in ("octfm/configs/demo.yaml", "octfm/configs/vit_s.yaml", "octfm/cli/main.py", "octfm/py.typed"):
        assert needed in names
    assert set(names) >= ENCODER
    package = ROOT / "src" / "octfm"
    for path in package.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(Path("octfm") / path.relative_to(package)) in names, path
    assert not [n for n in names if n.startswith(("tests", "shared")) or n.endswith((".npz", ".dcm", ".vol"))]


@pytest.mark.slow
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


CUDA_BUILDS = ("2.9.1+cu128", "2.14.1+cu130", "2.10.0a0+b558c986e8.nv25.11")
MOST = 1.5e9
"""Bytes of octfm and all that it needs, with torch for CPUs on Linux x86-64 (measured: 1.49e9)."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_wheel_and_source_run_in_an_empty_environment(dist, wheel, tmp_path):
    """No clone, no make, no gcc: pip install, octfm segment --sample, octfm demo."""
    venv.create(tmp_path / "venv", with_pip=True)
    binaries = tmp_path / "venv" / "bin"
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV", "CC", "CXX")}

    def run(*words) -> str:
        done = subprocess.run(words, cwd=tmp_path, env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    pip = [binaries / "python", "-m", "pip", "--disable-pip-version-check", "-q"]
    # The lines of README, with the wheel for the clone.
    for line in re.findall(r"^pip (install .*)$", (ROOT / "README.md").read_text(), re.M):
        places = {"constraints.txt": ROOT / "constraints.txt", ".": wheel}
        run(*pip, *(places.get(word, word) for word in line.split()))
    run(*pip, "check")
    sizes = json.loads(run(binaries / "python", "-c", SIZES))
    assert sum(sizes.values()) <= MOST, sorted(sizes.items(), key=lambda item: -item[1])[:12]
    assert sizes.keys().isdisjoint({"pytest", "tensorboard", "wandb", "mkdocs", "huggingface_hub", "zarr"})

    # A build of torch for CUDA is kept, also one of a container, whose version is a pre-release.
    (metadata,) = (tmp_path / "venv").glob("lib/python3*/site-packages/torch-*.dist-info/METADATA")
    true = metadata.read_text()
    for version in CUDA_BUILDS:
        metadata.write_text(re.sub(r"^Version: .*", f"Version: {version}", true, count=1, flags=re.M))
        planned = run(*pip, "install", "--no-index", "--dry-run", "--report", "-", wheel)
        assert json.loads(planned)["install"] == [], version
    metadata.write_text(true)

    assert "report:" in run(binaries / "octfm", "demo", "--quick", "--out", "demo")
    assert (tmp_path / "demo" / "report.html").is_file()
    run(*pip, "uninstall", "-y", "octfm")
    run(*pip, "install", "-c", ROOT / "constraints.txt", next(dist.glob("*.tar.gz")))
    assert "research use only" in run(binaries / "octfm", "segment", "--sample", "healthy")


SIZES = """
import json
from importlib.metadata import distributions
files = {d.name: [d.locate_file(f) for f in d.files or ()] for d in distributions()}
sizes = {name: sum(f.stat().st_size for f in found if f.is_file()) for name, found in files.items() if name != "pip"}
print(json.dumps(sizes))
"""
"""Bytes of every installed package but pip, which installs them."""
