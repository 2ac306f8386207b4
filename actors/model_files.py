"""What belongs to a model beside its weights: Hugging Face's config.json and the tokenizer's files.

A run keeps those of the folder that it started from in `hugging-face/`, with the tokenizer that made its tokens, so
that what is exported from it has them, whatever has become of that folder since.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from actors.checkpoints import is_checkpoint_folder
from actors.storage import StoragePath
from planner.errors import UserError

KEPT_FOLDER = "hugging-face"
CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer.json"
_TOKENIZER = (
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "vocab.*",
    "merges.txt",
)
_OTHERS = (CONFIG, GENERATION)


def tokenizer_files(folder: StoragePath) -> list[StoragePath]:
    """The files of a folder that a tokenizer is loaded from."""
    return _matching(folder, _TOKENIZER)


def is_tokenizer_file(file: StoragePath) -> bool:
    """Whether a tokenizer is loaded from a file of such a name."""
    return any(fnmatch(file.name, pattern) for pattern in _TOKENIZER)


def model_files(weights: StoragePath) -> list[StoragePath]:
    """Files beside weights that are not weights. `weights` is what a job may name: a Hugging Face folder or one of
    `eth import`, a run folder, a checkpoint in one, or a weights.safetensors in either."""
    return _matching(_folder_of(weights), (*_OTHERS, *_TOKENIZER))


def original_config(weights: StoragePath) -> dict[str, Any] | None:
    """The config.json that a model came with; None if there is none. UserError if it is no JSON object."""
    return _read_object(_folder_of(weights) / CONFIG)


def original_generation(weights: StoragePath) -> dict[str, Any] | None:
    """The generation_config.json that a model came with, as `original_config`."""
    return _read_object(_folder_of(weights) / GENERATION)


def _read_object(file: StoragePath) -> dict[str, Any] | None:
    if not file.exists():
        return None
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{file} is not JSON ({error}); copy it again from the original model") from None
    if not isinstance(found, dict):
        raise UserError(f"{file} is not a JSON object; copy it again from the original model")
    return found


def copy_files(files: Iterable[StoragePath], target: Path) -> None:
    """Copy files into a local folder, which is made if there are any."""
    for file in files:
        target.mkdir(parents=True, exist_ok=True)
        with file.open("rb") as source, (target / file.name).open("wb") as copy:
            shutil.copyfileobj(source, copy)


def copy_tokenizer(named: Path, target: Path) -> None:
    """Make a tokenizer that of a folder: `named` is its tokenizer.json, under whatever name, or the folder of that.

    Files that stand beside a tokenizer.json come along; those of another tokenizer in `target` go. Files of the very
    same one stay as they are: they may be more than stand beside `named`.
    """
    folder = named if named.is_dir() else named.parent
    file = folder / TOKENIZER if named.is_dir() else named
    kept = target / TOKENIZER
    if kept.is_file() and kept.read_bytes() == file.read_bytes():
        return
    for other in tokenizer_files(target):
        other.unlink()
    if file.name == TOKENIZER:
        copy_files(tokenizer_files(folder), target)
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(file, kept)


def is_weight_file(path: StoragePath) -> bool:
    """Whether weights are named by their file and not by its folder. Other storage is not asked: its folders have other
    names."""
    return path.is_file() if isinstance(path, Path) else path.name.endswith(".safetensors")


def _folder_of(weights: StoragePath) -> StoragePath:
    folder = weights.parent if is_weight_file(weights) else weights
    if is_checkpoint_folder(folder):
        folder = folder.parent.parent
    kept = folder / KEPT_FOLDER
    return kept if kept.is_dir() else folder


def _matching(folder: StoragePath, patterns: Iterable[str]) -> list[StoragePath]:
    chosen = tuple(patterns)
    if isinstance(folder, Path) and not folder.is_dir():
        return []
    named = (file for file in folder.iterdir() if any(fnmatch(file.name, pattern) for pattern in chosen))
    return sorted((file for file in named if not file.is_dir()), key=str)
