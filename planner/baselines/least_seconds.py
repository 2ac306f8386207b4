"""Seconds that no split of a chain's layers is below: a glance at what is hopeless, before its memory is looked at."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from planner.baselines.forms import Form
from planner.baselines.sketch import Chain
from planner.baselines.stage_figures import StageFigures

Table = tuple[float, ...]
"""Seconds of a micro-batch by layers."""


@dataclass(frozen=True)
class _Stage:
    """A stage's seconds by layers, and the least that any one layer adds."""

    table: Table
    step: float


class LeastSeconds:
    """Eq. 1 of chains whose stages neither wait for others nor recompute, with room for any number of layers."""

    def __init__(self, figures: StageFigures) -> None:
        self._figures = figures
        self._stages: dict[tuple[Form, bool, bool], _Stage] = {}

    def of(self, chain: Chain, micro_batches: int, layers: Sequence[int] | None = None) -> float:
        """No more than the best split takes; of `layers`, where they are given."""
        last = len(chain) - 1
        if layers is not None:
            seconds = [
                self._stage(form, stage == 0, stage == last).table[count]
                for stage, (form, count) in enumerate(zip(chain, layers, strict=True))
            ]
            return sum(seconds) + max(seconds) * (micro_batches - 1)
        left = self._figures.layers - max(0, last - 1)
        if left < 0:
            return float("inf")
        # Ends may have no layers, the stages between them have at least one.
        stages = [(self._stage(chain[0], True, last == 0), 1, 0)]
        if last:
            stages.append((self._stage(chain[-1], False, True), 1, 0))
        between = Counter(chain[1:-1]).items()
        stages += [(self._stage(form, False, False), count, 1) for form, count in between]
        fill = sum(stage.table[fewest] * count for stage, count, fewest in stages)
        fill += left * min(stage.step for stage, _, _ in stages)
        floor = max(stage.table[fewest] for stage, _, fewest in stages)
        tables = [(stage.table, count) for stage, count, _ in stages]
        return fill + _least_period(tables, self._figures.layers, floor) * (micro_batches - 1)

    def _stage(self, form: Form, embedding: bool, head: bool) -> _Stage:
        """In the quicker way for each number of layers."""
        key = (form, embedding, head)
        if key not in self._stages:
            table = self._figures.quickest_table(form, embedding, head)
            self._stages[key] = _Stage(table, min(more - less for less, more in pairwise(table)))
        return self._stages[key]


def _least_period(tables: Sequence[tuple[Table, int]], layers: int, floor: float) -> float:
    """The least seconds, at least `floor`, within which (table, number of like stages) hold so many layers."""
    periods = sorted({seconds for table, _ in tables for seconds in table if seconds > floor} | {floor})
    low, high = 0, len(periods) - 1
    while low < high:
        middle = (low + high) // 2
        if sum((bisect_right(table, periods[middle]) - 1) * count for table, count in tables) >= layers:
            high = middle
        else:
            low = middle + 1
    return periods[low]
