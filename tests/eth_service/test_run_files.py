"""Reading what a driver is still writing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eth_service.run_files import MetricsFile, RunFiles, append_output, last_row, read_text
from tests.eth_service.double import DriverDouble, metrics_row


def iterations(file: MetricsFile, *, since: int = 0, limit: int = 100) -> list[int]:
    return [row["iteration"] for row in file.rows(since=since, limit=limit)]


def test_rows_come_as_they_are_written(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    assert iterations(file) == []
    lines = [json.dumps(metrics_row(iteration)) + "\n" for iteration in (1, 2, 3)]
    path.write_text(lines[0] + lines[1][:20])
    assert iterations(file) == [1]
    path.write_text("".join(lines))
    assert iterations(file) == [1, 2, 3]
    assert iterations(file, since=1, limit=1) == [2]
    assert iterations(file, since=3) == []


def test_a_resumed_run_replaces_the_iterations_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    path.write_text("".join(json.dumps({"iteration": i, "loss": 1.0}) + "\n" for i in (1, 2, 3)))
    assert iterations(file) == [1, 2, 3]
    with path.open("a") as appended:
        appended.writelines(json.dumps({"iteration": i, "loss": 2.0}) + "\n" for i in (2, 3, 4))
    assert [(row["iteration"], row["loss"]) for row in file.rows(since=0, limit=9)] == [
        (1, 1.0),
        (2, 2.0),
        (3, 2.0),
        (4, 2.0),
    ]


def test_a_file_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    path.write_text("".join(json.dumps({"iteration": i}) + "\n" for i in (1, 2, 3)))
    assert iterations(file) == [1, 2, 3]
    path.write_text('{"iteration": 1}\n')
    assert iterations(file) == [1]


def test_a_loss_that_is_no_number_becomes_null(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"iteration": 1, "loss": NaN, "pipelines": [{"id": 0, "end_seconds": Infinity}]}\n')
    expected = {"iteration": 1, "loss": None, "pipelines": [{"id": 0, "end_seconds": None}]}
    assert MetricsFile(path).rows(since=0, limit=1) == [expected]
    assert last_row(path) == expected


def test_the_last_row_is_the_last_whole_one(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    assert last_row(path) is None
    path.write_text("".join(json.dumps(metrics_row(i)) + "\n" for i in range(1, 400)) + '{"iteration": 4')
    row = last_row(path)
    assert row is not None
    assert row["iteration"] == 399


def test_a_plan_is_there_once_it_is_whole(tmp_path: Path) -> None:
    files, driver = RunFiles(), DriverDouble(tmp_path / "run")
    assert files.plan(driver.folder.path) is None
    driver.make_plan()
    whole = (driver.folder.path / "plan.json").read_text()
    (driver.folder.path / "plan.json").write_text(whole[:100])
    assert files.plan(driver.folder.path) is None
    (driver.folder.path / "plan.json").write_text(whole)
    assert files.plan(driver.folder.path) == driver.plan


@given(text=st.text(max_size=60), limit=st.integers(min_value=4, max_value=30))
def test_text_read_in_pieces_is_the_text(
    tmp_path_factory: pytest.TempPathFactory, text: str, limit: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "log"
    path.write_bytes(text.encode())
    parts, offset = [], 0
    while True:
        part = read_text(path, offset=offset, limit=limit)
        assert part.offset == offset
        if not part.text:
            break
        parts.append(part.text)
        offset = part.next_offset
    assert "".join(parts) == text
    assert offset == len(text.encode())


@given(text=st.text(max_size=40), back=st.integers(min_value=1, max_value=200))
def test_a_negative_offset_reads_whole_characters_of_the_end(
    tmp_path_factory: pytest.TempPathFactory, text: str, back: int
) -> None:
    path = tmp_path_factory.mktemp("text") / "log"
    path.write_bytes(text.encode())
    part = read_text(path, offset=-back, limit=1000)
    assert text.endswith(part.text)
    assert len(text.encode()) - back <= part.offset <= max(0, len(text.encode()) - back) + 3


def test_output_grows_by_whole_lines_and_ends_whole(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "log"
    append_output(path, "one\ntw", final=False)
    assert path.read_text() == "one\n"
    append_output(path, "one\ntwo\nthree", final=False)
    assert path.read_text() == "one\ntwo\n"
    append_output(path, "", final=False)
    append_output(path, "one\ntwo\nthree", final=True)
    assert path.read_text() == "one\ntwo\nthree"
