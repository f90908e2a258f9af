"""How many ranks a job has and which of them this process is, from the variables that torchrun sets."""

import os

from octfm.errors import ConfigError


def world_size() -> int:
    """The number of ranks; 1 without torchrun, or where a template leaves WORLD_SIZE empty. Raises ConfigError."""
    return _number("WORLD_SIZE", least=1, otherwise=1)


def rank() -> int:
    """The number of this rank, from 0. Raises ConfigError."""
    return _number("RANK", least=0, otherwise=0)


def _number(name: str, least: int, otherwise: int) -> int:
    text = os.environ.get(name, "").strip()
    if not text:
        return otherwise
    if not text.isdecimal() or int(text) < least:
        raise ConfigError(f"{name}: expected a number from {least}, got {text!r}; unset it, or start with torchrun")
    return int(text)
