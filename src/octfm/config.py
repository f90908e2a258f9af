"""Load settings from YAML files and overrides into frozen pydantic models; unknown keys are errors with suggestions."""

import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from difflib import get_close_matches
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from octfm.addresses import expect_local, expect_place, in_home, mask, path_text, refuse_credentials, refuse_windows
from octfm.errors import ConfigError, reason_of, shown

MAX_BYTES = 1_000_000
"""Largest config file that is read; the longest packaged one has 3,000."""
MAX_NODES = 100_000
"""Most values in a config file after expanding its aliases."""

Seed = Annotated[int, Field(ge=0, le=2**32 - 1)]
"""A range that NumPy, PyTorch and scikit-learn all accept."""
LearningRate = Annotated[float, Field(gt=0, le=1)]
"""At most 1, because AdamW moves every weight by about this much per step."""
Seconds = Annotated[float, Field(gt=0, le=1e7)]
"""Up to four months."""


class Config(BaseModel):
    """Base of every settings model: immutable, without unknown keys, NaN or infinity."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        revalidate_instances="always",  # model_copy(update=…) of a caller checks nothing
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        hide_input_in_errors=True,
    )

    def __init__(self, /, **values: Any):
        try:
            super().__init__(**values)
        except ValidationError as error:
            name = type(self).__name__
            _refuse_credentials_in(values, name)
            raise ConfigError(_sentence(name, *_explain(type(self), error))) from None

    # Pydantic validates sections and `model_validate` without it, so that `load` names the whole key.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @model_validator(mode="before")
    @classmethod
    def _refuse_lookalikes(cls, values: Any) -> Any:
        """Refuse the text None for null, which would become the name of a folder (F6), and true for a number."""
        for name, value in values.items() if isinstance(values, dict) else ():
            kinds = _kinds(cls.model_fields[name].annotation) if name in cls.model_fields else ()
            if isinstance(value, str) and value.strip().lower() in ("none", "null") and type(None) in kinds:
                raise ValueError(f"{name} is the text {value!r}; write null for no value")
            if isinstance(value, bool) and bool not in kinds and (int in kinds or float in kinds):
                raise ValueError(f"{name}: expected a number, got {str(value).lower()}")
        return values


def _checked(expect: Callable[[str], str]) -> AfterValidator:
    def check(text: str) -> str:
        try:
            refuse_windows(text)
            place = expect(text)
        except ConfigError as error:
            raise ValueError(str(error)) from None  # pydantic names the key
        # runs/a/, as a shell completes it, is runs/a: a run that began with one resumes with the other.
        return re.sub("(?<=[^:/])/+$", "", place)

    return AfterValidator(check)


Place = Annotated[str, _checked(expect_place)]
"""Type of a setting: a path on a disk, s3://bucket/… or gs://bucket/…, without credentials."""
LocalPlace = Annotated[str, _checked(expect_local)]
"""Type of a setting: a path on a disk."""


