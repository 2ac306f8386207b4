"""A plan as people read it: the rows of a table in the manner of the paper's Table 3, and its balance."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from planner.operators import layer_operators
from planner.plan import PipelinePlan, Plan, PredictedPipeline, PredictedStage, StagePlan
from planner.units import format_seconds

# How Table 3 of the paper shortens operators, and the others in its manner.
_OPERATOR_LETTERS = {
    "attention_norm": "AN",
    "qkv": "Qkv",
    "rotary": "Rot",
    "scores": "Sco",
    "softmax": "AS",
    "attention_dropout": "AD",
    "context": "Ctx",
    "attention_output": "AO",
    "attention_residual": "AR",
    "mlp_norm": "MN",
    "mlp_up": "Up",
    "mlp_gate_up": "GU",
    "activation": "Act",
    "mlp_down": "Dn",
    "mlp_residual": "MR",
}


@dataclass(frozen=True)
class StageRow:
    """Neighbouring stages that are configured alike; seconds are the slowest's, bytes the fullest's."""

    stages: str
    devices: str
    tp_dp: str
    rows: str
    layers: str
    recompute: str
    forward_seconds: float
    backward_seconds: float
    end_seconds: float
    memory_bytes: int
    memory_limit_bytes: int


@dataclass(frozen=True)
class PipelineRows:
    """Pipelines that are configured alike; `end_seconds` is when they end their last backward."""

    ids: tuple[int, ...]
    micro_batch_size: int
    samples: int
    local_batch_size: int
    end_seconds: float
    samples_per_second: float
    stages: tuple[StageRow, ...]

    @property
    def name(self) -> str:
        """`Pipe-0`, or `Pipe-0 to 3` for several, or `Pipe-0,2` where another stands between them."""
        first, last = self.ids[0], self.ids[-1]
        if len(self.ids) <= 1 or last - first + 1 > len(self.ids):
            return f"Pipe-{','.join(map(str, self.ids))}"
        return f"Pipe-{first} to {last}"


@dataclass(frozen=True)
class Balance:
    """How evenly the work is spread. Shares are of the latest end or of the slowest stage."""

    pipeline_spread: float
    """How much earlier the first pipeline ends its backward than the last, as a share of the last's time."""
    stage_spread: float
    """The largest such share between the stages of one pipeline, by seconds a micro-batch."""
    sync_seconds: float
    """From the latest end of a backward to the end of the last gradient block."""


@dataclass(frozen=True)
class Description:
    """Everything the table shows."""

    pipelines: tuple[PipelineRows, ...]
    balance: Balance
    idle_devices: tuple[str, ...]


def describe(plan: Plan) -> Description:
    """The plan's table; it must be priced."""
    assert plan.predicted is not None, "only a priced plan can be described"
    priced = list(zip(plan.pipelines, plan.predicted.pipelines, strict=True))
    return Description(
        pipelines=tuple(_merged([_pipeline_rows(plan, *pair) for pair in priced])),
        balance=_balance(plan, plan.predicted.pipelines),
        idle_devices=plan.idle_devices,
    )


def compute_end_seconds(pipeline: PredictedPipeline) -> float:
    """When a pipeline ends its last backward: what data balance makes equal."""
    return max(stage.end_seconds - stage.all_reduce_seconds for stage in pipeline.stages)


def device_names(plan: Plan, stage: StagePlan) -> str:
    """`910B2 x 4`, or `A100 x 2 + RTX3090 x 2`."""
    counts = Counter(plan.cluster.device_by_id[device].type for device in stage.devices)
    return " + ".join(f"{name} x {count}" for name, count in counts.items())


def recompute_words(plan: Plan, stage: StagePlan) -> str:
    """`4 AS, 4 AD` as in the paper's Table 3: so many layers of each operator; `none`, or `all` of every layer."""
    counts = {operator: count for operator, count in stage.recompute.items() if count}
    if not counts:
        return "none"
    operators = layer_operators(plan.model)
    if all(counts.get(operator) == stage.layer_count for operator in operators):
        return "all"
    return ", ".join(f"{counts[name]} {_OPERATOR_LETTERS[name]}" for name in operators if name in counts)


def recompute_legend(plan: Plan) -> str:
    """What the letters of `recompute_words` stand for; empty if no stage shows any."""
    used = {
        name
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        if recompute_words(plan, stage) not in ("none", "all")
        for name, count in stage.recompute.items()
        if count
    }
    known = (name for name in layer_operators(plan.model) if name in used)
    words = ", ".join(f"{_OPERATOR_LETTERS[name]} {name.replace('_', ' ')}" for name in known)
    return f"Recomputed in backward: {words}." if words else ""


