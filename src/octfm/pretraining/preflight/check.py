"""One row of the doctor's table: the check's name, its status, what was measured and what to do."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """The result of one check. `advice` is empty if it passed."""

    name: str
    status: Literal["PASS", "WARN", "FAIL"]
    measured: str
    advice: str = ""


def passed(name: str, measured: str) -> Check:
    return Check(name, "PASS", measured)


def warn(name: str, measured: str, advice: str) -> Check:
    return Check(name, "WARN", measured, advice)


def fail(name: str, measured: str, advice: str) -> Check:
    return Check(name, "FAIL", measured, advice)


def fail_with(name: str, error: Exception, advice: str = "") -> Check:
    """A failed check from an error, whose message is "what is wrong; what to do"; `advice` if it has no second part."""
    measured, _, remedy = str(error).partition("; ")
    return fail(name, measured, remedy or advice)
