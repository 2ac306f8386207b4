"""Evaluations, the currency of the search: what it may spend does not depend on the machine's speed."""

from __future__ import annotations

from planner.search.control import SearchControl

# How many evaluations pass between two looks at the clock, where there is a time budget.
_LOOK = 64


class EvaluationBudget:
    """Counts evaluations up to a limit. One is a pipeline's configuration under Eq. 1. Looking at a device group
    counts as many as it has pipelines, pricing a whole plan as many as it has devices."""

    def __init__(self, most: int | None, control: SearchControl | None = None, *, reserve: int = 0) -> None:
        """`reserve` of them are kept back until `release`."""
        self._most = most
        self._reserve = reserve
        self._control = control
        self._since_look = 0
        self.used = 0
        self._exhausted = False

    def exhausted(self) -> bool:
        """Whether something was not evaluated for want of budget or time."""
        return self._exhausted

    @property
    def left(self) -> int | None:
        """Evaluations left; None if there is no limit."""
        return None if self._most is None else self._most - self._reserve - self.used

    def release(self) -> None:
        """Let what was kept back be spent; what was refused before stays undone."""
        self._reserve = 0
        if self._control is None or not self._control.should_stop():
            self._exhausted = False

    def take(self, count: int = 1) -> bool:
        """Pay for so many evaluations; False, for good, if they are more than are left."""
        if self._exhausted:
            return False
        left = self.left
        if left is not None and count > left:
            self._exhausted = True
            return False
        self.used += count
        self._since_look += count
        if self._control is not None and self._since_look >= _LOOK:
            self._since_look = 0
            self._exhausted = self._control.should_stop()
        return not self._exhausted
