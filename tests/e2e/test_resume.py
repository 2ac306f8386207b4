"""A run that is killed goes on from its newest checkpoint, under another plan."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from actors.checkpoints import checkpoints, problems
from actors.job import read_job
from actors.planning import prepare
from actors.storage import storage_path
from eth_service.cli import main
from eth_service.run_files import MetricsFile
from planner.plan import Dtypes, PlanEmulation, read_plan
from tests.e2e.runs import Run, wait_until, write_job
from tests.engine import reference
from tests.object_storage import BUCKET, ObjectStorage
from tests.plans import make_plan
from tests.small_disk import empty, fill, small_disk

STEPS = 12


# Texts whose turns come as two to one.
MIXTURE = {"mixture": [{"path": "text.txt", "weight": 2}, {"path": "few.txt", "weight": 1}]}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Rows by iteration, those that a resumed run repeated once."""
    return MetricsFile(folder / "metrics.jsonl").rows(since=0, limit=10**9)


@pytest.mark.slow
def test_a_killed_run_goes_on_under_another_plan(tmp_path: Path, storage: ObjectStorage) -> None:
    """It learns from a mixture and saves into object storage. (One that is stopped, below, saves into its folder.)"""
    directory = f"s3://{BUCKET}/killed"
    settings = {"every": 3, "keep": 2, "directory": directory}
    job = write_job(tmp_path, steps=STEPS, checkpoint=settings, data=MIXTURE)
    (tmp_path / "few.txt").write_text("Few words, that come again and again. " * 50)
    folder = tmp_path / "run"
    saves = storage_path(directory, base=tmp_path, field="checkpoint.directory")
    killed = Run([str(job), "--output", str(folder)], tmp_path)
    assert wait_until(lambda: len(checkpoints(saves)) > 0)
    os.killpg(killed.process.pid, signal.SIGKILL)
    killed.end()
    assert killed.leaves_nothing()
    begun = checkpoints(saves)[-1].iteration
    assert 3 <= begun < STEPS

    old = read_plan(tmp_path / "plan.json")
    plan = make_plan(
        old.model,
        [[(1, 1, 1), (1, 1, 1)], [(1, 1, 2)]],
        cluster=old.cluster.model_copy(update={"nodes": old.cluster.nodes[::-1]}),
        micro_batch_sizes=[1, 2],
        samples=[4, 4],
        dtypes=Dtypes.for_precision("fp32"),
        emulation=PlanEmulation(time_scale=20_000.0),
    )
    (tmp_path / "plan.json").write_text(plan.model_dump_json())
    resumed = Run([str(job), "--output", str(folder), "--resume"], tmp_path)
    code, out, err = resumed.end()
    assert code == 0, err
    assert f"going on after iteration {begun}" in out and f"succeeded after {STEPS} of {STEPS}" in out
    rows = MetricsFile(folder / "metrics.jsonl").rows(since=0, limit=100)
    assert [row["iteration"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx(losses_of_one_process(job, tmp_path), rel=1e-4)
    assert [kept.iteration for kept in checkpoints(saves)] == [9, STEPS]
    assert json.loads((folder / "summary.json").read_text())["iterations"] == STEPS
    assert resumed.leaves_nothing()
    assert not (folder / "checkpoints").exists()
    assert {"step-00000009", "step-00000012"} == {name.split("/")[1] for name in storage.names("killed")}


def losses_of_one_process(path: Path, cache: Path) -> list[float]:
    """What plain training, never broken off, makes of the tokens that a run of the job has left in its cache."""
    job = read_job(path)
    with patch.dict(os.environ, {"XDG_CACHE_HOME": str(cache)}):
        tokens = prepare(job).tokens
    return reference.train(job.model, job.training, tokens).losses


def test_a_bucket_that_is_not_there_is_told_before_anything_starts(
    tmp_path: Path, storage: ObjectStorage
) -> None:
    job = write_job(tmp_path, steps=STEPS, checkpoint={"every": 3, "directory": "s3://none/folder"})
    refused = Run([str(job), "--output", str(tmp_path / "run")], tmp_path)
    code, _, err = refused.end()
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("eth: checkpoint.directory = s3://none/folder cannot be used: ")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_saves_and_goes_on_with_no_iteration_lost(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = write_job(tmp_path, steps=100_000, checkpoint={"every": 100_000})
    stopped = Run([str(job), "--output", str(folder)], tmp_path)
    assert wait_until(lambda: len(metrics(folder)) >= 3)
    # As Ctrl-C does: to the whole process group of the terminal.
    os.killpg(stopped.process.pid, signal.SIGINT)
    code, out, err = stopped.end(seconds=120)
    assert code == 130, err
    done = metrics(folder)[-1]["iteration"]
    assert f"stopped after iteration {done} of 100000; its state is saved" in err
    assert f"checkpoint after iteration {done}: " in out
    (saved,) = checkpoints(folder / "checkpoints")
    assert saved.iteration == done and list(problems(saved)) == []
    assert saved.manifest.loss == metrics(folder)[-1]["loss"]
    assert stopped.leaves_nothing()
    write_job(tmp_path, steps=done + 2, checkpoint={"every": 100_000})
    resumed = Run([str(job), "--output", str(folder), "--resume"], tmp_path)
    code, out, err = resumed.end()
    assert code == 0, err
    assert f"going on after iteration {done}" in out
    assert [row["iteration"] for row in metrics(folder)] == list(range(1, done + 3))
    starts = [json.loads(line) for line in (folder / "environment.jsonl").read_text().splitlines()]
    assert [start["iteration"] for start in starts] == [0, done]
    log = (folder / "log.txt").read_text()
    assert log.index("stopped after") < log.index(f"going on after iteration {done}") < log.index("succeeded")


@pytest.mark.slow
def test_a_run_whose_job_says_so_ends_without_a_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = write_job(tmp_path, steps=100_000, checkpoint={"every": 100_000, "on_stop": False})
    stopped = Run([str(job), "--output", str(folder)], tmp_path)
    assert wait_until(lambda: len(metrics(folder)) >= 2)
    stopped.process.send_signal(signal.SIGTERM)
    code, _, err = stopped.end(seconds=60)
    assert code == 130 and "is saved" not in err
    assert checkpoints(folder / "checkpoints") == []


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", size=8 << 20) as disk:
        folder = disk / "run"
        job = write_job(tmp_path, steps=100_000, checkpoint={"every": 5, "keep": 1})
        run = Run([str(job), "--output", str(folder)], tmp_path)
        assert wait_until(lambda: len(checkpoints(folder / "checkpoints")) > 0)
        fill(disk, leave=0)
        assert run.process.stdout is not None
        assert any("FAILED: " in line and "No space left on device" in line for line in run.process.stdout)
        (good,) = checkpoints(folder / "checkpoints")
        assert list(problems(good)) == []
        empty(disk)
        assert any(
            line.startswith("checkpoint after iteration") and "FAILED" not in line
            for line in run.process.stdout
        )
        run.process.send_signal(signal.SIGTERM)
        code, _, err = run.end(seconds=120)
        assert code == 130, err
        rows = metrics(folder)
        assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
        saves = [json.loads(line) for line in (folder / "saves.jsonl").read_text().splitlines()]
        failed = [save["iteration"] for save in saves if save["error"] is not None]
        assert failed and saves[0]["error"] is None and saves[-1]["error"] is None
        assert json.loads((folder / "summary.json").read_text())["failed_saves"] == len(failed)
        (good,) = checkpoints(folder / "checkpoints")
        assert good.iteration == rows[-1]["iteration"] and list(problems(good)) == []
        command = ["eth", "runs", "show", str(folder)]
        with patch.object(sys, "argv", command), pytest.raises(SystemExit):
            main()
        assert f"checkpoint after {failed[0]} could NOT be saved: " in capsys.readouterr().out
