"""The paper's search (section 5): pipeline device groups of 1, 2, ... pipelines, each skipped, evaluated, or
covered by the dynamic program; the best plan of all."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Literal

from planner.cost.price import iteration_seconds
from planner.plan import Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.control import SearchControl
from planner.search.exact.pool import Pool, Vector
from planner.search.paper.balance import Balanced, Balancer
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.configuration import Tuned
from planner.search.paper.device_groups import (
    Group,
    count_sorted_groups,
    device_groups,
    most_pipelines,
)
from planner.search.paper.dynamic import Row, arrangements
from planner.search.paper.effort import Granularity
from planner.search.paper.order import GroupOrder
from planner.search.paper.pipelines import PipelineCounts, PipelineSearch
from planner.search.paper.skipping import ThroughputBounds
from planner.search.paper.stage_figures import StageShop
from planner.search.shortlist import Offer
from planner.units import format_seconds

# Of so many groups looked at last, at least so many must have been skipped, or dynamic programming takes over.
_WINDOW, _ENOUGH_SKIPPED = 8, 4
# After so many groups it does in any case: where all are skipped, other arrangements are what is left to find.
_LONG = 256
# The estimate of when pipelines end their work may be off by so much, as transfers are not known yet.
_ESTIMATE = 0.97
_KEPT_GROUPS = 3
# Of so many kinds at most every selection is tried without the others.
_KINDS_LEFT_OUT = 4


@dataclass
class GroupCounts:
    """What was done with pipeline device groups."""

    device_groups_seen: int = 0
    device_groups_skipped: int = 0
    device_groups_covered: int = 0
    """Found to be cuts of an arrangement that dynamic programming has been over."""
    device_groups_evaluated: int = 0
    plans_priced: int = 0
    evaluations_to_best: int = 0
    """Evaluations when the best plan was found."""
    arrangements: int = 0


class PaperSearch:
    """One search on one pool of devices."""

    def __init__(
        self,
        request: PlanRequest,
        pool: Pool,
        *,
        profile: ProfileTable,
        control: SearchControl,
        budget: EvaluationBudget,
        granularity: Granularity,
        offer: Offer,
        zero_stage: Literal[0, 1, 2] = 0,
        by_position: bool = False,
    ) -> None:
        """`by_position`: stages may cut activations by position."""
        self._request, self.pool = request, pool
        self._control, self._options, self._budget = control, control.options, budget
        self.unit = granularity.unit
        precision = request.dtypes.param
        self._powers = tuple(kind.device.tflops(precision) for kind in pool.kinds)
        self.counts = GroupCounts()
        self.pipeline_counts = PipelineCounts()
        shops = [
            StageShop(
                request,
                pool,
                profile=profile,
                pipelines=count,
                zero_stage=zero_stage,
                by_position=by_position,
            )
            for count in (1, 2)
        ]

        def shop_of(composition: Vector) -> StageShop:
            # Only a pipeline of all devices has no other to share gradients with.
            return shops[composition != pool.counts]

        def searching(shop_of: Callable[[Vector], StageShop]) -> PipelineSearch:
            return PipelineSearch(
                shop_of,
                effort=granularity.effort,
                budget=budget,
                cache=self._options.on("cache"),
                counts=self.pipeline_counts,
            )

        self._pipelines = searching(shop_of)
        self._lone = searching(lambda composition: shops[0])
        self._balancer = Balancer(
            request, pool, profile=profile, shop_of=shop_of, budget=budget, offer=offer, zero_stage=zero_stage
        )
        self._bounds = ThroughputBounds(pool, precision=precision, alpha=self._options.alpha)
        rows = [Row(row, pool.counts, self.unit) for row in arrangements(pool.counts, self.unit)]
        self._first = rows[0]
        self._rows = iter(rows if self._options.on("dp") else [])
        self._cut: list[Row] = []
        self._seen_cuts = 0
        """Groups seen that are cuts of the first row."""
        self._recent: deque[bool] = deque(maxlen=_LONG)
        self._unpriced: Balanced | None = None
        """What was found when nothing was left to price it with."""
        self._alone: set[Vector] = set()
        """Pipelines that were looked at with nothing beside them."""
        self._ranked: list[tuple[float, Group]] = []
        self.best: Plan | None = None
        self.complete = False
        """Whether every device group of this unit was skipped, evaluated or covered."""

    def run(self) -> Plan | None:
        """The best plan found; None if none was, since nothing fits or the budget was too small."""
        counts = self.pool.counts
        most = min(most_pipelines(counts, self.unit), self._request.global_batch_size)
        for pipelines in range(1, most + 1):
            for group in self._groups(pipelines):
                if not self._budget.take(pipelines):
                    return self._with_idle_devices()
                self._look_at(group)
                if self._is_time_to_arrange():
                    self._arrange()
                self._tell(pipelines)
        self.complete = not self._budget.exhausted()
        return self._with_idle_devices()

    def _with_idle_devices(self) -> Plan | None:
        """The best plan, also of those that leave devices idle: all of some kinds, beside one pipeline of the
        others, or those of some pipelines of the best groups."""
        self._budget.release()
        if self._unpriced is not None:
            self._price(self._unpriced)
        for counts in _without_kinds(self.pool.counts):
            tuned = self._lone.best(counts, self._request.global_batch_size)
            if tuned is not None:
                self._price(Balanced((tuned,), (self._request.global_batch_size,)))
        for group in self.best_groups:
            left: Group | None = group
            while left is not None:
                left = self._without_one(left)
        return self.best

    def _without_one(self, group: Group) -> Group | None:
        """The group without the pipeline that it is best without; None if that is no better than the best."""
        assert self.best is not None
        best, found = iteration_seconds(self.best), None
        for part in sorted(set(group)):
            rest = list(group)
            rest.remove(part)
            if rest and self._budget.take():
                seconds = self._evaluate(tuple(rest))
                if seconds < best:
                    best, found = seconds, tuple(rest)
        return found

    def look_again(self, groups: Sequence[Group], best: Plan) -> Plan:
        """The best of a known plan and what these groups alone make."""
        self.best = best
        for group in groups:
            if self._budget.take():
                self._evaluate(group)
        return self.best

    @property
    def best_groups(self) -> list[Group]:
        """The few device groups whose plans were best."""
        return list(dict.fromkeys(group for _, group in self._ranked))

    def _groups(self, pipelines: int) -> Iterator[Group]:
        counts, request = self.pool.counts, self._request
        if not self._options.on("order"):
            return device_groups(counts, pipelines=pipelines, unit=self.unit)
        order = GroupOrder(
            counts, self._powers, request.global_batch_size, request.model.layers, unit=self.unit
        )
        return order.groups(pipelines)

    def _look_at(self, group: Group) -> None:
        self.counts.device_groups_seen += 1
        self._seen_cuts += self._first.holds(group)
        if any(row.holds(group) for row in self._cut):
            self.counts.device_groups_covered += 1
        elif self._is_hopeless(group):
            self.counts.device_groups_skipped += 1
            self._recent.append(True)
        else:
            self._recent.append(False)
            self.counts.device_groups_evaluated += 1
            self._evaluate(group)

    def _is_hopeless(self, group: Group) -> bool:
        if self.best is None or not self._options.on("skipping"):
            return False
        return self._bounds.of_group(group) < self._best_throughput()

    def _best_throughput(self) -> float:
        assert self.best is not None
        return self._request.global_batch_size / iteration_seconds(self.best)

    def _evaluate(self, group: Group) -> float:
        """Configurations of the group's pipelines, balanced, and their price; inf if they were not worth one.

        Pipelines that nothing fits leave their devices idle.
        """
        found = [tuned for part in group if (tuned := self._pipeline(part)) is not None]
        balanced = self._balancer.balanced(found, self._pipelines.refined) if found else None
        seconds = math.inf if balanced is None else self._price(balanced)
        if seconds < math.inf:
            self._ranked = sorted([*self._ranked, (seconds, group)])[:_KEPT_GROUPS]
        return seconds

    def _pipeline(self, composition: Vector) -> Tuned | None:
        batch = self._request.global_batch_size
        tuned = self._pipelines.best(composition, batch)
        if self._budget.exhausted():
            return tuned
        self._bounds.learn(composition, tuned.throughput if tuned else 0.0)
        if tuned is not None and composition not in self._alone:
            # All other devices idle: it synchronises nothing with other pipelines.
            self._alone.add(composition)
            self._price(Balanced((tuned,), (batch,)))
        return tuned

    def _price(self, balanced: Balanced) -> float:
        """The least price of the pipelines' plans; inf if they were not worth a price."""
        least = math.inf
        if self.best is not None and balanced.compute_seconds * _ESTIMATE > iteration_seconds(self.best):
            return least
        if self._budget.exhausted() and self.best is None:
            self._unpriced = balanced
        for plan in self._balancer.plans(balanced):
            self.counts.plans_priced += 1
            least = min(least, iteration_seconds(plan))
            if self.best is None or iteration_seconds(plan) < iteration_seconds(self.best):
                self.best = plan
                self.counts.evaluations_to_best = self._budget.used
        return least

    def _is_time_to_arrange(self) -> bool:
        """Whether the groups looked at last were mostly not skipped; or skipping leads nowhere for long."""
        if len(self._recent) < _WINDOW:
            return False
        return sum(list(self._recent)[-_WINDOW:]) < _ENOUGH_SKIPPED or len(self._recent) == _LONG

    def _arrange(self) -> None:
        """Dynamic programming over the next arrangement of the devices (Eq. 10)."""
        row = next(self._rows, None)
        if row is None or self._budget.exhausted():
            return
        self.counts.arrangements += 1
        self._recent.clear()
        most = min(sum(self.pool.counts), self._request.global_batch_size)
        cuts = row.best_cuts(throughput=self._throughput, most_pipelines=most)
        if self._budget.exhausted():
            return
        self._cut.append(row)
        for throughput, group in sorted(cuts, key=lambda cut: -cut[0]):
            if self.best is None or throughput >= self._best_throughput():
                self.counts.device_groups_evaluated += 1
                self._evaluate(group)

    def _throughput(self, composition: Vector) -> float:
        tuned = self._pipeline(composition)
        return tuned.throughput if tuned else 0.0

    def _tell(self, pipelines: int) -> None:
        best = f"best so far {format_seconds(iteration_seconds(self.best))}" if self.best else "no plan yet"
        self._control.tell(
            f"searching groups of {pipelines} pipelines: {self.counts.device_groups_seen} seen,"
            f" {self.counts.device_groups_skipped} skipped, {self._budget.used} evaluations; {best}"
        )

    def statistics(self) -> dict[str, object]:
        """For the plan's record."""
        return {**asdict(self.counts), **asdict(self.pipeline_counts)}

    def covered_groups(self) -> int:
        """Device groups that were seen, or are cuts of the first arrangement, which are known in number."""
        seen, counts = self.counts.device_groups_seen, self.pool.counts
        if not self._cut or any(count % self.unit for count in counts):
            return seen
        return seen - self._seen_cuts + count_sorted_groups([count // self.unit for count in counts])


def _without_kinds(counts: Vector) -> list[Vector]:
    """All devices of some kinds but not of all, the most first."""
    held = [kind for kind, count in enumerate(counts) if count][:_KINDS_LEFT_OUT]
    found = []
    for size in range(len(held) - 1, 0, -1):
        for kept in combinations(held, size):
            found.append(tuple(count if kind in kept else 0 for kind, count in enumerate(counts)))
    return found
