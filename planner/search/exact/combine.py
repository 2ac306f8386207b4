"""Which pipelines, and how many of each: an integer knapsack over count vectors.

Prices of devices say which shapes are worth a look. A column's worth is at first an optimistic estimate;
columns that the knapsack picks get their real chains, until it picks only such.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from planner.search.exact.chains import Chain
from planner.search.exact.columns import Box, least_periods
from planner.search.exact.envelope import BoolArray
from planner.search.exact.knapsack import Knapsack
from planner.search.exact.prices import Budget, DevicePrices, Intervals
from planner.search.exact.settle import Settler
from planner.search.exact.shapes import Shape, chains_of, periods_of, shape_of
from planner.search.exact.stage_table import FloatArray, IntArray

# Shapes (micro-batch, number of stages) whose best chain ends this much later than the prices say are left
# out.
_SHAPE_SLACK = 1.12
_ITEMS = 150
MAKING_ROUNDS, FEW_ROUNDS = 20, 5
# Equal parts of the cluster that are tried.
_MOST_COPIES = 8
# Of the samples, by the price of its devices, the most of one pipeline among several.
_PART = 0.7
# Shapes and count vectors of a single pipeline that are tried.
_ALONE = 12
_CLOSE = 1.001
# Between times that are tried in search of one at which some do, and how many are tried at most.
_STEP, _MOST_TRIED = 1.01, 160
# So near the end of a set of pipelines is known.
_EXACT = 1.0001


@dataclass
class Columns:
    """Count vectors of a box, with the shapes to try for each and the chains that were made."""

    box: Box
    vectors: IntArray
    shapes: list[Shape]
    settlers: Mapping[int, Settler]
    made: dict[int, list[Chain]] = field(default_factory=dict)
    thorough: bool = True
    """Whether the chains of two shapes of a column are worked out, not just of the most promising, and for each also
    one with less fill at a longer period."""

    @cached_property
    def _figures(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Periods and fills [shape, cell], and the micro-batch sizes of the shapes."""
        periods = np.array([shape.period for shape in self.shapes]).reshape(-1, len(self.vectors))
        fills = np.array([shape.fill for shape in self.shapes]).reshape(periods.shape)
        sizes = np.array([[shape.table.micro_batch_size] for shape in self.shapes], dtype=float)
        return periods, fills, sizes.reshape(-1, 1)

    def _samples_within(self, seconds: float, cells: IntArray | slice) -> FloatArray:
        """A guess at what the best chains end within `seconds`: [shape, cell]."""
        periods, fills, sizes = self._figures
        with np.errstate(invalid="ignore"):
            # None where no chain has this shape: there the period is infinite.
            rounds = np.floor((seconds - fills[:, cells]) / periods[:, cells]) + 1
        return np.where(np.isfinite(periods[:, cells]), np.maximum(rounds, 0.0), 0.0) * sizes

    def values(self, seconds: float, cells: IntArray | None = None) -> IntArray:
        """Samples that the best chain of each of some columns, or all, ends within `seconds`: made ones exactly, others
        by guess."""
        worth = self._samples_within(seconds, slice(None) if cells is None else cells).max(
            axis=0, initial=0.0
        )
        known = self.made.items() if cells is None else enumerate(map(self.made.get, cells.tolist()))
        for place, chains in known:
            if chains is not None:
                worth[place] = max((chain.pace.samples_within(seconds) for chain in chains), default=0)
        found: IntArray = worth.astype(np.int64)
        return found

    def best(self, cell: int, seconds: float) -> Chain:
        """The made chain that ends most samples, of equal ones the one that is done first."""
        return max(
            self.made[cell], key=lambda chain: (chain.pace.samples_within(seconds), -chain.pace.fill_seconds)
        )

    def make(self, cell: int, seconds: float) -> None:
        """Work out the real chains of a column's most promising shapes."""
        worth = self._samples_within(seconds, np.array([cell]))[:, 0]
        order = np.argsort(-worth, kind="stable")[: 2 if self.thorough else 1]
        shapes = [self.shapes[index] for index in order if worth[index] > 0]
        self.made[cell] = [chain for shape in shapes for chain in self.chains(shape, cell, seconds)]

    def chains(self, shape: Shape, cell: int, seconds: float) -> list[Chain]:
        """Real chains of a shape on the devices of a cell, for as many samples as they end within `seconds`."""
        vector = tuple(int(n) for n in self.vectors[cell])
        settler, found = self.settlers[shape.table.micro_batch_size], []
        for chain in chains_of(
            shape, Box(vector, self.box.unit), float(shape.period[cell]), thorough=self.thorough
        ):
            micro_batches = chain.pace.micro_batches(chain.pace.samples_within(seconds))
            found.append(settler.settled(chain, max(1, micro_batches)))
        return found


