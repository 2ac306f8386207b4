"""From a text to tokens on disk: in units of work that go on where an earlier try stopped, in several processes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from actors.data_settings import TextSource
from actors.engine.tokens import Part, TokenFile, TokenHeader
from actors.text.files import Format, files_of, format_of, silent, tell
from actors.text.in_place import megatron_parts, numpy_parts
from actors.text.parallel import in_processes
from actors.text.readers import PIECE_BYTES, Span, pieces, raw, units_of, unreadable
from actors.text.tokenizer import Tokenizer, load_tokenizer
from actors.whole_file import whole_file
from planner.errors import UserError

# A part of every name: raise it when the same text would give other tokens.
_FORMAT = "tokens 2"

Progress = Callable[[int, int], None]


def make_tokens(
    source: TextSource,
    *,
    cache_dir: Path,
    processes: int = 1,
    say: Callable[[str], None] = silent,
    progress: Progress = silent,
) -> TokenFile:
    """The tokens of a text, in `cache_dir` under names made of their content, so that nothing is made twice.

    A try that was killed leaves whole parts, which the next one takes over. `progress` gets the units done and all of
    them; `say` is told what is left out: empty files, folders that cannot be listed. UserError names what is missing,
    empty or unreadable.
    """
    files = files_of(source, say)
    format_ = format_of(source, files)
    with told_where(cache_dir):
        if format_ in ("megatron", "numpy"):
            files = filled_files(source, files, format_, say)
            cache_dir.mkdir(parents=True, exist_ok=True)
            read = megatron_parts if format_ == "megatron" else numpy_parts
            header = TokenHeader(tokenizer="none", parts=tuple(read(files, cache_dir, say)))
        else:
            header = _tokenized(source, files, format_, cache_dir, processes, say, progress)
    if not header.tokens:
        raise _no_text(source, files)
    with told_where(cache_dir):
        return TokenFile(_write_header(header, cache_dir))


@dataclass(frozen=True)
class _Work:
    """What makes a unit's tokens, in any process."""

    format: Format
    text_field: str
    tokenizer: str | Path
    end_of_document: str | int | None
    folder: Path


def _tokenized(
    source: TextSource,
    files: Sequence[Path],
    format_: Format,
    cache_dir: Path,
    processes: int,
    say: Callable[[str], None],
    progress: Progress,
) -> TokenHeader:
    tokenizer = load_tokenizer(source.tokenizer, source.end_of_document)
    filled = filled_files(source, files, format_, say)
    work = _Work(format_, source.text_field, source.tokenizer, source.end_of_document, cache_dir)
    units = units_of(filled, format_)
    _tell_empty(sorted(set(filled) - {span.path for unit in units for span in unit}), say)
    cache_dir.mkdir(parents=True, exist_ok=True)
    parts = []
    for done, part in enumerate(_made(units, work, tokenizer, processes), start=1):
        parts.append(part)
        progress(done, len(units))
    return TokenHeader(
        tokenizer=tokenizer.identity,
        vocabulary=tokenizer.vocabulary,
        end_of_document=tokenizer.end_of_document,
        parts=tuple(part for part in parts if part.tokens),
    )


def filled_files(
    source: TextSource, files: Sequence[Path], format_: Format, say: Callable[[str], None]
) -> list[Path]:
    """The files that hold something; the others are told. UserError if none does, or one cannot be looked at."""
    filled: list[Path] = []
    empties: list[Path] = []
    for file in files:
        try:
            with file.open("rb") as stream:
                empty = format_ != "megatron" and not stream.read(1)
        except OSError as error:
            raise unreadable(file, error) from None
        (empties if empty else filled).append(file)
    if not filled:
        raise _no_text(source, files)
    _tell_empty(empties, say)
    return filled


def _tell_empty(files: Sequence[Path], say: Callable[[str], None]) -> None:
    tell(
        say,
        [f"data file {file} is empty and is left out" for file in files],
        others="data files are empty and are left out",
    )


def _no_text(source: TextSource, files: Sequence[Path]) -> UserError:
    where = f"{len(files)} files of " if len(files) > 1 else ""
    return UserError(
        f"{source.field}.path = {str(source.path)!r}: {where}it holds no text; give a text that is not empty"
    )


def _made(
    units: Sequence[tuple[Span, ...]], work: _Work, tokenizer: Tokenizer, processes: int
) -> Iterator[Part]:
    """The part of every unit, in order."""
    if processes == 1 or len(units) < 2:
        for unit in units:
            yield _make_part(unit, work, tokenizer)
        return
    yield from in_processes(_make_in_worker, units, processes=processes, start=partial(_start_worker, work))


_worker: tuple[_Work, Tokenizer] | None = None


