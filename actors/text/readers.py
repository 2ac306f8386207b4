"""Documents of text, JSONL and Parquet files, a piece at a time; and how files are cut into units of work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple

from actors.text.files import Format
from planner.errors import UserError

UNIT_BYTES = 32 << 20
PIECE_BYTES = 1 << 20


@dataclass(frozen=True)
class Span:
    """A part of a file: bytes [first, last), of Parquet row groups [first, last). `whole` tells whether no document
    goes on after it."""

    path: Path
    first: int
    last: int
    whole: bool = True


class Piece(NamedTuple):
    """Some bytes of a document, UTF-8 where the format says so; `ends` tells whether it is the document's last."""

    text: bytes
    ends: bool


def unreadable(file: Path, error: object) -> UserError:
    """What is said of a file that cannot be read."""
    reason = getattr(error, "strerror", None) or " ".join(str(error).split())
    return UserError(f"data file {file} cannot be read: {reason}; make it readable or leave it out")


def units_of(files: Sequence[Path], format_: Format) -> list[tuple[Span, ...]]:
    """The files cut into units of about UNIT_BYTES, small files together; those that are empty are in none.

    Text and JSONL are cut between lines (a text file stays one document), Parquet between row groups.
    """
    units: list[tuple[Span, ...]] = []
    waiting: list[Span] = []
    held = 0
    for file in files:
        for span, size in _spans(file, format_):
            if waiting and held + size > UNIT_BYTES:
                units.append(tuple(waiting))
                waiting, held = [], 0
            waiting.append(span)
            held += size
    return [*units, tuple(waiting)] if waiting else units


def _spans(file: Path, format_: Format) -> Iterator[tuple[Span, int]]:
    """A file's spans and the bytes of each."""
    try:
        if format_ == "parquet":
            groups = _parquet(file).metadata
            for index in range(groups.num_row_groups):
                if groups.row_group(index).num_rows:
                    yield Span(file, index, index + 1), groups.row_group(index).total_byte_size
            return
        size, first = file.stat().st_size, 0
        with file.open("rb") as stream:
            while first < size:
                last = size
                if size - first > UNIT_BYTES:
                    last = _after_line(stream, first + UNIT_BYTES, format_)
                yield Span(file, first, last, whole=format_ == "jsonl" or last == size), last - first
                first = last
    except OSError as error:
        raise unreadable(file, error) from None


def _after_line(stream: IO[bytes], start: int, format_: Format) -> int:
    """Where the line ends that goes on at `start`; in a text without lines a place where no character is cut."""
    stream.seek(start)
    if format_ == "jsonl":
        stream.readline()
        return stream.tell()
    line = stream.readline(4 * PIECE_BYTES)
    if line.endswith(b"\n") or not stream.read(1):
        return start + len(line)
    return start + _character_end(line)


def pieces(span: Span, format_: Format, field: str) -> Iterator[Piece]:
    """The documents of a span. UserError names the file, and the line of JSON that cannot be used."""
    try:
        if format_ == "jsonl":
            yield from _jsonl(span, field)
        elif format_ == "parquet":
            yield from _rows(span, field)
        else:
            yield from _plain(span)
    except OSError as error:
        raise unreadable(span.path, error) from None


def raw(span: Span) -> Iterator[bytes]:
    """A span's bytes as they lie in the file."""
    left = span.last - span.first
    try:
        with span.path.open("rb") as stream:
            stream.seek(span.first)
            while left and (chunk := stream.read(min(left, PIECE_BYTES))):
                left -= len(chunk)
                yield chunk
    except OSError as error:
        raise unreadable(span.path, error) from None


def _plain(span: Span) -> Iterator[Piece]:
    """One document, or the part of it in a span, in pieces that end with a line where there is one."""
    kept = b""
    for chunk in raw(span):
        text = kept + chunk
        cut = text.rfind(b"\n") + 1 or (0 if len(text) < 4 * PIECE_BYTES else _character_end(text))
        if cut:
            yield Piece(text[:cut], ends=False)
        kept = text[cut:]
    if kept or span.whole:
        yield Piece(kept, ends=span.whole)


def _character_end(text: bytes) -> int:
    """A place near the end of `text` where no UTF-8 character is cut."""
    cut = len(text) - 1
    while cut > len(text) - 4 and text[cut] & 0xC0 == 0x80:
        cut -= 1
    return cut


def _jsonl(span: Span, field: str) -> Iterator[Piece]:
    with span.path.open("rb") as stream:
        stream.seek(span.first)
        number = 0
        while stream.tell() < span.last and (line := stream.readline()):
            number += 1
            if not line.strip():
                continue
            try:
                found = json.loads(line)
                text = found[field]
                if not isinstance(text, str | None):
                    raise TypeError
                encoded = (text or "").encode()
            except (ValueError, TypeError, LookupError, RecursionError) as error:
                raise _bad_line(span, number, field, error, line) from None
            if encoded:
                yield Piece(encoded, ends=True)


def _bad_line(span: Span, number: int, field: str, error: Exception, line: bytes) -> UserError:
    with span.path.open("rb") as stream:
        left, before = span.first, 0
        while left and (chunk := stream.read(min(left, PIECE_BYTES))):
            left -= len(chunk)
            before += chunk.count(b"\n")
    where = f"{span.path}:{before + number}"
    if isinstance(error, ValueError | RecursionError):
        shown = line.strip()[:40].decode(errors="replace")
        return UserError(
            f"{where} is not a line of JSON ({' '.join(str(error).split())}): {shown}; correct or remove it"
        )
    found: Any = json.loads(line)
    if not isinstance(found, dict):
        return UserError(f"{where} is no JSON object but {type(found).__name__}; write one a line")
    if field not in found:
        told = ", ".join(sorted(found)[:8])
        return UserError(f"{where} has no field {field!r}; set data.field to one of its own: {told}")
    return UserError(
        f"{where}: field {field!r} is no text but {type(found[field]).__name__}; choose another by data.field"
    )


def _parquet(file: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file)
    except (pyarrow.ArrowException, OSError) as error:
        raise unreadable(file, error) from None


def _rows(span: Span, field: str) -> Iterator[Piece]:
    import pyarrow

    opened = _parquet(span.path)
    column = next((c for c in opened.schema_arrow if c.name == field), None)
    if column is None:
        told = ", ".join(opened.schema_arrow.names[:8])
        raise UserError(f"{span.path} has no column {field!r}; set data.field to one of its own: {told}")
    if not _holds_text(column.type):
        raise UserError(
            f"{span.path}: column {field!r} holds no text but {column.type}; choose another by data.field"
        )
    try:
        for batch in opened.iter_batches(
            batch_size=1024, row_groups=list(range(span.first, span.last)), columns=[field]
        ):
            for text in batch.column(0).to_pylist():
                if text:
                    yield Piece(text.encode(), ends=True)
    except pyarrow.ArrowException as error:
        raise unreadable(span.path, error) from None


def _holds_text(kind: Any) -> bool:
    """Whether a column of an Arrow type does: strings, also as numbers into a list of them, or nothing at all, as where
    one file of many has no value."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    found = pyarrow.types
    return bool(
        found.is_string(kind)
        or found.is_large_string(kind)
        or found.is_string_view(kind)
        or found.is_null(kind)
    )
