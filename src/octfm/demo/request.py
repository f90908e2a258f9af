"""The options of a demonstration, and the commands that repeat it."""

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from octfm.demo.clinic import FULL, PREPROCESSING, QUICK, Size
from octfm.errors import ConfigError

if TYPE_CHECKING:
    from octfm.evaluation.cases import Design

PRESETS = {
    "mae": ("demo", "masked voxels without speckle"),
    "vjepa2": ("demo_vjepa2", "V-JEPA 2 with context loss and masked voxels"),
}
"""Objective to packaged config and description. Within minutes mae is better (docs/log); V-JEPA 2 is meant for long
runs."""
DESIGN: "Design" = "k-fold"
"""Design of the probe on the phantom cohort. Every participant that pretraining has not seen is tested once, which
gives the probe more than twice the labels of the split (docs/log). Your own scans keep their recommended split. Chance
AUROC is then a little below .5, equally for all encoders: a class that is frequent in one fold is rarer in the others
(docs/phantom.md)."""


@dataclass(frozen=True)
class Request:
    """The options of `octfm demo`."""

    out: Path
    data: Path | None = None
    """Folder of the user's own scans; None: phantoms."""
    labels: Path | None = None
    targets: tuple[str, ...] = ()
    max_samples: int | None = None
    participant_from: tuple[str, ...] = ()
    seed: int = 100
    size: Size = FULL
    objective: str = "mae"

    def __post_init__(self) -> None:
        if self.objective not in PRESETS:
            raise ConfigError(f"--objective: expected one of {', '.join(PRESETS)}; got {self.objective!r}")
        own = {
            "--labels": self.labels,
            "--target": self.targets or None,
            "--max-samples": self.max_samples,
            "--participant-from": self.participant_from or None,
        }
        for option, given in own.items():
            if self.data is None and given is not None:
                raise ConfigError(f"{option} applies to your own scans only; give --data FOLDER with it")
        if self.targets and self.labels is None:
            raise ConfigError("--target names columns of a label table; give --labels TABLE with it")

    @property
    def preset(self) -> str:
        return PRESETS[self.objective][0]

    @property
    def description(self) -> str:
        return PRESETS[self.objective][1]

    def commands(self, labels: Path | None, design: str, pretrains: bool = True) -> list[str]:
        """This command and, if it pretrains, the verbs that repeat its steps one by one. `labels`: the table that was
        probed."""
        out = self.out
        targets = [word for target in self.targets for word in ("--target", target)]
        demo: list[object] = ["octfm", "demo", "--out", out, "--seed", self.seed]
        demo += ["--data", self.data] * (self.data is not None)
        demo += ["--labels", self.labels] * (self.labels is not None)
        demo += targets
        demo += ["--max-samples", self.max_samples] * (self.max_samples is not None)
        demo += [word for pattern in self.participant_from for word in ("--participant-from", pattern)]
        demo += ["--quick"] * (self.size is QUICK)
        demo += ["--objective", self.objective] * (self.objective != "mae")
        settings = [f"{key}={json.dumps(value, separators=(',', ':'))}" for key, value in PREPROCESSING.items()]
        pretrain = ["octfm", "pretrain", self.preset, f"seed={self.seed}", *self.size.overrides]
        verbs: list[list[object]] = [
            demo,
            ["octfm", "prepare", out / "catalog", *settings, "--out", out / "prepared"],
            [*pretrain, f"data.store={out / 'prepared'}", "--out", out / "run"],
            ["octfm", "embed", out / "run", "--store", out / "prepared"],
            ["octfm", "probe", out / "run", *(["--labels", labels, *targets, "--design", design] if labels else [])],
            ["octfm", "report", out / "run", "--catalog", out / "catalog", "--store", out / "prepared"],
        ]
        return [shlex.join(str(word) for word in words) for words in (verbs if pretrains else [demo])]
