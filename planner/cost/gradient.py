"""Gradient collectives priced by list scheduling on the real links of their holders; the optimizer's step.

Eq. 6 of the paper is the special case of one block on links without latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cost.backward import BackwardLeft
from planner.cost.held import held_values
from planner.cost.stages import StageCost
from planner.gradient_blocks import GradientBlock
from planner.gradient_calls import CallSeconds, GradientCall, call_reduction, gradient_layout
from planner.plan import Dtypes, Plan, StagePlan
from planner.profile.analytic import PRECISION_BYTES, AnalyticProfile
from planner.profile.table import ProfileTable


@dataclass(frozen=True)
class CallTime:
    """When a collective of gradients runs, on every one of its holders."""

    call: GradientCall
    start_seconds: float
    end_seconds: float


def block_seconds(plan: Plan, block: GradientCall | GradientBlock) -> float:
    """Seconds of one call's (or whole block's) all-reduce, in the way its links make fastest."""
    if len(block.holders) < 2:
        return 0.0
    return call_reduction(plan, block).seconds


def schedule_calls(plan: Plan, ready_seconds: Sequence[float], *, cost: StageCost) -> list[CallTime]:
    """Start and end of every collective of the plan's scheme, in launch order.

    `ready_seconds` says when each rank ends its last backward; a plan that overlaps is ready for a call when
    that backward has passed the layers it takes. A call starts when all its holders are ready and have
    finished their earlier calls.
    """
    left = BackwardLeft(plan, cost)
    free, seconds = [0.0] * len(ready_seconds), CallSeconds(plan)
    times = []
    for call in gradient_layout(plan).calls:
        start = 0.0
        for rank in call.holders:
            ready = ready_seconds[rank]
            if plan.overlap:
                ready -= left.seconds(rank, call.region)
            start = max(start, ready, free[rank])
        end = start + seconds.of(call)
        for rank in call.holders:
            free[rank] = end
        times.append(CallTime(call, start, end))
    return times


# AdamW reads the gradient, reads and writes two moments and the fp32 parameter; clipping reads the
# gradient once for the norm and rescales it in place.
_OPTIMIZER_BYTES = 4 + 2 * 8 + 8 + 4 + 8


def optimizer_seconds(plan: Plan, device: str, *, profile: ProfileTable | None = None) -> float:
    """Seconds of the optimizer's step on a device of the plan: bound by memory bandwidth."""
    stage = next(stage for pipeline in plan.pipelines for stage in pipeline.stages if device in stage.devices)
    profile = profile or AnalyticProfile(plan.model, plan.cluster.device_types)
    return _update_seconds(plan, stage, plan.cluster.device_by_id[device].type, profile)


def slowest_optimizer_seconds(plan: Plan, profile: ProfileTable) -> float:
    """The optimizer's step of the device that takes longest; clipping makes all start it together."""
    return max(
        _update_seconds(plan, stage, type_, profile)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for type_ in {plan.cluster.device_by_id[device].type for device in stage.devices}
    )


def _update_seconds(plan: Plan, stage: StagePlan, device_type: str, profile: ProfileTable) -> float:
    held = held_values(plan.model, stage.tp, stage.layer_count, stage.embedding, stage.head)
    moved_bytes = held.numel * update_bytes_per_value(plan.dtypes)
    return profile.streaming_seconds(device_type=device_type, moved_bytes=moved_bytes)


def update_bytes_per_value(dtypes: Dtypes) -> int:
    """Bytes that the optimizer's step reads and writes for one parameter value."""
    if dtypes.param == "fp32":
        return _OPTIMIZER_BYTES
    # The new value is also written in the parameters' own precision.
    return _OPTIMIZER_BYTES + PRECISION_BYTES[dtypes.param]
