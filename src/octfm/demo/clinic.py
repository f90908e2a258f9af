"""The phantom clinic of the demonstration: rendered, listed and prepared scanner by scanner, so that it fits on a
small disk."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from octfm.errors import ConfigError
from octfm.io.location import write_whole

PREPROCESSING = {"image_size": [16, 192, 128], "target_spacing": [0.1875, 0.0104, 0.031]}
"""The central 3 x 2 x 4 mm at about the scanners' native sampling: lesions stay larger than tokens, and a CPU is fast
enough."""
SECOND_SCANNER, DEFECTS = 0.1, 0.03
"""Share of participants scanned twice, and defective files per good one."""
Progress = Callable[[int, int], None]
"""Gets how many participants are done, of how many."""
TABLES = ("participants.tsv", "ground_truth/labels.tsv", "ground_truth/defects.tsv")


@dataclass(frozen=True)
class Size:
    """Size of the phantom cohort, and overrides of the pretraining settings."""

    participants: int
    fractions: tuple[float, float, float]
    """Shares of participants for training, validation and test."""
    peak_bytes: float
    """Most bytes that the demonstration has on disk at any time."""
    time: str = "a minute or two"
    """Measured on two idle cores, for the user."""
    overrides: tuple[str, ...] = ()
    keeps_files: bool = False
    """Whether all files of the clinic are kept; otherwise those of a scanner are removed once they are prepared."""


FULL = Size(
    600,
    (0.31, 0.02, 0.67),
    1.3e9,
    "5 to 12 minutes (measured: 350 and 593 s on Intel Xeons, 273 and 512 s on AMD EPYCs, 740 s without AVX-512)",
)
"""As many as fit into nine minutes on most processors measured. Leaves 414 participants that pretraining has not seen:
the standard error of a paired AUROC difference is then about .02, half of the gain for disease (docs/log)."""
QUICK = Size(
    30,
    (0.4, 0.2, 0.4),
    0.2e9,
    overrides=("steps=20", "log_every_steps=5", "validate_every_steps=10", "ckpt_every_steps=10"),
    keeps_files=True,
)


def prepared_clinic(out: Path, size: Size, seed: int, progress: Progress = lambda done, total: None) -> Path:
    """Make OUT/clinic, OUT/catalog and OUT/prepared, or what is missing of them; returns the table of labels.

    Rows of catalog and store are the same whether files are kept or removed. Raises ConfigError if another cohort is
    there.
    """
    from octfm.catalog.catalog import Catalog
    from octfm.catalog.scan import scan
    from octfm.phantom import DEFAULT_SCANNERS
    from octfm.store.prepare import prepare
    from octfm.volume.preprocessing import Preprocessing

    clinic, preprocessing = out / "clinic", Preprocessing.model_validate(PREPROCESSING)
    labels = clinic / "ground_truth" / "labels.tsv"
    if size.keeps_files:
        cohort(clinic, size, seed, progress=progress)
        catalog = scan(str(clinic))
        catalog.save(out / "catalog")
        prepare(catalog, out / "prepared", preprocessing, progress=False)
        return labels
    parts = [clinic / name for name in sorted(DEFAULT_SCANNERS)]  # as a scan of the whole clinic orders them
    catalogs: list[Catalog] = []
    for number, part in enumerate(parts):
        images, leaving = part / "retinal_oct" / "structural_oct", part / "removed.partial"
        shutil.rmtree(leaving, ignore_errors=True)
        cohort(part, size, seed, only=(part.name,), progress=_share(progress, number, len(parts), size))
        if images.is_dir():
            catalogs.append(scan(str(part)))
            catalogs[-1].save(part / "catalog")
            prepare(catalogs[-1], out / "prepared", preprocessing, progress=False)
            images.rename(leaving)  # so that a kill leaves the folder whole or gone
            shutil.rmtree(leaving)
        else:
            catalogs.append(Catalog.load(part / "catalog"))
    _join_tables(clinic, parts)
    joined = replace(
        catalogs[0],
        root=str(clinic),
        acquisitions=tuple(a for c in catalogs for a in c.acquisitions),
        rejects=tuple(r for c in catalogs for r in c.rejects),
        skipped=tuple(r for c in catalogs for r in c.skipped),
        companions=sum(c.companions for c in catalogs),
    )
    joined.save(out / "catalog")
    return labels


def cohort(
    folder: Path,
    size: Size,
    seed: int,
    *,
    only: tuple[str, ...] | None = None,
    progress: Progress = lambda done, total: None,
) -> None:
    """Render the phantom cohort of this size and seed, or only the part of these scanners, unless it is there. Raises
    ConfigError if another cohort is there."""
    from octfm.phantom import write_phantom

    for facts in (folder, folder.parent):
        _require_same(facts / "ground_truth" / "phantom.json", size, seed)
    if not (folder / "ground_truth" / "phantom.json").is_file():
        write_phantom(
            folder,
            size.participants,
            seed,
            fractions=size.fractions,
            second_scanner=SECOND_SCANNER,
            defects=DEFECTS,
            only=only,
            truth=size.keeps_files,
            progress=progress,
        )


def _require_same(facts: Path, size: Size, seed: int) -> None:
    if not facts.is_file():
        return
    known = json.loads(facts.read_text("utf-8"))
    if (known["participants"], known["seed"]) != (size.participants, seed):
        raise ConfigError(
            f"{facts.parent.parent}: holds a cohort of {known['participants']} participants with seed {known['seed']}, "
            f"not {size.participants} with seed {seed}; choose another --out"
        )


def _share(progress: Progress, number: int, parts: int, size: Size) -> Progress:
    """Progress of one of several parts of about equal size, in participants of the whole clinic."""

    def report(done: int, total: int) -> None:
        progress(int((number + done / total) * size.participants / parts), size.participants)

    return report


def _join_tables(clinic: Path, parts: list[Path]) -> None:
    """Join the tables of all parts into those of one clinic; phantom.json last, because it marks the clinic as
    complete."""
    for name in TABLES:
        texts = [(part / name).read_text(encoding="utf-8").splitlines(keepends=True) for part in parts]
        # A participant with two scanners is in two parts.
        rows = dict.fromkeys(line for lines in texts for line in lines[1:])
        write_whole(clinic / name, "".join([texts[0][0], *rows]).encode())
    facts = [json.loads((part / "ground_truth" / "phantom.json").read_text("utf-8")) for part in parts]
    whole = {name: value for name, value in facts[0].items() if name != "only"}
    whole["volumes"] = sum(part["volumes"] for part in facts)
    write_whole(clinic / "ground_truth" / "phantom.json", f"{json.dumps(whole, indent=1)}\n".encode())
