"""Which files a text is made of, and their format."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from actors.data_settings import PYTHON_STDLIB, TextSource
from planner.errors import UserError

Format = Literal["text", "jsonl", "parquet", "megatron", "numpy"]

STDLIB_BYTES = 32_000_000
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# What `make_tokens` names a part of a text: no text of a user's.
_MADE = re.compile(r"[0-9a-f]{32}\.tokens")
_SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".parquet": "parquet",
    ".npy": "numpy",
    ".idx": "megatron",
    ".bin": "megatron",
}


def files_of(source: TextSource) -> list[Path]:
    """A text's files in order. UserError if there are none, or the path does not exist or cannot be listed."""
    path = source.path
    if not isinstance(path, Path):
        return _stdlib_files(source.field)
    if os.path.isdir(path):
        return _folder_files(path, source.pattern, source.field)
    if os.path.exists(path):
        return [path]
    # Megatron's tools name a pair by what both files have in common.
    pair = [Path(f"{path}{suffix}") for suffix in (".bin", ".idx")]
    if source.format in ("auto", "megatron") and all(os.path.exists(file) for file in pair):
        return pair
    raise UserError(
        f"{source.field}.path = {str(path)!r} does not exist; give a text file, a folder, or {PYTHON_STDLIB}"
    )


def format_of(source: TextSource, files: Sequence[Path]) -> Format:
    """The format that the source says, or that its files' suffixes do. UserError if these are of several."""
    if source.format != "auto":
        return source.format
    found: dict[Format, Path] = {}
    for file in files:
        found.setdefault(_SUFFIXES.get(file.suffix, "text"), file)
    if len(found) > 1:
        told = ", ".join(f"{format_} ({file.name})" for format_, file in found.items())
        raise UserError(
            f"{source.field}.path = {str(source.path)!r} holds files of several formats: {told}; choose some by"
            f" {source.field}.pattern, or set {source.field}.format"
        )
    return next(iter(found))


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
    made = next((file for file in files if _MADE.fullmatch(file.name)), None)
    if made is not None:
        # As text they would be learned byte by byte.
        raise UserError(
            f"{field}.path = {str(folder)!r} holds tokens that eth data prepare made ({made.relative_to(folder)});"
            f" write them outside the text, leave them out by {field}.pattern, or let eth data prepare finish if it was"
            " stopped"
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
