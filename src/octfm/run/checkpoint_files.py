"""Decide which files of a folder are checkpoints: only those with exactly the name of one."""

import re
import shutil
from pathlib import Path

FILE, SHARDS = ".pt", ".dcp"
_NAME = re.compile(r"step-([0-9]{8,})(\.pt|\.dcp)", re.ASCII)
_PARTIAL = re.compile(r"step-[0-9]{8,}(\.dcp)?\.partial|\.(best\.json|step-[0-9]{8,}\.(pt|dcp))\..*\.partial", re.ASCII)
_KNOWN = re.compile(r"best\.json|.*\.partial|step-[0-9]{8,}\.damaged[0-9]*", re.ASCII)


def name_of(step: int, suffix: str = FILE) -> str:
    return f"step-{step:08d}{suffix}"


def step_of(path: Path | str) -> int:
    """The number of updates that were made when this checkpoint was written, from its name."""
    return int(Path(path).name.split(".")[0].removeprefix("step-"))


def is_name(name: str) -> bool:
    """Whether this is exactly the name of a checkpoint."""
    match = _NAME.fullmatch(name)
    # step-000000012.pt, with a digit too many, would be a second checkpoint of step 12.
    return match is not None and name == name_of(int(match[1]), match[2])


def is_checkpoint(path: Path) -> bool:
    """Whether this is a file, or a folder of shards, that is named as a checkpoint."""
    return is_name(path.name) and (path.is_dir() if path.suffix == SHARDS else path.is_file())


def steps(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first: files, and folders of shards."""
    return sorted((p for p in folder.glob("step-*") if is_checkpoint(p)), key=lambda p: (step_of(p), p.name))


def strangers(folder: Path) -> list[str]:
    """Entries in a folder of checkpoints that are not checkpoints, and are neither read nor deleted, such as copies."""
    if not folder.is_dir():
        return []
    return sorted(p.name for p in folder.iterdir() if not (_KNOWN.fullmatch(p.name) or is_checkpoint(p)))


def left_over(folder: Path) -> list[Path]:
    """Partial files of a process that was killed while it wrote."""
    return [p for p in folder.iterdir() if _PARTIAL.fullmatch(p.name)] if folder.is_dir() else []


def former_of(path: Path) -> Path:
    """Where a folder of shards is until another of the same name has taken its place."""
    return path.with_name(f".{path.name}.former.partial")


def put_back(folder: Path) -> None:
    """Give shards their name back if the process was killed before others had taken it."""
    for former in folder.glob(former_of(Path("step-*.dcp")).name):
        path = folder / former.name.removeprefix(".").removesuffix(".former.partial")
        if is_name(path.name) and not path.exists():
            former.rename(path)


def size_of(path: Path) -> int:
    """Bytes of a checkpoint."""
    return sum(p.stat().st_size for p in (path.rglob("*") if path.is_dir() else (path,)) if p.is_file())


def delete(path: Path) -> None:
    """Delete a file or a folder of shards; of a link, only the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts as one; returns the new path."""
    aside, number = path.with_suffix(".damaged"), 1
    while aside.exists():
        number += 1
        aside = path.with_suffix(f".damaged{number}")
    return path.rename(aside)
