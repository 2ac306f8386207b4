"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from actors.whole_file import whole_file


def test_a_file_appears_when_it_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    path.write_text("old")
    with whole_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


def test_after_an_error_the_old_file_stays_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "told.json"
    path.write_text("old")
    with pytest.raises(OSError, match="no room"), whole_file(path) as partial:
        partial.write_text("ne")
        raise OSError("no room")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_of_two_files_the_one_named_first_appears_last(tmp_path: Path) -> None:
    tokens, ends = tmp_path / "tokens", tmp_path / "ends"
    tokens.mkdir()
    with pytest.raises(IsADirectoryError), whole_file(tokens) as first, whole_file(ends) as second:
        first.write_text("1")
        second.write_text("2")
    assert ends.read_text() == "2"
