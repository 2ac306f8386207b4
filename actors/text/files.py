"""Which files a text is made of, and their format."""

from __future__ import annotations

import os
import re
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from actors.data_settings import PYTHON_STDLIB, TextSource
from planner.errors import UserError

Format = Literal["text", "jsonl", "parquet", "megatron", "numpy"]

STDLIB_BYTES = 32_000_000
_STDLIB_EXCLUDED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
# So many files or folders of a kind are told one by one.
_TOLD = 3
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
_PACKED = frozenset((".7z", ".bz2", ".gz", ".lz4", ".rar", ".tar", ".tgz", ".xz", ".zip", ".zst"))


def silent(*_: object) -> None:
    pass


def tell(say: Callable[[str], None], lines: Sequence[str], *, others: str) -> None:
    """Say a few of the lines, and of the rest how many `others` there are."""
    for line in lines[:_TOLD]:
        say(line)
    if len(lines) > _TOLD:
        say(f"and {len(lines) - _TOLD} more {others}")


def files_of(source: TextSource, say: Callable[[str], None] = silent) -> list[Path]:
    """A text's files in order; `say` is told what of a folder cannot be looked into. UserError if there are none, or
    the path does not exist or cannot be listed."""
    path = source.path
    if not isinstance(path, Path):
        return _stdlib_files(source.field)
    if os.path.isdir(path):
        return _folder_files(path, source.pattern, source.field, say)
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
    packed = next((file for file in files if file.suffix.lower() in _PACKED), None)
    if packed is not None:
        # As text they would be learned byte by byte.
        raise UserError(
            f"{source.field}.path = {str(source.path)!r} holds a packed file ({packed.name}), which is no text;"
            f" unpack it, leave it out by {source.field}.pattern, or set {source.field}.format to read its bytes"
        )
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


def _folder_files(folder: Path, pattern: str, field: str, say: Callable[[str], None]) -> list[Path]:
    """Regular files in the order of their relative paths; hidden files and folders are left out."""
    try:
        found = {path.relative_to(folder): path for path in folder.rglob(pattern)}
        visible = [found[name] for name in sorted(found) if not _hidden(name)]
        files = [path for path in visible if path.is_file()]
    except (ValueError, NotImplementedError) as error:
        raise UserError(
            f"{field}.pattern = {pattern!r} is no pattern for files below a folder ({error}); write *.txt, say"
        ) from None
    except OSError as error:
        raise UserError(
            f"{field}.path = {str(folder)!r}: {error.filename or folder} cannot be looked at: {error.strerror};"
            " make it readable"
        ) from None
    left_out = _tell_left_out(folder, visible, files, field, say)
    if not files:
        told = f" ({left_out[0]})" if left_out else ""
        raise UserError(
            f"{field}.pattern = {pattern!r} matches no file in {folder}{told}; change the pattern or the folder"
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


def _tell_left_out(
    folder: Path, visible: Sequence[Path], files: Sequence[Path], field: str, say: Callable[[str], None]
) -> list[str]:
    """What of a folder is no part of its text though it may have been meant to be: told, and all of it returned."""
    broken = [
        f"data file {path} is a link to nothing ({os.readlink(path)}) and is left out"
        for path in visible
        if path.is_symlink() and not path.exists()
    ]
    closed, links = _not_looked_into(folder, field)
    unlisted = [f"data folder {path} cannot be listed ({why}) and is left out" for path, why in closed]
    seen = {parent for file in files for parent in file.parents}
    linked = [
        f"data folder {path} is a link, which is not followed: it is left out"
        for path in links
        if path not in seen
    ]
    tell(say, broken, others="links to nothing are left out")
    tell(say, unlisted, others="data folders cannot be listed and are left out")
    tell(say, linked, others="links to folders are left out")
    return [*broken, *unlisted, *linked]


def _hidden(name: Path) -> bool:
    """Whether a relative path, or a folder on it, begins with a dot."""
    return any(part.startswith(".") for part in name.parts)


def _not_looked_into(folder: Path, field: str) -> tuple[list[tuple[Path, str]], list[Path]]:
    """Folders below a folder that cannot be listed, each with the reason, and links to folders, which globs do not
    follow; neither says a word of them. UserError if the folder itself cannot be listed."""
    closed: list[tuple[Path, str]] = []
    links: list[Path] = []

    def refused(error: OSError) -> None:
        path = Path(error.filename)
        if path == folder:
            raise UserError(
                f"{field}.path = {str(folder)!r} cannot be listed: {error.strerror}; make it readable"
            )
        closed.append((path, str(error.strerror)))

    for place, folders, _ in os.walk(folder, onerror=refused):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        links += [path for path in (Path(place, name) for name in folders) if path.is_symlink()]
    return sorted(closed), sorted(links)


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
