"""What a run leaves behind, and which folders it takes."""

from __future__ import annotations

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from actors.job import Job, parse_job, read_job
from actors.run_folder import RunFolder, default_folder
from actors.run_log import Logged
from actors.summary import Silent
from planner.errors import UserError
from tests.actors.test_metrics import emulated_plan


def make_job(base: Path) -> Job:
    return parse_job(
        {
            "name": "demo",
            "model": "gpt3-nano",
            "data": {"path": "text.txt"},
            "training": {"global_batch_size": 4, "sequence_length": 16, "steps": 2},
            "cluster": {"nodes": [{"emulate": True, "devices": [{"type": "A100", "count": 2}]}]},
        },
        base=base,
    )


def test_the_default_folder_is_named_after_job_and_time(tmp_path: Path) -> None:
    moment = datetime(2030, 1, 2, 3, 4, 5)
    assert default_folder(make_job(tmp_path), now=moment) == Path("runs/demo-20300102-030405")


def test_a_folder_that_a_run_writes_into_takes_no_second_one(tmp_path: Path) -> None:
    first = RunFolder.check(tmp_path, overwrite=True)
    first.create()
    second = RunFolder.check(tmp_path, overwrite=False, resume=True)
    with pytest.raises(UserError, match="is being written by a run that goes on"):
        second.create(keep_metrics=True)
    first.close()
    second.create(keep_metrics=True)
    second.close()


def test_a_folder_with_content_is_refused_unless_it_may_be_overwritten(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("old\n")
    (tmp_path / "notes.txt").write_text("the user's\n")
    with pytest.raises(
        UserError, match=r"is not empty; name another folder, add --resume .* or --overwrite to lose it"
    ):
        RunFolder.check(tmp_path, overwrite=False)
    folder = RunFolder.check(tmp_path, overwrite=True)
    folder.create()
    assert folder.metrics.read_text() == ""
    assert (tmp_path / "notes.txt").read_text() == "the user's\n"
    with pytest.raises(UserError, match="is not a folder"):
        RunFolder.check(tmp_path / "notes.txt", overwrite=True)


def test_two_runs_that_chose_one_folder_do_not_share_it(tmp_path: Path) -> None:
    first, second = (RunFolder.check(tmp_path / "run", overwrite=False) for _ in range(2))
    first.create()
    first.append_metrics({"iteration": 1})
    with pytest.raises(UserError, match="is not empty"):
        second.create()
    assert first.metrics.read_text() == '{"iteration": 1}\n'


def test_the_written_job_can_be_run_again_from_anywhere(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    folder = RunFolder.check(tmp_path / "a" / "run", overwrite=False)
    folder.create()
    folder.write_job(job)
    again = read_job(folder.path / "job.yaml")
    assert again.texts()[0].path == tmp_path / "text.txt"
    assert again.model_dump(exclude={"data"}) == job.model_dump(exclude={"data"})
    assert again.data.end_of_document is None
    folder.write_job(job, end_of_document=256)
    assert read_job(folder.path / "job.yaml").data.end_of_document == 256


def test_the_written_job_names_the_held_out_text_from_anywhere(tmp_path: Path) -> None:
    values = make_job(tmp_path).model_dump(mode="json", exclude_defaults=True)
    values["data"]["held_out"] = {"path": "validation.txt", "pattern": "*.txt"}
    folder = RunFolder.check(tmp_path / "a" / "run", overwrite=False)
    folder.create()
    folder.write_job(parse_job(values, base=tmp_path))
    held_out = read_job(folder.path / "job.yaml").held_out_text()
    assert held_out is not None
    assert (held_out.path, held_out.pattern) == (tmp_path / "validation.txt", "*.txt")


def test_metrics_are_whole_lines(tmp_path: Path) -> None:
    folder = RunFolder.check(tmp_path / "run", overwrite=False)
    folder.create()
    for iteration in (1, 2):
        folder.append_metrics({"iteration": iteration, "loss": 0.5})
    assert [json.loads(line)["iteration"] for line in folder.metrics.read_text().splitlines()] == [1, 2]
    assert folder.written() == ["metrics.jsonl"]


def test_the_written_job_names_the_sources_of_a_mixture_from_anywhere(tmp_path: Path) -> None:
    values = make_job(tmp_path).model_dump(mode="json", exclude_defaults=True)
    values["data"] = {"mixture": [{"path": f"{name}.txt", "weight": 2} for name in "ab"]}
    folder = RunFolder.check(tmp_path / "a" / "run", overwrite=False)
    folder.create()
    folder.write_job(parse_job(values, base=tmp_path))
    again = read_job(folder.path / "job.yaml")
    assert [text.path for text in again.texts()] == [tmp_path / "a.txt", tmp_path / "b.txt"]
    assert again.data.mixture is not None and [source.weight for source in again.data.mixture] == [2, 2]


@contextmanager
def largest_file(size: int) -> Iterator[None]:
    """No file of this process may grow beyond so many bytes: writing fails in the middle, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_rows_that_a_full_disk_refuses_wait_for_the_next(tmp_path: Path) -> None:
    folder = RunFolder.check(tmp_path / "run", overwrite=False)
    folder.create()
    assert folder.append_metrics({"iteration": 1}) is None
    whole = folder.metrics.read_text()
    with largest_file(len(whole) + 5):
        for iteration in (2, 3):
            assert folder.append_metrics({"iteration": iteration}) == "File too large"
            # Whoever follows the file never sees a part of a row.
            assert folder.metrics.read_text() == whole
        assert folder.append_save({"iteration": 2, "error": "no space"}) is not None
        log = Logged(Silent())
        log.status("kept in mind")
        log.planned(emulated_plan(), folder=folder.path, steps=4)
        log.status("said while the disk was full")
        assert "said" not in (folder.path / "log.txt").read_text()
    log.status("said later")
    told = (folder.path / "log.txt").read_text()
    assert (
        told.index("kept in mind ...")
        < told.index("run folder:")
        < told.index("was full")
        < told.index("later")
    )
    assert folder.append_metrics({"iteration": 4}) is None
    assert [json.loads(line)["iteration"] for line in folder.metrics.read_text().splitlines()] == [1, 2, 3, 4]


def test_a_resumed_run_keeps_what_is_told_of_earlier_ones(tmp_path: Path) -> None:
    folder = RunFolder.check(tmp_path / "run", overwrite=False)
    folder.create()
    folder.append_save({"iteration": 1, "error": None})
    folder.append_start({"iteration": 0})
    (tmp_path / "run" / "log.txt").write_text("said\n")
    folder.close()
    resumed = RunFolder.check(tmp_path / "run", overwrite=False, resume=True)
    resumed.create(keep_metrics=True)
    assert {"saves.jsonl", "environment.jsonl", "log.txt"} < set(resumed.written())
    resumed.close()
    anew = RunFolder.check(tmp_path / "run", overwrite=True)
    anew.create()
    assert anew.written() == ["metrics.jsonl"]
    anew.close()
    RunFolder.check(tmp_path / "run", overwrite=True).create()
    assert not (tmp_path / "run" / "saves.jsonl").exists()
