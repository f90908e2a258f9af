"""Odd values for every option and setting, made from the command tree and the settings models, and a small world to
try them in."""

import inspect
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin
from zlib import crc32

import numpy as np

from octfm.config import Config
from octfm.errors import one_line
from octfm.layers.rows import ACCEPTED, COLUMNS
from octfm.layers.zones import DEVICE_UNIT, UNIT
from octfm.pretraining.settings import PretrainConfig
from octfm.tasks.finetune_settings import FinetuneConfig
from octfm.tasks.segment_settings import SegmentConfig
from octfm.volume.preprocessing import Preprocessing
from support.command_line import COMMAND, octfm_here
from support.small_store import GRADES, darkened, small_store
from support.vendor_files import write_npy, write_sidecar

CONTROL = "a\nb\x1b[2J\u202e\u0085c"
"""A line break, a terminal's command, a change of the direction of writing, a line break of another century."""
NO_TEXT = "\udcff\udcfe"
"""How Python holds bytes of a name that are no UTF-8."""
LONG = "x" * 5000
HUGE = "9" * 5000
NUMBERS = (
    "",
    "-1",
    "-" + "9" * 30,
    "9" * 30,
    HUGE,
    "1e400",
    "-1e400",
    "nan",
    "inf",
    "-inf",
    "0x10",
    "1,5",
    "٣٫",
    CONTROL,
)
TEXTS = (
    "",
    " ",
    "=",
    ",",
    "a=b=c",
    "None",
    "null",
    "nan",
    "-9",
    "://",
    "s3://",
    "gs:///",
    "ftp://a/b",
    ":",
    CONTROL,
    NO_TEXT,
    LONG,
)
PATHS = (
    "{below}",
    "{garbage}",
    "{folder}",
    "{missing}",
    "{missing}/" + CONTROL,
    "{missing}/" + NO_TEXT,
    LONG,
    "",
    "/dev/null",
    "ftp://a/b",
)
"""Of places to read. `below`: inside a file, where nothing can be."""
UNWRITABLE = ("{below}", "{below}/" + CONTROL, "{below}/" + NO_TEXT, LONG, "ftp://a/b", "/proc/nothing/here")

SETTINGS: dict[str, type[Config]] = {
    "prepare": Preprocessing, "doctor": PretrainConfig, "pretrain": PretrainConfig, "bench": PretrainConfig,
    "finetune": FinetuneConfig, "segment": SegmentConfig,
}  # fmt: skip
"""Verbs that take section.key=value."""

TINY = (
    "precision=fp32", "data.global_batch_size=2", "data.per_device_batch_size=2",
    "model.patch_size=[2,8,8]", "model.width=12", "model.depth=1", "model.heads=1",
    "predictor.width=12", "predictor.depth=1", "predictor.heads=1", "masks.budget=32", "steps=2", "ckpt_every_steps=2",
    "validation_volumes=2", "schedule.ema_base=0.1",
)  # fmt: skip

