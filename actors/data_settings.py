"""The `data` section of a job: what the text is and which of it is held out."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator

from planner.errors import Contract

BYTE = "byte"
PYTHON_STDLIB: Literal["python-stdlib"] = "python-stdlib"


Format = Literal["auto", "text", "jsonl", "parquet", "megatron", "numpy"]


@dataclass(frozen=True)
class TextSource:
    """A file, a folder's files that match `pattern`, or `python-stdlib`; `field` is what the job calls it.

    `text_field` is the JSONL field or Parquet column that holds the text. `tokenizer` is `byte` or a tokenizer.json.
    """

    path: Path | Literal["python-stdlib"]
    pattern: str = "*"
    field: str = "data"
    format: Format = "auto"
    text_field: str = "text"
    tokenizer: str | Path = "byte"
    end_of_document: str | int | None = None


class Text(Contract):
    """Where a text lies: a file, a folder, or `python-stdlib` (the standard library's own sources)."""

    path: str = Field(min_length=1)
    pattern: str = Field(default="*", description="glob for the files of a folder, searched recursively")
    format: Format = Field(default="auto", description="of the files; auto goes by their suffixes")
    field: str = Field(default="text", min_length=1, description="JSONL field or Parquet column of the text")


class HeldOutText(Text):
    """A text of its own to validate with, of which training sees nothing."""


class Data(Text):
    """The text to learn, and how it becomes tokens."""

    tokenizer: str = Field(
        default="byte", min_length=1, description="`byte`, or the path of a tokenizer.json"
    )
    end_of_document: str | int | None = Field(
        default=None, description="token or id that ends a document; null finds the tokenizer's"
    )

    def source(self, base: Path, text: Text | None = None, *, field: str = "data") -> TextSource:
        """The text, or another one that becomes tokens likewise, where it lies from `base`."""
        text = text or self
        return TextSource(
            path=PYTHON_STDLIB if text.path == PYTHON_STDLIB else placed(base, text.path),
            pattern=text.pattern,
            field=field,
            format=text.format,
            text_field=text.field,
            tokenizer=BYTE if self.tokenizer == BYTE else placed(base, self.tokenizer),
            end_of_document=self.end_of_document,
        )

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


def placed(base: Path, path: str) -> Path:
    """Where a path of a job lies from anywhere."""
    return Path(base, os.path.expanduser(path))


def named_in(data: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Every value of a key in a `data` section, valid or not, with the field it stands in."""
    for key, value in data.items():
        if key == name:
            yield name, value
        elif isinstance(value, Mapping):
            yield from ((f"{key}.{field}", found) for field, found in named_in(value, name))


def with_paths(data: Mapping[str, Any], place: Callable[[str, str], str]) -> dict[str, Any]:
    """The values of a `data` section, each path, of texts and tokenizer, as `place(field, path)` makes it."""
    made = dict(data)
    for key, value in data.items():
        if (key == "path" and value != PYTHON_STDLIB) or (key == "tokenizer" and value != BYTE):
            made[key] = place(key, value)
        elif isinstance(value, Mapping):
            made[key] = with_paths(value, lambda field, path, key=key: place(f"{key}.{field}", path))  # type: ignore[misc]
    return made
