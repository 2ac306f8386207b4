"""The bound for whole pipelines: most samples of every count vector, and a knapsack over count vectors.

A pipeline of a cell on devices c has a fill, with what comes after, of at least (g - lambda . c) P / m, so it ends at
most m (floor((t - fill) / P) + 1) samples within t. If no set of pipelines on the cluster's devices ends the batch
within t by these figures, no plan does. Cells that such a set rests on are cut until they are small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from planner.search.exact.bound_cells import FINE, Group
from planner.search.exact.columns import Box, least_periods
from planner.search.exact.knapsack import Knapsack
from planner.search.exact.prices import Budget, DevicePrices
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable, with_in_flight

# Count vectors of the largest cluster for which whole pipelines are bounded; beyond, that gains little.
MOST_CELLS = 400
_MOST_EDGES = 64
_CLOSE = 1.001
# Cells are cut so often in all, and where count vectors are many.
_CUTS, _FEW_CUTS, _FEW_VECTORS = 120, 24, 400
# Cells that give a picked count vector nearly as much as the best are cut with it.
_NEARLY = 0.99
_CHUNK = 256
_SHARPENING = 12


class WholePipelines:
    """Searches for the least time at which whole pipelines could end the batch."""

    def __init__(
        self,
        groups: Sequence[Group],
        holding: Holding,
        prices: DevicePrices,
        budget: Budget,
        *,
        most_pipelines: int,
        upper: float,
    ) -> None:
        self._box, self._prices, self._budget = holding.box, prices, budget
        self._most = most_pipelines
        self._vectors = self._box.vectors()
        cost = self._vectors @ prices.per_device
        self._sharpen(groups, upper)
        gain = self._gain(groups, upper)
        each = prices.per_pipeline
        useful = [group for group in groups if group.reaches(upper, each, gain).any()]
        low = min((float(g.cells.low[g.reaches(upper, each, gain)].min()) for g in useful), default=0.0)
        high = max((float(g.cells.high[g.reaches(upper, each, gain)].max()) for g in useful), default=0.0)
        self._columns = [
            _Columns(group, holding.least_periods(group, low=low, high=high), cost, prices)
            for group in useful
        ]
        self._cuts = _CUTS if len(self._vectors) <= _FEW_VECTORS else _FEW_CUTS
        # A set that loses more on one pipeline than it gains on all others does not end the batch.
        worth = self._worth(upper, np.arange(len(cost)), gain).max(axis=0)
        self._kept = np.flatnonzero((worth > 0) & (worth >= cost + prices.per_pipeline - gain))

    def least_seconds(self, low: float, high: float, *, tick: Callable[[], None]) -> float:
        """The largest time found, between the two, within which no set of pipelines ends the batch."""
        if not self._possible(high * (1 - 1e-9)):
            return high
        while high / low > _CLOSE:
            tick()
            middle = (low * high) ** 0.5
            if self._possible(middle):
                high = middle
            else:
                low = middle
        return low

    def _possible(self, seconds: float) -> bool:
        """Whether pipelines may end the batch within `seconds`."""
        gain = self._gain([one.group for one in self._columns], seconds)
        worth = self._worth(seconds, self._kept, gain)
        while True:
            best = np.zeros(len(self._vectors))
            best[self._kept] = worth.max(axis=0, initial=0.0)
            picked = self._picked(best)
            if not picked:
                return False
            changed = [
                index
                for index, one in enumerate(self._columns)
                if self._cuts > 0 and one.cut(best, picked, seconds, gain)
            ]
            if not changed:
                return True
            self._cuts -= 1
            for index in changed:
                worth[index] = self._columns[index].most(seconds, gain, self._kept)

    def _gain(self, groups: Sequence[Group], seconds: float) -> float:
        """Most samples that all pipelines together end beyond their costs, which are those of the batch."""
        each = self._prices.per_pipeline
        share = max((float(group.gains(seconds, each).max(initial=0.0)) for group in groups), default=0.0)
        return share * self._budget.samples

    def _sharpen(self, groups: Sequence[Group], seconds: float) -> None:
        """Cut the cells that gain most, so that they bound well what a pipeline may lose."""
        each = self._prices.per_pipeline
        for _ in range(_SHARPENING):
            gains = [group.gains(seconds, each) for group in groups]
            most = max((float(gain.max(initial=0.0)) for gain in gains), default=0.0)
            for group, gain in zip(groups, gains, strict=True):
                which = group.wide(seconds) & (gain > 0) & (gain >= most * _NEARLY**10)
                if which.any():
                    group.cut(which, seconds)

    def _worth(self, seconds: float, vectors: IntArray, gain: float) -> FloatArray:
        """Most samples by group and count vector."""
        found = [one.most(seconds, gain, vectors) for one in self._columns]
        return np.array(found).reshape(len(found), len(vectors))

    def _picked(self, worth: FloatArray) -> list[int]:
        """Cells of the box that end the batch together; none if no set does."""
        useful = _undominated(worth.reshape(self._box.shape)).ravel() & (worth > 0)
        order = np.flatnonzero(useful)
        items = [tuple(int(n) for n in self._vectors[i]) for i in order]
        knapsack = Knapsack(self._budget.counts, items, [int(worth[i]) for i in order])
        total, taken = knapsack.best(self._most)
        return sorted({int(order[item]) for item in taken}) if total >= self._budget.samples else []


class _Columns:
    """Most samples of any pipeline of a group, by count vector."""

    def __init__(
        self, group: Group, least_periods: FloatArray, cost: FloatArray, prices: DevicePrices
    ) -> None:
        self.group = group
        self._least = least_periods
        self._cost = cost
        self._each = prices.per_pipeline

    def most(self, seconds: float, loss: float, vectors: IntArray) -> FloatArray:
        """Of pipelines that lose at most so many samples against their cost; 0 without one."""
        best = np.zeros(len(vectors))
        pairs = self._pairs(seconds, loss)
        for start in range(0, len(pairs), _CHUNK):
            worth = self._worth(pairs[start : start + _CHUNK], vectors, seconds)
            np.maximum(best, worth.max(axis=0), out=best)
        return best

    def cut(self, worth: FloatArray, picked: Sequence[int], seconds: float, loss: float) -> bool:
        """Cut the cells that give picked count vectors about their worth and are not small; whether any is."""
        pairs = self._pairs(seconds, loss)
        if not len(pairs):
            return False
        given = self._worth(pairs, np.array(picked), seconds)
        needed = (given >= worth[picked] * _NEARLY) & (given > 0)
        which = np.zeros(len(self.group.cells), dtype=bool)
        which[pairs[needed.any(axis=1), 0]] = True
        which &= self.group.wide(seconds)
        if which.any():
            self.group.cut(which, seconds)
        return bool(which.any())

    def _pairs(self, seconds: float, loss: float) -> IntArray:
        """(cell, number of stages) of pipelines that lose no more."""
        return np.argwhere(self.group.excesses(seconds, self._each) >= -loss)

    def _worth(self, pairs: IntArray, vectors: IntArray, seconds: float) -> FloatArray:
        """Most samples by pair and count vector."""
        group, size = self.group, self.group.table.micro_batch_size
        cell, stages = pairs[:, 0], pairs[:, 1]
        low = group.cells.low[cell][:, None]
        before = (group.values[cell, stages][:, None] - self._cost[vectors]) * (low / size)
        # The fill is a period at least.
        before = np.maximum(before, low + group.cells.after_low[cell][:, None])
        rounds = np.minimum(np.floor((seconds - before) / low + 1e-9) + 1, group.most_micro_batches)
        possible = self._least[stages][:, vectors] < group.cells.high[cell][:, None]
        worth: FloatArray = np.where(possible & (rounds > 0), rounds * size, 0.0)
        return worth


class Holding:
    """Which count vectors of a box hold the model within which periods; worked out once for every table."""

    def __init__(self, box: Box) -> None:
        self.box = box
        self._known: dict[tuple[int, bool], FloatArray] = {}

    def least_periods(self, group: Group, *, low: float, high: float) -> FloatArray:
        """[stages of the group, count vector]: every chain has a longer period."""
        few = np.isfinite(group.most_micro_batches)
        key = (group.table.micro_batch_size, bool(few))
        if key not in self._known:
            # One micro-batch in flight holds as much as fewer than stages ever do.
            table = with_in_flight(group.table, 1) if few else group.table
            self._known[key] = self._least(table, low, high)
        fewest, most = group.stages
        return self._known[key][fewest - 1 : most]

    def _least(self, table: StageTable, low: float, high: float) -> FloatArray:
        count = int(np.log(high / low) / FINE) + 1
        edges = np.geomspace(low, high, min(max(count, 2), _MOST_EDGES))
        index = least_periods(table, self.box, periods=edges, max_stages=table.max_stages)
        # A chain that does not hold the model within one edge has a longer period.
        below = np.concatenate([[0.0], edges])[index]
        found: FloatArray = below.reshape(len(index), -1)
        return found


def _undominated(worth: FloatArray) -> npt.NDArray[np.bool_]:
    """Cells worth more than every cell with fewer devices."""
    best = worth
    for axis in range(worth.ndim):
        best = np.maximum.accumulate(best, axis=axis)
    below = np.zeros_like(worth)
    for axis in range(worth.ndim):
        into = tuple(slice(1, None) if a == axis else slice(None) for a in range(worth.ndim))
        source = tuple(slice(None, -1) if a == axis else slice(None) for a in range(worth.ndim))
        below[into] = np.maximum(below[into], best[source])
    undominated: npt.NDArray[np.bool_] = worth > below
    return undominated