def sequence_parallel_words(plan: Plan) -> str:
    """What `SP` stands for; empty if no stage has it."""
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    if not any(stage.sequence_parallel and stage.tp > 1 for stage in stages):
        return ""
    return "SP: norms, residuals and dropout of a TP group are cut by position (sequence parallel)."


def zero_words(plan: Plan) -> str:
    """What ZeRO shards, in a line; empty at stage 0."""
    if not plan.zero_stage:
        return ""
    shared = "optimizer state" + (" and gradients inside a stage" if plan.zero_stage == 2 else "")
    scope = "of all pipelines" if plan.zero_scope == "all" else "of a pipeline"
    return f"ZeRO {plan.zero_stage}: {shared} sharded over the devices {scope} that hold the same parameters."


def used_words(plan: Plan) -> str:
    """Devices that the plan uses, by type."""
    used = Counter(
        plan.cluster.device_by_id[device].type for pipeline in plan.pipelines for device in pipeline.devices
    )
    return ", ".join(f"{count} x {type_}" for type_, count in used.items())


def idle_words(plan: Plan, *, most: int) -> str:
    """Idle devices by type, with their names up to `most` of them."""
    counts = Counter(plan.cluster.device_by_id[device].type for device in plan.idle_devices)
    words = ", ".join(f"{count} x {type_}" for type_, count in counts.items())
    if len(plan.idle_devices) <= most:
        return f"{words} ({', '.join(plan.idle_devices)})"
    return f"{words} ({plan.idle_devices[0]} ... {plan.idle_devices[-1]})"


def search_words(plan: Plan) -> str:
    """What the search did, in one line; empty if the plan was not searched for."""
    search = plan.search
    if not search or "seconds" not in search:
        return ""
    found = [words for words in (_parts_words(search), _seen_words(search)) if words]
    if not found:
        return ""
    seconds, by = f"{search['seconds']:.2f} s", search.get("found_by")
    bound = f"; bound in {search['bound_seconds']:.2f} s" if search.get("bound_seconds") else ""
    return f"{seconds}: {'; '.join(found)}{bound}." + (f" Found by {by}." if by else "")


def _parts_words(search: dict[str, Any]) -> str:
    """Parts of the cluster that the objective cost had planned."""
    if "sub_clusters" not in search:
        return ""
    return (
        f"{search['sub_clusters_planned']} of {search['sub_clusters']} parts of the cluster planned,"
        f" {search['sub_clusters_ruled_out']} ruled out by what they cost at least"
    )


def _seen_words(search: dict[str, Any]) -> str:
    """Candidates seen, skipped and taken from the cache, of the search whose plan it is."""
    if "columns" in search:
        return (
            f"{search['chains']} pipelines, {search['columns']} device counts,"
            f" {search['columns_made']} of them worked out, {search['candidates']} plans priced"
        )
    if "device_groups_seen" in search:
        return (
            f"{search['device_groups_seen']} device groups, {search['device_groups_skipped']} of them skipped;"
            f" {search['pipelines_searched']} pipelines searched, {search['cache_hits']} from the cache;"
            f" {search['plans_priced']} plans priced"
        )
    if "stages_seen" in search:
        return (
            f"{search['device_groups']} device groups, {search['device_groups_priced']} priced in full;"
            f" {search['pipelines_searched']} pipelines searched, {search['pipeline_cache_hits']} from the cache;"
            f" {search['stages_seen']} stages seen, {search['branches_cut']} branches cut"
        )
    if "sketches_seen" in search:
        return (
            f"{search['sketches_seen']} configurations seen, {search['sketches_settled']} that fit worked out,"
            f" {search['plans_priced']} plans priced"
        )
    return ""


def gap_words(plan: Plan) -> str:
    """How much better any other plan could be; empty if no bound is known."""
    predicted = plan.predicted
    if predicted is not None and predicted.lower_bound_cost_per_million_tokens:
        least, cost = predicted.lower_bound_cost_per_million_tokens, predicted.cost_per_million_tokens
        assert cost is not None
        return (
            f"No plan that is fast enough costs less than {least:.4g} per million tokens: this one costs at most"
            f" {cost / least - 1:.1%} more than the cheapest."
        )
    if predicted is None or not predicted.lower_bound_seconds:
        return ""
    gap = predicted.iteration_seconds / predicted.lower_bound_seconds - 1
    bound = format_seconds(predicted.lower_bound_seconds)
    return f"No plan is predicted below {bound}: this one is at most {gap:.1%} slower than the best."


