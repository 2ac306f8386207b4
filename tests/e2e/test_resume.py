"""A run that is killed goes on from its newest checkpoint, under another plan."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from actors.checkpoints import checkpoints
from eth_service.run_files import MetricsFile
from planner.plan import Dtypes, PlanEmulation, read_plan
from tests.e2e.runs import Run, wait_until, write_job
from tests.plans import make_plan

STEPS = 12


@pytest.mark.slow
def test_a_killed_run_goes_on_under_another_plan(tmp_path: Path) -> None:
    job = write_job(tmp_path, steps=STEPS, checkpoint={"every": 3, "keep": 2})
    folder = tmp_path / "run"
    killed = Run([str(job), "--output", str(folder)], tmp_path)
    assert wait_until(lambda: len(checkpoints(folder / "checkpoints")) > 0)
    os.killpg(killed.process.pid, signal.SIGKILL)
    killed.end()
    assert killed.leaves_nothing()
    begun = checkpoints(folder / "checkpoints")[-1].iteration
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
    # Parameters that began anew would lose nearly as much as those of the first iteration did.
    assert rows[begun]["loss"] < rows[0]["loss"] - 0.5 * (rows[0]["loss"] - rows[begun - 1]["loss"])
    assert [kept.iteration for kept in checkpoints(folder / "checkpoints")] == [9, STEPS]
    assert json.loads((folder / "summary.json").read_text())["iterations"] == STEPS
    assert resumed.leaves_nothing()
