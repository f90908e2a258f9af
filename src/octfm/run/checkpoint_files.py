"""Decide which files of a folder are checkpoints: only those with exactly the name of one."""

import re
import shutil
from pathlib import Path, PurePath

from octfm.io.location import from_json

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


def named_in(path: str) -> str | None:
    """The checkpoint that a path ends with, by its name; None if it ends with anything else, such as a run's folder."""
    name = PurePath(path).name
    return name if is_name(name) else None


def is_checkpoint(path: Path) -> bool:
    """Whether this is a file, or a folder of shards, that is named as a checkpoint."""
    return is_name(path.name) and (path.is_dir() if path.suffix == SHARDS else path.is_file())


def steps(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first: files, and folders of shards."""
    return sorted((p for p in folder.glob("step-*") if is_checkpoint(p)), key=lambda p: (step_of(p), p.name))


def everywhere(run: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first, its second destination's too; of two alike, the run folder's."""
    # The run folder last: of two checkpoints with one name, the later entry stays.
    found = {path.name: path for folder in reversed(destinations(run)) for path in steps(folder)}
    return sorted(found.values(), key=lambda path: (step_of(path), path.name))


def newest(run: Path) -> Path | None:
    """The last of all checkpoints of a run; None if it has none yet."""
    return next(reversed(everywhere(run)), None)


def destinations(run: Path) -> list[Path]:
    """Where checkpoints of a run go: its own folder or, if that disk is full, the second destination."""
    second = second_destination(run)
    return [run / "checkpoints", *([second] if second else [])]


def second_destination(run: Path) -> Path | None:
    """Folder for checkpoints that the run's own disk had no room for, as run.json says."""
    try:
        name = from_json((run / "run.json").read_text("utf-8")).get("second_destination")
    except (OSError, ValueError, AttributeError):  # none, or damaged: `RunFolder.record` names that
        return None
    return Path(name) if name else None


def before_newest(encoder: str, run: Path) -> tuple[str, str] | None:
    """Names of the checkpoint that something was made with, of which `encoder` is the path, and of the run's newest
    one, if they differ; else None."""
    taken, last = named_in(encoder), newest(run)
    return (taken, last.name) if taken and last and taken != last.name else None


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
    """Bytes of a file, or of all files below a folder."""
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