def make_columns(
    intervals: Sequence[Intervals],
    prices: DevicePrices,
    box: Box,
    settlers: Mapping[int, Settler],
    *,
    every: bool,
    goal: float = np.inf,
) -> Columns:
    """Columns for the shapes that are promising at these prices, and may end the batch before `goal`; for `every`
    shape if asked."""
    vectors = box.vectors()
    worth = vectors @ prices.per_device
    shapes: list[Shape] = []
    for held in intervals:
        periods = periods_of(held)
        limit = np.inf if every else min(prices.seconds * _SHAPE_SLACK, goal)
        priced = Intervals(held.table, periods, periods).priced(prices, below=limit)
        good = np.flatnonzero(priced.seconds[:, : priced.known].min(axis=0) < limit)
        if good.size == 0:
            continue
        most = int(good.max()) + 1
        index = least_periods(
            held.table, box, periods=periods, max_stages=most, wanted={int(s) + 1 for s in good}
        ).reshape(most, -1)
        shapes += [shape_of(held.table, int(s) + 1, periods, index[s], priced, worth) for s in good]
    return Columns(box, vectors, [shape for shape in shapes if np.isfinite(shape.period).any()], settlers)


@dataclass
class Combiner:
    """Sets of pipelines within a budget that end its samples, beside pipelines that are `taken` already."""

    columns: Columns
    prices: DevicePrices
    budget: Budget
    taken: Sequence[Chain] = ()
    parts: bool = False
    """Whether no pipeline may be worth nearly all devices, where single pipelines are searched apart."""
    rounds: int = MAKING_ROUNDS
    """How often columns are made for a set; among very many devices that takes long and is seldom of use."""
    limit: float = np.inf
    """Sets that end later are of no use: they may be left out. It may be lowered between sets."""

    def sets(self, *, most: int, others: bool) -> Iterator[list[Chain]]:
        """Sets that end soonest, for any number of pipelines and then for each up to `most`; with `others`,
        also those without one of the count vectors of a set before."""
        if self.budget.pipelines == 1:
            yield from self._alone()
            return
        best = self._least(self.budget.pipelines)
        if best is not None:
            yield self._chains(*best)
        if not self.taken:
            yield from self._copies()
        if best is None:
            return
        found = [best]
        # Among many devices a single pipeline is another search's: it shares its gradients with none.
        fewest = 2 if self.parts else 1
        for pipelines in range(fewest, min(most, self.budget.pipelines) + 1):
            if pipelines != len(best[1]) and (one := self._least(pipelines)) is not None:
                found.append(one)
                yield self._chains(*one)
        if others:
            found.sort(key=lambda one: one[0])
            for cell in dict.fromkeys(cell for _, cells in found[:2] for cell in cells):
                if (one := self._least(self.budget.pipelines, without=cell)) is not None:
                    yield self._chains(*one)

    def _alone(self) -> Iterator[list[Chain]]:
        """Single pipelines, those that promise to end soonest first, until none can be better than the best."""
        columns, best = self.columns, np.inf
        ends = np.array([shape.ends(self.budget.samples) for shape in columns.shapes])
        for index in np.argsort(ends, axis=None, kind="stable")[:_ALONE]:
            number, cell = np.unravel_index(int(index), ends.shape)
            if ends[number, cell] >= best:
                break
            for chain in columns.chains(columns.shapes[number], int(cell), self.prices.seconds):
                micro_batches = chain.pace.micro_batches(self.budget.samples)
                best = min(best, chain.pace.end_seconds(micro_batches))
                yield [chain]

    def _copies(self) -> Iterator[list[Chain]]:
        """The cluster in equal parts, as many pipelines alike."""
        columns, shape = self.columns, self.columns.box.shape
        for copies in range(2, min(_MOST_COPIES, self.budget.pipelines) + 1):
            units = [count // copies // columns.box.unit for count in self.budget.counts]
            cell = int(np.ravel_multi_index(units, shape))
            if cell not in columns.made and math.isfinite(self.limit):
                # A guess, but one that is seldom too low.
                worth = copies * columns.values(self.limit)[cell]
                if worth < self.budget.samples:
                    continue
            self._make([cell], self.prices.seconds)
            for chain in columns.made[cell]:
                yield [chain] * copies

    def _chains(self, seconds: float, cells: Sequence[int]) -> list[Chain]:
        return [self.columns.best(cell, seconds) for cell in cells]

    def _least(self, pipelines: int, *, without: int | None = None) -> tuple[float, list[int]] | None:
        """The least time at which up to so many pipelines end the samples, and their cells; None if none
        do."""
        seconds = self.prices.seconds
        allowed = np.ones(len(self.columns.vectors), dtype=bool)
        if self.parts:
            allowed = self.columns.vectors @ self.prices.per_device <= _PART * self.budget.samples
        if without is not None:
            allowed[without] = False
        for _ in range(self.rounds):
            found = self._at_estimates(pipelines, seconds, allowed)
            if found is None:
                return None
            seconds, picked = found
            if seconds > self.limit:
                return None
            if self._make(dict.fromkeys(picked), seconds) == 0:
                return found
        # Estimates are optimistic, so this may go on for long: settle for what is made.
        made = np.zeros_like(allowed)
        made[list(self.columns.made)] = True
        return self._at_estimates(pipelines, self.prices.seconds, allowed & made)

    def _make(self, cells: Iterable[int], seconds: float) -> int:
        """Make the chains of columns that have none yet; how many."""
        missing = [cell for cell in cells if cell not in self.columns.made]
        for cell in missing:
            self.columns.make(cell, seconds)
        return len(missing)

    def _at_estimates(
        self, pipelines: int, start: float, allowed: BoolArray
    ) -> tuple[float, list[int]] | None:
        """The least time, nearly, at which columns that are `allowed` end the samples, and the cells of these columns;
        None if none do. That it is no less than `start` is taken for granted.

        What the knapsack takes for a time ends the samples at a time of its own, be it later: so the next time that is
        tried is one below which nothing would be left to find.
        """
        low, high, found, tried = start / _CLOSE, math.inf, [], start
        for _ in range(_MOST_TRIED):
            picked, enough = self._pick(pipelines, tried, allowed)
            low = low if enough else tried
            end = self._end_seconds(picked, low, tried if enough else tried * _STEP)
            if end < high:
                high, found = end, picked
            if high <= low * _CLOSE * (1 + 1e-9) or (not found and low > self.limit):
                break
            tried = high / _CLOSE if found else tried * _STEP
        return (high, found) if found else None

    def _end_seconds(self, cells: Sequence[int], low: float, high: float) -> float:
        """When the chains of some cells end the rest of the samples, nearly; infinite if not within `high`."""
        which = np.array(cells, dtype=np.int64)

        def enough(seconds: float) -> bool:
            return bool(self.columns.values(seconds, which).sum() >= self._needed(seconds))

        if not cells or not enough(high):
            return math.inf
        while high / low > _EXACT:
            middle = (low * high) ** 0.5
            low, high = (low, middle) if enough(middle) else (middle, high)
        return high

    def _pick(self, pipelines: int, seconds: float, allowed: BoolArray) -> tuple[list[int], bool]:
        """Cells whose chains end most samples within `seconds`, and whether these are all the rest; none, if no set of
        them can."""
        needed = self._needed(seconds)
        worth = self.columns.values(seconds)
        spent = self.columns.vectors @ self.prices.per_device + self.prices.per_pipeline
        # Relative, so that a small pipeline used many times counts as much as a large one.
        loss = (spent - worth) / np.maximum(spent, 1e-30)
        ranked = np.argsort(loss, kind="stable")
        best = ranked[(worth > 0)[ranked] & allowed[ranked]][:_ITEMS]
        useful = self._affordable(spent[best], worth[best], pipelines, needed)
        if not useful.any():
            return [], False
        order = best[useful]
        unit = self.columns.box.unit
        limits = tuple(count // unit for count in self.budget.counts)
        knapsack, kept = Knapsack.of(limits, self.columns.vectors[order] // unit, worth[order])
        total, taken = knapsack.best(pipelines)
        return [int(order[kept[item]]) for item in taken], total >= needed

    def _needed(self, seconds: float) -> float:
        """Samples that those taken already leave."""
        return self.budget.samples - sum(chain.pace.samples_within(seconds) for chain in self.taken)

    def _affordable(self, spent: FloatArray, worth: IntArray, pipelines: int, needed: float) -> BoolArray:
        """Columns that a set worth `needed` may have: raise the prices until none is worth more than it costs; then no
        set loses more than all devices cost beyond `needed`, and none of its columns alone."""
        prices = self.prices
        whole = float(prices.per_device @ np.array(self.budget.counts)) + prices.per_pipeline * pipelines
        raised = float((worth / np.maximum(spent, 1e-30)).max(initial=0.0))
        useful: BoolArray = raised * spent - worth <= (raised * whole - needed) * (1 + 1e-9) + 1e-6
        return useful
