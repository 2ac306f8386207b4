"""Folders of tokens that were made ahead of a job: `eth data prepare` writes them, `data.path` names them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from actors.data_settings import BYTE, TextSource
from actors.engine.tokens import TokenFile
from actors.model_files import TOKENIZER, copy_tokenizer
from actors.text.prepare import Progress, make_tokens, told_where
from actors.text.tokenizer import load_tokenizer
from actors.whole_file import whole_file
from planner.errors import UserError, read_yaml

PREPARED = "prepared.json"
_MADE = re.compile(r"[0-9a-f]{32}\.(tokens|ends|json)")


def write_prepared(
    source: TextSource, folder: Path, *, processes: int, say: Callable[[str], None], progress: Progress
) -> TokenFile:
    """Make a text's tokens in a folder, going on from the whole parts that lie there; the tokenizer's files come along.
    PREPARED is written last."""
    for left in (*folder.glob(".*.tokens.*"), *folder.glob(".*.ends.*")):
        left.unlink()
    made = make_tokens(source, cache_dir=folder, processes=processes, say=say, progress=progress)
    with told_where(folder):
        if made.tokenizer not in (BYTE, "none"):
            copy_tokenizer(Path(source.tokenizer), folder)
        with whole_file(folder / PREPARED) as partial:
            partial.write_text(json.dumps({"version": 1, "header": made.path.name}) + "\n", encoding="utf-8")
    return made


@dataclass(frozen=True)
class Unused:
    """Files of a prepared folder that its text does not use: it was another, or has changed since."""

    files: tuple[Path, ...]
    parts: int
    bytes: int

    def delete(self) -> None:
        for file in self.files:
            file.unlink(missing_ok=True)


def unused(made: TokenFile) -> Unused:
    """What lies beside the tokens of a prepared folder and is no part of them. Parts without a token, which no text is
    the larger for, are not counted: the next run would make them anew."""
    folder = made.path.parent
    used = {made.path.name} | {name for part in made.header.parts for name in (part.path, part.ends)}
    sizes = {file: file.stat().st_size for file in sorted(folder.iterdir()) if _MADE.fullmatch(file.name)}
    left = [file for file in sizes if file.name not in used and sizes.get(file.with_suffix(".tokens"), 1) > 0]
    parts = {file.stem for file in left if file.suffix != ".json"}
    return Unused(tuple(left), len(parts), sum(sizes[file] for file in left))


def open_prepared(folder: Path) -> TokenFile | None:
    """What a prepared folder holds; None if it is none. UserError if parts are missing or of another size."""
    index = folder / PREPARED
    if not index.is_file():
        return None
    told = read_yaml(index, what="prepared data")
    name = told.get("header") if isinstance(told, dict) else None
    if not isinstance(name, str) or Path(name).name != name:
        raise UserError(f"{index} names no header; run eth data prepare again")
    tokens = TokenFile(folder / name)
    for part in tokens.header.parts:
        path = folder / part.path
        size = part.offset + part.tokens * np.dtype(part.dtype).itemsize
        for file, wanted in ((path, size), (folder / part.ends, 8 * part.documents)):
            held = file.stat().st_size if file.exists() else 0
            if held != wanted:
                raise UserError(
                    f"data file {file} has {held} bytes and not {wanted}; delete it and run eth data prepare again"
                )
    return tokens


def tokenizer_of(texts: Iterable[TextSource]) -> Path | None:
    """What made or makes the tokens of a job's texts: the tokenizer.json (or its folder) that the job names, or the
    one that a prepared folder keeps; None for bytes, and for ids that came as they are."""
    for text in texts:
        if text.tokenizer != BYTE:
            return Path(text.tokenizer)
        made = open_prepared(text.path) if isinstance(text.path, Path) else None
        # A tokenizer.json there may be that of an earlier text, of which the folder held tokens.
        if made is not None and made.tokenizer not in (BYTE, "none"):
            return made.path.parent / TOKENIZER
    return None


def prepared_of(source: TextSource) -> TokenFile | None:
    """The prepared folder that a job names as its text, if it is one. UserError if the job states another tokenizer."""
    tokens = open_prepared(source.path) if isinstance(source.path, Path) else None
    if tokens is None or source.tokenizer == BYTE:
        return tokens
    stated = load_tokenizer(source.tokenizer, source.end_of_document)
    if tokens.tokenizer not in ("none", stated.identity):
        raise UserError(
            f"data.tokenizer = {str(source.tokenizer)!r} ({stated.identity}) did not make the tokens in {source.path}"
            f" ({tokens.tokenizer}); prepare them anew, or leave data.tokenizer out"
        )
    return tokens
