"""Gradient blocks (paper 4.3): what ranks of unlike stages reduce together, from a Plan alone.

Ranks that hold the same parameters hold them in other shapes and at other addresses. Three steps turn
that into few flat collectives, the same list on every rank:

* `partition`: cut each parameter at the union of its holders' TP shard boundaries, so that every rank
  holds a piece whole or not at all;
* `combine`: inside a region, put the pieces with the same holders next to each other;
* `fuse`: across regions, make one block of everything with the same holders.

A rank whose gradient buffer is laid out in block order has every block as one contiguous range.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from operator import attrgetter
from typing import Literal

from planner.model_spec import ModelSpec
from planner.parameters import Parameter, Region, model_parameters
from planner.plan import Plan

BlockKind = Literal["sharded", "replicated", "tied"]


@dataclass(frozen=True)
class Atom:
    """A piece of one parameter that every rank holds whole or not at all.

    `tp_range` is half open, in logical indices along the parameter's `tp_dim`; None is the whole of a
    parameter that TP replicates.
    """

    parameter: str
    tp_range: tuple[int, int] | None
    numel: int


@dataclass(frozen=True)
class CombinedRange:
    """Atoms of one region that the same ranks hold, in parameter order: contiguous in their buffers."""

    region: Region
    kind: BlockKind
    holders: tuple[int, ...]
    weights: tuple[float, ...]
    atoms: tuple[Atom, ...]


@dataclass(frozen=True)
class GradientBlock:
    """What one collective sums: the same atoms in the same order on every holder.

    `index` is the place in the one global launch order. `holders` are ranks, ascending. A holder scales
    its gradient by its entry of `weights` before the sum: 1/t for a `replicated` block whose t TP ranks
    hold equal gradients, otherwise 1. `tied` is the token embedding shared by first and last stages.
    Parameters that TP would replicate are in a `sharded` block where no holder uses TP.
    """

    index: int
    kind: BlockKind
    holders: tuple[int, ...]
    weights: tuple[float, ...]
    atoms: tuple[Atom, ...]
    numel: int

    def weight(self, rank: int) -> float:
        """The multiplier of a holder's gradient."""
        return self.weights[self.holders.index(rank)]


@dataclass(frozen=True)
class StageLayout:
    """What of a stage decides its blocks: its parameters, and its ranks, row-major [dp][tp]."""

    first_rank: int
    tp: int
    dp: int
    layers: tuple[int, int]
    embedding: bool
    head: bool
    sequence_parallel: bool = False

    def holds(self, parameter: Parameter) -> bool:
        kind, layer = parameter.region.kind, parameter.region.layer
        if layer is not None:
            return self.layers[0] <= layer < self.layers[1]
        if kind == "embedding":
            return self.embedding or (parameter.tied and self.head)
        return self.head

    def ranks(self, *, tp_rank: int) -> range:
        """The ranks that hold one TP shard: one a DP replica."""
        return range(self.first_rank + tp_rank, self.first_rank + self.tp * self.dp, self.tp)

    @property
    def all_ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.tp * self.dp)

    @property
    def replicated_weight(self) -> float:
        """Under sequence parallelism the TP ranks hold partial sums, otherwise equal gradients."""
        return 1.0 if self.sequence_parallel else 1.0 / self.tp


def gradient_blocks(plan: Plan) -> tuple[GradientBlock, ...]:
    """Every block of a plan, in launch order."""
    return layout_blocks(plan.model, stage_layouts(plan))


def rank_blocks(blocks: Iterable[GradientBlock], rank: int) -> tuple[GradientBlock, ...]:
    """The blocks that a rank holds, in launch order: the order of its gradient buffer."""
    return tuple(block for block in blocks if rank in block.holders)


def stage_layouts(plan: Plan) -> tuple[StageLayout, ...]:
    """Every stage of a plan with the ranks it runs on, in rank order."""
    layouts, rank = [], 0
    for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
        layouts.append(
            StageLayout(
                first_rank=rank,
                tp=stage.tp,
                dp=stage.dp,
                layers=stage.layers,
                embedding=stage.embedding,
                head=stage.head,
                sequence_parallel=stage.sequence_parallel,
            )
        )
        rank += len(stage.devices)
    return tuple(layouts)


