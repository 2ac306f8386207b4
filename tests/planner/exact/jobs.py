"""Small random jobs: clusters of two types or more, links and memories that bind differently from seed to seed."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from planner.cluster import Cluster, resolve_cluster
from planner.cost.price import check_memory
from planner.errors import UserError
from planner.model_spec import ModelSpec
from planner.operators import cuts_positions, layer_operators
from planner.plan import Dtypes, PipelinePlan, Plan, StagePlan
from planner.request import PlanRequest

MODEL = ModelSpec(name="m", layers=3, hidden_size=256, heads=4, vocab_size=500, max_sequence_length=64)
GIB = 2**30


def make_cluster(seed: int, nodes: Sequence[dict[str, int]]) -> Cluster:
    draw = random.Random(f"cluster {seed}")
    types: dict[str, Any] = {}
    for name in sorted({"fast", "slow"}.union(*nodes)):
        tflops = draw.choice([0.5, 1, 2, 3])
        types[name] = {
            "backend": "cpu",
            "peak_tflops": {"fp32": tflops},
            "memory_bytes": int(draw.choice([0.03, 0.05, 1]) * GIB),
            "memory_bandwidth": 1e11 * tflops,
        }
    links = {
        "intra_node": {"bandwidth": 10 ** draw.uniform(9, 11), "latency": 10 ** draw.uniform(-6, -5)},
        "inter_node": {"bandwidth": 10 ** draw.uniform(8, 10), "latency": 10 ** draw.uniform(-6, -5)},
    }
    devices = [{"devices": [{"type": t, "count": n} for t, n in node.items()]} for node in nodes]
    return resolve_cluster({"device_types": types, "nodes": devices, "links": links})


def make_request(
    seed: int, nodes: Sequence[dict[str, int]], *, batch: int, layers: int = 3, **fields: Any
) -> PlanRequest:
    return PlanRequest(
        model=MODEL.model_copy(update={"layers": layers}),
        cluster=make_cluster(seed, nodes),
        global_batch_size=batch,
        sequence_length=64,
        dtypes=Dtypes(param="fp32"),
        **fields,
    )


def random_plans(
    request: PlanRequest, draw: random.Random, *, sizes: Sequence[int], tries: int
) -> Iterator[Plan]:
    """Plans that fit: random pipelines, stages that may mix types, unlike rows, uneven samples, idle devices,
    any operators recomputed, activations whole or cut by position, and any ZeRO stage that the request allows."""
    for _ in range(tries):
        pipelines = _random_pipelines(request, draw, sizes)
        if pipelines is None:
            continue
        busy = {device for pipeline in pipelines for device in pipeline.devices}
        plan = Plan(
            model=request.model,
            cluster=request.cluster,
            global_batch_size=request.global_batch_size,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            zero_stage=draw.choice(request.zero_stages),
            zero_scope=request.zero_scope,
            idle_devices=tuple(d.id for d in request.cluster.devices if d.id not in busy),
            pipelines=tuple(pipelines),
        )
        try:
            check_memory(plan)
        except UserError:
            continue
        yield plan


def _random_pipelines(
    request: PlanRequest, draw: random.Random, sizes: Sequence[int]
) -> list[PipelinePlan] | None:
    groups = _random_groups(request.cluster, draw)
    count = draw.randint(1, min(len(groups), request.global_batch_size))
    parts: list[list[tuple[str, ...]]] = [[] for _ in range(count)]
    for group in groups:
        parts[draw.randrange(count)].append(group)
    parts = [part for part in parts if part]
    cuts = sorted(draw.sample(range(1, request.global_batch_size), len(parts) - 1))
    samples = [b - a for a, b in zip([0, *cuts], [*cuts, request.global_batch_size], strict=True)]
    made = []
    for index, (part, share) in enumerate(zip(parts, samples, strict=True)):
        size = draw.choice(list(sizes))
        stages = _random_stages(request, part, draw, size)
        if stages is None:
            return None
        made.append(
            PipelinePlan(
                id=index,
                micro_batch_size=size,
                samples=share,
                local_batch_size=-(-share // size) * size,
                stages=stages,
            )
        )
    return made


def _random_groups(cluster: Cluster, draw: random.Random) -> list[tuple[str, ...]]:
    """TP groups of one or two devices of a node and type, in random order; some left out."""
    places: dict[tuple[str, str], list[str]] = {}
    for device in cluster.devices:
        places.setdefault((device.node, device.type), []).append(device.id)
    groups = []
    for ids in places.values():
        left = list(ids)
        while left:
            take = draw.choice([1, 2]) if len(left) > 1 else 1
            groups.append(tuple(left[:take]))
            left = left[take:]
    draw.shuffle(groups)
    return groups[: draw.randint(1, len(groups))]


def _random_stages(
    request: PlanRequest, groups: list[tuple[str, ...]], draw: random.Random, size: int
) -> tuple[StagePlan, ...] | None:
    blocks: list[list[tuple[str, ...]]] = []
    for group in groups:
        if blocks and len(blocks[-1][0]) == len(group) and len(blocks[-1]) < size and draw.random() < 0.5:
            blocks[-1].append(group)
        else:
            blocks.append([group])
    stages, count, first = [], len(blocks), 0
    inner = request.model.layers - max(0, count - 2)
    if inner < 0:
        return None
    extra = [draw.randrange(count) for _ in range(inner)]
    for number, block in enumerate(blocks):
        layers = extra.count(number) + (0 < number < count - 1)
        rows = _random_rows(request.cluster, block, draw, size)
        if rows is None:
            return None
        stages.append(
            StagePlan(
                devices=tuple(device for group in block for device in group),
                tp=len(block[0]),
                dp=len(block),
                rows=rows,
                layers=(first, first + layers),
                embedding=number == 0,
                head=number == count - 1,
                sequence_parallel=draw.random() < 0.5
                and cuts_positions(tp=len(block[0]), sequence_length=request.sequence_length),
                recompute=_random_recompute(request, draw, layers),
            )
        )
        first += layers
    return tuple(stages)


def _random_recompute(request: PlanRequest, draw: random.Random, layers: int) -> dict[str, int]:
    if not request.recompute or not layers or draw.random() < 0.5:
        return {}
    operators = layer_operators(request.model)
    chosen = draw.sample(operators, draw.randint(1, len(operators)))
    return {name: draw.randint(1, layers) for name in sorted(chosen)}


def _random_rows(
    cluster: Cluster, block: list[tuple[str, ...]], draw: random.Random, size: int
) -> tuple[int, ...] | None:
    types = {cluster.device_by_id[group[0]].type for group in block}
    if len(types) == 1:
        return (size // len(block),) * len(block) if size % len(block) == 0 else None
    cuts = sorted(draw.sample(range(1, size), len(block) - 1))
    return tuple(b - a for a, b in zip([0, *cuts], [*cuts, size], strict=True))
