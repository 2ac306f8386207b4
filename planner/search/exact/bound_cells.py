"""Cells of the bound: pipelines of one table, a range of stages, an interval of periods and one of what
comes after.

What comes after a pipeline's last backward is W' = max over stages of (their gradients and optimizer - the
backwards that earlier stages do meanwhile). A stage that is q-th from the front can hide its own behind at
most q - 1 backwards, none longer than the period, so in a cell with W' <= A' it has at most A' + (q - 1) P'
to do.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.search.exact.priced_chains import join
from planner.search.exact.role import Role
from planner.search.exact.stage_table import FloatArray, StageTable


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


def least_values(table: StageTable, cost: FloatArray, cells: Cells, *, stages: tuple[int, int]) -> FloatArray:
    """g by cell and number of stages in the inclusive range: the least sum of m T / P + the price of the
    devices, and what comes after at that rate. `cost` is the price of each choice."""
    fewest, most = stages
    values = np.full((len(cells), most - fewest + 1), np.inf)
    weights = _Weights(table, cost, cells)
    if fewest == 1:
        values[:, 0] = weights.of(Role.SINGLE, 1, 0)[:, table.layers]
    held = weights.of(Role.LAST, 1, most - 1)
    for position in range(2, most + 1):
        if position >= fewest:
            first = weights.of(Role.FIRST, position, 0)
            values[:, position - fewest] = (held[:, ::-1] + first).min(axis=1)
        if position < most:
            held = join(held, weights.of(Role.MIDDLE, position, most - position))
    rate = table.micro_batch_size / cells.low
    return values + (cells.after_low * rate)[:, None]


class _Weights:
    """What a stage of a cell costs, by layers, the best choice taken: [cell, layers]."""

    def __init__(self, table: StageTable, cost: FloatArray, cells: Cells) -> None:
        useful = np.flatnonzero(np.isfinite(cost) & (table.most >= 0).any(axis=(0, 2)))
        self._most = table.most[:, useful]
        self._cells = cells
        self._layers = np.arange(table.layers + 1)
        rate = (table.micro_batch_size / cells.low)[None, :, None]
        self._base: list[FloatArray] = []
        self._after: list[tuple[FloatArray, FloatArray]] = []
        for role in Role:
            seconds = table.seconds[role, useful][:, None, :]
            weights = np.where(
                seconds <= cells.high[None, :, None], seconds * rate + cost[useful][:, None, None], np.inf
            )
            if role is Role.MIDDLE:
                weights[..., 0] = np.inf
            self._base.append(weights)
            after = table.after[role, useful]
            slope = after[:, 1] - after[:, 0] if table.layers else np.zeros(len(useful))
            self._after.append((after[:, 0], slope))

    def of(self, role: Role, position: int, ahead: int) -> FloatArray:
        """`ahead` is the most stages that may stand before this one."""
        limit = self._cells.after_high + ahead * self._cells.high
        none, slope = self._after[role]
        with np.errstate(invalid="ignore", divide="ignore"):
            layers = (limit[None, :] - none[:, None]) / slope[:, None] * (1 + 1e-9)
        # A slope of zero leaves infinity or, at the limit, nothing known: then all layers are allowed.
        layers = np.where(np.isnan(layers), np.inf, layers)
        room = np.minimum(layers, self._most[role, :, position][:, None])
        base = self._base[role]
        found: FloatArray = np.where(self._layers <= room[:, :, None], base, np.inf).min(
            axis=0, initial=np.inf
        )
        return found