@lru_cache(maxsize=64)
def layout_blocks(model: ModelSpec, layouts: tuple[StageLayout, ...]) -> tuple[GradientBlock, ...]:
    """`gradient_blocks` for stages that are not (yet) a Plan."""
    return fuse(combine(model, layouts))


@dataclass(frozen=True)
class Cut:
    """Half-open range of a dim, and the TP rank that holds it for each degree of `partition`."""

    start: int
    stop: int
    tp_ranks: tuple[int, ...]


def partition(parameter: Parameter, degrees: Sequence[int]) -> tuple[Cut, ...]:
    """Cut a parameter's `tp_dim` at the union of the shard boundaries of all TP degrees.

    Degrees need not divide each other (3 and 4 give six cuts), nor the vocabulary.
    """
    shards = [[parameter.shard_range(tp=tp, tp_rank=i) for i in range(tp)] for tp in degrees]
    bounds = sorted({bound for ranges in shards for pair in ranges for bound in pair})
    return tuple(
        Cut(start, stop, tuple(_owner(ranges, start) for ranges in shards))
        for start, stop in pairwise(bounds)
    )


def _owner(ranges: Sequence[tuple[int, int]], index: int) -> int:
    """Shards are as long as the first, but for the last ones."""
    (_, length), owner = ranges[0], index // ranges[0][1]
    assert ranges[owner][0] == owner * length <= index < ranges[owner][1]
    return owner


def combine(model: ModelSpec, layouts: Sequence[StageLayout]) -> Iterator[CombinedRange]:
    """Per region, the atoms with the same holders as one range; regions in forward order."""
    pieces = _Pieces()
    # Hashing hundreds of stages or ranks takes longer than all the rest, so that stages are numbered once a region and
    # holders once a piece.
    numbers: dict[tuple[StageLayout, ...], int] = {}
    for region, parameters in groupby(model_parameters(model), key=attrgetter("region")):
        ranges: dict[int, tuple[_Piece, list[Atom]]] = {}
        stages: dict[bool, tuple[tuple[StageLayout, ...], int]] = {}
        for parameter in parameters:
            if parameter.tied not in stages:
                held = tuple(layout for layout in layouts if layout.holds(parameter))
                stages[parameter.tied] = held, numbers.setdefault(held, len(numbers))
            for piece, group in pieces.of(parameter, *stages[parameter.tied]):
                if group not in ranges:
                    ranges[group] = piece, []
                ranges[group][1].append(Atom(parameter.name, piece.tp_range, piece.numel))
        for piece, atoms in ranges.values():
            yield CombinedRange(region, piece.kind, piece.holders, piece.weights, tuple(atoms))


@dataclass(frozen=True)
class _Piece:
    kind: BlockKind
    holders: tuple[int, ...]
    weights: tuple[float, ...]
    tp_range: tuple[int, int] | None
    numel: int


class _Pieces:
    """The pieces of a parameter for the stages that hold it: worked out once a distinct shape and stages."""

    def __init__(self) -> None:
        self._known: dict[object, tuple[tuple[_Piece, int], ...]] = {}
        self._groups: dict[tuple[BlockKind, tuple[int, ...]], int] = {}

    def of(
        self, parameter: Parameter, stages: tuple[StageLayout, ...], number: int
    ) -> tuple[tuple[_Piece, int], ...]:
        """Each with a number that stands for its kind and holders. `number` stands for the stages, in every call for
        the same ones."""
        key = (parameter.shape, parameter.tp_dim, parameter.tied, parameter.padded, number)
        if key not in self._known:
            make = _replicated if parameter.tp_dim is None else _sharded
            self._known[key] = tuple(
                (piece, self._groups.setdefault((piece.kind, piece.holders), len(self._groups)))
                for piece in make(parameter, stages)
            )
        return self._known[key]


def _replicated(parameter: Parameter, stages: Sequence[StageLayout]) -> Iterator[_Piece]:
    holders = tuple(rank for stage in stages for rank in stage.all_ranks)
    weights = tuple(stage.replicated_weight for stage in stages for _ in stage.all_ranks)
    # Without TP nothing is replicated over it, and the sharded parameters have the same holders.
    kind: BlockKind = "replicated" if any(stage.tp > 1 for stage in stages) else "sharded"
    yield _Piece(kind, holders, weights, None, parameter.numel)


