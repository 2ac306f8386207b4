"""The collectives that synchronise a plan's gradients, and the buffer that they read, from the Plan alone.

Three schemes (paper 4.3) differ in what one collective takes:

* `block`: a gradient block (`gradient_blocks`). For overlap with the backward pass a block that spans many
  layers is cut into a few calls in backward order.
* `tensor`: one piece of one parameter, as cut by the TP degrees of all its holders.
* `device`: the whole padded buffer of a layer range. All ranks of all stages that share the range present
  its full size, zeros where they hold nothing, as in Fig. 5. Ranges with the same ranks are one call, and
  nothing is padded that no rank of the group holds: the fastest form of that design.

All ranks launch their calls in the one order of this list, so no two wait for each other crosswise.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from planner.collectives import Reduction, choose_reduction
from planner.cost.backward import BackwardLeft, backward_ends
from planner.cost.stages import StageCost
from planner.gradient_blocks import GradientBlock, StageLayout, layout_blocks, stage_layouts
from planner.model_spec import ModelSpec
from planner.parameters import model_parameters
from planner.plan import Plan
from planner.profile.analytic import PRECISION_BYTES


@dataclass(frozen=True)
class Section:
    """Blocks that lie next to each other in the gradient buffer of every one of `holders`.

    `numel` counts elements, rounded up to a multiple of the holders, so that they can cut the section into
    equal shards. Of a `device` section each rank holds only some blocks; the rest is its padding.
    """

    index: int
    holders: tuple[int, ...]
    blocks: tuple[GradientBlock, ...]
    numel: int

    def shard(self, rank: int) -> tuple[int, int]:
        """Half-open range of elements that a holder keeps when the section is reduced and scattered."""
        size = self.numel // len(self.holders)
        place = self.holders.index(rank)
        return place * size, (place + 1) * size

    def places(self) -> Iterator[tuple[GradientBlock, int]]:
        """Each block and where it begins, in elements."""
        start = 0
        for block in self.blocks:
            yield block, start
            start += block.numel


@dataclass(frozen=True)
class GradientCall:
    """One collective: elements `[start, stop)` of a section, summed over its holders.

    `index` is the place in the launch order. `region` is the order of the region (planner/parameters.py)
    with which backward completes the call, the lowest that it reaches; `block` is its first block's index.
    """

    index: int
    section: int
    holders: tuple[int, ...]
    start: int
    stop: int
    region: int
    block: int

    @property
    def numel(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True)
class GradientLayout:
    """Every section in buffer order, and every call (of more than one holder) in launch order."""

    sections: tuple[Section, ...]
    calls: tuple[GradientCall, ...]

    def sections_of(self, rank: int) -> tuple[Section, ...]:
        """The sections in a rank's buffer, in its order."""
        return tuple(section for section in self.sections if rank in section.holders)

    def calls_of(self, rank: int) -> tuple[GradientCall, ...]:
        """The calls that a rank takes part in, in launch order."""
        return tuple(call for call in self.calls if rank in call.holders)


def gradient_layout(plan: Plan) -> GradientLayout:
    """Sections and calls of the plan's scheme (`gradient_sync`), for overlap if the plan overlaps."""
    stages = stage_layouts(plan)
    if not plan.overlap:
        return _layout(plan.model, stages, plan.gradient_sync, None)
    chunks = tuple(most_chunks(plan, block) for block in layout_blocks(plan.model, stages))
    layout = _layout(plan.model, stages, plan.gradient_sync, chunks)
    return GradientLayout(layout.sections, earliest_first(plan, layout.calls))


def call_reduction(plan: Plan, call: GradientCall | GradientBlock) -> Reduction:
    """How the holders of a call sum it, and its seconds: the runtime does what the cost model prices."""
    devices = plan.cluster.device_by_id
    return choose_reduction(
        plan.cluster.links,
        [devices[plan.ranks[rank].device] for rank in call.holders],
        numel=call.numel,
        element_bytes=PRECISION_BYTES[plan.dtypes.wire],
    )


