"""The stage search: a bounded depth-first search over moves, from the start to a configuration that none of
them improves (paper 4.2.3, after Aceso)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from planner.search.choice import TIE
from planner.search.paper.configuration import Configuration, Evaluator, Tuned
from planner.search.paper.moves import MOST_MICRO_BATCH, moves, with_size

# Moves in a row of which only the last has to be an improvement.
DEPTH = 7
# Moves that are followed from one configuration, the best first.
_FOLLOWED = 3


def starts(evaluator: Evaluator) -> list[Configuration]:
    """Where to start: the narrowest TP degrees, and a micro-batch that gives every replica a row (or as many as
    its devices allow to be given), layers in proportion to speed; and the widest degrees with single rows."""
    shop, groups = evaluator.shop, evaluator.groups
    degrees = [shop.degrees(counts) for counts in groups]
    if not all(degrees):
        return []
    wanted = max(sum(counts) // able[0] for counts, able in zip(groups, degrees, strict=True))
    largest = min(MOST_MICRO_BATCH, evaluator.batch)
    size = 1
    while size < wanted and 2 * size <= min(8, largest):
        size *= 2
    found: dict[Configuration, None] = {}
    for first, chosen in ((size, [able[0] for able in degrees]), (1, [able[-1] for able in degrees])):
        made = next(_first_sizes(evaluator, first, chosen, largest), None)
        if made is not None:
            found[made] = None
    return list(found)


def _first_sizes(
    evaluator: Evaluator, size: int, degrees: list[int], largest: int
) -> Iterator[Configuration]:
    while size <= largest:
        made = with_size(evaluator, size, degrees)
        if made is not None:
            yield made
        size *= 2


class BottleneckSearch:
    """One search on fixed stage device groups, of so many evaluations at most."""

    def __init__(self, evaluator: Evaluator, *, evaluations: int) -> None:
        self._evaluator = evaluator
        self._left = evaluations
        self._visited: set[Configuration] = set()

    def run(self, start: Iterable[Configuration]) -> Tuned | None:
        """The best configuration found; it may not fit. None if no start can run."""
        tuned = [found for one in start if (found := self._evaluated(one)) is not None]
        if not tuned:
            return None
        best = min(tuned, key=lambda one: one.rank)
        while (better := self._hop(best, best, DEPTH)) is not None:
            best = better
        return best

    def _hop(self, at: Tuned, best: Tuned, depth: int) -> Tuned | None:
        """The first configuration better than the best, at most `depth` moves away."""
        if self._left <= 0:
            return None
        tried = [
            made
            for other in moves(at, self._evaluator)
            if other not in self._visited and (made := self._evaluated(other)) is not None
        ]
        tried.sort(key=lambda one: one.rank)
        if tried and _better(tried[0], best):
            return tried[0]
        if depth > 1:
            for one in tried[:_FOLLOWED]:
                found = self._hop(one, best, depth - 1)
                if found is not None:
                    return found
        return None

    def _evaluated(self, configuration: Configuration) -> Tuned | None:
        if self._left <= 0 or configuration in self._visited:
            return None
        self._left -= 1
        self._visited.add(configuration)
        return self._evaluator.evaluate(configuration)


def _better(one: Tuned, other: Tuned) -> bool:
    if one.overflow != other.overflow:
        return one.overflow < other.overflow
    return one.seconds < other.seconds * (1 - TIE)
