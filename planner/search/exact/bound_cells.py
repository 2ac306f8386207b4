"""Cells of the bound: pipelines of one table, a range of stages, an interval of periods and one of what
comes after.

What comes after a pipeline's last backward is W' = max over stages of (their gradients and optimizer - the
backwards that earlier stages do meanwhile). A stage that is q-th from the front can hide its own behind at
most q - 1 backwards, none longer than the period, so in a cell with W' <= A' it has at most A' + (q - 1) P'
to do. What begins only when all stages have their gradients (the optimizer, gathering parameters) hides behind nothing:
no stage has more than A' of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
import numpy.typing as npt

from planner.search.exact.priced_chains import join
from planner.search.exact.ranking import Ranking
from planner.search.exact.role import Role
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable

# Cells as wide as this share of the time are not cut any more.
FINE = 3e-3
# Times that the lowest cells are cut; far more than it takes.
ROUNDS = 60
# Prices of pipelines of few micro-batches are raised by these.
_SCALES = (1.0,)
_STAGE_GROUPS = (1, 2, 3, 4, 5, 7, 9, 12, 16, 21, 28, 37, 49, 65, 86)


@dataclass(frozen=True)
class Cells:
    """Arrays over cells: periods in [low, high], seconds after the last backward in [after_low,
    after_high]."""

    low: FloatArray
    high: FloatArray
    after_low: FloatArray
    after_high: FloatArray

    def __len__(self) -> int:
        return len(self.low)

    def chosen(self, which: npt.NDArray[np.bool_]) -> Cells:
        return Cells(self.low[which], self.high[which], self.after_low[which], self.after_high[which])

    def joined(self, other: Cells) -> Cells:
        return Cells(
            np.concatenate([self.low, other.low]),
            np.concatenate([self.high, other.high]),
            np.concatenate([self.after_low, other.after_low]),
            np.concatenate([self.after_high, other.after_high]),
        )

    def halves(self, seconds: float, *, most_after: float) -> Cells:
        """Each cell in two: along the side that leaves more of `seconds` open."""
        high = np.minimum(self.after_high, most_after)
        by_period = (self.high / self.low - 1) * seconds > high - self.after_low
        middle = np.where(by_period, np.sqrt(self.low * self.high), (self.after_low + high) / 2)
        lower = Cells(
            self.low,
            np.where(by_period, middle, self.high),
            self.after_low,
            np.where(by_period, self.after_high, middle),
        )
        upper = Cells(
            np.where(by_period, middle, self.low),
            self.high,
            np.where(by_period, self.after_low, middle),
            self.after_high,
        )
        return lower.joined(upper)

    def open_seconds(self, seconds: float, *, most_after: float) -> FloatArray:
        """How much of `seconds` the cells' widths may cost."""
        width = np.minimum(self.after_high, most_after) - self.after_low
        found: FloatArray = np.maximum((self.high / self.low - 1) * seconds, width)
        return found