def reduction_groups(plan: Plan) -> tuple[tuple[int, ...], ...]:
    """Ranks of every group of more than one that synchronisation needs, each once, in a fixed order."""
    groups: dict[tuple[int, ...], None] = {}
    for call in gradient_layout(plan).calls:
        groups.setdefault(call.holders)
        for positions in call_reduction(plan, call).groups:
            groups.setdefault(tuple(call.holders[position] for position in positions))
    return tuple(groups)


def most_chunks(plan: Plan, block: GradientBlock) -> int:
    """Into how many calls a block is best cut for overlap; it has at most as many as regions.

    Cut into k, a block of T seconds has T / k of it left when backward ends, and pays the latency L of a
    collective k times: T / k + k L is least at k = sqrt(T / L).
    """
    if len(block.holders) < 2:
        return 1
    whole = call_reduction(plan, block).seconds
    latency = call_reduction(plan, replace(block, numel=0)).seconds
    return max(1, round(math.sqrt(whole / latency))) if latency else len(block.atoms)


def earliest_first(plan: Plan, calls: Sequence[GradientCall]) -> tuple[GradientCall, ...]:
    """The calls, numbered in launch order for overlap with the last backward (compare `launch_order`).

    Each next call is the one that can start earliest by the cost model, when backward has passed the layers
    it takes on all holders and these have finished their earlier calls; of several, the one with the holder
    that has most still to do; then the one that backward completes first. All ranks work out the same order,
    whatever the profile that the plan was priced with.
    """
    cost = StageCost.of_plan(plan)
    ends, left = backward_ends(plan, cost), BackwardLeft(plan, cost)
    end_of = [ends[place.pipeline][place.stage] for place in plan.ranks]
    seconds = CallSeconds(plan)
    tasks = [
        _Task(
            call,
            max(end_of[rank] - left.seconds(rank, call.region) for rank in call.holders),
            seconds.of(call),
        )
        for call in sorted(calls, key=lambda call: (-call.region, call.block, call.start))
    ]
    return tuple(replace(task.call, index=index) for index, task in enumerate(_list_schedule(tasks)))


@dataclass(frozen=True)
class _Task:
    call: GradientCall
    ready: float
    seconds: float


def _list_schedule(tasks: Sequence[_Task]) -> Iterator[_Task]:
    """Starts only grow and what is left only shrinks, so an out-of-date entry of the heap is never too late:
    it is looked at again when it surfaces."""
    free: dict[int, float] = {}
    left: dict[int, float] = {}
    for task in tasks:
        for rank in task.call.holders:
            free[rank] = 0.0
            left[rank] = left.get(rank, 0.0) + task.seconds

    def key(index: int) -> tuple[float, float, int]:
        task = tasks[index]
        start = max(task.ready, *(free[rank] for rank in task.call.holders))
        return start, -max(left[rank] for rank in task.call.holders), index

    heap = [key(index) for index in range(len(tasks))]
    heapq.heapify(heap)
    while heap:
        fresh = key(heap[0][-1])
        if fresh != heap[0]:
            heapq.heapreplace(heap, fresh)
            continue
        start, _, index = heapq.heappop(heap)
        for rank in tasks[index].call.holders:
            free[rank] = start + tasks[index].seconds
            left[rank] -= tasks[index].seconds
        yield tasks[index]


