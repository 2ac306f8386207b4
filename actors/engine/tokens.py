"""Tokens on disk: what training reads, whatever format the text had."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import Field

from planner.errors import Contract, UserError, parse, read_yaml

TOKEN_TYPE = np.dtype("<u2")

Indices = npt.NDArray[np.int64]


class Part(Contract):
    """A run of tokens in a file. Paths start at the header's folder.

    `ends` is a file of int64: where each document ends, counted in tokens from the part's first. Of tokens that were
    made elsewhere, `largest` is the greatest id, and `largest_at` where it first stands.
    """

    path: str
    dtype: str
    offset: int = Field(default=0, ge=0, description="bytes before the first token")
    tokens: int = Field(ge=0)
    ends: str
    documents: int = Field(ge=0)
    largest: int | None = None
    largest_at: int = 0


class TokenHeader(Contract):
    """What a prepared text holds. `vocabulary` is the number of the tokenizer's ids; None where the ids come as they
    are, of `tokenizer` "none"."""

    version: int = Field(default=1, ge=1, le=1)
    tokenizer: str = "byte"
    vocabulary: int | None = None
    end_of_document: int | None = None
    parts: tuple[Part, ...]

    @property
    def tokens(self) -> int:
        return sum(part.tokens for part in self.parts)

    @property
    def documents(self) -> int:
        return sum(part.documents for part in self.parts)


class _OpenPart:
    """A part's file, open. What is asked for is read and not mapped: the process keeps nothing of it, and a disk that
    fails is an exception here, not the end of the process by a signal."""

    def __init__(self, path: Path, part: Part) -> None:
        self.tokens = part.tokens
        self._path, self._offset, self._dtype = path, part.offset, np.dtype(part.dtype)
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def read(self, start: int, count: int) -> npt.NDArray[Any]:
        """Tokens [start, start + count)."""
        first, size = self._offset + start * self._dtype.itemsize, count * self._dtype.itemsize
        content = b""
        while len(content) < size:
            try:
                more = os.pread(self._file, size - len(content), first + len(content))
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self._path)) from None
            if not more:
                raise UserError(
                    f"data file {self._path} ends before its token {start + count - 1} of {self.tokens}: it was cut"
                    " short while it was trained on; put it back whole, and go on with --resume"
                )
            content += more
        return np.frombuffer(content, dtype=self._dtype)


@dataclass(frozen=True)
class TokenFile:
    """Tokens behind a header (`NAME.json`), or a bare file of little-endian 16-bit tokens (`NAME.tokens`).

    The name is a hash of the tokens and of what made them.
    """

    path: Path

    @cached_property
    def header(self) -> TokenHeader:
        """What the file says of itself. UserError if it cannot be read."""
        if self.path.suffix == ".json":
            return parse(TokenHeader, read_yaml(self.path, what="token"), source=str(self.path))
        count = self.path.stat().st_size // TOKEN_TYPE.itemsize
        part = Part(path=self.path.name, dtype=TOKEN_TYPE.str, tokens=count, ends="", documents=1)
        return TokenHeader(parts=(part,))

    @property
    def count(self) -> int:
        return self.header.tokens

    @property
    def tokenizer(self) -> str:
        """What made the tokens: `byte`, a hash of a tokenizer.json, or `none` if they came as they are."""
        return self.header.tokenizer

    @property
    def weights(self) -> tuple[float, ...]:
        """None: it is one text."""
        return ()

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """All tokens: memory-mapped if they lie in one part, else a copy."""
        parts = self._mapped
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    @cached_property
    def ends(self) -> Indices:
        """Where each document ends: the number of tokens up to and with its last, ascending, int64 `[documents]`."""
        made, before = [], 0
        for part in self.header.parts:
            if not part.ends:
                made.append(np.array([part.tokens]))
            elif part.documents:
                made.append(np.memmap(self.path.parent / part.ends, dtype="<i8", mode="r"))
            else:
                # One document goes on through all of the part, and an empty file cannot be mapped.
                made.append(np.empty(0, dtype="<i8"))
            made[-1] = made[-1] + before if before else made[-1]
            before += part.tokens
        return made[0] if len(made) == 1 else np.concatenate(made)

    def windows(self, sequence_length: int, *, told: str = "the data") -> int:
        """How many samples of `sequence_length` tokens, each with its next token, the text gives.

        UserError if it gives none; `told` is what it calls the text.
        """
        return windows_of(self.count, sequence_length, told=told)

    def packed(self, sequence_length: int) -> Indices:
        """Where windows of whole documents begin, and the text's end: int64 `[windows + 1]`, as `packed_bounds` says.

        Eight bytes a window stay in memory.
        """
        if sequence_length not in self._packed:
            self._packed[sequence_length] = packed_bounds(self.ends, sequence_length)
        return self._packed[sequence_length]

    def read(self, starts: Indices, length: int) -> Indices:
        """Tokens [start, start + length) for each start, int64 `[starts, length]`; the text must have all of them.

        UserError, OSError: a file was cut short, or cannot be read; both name it.
        """
        made = np.empty((len(starts), length), dtype=np.int64)
        firsts = np.searchsorted(self._bounds, starts, side="right") - 1
        for row, start, index in zip(made, starts.tolist(), firsts.tolist(), strict=True):
            filled = 0
            while filled < length:
                part, within = self._opened[index], start + filled - int(self._bounds[index])
                taken = part.read(within, min(length - filled, part.tokens - within))
                row[filled : filled + len(taken)] = taken
                filled, index = filled + len(taken), index + 1
        return made

    @cached_property
    def _packed(self) -> dict[int, Indices]:
        return {}

    @cached_property
    def _opened(self) -> list[_OpenPart]:
        return [_OpenPart(self.path.parent / part.path, part) for part in self.header.parts]

    @property
    def _mapped(self) -> list[npt.NDArray[Any]]:
        return [
            np.memmap(
                self.path.parent / part.path,
                dtype=part.dtype,
                mode="r",
                offset=part.offset,
                shape=part.tokens,
            )
            for part in self.header.parts
        ]

    @cached_property
    def _bounds(self) -> Indices:
        return np.cumsum([0, *(part.tokens for part in self.header.parts)])


@dataclass(frozen=True)
class HeldOut:
    """What training never sees: a share of the text's windows, or all of another text (its token file)."""

    share: float = 0.0
    tokens: Path | None = None

    @property
    def identity(self) -> str:
        """In a word, for what must not change between a run and what goes on with it."""
        if self.tokens is not None:
            return self.tokens.stem
        return repr(self.share) if self.share else ""


