"""Shapes of pipelines, a micro-batch size and a number of stages each: how soon the best chain of a shape is done on
any devices, and that chain."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from planner.search.exact.chains import Chain, make_chain
from planner.search.exact.columns import Box, first_period, fullest_chain
from planner.search.exact.priced_chains import PricedChains
from planner.search.exact.prices import Intervals
from planner.search.exact.role import Role, role_of
from planner.search.exact.sequences import least_sum
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable

# Between neighbours of the grid of periods, and the most periods of it.
_PERIOD_RATIO, _MOST_PERIODS = 1.01, 48
# Stages' seconds add up to a little less than as many periods.
_FULL = 0.9
# Times the least period, that of another chain with less fill.
_MORE_PERIOD = 1.015
# Up to so many states (count vectors x layers) the stages of a chain are found exactly.
_EXACT_CELLS = 12_000


@dataclass
class Shape:
    """Chains of one table with one number of stages, by cell of a box: least period, and a guess at the
    fill."""

    table: StageTable
    stages: int
    period: FloatArray
    fill: FloatArray
    ratio: float
    """Between neighbours of the grid that the periods are from."""

    def ends(self, samples: int) -> FloatArray:
        """When a single pipeline ends so many samples, by cell; infinite where it cannot."""
        rounds = -(-samples // self.table.micro_batch_size) - 1
        found = np.full(len(self.period), np.inf)
        can = np.isfinite(self.period)
        found[can] = self.fill[can] + self.period[can] * rounds
        return found


def periods_of(held: Intervals) -> FloatArray:
    """A grid of periods from the least of some intervals to the longest."""
    low, high = float(held.low.min()), float(held.high.max())
    count = int(np.ceil(np.log(high / low) / np.log(_PERIOD_RATIO))) + 1
    periods: FloatArray = np.geomspace(low, high, min(max(count, 2), _MOST_PERIODS)) * (1 + 1e-12)
    return periods


def shape_of(
    table: StageTable,
    stages: int,
    periods: FloatArray,
    index: IntArray,
    priced: PricedChains,
    worth: FloatArray,
) -> Shape:
    """The shape of a number of stages.

    Args:
        index: by cell, which of the `periods` is the least; as many as there are for none.
        worth: of each cell's devices, in samples.
    """
    period = np.append(periods, np.inf)[index]
    least = np.append(priced.values[:, stages - 1], np.inf)[index]
    with np.errstate(invalid="ignore"):
        # No chain of these devices has less fill: its value is at least the least of all chains.
        fill = np.where(np.isfinite(least), (least - worth) * period / table.micro_batch_size, 0.0)
        fill = np.fmax(fill, _FULL * stages * period)
    ratio = float(periods[1] / periods[0]) if len(periods) > 1 else _PERIOD_RATIO
    return Shape(table, stages, period, fill, max(ratio, _PERIOD_RATIO))


def chains_of(shape: Shape, box: Box, period: float, *, thorough: bool) -> list[Chain]:
    """Of the least period on exactly these devices; if `thorough` also one with less fill at a little longer period."""
    found: list[Chain] = []
    exact = _exact_period(shape, box, period)
    if box.cells * shape.table.layers > _EXACT_CELLS:
        specs = fullest_chain(shape.table, box, stages=shape.stages, period=exact)
        return [make_chain(shape.table, _trimmed(shape.table, specs))] if specs else []
    for slack in (1.0, _MORE_PERIOD) if thorough else (1.0,):
        chain = least_sum(shape.table, box, stages=shape.stages, period=exact * slack)
        if chain is not None and chain not in found:
            found.append(chain)
    return found


def _trimmed(table: StageTable, specs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """The stages with as many layers as the model has: those too many are taken from the slowest stages."""
    stages = len(specs)
    roles = [role_of(position=stages - index, stages=stages) for index in range(stages)]
    layers = [count for _, count in specs]
    seconds = [
        table.seconds_at(role, stages - index)[choice]
        for index, (role, (choice, _)) in enumerate(zip(roles, specs, strict=True))
    ]
    heap = [
        (-float(line[count]), index) for index, (line, count) in enumerate(zip(seconds, layers, strict=True))
    ]
    heapq.heapify(heap)
    for _ in range(sum(layers) - table.layers):
        while layers[heap[0][1]] <= (roles[heap[0][1]] is Role.MIDDLE):
            heapq.heappop(heap)
        _, index = heap[0]
        layers[index] -= 1
        heapq.heapreplace(heap, (-float(seconds[index][layers[index]]), index))
    return [(choice, count) for (choice, _), count in zip(specs, layers, strict=True)]


def _exact_period(shape: Shape, box: Box, period: float) -> float:
    """The least period a little below the grid's, nearly."""
    candidates = np.geomspace(period / shape.ratio**2, period, _MOST_PERIODS)
    at = first_period(shape.table, box, stages=shape.stages, periods=candidates)
    return period if at is None else float(candidates[at])