class CallSeconds:
    """Seconds of a plan's calls: worked out once for holders at alike places and messages of one size."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        devices = [plan.cluster.device_by_id[place.device] for place in plan.ranks]
        self._places = [(device.node, device.type) for device in devices]
        self._known: dict[tuple[int, tuple[tuple[str, str], ...]], float] = {}

    def of(self, call: GradientCall) -> float:
        key = (call.numel, tuple(self._places[rank] for rank in call.holders))
        if key not in self._known:
            self._known[key] = call_reduction(self._plan, call).seconds
        return self._known[key]


@lru_cache(maxsize=64)
def _layout(
    model: ModelSpec, stages: tuple[StageLayout, ...], scheme: str, chunks: tuple[int, ...] | None
) -> GradientLayout:
    """In block order; `chunks` says into how many calls each block is cut at most (None: into one)."""
    regions = {parameter.name: parameter.region.order for parameter in model_parameters(model)}
    blocks = layout_blocks(model, stages)
    ordered = sorted(blocks, key=lambda block: _layout_key(block, regions))
    groups = _padded_groups(ordered, stages) if scheme == "device" else [(b.holders, [b]) for b in ordered]
    sections = tuple(
        Section(index, holders, tuple(held), _rounded(sum(block.numel for block in held), len(holders)))
        for index, (holders, held) in enumerate(groups)
    )
    calls: list[GradientCall] = []
    for section in sections:
        if len(section.holders) > 1:
            calls += _cut(section, regions, scheme, chunks[section.blocks[0].index] if chunks else 1)
    calls.sort(key=lambda call: (call.block, call.start))
    return GradientLayout(sections, tuple(replace(call, index=index) for index, call in enumerate(calls)))


def _layout_key(block: GradientBlock, regions: dict[str, int]) -> tuple[bool, int, bool, tuple[int, int]]:
    """Buffer order: that of backward, and the cuts of one layer range in the order of their shards.

    So a rank below the finest TP degree has a parameter's pieces at equal distances, under one view.
    """
    first = block.atoms[0]
    lowest = min(regions[atom.parameter] for atom in block.atoms)
    return block.kind == "tied", -lowest, block.kind == "replicated", first.tp_range or (0, 0)


def _padded_groups(
    blocks: Iterable[GradientBlock], stages: Sequence[StageLayout]
) -> list[tuple[tuple[int, ...], list[GradientBlock]]]:
    """Blocks by the ranks of all stages that hold any part of their regions."""
    stage_of = {rank: stage for stage in stages for rank in stage.all_ranks}
    groups: dict[tuple[int, ...], list[GradientBlock]] = {}
    for block in blocks:
        sharing = {stage_of[rank] for rank in block.holders}
        ranks = tuple(sorted(rank for stage in sharing for rank in stage.all_ranks))
        groups.setdefault(ranks, []).append(block)
    return list(groups.items())


def _rounded(numel: int, multiple: int) -> int:
    return -(-numel // multiple) * multiple


def _cut(section: Section, regions: dict[str, int], scheme: str, most: int) -> Iterator[GradientCall]:
    """The calls of a section, unnumbered."""
    if scheme == "block":
        ranges = _chunks(section, regions, most)
    elif scheme == "tensor":
        ranges = _pieces(section, regions)
    else:
        lowest = min(regions[atom.parameter] for block in section.blocks for atom in block.atoms)
        ranges = iter([(0, section.numel, lowest)])
    block = min(block.index for block in section.blocks)
    for start, stop, region in ranges:
        yield GradientCall(-1, section.index, section.holders, start, stop, region, block)


def _pieces(section: Section, regions: dict[str, int]) -> Iterator[tuple[int, int, int]]:
    start = 0
    for atom in (atom for block in section.blocks for atom in block.atoms):
        yield start, start + atom.numel, regions[atom.parameter]
        start += atom.numel


def _chunks(section: Section, regions: dict[str, int], most: int) -> Iterator[tuple[int, int, int]]:
    """At most so many ranges of about equal size, from the last region to the first, cut between regions.

    Cuts are rounded up to a multiple of the holders: what moves below a cut was complete before.
    """
    first: dict[int, int] = {}
    for start, _, region in _pieces(section, regions):
        first.setdefault(region, start)
    stop, target = section.numel, section.numel / most
    for region, begin in reversed(first.items()):
        start = _rounded(begin, len(section.holders))
        if stop - start >= target or begin == 0:
            if stop > start:
                yield start, stop, region
            stop = start
