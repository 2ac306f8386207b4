"""Why a job does not fit, and the smallest change that would make it fit (tried out, not guessed)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from planner.cluster import MAX_DEVICES, Cluster, DeviceCount, Node
from planner.cost.memory import MemoryModel
from planner.errors import UserError
from planner.plan import Dtypes
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.units import format_bytes

# Changes that are told: the first that need nothing but an option, else the smallest of several kinds.
_MOST_TOLD = 3
_MOST_NODES = 4096
_SHORTEST = 16


def cannot_fit(request: PlanRequest, *, profile: ProfileTable) -> UserError:
    """The error for a request that no pipeline fits: the stage, the bytes too many, what would help."""
    name = request.model.name
    short = _fitting().shortage(request, profile=profile)
    if short is None:
        return UserError(
            f"model {name} does not fit: global_batch_size = {request.global_batch_size} samples cannot be"
            " spread over the stages of this cluster; raise it or use fewer devices"
        )
    (pipeline,) = short.plan.pipelines
    stage = pipeline.stages[short.stage]
    # One pipeline lacks nothing: then the search has missed it.
    lacks = (
        f"{format_bytes(short.excess_bytes)} ({short.excess_bytes} bytes) more than {short.type} has"
        if short.excess_bytes > 0
        else f"which {short.type} has, but no plan was found"
    )
    return UserError(
        f"model {name} does not fit: stage {short.stage} of {len(pipeline.stages)} ({stage.layer_count} layers on"
        f" {len(stage.devices)} x {short.type}, tp {stage.tp}, micro-batch {pipeline.micro_batch_size}) needs"
        f" {format_bytes(short.needed_bytes)} a device, {lacks}; {_remedy(request)}"
    )


def fits(request: PlanRequest) -> bool:
    """Whether one pipeline over the devices can hold the model."""
    found: bool = _fitting().fits(request)
    return found


def may_fit(request: PlanRequest) -> bool:
    """Whether all devices together can hold the layers' parameters, gradients and optimizer state once.

    Takes no time, and is never wrong when it says no: whatever is sharded, every value is somewhere.
    """
    memory = MemoryModel.of_request(request)
    types = request.cluster.device_types
    held = sum(types[name].memory_bytes * count for name, count in request.cluster.counts.items())
    return memory.layer_state_bytes() * request.model.layers <= held


def _fitting() -> Any:
    # Built on the search, so imported late.
    return import_module("planner.baselines.fitting")


def _remedy(request: PlanRequest) -> str:
    """The least changes with which the job fits."""
    for words, changed in _free_changes(request):
        if fits(changed):
            return f"it fits with {words}"
    found = [words for change in _CHANGES for words in change(request)][:_MOST_TOLD]
    if found:
        return f"it fits with {', or with '.join(found)}"
    return f"no more than {_MOST_NODES} nodes and no shorter sequence make it fit; use a smaller model"


def _free_changes(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    """What only an option forbids."""
    sharded = request.model_copy(update={"zero_stages": (0, 1, 2)})
    replayed = request.model_copy(update={"recompute": True})
    if not request.sequence_parallel:
        cut = request.model_copy(update={"sequence_parallel": True})
        yield "sequence parallel (leave out --without sequence_parallel)", cut
    if not request.recompute:
        yield "recomputation (leave out --no-recompute)", replayed
    if max(request.zero_stages) < 2:
        yield "ZeRO (leave out --zero)", sharded
    if not request.recompute and max(request.zero_stages) < 2:
        both = replayed.model_copy(update={"zero_stages": (0, 1, 2)})
        yield "recomputation and ZeRO (leave out --no-recompute and --zero)", both
    if request.dtypes.param == "fp32":
        narrow = Dtypes.for_precision("bf16")
        yield "precision bf16", request.model_copy(update={"dtypes": narrow})


def _smaller_scale(request: PlanRequest) -> Iterator[str]:
    """Emulated memory: the largest scale of two digits that fits."""

    def fitting(tenths: int) -> bool:
        emulation = request.emulation.model_copy(update={"memory_scale": tenths / 10})
        return fits(request.model_copy(update={"emulation": emulation}))

    most = int(request.emulation.memory_scale * 10)
    if request.emulation.memory_scale > 1 and (tenths := _largest(fitting, 1, most)):
        yield f"memory_scale {tenths / 10:g} in place of {request.emulation.memory_scale:g}"


def _more_devices(request: PlanRequest) -> Iterator[str]:
    """The fewest more nodes of each type, the type that needs fewest devices first."""
    found = []
    for name in request.cluster.counts:
        size = max(sum(e.count for e in node.devices if e.type == name) for node in request.cluster.nodes)
        most = min(_MOST_NODES, (MAX_DEVICES - len(request.cluster.devices)) // size)

        def fitting(nodes: int, name: str = name, size: int = size) -> bool:
            more = _with_nodes(request.cluster, name, size, nodes)
            return fits(request.model_copy(update={"cluster": more}))

        nodes = _smallest(fitting, most)
        if nodes is not None:
            kind = f"node{'s' if nodes > 1 else ''} of {size} x {name}" if size > 1 else name
            found.append((nodes * size, f"{nodes} more {kind}"))
    return iter([words for _, words in sorted(found, key=lambda one: one[0])])


def _shorter_sequence(request: PlanRequest) -> Iterator[str]:
    """The longest sequence of whole 16 tokens that fits."""

    def fitting(sixteens: int) -> bool:
        return fits(request.model_copy(update={"sequence_length": sixteens * _SHORTEST}))

    sixteens = _largest(fitting, 1, request.sequence_length // _SHORTEST)
    if sixteens:
        yield f"sequence_length {sixteens * _SHORTEST}"


_CHANGES = (_smaller_scale, _more_devices, _shorter_sequence)


def _smallest(works: Callable[[int], bool], most: int) -> int | None:
    """The least number from 1 to `most` that works, where every larger one does too; None if none does."""
    high = 1
    while high <= most and not works(high):
        high *= 2
    if high > most:
        return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(middle) else (middle, high)
    return high


def _largest(works: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest number that works, where every smaller one does too; None if not even `least` does."""
    if most < least or not works(least):
        return None
    low, high = least, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if works(middle) else (low, middle)
    return low


def _with_nodes(cluster: Cluster, name: str, size: int, count: int) -> Cluster:
    """The cluster with `count` more nodes of `size` devices of a type."""
    taken = {node.name for node in cluster.nodes}
    names = (f"more{index}" for index in range(count + len(taken)))
    free = [one for one in names if one not in taken][:count]
    more = tuple(Node(name=one, devices=(DeviceCount(type=name, count=size),)) for one in free)
    return cluster.model_copy(update={"nodes": (*cluster.nodes, *more)})
