"""Stage device groups (paper 4.2.2): ordered ways to cut a pipeline's devices into stages.

TP stays inside a node and a type, DP may span nodes, a stage may mix types. All of them where there are few;
else the regular ones: like stages of each kind, kinds one after the other in any order, or every stage with its
part of every kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, permutations, product
from statistics import fmean, pstdev

from planner.search.exact.pool import Vector
from planner.search.paper.configuration import StageGroups
from planner.search.paper.device_groups import count_parts, minus, parts


def stage_device_groups(
    counts: Vector, *, powers: Sequence[float], most: int, most_stages: int
) -> list[StageGroups]:
    """The stage device groups to search, at most so many, fewest stages first.

    Of more regular ones those whose stages' computing power varies least, relative to its mean.
    """
    # There are at least as many as there are cuts in two.
    few = count_parts(counts, 1) <= most or most_stages == 1
    found = list(islice(_every(counts, most_stages), most + 1)) if few else []
    if not few or len(found) > most:
        regular = dict.fromkeys(_regular(counts, most_stages))
        found = sorted(regular, key=lambda groups: (_unevenness(groups, powers), len(groups), groups))[:most]
    return sorted(found, key=lambda groups: (len(groups), groups))


def _unevenness(groups: StageGroups, powers: Sequence[float]) -> float:
    totals = [sum(n * power for n, power in zip(stage, powers, strict=True)) for stage in groups]
    return pstdev(totals) / fmean(totals)


def _every(counts: Vector, most_stages: int) -> Iterator[StageGroups]:
    """Every ordered composition of the devices into at most so many stages."""
    yield (counts,)
    if most_stages > 1:
        for first in parts(counts, 1):
            if first != counts:
                for rest in _every(minus(counts, first), most_stages - 1):
                    yield (first, *rest)


def _regular(counts: Vector, most_stages: int) -> Iterator[StageGroups]:
    yield (counts,)
    held = [kind for kind, count in enumerate(counts) if count]
    sizes = [_sizes(counts[kind]) for kind in held]
    for chosen in product(*sizes):
        blocks = [
            _block(len(counts), kind, counts[kind], size) for kind, size in zip(held, chosen, strict=True)
        ]
        if sum(map(len, blocks)) <= most_stages:
            for order in permutations(blocks):
                yield tuple(stage for block in order for stage in block)
    if len(held) > 1:
        for stages in range(2, min(most_stages, min(counts[kind] for kind in held)) + 1):
            if all(count % stages == 0 for count in counts):
                yield (tuple(count // stages for count in counts),) * stages


def _sizes(count: int) -> list[int]:
    """Stage sizes of one kind: powers of two up to all its devices, and all."""
    sizes, size = {count}, 1
    while size < count:
        sizes.add(size)
        size *= 2
    return sorted(sizes)


def _block(kinds: int, kind: int, count: int, size: int) -> StageGroups:
    """Like stages of one kind, what is left over as a stage of its own."""
    whole, rest = divmod(count, size)
    stages = [size] * whole + [rest] * (rest > 0)
    return tuple(tuple(n if k == kind else 0 for k in range(kinds)) for n in stages)
