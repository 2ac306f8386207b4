"""The bound for plans of a single pipeline, whose number of micro-batches is known."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.exact.bound_cells import ROUNDS, Cells, Group, cut_together, stage_groups
from planner.search.exact.columns import Box, first_periods
from planner.search.exact.priced_chains import PricedChains
from planner.search.exact.prices import Budget, DevicePrices, Intervals
from planner.search.exact.ranking import Ranking
from planner.search.exact.stage_table import FloatArray, StageTable, with_in_flight

_RATIO = 1.02
_MOST_EDGES = 32
# Cells this close to the lowest are cut with it.
_NEAR = 1.005


def single_pipeline_seconds(
    tables: Sequence[StageTable],
    budget: Budget,
    prices: DevicePrices,
    *,
    upper: float,
    box: Box | None,
    tick: Callable[[], None] = lambda: None,
) -> float:
    """At most `upper`: no single pipeline ends the batch sooner.

    A pipeline of n micro-batches with a period in [P, P'] ends at W + W' + P (n - 1), and g - lambda . N bounds
    W + W' on all devices. `box` holds all count vectors, None if they are too many: then a short period is taken
    to be possible on any devices.
    """
    found = upper
    for table in tables:
        tick()
        candidate = _SinglePipeline(table, budget, prices, found, box)
        if candidate.groups:
            found = min(found, candidate.least_seconds())
    return found


@dataclass
class _Cell:
    """Groups of cells of one table; `least` are periods that no chain of so many stages reaches."""

    group: Group
    least: FloatArray


class _SinglePipeline:
    def __init__(
        self, table: StageTable, budget: Budget, prices: DevicePrices, upper: float, box: Box | None
    ) -> None:
        self._micro_batches = -(-budget.samples // table.micro_batch_size)
        self._upper, self._size = upper, table.micro_batch_size
        self._devices = float(prices.per_device @ np.array(budget.counts))
        few = with_in_flight(table, self._micro_batches)
        held = Intervals.of(few, ratio=_RATIO)
        held = held.affordable(prices, budget)
        near = held.low * max(1, self._micro_batches) <= upper
        low, high = held.low[near], held.high[near]
        self.groups: list[_Cell] = []
        if not low.size:
            return
        # What ends no sooner than the upper bound need not be known.
        enough = (upper / low - (self._micro_batches - 1)) * self._size + self._devices
        ranking = Ranking(few, few.cost(prices.per_device))
        values = PricedChains(
            few, prices.per_device, paces=low, limits=high, enough=enough, ranking=ranking
        ).values
        least = np.zeros(few.max_stages) if box is None else _least_periods(few, box, low, high)
        cells = Cells(low, high, np.zeros(len(low)), np.full(len(low), np.inf))
        for fewest, most in stage_groups(few.max_stages):
            which = slice(fewest - 1, most)
            group = Group(few, ranking, (fewest, most), cells, values[:, which], np.inf, 1e-9)
            self.groups.append(_Cell(group, least[which]))

    def least_seconds(self) -> float:
        """The least end over cells; the lowest are cut until they are small."""
        best = self._upper
        for _ in range(ROUNDS):
            found = [(one.group, self._seconds(one)) for one in self.groups]
            best = min(float(seconds.min(initial=self._upper)) for _, seconds in found)
            if best >= self._upper:
                break
            near = [
                (group, group.wide(best) & (seconds <= best * _NEAR), seconds) for group, seconds in found
            ]
            cut_together([(group, which) for group, which, _ in near if which.any()], best)
            if not any((seconds[which] <= best).any() for _, which, seconds in near):
                break
        return best

    def _seconds(self, one: _Cell) -> FloatArray:
        """When the quickest pipeline of each cell ends."""
        cells = one.group.cells
        low = cells.low[:, None]
        before = (one.group.values - self._devices) * (low / self._size)
        before = np.maximum(before, low + cells.after_low[:, None])
        possible = cells.high[:, None] > one.least
        ends = np.where(possible, before + low * (self._micro_batches - 1), np.inf)
        found: FloatArray = ends.min(axis=1)
        return found


def _least_periods(table: StageTable, box: Box, low: FloatArray, high: FloatArray) -> FloatArray:
    """By number of stages: every chain on any devices of the box has a longer period."""
    edges = np.geomspace(float(low.min()), float(high.max()), _MOST_EDGES)
    index = first_periods(table, box, periods=edges, max_stages=table.max_stages)
    found: FloatArray = np.concatenate([[0.0], edges])[index]
    return found
