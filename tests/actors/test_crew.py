"""Actors of a job on a real Ray cluster: placement, lock-step, failures, and that nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ray

from actors.crew import Crew
from actors.engine.trainer import TrainerConfig
from actors.failure import TrainingFailed
from actors.inventory import read_inventory
from actors.job import Training
from actors.placement import bind_nodes, release
from planner.errors import UserError
from planner.plan import Plan
from tests.actors.gloo_trainer import (
    Fault,
    gloo_trainer,
    run_out_of_memory,
    spin,
)
from tests.plans import make_model, make_plan

pytestmark = pytest.mark.usefixtures("unlike_ray")
PATIENCE = 60.0


def two_pipelines() -> Plan:
    """The 910B4 node is one pipeline of two stages, the A100 node one stage of TP 2."""
    cluster = read_inventory(ray.nodes()).cluster()
    by_type = {node.devices[0].type: node for node in cluster.nodes}
    ordered = cluster.model_copy(update={"nodes": (by_type["910B4"], by_type["A100"])})
    return make_plan(make_model(), [[(1, 1, 2), (1, 1, 2)], [(2, 1, 4)]], cluster=ordered)


def small_plan() -> Plan:
    """Three ranks: enough for a rank at fault, one in its pipeline and one in another."""
    cluster = two_pipelines().cluster
    return make_plan(make_model(), [[(1, 1, 2), (1, 1, 2)], [(1, 1, 4)]], cluster=cluster)


def make_crew(plan: Plan, *, fault: Fault | None = None) -> Crew:
    bound = bind_nodes(plan.cluster, read_inventory(ray.nodes()))
    return Crew(plan, bound=bound, make_trainer=gloo_trainer(fault))


def config(plan: Plan, timeout_seconds: float = 60.0) -> TrainerConfig:
    training = Training(global_batch_size=plan.global_batch_size, sequence_length=32, steps=3)
    return TrainerConfig(plan=plan, training=training, tokens=Path(), timeout_seconds=timeout_seconds)


def alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "(zombie)" not in Path(f"/proc/{pid}/status").read_text()


def wait_until(true: Callable[[], bool], *, seconds: float = 15.0) -> bool:
    deadline = time.monotonic() + seconds
    while not true() and time.monotonic() < deadline:
        time.sleep(0.05)
    return true()


def test_ranks_run_in_lock_step_where_their_devices_are_and_leave_nothing(tmp_path: Path) -> None:
    plan = two_pipelines()
    with make_crew(plan) as crew:
        crew.start(config(plan))
        ahead = [crew.submit(iteration) for iteration in (1, 2, 3)]
        for iteration, pending in enumerate(ahead, start=1):
            reports = crew.collect(pending, patience_seconds=PATIENCE)
            assert sorted(reports) == [0, 1, 2, 3]
            assert {report.loss for report in reports.values()} == {6.0 + 4 * iteration}
            assert {report.iteration for report in reports.values()} == {iteration}
        crew.save_weights(tmp_path / "weights", patience_seconds=PATIENCE)
        where = [(tmp_path / f"weights.{rank}").read_text() for rank in range(4)]
        homes = [node.ray_node_id for node in plan.cluster.nodes]
        assert where == [homes[0], homes[0], homes[1], homes[1]]
        crew.close(patience_seconds=PATIENCE)
    assert wait_until(lambda: not any(alive(process.pid) for process in crew.processes))
    assert wait_until(lambda: ray.available_resources().get("910B4") == 2)


@pytest.mark.parametrize(
    ("do", "timeout", "expected"),
    [
        (run_out_of_memory, 60.0, "failed: out of memory: wanted 3.0 GiB"),
        (spin, 3.0, "hung: it is busy at"),
    ],
)
def test_a_failing_rank_is_named_and_every_process_ends(
    do: Callable[[], Any], timeout: float, expected: str
) -> None:
    plan = small_plan()
    began = time.monotonic()
    with pytest.raises(TrainingFailed) as caught, make_crew(plan, fault=Fault(1, 2, do)) as crew:
        crew.start(config(plan, timeout))
        began = time.monotonic()
        for iteration in (1, 2):
            crew.collect(crew.submit(iteration), patience_seconds=PATIENCE)
    # Far below the timeout of a minute that the peers of a rank that fails outright would wait.
    assert time.monotonic() - began < 45
    device = plan.ranks[1].device
    assert str(caught.value).startswith(f"rank 1 (pipeline 0, stage 1, device {device}) {expected}")
    assert wait_until(lambda: not any(alive(process.pid) for process in crew.processes))


def test_a_coordinator_that_dies_while_ranks_iterate_ends_the_run_at_once() -> None:
    plan = small_plan()
    with make_crew(plan, fault=Fault(1, 2, spin)) as crew:
        crew.start(config(plan))
        crew.collect(crew.submit(1), patience_seconds=PATIENCE)
        pending = crew.submit(2)
        ray.kill(crew._coordinator)
        began = time.monotonic()
        with pytest.raises(TrainingFailed, match=r"^the coordinator's process ended unexpectedly"):
            crew.collect(pending, patience_seconds=PATIENCE)
        # Far below the timeout and the patience of a minute.
        assert time.monotonic() - began < 30
    assert wait_until(lambda: not any(alive(process.pid) for process in crew.processes))


@pytest.mark.slow
def test_the_actor_of_a_pipeline_that_hangs_is_named_and_ended() -> None:
    plan = small_plan()
    with make_crew(plan) as crew:
        crew.start(config(plan))
        crew.collect(crew.submit(1), patience_seconds=PATIENCE)
        _, actor = crew._actor_processes[1]
        os.kill(actor, signal.SIGSTOP)
        expected = r"^rank 2 \(pipeline 1, .*\) was not heard of: the actor of its pipeline does not answer"
        with pytest.raises(TrainingFailed, match=expected):
            crew.collect(crew.submit(2), patience_seconds=5)
    assert wait_until(lambda: not any(alive(pid) for pid in (actor, *(p.pid for p in crew.processes))))


def test_devices_that_are_taken_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("actors.crew.PLACEMENT_SECONDS", 2.0)
    plan = two_pipelines()
    with (
        make_crew(plan),
        pytest.raises(UserError, match=r"needs 2x910B4, 2xA100; the Ray cluster has 0 of 2 910B4 free"),
    ):
        make_crew(plan)


@pytest.mark.timeout(90)
@pytest.mark.slow
def test_a_ray_that_no_longer_answers_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    answers, released = threading.Event(), threading.Event()

    def stuck(groups: Any) -> None:
        answers.wait()
        release(groups)
        released.set()

    monkeypatch.setattr("actors.crew.release", stuck)
    monkeypatch.setattr("actors.crew._CONTROL_SECONDS", 0.2)
    plan = small_plan()
    crew = make_crew(plan)
    crew.start(config(plan, 60.0))
    crew.end()
    assert not released.is_set()
    assert wait_until(lambda: not any(alive(process.pid) for process in crew.processes))
    answers.set()
    assert released.wait(30)