@dataclass
class Group:
    """Cells of one table and an inclusive range of stages, with g (`values`) by cell and number of stages.

    `ranking` has the price of each choice of the table, `least_cost` is that of the cheapest pipeline.

    Pipelines of n micro-batches at most pay for no more than m n samples. With a price x of a pipeline's devices,
    t >= W + W' + P (x / m - 1) + u P (x / m - n) for any u >= 0, so g at prices 1 + u times as high, less u m n,
    stands for g where a pipeline has to pay for itself: `paying`, by cell, at the u that bounds best.
    """

    table: StageTable
    ranking: Ranking
    stages: tuple[int, int]
    cells: Cells
    values: FloatArray
    most_micro_batches: float
    least_cost: float

    def __post_init__(self) -> None:
        self.most_after = float(self.table.after.max())
        self._scale = 0.0
        self.paying = self.values.min(axis=1)
        if np.isfinite(self.most_micro_batches):
            for scale in _SCALES:
                paying = np.maximum(self._paying(self.cells, scale), self.values.min(axis=1))
                if _least(self.cells, paying) > _least(self.cells, self.paying):
                    self._scale, self.paying = scale, paying

    def _paying(self, cells: Cells, scale: float) -> FloatArray:
        values = least_values(self.table, self.ranking, cells, stages=self.stages, scale=1 + scale)
        found: FloatArray = values.min(axis=1) - (
            scale * self.table.micro_batch_size * self.most_micro_batches
        )
        return found

    def seconds(self, each: float) -> FloatArray:
        """t by cell; no pipeline ends anything before its first micro-batch has gone through."""
        size = self.table.micro_batch_size
        paid = self.cells.low * ((self.paying + each) / size - 1)
        found: FloatArray = np.maximum(paid, self.cells.low + self.cells.after_low)
        return found

    def excesses(self, seconds: float, each: float) -> FloatArray:
        """Most samples that a pipeline ends within `seconds` beyond its cost, by cell and number of stages."""
        rounds = seconds / self.cells.low[:, None] + 1
        found: FloatArray = self.table.micro_batch_size * rounds - self.values - each
        return found

    def gains(self, seconds: float, each: float) -> FloatArray:
        """Largest share of its cost that a pipeline ends beyond it within `seconds`, by cell; 0 if none does."""
        fewest, most = self.stages
        rate = (self.table.micro_batch_size / self.cells.low)[:, None]
        longest = np.arange(fewest, most + 1) * self.cells.high[:, None]
        after = np.minimum(self.cells.after_high, self.most_after)[:, None]
        # What of g is not fill is the price of devices.
        least_cost = np.maximum(self.values + each - (longest + after) * rate, self.least_cost)
        excess = np.maximum(self.excesses(seconds, each), 0.0)
        with np.errstate(invalid="ignore"):
            share = np.where(np.isfinite(least_cost), excess / least_cost, 0.0)
        found: FloatArray = share.max(axis=1)
        return found

    def reaches(self, seconds: float, each: float, loss: float) -> npt.NDArray[np.bool_]:
        """Cells with pipelines that lose at most so many samples against their cost."""
        found: npt.NDArray[np.bool_] = np.any(self.excesses(seconds, each) >= -loss, axis=1)
        return found

    def wide(self, seconds: float) -> npt.NDArray[np.bool_]:
        """Cells whose widths leave more of `seconds` open than matters."""
        open_seconds = self.cells.open_seconds(seconds, most_after=self.most_after)
        wide: npt.NDArray[np.bool_] = np.greater(open_seconds, FINE * seconds)
        return wide

    def cut(self, which: npt.NDArray[np.bool_], seconds: float) -> None:
        """Halve some cells."""
        cut_together([(self, which)], seconds)

    def replace(self, which: npt.NDArray[np.bool_], halves: Cells, values: FloatArray) -> None:
        """Put the halves of some cells in their place, with what bounds them at least."""
        whole = self.cells.chosen(which)
        # Fill + P / m x price, that is P g / m, only grows with the pace P, so what bounds a cell bounds its
        # halves.
        known = np.tile(self.values[which] * whole.low[:, None], (2, 1)) / halves.low[:, None]
        values = np.maximum(values, known)
        # The same holds for what has to pay for itself.
        paying = np.maximum(np.tile(self.paying[which] * whole.low, 2) / halves.low, values.min(axis=1))
        if self._scale:
            paying = np.maximum(paying, self._paying(halves, self._scale))
        self.paying = np.concatenate([self.paying[~which], paying])
        self.values = np.concatenate([self.values[~which], values])
        self.cells = self.cells.chosen(~which).joined(halves)


def cut_together(cuts: Sequence[tuple[Group, npt.NDArray[np.bool_]]], seconds: float) -> None:
    """Halve some cells of every group: those of one table together, which takes less time."""
    by_table: dict[int, list[tuple[Group, npt.NDArray[np.bool_]]]] = {}
    for group, which in cuts:
        by_table.setdefault(id(group.ranking), []).append((group, which))
    for alike in by_table.values():
        halves = [
            group.cells.chosen(which).halves(seconds, most_after=group.most_after) for group, which in alike
        ]
        parts = [(cells, group.stages) for (group, _), cells in zip(alike, halves, strict=True)]
        first, _ = alike[0]
        values = _values_of_parts(first.table, first.ranking, parts, scale=1.0)
        for (group, which), cells, found in zip(alike, halves, values, strict=True):
            group.replace(which, cells, found)


