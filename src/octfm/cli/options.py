"""Options that several verbs share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from octfm.addresses import expect_place, refuse_credentials

if TYPE_CHECKING:
    from octfm.io.isolation import Limits


class Verbs(TyperGroup):
    """The verbs of octfm: no word of the command line may be an address with credentials in it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            refuse_credentials(word)
        return super().parse_args(ctx, args)


def _local(text: Any) -> Any:
    from octfm.io.location import local_path

    return local_path(text)


def local_option(*names: str, **settings: Any) -> Any:
    """An option that names a path on a disk: an address is refused, so that no folder called s3: is made."""
    settings.setdefault("metavar", "PATH")
    return typer.Option(*names, parser=_local, **settings)


def local_argument(**settings: Any) -> Any:
    """The same as an argument."""
    settings.setdefault("metavar", "PATH")
    return typer.Argument(parser=_local, **settings)


def place_option(*names: str, **settings: Any) -> Any:
    """An option that names a path on a disk or an address in a bucket, as text."""
    settings.setdefault("metavar", "PLACE")
    return typer.Option(*names, parser=expect_place, **settings)


def place_argument(**settings: Any) -> Any:
    """The same as an argument."""
    settings.setdefault("metavar", "PLACE")
    return typer.Argument(parser=expect_place, **settings)


FileSeconds = Annotated[
    float,
    typer.Option(
        help="Give up a file that takes longer to read; large ones have one more per megabyte.", min=0.1, max=1e6
    ),
]
FileGB = Annotated[float, typer.Option(help="Give up a file that needs more memory to read (GB).", min=0.3, max=1e5)]

Exclude = Annotated[
    Path | None,
    local_option(
        metavar="FILE",
        help="Leave out the volumes that FILE names: an acquisition, uri or participant per line, # for comments.",
    ),
]


def limits_of(file_seconds: float, file_gb: float) -> "Limits":
    """What one file may cost before the process that reads it is ended."""
    from octfm.io.isolation import Limits

    return Limits(seconds=file_seconds, memory=int(file_gb * 1e9))
