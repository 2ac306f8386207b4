"""Choices of a stage by the price of their devices, without those that a cheaper one beats."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.search.exact.envelope import undominated
from planner.search.exact.role import Role
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable

# Positions that are ranked at once: few, since many searches end after the first.
_TOGETHER = 8


@dataclass(frozen=True)
class Ranked:
    """Arrays [rank, layers]: choices, what their devices cost, and their seconds, those after the last backward
    apart."""

    choices: IntArray
    cost: FloatArray
    seconds: FloatArray
    after: FloatArray


class Ranking:
    """The choices of a table for given prices, ranked for every role and position; each worked out once."""

    def __init__(self, table: StageTable, cost: FloatArray) -> None:
        """`cost` is the price of each choice; those that cost without end are left out."""
        self.table, self.cost = table, cost
        order = np.argsort(cost, kind="stable")
        self._order = order[np.isfinite(cost[order])]
        self._last = max(min(table.max_stages, table.in_flight), 2)
        self._known: dict[tuple[Role, bool, int], tuple[npt.NDArray[np.int32], FloatArray]] = {}
        self._asked: dict[tuple[Role, bool, int, int, int], Ranked] = {}

    def of(self, role: Role, position: int, *, upto: int, by_after: bool) -> Ranked:
        """Choices that hold fewer than `upto` layers; `by_after`: seconds after the last backward count too."""
        # Single and last stages have but one position.
        part, row = divmod(0 if role.head else max(min(position, self._last) - 2, 0), _TOGETHER)
        asked = (role, by_after, part, row, upto)
        if asked in self._asked:
            return self._asked[asked]
        key = (role, by_after, part)
        if key not in self._known:
            self._known[key] = self._ranked(role, by_after, part)
        ranked, seconds = self._known[key]
        choices = ranked[:, row, :upto].astype(np.int64)
        after = self.table.after[role][choices, np.arange(choices.shape[1])]
        self._asked[asked] = Ranked(choices, self.cost[choices], seconds[:, row, :upto], after)
        return self._asked[asked]

    def _ranked(self, role: Role, by_after: bool, part: int) -> tuple[npt.NDArray[np.int32], FloatArray]:
        """(choices, seconds) of some neighbouring positions: [rank, position, layers]."""
        table, order = self.table, self._order
        first = 2 + part * _TOGETHER
        positions = np.array([1] if role.head else range(first, min(first + _TOGETHER, self._last + 1)))
        held = np.minimum(np.minimum(positions, table.in_flight), table.max_stages)
        replay = table.replay[role][order[:, None], held]
        seconds = (table.plain[role][order, None] + replay).reshape(len(order), -1)
        after = None
        if by_after:
            after = np.repeat(table.after[role][order, None], len(positions), axis=1).reshape(seconds.shape)
        ranked = undominated(seconds, after)
        shape = (len(ranked), len(positions), table.layers + 1)
        seconds = np.take_along_axis(seconds, ranked, axis=0)
        return order[ranked].astype(np.int32).reshape(shape), seconds.reshape(shape)
