"""Where the seconds of a priced plan go, term by term; and what that says about it.

Every device spends the whole iteration on something. Its seconds are sorted into terms, and the terms of
all devices averaged with their speeds as weights, so that the terms add up to the iteration exactly: the
compute-only ideal, and what was lost to each cause.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields

from planner.cost.ideal import DeviceSpeeds
from planner.cost.layer_flow import recompute_of
from planner.cost.pipeline import stage_end_seconds
from planner.cost.price import pipeline_stages
from planner.cost.stage_shape import stage_shape
from planner.cost.stages import StageCost, StageSeconds
from planner.describe import compute_end_seconds, device_names
from planner.plan import PipelinePlan, Plan
from planner.profile.table import ProfileTable


@dataclass(frozen=True)
class Terms:
    """Seconds of an iteration, by cause; their sum is the iteration.

    `operators` is below zero where a plan gives each type what that is relatively best at: the ideal does not
    count on it.

    * `ideal`: every device computes at its best all the time;
    * `operators`: operators slower than at their best (narrow TP shards, small micro-batches), and surplus
      samples of micro-batches that are not full;
    * `pipeline_imbalance`: pipelines that end before the last one;
    * `stage_imbalance`: stages, and replicas of a stage, that wait for a slower one at every micro-batch;
    * `bubbles`: filling and draining the pipelines;
    * `recompute`: replaying in backward what memory had no room for;
    * `tensor_parallel`: collectives inside TP groups; `exchange`: receiving from neighbouring stages;
    * `gradient_sync`: from the last backward to the end of the last gradient block, and under ZeRO gathering
      the parameters after the step; `gradient_scatter`: ZeRO-2's reduce-scatter at every micro-batch;
    * `optimizer`: the optimizer's step; `idle_devices`: devices that no stage uses.
    """

    ideal: float = 0.0
    operators: float = 0.0
    pipeline_imbalance: float = 0.0
    stage_imbalance: float = 0.0
    bubbles: float = 0.0
    recompute: float = 0.0
    tensor_parallel: float = 0.0
    exchange: float = 0.0
    gradient_sync: float = 0.0
    gradient_scatter: float = 0.0
    optimizer: float = 0.0
    idle_devices: float = 0.0

    @property
    def total(self) -> float:
        return sum(asdict(self).values())

    def minus(self, other: Terms) -> dict[str, float]:
        """What each term has more than the other's, the largest first."""
        differences = {
            field.name: getattr(self, field.name) - getattr(other, field.name) for field in fields(self)
        }
        return dict(sorted(differences.items(), key=lambda item: -item[1]))


# Terms by what would have to be better for them to shrink.
CAUSES: dict[str, tuple[str, ...]] = {
    "compute": ("ideal", "operators", "optimizer"),
    "memory": ("recompute",),
    "link": ("tensor_parallel", "exchange", "gradient_sync", "gradient_scatter"),
    "granularity": ("pipeline_imbalance", "stage_imbalance", "bubbles", "idle_devices"),
}


def terms_of(plan: Plan, *, profile: ProfileTable | None = None) -> Terms:
    """The terms of a priced plan."""
    assert plan.predicted is not None, "only a priced plan can be explained"
    cost = StageCost.of_plan(plan, profile=profile)
    speeds = DeviceSpeeds(cost, plan.cluster)
    total = plan.predicted.iteration_seconds
    sums: defaultdict[str, float] = defaultdict(float)
    weights = 0.0
    for count, weight, spent in _spent(plan, cost, speeds):
        weights += count * weight
        for name, seconds in spent.items():
            sums[name] += count * weight * seconds
    for type_, count in _idle_counts(plan).items():
        weight = count / speeds.device_seconds(type_)
        weights += weight
        sums["idle_devices"] += weight * total
    means = {name: seconds / weights for name, seconds in sums.items()}
    ideal = plan.global_batch_size / speeds.samples_per_second
    # Computing at the devices' best is the ideal; the rest of the time that operators run is lost in them.
    return Terms(**(means | {"ideal": ideal, "operators": means["operators"] - ideal}))


def causes(terms: Terms) -> dict[str, float]:
    """The terms' seconds by `CAUSES`."""
    return {cause: sum(getattr(terms, name) for name in names) for cause, names in CAUSES.items()}


