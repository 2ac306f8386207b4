"""The plan of least cost a token: the strategy plans parts of the cluster, and the cheapest plan is kept.

Devices that a plan does not use are released and cost nothing, so every part of the cluster is a cluster to
plan for. `CostBound` says what a part must cost at least; parts are planned in the order of that bound times
the overhead seen on the nearest part that was planned, until no other part can be cheaper or the budget of
planned parts is spent.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from planner.cost.ideal import DeviceSpeeds
from planner.cost.memory import MemoryModel
from planner.cost.price import with_prediction
from planner.cost.stages import StageCost
from planner.errors import UserError
from planner.plan import Bound, Plan
from planner.prices import cost_per_million_tokens, tokens_per_second, with_cost
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.cost_bound import RELAXATIONS, CostBound, FloatArray
from planner.search.shortlist import Offer
from planner.search.sub_clusters import Counts, SubCluster, sub_counts

Find = Callable[[PlanRequest, Offer], Plan]
"""Plans a part of the cluster for the least time; UserError where it does not fit."""

_TIE = 1e-9
# Estimates so close are no reason to prefer one part: the one least like those planned is planned.
_CLOSE = 0.02


def cheapest_plan(
    request: PlanRequest,
    find: Find,
    *,
    profile: ProfileTable,
    progress: Callable[[str], None],
    offer: Offer,
) -> Plan:
    """The plan of least cost that keeps the throughput floor, priced, with `search` statistics.

    UserError if nothing fits, or if the floor is above what the strategy reaches on the whole cluster.
    """
    started = time.thread_time()
    search = _Cheapest(request, find, profile, progress, offer)
    found = search.run()
    assert found.predicted is not None
    bound = search.bound.lower_bound() / (request.global_batch_size * request.sequence_length) * 1e6
    predicted = found.predicted.model_copy(
        update={
            "lower_bound_seconds": None,
            "lower_bound_cost_per_million_tokens": bound,
            "bound": Bound(price="eq5", relaxations=RELAXATIONS),
        }
    )
    seconds = round(time.thread_time() - started, 3)
    statistics = {**(found.search or {}), **search.statistics, "seconds": seconds, "bound_seconds": 0.0}
    return found.model_copy(update={"predicted": predicted, "search": statistics})


def most_parts(devices: int) -> int:
    """Parts to plan: fewer where each takes longer."""
    return 24 if devices <= 16 else 16 if devices <= 64 else 10 if devices <= 256 else 6


@dataclass
class _Part:
    """Devices by type, what they must cost, and what their plan costs over that (None: not planned)."""

    counts: FloatArray
    least_seconds: float
    least_cost: float
    overhead: float | None = None


class _Cheapest:
    def __init__(
        self,
        request: PlanRequest,
        find: Find,
        profile: ProfileTable,
        progress: Callable[[str], None],
        offer: Offer,
    ) -> None:
        self._request, self._find, self._profile = request, find, profile
        self._progress, self._offer = progress, offer
        self.bound = _cost_bound(request, profile)
        self._parts = self._all_parts()
        self._error: UserError | None = None
        self._best: tuple[float, Plan] | None = None
        self._fastest: Plan | None = None
        self.statistics: dict[str, object] = {}

    def run(self) -> Plan:
        """Plan parts until none can be cheaper."""
        budget = most_parts(len(self._request.cluster.devices))
        whole = self._parts[0]
        if self._request.throughput_floor is not None:
            self._plan(whole)
        planned = sum(part.overhead is not None for part in self._parts)
        while planned < budget and (part := self._next()) is not None:
            self._plan(part)
            planned += 1
        if self._best is None and whole.overhead is None:
            self._plan(whole)
        left = [part for part in self._parts if part.overhead is None]
        cheaper = [
            part for part in left if self._best is None or part.least_cost < self._best[0] * (1 - _TIE)
        ]
        self.statistics = {
            "sub_clusters": len(self._parts),
            "sub_clusters_planned": len(self._parts) - len(left),
            "sub_clusters_ruled_out": len(left) - len(cheaper),
        }
        if self._best is None:
            raise self._failure()
        return self._best[1]

    def _all_parts(self) -> list[_Part]:
        counts = np.array(sub_counts(self._request.cluster), dtype=float)
        kept = self.bound.holds(counts) & (self.bound.least_seconds(counts) <= self.bound.most_seconds)
        kept[0] = True
        counts = counts[kept]
        seconds, costs = self.bound.least_seconds(counts), self.bound.least_cost(counts)
        return [_Part(c, float(s), float(cost)) for c, s, cost in zip(counts, seconds, costs, strict=True)]

    def _next(self) -> _Part | None:
        """The most promising part that is not planned; None if no other can be cheaper than the best plan."""
        best = self._best[0] if self._best else np.inf
        left = [p for p in self._parts if p.overhead is None and p.least_cost < best * (1 - _TIE)]
        planned = [part for part in self._parts if part.overhead is not None]
        if not left:
            return None
        estimates = [self._estimate(part, planned) for part in left]
        least = min(estimates)[:2]

        def key(index: int) -> tuple[bool, int, float, int]:
            misses, cost, distance = estimates[index]
            unlike = 0 if cost <= least[1] * (1 + _CLOSE) else 1
            return misses, unlike, -distance if not unlike else cost, index

        return left[min(range(len(left)), key=key)]

    def _estimate(self, part: _Part, planned: list[_Part]) -> tuple[bool, float, float]:
        """(misses the floor, cost, distance from the nearest part that was planned)."""
        if not planned:
            return False, part.least_cost, 0.0
        whole = self._parts[0].counts
        distances = [float((abs(part.counts - other.counts) / whole).sum()) for other in planned]
        nearest = min(range(len(planned)), key=lambda index: (distances[index], index))
        overhead = planned[nearest].overhead
        assert overhead is not None
        if overhead == np.inf:
            # Something that did not fit says nothing of larger parts.
            smaller = bool((part.counts <= planned[nearest].counts).all())
            overhead = np.inf if smaller else 1.0
        misses = part.least_seconds * overhead > self.bound.most_seconds
        return misses, part.least_cost * overhead, distances[nearest]

    def _plan(self, part: _Part) -> None:
        """Plan one part and keep what is cheaper."""
        counts: Counts = tuple(int(n) for n in part.counts)
        names = ", ".join(
            f"{n} x {t}" for n, t in zip(counts, self._request.cluster.counts, strict=True) if n
        )
        self._progress(f"planning {names}")
        sub = SubCluster(self._request.cluster, counts)
        request = self._request.model_copy(
            update={"cluster": sub.cluster, "objective": "time", "throughput_floor": None, "bound": False}
        )
        try:
            plan = self._find(request, lambda other: self._consider(sub, other))
        except UserError as error:
            self._error = self._error or error
            part.overhead = np.inf
            return
        self._consider(sub, plan)
        assert plan.predicted is not None
        part.overhead = plan.predicted.iteration_seconds / part.least_seconds
        if self._fastest is None or tokens_per_second(plan) > tokens_per_second(self._fastest):
            self._fastest = plan

    def _consider(self, sub: SubCluster, plan: Plan) -> None:
        """Keep the plan if it is the cheapest so far that is fast enough, and offer it on."""
        assert plan.predicted is not None
        seconds, rate = plan.predicted.iteration_seconds, cost_per_million_tokens(plan)
        assert rate is not None
        if seconds > self.bound.most_seconds * (1 + _TIE):
            return
        cost = rate * self._request.global_batch_size * self._request.sequence_length / 1e6
        whole = with_cost(self._whole(sub, plan))
        self._offer(whole)
        if self._best is None or cost < self._best[0] * (1 - _TIE):
            self._best = cost, whole

    def _whole(self, sub: SubCluster, plan: Plan) -> Plan:
        restored = sub.restored(plan)
        return restored.model_copy(update={"objective": "cost"})

    def _failure(self) -> UserError:
        if self._fastest is None:
            assert self._error is not None
            return self._error
        plan, floor = self._fastest, self._request.throughput_floor
        cost = cost_per_million_tokens(plan)
        return UserError(
            f"throughput_floor = {floor:g} tokens/s cannot be met: the most that strategy"
            f" {self._request.strategy!r} reaches on this cluster is {tokens_per_second(plan):.6g} tokens/s,"
            f" at {cost:.4g} per million tokens; lower the floor or add devices"
        )


def _cost_bound(request: PlanRequest, profile: ProfileTable) -> CostBound:
    cost = StageCost.of_request(request, profile=profile)
    memory = MemoryModel.of_request(request)
    state = memory.layer_state_bytes() * request.model.layers
    return CostBound(request, DeviceSpeeds(cost, request.cluster), state_bytes=state)


def finder(strategy: Callable[..., Plan], *, profile: ProfileTable, progress: Callable[[str], None]) -> Find:
    """A strategy as `cheapest_plan` calls it: every plan priced."""

    def find(request: PlanRequest, offer: Offer) -> Plan:
        plan = strategy(request, profile=profile, progress=progress, offer=offer)
        return plan if plan.predicted is not None else with_prediction(plan, profile=profile)

    return find
