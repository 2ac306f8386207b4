"""The price of any Plan: Eq. 5 plus gradient blocks plus the optimizer's step, and every stage's memory."""

from __future__ import annotations

from planner.cluster import Device
from planner.cost.gradient import schedule_calls, slowest_optimizer_seconds
from planner.cost.memory import MemoryModel, StageLoad
from planner.cost.pipeline import stage_end_seconds
from planner.cost.stages import StageCost, StageSeconds, StageShape, stage_shape
from planner.errors import UserError
from planner.plan import Plan, Predicted, PredictedPipeline, PredictedStage
from planner.profile.table import ProfileTable, StepSeconds
from planner.units import format_bytes


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
    )


def transfer_seconds(plan: Plan, *, sender: str, receiver: str, message_bytes: float) -> float:
    """Device seconds of one message between two devices, named by id."""
    return plan.cluster.link(sender, receiver).seconds(message_bytes)


def price_plan(plan: Plan, *, profile: ProfileTable | None = None) -> Predicted:
    """What a plan is expected to take, stage by stage. The profile is the analytic one unless given."""
    cost = StageCost.of_plan(plan, profile=profile)
    stages = [pipeline_stages(plan, index, cost) for index in range(len(plan.pipelines))]
    ends = [
        stage_end_seconds([stage.step for stage in pipeline], micro_batches=planned.micro_batches)
        for pipeline, planned in zip(stages, plan.pipelines, strict=True)
    ]
    ready = [ends[place.pipeline][place.stage] for place in plan.ranks]
    synced = _stage_sync_ends(plan, ready, ends, cost)
    pipelines = tuple(
        _predicted_pipeline(plan, index, stages[index], ends[index], synced[index])
        for index in range(len(plan.pipelines))
    )
    optimizer = slowest_optimizer_seconds(plan, cost.profile)
    iteration = max(pipeline.end_seconds for pipeline in pipelines) + optimizer
    return Predicted(
        iteration_seconds=iteration,
        samples_per_second=plan.global_batch_size / iteration,
        optimizer_seconds=optimizer,
        pipelines=pipelines,
    )


def with_prediction(plan: Plan, *, profile: ProfileTable | None = None) -> Plan:
    """The same plan with `predicted` filled."""
    return plan.model_copy(update={"predicted": price_plan(plan, profile=profile)})


def check_memory(plan: Plan) -> None:
    """Raise UserError naming the first stage that does not fit its devices, and by how many bytes."""
    memory = memory_model(plan)
    for index, pipeline in enumerate(plan.pipelines):
        for number in range(len(pipeline.stages)):
            _, needed, device = fullest_device(plan, index, number, memory)
            limit = plan.cluster.type_of(device.id).memory_bytes
            if needed > limit:
                raise UserError(
                    f"pipelines[{index}].stages[{number}] needs {format_bytes(needed)} on {device.id}"
                    f" ({device.type}), {format_bytes(needed - limit)} more than its {format_bytes(limit)};"
                    " give it fewer layers, a higher tp, a smaller micro-batch or bf16"
                )


def memory_model(plan: Plan) -> MemoryModel:
    return MemoryModel(
        model=plan.model,
        sequence_length=plan.sequence_length,
        dtypes=plan.dtypes,
        memory_scale=plan.emulation.memory_scale,
    )


def stage_load(plan: Plan, *, pipeline: int, stage: int, replica: int) -> StageLoad:
    """The memory load of a replica of a plan."""
    planned = plan.pipelines[pipeline]
    place = planned.stages[stage]
    return StageLoad(
        tp=place.tp,
        rows=place.rows[replica],
        layers=place.layer_count,
        embedding=place.embedding,
        head=place.head,
        in_flight=min(len(planned.stages) - stage, planned.micro_batches),
    )


def fullest_device(plan: Plan, pipeline: int, stage: int, memory: MemoryModel) -> tuple[int, int, Device]:
    """(tensor_bytes, device_bytes, device) of the stage's device with the least left."""
    place = plan.pipelines[pipeline].stages[stage]
    candidates = []
    for replica in range(place.dp):
        device = plan.cluster.device_by_id[place.tp_group(replica)[0]]
        type_ = plan.cluster.device_types[device.type]
        load = stage_load(plan, pipeline=pipeline, stage=stage, replica=replica)
        needed = memory.device_bytes(load, type_)
        candidates.append((needed - type_.memory_bytes, memory.tensor_bytes(load), needed, device))
    _, tensors, needed, device = max(candidates, key=lambda candidate: candidate[0])
    return tensors, needed, device


def pipeline_stages(plan: Plan, pipeline: int, cost: StageCost) -> list[StageSeconds]:
    """Times of every stage of one pipeline of a plan."""
    return cost.pipeline_stages(plan_shapes(plan, pipeline))


def plan_shapes(plan: Plan, pipeline: int) -> list[StageShape]:
    return [stage_shape(stage, plan.cluster) for stage in plan.pipelines[pipeline].stages]


def _stage_sync_ends(
    plan: Plan, ready: list[float], ends: list[list[float]], cost: StageCost
) -> list[list[float]]:
    """When the last gradient block of every stage ends."""
    done = [list(pipeline) for pipeline in ends]
    for time in schedule_calls(plan, ready, cost=cost):
        for rank in time.call.holders:
            place = plan.ranks[rank]
            done[place.pipeline][place.stage] = max(done[place.pipeline][place.stage], time.end_seconds)
    return done


def _predicted_pipeline(
    plan: Plan, index: int, stages: list[StageSeconds], ends: list[float], synced: list[float]
) -> PredictedPipeline:
    memory = memory_model(plan)
    predicted = []
    for number, stage in enumerate(stages):
        tensors, needed, device = fullest_device(plan, index, number, memory)
        predicted.append(
            PredictedStage(
                forward_seconds=stage.step.forward,
                backward_seconds=stage.step.backward,
                exchange_seconds=stage.receive.total,
                all_reduce_seconds=synced[number] - ends[number],
                end_seconds=synced[number],
                tensor_bytes=tensors,
                device_bytes=needed,
                memory_limit_bytes=plan.cluster.type_of(device.id).memory_bytes,
            )
        )
    return PredictedPipeline(end_seconds=max(synced), stages=tuple(predicted))
