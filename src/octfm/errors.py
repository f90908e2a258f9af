"""The one error family: every message says where, what was expected, what was found and what to do next."""

import re
from collections.abc import Callable

Echo = Callable[[str], None]
"""Shows the user a line of text, such as `print`."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: object) -> str:
    """`text` as a terminal can show it on one line: control characters, line breaks and bytes that are no text are escaped."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


def shown(value: object, most: int = 80) -> str:
    """repr(value) on one line, its middle left out where it is long."""
    try:
        text = one_line(repr(value))
    except ValueError:  # an int of more digits than Python writes
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 4 :]}"


class OctfmError(Exception):
    """A problem the user can act on. The command line prints it as one line and exits with code 1."""

    elsewhere = False
    """It came up on another rank, which says it."""


class ConfigError(OctfmError):
    """A configuration that cannot be run as written."""


class ReadError(OctfmError):
    """A file that cannot become a Volume. `code` is the reason code that ends up in rejects.parquet."""

    def __init__(self, code: str, message: str, refers_to: str = ""):
        super().__init__(message)
        self.code, self.refers_to = code, refers_to

    def __reduce__(self):
        return type(self), (self.code, str(self), self.refers_to)  # it travels between processes


class BucketError(OctfmError):
    """A bucket that refuses or does not answer, after everything was tried; the data in it are not known to be bad."""


class StoreError(OctfmError):
    """A prepared store that is missing, damaged, of another version, or contradicts what is asked of it."""


class CheckpointError(OctfmError):
    """A checkpoint that is missing, damaged, of another version, or contradicts what is asked of it."""


class EvaluationError(OctfmError):
    """An evaluation that would not mean what it seems to mean (leakage, too few participants, no labels)."""


class TrainingError(OctfmError):
    """A run that cannot go on without doing harm."""


class Preempted(OctfmError):
    """A run that was asked to stop and has saved what it had. The command line exits with code 75: run again to continue."""