def fullest_share(plan: Plan) -> float:
    """How full the fullest device is, as a share of its memory."""
    assert plan.predicted is not None
    return max(
        stage.device_bytes / stage.memory_limit_bytes
        for pipeline in plan.predicted.pipelines
        for stage in pipeline.stages
    )


def slowest_stage(plan: Plan) -> str:
    """The stage that paces the pipeline that ends last, in words."""
    assert plan.predicted is not None
    predicted = plan.predicted.pipelines
    index = max(range(len(predicted)), key=lambda i: compute_end_seconds(predicted[i]))
    times = [stage.forward_seconds + stage.backward_seconds for stage in predicted[index].stages]
    number = max(range(len(times)), key=times.__getitem__)
    stage = plan.pipelines[index].stages[number]
    return (
        f"stage {number} of pipeline {index} ({device_names(plan, stage)}, tp {stage.tp}, dp {stage.dp},"
        f" {stage.layer_count} layers)"
    )


def _spent(
    plan: Plan, cost: StageCost, speeds: DeviceSpeeds
) -> Iterator[tuple[int, float, dict[str, float]]]:
    """(devices, weight of one, seconds by term) of all busy devices, those that fare alike together.

    `operators` is all the time that operators run.
    """
    assert plan.predicted is not None
    optimizer = plan.predicted.optimizer_seconds
    stages = [pipeline_stages(plan, index, cost) for index in range(len(plan.pipelines))]
    ends = [
        stage_end_seconds([stage.step for stage in own], micro_batches=pipeline.micro_batches)[0]
        for own, pipeline in zip(stages, plan.pipelines, strict=True)
    ]
    after = {
        "optimizer": optimizer,
        "gradient_sync": plan.predicted.iteration_seconds - optimizer - max(ends),
    }
    for pipeline, own, end in zip(plan.pipelines, stages, ends, strict=True):
        period = max(stage.step.total for stage in own)
        outside = after | {
            "pipeline_imbalance": max(ends) - end,
            "bubbles": end - pipeline.micro_batches * period,
        }
        for number, stage in enumerate(own):
            yield from _stage_spent(plan, pipeline, number, stage, period, outside, cost, speeds)


def _stage_spent(
    plan: Plan,
    pipeline: PipelinePlan,
    number: int,
    stage: StageSeconds,
    period: float,
    outside: dict[str, float],
    cost: StageCost,
    speeds: DeviceSpeeds,
) -> Iterator[tuple[int, float, dict[str, float]]]:
    planned, count = pipeline.stages[number], pipeline.micro_batches
    recompute = recompute_of(planned.recompute)
    scatter = cost.scatter_seconds(stage_shape(planned, plan.cluster, zero_stage=plan.zero_stage))
    alike: Counter[tuple[str, int]] = Counter()
    for replica, rows in enumerate(planned.rows):
        alike[plan.cluster.device_by_id[planned.tp_group(replica)[0]].type, rows] += planned.tp
    for (type_, rows), devices in alike.items():
        whole, operators = (
            one.replica_step(
                device_type=type_,
                tp=planned.tp,
                rows=rows,
                layers=planned.layer_count,
                embedding=planned.embedding,
                head=planned.head,
                sequence_parallel=planned.sequence_parallel,
            ).total
            for one in (cost, speeds.without_transfers)
        )
        replay = cost.replay_seconds(
            device_type=type_,
            tp=planned.tp,
            rows=rows,
            layers=planned.layer_count,
            recompute=recompute,
            sequence_parallel=planned.sequence_parallel,
        )
        waits = period - stage.receive.total - whole - replay - scatter
        yield (
            devices,
            1 / speeds.device_seconds(type_),
            outside
            | {
                "operators": count * operators,
                "recompute": count * replay,
                "gradient_scatter": count * scatter,
                "tensor_parallel": count * (whole - operators),
                "exchange": count * stage.receive.total,
                "stage_imbalance": count * waits,
            },
        )


def _idle_counts(plan: Plan) -> Counter[str]:
    return Counter(plan.cluster.device_by_id[device].type for device in plan.idle_devices)
