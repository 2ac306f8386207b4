"""Lower bound of the iteration time (design 5.2): no plan of the stated class has a smaller price.

Give every device of kind k the price lambda_k and every pipeline mu, such that the whole cluster costs no
more than the global batch. If no pipeline ends more samples within t than it costs, then no set of
pipelines ends the global batch within t. For pipelines of micro-batch m whose period lies in [P, P'], Eq. 1
gives

    samples <= m ((t - W - W') / P + 1),

with W the sum of stage seconds and W' what comes after the last backward (`bound_cells`), so none is worth
more than it costs before t = P ((g + mu) / m - 1), with g the least sum over stages of m T / P + lambda .
n, no stage above P', and W' m / P. The bound is the least t over all cells; the lowest cells are cut until
they are small.

Where the cluster is small enough, whole pipelines give more: for every count vector c, g - lambda . c
bounds W + W' and so the samples of its best pipeline, and a knapsack over count vectors bounds those of
every set of pipelines.

The seconds of gradients depend on how many pipelines share them, so numbers of pipelines are bounded range
by range. Pipelines with fewer micro-batches than stages hold fewer in flight: they have tables of their
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from planner.search.exact.bound_cells import Cells, least_values
from planner.search.exact.columns import Box, least_periods
from planner.search.exact.knapsack import Knapsack
from planner.search.exact.priced_chains import PricedChains
from planner.search.exact.prices import Budget, DevicePrices, Intervals
from planner.search.exact.stage_table import FloatArray, StageTable
from planner.search.exact.surroundings import Surroundings

RELAXATIONS = (
    "gradients: each device's own only, on the best links, shared by no more pipelines than a plan must have",
    "optimizer: together with the gradients of the same stage only",
    "receiving: on the best link that a stage can have",
    "fractions of pipelines, unless the cluster is small",
    "stages that mix device types: the best rows, and memory of one row",
    "periods and seconds after the last backward: rounded down by 0.3 %",
)

# Cells as wide as this share of the time are not cut any more.
_FINE = 3e-3
# Cells this close to the lowest are cut with it.
_NEAR = 1.01
_ROUNDS = 60
_STAGE_GROUPS = (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 28, 37, 49, 65, 86)
# Pipelines that cost up to so much more than they end are looked at with whole pipelines.
_LOSS = 1.1
_CELLS = 1_200
_MOST_EDGES = 64


def lower_bound(
    tables: Sequence[StageTable],
    surroundings: Surroundings,
    budget: Budget,
    prices: Callable[[int], DevicePrices],
    *,
    upper: float,
) -> float:
    """The bound, at most `upper`, the price of a plan that is known.

    `prices(n)` are good prices for up to n pipelines; bad ones only make the bound worse.
    """
    found = upper
    for least, most in _ranges(budget.pipelines):
        part = Part(
            [table.for_pipelines(surroundings, least) for table in tables],
            replace(budget, pipelines=most),
            prices(most),
            upper,
        )
        seconds = part.fractional()
        if seconds < found:
            seconds = max(seconds, part.whole(found))
        found = min(found, seconds)
    return found


def _ranges(most: int) -> Iterator[tuple[int, int]]:
    for low, high in ((1, 1), (2, 3), (4, most)):
        if low <= most:
            yield low, min(high, most)


@dataclass
class Group:
    """Cells of one table and a range of stages, with their values g."""

    table: StageTable
    cost: FloatArray
    stages: tuple[int, int]
    cells: Cells
    most_micro_batches: float = np.inf
    pays: bool = True
    """Whether its pipelines could ever end as many samples as they cost."""
    values: FloatArray = field(init=False)

    def __post_init__(self) -> None:
        self.values = least_values(self.table, self.cost, self.cells, stages=self.stages)
        self.most_after = float(self.table.after.max())

    def seconds(self, each: float) -> FloatArray:
        """t by cell; no pipeline ends anything before its first micro-batch has gone through."""
        size = self.table.micro_batch_size
        paid = self.cells.low * ((self.values.min(axis=1) + each) / size - 1)
        found: FloatArray = np.maximum(paid, self.cells.low + self.cells.after_low)
        return found

    def cut(self, which: npt.NDArray[np.bool_], drop: npt.NDArray[np.bool_], seconds: float) -> None:
        """Halve some cells, drop others."""
        halves = self.cells.chosen(which).halves(seconds, most_after=self.most_after)
        stay = ~which & ~drop
        values = least_values(self.table, self.cost, halves, stages=self.stages)
        self.values = np.concatenate([self.values[stay], values])
        self.cells = self.cells.chosen(stay).joined(halves)


class Part:
    """The bound for plans of a range of numbers of pipelines."""

    def __init__(
        self, tables: Sequence[StageTable], budget: Budget, prices: DevicePrices, upper: float
    ) -> None:
        self.budget, self.prices, self.upper = budget, prices, upper
        self.groups = [group for table in tables for group in self._groups(table)]

    def fractional(self) -> float:
        """The least t over cells, which are cut until the lowest are small."""
        each = self.prices.per_pipeline
        for _ in range(_ROUNDS):
            best = self._lowest()
            if best >= self.upper:
                break
            found = [(group, group.seconds(each)) for group in self.groups]
            wide = [g.cells.open_seconds(best, most_after=g.most_after) > _FINE * best for g, _ in found]
            if not any((w & (s <= best)).any() for (_, s), w in zip(found, wide, strict=True)):
                break
            for (group, seconds), w in zip(found, wide, strict=True):
                which = w & (seconds <= best * _NEAR)
                if which.any():
                    group.cut(which, seconds >= self.upper, best)
        return self._lowest()

    def _lowest(self) -> float:
        each = self.prices.per_pipeline
        return min(
            (float(g.seconds(each).min(initial=self.upper)) for g in self.groups if g.pays),
            default=self.upper,
        )

    def whole(self, upper: float) -> float:
        """The largest time found within which no whole pipelines end the batch; 0 if the cluster is too
        large."""
        box = Box(self.budget.counts, 1)
        if box.cells > _CELLS or not self.groups:
            return 0.0
        groups = [group for group in self.groups if len(group.cells)]
        held = Holding(box, groups)
        columns = [GroupColumns(group, held, self.prices) for group in groups]
        low, high = max(self._lowest(), upper * 1e-3), upper
        if not self._possible(columns, box, high * (1 - 1e-9)):
            return high
        while high / low > 1.0005:
            middle = (low * high) ** 0.5
            if self._possible(columns, box, middle):
                high = middle
            else:
                low = middle
        return low

    def _possible(self, columns: Sequence[GroupColumns], box: Box, seconds: float) -> bool:
        """Whether pipelines may end the batch within `seconds`."""
        gain = max(0.0, max(one.excess(seconds) for one in columns)) * self.budget.pipelines
        worth = np.max([one.most(seconds, gain) for one in columns], axis=0)
        order = np.flatnonzero(_undominated(worth.reshape(box.shape)).ravel() & (worth > 0))
        vectors = box.vectors()
        items = [tuple(int(n) for n in vectors[i]) for i in order]
        knapsack = Knapsack(self.budget.counts, items, [int(worth[i]) for i in order])
        return knapsack.best(self.budget.pipelines)[0] >= self.budget.samples

    def _groups(self, table: StageTable) -> Iterator[Group]:
        """By number of stages, and by number of micro-batches where pipelines have fewer than stages."""
        cheapest = float(self._least_costs(_with_in_flight(table, 1)).min())
        variants = {0: (table, self._seconds(table), self._least_costs(table))}
        for stages in _stage_groups(table.max_stages):
            for least, most in _micro_batch_ranges(*stages):
                ended = table.micro_batch_size * most * _LOSS
                if cheapest > ended:
                    continue
                if least not in variants:
                    few = _with_in_flight(table, least)
                    variants[least] = few, self._seconds(few), self._least_costs(few)
                few, seconds, costs = variants[least]
                which = slice(stages[0] - 1, stages[1])
                useful = (seconds[:, which] < self.upper).any(axis=1)
                if float(costs[which].min()) <= ended and useful.any():
                    held = Intervals.of(few)
                    low, high = held.low[useful], held.high[useful]
                    cells = Cells(low, high, np.zeros(len(low)), np.full(len(low), np.inf))
                    pays = bool(costs[which].min() * _LOSS <= ended)
                    yield Group(few, few.cost(self.prices.per_device), stages, cells, most, pays)

    def _seconds(self, table: StageTable) -> FloatArray:
        """t by interval and number of stages, with only the first stage's gradients after the last
        backward."""
        held = Intervals.of(table)
        if not held.low.size:
            return np.full((0, table.max_stages), np.inf)
        return held.priced(self.prices).seconds

    def _least_costs(self, table: StageTable) -> FloatArray:
        """Price of the cheapest devices that hold the model, by number of stages."""
        prices = self.prices
        chains = PricedChains(table, prices.per_device, paces=np.array([1e30]), limits=np.array([self.upper]))
        return chains.values[0] + prices.per_pipeline


def _stage_groups(most: int) -> Iterator[tuple[int, int]]:
    for fewest, beyond in zip(_STAGE_GROUPS, (*_STAGE_GROUPS[1:], 10**9), strict=True):
        if fewest <= most:
            yield fewest, min(beyond - 1, most)


def _micro_batch_ranges(fewest: int, most: int) -> Iterator[tuple[int, float]]:
    """Ranges of micro-batches for pipelines of so many stages: as many or more (0), between, and fewer."""
    yield 0, np.inf
    if fewest < most:
        yield fewest, most - 1
    least = 1
    while least < fewest:
        yield least, min(2 * least, fewest) - 1
        least *= 2


def _with_in_flight(table: StageTable, most: int) -> StageTable:
    """The table for pipelines that never hold more micro-batches in flight."""
    positions = np.minimum(np.arange(table.max_stages + 1), most)
    return replace(table, most=table.most[:, :, positions])


class Holding:
    """Which count vectors of a box hold the model within which periods, worked out once for every table."""

    def __init__(self, box: Box, groups: Sequence[Group]) -> None:
        self.box = box
        self._known: dict[int, FloatArray] = {}
        for key in {id(group.table): None for group in groups}:
            self._known[key] = self._least([group for group in groups if id(group.table) == key])

    def _least(self, groups: Sequence[Group]) -> FloatArray:
        table = groups[0].table
        low = min(float(group.cells.low.min()) for group in groups)
        high = max(float(group.cells.high.max()) for group in groups)
        count = int(np.log(high / low) / _FINE) + 1
        edges = np.geomspace(low, high, min(max(count, 2), _MOST_EDGES))
        most = max(group.stages[1] for group in groups)
        index = least_periods(table, self.box, periods=edges, max_stages=most)
        # A chain that does not hold the model within one edge has a longer period.
        below = np.concatenate([[0.0], edges])[index]
        found: FloatArray = below.reshape(most, -1)
        return found

    def least_periods(self, group: Group) -> FloatArray:
        """[stages of the group, count vector]: every chain has a longer period."""
        fewest, most = group.stages
        return self._known[id(group.table)][fewest - 1 : most]


class GroupColumns:
    """Most samples of any pipeline of a group, by count vector."""

    def __init__(self, group: Group, held: Holding, prices: DevicePrices) -> None:
        self.group, self.each = group, prices.per_pipeline
        self._least = held.least_periods(group)
        self._cost = held.box.vectors() @ prices.per_device

    def excess(self, seconds: float) -> float:
        """Most samples that a pipeline ends beyond its cost."""
        return float(self._excess(seconds).max(initial=-np.inf))

    def _excess(self, seconds: float) -> FloatArray:
        size, low = self.group.table.micro_batch_size, self.group.cells.low
        found: FloatArray = size * (seconds / low[:, None] + 1) - self.group.values - self.each
        return found

    def most(self, seconds: float, loss: float) -> FloatArray:
        """Most samples by count vector, of pipelines that lose at most so many against their cost; 0
        without one."""
        size, cells = self.group.table.micro_batch_size, self.group.cells
        best = np.zeros(len(self._cost))
        for cell, stages in zip(*np.nonzero(self._excess(seconds) >= -loss), strict=True):
            low = cells.low[cell]
            # Fill and what comes after; the fill is a period at least.
            before = (self.group.values[cell, stages] - self._cost) * (low / size)
            before = np.maximum(before, low + cells.after_low[cell])
            rounds = np.floor((seconds - before) / low + 1e-9) + 1
            rounds = np.minimum(rounds, self.group.most_micro_batches)
            possible = self._least[stages] < cells.high[cell]
            np.maximum(best, np.where(possible, rounds * size, 0.0), out=best)
        return best


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
