"""A run that is killed goes on from its newest checkpoint, under another plan."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from actors.checkpoints import checkpoints
from actors.job import read_job
from actors.planning import prepare
from actors.storage import StoragePath, storage_path
from eth_service.run_files import MetricsFile
from planner.plan import Dtypes, PlanEmulation, read_plan
from tests.e2e.runs import Run, wait_until, write_job
from tests.engine import reference
from tests.object_storage import BUCKET, ObjectStorage
from tests.plans import make_plan

STEPS = 12


# Texts whose turns come as two to one.
MIXTURE = {"mixture": [{"path": "text.txt", "weight": 2}, {"path": "few.txt", "weight": 1}]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("directory", "data"),
    [(None, MIXTURE), (f"s3://{BUCKET}/killed", {"path": "text.txt"})],
    ids=["a mixture, into the run folder", "into object storage"],
)
def test_a_killed_run_goes_on_under_another_plan(
    tmp_path: Path, directory: str | None, data: dict[str, Any], storage: ObjectStorage
) -> None:
    settings = {"every": 3, "keep": 2} | ({} if directory is None else {"directory": directory})
    job = write_job(tmp_path, steps=STEPS, checkpoint=settings, data=data)
    (tmp_path / "few.txt").write_text("Few words, that come again and again. " * 50)
    folder = tmp_path / "run"
    saves: StoragePath = folder / "checkpoints"
    if directory is not None:
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
    if directory is not None:
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
