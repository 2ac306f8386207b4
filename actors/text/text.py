"""A job's text: checked, and as tokens, whichever way they come."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from actors.data_settings import BYTE, TextSource
from actors.engine.tokens import TokenFile, check_room, check_vocabulary, windows_of
from actors.text.files import files_of, format_of, silent
from actors.text.prepare import filled_files, make_tokens
from actors.text.prepared import prepared_of
from actors.text.tokenizer import load_tokenizer


def prepare_tokens(
    path: Path | Literal["python-stdlib"], *, pattern: str = "*", cache_dir: Path
) -> TokenFile:
    """As `prepare_text`, of a text that no job names."""
    return prepare_text(TextSource(path, pattern), cache_dir=cache_dir)


def prepare_text(source: TextSource, *, cache_dir: Path, say: Callable[[str], None] = silent) -> TokenFile:
    """A text's tokens: those of a prepared folder, or made in `cache_dir` as `make_tokens` does."""
    if (prepared := prepared_of(source)) is not None:
        return prepared
    # Bytes become tokens faster than processes start.
    processes = 1 if source.tokenizer == BYTE else os.cpu_count() or 1
    return make_tokens(source, cache_dir=cache_dir, processes=processes, say=say)


def check_text(source: TextSource, *, sequence_length: int, vocab_size: int) -> int | None:
    """What can be refused of a text without reading it: UserError if there is none, the tokenizer cannot be used or
    makes more ids than `vocab_size`, or bytes are too few for a sample. Returns the samples, where sizes tell."""
    if (prepared := prepared_of(source)) is not None:
        check_vocabulary(prepared, vocab_size)
        return prepared.windows(sequence_length, told=source.told("the data"))
    files = files_of(source)
    format_ = format_of(source, files)
    files = filled_files(source, files, format_, silent)
    if format_ in ("megatron", "numpy"):
        return None
    tokenizer = load_tokenizer(source.tokenizer, source.end_of_document)
    check_room(tokenizer.vocabulary, vocab_size, tokenizer=tokenizer.identity)
    if format_ != "text" or tokenizer.identity != "byte" or not isinstance(source.path, Path):
        return None
    # Every document has an end.
    tokens = sum(file.stat().st_size + 1 for file in files)
    return windows_of(tokens, sequence_length, told=source.told("the data"))
