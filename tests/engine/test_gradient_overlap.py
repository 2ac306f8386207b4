"""Calls are launched as backward completes them: at once, in order, and no faster than an emulated device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.courier import Work
from actors.engine.emulate import EmulatedDevice
from actors.engine.gradient_transport import Span
from actors.engine.trainer import TrainerConfig
from planner.cluster import Cluster
from planner.cost.backward import BackwardLeft
from planner.cost.gradient import block_seconds
from planner.cost.price import replica_seconds
from planner.cost.stages import StageCost
from planner.gradient_calls import GradientCall, gradient_layout
from planner.plan import Plan, PlanEmulation
from planner.timeline import Event
from tests.engine.held_parameters import Rig
from tests.engine.law_plans import FP32, MODEL
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import train_rank, training_of, write_tokens
from tests.gradient_plans import variant
from tests.plans import Degrees, make_plan


class _Recorder:
    """Stands in for the network: remembers what was launched, and what was in it."""

    def __init__(self) -> None:
        self.launched: list[GradientCall] = []
        self.sums: list[float] = []

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        self.launched.append(call)
        self.sums.append(float(data.sum()))
        return _Done()

    def close(self) -> None:
        return None


class _Done:
    def wait(self) -> object:
        return Span(1.0, 2.0)


def plan_on(*pipelines: list[Degrees], emulate: bool = False, time_scale: float = 1.0) -> Plan:
    """On links without latency, slow enough that gradients take about as long as a backward."""
    count = sum(tp * dp for stages in pipelines for tp, dp, _ in stages)
    links = {"intra_node": {"bandwidth": 1e10, "latency": 0.0}}
    cluster = Cluster.model_validate(
        {
            "nodes": [{"name": "n", "devices": [{"type": "910B2", "count": count}], "emulate": emulate}],
            "links": links,
        }
    )
    emulation = PlanEmulation(time_scale=time_scale)
    return make_plan(MODEL, pipelines, cluster=cluster, dtypes=FP32, overlap=True, emulation=emulation)


def test_a_call_is_launched_with_the_last_gradient_it_takes_and_after_the_earlier_ones() -> None:
    plan = plan_on([(1, 1, 4)], [(1, 1, 4)])
    calls = gradient_layout(plan).calls
    assert [call.region for call in calls] == [4, 3, 2, 1, 0, 0]
    recorder = _Recorder()
    rig = Rig.make(plan, 0, transport=recorder)
    rig.sync.arm()
    # From the first layer to the last: the wrong way round, so that all wait for the last layer's.
    late = [handle for handle in rig.handles if handle.spec.region.order >= 4]
    for handle in (handle for handle in rig.handles if handle not in late):
        handle.leaf.sum().backward()
    assert recorder.launched == []
    for handle in late[:-1]:
        handle.leaf.sum().backward()
    assert recorder.launched == []
    late[-1].leaf.sum().backward()
    assert recorder.launched == list(calls)
    # Every gradient is one: what was launched was complete.
    assert sum(recorder.sums) == sum(handle.spec.numel for handle in rig.handles)
    rig.sync.start()
    rig.sync.finish()
    assert recorder.launched == list(calls)
    assert [time.span for time in rig.sync.times] == [Span(1.0, 2.0)] * len(calls)


def test_backward_s_own_order_launches_layer_by_layer() -> None:
    plan = plan_on([(1, 1, 4)], [(1, 1, 4)])
    recorder = _Recorder()
    passed: list[int] = []
    rig = Rig.make(plan, 0, transport=recorder, before_launch=passed.append)
    seen = []
    for micro_batch in range(2):
        if micro_batch:
            rig.sync.arm()
        for region in range(5, -1, -1):
            for handle in rig.handles:
                if handle.spec.region.order == region:
                    handle.leaf.sum().backward()
            seen.append(len(recorder.launched))
    # Nothing in the first micro-batch; the norm behind the last layer has no call of its own.
    assert seen == [0, 0, 0, 0, 0, 0, 0, 1, 2, 3, 4, 6]
    assert passed == [4, 3, 2, 1, 0, 0]


def test_what_backward_leaves_without_a_gradient_is_launched_at_the_end() -> None:
    plan = plan_on([(1, 1, 4)], [(1, 1, 4)])
    recorder = _Recorder()
    rig = Rig.make(plan, 0, transport=recorder)
    rig.sync.arm()
    for handle in rig.handles[1:]:
        handle.leaf.sum().backward()
    assert len(recorder.launched) < len(gradient_layout(plan).calls)
    rig.run_once()
    assert len(recorder.launched) == len(gradient_layout(plan).calls)


@pytest.mark.parametrize("scheme", ["tensor", "device"])
def test_other_schemes_launch_as_soon_as_they_can(scheme: str) -> None:
    plan = variant(plan_on([(1, 1, 4)], [(2, 1, 4)]), scheme, overlap=True)
    recorder = _Recorder()
    rig = Rig.make(plan, 0, transport=recorder)
    rig.sync.arm()
    last = [handle for handle in rig.handles if handle.spec.region.order >= 4]
    for handle in last:
        handle.leaf.sum().backward()
    # A parameter that TP cuts is two calls, one for each half.
    halves = sum(2 if handle.spec.tp_dim is not None else 1 for handle in last)
    assert len(recorder.launched) == (0 if scheme == "device" else halves)


def test_an_emulated_device_passes_regions_no_sooner_than_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = plan_on([(1, 1, 4)], [(1, 1, 4)], emulate=True, time_scale=1000.0)
    now = 50.0

    def sleep_until(deadline: float) -> None:
        nonlocal now
        now = max(now, deadline)

    monkeypatch.setattr("actors.engine.emulate.sleep_until", sleep_until)
    monkeypatch.setattr("actors.engine.emulate.time.monotonic", lambda: now)
    device = EmulatedDevice(plan, plan.ranks[0])
    step = replica_seconds(plan, pipeline=0, stage=0, replica=0)
    left = BackwardLeft(plan, StageCost.of_plan(plan))
    with device.step("backward"):
        for region in (4, 2, 0):
            device.passed(region)
            assert now == pytest.approx(50.0 + 1000.0 * (step.backward - left.seconds(0, region)))
    assert now == pytest.approx(50.0 + 1000.0 * step.backward)
    assert left.seconds(0, 4) > left.seconds(0, 2) > left.seconds(0, 1) > left.seconds(0, 0) == 0.0


def test_an_emulated_trace_shows_calls_that_take_their_time_after_their_layers(
    rank_pool: RankPool, tmp_path: Path
) -> None:
    scale = 3000.0
    plan = plan_on([(1, 1, 4)], [(1, 1, 4)], emulate=True, time_scale=scale)
    training = training_of(plan, steps=2)
    config = TrainerConfig(plan=plan, training=training, tokens=write_tokens(tmp_path), timeout_seconds=30)
    outcomes = rank_pool.run(train_rank, config, world_size=2)
    left = BackwardLeft(plan, StageCost.of_plan(plan))
    step = replica_seconds(plan, pipeline=0, stage=0, replica=0)
    calls = gradient_layout(plan).calls
    for rank, outcome in enumerate(outcomes):
        events = outcome.reports[-1].events
        backward = [event for event in events if event.kind == "backward"][-1]
        gradients = [event for event in events if event.kind == "gradient_sync"]
        assert [event.block for event in gradients] == [call.block for call in calls]
        end = 0.0
        for event, call in zip(gradients, calls, strict=True):
            passed = backward.start_seconds + scale * (step.backward - left.seconds(rank, call.region))
            assert event.start_seconds >= max(passed, end) - 1e-6
            assert _seconds(event) >= scale * block_seconds(plan, call) - 1e-6
            end = event.end_seconds


def _seconds(event: Event) -> float:
    return event.end_seconds - event.start_seconds
