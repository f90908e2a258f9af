"""Options that several verbs share."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from octfm.data.isolation import Limits

FileSeconds = Annotated[
    float,
    typer.Option(
        help="Give up a file that takes longer to read; large ones have one more per megabyte.", min=0.1, max=1e6
    ),
]
FileGB = Annotated[float, typer.Option(help="Give up a file that needs more memory to read (GB).", min=0.3, max=1e5)]


def limits_of(file_seconds: float, file_gb: float) -> "Limits":
    """What one file may cost before the process that reads it is ended."""
    from octfm.data.isolation import Limits

    return Limits(seconds=file_seconds, memory=int(file_gb * 1e9))
