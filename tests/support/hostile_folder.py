"""A folder in which strangers have left a module of every name that Python, octfm and their libraries import."""

import subprocess
import sys
from pathlib import Path

LIBRARIES = {
    "octfm", "numpy", "scipy", "pydicom", "PIL", "yaml", "joblib", "cloudpickle", "pandas", "pyarrow", "torch", "typer", "click", "rich",
    "pydantic", "zarr", "tensorstore", "google_crc32c", "fsspec", "s3fs", "gcsfs", "nibabel", "highdicom", "imagecodecs", "pylibjpeg", "openjpeg", "libjpeg",
    "rle", "gdcm", "jpeg_ls", "pyjpegls", "jinja2", "matplotlib", "distributed", "dask", "loky", "setproctitle", "psutil", "sitecustomize",
    "usercustomize",
}  # fmt: skip
RUN = "import os, sys\nopen(os.path.join({folder!r}, __name__ + '.executed'), 'a').write(str(sys.argv))\nraise ImportError('hostile')\n"


def plant(folder: Path) -> Path:
    """Fill `folder`; a module that runs leaves NAME.executed there, and fails."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in sorted(sys.stdlib_module_names | LIBRARIES):
        (folder / f"{name}.py").write_text(RUN.format(folder=str(folder)))
    return folder


def executed(folder: Path) -> list[str]:
    """Names of the modules that ran."""
    return sorted(path.stem for path in folder.glob("*.executed"))


def octfm(folder: Path, *words: object) -> subprocess.CompletedProcess[str]:
    """The real command, in `folder`."""
    command = [str(Path(sys.executable).with_name("octfm")), *map(str, words)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)
