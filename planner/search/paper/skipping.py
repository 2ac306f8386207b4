"""Early skipping (paper 5.2): bounds on a device group's throughput from the pipelines that are known.

Both bounds are heuristics. The throughput of a known pipeline is what the stage search found for it, not its
best, and the approximate bound is a rule of three: a group that holds the optimum can be skipped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planner.search.exact.pool import Pool, Vector

# Pipelines whose computing power differs by more than this factor say nothing about each other: a larger one has
# more stages and a longer fill, and the rule of three would be far off.
_ALIKE = 2.0


class ThroughputBounds:
    """Upper bounds on the throughput of pipelines, from those whose throughput is known."""

    def __init__(self, pool: Pool, *, precision: str, alpha: float) -> None:
        self._power = [kind.device.tflops(precision) for kind in pool.kinds]
        self._memory = [float(kind.device.memory_bytes) for kind in pool.kinds]
        self._alpha = alpha
        self._known: dict[Vector, float] = {}
        self._covered: dict[tuple[Vector, Vector], bool] = {}
        # The least deterministic bound so far and how many known pipelines it has looked at.
        self._bounds: dict[Vector, tuple[float, int]] = {}

    def learn(self, composition: Vector, throughput: float) -> None:
        """A pipeline's throughput, in samples a second; 0 if nothing fits its devices."""
        self._known.setdefault(composition, throughput)

    def of_group(self, group: Sequence[Vector]) -> float:
        """The sum over the pipelines of the smaller bound; what is known stands for itself."""
        return sum(self.of_pipeline(part) for part in group)

    def of_pipeline(self, composition: Vector) -> float:
        if composition in self._known:
            return self._known[composition]
        return min(self.deterministic(composition), self.approximate(composition))

    def deterministic(self, composition: Vector) -> float:
        """The least throughput of the known pipelines that have, for every device of this one, a device of their
        own that is at least as good in both memory and computing power. inf if there is none.

        (The paper asks for strictly better ones; with types of equal memory that would hold for none.) Where the
        stage search found nothing that fits, that is no bound: it may find something for fewer devices.
        """
        best, seen = self._bounds.get(composition, (math.inf, 0))
        known = list(self._known.items())
        for other, throughput in known[seen:]:
            if 0 < throughput < best and self.covers(other, composition):
                best = throughput
        self._bounds[composition] = best, len(known)
        return best

    def approximate(self, composition: Vector) -> float:
        """The most alike known pipeline's throughput, times the ratios of computing power and of memory, times
        alpha. inf if none is known that has at least half and at most twice the computing power.

        Memory is that of a device on average: what it allows is larger micro-batches and less recomputation. The
        ratio of all memory would count a pipeline's size twice, and rate two halves at half the whole.
        """
        power, memory = self._size(composition)
        best: tuple[float, float] | None = None
        for other, throughput in self._known.items():
            if throughput > 0:
                their_power, their_memory = self._size(other)
                ratios = power / their_power, memory / their_memory
                unlike = sum(abs(math.log(ratio)) for ratio in ratios)
                if 1 / _ALIKE <= ratios[0] <= _ALIKE and (best is None or unlike < best[0]):
                    best = unlike, throughput * ratios[0] * ratios[1]
        return math.inf if best is None else best[1] * self._alpha

    def covers(self, other: Vector, composition: Vector) -> bool:
        """Whether every device of `composition` can be given one of `other` that is at least as good.

        Devices that both have can stand for each other, so only the rest is matched.
        """
        common = tuple(map(min, other, composition))
        rest = tuple(a - b for a, b in zip(composition, common, strict=True))
        spare = tuple(a - b for a, b in zip(other, common, strict=True))
        if not any(rest):
            return True
        if sum(rest) > sum(spare):
            return False
        if (rest, spare) not in self._covered:
            self._covered[rest, spare] = self._matches(rest, spare)
        return self._covered[rest, spare]

    def _matches(self, rest: Vector, spare: Vector) -> bool:
        """A maximum matching of devices that leaves none of `rest` out."""
        import numpy as np
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import maximum_bipartite_matching

        poorer, better = _devices(rest), _devices(spare)
        power, memory = np.array(self._power), np.array(self._memory)
        edges = (power[better] >= power[poorer][:, None]) & (memory[better] >= memory[poorer][:, None])
        matched = maximum_bipartite_matching(csr_array(edges), perm_type="column")
        return bool((matched >= 0).all())

    def _size(self, composition: Vector) -> tuple[float, float]:
        """Computing power, and memory of a device."""
        return (
            sum(n * one for n, one in zip(composition, self._power, strict=True)),
            sum(n * one for n, one in zip(composition, self._memory, strict=True)) / sum(composition),
        )


def _devices(counts: Vector) -> list[int]:
    """The kind of every device."""
    return [kind for kind, count in enumerate(counts) for _ in range(count)]