def _least(cells: Cells, values: FloatArray) -> float:
    return float((cells.low * values).min(initial=np.inf))


def least_values(
    table: StageTable, ranking: Ranking, cells: Cells, *, stages: tuple[int, int], scale: float = 1.0
) -> FloatArray:
    """g by cell and number of stages in the inclusive range: the least sum of m T / P + the price of the
    devices, `scale` times that of the ranking, and what comes after at that rate."""
    return _values_of_parts(table, ranking, [(cells, stages)], scale=scale)[0]


def _values_of_parts(
    table: StageTable, ranking: Ranking, parts: Sequence[tuple[Cells, tuple[int, int]]], *, scale: float
) -> list[FloatArray]:
    """`least_values` of cells with several ranges of stages."""
    cells = reduce(Cells.joined, (one for one, _ in parts))
    counts = [len(one) for one, _ in parts]
    fewest, most = (np.repeat([stages[end] for _, stages in parts], counts) for end in (0, 1))
    width = max(last - first + 1 for _, (first, last) in parts)
    values = np.full((len(cells), width), np.inf)
    weights = _Weights(table, ranking, cells, scale)
    rows = np.arange(len(cells))
    alone = rows[fewest == 1]
    if alone.size:
        values[alone, 0] = weights.of(Role.SINGLE, 1, 0, alone)[:, table.layers]
    rows = rows[most > 1]
    held = weights.of(Role.LAST, 1, most[rows] - 1, rows)
    for position in range(2, int(most.max(initial=0)) + 1):
        closed = fewest[rows] <= position
        if closed.any():
            which = rows[closed]
            first = weights.of(Role.FIRST, position, 0, which)
            values[which, position - fewest[which]] = (held[closed, ::-1] + first).min(axis=1)
        more = most[rows] > position
        rows, held = rows[more], held[more]
        if rows.size:
            held = join(held, weights.of(Role.MIDDLE, position, most[rows] - position, rows))
    values += (cells.after_low * (table.micro_batch_size / cells.low))[:, None]
    ends = np.cumsum(counts)
    return [
        values[end - count : end, : stages[1] - stages[0] + 1]
        for (_, stages), count, end in zip(parts, counts, ends, strict=True)
    ]


class _Weights:
    """What a stage of a cell costs, by layers, the best choice taken: [cell, layers]."""

    def __init__(self, table: StageTable, ranking: Ranking, cells: Cells, scale: float) -> None:
        self._table, self._ranking, self._cells, self._scale = table, ranking, cells, scale
        self._rate = table.micro_batch_size / cells.low
        within = table.least_by_layers <= cells.high.max(initial=0.0)
        self._upto = int(np.flatnonzero(within).max(initial=0)) + 1
        self._most_after, self._most_tail = table.most_after

    def of(self, role: Role, position: int, ahead: IntArray | int, rows: IntArray) -> FloatArray:
        """Of some cells; `ahead` is the most stages that may stand before this one."""
        upto, most = self._upto, self._cells.after_high[rows]
        high, rate = self._cells.high[rows, None], self._rate[rows, None]
        limit = most + ahead * self._cells.high[rows]
        limited = float(self._most_after[role]) > float(limit.min(initial=np.inf))
        limited |= float(self._most_tail[role]) > float(most.min(initial=np.inf))
        ranked = self._ranking.of(role, position, upto=upto, by="tail" if limited else "seconds")
        seconds = ranked.seconds[:, None]
        weights = seconds * rate
        weights += (ranked.cost * self._scale)[:, None]
        beyond = seconds > high
        if limited:
            beyond |= ranked.after[:, None] * (1 - 1e-9) > limit[:, None]
            beyond |= ranked.tail[:, None] * (1 - 1e-9) > most[:, None]
        np.putmask(weights, beyond, np.inf)
        found = np.full((len(rows), self._table.layers + 1), np.inf)
        weights.min(axis=0, initial=np.inf, out=found[:, :upto])
        return found


def stage_groups(most: int) -> Iterator[tuple[int, int]]:
    """Ranges of numbers of stages that are bounded together."""
    for fewest, beyond in zip(_STAGE_GROUPS, (*_STAGE_GROUPS[1:], 10**9), strict=True):
        if fewest <= most:
            yield fewest, min(beyond - 1, most)
