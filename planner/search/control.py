"""SearchControl: which parts of the search are on, how much it may spend, and what it says meanwhile."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from planner.errors import UserError

PARTS: Mapping[str, str] = {
    "cache": "keep the best configuration of each pipeline (paper 5.1)",
    "skipping": "skip device groups whose bound is below the best plan (5.2)",
    "order": "look at device groups of even computing power first (5.3, Eq. 7-9)",
    "dp": "combine pipelines by dynamic programming over device arrangements (5.4, Eq. 10)",
    "exact": "the exact solver proposes, and the paper's search refines its plan",
    "sequence_parallel": "stages with TP cut activations by position where that pays",
    "peers": "look at the plans of metis, hexiscale, type-split and uniform too",
}
"""The parts of strategy `eth` that `--without` switches off, each alone."""

OF_ALL = frozenset({"sequence_parallel"})
"""Those of them that are the other strategies' too."""

_PROGRESS_SECONDS = 1.0
_MOST_EVALUATIONS = 10**9


class SearchStopped(Exception):
    """The search was stopped before it had found any plan."""


@dataclass(frozen=True)
class SearchOptions:
    """What a user can say about the search itself.

    Args:
        without: parts that are switched off, of `PARTS`.
        alpha: fault tolerance of the approximate bound of early skipping.
        evaluations: configurations that the paper's search may evaluate; None leaves it to the strategy.
        time_budget: seconds after which the search ends with the best plan so far. The plan then depends on
            the machine, and says so.
    """

    without: frozenset[str] = frozenset()
    alpha: float = 1.5
    evaluations: int | None = None
    time_budget: float | None = None

    def __post_init__(self) -> None:
        for name in sorted(self.without - set(PARTS)):
            raise UserError(
                f"--without = {name!r} is not a part of the search; switch off some of {', '.join(PARTS)}"
            )
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise UserError(f"--alpha = {self.alpha} must be more than 0; the paper's range is 0.5 to 4")
        if self.evaluations is not None and not 1 <= self.evaluations <= _MOST_EVALUATIONS:
            raise UserError(
                f"--evaluations = {self.evaluations} must be from 1 to {_MOST_EVALUATIONS};"
                " leave it out for the default"
            )
        if self.time_budget is not None and not (math.isfinite(self.time_budget) and self.time_budget > 0):
            raise UserError(f"--time-budget = {self.time_budget} must be more than 0 seconds; raise it")

    @classmethod
    def named(
        cls,
        without: Iterable[str],
        *,
        alpha: float | None = None,
        evaluations: int | None = None,
        time_budget: float | None = None,
    ) -> SearchOptions:
        """The options as the command line has them: names repeated or separated by commas."""
        names = frozenset(name.strip() for part in without for name in part.split(",") if name.strip())
        return cls(names, cls.alpha if alpha is None else alpha, evaluations, time_budget)

    def on(self, part: str) -> bool:
        assert part in PARTS
        return part not in self.without


def _quiet(message: str) -> None:
    del message


@dataclass
class SearchControl:
    """One search: its options, its progress line, and whether it should stop.

    Args:
        options: see SearchOptions.
        progress: takes a line for people.
        interruptible: a KeyboardInterrupt ends the search with the best plan so far instead of an error.
    """

    options: SearchOptions = SearchOptions()
    progress: Callable[[str], None] = _quiet
    interruptible: bool = False
    stopped: Literal["", "time_budget", "interrupted"] = ""
    """Why the search ended before it was done."""
    snapshot: Callable[[], dict[str, object]] = dict
    """The statistics so far, for a plan that is returned when the search is interrupted."""
    _started: float = field(default_factory=time.monotonic)
    _told: float = -math.inf

    def tell(self, message: str) -> None:
        """Say what is going on, once a second at most."""
        now = time.monotonic()
        if now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self.progress(message)

    def should_stop(self) -> bool:
        """Whether the time that the user gave is used up; false for ever if no time was given."""
        budget = self.options.time_budget
        if budget is not None and not self.stopped and time.monotonic() - self._started >= budget:
            self.stopped = "time_budget"
        return bool(self.stopped)