def _kinds(annotation: Any) -> set[Any]:
    """The types in an annotation, without Annotated and Union."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if isinstance(annotation, UnionType) or get_origin(annotation) is Union:
        return {kind for part in get_args(annotation) for kind in _kinds(part)}
    return {annotation}


C = TypeVar("C", bound=Config)


def load(
    cls: type[C],
    source: str | Path | dict[str, Any],
    overrides: Iterable[str] = (),
    context: dict[str, Any] | None = None,
) -> C:
    """Build `cls` from a YAML file, the name of a packaged config or a mapping, with overrides `section.key=value`.

    Values of overrides are YAML: `masks.budget=null`, `data.scanners=[topcon_triton]`. `context` is passed to the
    validators of `cls`. Raises ConfigError.
    """
    if isinstance(source, dict):
        where, values = "settings", deepcopy(source)
    else:
        path = find_config(source)
        where, values = str(path), read_yaml(path)
    overrides = (overrides,) if isinstance(overrides, str) else tuple(overrides)
    for override in overrides:
        _apply(values, override)
    _refuse_credentials_in(values, where)
    try:
        return cls.model_validate(values, context=context)
    except ValidationError as error:
        key, problem = _explain(cls, error)
        given = _override_of(key, problem, overrides)
        place = f"override {shown(given)}" if given else where
        raise ConfigError(_sentence(place, key, problem, named=key == given)) from None


def _sentence(place: str, key: str, problem: str, named: bool = False) -> str:
    named = named or not key or problem.startswith("unknown key")
    return f"{place}: {problem}" if named else f"{place}: {key}: {problem}"


def _override_of(place: str, problem: str, overrides: Iterable[str]) -> str:
    """The key of the override that set what is wrong: one in that section that the problem names, else the section;
    empty if the file did."""
    keys = [override.partition("=")[0] for override in overrides]
    around = [key for key in keys if place and f"{place}.".startswith(f"{key}.")]
    inside = [key for key in keys if not place or key.startswith(f"{place}.")]
    named = [key for key in inside if problem.startswith("unknown key") or _names(problem, key)]
    return (named or around[::-1] or [""])[0]


def _names(problem: str, key: str) -> bool:
    """Whether the words of a problem include this key, or its last part alone."""
    return re.search(rf"(?<![\w.])({key}|{key.rpartition('.')[2]})\b", problem) is not None


def _refuse_credentials_in(values: Any, where: str, key: str = "") -> None:
    """Check all texts and paths in `values` before a message about another problem could repeat a secret."""
    if isinstance(values, str | Path):
        try:
            refuse_credentials(str(values))
        except ConfigError as error:
            raise ConfigError(f"{where}: {key}: {error}") from None
    elif isinstance(values, dict):
        for name, value in values.items():
            _refuse_credentials_in(str(name), where, key or "a key")
            _refuse_credentials_in(value, where, f"{key}.{name}".lstrip("."))
    elif isinstance(values, list | tuple):
        for value in values:
            _refuse_credentials_in(value, where, key)


def find_config(name: str | Path) -> Path:
    """The file of that name, else the packaged config (`configs/vit_s.yaml`, `vit_s.yaml` or `vit_s`)."""
    refuse_credentials(name := path_text(name))
    path = Path(in_home(name))
    if path.is_file():
        return path
    folder = Path(str(resources.files("octfm") / "configs"))
    packaged = folder / f"{path.stem}.yaml"
    if packaged.is_file():
        return packaged
    known = sorted(p.stem for p in folder.glob("*.yaml"))
    close = get_close_matches(path.stem, known, n=1, cutoff=0.8)
    hint = f"did you mean {close[0]}?" if close else f"packaged configs: {', '.join(known)}"
    raise ConfigError(f"{name}: no such config file, and no packaged config has that name; {hint}")


def dump(config: Config) -> str:
    """YAML text that loads back to an equal config."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError for anything else."""
    if (size := path.stat().st_size) > MAX_BYTES:
        raise ConfigError(f"{path}: expected a YAML file of settings, of at most {MAX_BYTES:,} bytes, got {size:,}")
    return parse_yaml(path.read_bytes(), str(path))


def parse_yaml(content: bytes, where: str) -> dict[str, Any]:
    """The mapping in the content of a YAML file. Raises ConfigError, which names `where`, for anything else, an empty
    file among it: an editor may have emptied it a moment ago to write it again."""
    try:
        values = _parse(content.decode("utf-8"))
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: expected a YAML text file in UTF-8, got other bytes") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}: not valid YAML: {mask(_problem(error))}") from None
    if values is None:
        raise ConfigError(f"{where}: holds no settings; write some and save it again")
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: expected a mapping of settings, got {type(values).__name__}")
    return values


