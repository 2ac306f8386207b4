"""Combining pipelines by dynamic programming (paper 5.4, Eq. 10): the best cuts of the devices in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import numpy as np

from planner.search.exact.pool import Vector
from planner.search.paper.device_groups import Group, minus

Arrangement = tuple[int, ...]
"""All devices in a row, by kind."""

# Arrangements of so many devices in a row are all tried, others sorted and interleaved only.
_ALL_ARRANGED = 8
_MOST_ORDERS = 6


class Row:
    """An arrangement, and the pipelines that can be cut from it: every `unit` devices of a run of one kind, and
    between runs."""

    def __init__(self, arrangement: Arrangement, counts: Vector, unit: int) -> None:
        self.places = _places(arrangement, unit)
        so_far = [0] * len(counts)
        self._counted = [tuple(so_far)]
        for kind in arrangement:
            so_far[kind] += 1
            self._counted.append(tuple(so_far))

    def part(self, first: int, last: int) -> Vector:
        """The devices from one place to another."""
        return minus(self._counted[last], self._counted[first])

    def best_cuts(
        self, *, throughput: Callable[[Vector], float], most_pipelines: int
    ) -> list[tuple[float, Group]]:
        """For each number of pipelines from 1 the most throughput in all, and the group that has it.

        Eq. 10: R[p][n] = max over i of R[p-1][i] + throughput of the pipeline from i to n. O(P N^2).
        """
        ends = len(self.places)
        pipe = np.full((ends, ends), -np.inf)
        for i in range(ends):
            for n in range(i + 1, ends):
                pipe[i, n] = throughput(self.part(self.places[i], self.places[n]))
        found = []
        total = np.full(ends, -np.inf)
        total[0] = 0.0
        chosen: list[list[int]] = []
        for _ in range(min(most_pipelines, ends - 1)):
            sums = total[:, None] + pipe
            chosen.append([int(i) for i in sums.argmax(axis=0)])
            total = sums.max(axis=0)
            found.append((float(total[-1]), self._traced(chosen)))
        return found

    def holds(self, group: Group) -> bool:
        """Whether the group can be cut from this row."""
        dead: set[tuple[int, tuple[tuple[Vector, int], ...]]] = set()
        allowed = set(self.places)

        def rest(position: int, left: Counter[Vector]) -> bool:
            if not left:
                return True
            key = (position, tuple(sorted(left.items())))
            if key in dead:
                return False
            for part in sorted(left):
                end = position + sum(part)
                if end in allowed and self.part(position, end) == part:
                    fewer = left.copy()
                    fewer[part] -= 1
                    if rest(end, +fewer):
                        return True
            dead.add(key)
            return False

        return rest(0, Counter(group))

    def _traced(self, chosen: Sequence[Sequence[int]]) -> Group:
        parts, end = [], len(self.places) - 1
        for choice in reversed(chosen):
            parts.append(self.part(self.places[choice[end]], self.places[end]))
            end = choice[end]
        return tuple(sorted(parts, reverse=True))


def _places(arrangement: Arrangement, unit: int) -> list[int]:
    """Where a row may be cut."""
    places, start = {0, len(arrangement)}, 0
    for index in range(1, len(arrangement)):
        if arrangement[index] != arrangement[index - 1]:
            start = index
        if (index - start) % unit == 0:
            places.add(index)
    return sorted(places)


def arrangements(counts: Vector, unit: int) -> Iterator[Arrangement]:
    """Rows to cut, the most promising first: kinds one after the other, then interleaved in ever longer runs; of
    few devices then every other row. A row and its reverse have the same cuts."""
    seen: set[Arrangement] = set()
    for row in _rows(counts, unit):
        if row not in seen and row[::-1] not in seen:
            seen.add(row)
            yield row


def _rows(counts: Vector, unit: int) -> Iterator[Arrangement]:
    held = [kind for kind, count in enumerate(counts) if count]
    for order in list(permutations(held))[:_MOST_ORDERS]:
        yield tuple(kind for kind in order for _ in range(counts[kind]))
    if len(held) > 1:
        run = max(1, unit)
        while run < sum(counts):
            yield _interleaved(counts, run)
            run *= 2
    if sum(counts) <= _ALL_ARRANGED:
        yield from _every_row(counts)


def _interleaved(counts: Vector, run: int) -> Arrangement:
    """Kinds spread evenly over the row, in runs of so many devices."""
    runs = [
        ((start + min(start + run, count)) / 2 / count, kind, min(run, count - start))
        for kind, count in enumerate(counts)
        for start in range(0, count, run)
    ]
    return tuple(kind for _, kind, length in sorted(runs) for _ in range(length))


def _every_row(counts: Vector) -> Iterator[Arrangement]:
    if not any(counts):
        yield ()
    for kind, count in enumerate(counts):
        if count:
            left = tuple(n - (k == kind) for k, n in enumerate(counts))
            for row in _every_row(left):
                yield (kind, *row)