BASES: dict[str, tuple[str, ...]] = {
    "demo": ("--data={folder}", "--labels={labels}", "--target=grade", "--out={out}"),
    "phantom": ("{out}", "--participants=1", "--size=8x64x48", "--workers=0"),
    "scan": ("{clinic}", "--participant-from={{participant}}_{{eye}}", "--out={out}", "--workers=0", "--no-images"),
    "prepare": ("{catalog}", "image_size=[8,32,32]", "--out={out}", "--workers=0"),
    "plan": ("{store}", "--device=cpu"),
    "doctor": ("vit_s", "--store={store}", *TINY, "--out={out}", "--device=cpu"),
    "pretrain": ("vit_s", "--store={store}", *TINY, "--out={out}", "--device=cpu"),
    "bench": ("vit_s", "--store={store}", *TINY, "--steps=1", "--device=cpu"),
    "watch": ("{run}", "--once"),
    "embed": ("{run}", "--store={store}", "--out={out}", "--no-baselines"),
    "export": ("{run}", "--out={out}"),
    "probe": ("{run}", "--embeddings={embeddings}", "--labels={labels}", "--target=grade", "--out={out}"),
    "finetune": (
        "study_group_linear", "encoder={run}", "--store={store}", "labels={labels}", "target=grade", "epochs=1", "batch_size=4",
        "per_device_batch_size=4", "tokens_per_volume=8", "--out={out}", "--device=cpu",
    ),
    "leaderboard": ("{run}", "--store={store}", "--labels={labels}", "--target=grade", "--out={out}"),
    "trust": (
        "{run}", "--store={store}", "--labels={labels}", "--target=grade", "--from-scratch-epochs=0", "--no-images", "--out={out}",
    ),
    "segment": (
        "encoder={run}", "store={store}", "truth={truth}", "surfaces=[ilm,bm]", "steps=1", "max_volumes=2", "--no-baselines",
        "--out={out}", "--device=cpu",
    ),
    "report": ("{run}", "--no-images", "--out={out}"),
    "compare": ("{run}", "{copy}", "--no-pairs", "--out={out}"),
    "view": ("{clinic}/a_OD.npz", "--out={out}"),
    "card": ("{run}", "--out={out}"),
    "models": ("layers-2",),
    "agree": ("{table}", "--out={out}"),
}  # fmt: skip
"""For each verb a command line that works and takes seconds. {out} does not exist yet."""


@dataclass(frozen=True)
class Parameter:
    """One option or argument of a verb."""

    verb: str
    name: str
    option: str
    """`--workers`; empty for an argument."""
    kind: type
    multiple: bool
    required: bool
    position: int
    """Of an argument among the arguments."""

    @property
    def writes(self) -> bool:
        return self.name in ("out", "plot", "extract", "keep_key") or (self.verb, self.name) == ("phantom", "out")


def verbs() -> dict[str, Any]:
    return dict(COMMAND.commands)  # type: ignore[attr-defined]


def parameters(verb: str) -> list[Parameter]:
    """Every option and argument of a verb, with the type of its Python parameter."""
    command, found, arguments = verbs()[verb], [], 0
    signature = inspect.signature(
        command.callback.__wrapped__ if hasattr(command.callback, "__wrapped__") else command.callback, eval_str=True
    )
    for parameter in command.params:
        if parameter.name == "help":
            continue
        argument = parameter.param_type_name == "argument"
        option = "" if argument else max(parameter.opts, key=len)
        kind = _kind(signature.parameters[parameter.name].annotation)
        multiple = parameter.multiple or parameter.nargs != 1
        found.append(Parameter(verb, parameter.name, option, kind, multiple, parameter.required, arguments))
        arguments += argument
    return found


def _kind(annotation: Any) -> type:
    """int, float, bool, Path or str, of what may be wrapped in Annotated, None and list."""
    if get_origin(annotation) is Annotated:
        return _kind(get_args(annotation)[0])
    inner = [part for part in get_args(annotation) if part is not type(None)]
    if inner:
        return _kind(inner[0])
    return annotation if annotation in (int, float, bool, Path, str) else Path


def lines(parameter: Parameter, odd: str) -> list[str]:
    """The verb's base command line with this value in place of, or besides, its own."""
    base = list(BASES[parameter.verb])
    if parameter.option:
        kept = (
            base
            if parameter.multiple and parameter.kind is str
            else [w for w in base if not w.startswith(f"{parameter.option}=")]
        )
        return [*kept, f"{parameter.option}={odd}"]
    places = [i for i, word in enumerate(base) if not word.startswith("--")]
    at = places[min(parameter.position, len(places) - 1)]
    return [*base[:at], odd, *base[at + 1 :]]


def odd_values(parameter: Parameter, most: int | None = None) -> tuple[str, ...]:
    """All odd values for it, or `most` of them, others for every option."""
    if parameter.kind is bool:
        values = ("3", "", CONTROL)
    elif parameter.kind in (int, float):
        values = NUMBERS
    elif parameter.writes:
        values = UNWRITABLE
    else:
        values = PATHS if parameter.kind is Path else TEXTS + PATHS
    first = crc32(f"{parameter.verb} {parameter.name}".encode())
    order = sorted(values, key=lambda value: crc32(f"{first} {value!r}".encode()))
    return tuple(order[:most])