NOTHING_HELD_OUT = HeldOut()


def packed_bounds(ends: Indices, length: int) -> Indices:
    """Cut a text whose documents end at `ends` into windows of at most `length` tokens: the first token of each, and
    the text's end.

    A window takes the documents that follow as long as they fit whole. One that is longer than a window begins where
    the one before it ends, and is cut where windows are full.
    """
    bounds, stop = [0], int(ends[-1])
    while bounds[-1] < stop:
        full = bounds[-1] + length
        fit = int(ends.searchsorted(full, side="right"))
        if fit == len(ends):
            bounds.append(stop)
            continue
        before = int(ends[fit - 1]) if fit else 0
        bounds.append(full if int(ends[fit]) - before > length else before)
    return np.array(bounds, dtype=np.int64)


def windows_of(tokens: int, sequence_length: int, *, told: str = "the data") -> int:
    """The whole samples in so many tokens. UserError if there is none; `told` is what it calls the text."""
    windows = (tokens - 1) // sequence_length
    if windows < 1:
        raise UserError(
            f"training.sequence_length = {sequence_length} needs {sequence_length + 1} tokens of text,"
            f" but {told} hold{'' if told == 'the data' else 's'} {tokens}; shorten the sequence or give more text"
        )
    return windows


def check_vocabulary(tokens: TokenFile, vocab_size: int) -> None:
    """UserError if a model has fewer entries than the tokenizer makes, or than ids that came as they are."""
    header = tokens.header
    if header.vocabulary is not None:
        check_room(header.vocabulary, vocab_size, tokenizer=header.tokenizer)
    for part in header.parts:
        if part.largest is not None and part.largest >= vocab_size:
            raise UserError(
                f"data file {tokens.path.parent / part.path}: token {part.largest_at} is {part.largest}, but"
                f" model.vocab_size = {vocab_size}; ids must be below it: set it to {part.largest + 1} or more, or give"
                " the tokens of this model's tokenizer"
            )


def check_room(vocabulary: int, vocab_size: int, *, tokenizer: str) -> None:
    """UserError if a tokenizer makes ids that a model of `vocab_size` has no entry for."""
    if vocab_size < vocabulary:
        name = "byte tokenizer" if tokenizer == "byte" else "tokenizer"
        raise UserError(
            f"model.vocab_size = {vocab_size} is less than the {name}'s {vocabulary};"
            f" set it to {vocabulary} or more"
        )
