"""Every plan of a tiny cluster, named device by named device: what the search is compared with.

Shares no code with the search; only the price is the product's.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from planner.cost.price import check_memory, price_plan
from planner.errors import UserError
from planner.operators import layer_operators
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.request import PlanRequest


def best_price(request: PlanRequest, *, micro_batch_sizes: Sequence[int], savers: bool = False) -> float:
    """The least iteration time of all plans that fit; inf if none does.

    With `savers` also of those with ZeRO, at every stage of the request, and with all-or-none recomputation.
    """
    plans = every_plan(request, micro_batch_sizes, savers=savers)
    return min((price_plan(plan).iteration_seconds for plan in plans), default=float("inf"))


def every_plan(
    request: PlanRequest, micro_batch_sizes: Sequence[int], *, savers: bool = False
) -> Iterator[Plan]:
    """Each plan that fits once or more."""
    devices = [device.id for device in request.cluster.devices]
    options = {
        block: list(_pipelines(request, block, micro_batch_sizes))
        for count in range(1, len(devices) + 1)
        for block in itertools.combinations(devices, count)
    }
    for blocks in _disjoint(devices):
        for shapes in itertools.product(*(options[block] for block in blocks)):
            for samples in _sums(request.global_batch_size, len(blocks)):
                plain = _plan(request, shapes, samples, blocks)
                for plan in _with_savers(plain, request) if savers else (plain,):
                    try:
                        check_memory(plan)
                    except UserError:
                        continue
                    yield plan


def _with_savers(plan: Plan, request: PlanRequest) -> Iterator[Plan]:
    """The plan with each ZeRO stage and each set of stages that recompute all of their layers' operators."""
    everything = layer_operators(plan.model)
    choices = [
        [
            stage.model_copy(update={"recompute": dict.fromkeys(everything, count) if count else {}})
            for count in {0, stage.layer_count}
        ]
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    ]
    for chosen in itertools.product(*choices):
        left = iter(chosen)
        pipelines = tuple(
            pipeline.model_copy(update={"stages": tuple(next(left) for _ in pipeline.stages)})
            for pipeline in plan.pipelines
        )
        for zero_stage in request.zero_stages:
            yield plan.model_copy(
                update={
                    "pipelines": pipelines,
                    "zero_stage": zero_stage,
                    "zero_scope": request.zero_scope,
                }
            )


def _disjoint(devices: Sequence[str]) -> Iterator[list[tuple[str, ...]]]:
    """All non-empty sets of disjoint non-empty blocks; devices in none are idle."""

    def assign(index: int, blocks: list[list[str]]) -> Iterator[list[tuple[str, ...]]]:
        if index == len(devices):
            if blocks:
                yield [tuple(block) for block in blocks]
            return
        yield from assign(index + 1, blocks)
        for block in blocks:
            block.append(devices[index])
            yield from assign(index + 1, blocks)
            block.pop()
        yield from assign(index + 1, [*blocks, [devices[index]]])

    yield from assign(0, [])


def _pipelines(
    request: PlanRequest, devices: tuple[str, ...], sizes: Sequence[int]
) -> Iterator[tuple[int, tuple[StagePlan, ...]]]:
    """(micro-batch size, stages) of every pipeline of these devices."""
    for size in sizes:
        for blocks in _ordered(devices):
            for layers in _layers(request.model.layers, len(blocks)):
                ends = list(itertools.accumulate(layers, initial=0))
                choices = [
                    list(_stages(request, block, size, (ends[i], ends[i + 1]), i == 0, i == len(blocks) - 1))
                    for i, block in enumerate(blocks)
                ]
                for stages in itertools.product(*choices):
                    yield size, stages


def _ordered(devices: tuple[str, ...]) -> Iterator[list[tuple[str, ...]]]:
    if not devices:
        yield []
    for count in range(1, len(devices) + 1):
        for first in itertools.combinations(devices, count):
            rest = tuple(device for device in devices if device not in first)
            for others in _ordered(rest):
                yield [first, *others]


def _layers(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """All splits; only the first and the last stage may be empty."""
    for counts in itertools.product(range(layers + 1), repeat=stages):
        if sum(counts) == layers and all(counts[1:-1]):
            yield counts


def _stages(
    request: PlanRequest,
    block: tuple[str, ...],
    size: int,
    layers: tuple[int, int],
    embedding: bool,
    head: bool,
) -> Iterator[StagePlan]:
    places = [request.cluster.device_by_id[device] for device in block]
    for tp in range(1, len(block) + 1):
        if len(block) % tp or request.model.heads % tp:
            continue
        groups = [places[i : i + tp] for i in range(0, len(block), tp)]
        if any(len({(device.node, device.type) for device in group}) > 1 for group in groups):
            continue
        types = [group[0].type for group in groups]
        for rows in itertools.product(range(1, size + 1), repeat=len(groups)):
            by_type = {type_: row for type_, row in zip(types, rows, strict=True)}
            if sum(rows) == size and all(
                by_type[type_] == row for type_, row in zip(types, rows, strict=True)
            ):
                yield StagePlan(
                    devices=block,
                    tp=tp,
                    dp=len(groups),
                    rows=rows,
                    layers=layers,
                    embedding=embedding,
                    head=head,
                )


def _sums(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    if parts == 1:
        yield (total,)
        return
    for first in range(1, total - parts + 2):
        for rest in _sums(total - first, parts - 1):
            yield (first, *rest)


def _plan(
    request: PlanRequest,
    shapes: Sequence[tuple[int, tuple[StagePlan, ...]]],
    samples: Sequence[int],
    blocks: Sequence[tuple[str, ...]],
) -> Plan:
    used = {device for block in blocks for device in block}
    pipelines = tuple(
        PipelinePlan(
            id=index,
            micro_batch_size=size,
            samples=count,
            local_batch_size=-(-count // size) * size,
            stages=stages,
        )
        for index, ((size, stages), count) in enumerate(zip(shapes, samples, strict=True))
    )
    return Plan(
        model=request.model,
        cluster=request.cluster,
        global_batch_size=request.global_batch_size,
        sequence_length=request.sequence_length,
        dtypes=request.dtypes,
        emulation=request.emulation,
        idle_devices=tuple(d.id for d in request.cluster.devices if d.id not in used),
        pipelines=pipelines,
    )
