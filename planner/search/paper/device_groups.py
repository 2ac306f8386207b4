"""Pipeline device groups (paper 4.2.1): multisets of pipelines, each composition once, and how many there are.

A pipeline is described by how many devices of each kind it has, as the paper does; which nodes they come from is
decided when a plan is made. Devices can be handed out several at a time (`unit`), what is left over in one
piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from itertools import product
from math import prod

import numpy as np

from planner.search.exact.pool import Vector

Group = tuple[Vector, ...]
"""A pipeline device group: the pipelines' devices by kind, largest first."""

# Vectors up to which groups are counted: the count takes their square.
MOST_COUNTED_CELLS = 2500


def minus(whole: Vector, part: Vector) -> Vector:
    return tuple(a - b for a, b in zip(whole, part, strict=True))


@lru_cache(maxsize=100_000)
def parts(left: Vector, unit: int) -> tuple[Vector, ...]:
    """Every pipeline that can be taken from what is left: of each kind whole units, or all, or all but whole
    units. Largest first."""
    choices = [sorted(_shares(count, unit), reverse=True) for count in left]
    return tuple(part for part in product(*choices) if any(part))


def count_parts(left: Vector, unit: int) -> int:
    """How many `parts` there are."""
    return prod(len(_shares(count, unit)) for count in left) - 1


def _shares(count: int, unit: int) -> set[int]:
    """What a part may have of one kind."""
    return {*range(0, count + 1, unit), *(count - n for n in range(0, count + 1, unit))}


def compositions(counts: Vector, unit: int) -> list[Vector]:
    """Every pipeline of some device group, fewest devices first."""
    return sorted(parts(counts, unit), key=lambda part: (sum(part), part))


def device_groups(counts: Vector, *, pipelines: int, unit: int = 1) -> Iterator[Group]:
    """Every multiset of so many pipelines that together are all devices, each once."""

    def extend(chosen: Group, left: Vector, missing: int) -> Iterator[Group]:
        if missing == 1:
            if any(left) and (not chosen or left <= chosen[-1]):
                yield (*chosen, left)
            return
        for part in parts(left, unit):
            if chosen and part > chosen[-1]:
                continue
            # The largest of those that are still missing is at least their mean.
            if part[0] * missing < left[0]:
                break
            rest = minus(left, part)
            if sum(rest) >= missing - 1:
                yield from extend((*chosen, part), rest, missing - 1)

    yield from extend((), counts, pipelines)


def most_pipelines(counts: Vector, unit: int) -> int:
    """Pipelines of the group with most of them."""
    return sum(-(-count // unit) for count in counts)


def count_groups(counts: Vector) -> int | None:
    """How many device groups of any number of pipelines there are, device by device; None if too many to count.

    The coefficient of x^counts in the product of 1/(1 - x^v) over all v.
    """
    if prod(count + 1 for count in counts) > MOST_COUNTED_CELLS:
        return None
    ways = np.zeros([count + 1 for count in counts], dtype=object)
    ways[(0,) * len(counts)] = 1
    for vector in product(*(range(count + 1) for count in counts)):
        if any(vector):
            _times_geometric(ways, vector)
    return int(ways[counts])


def _times_geometric(ways: np.ndarray[tuple[int, ...], np.dtype[np.object_]], vector: Vector) -> None:
    """Multiply a polynomial by 1/(1 - x^v) = (1 + x^v)(1 + x^2v)(1 + x^4v)..., in place."""
    while all(step < size for step, size in zip(vector, ways.shape, strict=True)):
        to = tuple(slice(step, None) for step in vector)
        start = tuple(slice(None, size - step) for step, size in zip(vector, ways.shape, strict=True))
        shifted = ways[start].copy()
        ways[to] += shifted
        vector = tuple(2 * step for step in vector)


@cache
def partitions(count: int) -> tuple[int, ...]:
    """The number of partitions of 0 to `count`."""
    ways = [1] + [0] * count
    for size in range(1, count + 1):
        for total in range(size, count + 1):
            ways[total] += ways[total - size]
    return tuple(ways)


def count_sorted_groups(counts: Sequence[int]) -> int:
    """How many device groups are cuts of the devices in a row, kind by kind.

    Such a group has pipelines of one kind, and at most one across each border of kinds.
    """
    kinds = [count for count in counts if count]

    @cache
    def ways(kind: int, taken: int) -> int:
        """From this kind on, `taken` of its devices being in the pipeline that crosses from the kind before."""
        left = kinds[kind] - taken
        if kind + 1 == len(kinds):
            return partitions(left)[left]
        found = partitions(left)[left] * ways(kind + 1, 0)
        onward = sum(ways(kind + 1, more) for more in range(1, kinds[kind + 1] + 1))
        found += sum(partitions(left)[left - crossing] for crossing in range(1, left + 1)) * onward
        if taken and not left:
            found += onward
        return found

    return ways(0, 0)
