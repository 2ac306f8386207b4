"""The examples do what the README says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from actors.job import read_job
from actors.planning import make_plan, plan_request, prepare
from planner.cluster import resolve_cluster
from planner.describe import describe
from planner.local_batches import with_equal_batches
from planner.plan import Plan
from planner.search import find_plan
from tests.e2e.runs import Run, rows

EXAMPLES = Path(__file__).parents[2] / "examples"


def demo_plan() -> Plan:
    return find_plan(plan_request(read_job(EXAMPLES / "demo.yaml")))


def test_the_demo_is_planned_as_unlike_pipelines_of_unequal_batches() -> None:
    plan = demo_plan()
    assert len(plan.cluster.devices) >= 4 and len(plan.cluster.counts) >= 2
    shapes = {tuple((s.tp, s.dp, s.layers) for s in p.stages) for p in plan.pipelines}
    assert len(shapes) >= 2
    assert len({pipeline.samples for pipeline in plan.pipelines}) >= 2
    assert describe(plan).balance.pipeline_spread < 0.05
    assert not plan.idle_devices


def test_equal_batches_make_the_demo_visibly_slower() -> None:
    plan = demo_plan()
    equal = with_equal_batches(plan)
    assert plan.predicted is not None and equal.predicted is not None
    assert equal.predicted.iteration_seconds > 1.3 * plan.predicted.iteration_seconds


def test_the_cluster_file_and_the_hand_written_plan_are_sound(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert resolve_cluster("cluster.yaml", base=EXAMPLES).emulated
    job = read_job(EXAMPLES / "hand-written.yaml")
    plan = make_plan(job, prepare(job), equal_batches=False)
    assert len({tuple((s.tp, s.dp, s.layers) for s in p.stages) for p in plan.pipelines}) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("example", "share"), [("demo.yaml", 0.8), ("hand-written.yaml", 0.95)])
def test_every_example_learns(example: str, share: float, tmp_path: Path) -> None:
    run = Run([str(EXAMPLES / example), "--output", str(tmp_path / "run")], tmp_path)
    code, out, err = run.end(seconds=280)
    assert code == 0, err
    found = rows(tmp_path / "run")
    assert found[-1]["loss"] < share * found[0]["loss"]
    plan = json.loads((tmp_path / "run" / "plan.json").read_text())
    assert plan["predicted"]["simulated_seconds"] > 0
    assert str(tmp_path / "run") in out.splitlines()[-1]
    assert run.leaves_nothing()