class _Loader(yaml.SafeLoader):
    """YAML as people read it: 1e-4 is a number, a date is text, keys are unique, and nothing contains itself.

    PyYAML follows YAML 1.1, in which 1e-4 is text, 010 is 8, 1:30 is 90 and 2024-01-01 is a date object.
    """

    def compose_document(self) -> yaml.Node | None:
        root = super().compose_document()
        if root is not None:
            _require_finite(root)
        return root

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()
        if tag := getattr(event, "tag", None):
            raise yaml.MarkedYAMLError(problem=f"the tag {tag}; write the value alone", problem_mark=event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[str, int] = {}
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.tag != "tag:yaml.org,2002:str":
                found = key.value if isinstance(key, yaml.ScalarNode) else f"a {key.id}"
                raise _at(
                    key, f"expected the name of a setting before the colon, got {shown(found)}; quote it if it is text"
                )
            if key.value in first:
                raise _at(key, f"{key.value} is set twice (first in line {first[key.value]}); keep one")
            first[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: yaml.ScalarNode | yaml.MappingNode) -> Any:
        value = super().construct_scalar(node)  # pyright: ignore[reportArgumentType]
        if isinstance(value, str) and re.search(r"[\0\ud800-\udfff]", value):
            raise _at(node, f"{shown(value)} contains a null or surrogate character, which is not text; remove it")
        return value

    def construct_number(self, node: yaml.ScalarNode) -> int:
        if re.match(r"[-+]?0\d", node.value):
            raise _at(node, f"{node.value}: a number with a leading zero; remove the zero, or quote it if it is text")
        try:
            return self.construct_yaml_int(node)
        except ValueError:  # Python converts at most 4,300 digits
            raise _at(node, f"a number of {len(node.value):,} digits, too long to read") from None


# Patterns by which PyYAML types unquoted scalars. Dates stay text; int and float get stricter patterns below.
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, pattern) for tag, pattern in known if tag.rpartition(":")[2] not in ("timestamp", "int", "float")]
    for letter, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d[\d_]*(\.\d*)?|\.\d+)([eE][-+]?\d+)$|^[-+]?\d[\d_]*\.\d*$|^[-+]?\.\d+$|^[-+]?\.(inf|nan)$"),
    list("-+0123456789."),
)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"^[-+]?(\d[\d_]*|0x[\da-fA-F_]+|0b[01_]+)$"), list("-+0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_number)


def _require_finite(root: yaml.Node) -> None:
    """Refuse values that contain themselves, and aliases that expand beyond MAX_NODES ("billion laughs")."""
    # Depth first with an explicit stack: (node, False) on entry, (node, True) when all its parts have been counted.
    expanded: dict[int, int] = {}
    entered: set[int] = set()
    pending = [(root, False)]
    while pending:
        node, left = pending.pop()
        inside = node.value if isinstance(node, yaml.SequenceNode) else ()
        if isinstance(node, yaml.MappingNode):
            inside = [part for pair in node.value for part in pair]
        if left:
            entered.discard(id(node))
            expanded[id(node)] = 1 + sum(expanded[id(part)] for part in inside)
            if expanded[id(node)] > MAX_NODES:
                raise _at(node, f"expands to more than {MAX_NODES:,} values; write it out without aliases")
        elif id(node) in entered:
            raise _at(node, "a value that contains itself; write it out without aliases")
        elif id(node) not in expanded:
            entered.add(id(node))
            pending.append((node, True))
            pending.extend((part, False) for part in inside)


def _at(node: yaml.Node, problem: str) -> yaml.YAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def _problem(error: yaml.YAMLError) -> str:
    """The problem and its line."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem:
        return reason_of(error)
    return f"line {mark.line + 1}: {problem}" if mark else problem


def _parse(text: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("values nested hundreds deep") from None


def _typed(text: str) -> Any:
    """The value of an override. A name stands as it was typed: # begins no comment, and a newline is no space."""
    value, plain = _parse(text), text.strip(" \t\r\n")
    named = isinstance(value, str) and plain[0] not in "\"'|>&*"
    return plain if named or plain.startswith("#") else value


def _apply(values: dict[str, Any], override: str) -> None:
    refuse_credentials(override)
    key, equals, text = override.partition("=")
    where = f"override {shown(override)}"
    if not equals or not key:
        raise ConfigError(f"{where}: expected section.key=value, for example model.depth=6")
    *sections, name = key.split(".")
    if not all(part.isidentifier() for part in (*sections, name)):
        raise ConfigError(
            f"{where}: {shown(key)} is not the name of a setting; expected section.key=value, such as model.depth=6"
        )
    if not text.strip():
        raise ConfigError(f"{where}: no value after the equals sign; write null for no value")
    table = values
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"{where}: {section} is a value, not a section; expected section.key=value")
    try:
        table[name] = _typed(text)
    except yaml.YAMLError as error:
        problem = (getattr(error, "problem", None) or str(error).partition("\n")[0]).strip()
        raise ConfigError(f"{where}: expected a YAML value such as 6, null or [a, b]: {problem}") from None


def _explain(cls: type[Config], error: ValidationError) -> tuple[str, str]:
    """The key of the first problem, and what is wrong; for an unknown key, with the most similar known one."""
    problems = _problems(error)
    # An unknown key first: it is the likely cause of others, such as a missing value.
    first = min(problems, key=lambda problem: problem["type"] != "extra_forbidden")
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    if first["type"] == "extra_forbidden":
        known = known_keys(cls)
        inside = [f"{key}.{name}" for name in first["input"]] if isinstance(first["input"], dict) else []
        # The name of the section may be misspelt.
        wrong = next((name for name in inside if len(inside) == 1 or _alike(name, known)), key)
        if wrong in known:  # of a class that the section could have, too
            section = wrong.rpartition(".")[0]
            return wrong, f"unknown key {wrong}: a setting of another {section}.name; set that, too{more}"
        nearest = _nearest(wrong, known)
        hint = f"did you mean {nearest}?" if nearest else f"known keys: {', '.join(_beside(wrong, known))}"
        return wrong, f"unknown key {wrong if len(wrong) <= 80 else shown(wrong)}; {hint}{more}"
    if first["type"] == "value_error":
        return key, f"{first['msg'].removeprefix('Value error, ')}{more}"
    if first["type"] == "missing" and isinstance(first["loc"][-1], str):
        return key, f"is not set; set it, as in {key}=VALUE{more}"
    return key, f"expected {_expected(first)}, got {shown(first['input'])}{more}"


EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "finite": "a finite number",
    "bool": "true or false",
    "string": "text",
    "tuple": "a list such as [1, 2]",
    "model": "a section of settings, written SECTION.KEY=VALUE",
    "missing": "a longer list",
    "too_long": "at most {max_length} values",
    "too_short": "at least {min_length} values",
    "greater_than_equal": "at least {ge}",
    "greater_than": "more than {gt}",
    "less_than_equal": "at most {le}",
    "less_than": "less than {lt}",
    "literal": "{expected}",
}
"""What pydantic's errors expect, in plain words, by the beginning of their type."""


def _expected(problem: dict[str, Any]) -> str:
    words = next((words for kind, words in EXPECTED.items() if problem["type"].startswith(kind)), None)
    if words is None:
        return problem["msg"].removeprefix("Input should be ")
    return words.format_map(problem.get("ctx", {}))


def _alike(key: str, known: list[str]) -> str | None:
    """The known key that differs from `key` in few letters."""
    return next(iter(get_close_matches(key, known, n=1, cutoff=0.8)), None)


def _nearest(key: str, known: list[str]) -> str | None:
    """The known key that was probably meant: one, or a section, that differs in few letters, or one that has all words
    of `key`."""
    sections = [name.rpartition(".")[0] for name in known if "." in name]
    if close := _alike(key, [*known, *sections]):
        return close
    last = {name: name.rpartition(".")[2] for name in known}
    words = set(key.rpartition(".")[2].split("_"))
    if longer := [name for name in known if words <= set(last[name].split("_"))]:
        return min(longer, key=lambda name: len(last[name].split("_")))
    section, _, name = key.rpartition(".")
    # A section that exists says nothing about which of its keys was meant.
    inside = [other for other in known if section and other.startswith(f"{section}.")]
    if not inside and (close := get_close_matches(key, known, n=1, cutoff=0.6)):
        return close[0]
    close = get_close_matches(name, [last[other] for other in inside or known], n=1, cutoff=0.6)
    return next((other for other in inside or known if close and last[other] == close[0]), None)


def _beside(key: str, known: list[str]) -> list[str]:
    """The keys of the section of `key`, or the names of all sections and of keys outside of them."""
    section = key.rpartition(".")[0]
    inside = [name for name in known if section and name.startswith(f"{section}.")]
    return inside or list(dict.fromkeys(f"{name.partition('.')[0]}.…" if "." in name else name for name in known))


def _problems(error: ValidationError) -> list[dict[str, Any]]:
    """All problems, with those that a section's own validator found listed under the section's key."""
    found = []
    for problem in error.errors(include_url=False):
        inner = problem.get("ctx", {}).get("error")
        if isinstance(inner, ValidationError):
            found += [p | {"loc": (*problem["loc"], *p["loc"])} for p in _problems(inner)]
        else:
            found.append(dict(problem))
    return found


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested dictionaries as one with dotted keys; empty dictionaries disappear."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def without_text(config: Config) -> dict[str, Any]:
    """The settings with their numbers, switches and choices; other text (paths, names of columns) becomes `…`."""
    fields = type(config).model_fields
    return {name: _without_text(getattr(config, name), _choices(fields[name].annotation)) for name in fields}


def _without_text(value: Any, choices: frozenset[str]) -> Any:
    if isinstance(value, Config):
        return without_text(value)
    if isinstance(value, list | tuple):
        return [_without_text(part, choices) for part in value]
    return value if value is None or isinstance(value, bool | int | float) or value in choices else "…"


def _choices(annotation: Any) -> frozenset[str]:
    """The texts that a Literal inside of a type allows."""
    parts = get_args(annotation)
    if get_origin(annotation) is Literal:
        return frozenset(part for part in parts if isinstance(part, str))
    return frozenset().union(*map(_choices, parts))


def known_keys(cls: type[Config], prefix: str = "") -> list[str]:
    """All keys of a settings model, dotted. A section may be any subclass of its type; their keys are included."""
    keys: dict[str, None] = {}
    for name, field in cls.model_fields.items():
        sections = [t for t in (field.annotation, *get_args(field.annotation)) if isinstance(t, type)]
        section = next((t for t in sections if issubclass(t, Config)), None)
        kinds = [section] if section else []
        for kind in kinds:  # grows as it is read: subclasses may have their own
            kinds += kind.__subclasses__()
        found = [key for kind in kinds for key in known_keys(kind, f"{prefix}{name}.")] or [f"{prefix}{name}"]
        keys |= dict.fromkeys(found)
    return list(keys)
