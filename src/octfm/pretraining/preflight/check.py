"""One row of the doctor's table: what was looked at, how it is, what was measured and what to do."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Check:
    """A finding. `advice` is empty only where there is nothing to do."""

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