def coarse_words(plan: Plan) -> str:
    """A warning that the plan is coarse, and why; empty if it is not."""
    search = plan.search
    if not search or not search.get("coarse"):
        return ""
    steps = " and ".join(f"{step} x {type_}" for type_, step in search["steps"].items())
    slices = search["slices"]
    parts = f", in {slices} slices planned apart" if slices > 1 else ""
    return f"COARSE: the cluster is too large to enumerate device by device; handed out by {steps}{parts}"


def _pipeline_rows(plan: Plan, pipeline: PipelinePlan, predicted: PredictedPipeline) -> PipelineRows:
    end = compute_end_seconds(predicted)
    return PipelineRows(
        ids=(pipeline.id,),
        micro_batch_size=pipeline.micro_batch_size,
        samples=pipeline.samples,
        local_batch_size=pipeline.local_batch_size,
        end_seconds=end,
        samples_per_second=pipeline.samples / end,
        stages=tuple(_stage_rows(plan, pipeline, predicted)),
    )


def _stage_rows(plan: Plan, pipeline: PipelinePlan, predicted: PredictedPipeline) -> Iterator[StageRow]:
    numbers = range(len(pipeline.stages))
    looks = [_look(plan, stage) for stage in pipeline.stages]
    start = 0
    for number in numbers:
        if number + 1 < len(looks) and looks[number + 1] == looks[start]:
            continue
        group = predicted.stages[start : number + 1]
        yield _stage_row(list(numbers[start : number + 1]), looks[start], group)
        start = number + 1


def _look(plan: Plan, stage: StagePlan) -> tuple[str, str, str, str, str]:
    rows = str(stage.rows[0]) if len(set(stage.rows)) == 1 else ",".join(map(str, stage.rows))
    return (
        device_names(plan, stage),
        f"{stage.tp}/{stage.dp}" + (" SP" if stage.sequence_parallel and stage.tp > 1 else ""),
        rows,
        str(stage.layer_count),
        recompute_words(plan, stage),
    )


def _stage_row(
    numbers: list[int], look: tuple[str, str, str, str, str], group: Sequence[PredictedStage]
) -> StageRow:
    slowest = max(group, key=lambda stage: stage.forward_seconds + stage.backward_seconds)
    fullest = max(group, key=lambda stage: stage.device_bytes - stage.memory_limit_bytes)
    return StageRow(
        # Some pipelines have dozens of stages alike; all their numbers would push the figures off the table.
        ",".join(map(str, numbers)) if len(numbers) <= 2 else f"{numbers[0]}-{numbers[-1]}",
        *look,
        forward_seconds=slowest.forward_seconds,
        backward_seconds=slowest.backward_seconds,
        end_seconds=max(stage.end_seconds for stage in group),
        memory_bytes=fullest.device_bytes,
        memory_limit_bytes=fullest.memory_limit_bytes,
    )


def _merged(pipelines: Sequence[PipelineRows]) -> Iterator[PipelineRows]:
    """Pipelines that differ by their number alone, as one."""
    groups: dict[tuple[object, ...], list[PipelineRows]] = {}
    for rows in pipelines:
        looks = tuple((s.devices, s.tp_dp, s.rows, s.layers, s.recompute, s.stages) for s in rows.stages)
        groups.setdefault((rows.micro_batch_size, rows.samples, looks), []).append(rows)
    for alike in groups.values():
        first = alike[0]
        yield PipelineRows(
            ids=tuple(rows.ids[0] for rows in alike),
            micro_batch_size=first.micro_batch_size,
            samples=first.samples,
            local_batch_size=first.local_batch_size,
            end_seconds=max(rows.end_seconds for rows in alike),
            samples_per_second=first.samples_per_second,
            stages=first.stages,
        )


def _balance(plan: Plan, predicted: Sequence[PredictedPipeline]) -> Balance:
    assert plan.predicted is not None
    ends = [compute_end_seconds(pipeline) for pipeline in predicted]
    spreads = []
    for pipeline in predicted:
        seconds = [stage.forward_seconds + stage.backward_seconds for stage in pipeline.stages]
        spreads.append(1 - min(seconds) / max(seconds))
    return Balance(
        pipeline_spread=1 - min(ends) / max(ends),
        stage_spread=max(spreads),
        sync_seconds=plan.predicted.iteration_seconds - plan.predicted.optimizer_seconds - max(ends),
    )
