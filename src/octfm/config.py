"""YAML files and dotted overrides to frozen pydantic models; unknown or mistyped keys stop the run, naming the nearest real key."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from octfm.errors import ConfigError


class Config(BaseModel):
    """Base of every settings model: frozen, and closed to unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


C = TypeVar("C", bound=Config)


def load(cls: type[C], source: str | Path | dict[str, Any], overrides: Iterable[str] = ()) -> C:
    """Read `source` (a YAML file, the name of a packaged config, or a mapping), apply `section.key=value`, build `cls`.

    Values of overrides are parsed as YAML, so `masks.budget=null` and `data.scanners=[topcon_triton]` mean what they say.
    """
    if isinstance(source, dict):
        where, values = "settings", source
    else:
        path = find_config(source)
        where, values = str(path), read_yaml(path)
    for override in overrides:
        _apply(values, override)
    try:
        return cls.model_validate(values)
    except ValidationError as error:
        raise ConfigError(f"{where}: {_explain(cls, error)}") from None


def find_config(name: str | Path) -> Path:
    """A file on disk; otherwise the packaged config of that base name (`configs/vit_s.yaml`, `vit_s.yaml` or `vit_s`)."""
    path = Path(name)
    if path.is_file():
        return path
    folder = Path(str(resources.files("octfm") / "configs"))
    packaged = folder / f"{path.stem}.yaml"
    if packaged.is_file():
        return packaged
    known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
    raise ConfigError(f"{name}: no such config file, and no packaged config has that name; packaged configs: {known}")


def dump(config: Config) -> str:
    """The YAML text that loads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty mapping."""
    try:
        values = _parse(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: expected a YAML text file in UTF-8, got other bytes") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected a mapping of settings, got {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """YAML 1.2 floats: plain PyYAML reads `1e-4` as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.\d*$|^[-+]?\.(inf|nan)$"),
    list("-+0123456789."),
)


def _parse(text: str) -> Any:
    return yaml.load(text, _Loader)


def _apply(values: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: expected section.key=value, for example model.depth=6")
    *sections, name = key.split(".")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {section} is a value, not a section")
    try:
        table[name] = _parse(text)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or "not valid YAML"
        raise ConfigError(
            f"override {override!r}: expected a YAML value such as 6, null or [a, b]: {problem}"
        ) from None


def _explain(cls: type[Config], error: ValidationError) -> str:
    """The first problem in one sentence, with the nearest key for a misspelt one."""
    problems = error.errors(include_url=False)
    first = min(problems, key=lambda p: p["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = known_keys(cls)
        nearest = get_close_matches(key, known, n=1, cutoff=0.5) or get_close_matches(
            key.split(".")[-1], [k.split(".")[-1] for k in known], n=1, cutoff=0.6
        )
        hint = f"did you mean {nearest[0]}?" if nearest else f"known keys: {', '.join(known)}"
        return f"unknown key {key}; {hint}{more}"
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "value_error":
        return f"{key}: {message}{more}" if key else f"{message}{more}"
    return f"{key}: {message}, got {first['input']!r}{more}"


def known_keys(cls: type[Config], prefix: str = "") -> list[str]:
    """Every dotted key of a settings model."""
    keys = []
    for name, field in cls.model_fields.items():
        sections = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
        section = next((t for t in sections if issubclass(t, Config)), None)
        keys += known_keys(section, f"{prefix}{name}.") if section else [f"{prefix}{name}"]
    return keys
