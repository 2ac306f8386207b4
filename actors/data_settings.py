"""The `data` section of a job: what the text is and which of it is held out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from planner.errors import Contract

PYTHON_STDLIB: Literal["python-stdlib"] = "python-stdlib"


@dataclass(frozen=True)
class TextSource:
    """A text file, a folder's files that match `pattern`, or `python-stdlib`; `field` is what the job calls it."""

    path: Path | Literal["python-stdlib"]
    pattern: str = "*"
    field: str = "data"


class HeldOutText(Contract):
    """A text of its own to validate with, of which training sees nothing."""

    path: str = Field(min_length=1)
    pattern: str = Field(default="*", description="glob for the files of a folder, searched recursively")


class Data(Contract):
    """The text to learn: a file, a folder, or `python-stdlib` (the standard library's own sources)."""

    path: str = Field(min_length=1)
    pattern: str = Field(default="*", description="glob for the files of a folder, searched recursively")
    tokenizer: Literal["byte"] = "byte"
    held_out: float | HeldOutText = Field(
        default=0.0,
        description="to validate with, never to train on: a share of the text's samples, or `{path, pattern}` of"
        " another text",
    )

    @field_validator("held_out", mode="before")
    @classmethod
    def _share_or_text(cls, value: Any) -> Any:
        # Before the types are checked: a union would answer with a line for each of them.
        if isinstance(value, dict | HeldOutText):
            return value
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not (number and 0 <= value < 1):
            raise ValueError(
                f"held_out = {value!r} must be a share of the samples, at least 0 and below 1 such as 0.01, or a"
                " mapping with the path of another text"
            )
        return value


def named_in(data: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Every value of a key in a `data` section, valid or not, with the field it stands in."""
    for key, value in data.items():
        if key == name:
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{field}", found) for field, found in named_in(value, name))


def with_paths(data: Mapping[str, Any], place: Callable[[str, str], str]) -> dict[str, Any]:
    """The values of a `data` section, each path as `place(field, path)` makes it; `python-stdlib` is none."""
    made = dict(data)
    for key, value in data.items():
        if key == "path" and value != PYTHON_STDLIB:
            made[key] = place(key, value)
        elif isinstance(value, Mapping):
            made[key] = with_paths(value, lambda field, path, key=key: place(f"{key}.{field}", path))  # type: ignore[misc]
    return made
