"""Choices of a stage by the price of their devices, without those that a cheaper one beats."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from planner.search.exact.envelope import undominated
from planner.search.exact.role import Role
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable

By = Literal["seconds", "after", "tail"]
"""Seconds alone, those after the last backward too, or also the part of them that waits for all gradients."""

# Positions that are ranked at once: few, since many searches end after the first.
_TOGETHER = 8


@dataclass(frozen=True)
class Ranked:
    """Arrays [rank, layers]: choices, what their devices cost, and their seconds; those after the last backward
    apart, and of these the ones that wait for all stages' gradients."""

    choices: IntArray
    cost: FloatArray
    seconds: FloatArray
    after: FloatArray
    tail: FloatArray


class Ranking:
    """The choices of a table for given prices, ranked for every role and position; each worked out once."""

    def __init__(self, table: StageTable, cost: FloatArray) -> None:
        """`cost` is the price of each choice; those that cost without end are left out."""
        self.table, self.cost = table, cost
        order = np.argsort(cost, kind="stable")
        self._order = order[np.isfinite(cost[order])]
        self._last = max(min(table.max_stages, table.in_flight), 2)
        # Which choices beat which depends on their order alone, and that is often the one of the prices before.
        alike = self._order.tobytes()
        if alike not in table.ranked_in_order:
            table.ranked_in_order.clear()
        self._known: dict[tuple[Role, str, int], tuple[npt.NDArray[np.int32], FloatArray]] = (
            table.ranked_in_order.setdefault(alike, {})
        )
        self._asked: dict[tuple[Role, By, int, int, int], Ranked] = {}

    def of(self, role: Role, position: int, *, upto: int, by: By) -> Ranked:
        """Choices that hold fewer than `upto` layers; `by` says which of their seconds count."""
        # Single and last stages have but one position.
        part, row = divmod(0 if role.head else max(min(position, self._last) - 2, 0), _TOGETHER)
        asked = (role, by, part, row, upto)
        if asked in self._asked:
            return self._asked[asked]
        key = (role, by, part)
        if key not in self._known:
            self._known[key] = self._ranked(role, by, part)
        ranked, seconds = self._known[key]
        choices = ranked[:, row, :upto].astype(np.int64)
        at = choices, np.arange(choices.shape[1])
        after, tail = self.table.after[role][at], self.table.tail[role][at]
        self._asked[asked] = Ranked(choices, self.cost[choices], seconds[:, row, :upto], after, tail)
        return self._asked[asked]

    def _ranked(self, role: Role, by: By, part: int) -> tuple[npt.NDArray[np.int32], FloatArray]:
        """(choices, seconds) of some neighbouring positions: [rank, position, layers]."""
        table, order = self.table, self._order
        first = 2 + part * _TOGETHER
        positions = np.array([1] if role.head else range(first, min(first + _TOGETHER, self._last + 1)))
        held = np.minimum(np.minimum(positions, table.in_flight), table.max_stages)
        replay = table.replay[role][order[:, None], held]
        seconds = (table.plain[role][order, None] + replay).reshape(len(order), -1)
        after, tail = (
            np.repeat(figure[role][order, None], len(positions), axis=1).reshape(seconds.shape)
            for figure in (table.after, table.tail)
        )
        others = {"seconds": (), "after": (seconds + after,), "tail": (after, tail)}[by]
        ranked = undominated(seconds, *others)
        shape = (len(ranked), len(positions), table.layers + 1)
        seconds = np.take_along_axis(seconds, ranked, axis=0)
        return order[ranked].astype(np.int32).reshape(shape), seconds.reshape(shape)
