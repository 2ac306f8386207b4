"""A plan's price item by item: stages, pipelines, gradient collectives, optimizer, gathering (Eq. 5)."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.gradient import CallTime, finish
from planner.cost.pipeline import stage_end_seconds
from planner.cost.plan_memory import PlanMemory
from planner.cost.price import pipeline_stages, plan_shapes
from planner.cost.stages import StageCost
from planner.plan import PipelinePlan, Plan
from planner.profile.analytic import PRECISION_BYTES
from planner.profile.table import ProfileTable


@dataclass(frozen=True)
class StageItems:
    """Seconds of one micro-batch on the slowest replica, receiving apart; bytes of the fullest device.

    Backward includes `recompute`, which replays operators, and `scatter`, ZeRO-2's reduce-scatter.
    """

    forward: float
    backward: float
    recompute: float
    scatter: float
    receive_forward: float
    receive_backward: float
    end: float
    """When the stage ends its last backward."""
    memory_bytes: int
    limit_bytes: int

    @property
    def period(self) -> float:
        """Seconds a micro-batch, receiving included."""
        return self.forward + self.backward + self.receive_forward + self.receive_backward

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.limit_bytes


@dataclass(frozen=True)
class PipelineItems:
    """Eq. 5 of one pipeline: `fill` (all forwards), `paced` (the other micro-batches at the slowest stage's
    period), `drain` (all backwards)."""

    micro_batches: int
    fill: float
    period: float
    drain: float
    stages: tuple[StageItems, ...]

    @property
    def paced(self) -> float:
        return self.period * (self.micro_batches - 1)

    @property
    def end(self) -> float:
        """When the last backward ends."""
        return self.fill + self.paced + self.drain


@dataclass(frozen=True)
class GradientItem:
    """One collective of gradients."""

    ranks: tuple[int, ...]
    message_bytes: int
    start: float
    end: float


@dataclass(frozen=True)
class PlanItems:
    """The whole iteration: it ends when the last collective, then the optimizer's step, and under ZeRO then
    the gathering of parameters have ended."""

    pipelines: tuple[PipelineItems, ...]
    gradients: tuple[GradientItem, ...]
    optimizer: float
    gather: float

    @property
    def backward_end(self) -> float:
        return max(pipeline.end for pipeline in self.pipelines)

    @property
    def gradient_end(self) -> float:
        return max([self.backward_end, *(item.end for item in self.gradients)])

    @property
    def iteration(self) -> float:
        return self.gradient_end + self.optimizer + self.gather


def items_of(plan: Plan, *, profile: ProfileTable | None = None) -> PlanItems:
    """The items of a plan, worked out from the plan alone."""
    cost = StageCost.of_plan(plan, profile=profile)
    pipelines = tuple(
        _pipeline_items(plan, index, pipeline, cost) for index, pipeline in enumerate(plan.pipelines)
    )
    ready = [pipelines[place.pipeline].stages[place.stage].end for place in plan.ranks]
    width = PRECISION_BYTES[plan.dtypes.wire]
    last = finish(plan, ready, cost=cost)
    return PlanItems(
        pipelines,
        tuple(_gradient_item(time, width) for time in last.calls if len(time.call.holders) > 1),
        last.optimizer_seconds,
        last.gather_seconds,
    )


def _pipeline_items(plan: Plan, index: int, pipeline: PipelinePlan, cost: StageCost) -> PipelineItems:
    stages, shapes = pipeline_stages(plan, index, cost), plan_shapes(plan, index)
    steps = [stage.step for stage in stages]
    ends = stage_end_seconds(steps, micro_batches=pipeline.micro_batches)
    memory = PlanMemory(plan)
    found = []
    for number, (stage, end) in enumerate(zip(stages, ends, strict=True)):
        _, needed, device = memory.fullest(index, number)
        found.append(
            StageItems(
                forward=stage.step.forward - stage.receive.forward,
                backward=stage.step.backward - stage.receive.backward,
                recompute=cost.stage_replay_seconds(shapes[number]),
                scatter=cost.scatter_seconds(shapes[number]),
                receive_forward=stage.receive.forward,
                receive_backward=stage.receive.backward,
                end=end,
                memory_bytes=needed,
                limit_bytes=plan.cluster.type_of(device.id).memory_bytes,
            )
        )
    return PipelineItems(
        micro_batches=pipeline.micro_batches,
        fill=sum(step.forward for step in steps),
        period=max(step.total for step in steps),
        drain=sum(step.backward for step in steps),
        stages=tuple(found),
    )


def _gradient_item(time: CallTime, width: int) -> GradientItem:
    return GradientItem(time.call.holders, time.call.numel * width, time.start_seconds, time.end_seconds)