def _sharded(parameter: Parameter, stages: Sequence[StageLayout]) -> Iterator[_Piece]:
    assert parameter.tp_dim is not None
    degrees = sorted({stage.tp for stage in stages})
    row = parameter.numel // parameter.shape[parameter.tp_dim]
    for cut in partition(parameter, degrees):
        tp_rank = dict(zip(degrees, cut.tp_ranks, strict=True))
        holders = tuple(rank for stage in stages for rank in stage.ranks(tp_rank=tp_rank[stage.tp]))
        yield _Piece(
            "tied" if parameter.tied else "sharded",
            holders,
            (1.0,) * len(holders),
            (cut.start, cut.stop),
            row * (cut.stop - cut.start),
        )


def fuse(ranges: Iterable[CombinedRange]) -> tuple[GradientBlock, ...]:
    """One block of all ranges with the same kind and holders, its atoms in region order."""
    fused: dict[tuple[BlockKind, tuple[int, ...]], list[CombinedRange]] = {}
    for part in ranges:
        fused.setdefault((part.kind, part.holders), []).append(part)
    # Stable: the blocks of one layer range keep the order of their cuts, so a rank below the finest TP
    # degree has a parameter's pieces at equal distances.
    backward = sorted(fused.values(), key=_backward_key)
    return launch_order([_block(index, parts) for index, parts in enumerate(backward)])


def _backward_key(parts: Sequence[CombinedRange]) -> tuple[bool, int, bool]:
    """Backward completes blocks in this order: the deeper one reaches the later; tied last."""
    kind = parts[0].kind
    return kind == "tied", -min(part.region.order for part in parts), kind == "replicated"


def launch_order(blocks: Sequence[GradientBlock]) -> tuple[GradientBlock, ...]:
    """The blocks, given in the order in which backward completes them, numbered in launch order.

    Every rank launches its blocks in the one order, so ranks never wait for each other crosswise; but where
    stage boundaries do not align, neighbouring blocks share holders, and launching down the model would make
    each wait for the one before. So each next block is the one that can start earliest when all ranks are
    ready at zero and a ring all-reduce over N holders takes numel (N - 1) / N; of several, the one with the
    holder that has most still to do; then the one that backward completes first. Tied blocks, complete only
    when both ends of every pipeline are, come last.

    Starts only grow and what is left only shrinks, so an entry of the heap that is out of date is never too
    late: it is looked at again when it surfaces.
    """
    seconds = [block.numel * (1 - 1 / len(block.holders)) for block in blocks]
    free: dict[int, float] = {}
    left: dict[int, float] = {}
    for block, duration in zip(blocks, seconds, strict=True):
        for rank in block.holders:
            free[rank] = 0.0
            left[rank] = left.get(rank, 0.0) + duration

    def key(index: int) -> tuple[bool, float, float, int]:
        block = blocks[index]
        start = max(map(free.__getitem__, block.holders))
        return block.kind == "tied", start, -max(map(left.__getitem__, block.holders)), index

    heap = [key(index) for index in range(len(blocks))]
    heapq.heapify(heap)
    ordered: list[GradientBlock] = []
    while heap:
        entry = heap[0]
        fresh = key(entry[-1])
        if fresh != entry:
            heapq.heapreplace(heap, fresh)
            continue
        heapq.heappop(heap)
        index, start = entry[-1], entry[1]
        for rank in blocks[index].holders:
            free[rank] = start + seconds[index]
            left[rank] -= seconds[index]
        ordered.append(replace(blocks[index], index=len(ordered)))
    return tuple(ordered)


def _block(index: int, parts: Sequence[CombinedRange]) -> GradientBlock:
    in_order = sorted(parts, key=lambda part: part.region)
    atoms = tuple(atom for part in in_order for atom in part.atoms)
    first = parts[0]
    return GradientBlock(
        index=index,
        kind=first.kind,
        holders=first.holders,
        weights=first.weights,
        atoms=atoms,
        numel=sum(atom.numel for atom in atoms),
    )
