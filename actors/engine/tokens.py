"""Text to a token file, once: byte-level tokens on disk, memory-mapped by every rank, cached by content."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from actors.data_settings import PYTHON_STDLIB, TextSource
from planner.errors import UserError

END_OF_DOCUMENT = 256
VOCABULARY_SIZE = 257
TOKEN_TYPE = np.dtype("<u2")

STDLIB_BYTES = 32_000_000
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
_CHUNK_BYTES = 1 << 20
# A part of the cache key: raise it when the same text would give another file.
_FORMAT = "byte-level 1"


@dataclass(frozen=True)
class TokenFile:
    """Little-endian 16-bit tokens: the bytes of each document, then END_OF_DOCUMENT."""

    path: Path

    @cached_property
    def tokens(self) -> npt.NDArray[np.uint16]:
        """All tokens, memory-mapped."""
        return np.memmap(self.path, dtype=TOKEN_TYPE, mode="r")

    @property
    def count(self) -> int:
        return self.path.stat().st_size // TOKEN_TYPE.itemsize

    def windows(self, sequence_length: int) -> int:
        """How many samples of `sequence_length` tokens, each with its next token, the text gives.

        UserError if it gives none.
        """
        return _windows(self.count, sequence_length)


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


def _windows(tokens: int, sequence_length: int) -> int:
    windows = (tokens - 1) // sequence_length
    if windows < 1:
        raise UserError(
            f"training.sequence_length = {sequence_length} needs {sequence_length + 1} tokens of text,"
            f" but the data hold {tokens}; shorten the sequence or give more text"
        )
    return windows


def check_vocabulary(vocab_size: int) -> None:
    """UserError if a model has fewer entries than the byte tokenizer makes."""
    if vocab_size < VOCABULARY_SIZE:
        raise UserError(
            f"model.vocab_size = {vocab_size} is less than the byte tokenizer's {VOCABULARY_SIZE};"
            f" set it to {VOCABULARY_SIZE} or more"
        )


def prepare_tokens(
    path: Path | Literal["python-stdlib"], *, pattern: str = "*", cache_dir: Path
) -> TokenFile:
    """As `prepare_text`, of a source that no job names."""
    return prepare_text(TextSource(path, pattern), cache_dir=cache_dir)


def prepare_text(source: TextSource, *, cache_dir: Path) -> TokenFile:
    """The token file of a text.

    It lies in `cache_dir` under a name made of the content, so that the same text is written once.
    Bytes are tokens: no encoding can be wrong. UserError names what is missing, empty or unreadable.
    """
    files = _files(source)
    digest, text_bytes = _digest(files)
    _check_text(source, files, text_bytes)
    target = cache_dir / f"{digest}.tokens"
    try:
        if not target.exists():
            _write(files, target)
    except OSError as error:
        raise UserError(
            f"token file {target} cannot be written: {error.strerror}; set XDG_CACHE_HOME to a folder with room"
        ) from None
    return TokenFile(target)


def check_text(source: TextSource, *, sequence_length: int) -> int:
    """The samples that a text gives, by the files' sizes alone. UserError if it is too short for one."""
    files = _files(source)
    text_bytes = sum(file.stat().st_size for file in files)
    _check_text(source, files, text_bytes)
    # Every document has an end.
    return _windows(text_bytes + len(files), sequence_length)


def _check_text(source: TextSource, files: Sequence[Path], text_bytes: int) -> None:
    if not text_bytes:
        where = f"{len(files)} files of " if len(files) > 1 else ""
        raise UserError(
            f"{source.field}.path = {str(source.path)!r}: {where}it holds no text; give a text that is not empty"
        )


def _files(source: TextSource) -> list[Path]:
    path = source.path
    if not isinstance(path, Path):
        return _stdlib_files(source.field)
    if os.path.isdir(path):
        return _folder_files(path, source.pattern, source.field)
    if not os.path.exists(path):
        raise UserError(
            f"{source.field}.path = {str(path)!r} does not exist; give a text file, a folder, or {PYTHON_STDLIB}"
        )
    return [path]


def _folder_files(folder: Path, pattern: str, field: str) -> list[Path]:
    """Regular files in the order of their relative paths; hidden files and folders are left out."""
    try:
        found = {path.relative_to(folder): path for path in folder.rglob(pattern)}
        visible = [name for name in found if not any(part.startswith(".") for part in name.parts)]
        files = [found[name] for name in sorted(visible) if found[name].is_file()]
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"{field}.pattern = {pattern!r} is no pattern for files below a folder ({error}); write *.txt, say"
        ) from None
    except OSError as error:
        raise UserError(
            f"{field}.path = {str(folder)!r} cannot be listed: {error.strerror}; make it readable"
        ) from None
    if not files:
        raise UserError(
            f"{field}.pattern = {pattern!r} matches no file in {folder}; change the pattern or the folder"
        )
    return files


def _stdlib_files(field: str) -> list[Path]:
    """The standard library's own sources, tests left out, up to STDLIB_BYTES, in a stable order."""
    folder = Path(sysconfig.get_path("stdlib"))
    names = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    files, total = [], 0
    for name in names:
        if _STDLIB_EXCLUDED.isdisjoint(name.parts):
            size = (folder / name).stat().st_size
            if total + size > STDLIB_BYTES:
                break
            total += size
            files.append(folder / name)
    if not files:
        raise UserError(
            f"{field}.path = {PYTHON_STDLIB!r}: {folder} holds no sources; give a text file or a folder instead"
        )
    return files


def _chunks(file: Path) -> Iterator[bytes]:
    try:
        with file.open("rb") as stream:
            while chunk := stream.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise UserError(
            f"data file {file} cannot be read: {error.strerror}; make it readable or leave it out"
        ) from None


def _digest(files: Sequence[Path]) -> tuple[str, int]:
    """Hash of every file's content and end, and the bytes of all."""
    total, whole = 0, hashlib.sha256(_FORMAT.encode())
    for file in files:
        content = hashlib.sha256()
        for chunk in _chunks(file):
            total += len(chunk)
            content.update(chunk)
        whole.update(content.digest())
    return whole.hexdigest()[:32], total


def _write(files: Sequence[Path], target: Path) -> None:
    """Write beside the target and rename: a reader sees a whole file or none."""
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=".writing-", suffix=".tokens")
    try:
        with os.fdopen(descriptor, "wb") as stream:
            for file in files:
                for chunk in _chunks(file):
                    stream.write(np.frombuffer(chunk, dtype=np.uint8).astype(TOKEN_TYPE).data)
                stream.write(np.array([END_OF_DOCUMENT], dtype=TOKEN_TYPE).data)
        os.chmod(name, 0o644)
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise
