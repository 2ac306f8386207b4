"""The order of device groups within a number of pipelines (paper 5.3): least variance of computing power first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import pvariance

from planner.search.exact.pool import Vector
from planner.search.paper.device_groups import Group, minus, parts

# Groups that are sorted at a time.
_AT_ONCE = 4096
# Halvings of a limit after which as many groups as there are cost the same and are sorted all at once.
_HALVINGS = 40


def inter_variance(group: Group, powers: Sequence[float]) -> float:
    """Eq. 7: the variance of the pipelines' computing power; `powers` are of one device by kind."""
    return pvariance([_power(part, powers) for part in group])


def intra_variance(group: Group, powers: Sequence[float]) -> float:
    """Eq. 8: the sum over pipelines of the variance of their devices' computing power."""
    return sum(device_variance(part, powers) for part in group)


def device_variance(part: Vector, powers: Sequence[float]) -> float:
    """The variance of one pipeline's devices' computing power."""
    count = sum(part)
    mean = _power(part, powers) / count
    return sum(n * (power - mean) ** 2 for n, power in zip(part, powers, strict=True)) / count


def group_cost(group: Group, powers: Sequence[float], *, global_batch_size: int, layers: int) -> float:
    """Eq. 9: what device groups of equally many pipelines are ordered by."""
    return inter_variance(group, powers) / global_batch_size + intra_variance(group, powers) / layers


@dataclass(frozen=True)
class GroupOrder:
    """Device groups in the order of Eq. 9, without making all of them first.

    All devices are in some pipeline, so the mean power is known and the cost is a sum over pipelines: of
    power squared and of the variance inside. Groups are made by rising cost limits: a group is cut short
    when what it has already costs more than the limit.
    """

    counts: Vector
    powers: tuple[float, ...]
    global_batch_size: int
    layers: int
    unit: int = 1

    def groups(self, pipelines: int) -> Iterator[Group]:
        """Every device group of so many pipelines, least cost first; of equal cost, the larger first."""
        low, step = -1.0, 1.0 + self._unit_cost()
        while True:
            found, high, complete = self._ring(pipelines, low, step)
            for _, group in sorted(found, key=lambda one: (one[0], [tuple(-n for n in p) for p in one[1]])):
                yield group
            if complete:
                return
            low, step = high, (high - low) * (2 if len(found) < _AT_ONCE // 4 else 1)

    def _ring(self, pipelines: int, low: float, step: float) -> tuple[list[tuple[float, Group]], float, bool]:
        """Groups that cost more than `low` and at most the returned limit, and whether none cost more."""
        worst = self._worst(pipelines)
        high = min(worst, low + step)
        for _ in range(_HALVINGS):
            found: list[tuple[float, Group]] = []
            for one in self._between(pipelines, low, high):
                found.append(one)
                if len(found) > _AT_ONCE:
                    break
            else:
                return found, high, high >= worst
            high = low + (high - low) / 2
        return list(self._between(pipelines, low, high)), high, high >= worst

    def _unit_cost(self) -> float:
        """About what it costs that one pipeline is a unit too strong."""
        return float((self.unit * max(self.powers)) ** 2 / self.global_batch_size)

    def _between(self, pipelines: int, low: float, high: float) -> Iterator[tuple[float, Group]]:
        return (one for one in self._within(pipelines, high) if one[0] > low)

    def _worst(self, pipelines: int) -> float:
        """No group costs more."""
        total = _power(self.counts, self.powers)
        spread = (max(self.powers) - min(self.powers)) ** 2
        return total**2 / self.global_batch_size + pipelines * spread / self.layers

    def _within(self, pipelines: int, limit: float) -> Iterator[tuple[float, Group]]:
        """Groups that cost at most the limit, with their cost, the largest pipelines first."""
        mean = _power(self.counts, self.powers) / pipelines
        scale = pipelines * self.global_batch_size

        def own(part: Vector) -> float:
            off = _power(part, self.powers) - mean
            return off * off / scale + device_variance(part, self.powers) / self.layers

        def rest(left: Vector, missing: int) -> float:
            """Least that the missing pipelines cost: were they equally strong."""
            off = _power(left, self.powers) / missing - mean
            return missing * off * off / scale

        def extend(chosen: Group, left: Vector, spent: float) -> Iterator[tuple[float, Group]]:
            missing = pipelines - len(chosen)
            if missing == 1:
                cost = spent + own(left)
                if (not chosen or left <= chosen[-1]) and cost <= limit:
                    yield cost, (*chosen, left)
                return
            for part in parts(left, self.unit):
                if chosen and part > chosen[-1]:
                    continue
                if part[0] * missing < left[0]:
                    break
                after = minus(left, part)
                if sum(after) < missing - 1:
                    continue
                paid = spent + own(part)
                if paid + rest(after, missing - 1) <= limit:
                    yield from extend((*chosen, part), after, paid)

        if sum(self.counts) >= pipelines:
            yield from extend((), self.counts, 0.0)


def _power(part: Vector, powers: Sequence[float]) -> float:
    return sum(n * power for n, power in zip(part, powers, strict=True))
