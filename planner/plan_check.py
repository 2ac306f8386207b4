"""What makes a Plan valid beyond its field types. Every message names the field, the value and the remedy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from planner.operators import layer_operators

if TYPE_CHECKING:
    from planner.model_spec import ModelSpec
    from planner.plan import PipelinePlan, Plan, StagePlan


def check_plan(plan: Plan) -> None:
    """Raise ValueError on the first rule that the plan breaks."""
    if plan.sequence_length > plan.model.max_sequence_length:
        raise ValueError(
            f"sequence_length = {plan.sequence_length} is more than the model's max_sequence_length"
            f" = {plan.model.max_sequence_length}; shorten the sequence or raise the model's limit"
        )
    total = sum(pipeline.samples for pipeline in plan.pipelines)
    if total != plan.global_batch_size:
        raise ValueError(
            f"pipelines: their samples sum to {total}, not to global_batch_size = {plan.global_batch_size}"
        )
    if plan.zero_stage and plan.gradient_sync == "device":
        raise ValueError(
            f"zero_stage = {plan.zero_stage} shares gradients among those who hold them, but gradient_sync ="
            " 'device' sends padding to others; use gradient_sync 'block' or 'tensor', or zero_stage 0"
        )
    _check_devices(plan)
    for index, pipeline in enumerate(plan.pipelines):
        if pipeline.id != index:
            raise ValueError(f"pipelines[{index}].id = {pipeline.id}: number pipelines from 0 in order")
        _check_pipeline(plan, index, pipeline)


def _check_devices(plan: Plan) -> None:
    known = plan.cluster.device_by_id
    used: dict[str, str] = {}
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            place = f"pipelines[{index}].stages[{number}].devices"
            for device in stage.devices:
                if device not in known:
                    raise ValueError(
                        f"{place} names {device!r}, which the cluster does not have; {_hint(plan)}"
                    )
                if device in used:
                    raise ValueError(f"{place} names {device!r}, which {used[device]} already uses")
                used[device] = place
    for device in plan.idle_devices:
        if device not in known:
            raise ValueError(f"idle_devices names {device!r}, which the cluster does not have; {_hint(plan)}")
        if device in used:
            raise ValueError(f"idle_devices names {device!r}, which {used[device]} uses")
    missing = set(known) - set(used) - set(plan.idle_devices)
    if missing:
        shown = ", ".join(sorted(missing)[:4])
        raise ValueError(f"devices {shown} are in no stage; list them in idle_devices if that is meant")


def _hint(plan: Plan) -> str:
    names = [device.id for device in plan.cluster.devices]
    return f"it has {names[0]} to {names[-1]}" if len(names) > 1 else f"it has {names[0]}"


def _check_pipeline(plan: Plan, index: int, pipeline: PipelinePlan) -> None:
    place = f"pipelines[{index}]"
    size = pipeline.micro_batch_size
    rounded = -(-pipeline.samples // size) * size
    if pipeline.local_batch_size != rounded:
        raise ValueError(
            f"{place}.local_batch_size = {pipeline.local_batch_size} must be samples = {pipeline.samples}"
            f" rounded up to whole micro-batches of {size}: {rounded}"
        )
    _check_layers(plan.model.layers, place, pipeline)
    for number, stage in enumerate(pipeline.stages):
        where = f"{place}.stages[{number}]"
        _check_degrees(plan.model, where, stage)
        if stage.sequence_parallel and plan.sequence_length % stage.tp:
            raise ValueError(
                f"{where}.sequence_parallel = true cuts sequences by tp = {stage.tp}, which does not divide"
                f" sequence_length = {plan.sequence_length}; set it to false, or choose a divisor as tp"
            )
        _check_rows(plan, where, stage, micro_batch_size=size)
        _check_recompute(plan.model, where, stage)


def _check_layers(layers: int, place: str, pipeline: PipelinePlan) -> None:
    expected = 0
    for number, stage in enumerate(pipeline.stages):
        where, (first, last) = f"{place}.stages[{number}]", stage.layers
        if last < first:
            raise ValueError(f"{where}.layers = [{first}, {last}] ends before it starts")
        if first < expected:
            raise ValueError(
                f"{where}.layers = [{first}, {last}] overlaps the stage before it, which ends at {expected}"
            )
        if first > expected:
            raise ValueError(f"{where}.layers = [{first}, {last}] leaves out layer {expected}")
        if stage.embedding != (number == 0):
            raise ValueError(
                f"{where}.embedding = {stage.embedding}: the first stage, and no other, holds it"
            )
        if stage.head != (number == len(pipeline.stages) - 1):
            raise ValueError(f"{where}.head = {stage.head}: the last stage, and no other, holds it")
        if last == first and not (stage.embedding or stage.head):
            raise ValueError(
                f"{where}.layers = [{first}, {last}] is empty; remove the stage or give it a layer"
            )
        expected = last
    if expected != layers:
        raise ValueError(f"{place}: its stages hold layers up to {expected}, but the model has {layers}")


def _check_degrees(model: ModelSpec, where: str, stage: StagePlan) -> None:
    if len(stage.devices) != stage.tp * stage.dp:
        raise ValueError(
            f"{where}: tp = {stage.tp} x dp = {stage.dp} needs {stage.tp * stage.dp} devices,"
            f" but it names {len(stage.devices)}"
        )
    for field in ("heads", "kv_heads", "ffn_hidden_size"):
        value = getattr(model, field)
        if value % stage.tp:
            raise ValueError(
                f"{where}.tp = {stage.tp} does not divide the model's {field} = {value};"
                f" choose a divisor of {value}"
            )


def _check_rows(plan: Plan, where: str, stage: StagePlan, *, micro_batch_size: int) -> None:
    types = []
    for replica in range(stage.dp):
        group = [plan.cluster.device_by_id[device] for device in stage.tp_group(replica)]
        if len({device.node for device in group}) > 1:
            raise ValueError(
                f"{where}: TP group {', '.join(d.id for d in group)} leaves a node; keep it inside one"
            )
        if len({device.type for device in group}) > 1:
            raise ValueError(f"{where}: TP group {', '.join(d.id for d in group)} mixes device types")
        types.append(group[0].type)
    if len(stage.rows) != stage.dp or sum(stage.rows) != micro_batch_size or min(stage.rows) < 1:
        raise ValueError(
            f"{where}.rows = {list(stage.rows)} must be dp = {stage.dp} positive numbers that sum to"
            f" micro_batch_size = {micro_batch_size}; lower dp or raise the micro-batch"
        )
    if len(set(types)) == 1 and len(set(stage.rows)) > 1:
        raise ValueError(
            f"{where}.rows = {list(stage.rows)}: replicas of one device type take equal rows;"
            f" dp = {stage.dp} must divide micro_batch_size = {micro_batch_size}"
        )


def _check_recompute(model: ModelSpec, where: str, stage: StagePlan) -> None:
    known = layer_operators(model)
    for operator, count in stage.recompute.items():
        if operator not in known:
            raise ValueError(
                f"{where}.recompute names {operator!r}; a layer's operators are {', '.join(known)}"
            )
        if not 0 <= count <= stage.layer_count:
            raise ValueError(
                f"{where}.recompute.{operator} = {count} must be from 0 to the stage's"
                f" {stage.layer_count} layers"
            )
