"""Which tokenizer a folder has after another one was made its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.model_files import copy_tokenizer


def written(folder: Path, **files: str) -> Path:
    """A folder of files, whose names have an underscore for the dot."""
    folder.mkdir()
    for name, content in files.items():
        (folder / ".".join(name.rsplit("_", 1))).write_text(content)
    return folder


def held(folder: Path) -> dict[str, str]:
    return {file.name: file.read_text() for file in folder.iterdir()}


@pytest.mark.parametrize("named", ["new", "new/tokenizer.json"])
def test_files_beside_a_tokenizer_come_along_and_those_of_another_go(tmp_path: Path, named: str) -> None:
    written(tmp_path / "new", tokenizer_json="new", tokenizer_config_json="new too", config_json="a model")
    target = written(tmp_path / "target", tokenizer_json="old", merges_txt="old too", config_json="ours")
    copy_tokenizer(tmp_path / named, target)
    assert held(target) == {
        "tokenizer.json": "new",
        "tokenizer_config.json": "new too",
        "config.json": "ours",
    }


def test_a_tokenizer_of_another_name_comes_alone(tmp_path: Path) -> None:
    new = written(tmp_path / "new", cafe_json="new", tokenizer_config_json="of another")
    copy_tokenizer(new / "cafe.json", tmp_path / "target")
    assert held(tmp_path / "target") == {"tokenizer.json": "new"}


def test_the_very_same_tokenizer_changes_nothing(tmp_path: Path) -> None:
    new = written(tmp_path / "new", tokenizer_json="same")
    target = written(tmp_path / "target", tokenizer_json="same", special_tokens_map_json="more")
    copy_tokenizer(new, target)
    copy_tokenizer(target / "tokenizer.json", target)
    assert held(target) == {"tokenizer.json": "same", "special_tokens_map.json": "more"}
