"""From counts to a Plan: named devices for every stage of a combination."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from planner.cluster import Cluster, Node
from planner.local_batches import with_samples
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.choice import PipelineChoice
from planner.search.combine import Combination
from planner.search.device_groups import NodeShare, place


class DevicePool:
    """Devices not handed out yet, by node and type, lowest index first."""

    def __init__(self, cluster: Cluster) -> None:
        self._free: dict[tuple[str, str], list[str]] = {}
        for device in cluster.devices:
            self._free.setdefault((device.node, device.type), []).append(device.id)

    def take(self, nodes: Sequence[Node], type_: str, count: int) -> list[str]:
        """Devices of one type, all of the first of the nodes that has enough left."""
        for node in nodes:
            devices = self._free.get((node.name, type_), [])
            if len(devices) >= count:
                self._free[node.name, type_] = devices[count:]
                return devices[:count]
        raise AssertionError("no node has that many devices left")


def node_share(node: Node, types: Sequence[str]) -> NodeShare:
    """Devices of a node by type."""
    counts = dict.fromkeys(types, 0)
    for entry in node.devices:
        counts[entry.type] += entry.count
    return tuple(counts[type_] for type_ in types)


def pipelines_of(
    combination: Combination, *, bundles: Sequence[Sequence[Node]], types: Sequence[str], pool: DevicePool
) -> list[PipelinePlan]:
    """Pipelines with devices taken from the pool; ids count from 0. Bundles hold the nodes of each slot."""
    shares = tuple(tuple(map(sum, zip(*(node_share(n, types) for n in b), strict=True))) for b in bundles)
    placed = place(combination.compositions, shares)
    return [
        _pipeline(index, choice, samples, [bundles[i] for i in slots], pool)
        for index, (choice, samples, slots) in enumerate(
            zip(combination.choices, combination.samples, placed, strict=True)
        )
    ]


def plan_of(
    request: PlanRequest,
    pipelines: Sequence[PipelinePlan],
    *,
    idle: tuple[str, ...],
    profile: ProfileTable,
    zero_stage: Literal[0, 1, 2] = 0,
) -> Plan:
    """A validated Plan without prediction."""
    used = {device.type for device in request.cluster.devices}
    return Plan(
        strategy=request.strategy,
        model=request.model,
        cluster=request.cluster,
        global_batch_size=request.global_batch_size,
        sequence_length=request.sequence_length,
        dtypes=request.dtypes,
        zero_stage=zero_stage,
        zero_scope=request.zero_scope,
        emulation=request.emulation,
        idle_devices=idle,
        profiles=tuple(source for source in profile.sources() if source.type in used),
        pipelines=tuple(pipelines),
    )


def renumbered(pipelines: Sequence[PipelinePlan], samples: Sequence[int]) -> list[PipelinePlan]:
    """The pipelines numbered from 0 in this order, with these samples."""
    return [
        with_samples(pipeline, count).model_copy(update={"id": index})
        for index, (pipeline, count) in enumerate(zip(pipelines, samples, strict=True))
    ]


def _pipeline(
    index: int,
    choice: PipelineChoice,
    samples: int,
    bundles: Sequence[Sequence[Node]],
    pool: DevicePool,
) -> PipelinePlan:
    stages, first = [], 0
    for number, (option, layers) in enumerate(zip(choice.stages, choice.layers, strict=True)):
        devices = [
            device
            for replica in option.replicas
            for device in pool.take(bundles[replica.node], replica.type, option.tp)
        ]
        stages.append(
            StagePlan(
                devices=tuple(devices),
                tp=option.tp,
                dp=len(option.replicas),
                rows=tuple(replica.rows for replica in option.replicas),
                layers=(first, first + layers),
                embedding=number == 0,
                head=number == len(choice.stages) - 1,
                recompute=dict.fromkeys(option.recomputed, layers) if layers else {},
            )
        )
        first += layers
    size = choice.micro_batch_size
    return PipelinePlan(
        id=index,
        micro_batch_size=size,
        samples=samples,
        local_batch_size=-(-samples // size) * size,
        stages=tuple(stages),
    )
