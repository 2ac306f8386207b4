"""Why a job does not fit, and the smallest change that would make it fit (computed, not guessed)."""

from __future__ import annotations

from collections.abc import Iterator

from planner.catalogue import DeviceType
from planner.cluster import Cluster
from planner.cost.memory import MemoryModel
from planner.cost.stages import StageCost
from planner.errors import UserError
from planner.plan import Dtypes
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.choice import PipelineChoice, SearchCounts
from planner.search.device_groups import DeviceGrid
from planner.search.layouts import whole_cluster
from planner.search.stage_search import StageSearch
from planner.units import format_bytes

# Stages looked at for one micro-batch size, to see whether a pipeline fits: enough for all that the
# enumeration handles completely, as the first that fits ends the search.
MOST_STAGES = 20_000
# Memory is searched for as a multiple of what the devices have, up to this one.
_MOST_MEMORY = 2.0**20


def cannot_fit(request: PlanRequest, *, profile: ProfileTable) -> UserError:
    """The error for a request that no pipeline fits: the stage, the bytes too many, what would help."""
    grid, name = _whole_grid(request), request.model.name
    choice = _least_memory_pipeline(request, grid, profile)
    parts = " or ".join(f"{step} x {type_}" for type_, step in zip(grid.types, grid.steps, strict=True))
    coarsely = f" (this many devices are only planned in parts of {parts})" if max(grid.steps) > 1 else ""
    if choice is None:
        return UserError(
            f"model {name} does not fit: global_batch_size = {request.global_batch_size} samples cannot be"
            f" spread over the stages of this cluster{coarsely}; raise it or use fewer devices"
        )
    return UserError(
        f"model {name} does not fit: {_worst_stage(request, choice)}{coarsely}; {_remedy(request)}"
    )


def fits(request: PlanRequest) -> bool:
    """Whether one pipeline over all devices can hold the model."""
    return _pipeline(request, _whole_grid(request), None, 1.0) is not None


def _whole_grid(request: PlanRequest) -> DeviceGrid:
    """The grid of all devices: the most that a pipeline can have."""
    return whole_cluster(request.cluster).grid


def _least_memory_pipeline(
    request: PlanRequest, grid: DeviceGrid, profile: ProfileTable
) -> PipelineChoice | None:
    """The pipeline over all devices that fits the least multiple of their memory, within 2 %."""
    low, high = 1.0, 2.0
    while (choice := _pipeline(request, grid, profile, high)) is None:
        low, high = high, high * 2
        if high > _MOST_MEMORY:
            return None
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        found = _pipeline(request, grid, profile, middle)
        if found is None:
            low = middle
        else:
            high, choice = middle, found
    return choice


def _pipeline(
    request: PlanRequest, grid: DeviceGrid, profile: ProfileTable | None, memory_factor: float
) -> PipelineChoice | None:
    """Some pipeline over the whole grid, were memory so many times larger; None if none fits."""
    types = {name: _enlarged(type_, memory_factor) for name, type_ in request.cluster.device_types.items()}
    search = StageSearch(
        cost=_cost(request, types, profile),
        memory=_memory(request),
        grid=grid,
        micro_batch_sizes=_few_sizes(request, grid),
        counts=SearchCounts(),
        tick=_nothing,
        most_stages=MOST_STAGES,
    )
    return search.any_fitting(grid.nodes, request.global_batch_size)


def _few_sizes(request: PlanRequest, grid: DeviceGrid) -> list[int]:
    """The smallest size needs least memory; larger ones only where no stage can do with so few rows."""
    most = min(request.global_batch_size, grid.devices)
    return [m for m in (1, 2, 4, 8, 16, 32, 64) if m <= most]


def _worst_stage(request: PlanRequest, choice: PipelineChoice) -> str:
    """The stage that lacks most bytes in the arrangement that needs the least memory."""
    memory = _memory(request)
    count = len(choice.stages)
    worst: tuple[int, int, str, int] | None = None
    for index in range(count):
        for type_, load in choice.loads(index, request.global_batch_size):
            device = request.cluster.device_types[type_]
            needed = memory.device_bytes(load, device)
            if worst is None or needed - device.memory_bytes > worst[0]:
                worst = (needed - device.memory_bytes, index, type_, needed)
    assert worst is not None
    excess, index, type_, needed = worst
    option, layers = choice.stages[index], choice.layers[index]
    return (
        f"stage {index} of {count} ({layers} layers on {len(option.replicas) * option.tp} x"
        f" {'+'.join(sorted({replica.type for replica in option.replicas}))}, tp {option.tp},"
        f" micro-batch {choice.micro_batch_size}) needs {format_bytes(needed)} a device,"
        f" {format_bytes(excess)} ({excess} bytes) more than {type_} has"
    )


def _remedy(request: PlanRequest) -> str:
    """The first of a few changes, smallest first, with which the job fits."""
    for words, changed in _changes(request):
        if fits(changed):
            return f"it fits with {words}"
    return "bf16, shorter sequences and up to eight times the nodes do not make it fit; use a smaller model"


def _changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    if request.dtypes.param == "fp32":
        narrow = Dtypes.for_precision("bf16")
        yield "precision bf16", request.model_copy(update={"dtypes": narrow})
    for divisor in (2, 4):
        length = request.sequence_length // divisor
        if length >= 1:
            yield f"sequence_length {length}", request.model_copy(update={"sequence_length": length})
    for times in (2, 4, 8):
        more = _more_nodes(request.cluster, times)
        yield (
            f"{times} times the nodes ({len(more.devices)} devices)",
            request.model_copy(update={"cluster": more}),
        )


def _more_nodes(cluster: Cluster, times: int) -> Cluster:
    nodes = tuple(
        node.model_copy(update={"name": f"{node.name}-{copy}", "address": None, "ray_node_id": None})
        for copy in range(times)
        for node in cluster.nodes
    )
    return Cluster(device_types=cluster.device_types, nodes=nodes, links=cluster.links)


def _enlarged(device: DeviceType, factor: float) -> DeviceType:
    return device.model_copy(update={"memory_bytes": int(device.memory_bytes * factor)})


def _cost(request: PlanRequest, types: dict[str, DeviceType], profile: ProfileTable | None) -> StageCost:
    return StageCost(
        model=request.model,
        device_types=types,
        links=request.cluster.links,
        sequence_length=request.sequence_length,
        dtypes=request.dtypes,
        profile=profile,
    )


def _memory(request: PlanRequest) -> MemoryModel:
    return MemoryModel(
        model=request.model,
        sequence_length=request.sequence_length,
        dtypes=request.dtypes,
        memory_scale=request.emulation.memory_scale,
    )


def _nothing() -> None:
    return None