def _start_worker(work: _Work) -> None:
    global _worker
    # A process a core: threads of the tokenizer's own would only stand in each other's way.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _worker = work, load_tokenizer(work.tokenizer, work.end_of_document)


def _make_in_worker(unit: tuple[Span, ...]) -> Part:
    assert _worker is not None
    return _make_part(unit, *_worker)


def _make_part(unit: tuple[Span, ...], work: _Work, tokenizer: Tokenizer) -> Part:
    """A unit's tokens in a file of their own, unless they lie there already."""
    digest = hashlib.sha256(f"{_FORMAT} {work.format} {work.text_field} {tokenizer.identity}".encode())
    for span in unit:
        digest.update(_span_digest(span, work.format))
    name = digest.hexdigest()[:32]
    tokens, ends = work.folder / f"{name}.tokens", work.folder / f"{name}.ends"
    dtype = np.dtype("<u2") if tokenizer.vocabulary <= 2**16 else np.dtype("<u4")
    if not (tokens.exists() and ends.exists()):
        _write_part(unit, work, tokenizer, dtype, tokens, ends)
    return Part(
        path=tokens.name,
        dtype=dtype.str,
        tokens=tokens.stat().st_size // dtype.itemsize,
        ends=ends.name,
        documents=ends.stat().st_size // 8,
    )


def _span_digest(span: Span, format_: Format) -> bytes:
    digest = hashlib.sha256()
    if format_ == "parquet":
        # Row groups share a file's footer, so the whole file counts.
        digest.update(f"{span.first} {span.last}".encode())
        span = Span(span.path, 0, span.path.stat().st_size)
    if not span.whole:
        digest.update(b"goes on: ")
    for chunk in raw(span):
        digest.update(chunk)
    return digest.digest()


def _write_part(
    unit: tuple[Span, ...],
    work: _Work,
    tokenizer: Tokenizer,
    dtype: np.dtype[np.unsignedinteger],
    tokens: Path,
    ends: Path,
) -> None:
    """The tokens get their name last: where they are, all is whole."""
    with (
        whole_file(tokens) as new_tokens,
        whole_file(ends) as new_ends,
        new_tokens.open("wb") as to_tokens,
        new_ends.open("wb") as to_ends,
    ):
        count = 0
        for ids, closes in _encoded(unit, work, tokenizer):
            to_tokens.write(ids.astype(dtype).data)
            count += len(ids)
            if closes:
                to_tokens.write(np.array([tokenizer.end_of_document], dtype=dtype).data)
                count += 1
                to_ends.write(np.array([count], dtype="<i8").data)


def _encoded(unit: tuple[Span, ...], work: _Work, tokenizer: Tokenizer) -> Iterator[tuple[np.ndarray, bool]]:
    """The ids of each piece of a unit, and whether a document ends with it. UserError names a file that is no text."""
    for span in unit:
        for batch in _batches(pieces(span, work.format, work.text_field)):
            texts = [text for text, _ in batch]
            try:
                made = tokenizer.encode(texts)
            except UnicodeDecodeError as error:
                found = error.object[error.start : error.start + 8]
                raise UserError(
                    f"data file {span.path} is not UTF-8 text: {error.reason} at {found!r}; convert it, leave it out,"
                    " or use the byte tokenizer"
                ) from None
            yield from zip(made, (closes for _, closes in batch), strict=True)


def _batches(found: Iterable[tuple[bytes, bool]]) -> Iterator[list[tuple[bytes, bool]]]:
    """Pieces together until they are of a good size to work on."""
    batch: list[tuple[bytes, bool]] = []
    held = 0
    for piece in found:
        batch.append(piece)
        held += len(piece[0])
        if held >= PIECE_BYTES:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _write_header(header: TokenHeader, folder: Path) -> Path:
    content = header.model_dump_json(indent=1, exclude_defaults=True) + "\n"
    # Tokens that are read in place are named by their content, wherever they lie.
    named = header.model_copy(
        update={
            "parts": tuple(
                part.model_copy(update={"path": part.ends} if header.tokenizer == "none" else {})
                for part in header.parts
            )
        }
    )
    path = folder / f"{hashlib.sha256(named.model_dump_json().encode()).hexdigest()[:32]}.json"
    if header.tokenizer != "none" and path.exists():
        return path
    with whole_file(path) as unfinished:
        unfinished.write_text(content, encoding="utf-8")
    return path


@contextmanager
def told_where(folder: Path) -> Iterator[None]:
    """UserError where tokens cannot be written: a folder is the user's to change."""
    try:
        yield
    except OSError as error:
        raise UserError(
            f"token files cannot be written to {folder}: {error.strerror}; name a folder that has room"
            " (eth data prepare: by --output; a job: by XDG_CACHE_HOME in the environment)"
        ) from None
