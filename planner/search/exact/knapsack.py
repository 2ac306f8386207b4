"""Knapsack over count vectors, any number of copies."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Vector = tuple[int, ...]
IntArray = npt.NDArray[np.int64]

# Up to here the number of items taken can be limited; each is one more layer of states.
MOST_COUNTED = 8
# The worth of what there is no room for.
_NO_ROOM = np.iinfo(np.int64).min // 4


class Knapsack:
    """Items by what they need of each limit and what they are worth."""

    def __init__(self, limits: Vector, items: Sequence[Vector], worth: Sequence[int]) -> None:
        self._limits = limits
        self._items = items
        self._worth = worth

    @classmethod
    def of(cls, limits: Vector, needs: IntArray, worth: IntArray) -> tuple[Knapsack, IntArray]:
        """The knapsack of items [item, limit] without those that another is worth as much as with no more needs, and
        the indices of those that it has."""
        no_more = np.all(needs[:, None] <= needs, axis=2) & (worth[:, None] >= worth)
        # Of items alike the first.
        alike = no_more & no_more.T
        beaten = (no_more & (~alike | np.tri(len(worth), k=-1, dtype=bool).T)).any(axis=0)
        kept = np.flatnonzero(~beaten)
        return cls(limits, [tuple(map(int, needs[i])) for i in kept], [int(worth[i]) for i in kept]), kept

    def best(self, most: int) -> tuple[int, list[int]]:
        """Most worth of a multiset of up to `most` items, and the items' indices (with repetition).

        Beyond MOST_COUNTED their number is not limited.
        """
        return self._counted(most) if most <= MOST_COUNTED else self._any()

    def _counted(self, most: int) -> tuple[int, list[int]]:
        """Best worth for each number of items in turn."""
        shape = tuple(limit + 1 for limit in self._limits)
        before = np.zeros(shape, dtype=np.int64)
        chosen: list[IntArray] = []
        if not self._items:
            return 0, []
        sources, worth = self._sources(shape), np.array(self._worth, dtype=np.int64)[:, None]
        for _ in range(most):
            offered = np.append(before.ravel(), _NO_ROOM)[sources] + worth
            last = offered.argmax(axis=0)
            best = np.maximum(before.ravel(), offered[last, np.arange(before.size)])
            chosen.append(np.where(best > before.ravel(), last, -1).reshape(shape))
            if (best == before.ravel()).all():
                break
            before = best.reshape(shape)
        place = tuple(limit for limit in self._limits)
        total, taken = int(before[place]), []
        for last in reversed(chosen):
            if (index := int(last[place])) >= 0:
                taken.append(index)
                place = tuple(p - need for p, need in zip(place, self._items[index], strict=True))
        return total, taken

    def _sources(self, shape: Vector) -> IntArray:
        """Where each state comes from by taking one of each item: [item, state]; one beyond all states for no room."""
        states = np.indices(shape).reshape(len(shape), 1, -1)
        left = states - np.array(self._items).T[..., None]
        flat = np.ravel_multi_index(tuple(np.maximum(left, 0)), shape)
        found: IntArray = np.where((left >= 0).all(axis=0), flat, math.prod(shape))
        return found

    def _any(self) -> tuple[int, list[int]]:
        shape = tuple(limit + 1 for limit in self._limits)
        best, last = np.zeros(shape, dtype=np.int64), np.full(shape, -1, dtype=np.int32)
        for index, item in enumerate(self._items):
            copies = 1
            # Any number of copies is a sum of different powers of two, so each is offered once.
            while self._offer(index, item, self._worth[index], best, best, last, copies):
                copies *= 2
        place = tuple(limit for limit in self._limits)
        total, taken = int(best[place]), []
        # One copy at a time: what is left may have been improved by a later item, then the trace is worth
        # more.
        while (index := int(last[place])) >= 0:
            taken.append(index)
            place = tuple(p - need for p, need in zip(place, self._items[index], strict=True))
        return total, taken

    def _offer(
        self,
        index: int,
        item: Vector,
        worth: int,
        source: npt.NDArray[np.int64],
        best: npt.NDArray[np.int64],
        last: npt.NDArray[np.int32],
        copies: int = 1,
    ) -> bool:
        """Add copies of an item to every state of `source`; False if no state has room."""
        needs = [copies * need for need in item]
        if any(need > limit for need, limit in zip(needs, self._limits, strict=True)):
            return False
        into = tuple(slice(need, None) for need in needs)
        room = tuple(slice(None, limit + 1 - need) for need, limit in zip(needs, self._limits, strict=True))
        offered, target = source[room] + copies * worth, best[into]
        wins = offered > target
        if wins.any():
            np.copyto(target, offered, where=wins)
            np.copyto(last[into], index, where=wins)
        return True
