"""Opens a self-contained page in headless Chromium, where there is one."""

import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH; install Debian's chromium to check how the page renders")


def assert_renders(page: Path, heading: str, folder: Path) -> None:
    """The page shows this <h2>, is not blank, and writes nothing to the console. `folder` takes profile and screenshot."""
    from matplotlib.image import imread

    done = subprocess.run(
        [
            CHROMIUM or "", "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
            "--disable-background-networking", "--disable-component-update", "--disable-sync",
            f"--user-data-dir={folder / 'profile'}", "--enable-logging=stderr", "--v=0",
            "--hide-scrollbars", "--window-size=1280,2400", f"--screenshot={folder / 'page.png'}", "--dump-dom", page.as_uri(),
        ],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert ":CONSOLE" not in done.stderr, done.stderr
    assert f"<h2>{heading}</h2>" in done.stdout
    assert imread(folder / "page.png").std() > 0.05