def leaves(model: type[Config], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, annotation) of every setting."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Config):
            yield from leaves(field.annotation, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.annotation


def complaint(code: int, said: str, err: str) -> str | None:
    """What is wrong with how a command ended, or None: 0, or one line without control characters and 1, 2 or 75.

    octfm doctor ends with 1 and a table when a check fails.
    """
    errors = [line for line in err.split("\n") if line.startswith("octfm: ")]
    table = code == 1 and not err and " failed\n" in said
    if code not in (0, 1, 2, 75):
        return f"exit code {code}"
    if "Traceback" in err:
        return "a traceback"
    if any(one_line(line) != line for line in err.replace("\r", "\n").split("\n")) or "\x1b" in said:
        return "control characters"
    if code and not table and (len(errors) != 1 or err.rstrip("\n").rpartition("\n")[2] != errors[0]):
        return f"{len(errors)} lines"
    return f"{len(err)} characters" if len(err) > 30_000 else None


def make_world(folder: Path) -> dict[str, str]:
    """Places that the base command lines name: small, whole, made by the verbs themselves."""
    world = {
        name: str(folder / name)
        for name in ("clinic", "catalog", "store", "run", "copy", "embeddings", "truth", "missing", "folder", "garbage")
    }
    world |= {"labels": str(folder / "labels.tsv"), "below": str(folder / "garbage" / "below")}
    world["table"] = str(folder / "eyes.csv")
    row = dict.fromkeys(COLUMNS, "") | {"source": "a.xml", "verdict": ACCEPTED, UNIT["centre"]: "270"}
    row |= {DEVICE_UNIT["centre"]: "268"}
    Path(world["table"]).write_text(f"{','.join(row)}\n{','.join(row.values())}\n")
    rng = np.random.default_rng(0)
    rows = np.arange(96)[:, None]
    for name in ("a_OD", "a_OS", "b_OD"):
        gray = 255 * np.exp(-(((rows - 40) / 9) ** 2)) * rng.gamma(6, 1 / 6, (8, 96, 48))
        write_npy(folder / "clinic" / f"{name}.npz", gray.clip(0, 255).astype(np.uint8))
        write_sidecar(
            folder / "clinic" / f"{name}.npz",
            (0.7, 0.02, 0.12),
            laterality=name[-1].replace("D", "R").replace("S", "L"),
        )
    (folder / "folder").mkdir()
    (folder / "garbage").write_bytes(bytes(range(256)) * 8)
    (folder / "truth").mkdir()

    def edit(seed, prepared):
        surfaces = np.stack([prepared.band[0] + 4, prepared.band[0] + 21]).astype(np.float64)
        spacing = np.array(prepared.transform.native_spacing_mm)
        np.savez(
            folder / "truth" / f"1.2.3.{seed}.npz",
            surfaces=surfaces,
            surface_names=np.array(["ilm", "bm"]),
            spacing_mm=spacing,
        )
        return darkened(seed, prepared)

    small_store(folder / "store", edit)
    grades = (f"P{i:03d}\t{GRADES[i % 3]}\t{50 + i}\n" for i in range(12))
    Path(world["labels"]).write_text("participant_id\tgrade\tage\n" + "".join(grades))
    for verb, out in (("scan", "catalog"), ("pretrain", "run"), ("embed", "embeddings")):
        words = [word.format(**world, out=world[out]) for word in BASES[verb]]
        code, said, err = octfm_here(*(words := [verb, *words]), cwd=folder)
        assert code == 0, (words, said, err)
    shutil.copytree(world["run"], world["copy"])
    return world


def files_in(folder: Path) -> set[str]:
    found = set()
    with suppress(FileNotFoundError):
        found = {str(path.relative_to(folder)) for path in folder.rglob("*")}
    return found
