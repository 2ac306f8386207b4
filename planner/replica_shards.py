"""What each replica of a stage keeps of the gradients (ZeRO-2, and ZeRO with scope `pipeline`), from the Plan alone.

A block is taken region by region, since backward makes it so. Of each such part every replica keeps an equal
piece. Stages with unlike numbers of replicas cut a part at unlike places, so who sums what over the stages is
settled between any two of all their cuts: each holder a share there that is as large as its piece is small.
So nothing is summed but where a piece of it lies, and all holders answer for equally many elements.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

from planner.gradient_blocks import Atom
from planner.gradient_calls import GradientCall, GradientLayout
from planner.parameters import model_parameters
from planner.plan import Plan

Range = tuple[int, int]
"""Half open, in elements of a part."""


def shards_by_replica(plan: Plan) -> bool:
    """Whether the replicas of a stage share what they hold before other stages have a part in it."""
    return plan.zero_stage == 2 or (plan.zero_stage == 1 and plan.zero_scope == "pipeline")


@dataclass(frozen=True)
class Stand:
    """Where a holder stands: replica `replica` of the `dp` of its stage."""

    dp: int
    replica: int

    def piece_size(self, numel: int) -> int:
        """Elements of a piece of a part of so many, rounded up: the last pieces may hold fewer."""
        return -(-numel // self.dp)

    def piece(self, numel: int) -> Range:
        """The holder's piece of a part of so many elements."""
        size = self.piece_size(numel)
        return min(numel, self.replica * size), min(numel, (self.replica + 1) * size)


@dataclass(frozen=True)
class Part:
    """What a block holds of one region.

    `region` is its order (planner/parameters.py); `call` is the collective that sums the part over its holders,
    None if one rank alone holds it. `stands` and `weights` (planner/gradient_blocks.py) follow `holders`.
    """

    section: int
    region: int
    atoms: tuple[Atom, ...]
    numel: int
    holders: tuple[int, ...]
    weights: tuple[float, ...]
    stands: tuple[Stand, ...]
    call: GradientCall | None

    def stand(self, rank: int) -> Stand:
        """Where a holder stands."""
        return self.stands[self.holders.index(rank)]

    def weight(self, rank: int) -> float:
        """The multiplier of a holder's gradient."""
        return self.weights[self.holders.index(rank)]

    def owned(self, rank: int) -> tuple[Range, ...]:
        """What a holder sums over all holders."""
        return owned_ranges(self.numel, self.stands)[self.holders.index(rank)]

    def piece(self, rank: int) -> Range:
        """What a holder keeps of its own stage's sum."""
        return self.stand(rank).piece(self.numel)


def parts_of(plan: Plan, layout: GradientLayout, rank: int) -> tuple[Part, ...]:
    """A rank's parts, by section and in it by region, both ascending: the same order on all ranks."""
    regions = {parameter.name: parameter.region.order for parameter in model_parameters(plan.model)}
    stands = [
        Stand(plan.pipelines[place.pipeline].stages[place.stage].dp, place.replica) for place in plan.ranks
    ]
    found = []
    for section in layout.sections_of(rank):
        (block,) = section.blocks
        calls = [call for call in layout.calls if call.section == section.index]
        for region, atoms in groupby(block.atoms, key=lambda atom: regions[atom.parameter]):
            held = tuple(atoms)
            reached = [call for call in calls if call.region <= region]
            found.append(
                Part(
                    section=section.index,
                    region=region,
                    atoms=held,
                    numel=sum(atom.numel for atom in held),
                    holders=block.holders,
                    weights=block.weights,
                    stands=tuple(stands[holder] for holder in block.holders),
                    call=max(reached, key=lambda call: call.region) if reached else None,
                )
            )
    return tuple(found)


def replicas_of(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks that hold what this rank holds, one a replica of its stage, itself among them."""
    own = plan.ranks[rank]
    return tuple(
        place.rank
        for place in plan.ranks
        if (place.pipeline, place.stage, place.tp_rank) == (own.pipeline, own.stage, own.tp_rank)
    )


@lru_cache(maxsize=4096)
def owned_ranges(numel: int, stands: tuple[Stand, ...]) -> tuple[tuple[Range, ...], ...]:
    """By holder, the ranges it answers for: inside its piece, disjoint, and together the whole part."""
    pieces = [stand.piece(numel) for stand in stands]
    cuts = sorted({0, numel, *(edge for piece in pieces for edge in piece)})
    owned: list[list[Range]] = [[] for _ in stands]
    for start, stop in pairwise(cuts):
        inside = [at for at, (first, last) in enumerate(pieces) if first <= start and stop <= last]
        total, done = sum(stands[at].dp for at in inside), 0
        for at in inside:
            first = start + (stop - start) * done // total
            done += stands[at].dp
            last = start + (stop - start) * done // total
            if first < last:
                owned[at].append((first, last))
    return tuple(tuple(_joined(ranges)) for ranges in owned)


def common_ranges(ones: Sequence[Range], others: Sequence[Range]) -> list[Range]:
    """Where two ascending lists of ranges overlap, ascending."""
    found = []
    for start, stop in ones:
        for first, last in others:
            if max(start, first) < min(stop, last):
                found.append((max(start, first), min(stop, last)))
    return found


def uncovered(whole: Range, parts: Sequence[Range]) -> list[Range]:
    """What of a range ascending ones inside it leave out."""
    edges = [whole[0], *(edge for part in parts for edge in part), whole[1]]
    return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]


def _joined(ranges: Sequence[Range]) -> Iterator[Range]:
    """Without seams."""
    last: Range | None = None
    for start, stop in ranges:
        if last is not None and last[1] == start:
            last = last[0], stop
            continue
        if last is not None:
            yield last
        last = start, stop
    if last is not None:
        yield last
