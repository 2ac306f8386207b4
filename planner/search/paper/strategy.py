"""The paper's search alone, as `eth plan --without exact` runs it."""

from __future__ import annotations

from typing import Literal

from planner.cost.price import iteration_seconds
from planner.errors import UserError
from planner.plan import Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.control import SearchControl, SearchStopped
from planner.search.diagnose import cannot_fit, fits
from planner.search.exact.pool import Pool, pools
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.device_groups import count_groups
from planner.search.paper.effort import DEFAULT_EVALUATIONS, granularity
from planner.search.paper.search import PaperSearch
from planner.search.shortlist import Offer

# The first ZeRO stage is searched with this part of the evaluations, the others for its best device groups.
_FOR_FIRST_ZERO = 0.85
# Kept back of each, to see whether devices had better stay idle.
_RESERVED_PRICES = 16
# What can be switched off of this search.
_PARTS = ("cache", "skipping", "order", "dp")


def plan(request: PlanRequest, *, profile: ProfileTable, control: SearchControl, offer: Offer) -> Plan:
    """The best plan within the control's evaluations, with `search` statistics. Activations are whole, unless nothing
    fits so.

    UserError if none was found, SearchStopped if time was up before that.
    """
    limit = control.options.evaluations or DEFAULT_EVALUATIONS
    run = _Run(request, profile, control, offer, limit)
    control.snapshot = run.statistics
    devices = pools(request.cluster, request.model)
    control.tell(f"searching plans for {len(request.cluster.devices)} devices: {limit} evaluations at most")
    for index, pool in enumerate(devices):
        # Where nodes are unequal there are two ways to see the devices; each gets half.
        run.search(pool, evaluations=(limit - run.used) // (len(devices) - index))
    if run.best is None:
        raise run.failure()
    return run.best.model_copy(update={"search": run.statistics()})


class _Run:
    """The searches of one request: for each way to see its devices, for each ZeRO stage."""

    def __init__(
        self,
        request: PlanRequest,
        profile: ProfileTable,
        control: SearchControl,
        offer: Offer,
        limit: int,
    ) -> None:
        self._request, self._profile, self._control, self._offer = request, profile, control, offer
        self._limit = limit
        whole = request.model_copy(update={"sequence_parallel": False})
        self._by_position = request.sequence_parallel and not fits(whole)
        self._budgets: list[EvaluationBudget] = []
        self._main: list[PaperSearch] = []
        self.best: Plan | None = None

    @property
    def used(self) -> int:
        return sum(budget.used for budget in self._budgets)

    def search(self, pool: Pool, *, evaluations: int) -> None:
        """One ZeRO stage in full (and the next while nothing fits), the others for the best groups of it.

        ZeRO-1 comes first: it takes less memory than 0 and no more time where parameters are no wider than
        gradients on the wire, and nothing in every micro-batch as 2 does.
        """
        stages = sorted(self._request.zero_stages, key=(1, 0, 2).index)
        last = self.used + evaluations
        main: PaperSearch | None = None
        for index, zero_stage in enumerate(stages):
            left = last - self.used
            if main is None and index + 1 < len(stages):
                left = int(left * _FOR_FIRST_ZERO)
            search = self._paper_search(pool, zero_stage, left, evaluations)
            if main is None or main.best is None:
                main = search
                self._main.append(search)
                self._keep(search.run())
            elif self.best is not None:
                self._keep(search.look_again(main.best_groups, self.best))

    def _paper_search(
        self, pool: Pool, zero_stage: Literal[0, 1, 2], most: int, evaluations: int
    ) -> PaperSearch:
        prices = _RESERVED_PRICES * len(self._request.cluster.devices)
        budget = EvaluationBudget(most, self._control, reserve=min(prices, most // 10))
        self._budgets.append(budget)
        return PaperSearch(
            self._request,
            pool,
            profile=self._profile,
            control=self._control,
            budget=budget,
            granularity=granularity(pool.counts, evaluations),
            offer=self._offer,
            zero_stage=zero_stage,
            by_position=self._by_position,
        )

    def _keep(self, plan: Plan | None) -> None:
        if plan is not None and (self.best is None or iteration_seconds(plan) < iteration_seconds(self.best)):
            self.best = plan

    def statistics(self) -> dict[str, object]:
        """For the plan's record; groups and pipelines are those of the search that went furthest."""
        options, main = self._control.options, self._main[0]
        for search in self._main:
            if search.covered_groups() > main.covered_groups():
                main = search
        total = count_groups(main.pool.counts)
        return {
            "coarse": False,
            **main.statistics(),
            "evaluations": self.used,
            "evaluation_limit": self._limit,
            "parts": [name for name in _PARTS if options.on(name)],
            "unit": main.unit,
            "complete": all(search.complete for search in self._main),
            "device_groups_total": total,
            "fraction_covered": None if total is None else min(1.0, main.covered_groups() / total),
        }

    def failure(self) -> Exception:
        """Why there is no plan: time, evaluations, or memory."""
        if self._control.stopped:
            return SearchStopped("the search was stopped before it had found a plan")
        if not all(search.complete for search in self._main):
            return UserError(
                f"--evaluations = {self._limit} are too few to find a plan of model"
                f" {self._request.model.name} that fits; raise it or leave out `--without exact`"
            )
        return cannot_fit(self._request, profile=self._profile)
