"""An interpreter with the packages that a bare GPU image has, or a bundle brings, and no other."""

import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

GIVEN = ("torch", "numpy", "pyyaml", "pydantic", "tensorstore", "pytest")


def light_python(folder: Path) -> Path:
    """A virtual environment in `folder` that sees GIVEN and what they need of this environment, by links."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    for name in _with_what_they_need(GIVEN):
        found = distribution(name)
        for top in {path.parts[0] for path in found.files or () if path.parts[0] not in ("..", "__pycache__")}:
            link = site / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return folder / "bin" / "python"


def _with_what_they_need(names: tuple[str, ...]) -> set[str]:
    found, open_ends = set(), list(names)
    while open_ends:
        name = open_ends.pop()
        try:
            needs = distribution(name).requires or ()
        except PackageNotFoundError:  # of another platform
            continue
        if name in found:
            continue
        found.add(name)
        open_ends += [re.match(r"[\w.-]+", need)[0] for need in needs if "extra ==" not in need]
    return found
