"""Options shared by several verbs, and the parsers of their values."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from octfm.addresses import expect_place, refuse_credentials
from octfm.errors import one_line

if TYPE_CHECKING:
    from octfm.io.isolation import Limits


class Verbs(TyperGroup):
    """The group of all verbs; refuses command lines that contain an address with credentials."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            refuse_credentials(word)
        return super().parse_args(ctx, args)


# The parsers import inside the function: `octfm --help` must not wait for libraries of buckets and archives.
def _local(text: Any) -> Any:
    from octfm.io.location import local_path

    return local_path(text)


def place(text: Any) -> Any:
    """Parse a path on disk or an s3:// or gs:// address to a Path or BucketPath; None stays None."""
    from octfm.io.location import location

    return location(text) if text is not None else None


def local_option(*names: str, metavar: str = "PATH", **settings: Any) -> Any:
    """An option for a path on disk. Addresses are refused: otherwise a local folder named s3: would be created."""
    return typer.Option(*names, parser=_local, metavar=metavar, **settings)


def local_argument(metavar: str = "PATH", **settings: Any) -> Any:
    """An argument for a path on disk; see local_option."""
    return typer.Argument(parser=_local, metavar=metavar, **settings)


def place_option(*names: str, metavar: str = "PLACE", **settings: Any) -> Any:
    """An option for a path on disk or an address in a bucket; the verb receives the checked text."""
    return typer.Option(*names, parser=expect_place, metavar=metavar, **settings)


def place_argument(metavar: str = "PLACE", **settings: Any) -> Any:
    """An argument for a path on disk or an address in a bucket; the verb receives the checked text."""
    return typer.Argument(parser=expect_place, metavar=metavar, **settings)


Place = Any
"""Path or BucketPath: typer does not support unions."""
MAX_SEED = 2**32 - 1
"""Largest seed that NumPy, PyTorch and scikit-learn all accept."""

Config = Annotated[str, typer.Argument(help="YAML file, or name of a packaged config such as vit_s or demo.")]
Out = Annotated[Path, local_option("--out", help="Output folder.")]
OutPlace = Annotated[
    Place, typer.Option("--out", parser=place, metavar="PLACE", help="Output folder, or s3:// or gs:// address.")
]
Workers = Annotated[int | None, typer.Option(help="Parallel processes; default: one per CPU core.", min=0, max=1024)]
Device = Annotated[
    str | None, typer.Option(help="auto, cpu, cuda, mps or (pretrain) xla; default: cuda if available, else cpu.")
]
ParticipantFrom = Annotated[
    list[str] | None,
    typer.Option(
        metavar="PATTERN",
        help="Where the path contains the participant, for files that do not name one: '{participant}/{eye}/*'; "
        "repeat for several folder layouts.",
    ),
]
KeepUpsideDown = Annotated[
    bool, typer.Option("--keep-upside-down", help="Keep scans that appear upside down; default: reject them.")
]
FileSeconds = Annotated[
    float,
    typer.Option(help="Time limit for reading one file, in s; one second is added per megabyte.", min=0.1, max=1e6),
]
FileGB = Annotated[float, typer.Option(help="Memory limit for reading one file, in GB.", min=0.3, max=1e5)]
Exclude = Annotated[
    Path | None,
    local_option(
        metavar="FILE",
        help="File of volumes to leave out: one acquisition, URI or participant per line; # starts a comment.",
    ),
]
Targets = Annotated[
    list[str] | None, typer.Option(help="Label column; repeat for several. Default: every known one that is present.")
]
Order = Annotated[
    list[str] | None,
    typer.Option(help="Grades of an ordinal label column, lowest first: severity=none,mild,severe."),
]
StoreLabels = Annotated[
    Path | None, local_option(help="Label table (CSV or TSV); default: the participant data in the store.")
]
AllowSeen = Annotated[
    bool, typer.Option(help="If test participants were used in training, flag them in the result instead of stopping.")
]


def echo_line(line: str) -> None:
    """Print on one line; control characters in file names are escaped."""
    typer.echo(one_line(line))


def command_line() -> str:
    """This command as typed, for the record in a result file."""
    return " ".join(["octfm", *sys.argv[1:]])


def limits_of(file_seconds: float, file_gb: float) -> "Limits":
    """Time and memory after which the process that reads a file is ended."""
    from octfm.io.isolation import Limits

    return Limits(seconds=file_seconds, memory=int(file_gb * 1e9))


def parse_spacing(text: str | None, option: str) -> tuple[float, float, float] | None:
    """Parse `dz,dy,dx` in millimetres. Raises ConfigError."""
    from octfm.errors import ConfigError, shown

    if not text:
        return None
    try:
        z, y, x = (float(mm) for mm in text.split(","))
    except ValueError:
        z = y = x = 0.0
    if not all(1e-4 <= mm <= 100 for mm in (z, y, x)):
        raise ConfigError(f"{option}: expected dz,dy,dx in millimetres such as 0.12,0.0039,0.0115; got {shown(text)}")
    return z, y, x


def parse_orders(texts: list[str] | None) -> dict[str, tuple[str, ...]]:
    """Parse `severity=none,mild,severe` to a mapping of columns to grades. Raises ConfigError."""
    from octfm.errors import ConfigError

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
