"""All errors for users. Every message says where, what was expected, what was found and what to do next."""

import re
from collections.abc import Callable, Sequence

Echo = Callable[[str], None]
"""Shows the user a line of text, such as `print`."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def one_line(text: object) -> str:
    """`text` on one line, safe for a terminal: control characters, line breaks and undecodable bytes are escaped."""
    return _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


def reason_of(error: object, most: int | None = None) -> str:
    """What an exception of another library says, on one line of at most `most` characters; its type if it says
    nothing."""
    return " ".join(str(error).split())[:most] or type(error).__name__


def shown(value: object, most: int = 80) -> str:
    """repr(value) on one line, with the middle of long values left out."""
    try:
        text = one_line(repr(value))
    except ValueError:  # Python refuses to print an int of more than 4,300 digits
        return "a number of thousands of digits"
    return text if len(text) <= most else f"{text[: most // 2]} … {text[-most // 4 :]}"


def require_objects(what: str, objects: object, methods: Sequence[str]) -> None:
    """Raises ConfigError unless these are objects with the methods; `what` they are, in the plural: readers."""
    own = f"My{what.removesuffix('s').title()}()"
    if not isinstance(objects, Sequence) or isinstance(objects, str):
        raise ConfigError(f"{what}: expected a list of {what}, got {shown(objects)}; write {what}=[{own}]")
    for one in objects:
        if isinstance(one, type):
            raise ConfigError(f"{what}: expected objects, got the class {one.__name__}; write {one.__name__}()")
        if absent := [name for name in methods if not callable(getattr(one, name, None))]:
            name = getattr(one, "__name__", type(one).__name__)
            raise ConfigError(f"{what}: {name} has no method {', '.join(absent)}")


class OctfmError(Exception):
    """A problem that the user can act on. The command line prints it as one line and exits with code 1."""

    elsewhere = False
    """Whether another rank raised the error and reports it."""

    def __reduce__(self):
        # Exceptions are copied and pickled by a call with `args`, which need not be those of a class with facts of its
        # own; they travel from worker processes.
        return _again, (type(self), self.args, vars(self))


def _again(kind: type[OctfmError], args: tuple[object, ...], facts: dict[str, object]) -> OctfmError:
    error = kind.__new__(kind, *args)
    vars(error).update(facts)
    return error


class ConfigError(OctfmError):
    """A configuration that cannot be run as written."""


class ReadError(OctfmError):
    """A file that cannot become a Volume. `code` is its reason code in rejects.parquet."""

    def __init__(self, code: str, message: str, refers_to: str = ""):
        super().__init__(message)
        self.code, self.refers_to = code, refers_to


class BucketError(OctfmError):
    """A bucket that refuses or does not answer after all retries; says nothing about the data in it."""


class StoreError(OctfmError):
    """A prepared store that is missing, damaged, of another version, or does not match the request."""


class CheckpointError(OctfmError):
    """A checkpoint that is missing, damaged, of another version, or does not match the request."""


class EvaluationError(OctfmError):
    """An evaluation whose result would be misleading (leakage, too few participants, no labels).

    `public` is the reason in a sentence without paths, ids and values, for pages that may be passed around; may be
    empty.
    """

    def __init__(self, message: str, public: str = ""):
        super().__init__(message)
        self.public = public


class UnknownColumn(EvaluationError):
    """A label column that was named, and that neither scans nor table have."""


class CorrectionsError(EvaluationError):
    """Corrections by hand of another scan or network, or not as the viewer saves them."""


class ExportError(EvaluationError):
    """A segmentation that cannot be written for this scan; that of another one may be."""


class TrainingError(OctfmError):
    """A run that cannot continue without doing harm."""


BAD_INPUT = (OctfmError, ValueError, ArithmeticError, LookupError, RuntimeError, OSError, MemoryError)
"""What a bad file can cause in a decoder or in numpy. Not TypeError and AttributeError: bugs stop the run."""


class Preempted(OctfmError):
    """A run that was interrupted and has saved a checkpoint. The command line exits with code 75: run it again."""
