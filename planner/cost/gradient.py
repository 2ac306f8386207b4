"""What follows the last backward: gradient collectives, the optimizer's step, and gathering what it made.

Collectives are priced by list scheduling on the real links of their holders (planner/cost/sync_seconds.py).
Eq. 6 of the paper is the special case of one block on links without latency, at ZeRO-0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from planner.cost.backward import BackwardLeft
from planner.cost.held import held_values
from planner.cost.stages import StageCost
from planner.cost.sync_seconds import SyncSeconds
from planner.cost.zero import stage_ways
from planner.gradient_blocks import GradientBlock
from planner.gradient_calls import GradientCall, call_reduction, gradient_layout
from planner.plan import CollectiveSources, Dtypes, Plan, StagePlan
from planner.profile.analytic import PRECISION_BYTES, AnalyticProfile
from planner.profile.table import ProfileTable


@dataclass(frozen=True)
class CallTime:
    """When a collective of gradients runs, on every one of its holders."""

    call: GradientCall
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True)
class Finish:
    """An iteration from its last backward passes on.

    Calls end at `synced_seconds`; all devices then update together, since clipping waits for the norm of the
    whole gradient; under ZeRO the parameters are gathered after that, by the same calls in the same order.
    """

    calls: tuple[CallTime, ...]
    gathers: tuple[CallTime, ...]
    synced_seconds: float
    optimizer_seconds: float
    sources: CollectiveSources

    @property
    def gather_seconds(self) -> float:
        start = self.synced_seconds + self.optimizer_seconds
        return max((time.end_seconds for time in self.gathers), default=start) - start

    @property
    def end_seconds(self) -> float:
        return self.synced_seconds + self.optimizer_seconds + self.gather_seconds


def finish(plan: Plan, ready_seconds: Sequence[float], *, cost: StageCost) -> Finish:
    """The end of an iteration in which each rank ends its last backward at `ready_seconds`."""
    sync = SyncSeconds(plan, cost.profile)
    calls = schedule_calls(plan, ready_seconds, cost=cost, sync=sync)
    synced = max([*ready_seconds, *(time.end_seconds for time in calls)])
    optimizer = slowest_optimizer_seconds(plan, cost.profile)
    gathers = _schedule_gathers(plan, synced + optimizer, sync) if plan.zero_stage else []
    measured = sum(sync.of(time.call).measured for time in calls)
    sources = CollectiveSources(measured=measured, links=len(calls) - measured)
    return Finish(tuple(calls), tuple(gathers), synced, optimizer, sources)


def block_seconds(plan: Plan, block: GradientCall | GradientBlock) -> float:
    """Seconds of one call's (or whole block's) all-reduce, in the way its links make fastest.

    By the links alone: what an emulated run lets it last.
    """
    if len(block.holders) < 2:
        return 0.0
    return call_reduction(plan, block).seconds


def schedule_calls(
    plan: Plan, ready_seconds: Sequence[float], *, cost: StageCost, sync: SyncSeconds | None = None
) -> list[CallTime]:
    """Start and end of every collective of the plan's scheme, in launch order.

    `ready_seconds` says when each rank ends its last backward; a plan that overlaps is ready for a call when
    that backward has passed the layers it takes. A call starts when all its holders are ready and have
    finished their earlier calls.
    """
    sync = sync or SyncSeconds(plan, cost.profile)
    left = BackwardLeft(plan, cost)

    def ready(rank: int, call: GradientCall) -> float:
        passed = left.seconds(rank, call.region) if plan.overlap else 0.0
        return ready_seconds[rank] - passed

    return _schedule(plan, ready, lambda call: sync.of(call).reduce)


def _schedule_gathers(plan: Plan, start: float, sync: SyncSeconds) -> list[CallTime]:
    return _schedule(plan, lambda rank, call: start, lambda call: sync.of(call).gather)


def _schedule(
    plan: Plan, ready: Callable[[int, GradientCall], float], seconds: Callable[[GradientCall], float]
) -> list[CallTime]:
    """Calls in launch order, each as soon as all its holders are ready and free."""
    free, times = [0.0] * plan.world_size, []
    for call in gradient_layout(plan).calls:
        start = max(max(ready(rank, call), free[rank]) for rank in call.holders)
        end = start + seconds(call)
        for rank in call.holders:
            free[rank] = end
        times.append(CallTime(call, start, end))
    return times


# AdamW reads the gradient, reads and writes two moments and the fp32 parameter; clipping reads the
# gradient once for the norm and rescales it in place.
_OPTIMIZER_BYTES = 4 + 2 * 8 + 8 + 4 + 8


def optimizer_seconds(plan: Plan, device: str, *, profile: ProfileTable | None = None) -> float:
    """Seconds of the optimizer's step on a device of the plan: bound by memory bandwidth."""
    profile = profile or AnalyticProfile(plan.model, plan.cluster.device_types)
    for pipeline, ways in zip(plan.pipelines, stage_ways(plan), strict=True):
        for stage, shared in zip(pipeline.stages, ways, strict=True):
            if device in stage.devices:
                return _update_seconds(plan, stage, plan.cluster.device_by_id[device].type, shared, profile)
    raise AssertionError(f"{device} is in no stage")


def slowest_optimizer_seconds(plan: Plan, profile: ProfileTable) -> float:
    """The optimizer's step of the device that takes longest; clipping makes all start it together."""
    return max(
        _update_seconds(plan, stage, type_, shared, profile)
        for pipeline, ways in zip(plan.pipelines, stage_ways(plan), strict=True)
        for stage, shared in zip(pipeline.stages, ways, strict=True)
        for type_ in {plan.cluster.device_by_id[device].type for device in stage.devices}
    )


def _update_seconds(
    plan: Plan, stage: StagePlan, device_type: str, ways: float, profile: ProfileTable
) -> float:
    """Of the values whose optimizer state a device keeps."""
    held = held_values(plan.model, stage.tp, stage.layer_count, stage.embedding, stage.head)
    moved_bytes = held.numel / ways * update_bytes_per_value(plan.dtypes)
    return profile.streaming_seconds(device_type=device_type, moved_bytes=moved_bytes)


def update_bytes_per_value(dtypes: Dtypes) -> int:
    """Bytes that the optimizer's step reads and writes for one parameter value."""
    if dtypes.param == "fp32":
        return _OPTIMIZER_BYTES
    # The new value is also written in the parameters' own precision.
    return _OPTIMIZER_BYTES + PRECISION_BYTES[dtypes.param]
