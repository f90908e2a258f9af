"""Options shared by several verbs, and the parsers of their values."""

import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

from octfm.addresses import expect_place, refuse_credentials, refuse_windows
from octfm.errors import ConfigError, one_line, shown
from octfm.io.location import is_remote, local_path
from octfm.io.location import location as place

if TYPE_CHECKING:
    from octfm.io.isolation import Limits
    from octfm.volume.volume import Laterality

T = TypeVar("T")

RANGE = re.compile(r"(?<=[\[ ])([\d.e+-]+)<=x<=([\d.e+-]+)")
"""How click prints the values that a number may have."""


def _in_words(found: re.Match[str]) -> str:
    low, high = (float(text) for text in found.groups())
    return f"{low:,.12g} to {high:,.12g}"


class Verbs(TyperGroup):
    """The group of all verbs; refuses command lines that contain an address with credentials."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for before, word in pairwise(["", *args]):
            refuse_credentials(word, before if re.fullmatch("--[a-z-]+", before) else "")
        return super().parse_args(ctx, args)


class Verb(TyperCommand):
    """A verb. Its help names arguments by their metavar alone, and ends with the examples of the docstring."""

    def __init__(self, *args: Any, **settings: Any):
        about, _, examples = (settings.pop("help", None) or "").partition("\n\nExamples:\n")
        super().__init__(*args, help=about, **settings)
        self.examples = [line.strip() for line in examples.splitlines() if line.strip()]

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        arguments = [param for param in self.get_params(ctx) if param.param_type_name == "argument"]
        names = [f"{param.metavar}{'...' if param.nargs != 1 else ''}" for param in arguments]
        return [
            "[OPTIONS]",
            *(name if param.required else f"[{name}]" for name, param in zip(names, arguments, strict=True)),
        ]

    def get_short_help_str(self, limit: int = 45) -> str:
        return " ".join((self.help or "").partition("\n\n")[0].split())

    def format_options(self, ctx: Any, formatter: Any) -> None:
        # Not typer's: it adds Python's name of the type to arguments, in words that differ between its versions.
        rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
        for param in self.get_params(ctx):
            if record := param.get_help_record(ctx):
                kind = param.param_type_name
                name, about = record if kind == "option" else (str(param.metavar), record[1])
                rows[kind].append((name, RANGE.sub(_in_words, about)))
        for title, found in (("Arguments", rows["argument"]), ("Options", rows["option"])):
            if found:
                with formatter.section(title):
                    formatter.write_dl(found)

    def format_epilog(self, ctx: Any, formatter: Any) -> None:
        with formatter.section("Examples" if len(self.examples) > 1 else "Example"):
            for example in self.examples:
                formatter.write(f"{'':{formatter.current_indent}}{example}\n")


class Alone(Verb):
    """A verb whose work ranks cannot share: each would do all of it and write the same files."""

    def invoke(self, ctx: Any) -> Any:
        from octfm.io.ranks import world_size

        if (world := world_size()) > 1:
            raise ConfigError(
                f"{ctx.info_name}: WORLD_SIZE is {world}, but only octfm pretrain and finetune share work among ranks; "
                "start everything else without torchrun"
            )
        return super().invoke(ctx)


def _packaged_configs(incomplete: str) -> list[str]:
    """Completions of CONFIG. Where none fits, the shell completes names of files."""
    from importlib.resources import files

    names = (file.name.removesuffix(".yaml") for file in (files("octfm") / "configs").iterdir())
    return sorted(name for name in names if name.startswith(incomplete))


_OF_FILES = (".csv", ".tsv", ".txt", ".xlsx", ".xls", ".ods", ".parquet", ".json", ".html", ".pdf", ".npy", ".npz")


def is_named_as_file(out: Any) -> bool:
    """Whether an output has a name that only a table or a document would have, and is not an existing folder."""
    return Path(str(out)).suffix.lower() in _OF_FILES and not Path(str(out)).is_dir()


def _checked(parse: Callable[[Any], Any], *, folder: bool = False) -> Callable[[Any], Any]:
    """`parse` that also refuses an empty text, a Windows path and, of a `folder`, the name of a file: before hours of
    work, not when the first result is written."""

    @functools.wraps(parse)
    def parse_checked(text: Any) -> Any:
        if text == "":
            # typer adds the name of the option.
            raise typer.BadParameter("expected a path, got an empty text; a variable of the shell may not be set")
        refuse_windows(str(text))
        found = parse(text)
        if folder and (Path(str(found)).is_file() or is_named_as_file(found)):
            raise ConfigError(f"--out {found}: expected a folder, got a file; choose another path")
        return found

    return parse_checked


def option(metavar: str, about: str, *names: str, parser: Callable[[Any], Any] | None = None, **settings: Any) -> Any:
    """An option with a value; named after its parameter if it has no `names`. `parser`: for a path or an address; of
    --out FOLDER it refuses a file."""
    checked = parser and _checked(parser, folder=(names, metavar) == (("--out",), "FOLDER"))
    return typer.Option(*names, metavar=metavar, help=about, parser=checked, **settings)


def argument(metavar: str, about: str, *, parser: Callable[[Any], Any] | None = None, **settings: Any) -> Any:
    return typer.Argument(metavar=metavar, help=about, parser=parser and _checked(parser), **settings)


def flag(about: str, *names: str) -> Any:
    """An option without a value; --no-NAME as well if it has no `names`."""
    return typer.Option(*names, help=about)


def local_option(metavar: str, about: str, *names: str) -> Any:
    """An option for a path on disk. Addresses are refused: otherwise a local folder named s3: would be created."""
    return option(metavar, about, *names, parser=local_path)


def page_option(about: str, *names: str, parser: Callable[[Any], Any] = local_path) -> Any:
    """An option for the HTML page that a verb writes; refuses a file that is no page, such as the scan to be shown."""

    @functools.wraps(parser)
    def parse(text: Any) -> Any:
        found = parser(text)
        if isinstance(found, Path) and found.is_file():
            with found.open("rb") as file:
                begins = file.read(64)
            # Editors may put a byte order mark first.
            if begins and not re.match(rb"(\xef\xbb\xbf)?\s*<(!doctype )?html", begins, re.IGNORECASE):
                raise ConfigError(f"{found}: is there already and is no HTML page; choose another name for --out")
        return found

    return option("FILE", about, *names, parser=parse)


def local_argument(metavar: str, about: str) -> Any:
    """An argument for a path on disk; see local_option."""
    return argument(metavar, about, parser=local_path)


def place_option(metavar: str, about: str, *names: str) -> Any:
    """An option for a path on disk or an address in a bucket; the verb receives the checked text."""
    return option(metavar, about, *names, parser=expect_place)


def place_argument(metavar: str, about: str) -> Any:
    """An argument for a path on disk or an address in a bucket; the verb receives the checked text."""
    return argument(metavar, about, parser=expect_place)


Place = Any
"""Path or BucketPath: typer does not support unions."""
MAX_SEED = 2**32 - 1
"""Largest seed that NumPy, PyTorch and scikit-learn all accept."""


LayoutsBelow = Annotated[
    Literal["any", "line"], option("LAYOUTS", "any, or line: every image in a folder is a single B-scan.")
]


def _settings_of(verb: str) -> Callable[[str], str]:
    """A check of CONFIG that raises ConfigError if a file holds the settings of another verb, and names that verb."""

    def check(config: str) -> str:
        from octfm.config import find_config, read_yaml
        from octfm.pretraining.settings import PretrainConfig
        from octfm.tasks.finetune_settings import FinetuneConfig

        keys = read_yaml(find_config(config)).keys()
        verbs = {"pretrain": PretrainConfig, "finetune": FinetuneConfig}
        fitting = [name for name, settings in verbs.items() if keys <= settings.model_fields.keys()]
        if fitting and verb not in fitting:
            raise ConfigError(f"{config}: settings of octfm {fitting[0]}, which takes it: octfm {fitting[0]} {config}")
        return config

    return check


def config_argument(verb: str, about: str) -> Any:
    """The argument CONFIG: settings of `octfm pretrain` or `octfm finetune`."""
    return typer.Argument(metavar="CONFIG", help=about, autocompletion=_packaged_configs, callback=_settings_of(verb))


Config = Annotated[str, config_argument("pretrain", "YAML file, or name of a packaged config such as vit_s or demo.")]
Out = Annotated[Path, local_option("FOLDER", "Output folder.", "--out")]
OutPlace = Annotated[Place, option("FOLDER", "Output folder, or s3:// or gs:// address.", "--out", parser=place)]
Workers = Annotated[int | None, option("N", "Parallel processes; default: one per CPU core.", min=0, max=1024)]
Device = Annotated[
    str | None, option("DEVICE", "auto, cpu, cuda, mps or (pretrain) xla; default: cuda if available, else cpu.")
]
_LENGTHS = (14, 40)
"""octfm.layers.corrections.AXIAL_LENGTH_MM, without its slow import."""
AxialLength = Annotated[
    float | None,
    option(
        "MM",
        "Axial length of this eye: rescales lateral millimetres, otherwise the instrument's nominal ones.",
        min=_LENGTHS[0],
        max=_LENGTHS[1],
    ),
]


def _length_or_table(text: Any) -> Any:
    """A length in mm, or the path of a table."""
    try:
        length = float(text)
    except ValueError:
        return local_path(text)
    low, high = _LENGTHS
    if not low <= length <= high:
        raise typer.BadParameter(f"{text} is not in the range {low} to {high}.")
    return length


AxialLengths = Annotated[
    Any,
    option(
        "MM|TABLE",
        "Axial length of this eye, or of many: a CSV with axial_length_mm and source, or participant_id and "
        "laterality. Rescales lateral millimetres, otherwise the instrument's nominal ones.",
        parser=_length_or_table,
    ),
]
ParticipantFrom = Annotated[
    list[str] | None,
    option(
        "PATTERN",
        "Where the path contains the participant, for files that do not name one: '{participant}/{eye}/*'; "
        "{label} gives a label column, {split} uses folders train, val and test. Repeat for several folder layouts.",
    ),
]
KeepUpsideDown = Annotated[
    bool, flag("Keep scans that appear upside down; default: reject them.", "--keep-upside-down")
]
FileSeconds = Annotated[
    float,
    option(
        "SECONDS",
        "Time limit for reading one file; one second is added per megabyte, and two minutes in a bucket.",
        min=0.1,
        max=1e6,
    ),
]
FileGB = Annotated[float, option("GB", "Memory limit for reading one file.", min=0.3, max=1e5)]
Exclude = Annotated[
    Path | None,
    local_option(
        "FILE", "File of volumes to leave out: one acquisition, URI or participant per line; # starts a comment."
    ),
]
Targets = Annotated[
    list[str] | None, option("COLUMN", "Label column; repeat for several. Default: every known one that is present.")
]
Order = Annotated[
    list[str] | None,
    option("COLUMN=GRADES", "Grades of an ordinal label column, lowest first: severity=none,mild,severe."),
]
StoreLabels = Annotated[
    Path | None, local_option("TABLE", "Labels (CSV or TSV); default: the participant data in the store.")
]
Store = Annotated[
    str | None,
    place_option(
        "STORE", "Prepared store, also s3:// or gs://; short for data.store=STORE, in finetune and segment store=STORE."
    ),
]
Steps = Annotated[int | None, option("N", "Length in optimizer steps; short for steps=N.", min=1, max=10_000_000)]
Epochs = Annotated[
    float | None, option("N", "Length in passes over the training volumes; short for epochs=N.", min=1e-6, max=1e6)
]
AllowSeen = Annotated[
    bool,
    flag(
        "If test participants were used in training, or nobody can tell because weights were published without their "
        "key, say so in the result instead of stopping."
    ),
]


def with_options(overrides: list[str] | None, options: dict[str, str | float | None]) -> list[str]:
    """The KEY=VALUE words of a command line, then options that set a key (None: not given).

    Raises ConfigError if a setting is given both ways.
    """

    words = overrides or []
    given = {key: value for key, value in options.items() if value is not None}
    for key in given:
        if any(word.partition("=")[0] == key for word in words):
            raise ConfigError(f"--{key.rpartition('.')[2]} and {key}= are the same setting; give one of them")
    # Overrides are YAML, and JSON is YAML.
    return [*words, *(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items())]


def pretraining_words(
    overrides: list[str] | None, store: str | None, steps: int | None, epochs: float | None
) -> list[str]:
    """Overrides of a pretraining config with the options --store, --steps and --epochs. Raises ConfigError."""
    from octfm.pretraining.settings import DEFAULT_STEPS

    words = with_options(overrides, {"data.store": store, "steps": steps, "epochs": epochs})
    # Checked here, because the settings cannot tell a given number of steps from an equal default.
    pairs = [word.partition("=") for word in words]
    if {"steps", "epochs"} <= {name.strip() for name, _, value in pairs if value.strip().lower() not in ("null", "~")}:
        raise ConfigError("steps and epochs both say how long the run is; give one of them")
    # The length in the config gives way to the option.
    other = {"epochs=null": steps, f"steps={DEFAULT_STEPS}": epochs}
    return [*(word for word, option in other.items() if option is not None), *words]


def refuse(context: typer.Context, options: Iterable[str], what: str) -> None:
    """Raise ConfigError if one of these parameters was given, because `what` would ignore it; defaults do not count."""
    sources = {name: context.get_parameter_source(name) for name in options}
    given = [f"--{name.replace('_', '-')}" for name, source in sources.items() if source and source.name != "DEFAULT"]
    if given:
        raise ConfigError(f"{what} and does nothing with {', '.join(given)}; leave out one or the other")


def echo_line(*lines: object, err: bool = False) -> None:
    """Print each on one line, to stderr with `err`. Control characters in names of files and facts of headers, which
    could command the terminal, are escaped; so this is the only way in which verbs print."""
    for line in lines:
        typer.echo(one_line(line), err=err)


def command_line() -> str:
    """This command as typed, on one line, for the record in a result file; undecodable bytes are escaped."""
    return one_line(" ".join(["octfm", *sys.argv[1:]]))


def limits_of(file_seconds: float, file_gb: float) -> "Limits":
    """Limits of time and memory above which the process that reads a file is ended."""
    from octfm.io.isolation import Limits

    return Limits(seconds=file_seconds, memory=int(file_gb * 1e9))


def volumes_in(
    words: list[str], limits: "Limits", layouts: str = "any", nor: str = ""
) -> "dict[str, Laterality | None]":
    """Every file named and every volume in the folders named → the eye that its path names. Prints how many files in
    folders are left out, and why. `layouts`: any, line or raster. Raises ConfigError, with `nor` in its text, if there
    are none."""
    from octfm.catalog.participants.patterns import eye_in_path, eyes_in_paths
    from octfm.catalog.volumes import volumes_below
    from octfm.volume.volume import LAYOUTS, Layout

    taken: list[Layout] = [each for each in LAYOUTS if layouts in ("any", each)]
    sources: dict[str, Laterality | None] = {}
    for word in words:
        refuse_windows(word)
        place = expect_place(word)
        if not Path(place).is_dir():
            sources.setdefault(place, None if is_remote(place) else eye_in_path(Path(place)))
            continue
        if (Path(place) / "store.json").is_file():
            raise ConfigError(f"{place}: a prepared store; expected scans, give the files that it was made from")
        folder = Path(os.path.abspath(place))  # noqa: PTH100
        found, left_out = volumes_below(folder, limits, layouts=taken)
        first = {reject.code: reject.sentence for reject in reversed(left_out)}
        for code, count in sorted(Counter(reject.code for reject in left_out).items()):
            which = f"such as {first[code]}; octfm scan names all" if count > 1 else first[code]
            echo_line(f"{place}: {count} left out, {code}: {which}")
        eyes = eyes_in_paths(found, folder)
        sources |= {uri: eyes.get(uri) for uri in found}
    if not sources:
        raise ConfigError(
            f"{', '.join(words)}: no scan in it{nor}; check the path, or run octfm scan, which lists every file with "
            "the reason"
        )
    return sources


def parse_spacing(text: str | None, option: str) -> tuple[float, float, float] | None:
    """Parse `dz,dy,dx` in millimetres. Raises ConfigError."""
    if not text:
        return None
    expected = f"{option}: expected dz,dy,dx in millimetres such as 0.12,0.0039,0.0115"
    spacing = three(text, ",", float, expected)
    if not all(1e-4 <= mm <= 100 for mm in spacing):
        raise ConfigError(f"{expected}; got {shown(text)}")
    return spacing


def three(text: str, separator: str, number: Callable[[str], T], expected: str) -> tuple[T, T, T]:
    """The three numbers in a text. Raises ConfigError, which begins with what was `expected`."""
    try:
        first, second, third = map(number, text.split(separator))
    except ValueError:
        raise ConfigError(f"{expected}; got {shown(text)}") from None
    return first, second, third


def parse_orders(texts: list[str] | None) -> dict[str, tuple[str, ...]]:
    """Parse `severity=none,mild,severe` to a mapping of columns to grades. Raises ConfigError."""
    orders = {}
    for text in texts or []:
        column, equals, grades = text.partition("=")
        orders[column] = tuple(grade.strip() for grade in grades.split(","))
        if not equals or len(set(orders[column])) < 3:
            raise ConfigError(
                "--order: expected a column and three or more grades, lowest first, such as "
                f"severity=none,mild,severe; got {text!r}"
            )
    return orders
