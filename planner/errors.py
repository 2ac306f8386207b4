"""The one error type that is meant for a user's eyes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import date
from difflib import get_close_matches
from functools import cache, cached_property
from typing import Any, Protocol, Self, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError


class UserError(ValueError):
    """Something the user wrote cannot be done.

    The message is one line that names the field, the value and the remedy. Command lines print it
    as it is and exit with code 2; the REST service answers with it as a problem's detail.
    """


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A question to end the message on a name that is not known with; empty where no known one is near."""
    folded = {other.lower(): other for other in known}
    near = get_close_matches(name.strip().lower(), list(folded), n=1, cutoff=0.6)
    return f"; did you mean {folded[near[0]]!r}?" if near else ""


class Contract(BaseModel):
    """Base of every file format: unknown keys are refused, values are immutable once read."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy with some fields replaced, not validated; what derives from the old ones goes."""
        copied = super().model_copy(update=update, deep=deep)
        for name in _derived(type(self)):
            copied.__dict__.pop(name, None)
        return copied


@cache
def _derived(kind: type) -> tuple[str, ...]:
    """Names of a class's cached properties."""
    return tuple(
        name
        for base in kind.__mro__
        for name, value in vars(base).items()
        if isinstance(value, cached_property)
    )


Model = TypeVar("Model", bound=BaseModel)


def parse(model: type[Model], data: object, *, source: str) -> Model:
    """Validate `data` as a `model`; on failure raise a UserError of one line per problem.

    `source` is the file name or other origin that the message starts with.
    """
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # A bad item also makes its list "too short"; only the innermost problem helps the user.
        problems = error.errors()
        places = [problem["loc"] for problem in problems]
        told = [
            _describe(problem)
            for problem in problems
            if problem["type"] != "too_short"
            or not any(
                len(p) > len(problem["loc"]) and p[: len(problem["loc"])] == problem["loc"] for p in places
            )
        ]
        raise UserError(f"{source}: " + "; ".join(told)) from None


class _Loader(yaml.SafeLoader):
    """YAML in which `3e-4` is a number, as in JSON and YAML 1.2, and no mapping says a key twice."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        # Here and not when values are made: merged keys (`<<`), which own ones may override, are not in yet.
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if (key.tag, key.value) in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"{key.value!r} is written twice; remove one of them,",
                        problem_mark=key.start_mark,
                    )
                seen.add((key.tag, key.value))
        return node


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(?:[0-9][0-9_]*(?:\.[0-9_]*)?|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
    list("-+.0123456789"),
)


def load_yaml(text: str | bytes) -> object:
    """The values in YAML or JSON text; yaml.YAMLError, or RecursionError where it is nested too deeply."""
    return yaml.load(text, Loader=_Loader)


class TextFile(Protocol):
    """A `pathlib.Path`, or the like of it in other storage; its name is its `str`."""

    def read_text(self, encoding: str) -> str: ...


def read_yaml(path: TextFile, *, what: str) -> object:
    """The content of a YAML or JSON file; a UserError that names the file if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{what} file {path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} file {path} cannot be read: {error}") from None
    try:
        return load_yaml(text)
    except yaml.YAMLError as error:
        place = " ".join(str(error).split())
        raise UserError(f"{what} file {path} is not valid YAML or JSON: {place}") from None
    except RecursionError:
        raise UserError(f"{what} file {path} is nested too deeply; write it as the examples are") from None


def _describe(problem: Mapping[str, Any]) -> str:
    field = ".".join(str(part) for part in problem["loc"])
    message = str(problem["msg"]).removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        return f"{field} is not a known key; remove it or check its spelling"
    if problem["type"] == "missing":
        return f"{field} is missing; add it"
    if problem["type"] == "value_error":
        return f"{field}: {message}" if field else message
    if problem["type"] == "too_short" and not problem["input"]:
        return f"{field} is empty; give at least one entry"
    shown = repr(problem["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    if not field:
        return f"it holds {shown}, which is no mapping of keys to values; write it as the examples are"
    if problem["type"] in ("model_type", "dict_type"):
        return f"{field} = {shown}: write keys and values below it"
    if problem["type"] == "string_type" and isinstance(problem["input"], int | float | date):
        return f"{field} = {shown}: YAML reads this as something other than text; put it in quotes"
    return f"{field} = {shown}: {message[:1].lower()}{message[1:]}"
