"""The price of any Plan: Eq. 5, gradient blocks, the optimizer's step and gathering; and every stage's memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from planner.cost.exchange import WAYS, Way
from planner.cost.gradient import Finish, finish
from planner.cost.layer_flow import recompute_of
from planner.cost.pipeline import stage_end_seconds
from planner.cost.plan_memory import PlanMemory, check_memory
from planner.cost.stage_shape import StageShape, stage_shape
from planner.cost.stages import StageCost, StageSeconds
from planner.plan import CollectiveSources, Plan, Predicted, PredictedPipeline, PredictedStage
from planner.profile.table import ProfileTable, StepSeconds

__all__ = [
    "check_memory",
    "iteration_seconds",
    "pipeline_stages",
    "plan_shapes",
    "price_plan",
    "replica_seconds",
    "transfer_seconds",
    "with_prediction",
]


def replica_seconds(
    plan: Plan, *, pipeline: int, stage: int, replica: int, profile: ProfileTable | None = None
) -> StepSeconds:
    """Device seconds of one micro-batch on one replica: operators and TP collectives, without receiving."""
    place = plan.pipelines[pipeline].stages[stage]
    device = plan.cluster.device_by_id[place.tp_group(replica)[0]]
    return StageCost.of_plan(plan, profile=profile).replica_step(
        device_type=device.type,
        tp=place.tp,
        rows=place.rows[replica],
        layers=place.layer_count,
        embedding=place.embedding,
        head=place.head,
        recompute=recompute_of(place.recompute),
        sequence_parallel=place.sequence_parallel,
    )


def transfer_seconds(plan: Plan, *, sender: str, receiver: str, message_bytes: float) -> float:
    """Device seconds of one message between two devices, named by id."""
    return plan.cluster.link(sender, receiver).seconds(message_bytes)


def price_plan(
    plan: Plan,
    *,
    profile: ProfileTable | None = None,
    ways: Sequence[Way] = WAYS,
    cost: StageCost | None = None,
) -> Predicted:
    """What a plan is expected to take, stage by stage. The profile is the analytic one unless given.

    Other systems' runs may exchange activations in fewer `ways` than the engine knows. `cost` stands for both, if
    there is one of the plan's request already.
    """
    cost = cost or StageCost.of_plan(plan, profile=profile, ways=ways)
    stages = [pipeline_stages(plan, index, cost) for index in range(len(plan.pipelines))]
    ends = [
        stage_end_seconds([stage.step for stage in pipeline], micro_batches=planned.micro_batches)
        for pipeline, planned in zip(stages, plan.pipelines, strict=True)
    ]
    ready = [ends[place.pipeline][place.stage] for place in plan.ranks]
    last = finish(plan, ready, cost=cost)
    synced, memory = _stage_sync_ends(plan, ends, last), PlanMemory(plan)
    pipelines = tuple(
        _predicted_pipeline(plan, index, stages[index], ends[index], synced[index], cost, memory)
        for index in range(len(plan.pipelines))
    )
    return Predicted(
        iteration_seconds=last.end_seconds,
        samples_per_second=plan.global_batch_size / last.end_seconds,
        optimizer_seconds=last.optimizer_seconds,
        gather_seconds=last.gather_seconds,
        gradient_collectives=last.sources,
        tp_collectives=_tp_sources(plan, cost),
        pipelines=pipelines,
    )


def with_prediction(
    plan: Plan, *, profile: ProfileTable | None = None, cost: StageCost | None = None
) -> Plan:
    """The same plan with `predicted` filled (`price_plan`)."""
    return plan.model_copy(update={"predicted": price_plan(plan, profile=profile, cost=cost)})


def iteration_seconds(plan: Plan) -> float:
    """Of a priced plan."""
    assert plan.predicted is not None, "only a priced plan has a price"
    return plan.predicted.iteration_seconds


def pipeline_stages(plan: Plan, pipeline: int, cost: StageCost) -> list[StageSeconds]:
    """Times of every stage of one pipeline of a plan."""
    return cost.pipeline_stages(plan_shapes(plan, pipeline))


def plan_shapes(plan: Plan, pipeline: int) -> list[StageShape]:
    return [
        stage_shape(stage, plan.cluster, zero_stage=plan.zero_stage)
        for stage in plan.pipelines[pipeline].stages
    ]


def _stage_sync_ends(plan: Plan, ends: list[list[float]], last: Finish) -> list[list[float]]:
    """When the last gradient block of every stage ends."""
    done = [list(pipeline) for pipeline in ends]
    for time in last.calls:
        for rank in time.call.holders:
            place = plan.ranks[rank]
            done[place.pipeline][place.stage] = max(done[place.pipeline][place.stage], time.end_seconds)
    return done


def _tp_sources(plan: Plan, cost: StageCost) -> CollectiveSources:
    """Stages with TP by what prices their collectives; one replica stands for the stage."""
    found: Counter[str] = Counter(
        cost.tp_source(plan.cluster.device_by_id[stage.devices[0]].type, stage.tp, stage.rows[0])
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if stage.tp > 1
    )
    return CollectiveSources(**found)


def _predicted_pipeline(
    plan: Plan,
    index: int,
    stages: list[StageSeconds],
    ends: list[float],
    synced: list[float],
    cost: StageCost,
    memory: PlanMemory,
) -> PredictedPipeline:
    shapes = plan_shapes(plan, index)
    predicted = []
    for number, stage in enumerate(stages):
        tensors, needed, device = memory.fullest(index, number)
        predicted.append(
            PredictedStage(
                forward_seconds=stage.step.forward,
                backward_seconds=stage.step.backward,
                exchange_seconds=stage.receive.total,
                recompute_seconds=cost.stage_replay_seconds(shapes[number]),
                all_reduce_seconds=synced[number] - ends[number],
                end_seconds=synced[number],
                tensor_bytes=tensors,
                device_bytes=needed,
                memory_limit_bytes=plan.cluster.type_of(device.id).memory_bytes,
            )
        )
    return PredictedPipeline(end_seconds=max(synced), stages=tuple(predicted))
