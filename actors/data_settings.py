"""The `data` section of a job: what the text is and which of it is held out."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from planner.errors import Contract

BYTE = "byte"
PYTHON_STDLIB: Literal["python-stdlib"] = "python-stdlib"
# A source with less of all weights would hardly ever have its turn.
LEAST_SHARE = 1e-6


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

    def told(self, alone: str) -> str:
        """What a message calls the text; `alone` if it is the job's only one."""
        return alone if self.field == "data" else f"{self.field}.path = {str(self.path)!r}"


class _Files(Contract):
    """Which files of a path are meant, and how they are read."""

    pattern: str = Field(default="*", description="glob for the files of a folder, searched recursively")
    format: Format = Field(default="auto", description="of the files; auto goes by their suffixes")
    field: str = Field(default="text", min_length=1, description="JSONL field or Parquet column of the text")


class Text(_Files):
    """Where a text lies: a file, a folder, or `python-stdlib` (the standard library's own sources)."""

    path: str = Field(min_length=1)


class WeightedText(Text):
    """A text of a mixture; of all samples it gives its weight over the sum of the weights."""

    weight: float


class HeldOutText(Text):
    """A text of its own to validate with, of which training sees nothing."""


class Data(_Files):
    """The text to learn, or the mixture of texts, and how it becomes tokens."""

    path: str | None = Field(default=None, min_length=1)
    mixture: tuple[WeightedText, ...] | None = Field(
        default=None, description="texts to learn from in place of `path`, by their weights"
    )
    tokenizer: str = Field(
        default="byte", min_length=1, description="`byte`, or the path of a tokenizer.json"
    )
    end_of_document: str | int | None = Field(
        default=None, description="token or id that ends a document; null finds the tokenizer's"
    )

    document_attention: bool = Field(
        default=False,
        description="whether a token sees its own document alone, and no label leads into the next",
    )
    packing: bool = Field(
        default=False, description="whether samples hold whole documents, as long as those fit one"
    )

    def sources(self, base: Path) -> tuple[TextSource, ...]:
        """The text, or those of the mixture, where they lie from `base`."""
        if self.mixture is None:
            assert self.path is not None
            return (self._source(base, self.path, self, field="data"),)
        return tuple(
            self.source(base, text, field=f"data.mixture.{index}") for index, text in enumerate(self.mixture)
        )

    def source(self, base: Path, text: Text, *, field: str) -> TextSource:
        """Another text that becomes tokens likewise, where it lies from `base`."""
        return self._source(base, text.path, text, field=field)

    def _source(self, base: Path, path: str, text: _Files, *, field: str) -> TextSource:
        return TextSource(
            path=PYTHON_STDLIB if path == PYTHON_STDLIB else placed(base, path),
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

    @model_validator(mode="after")
    def _path_or_mixture(self) -> Self:
        if self.mixture is None:
            if self.path is None:
                raise ValueError("path is missing; add it, or a mixture of texts")
            return self
        for name in ("path", *_Files.model_fields):
            if (value := getattr(self, name)) != type(self).model_fields[name].default:
                raise ValueError(
                    f"{name} = {value!r} stands beside mixture, whose sources have their own; remove one"
                )
        _check_weights(self.mixture)
        return self


def _check_weights(mixture: Sequence[WeightedText]) -> None:
    """ValueError if sources are too few, or one would never have its turn."""
    if len(mixture) < 2:
        raise ValueError(
            f"mixture has {len(mixture)} source{'' if len(mixture) == 1 else 's'}; give two or more, or one as path"
        )
    total = sum(source.weight for source in mixture)
    for index, source in enumerate(mixture):
        if source.weight <= 0:
            raise ValueError(
                f"mixture.{index}.weight = {source.weight:g} must be above 0; raise it or leave the source out"
            )
        if not source.weight >= LEAST_SHARE * total or not math.isfinite(total):
            raise ValueError(
                f"mixture.{index}.weight = {source.weight:g} is less than {LEAST_SHARE:g} of all ({total:g}); raise it"
                " or leave the source out"
            )


def placed(base: Path, path: str) -> Path:
    """Where a path of a job lies from anywhere."""
    return Path(base, os.path.expanduser(path))


def named_in(data: Mapping[str, Any], name: str) -> Iterator[tuple[str, Any]]:
    """Every value of a key in a `data` section, valid or not, with the field it stands in."""
    for key, value in data.items():
        if key == name:
            yield name, value
        else:
            for place, part in _parts(key, value):
                yield from ((f"{place}.{field}", found) for field, found in named_in(part, name))


def _parts(key: str, value: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The mappings in a value of a `data` section, with their fields: itself, or those of a list."""
    if isinstance(value, Mapping):
        yield key, value
    elif isinstance(value, list | tuple):
        yield from ((f"{key}.{index}", part) for index, part in enumerate(value) if isinstance(part, Mapping))


def with_paths(data: Mapping[str, Any], place: Callable[[str, str], str]) -> dict[str, Any]:
    """The values of a `data` section, each path, of texts and tokenizer, as `place(field, path)` makes it."""
    made = dict(data)
    for key, value in data.items():
        if (key == "path" and value not in (None, PYTHON_STDLIB)) or (key == "tokenizer" and value != BYTE):
            made[key] = place(key, value)
        elif parts := [
            with_paths(part, lambda field, path, name=name: place(f"{name}.{field}", path))  # type: ignore[misc]
            for name, part in _parts(key, value)
        ]:
            made[key] = parts[0] if isinstance(value, Mapping) else parts
    return made
