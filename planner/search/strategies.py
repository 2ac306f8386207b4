"""The registry of planning strategies and the one entry to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Protocol

from planner.cost.price import price_plan
from planner.errors import UserError
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.exact import strategy as exact
from planner.search.shortlist import Offer, Shortlist, ignore, pipelines_key
from planner.simulate import simulate

Progress = Callable[[str], None]


class Strategy(Protocol):
    """Makes a Plan; `search` holds its statistics, `predicted` may be filled. UserError if nothing fits.

    `offer` is told of the priced plans that were not chosen.
    """

    def __call__(
        self, request: PlanRequest, *, profile: ProfileTable, progress: Progress, offer: Offer
    ) -> Plan: ...


def _peer(module: str) -> Strategy:
    """A strategy of `planner.baselines`, imported when it is asked for, since it is built on this package."""

    def plan(request: PlanRequest, *, profile: ProfileTable, progress: Progress, offer: Offer) -> Plan:
        strategy: Strategy = import_module(f"planner.baselines.{module}").plan
        return strategy(request, profile=profile, progress=progress, offer=offer)

    return plan


STRATEGIES: dict[str, Strategy] = {
    "eth": exact.plan,
    "metis": _peer("metis"),
    "hexiscale": _peer("hexiscale"),
    "type-split": _peer("type_split"),
    "uniform": _peer("uniform"),
}


def strategy_names() -> list[str]:
    return sorted(STRATEGIES)


def find_plan(
    request: PlanRequest,
    *,
    profile: ProfileTable | None = None,
    progress: Progress | None = None,
    offer: Offer = ignore,
) -> Plan:
    """The plan of least predicted iteration time that the request's strategy finds.

    `predicted` (with `simulated_seconds`) and `search` are filled. The same request gives the same plan,
    `search["seconds"]` apart. `progress` is called now and then with a line for people. Raises UserError
    if the strategy is unknown or the job cannot fit, saying which stage, by how much and what would help.
    """
    strategy = STRATEGIES.get(request.strategy)
    if strategy is None:
        raise UserError(
            f"strategy = {request.strategy!r} is not known; use one of {', '.join(strategy_names())}"
        )
    start = time.perf_counter()
    profile = profile or AnalyticProfile(request.model, request.cluster.device_types)
    plan = strategy(request, profile=profile, progress=progress or _quiet, offer=offer)
    predicted = plan.predicted or price_plan(plan, profile=profile)
    simulated = simulate(plan, profile=profile, events=False).iteration_seconds
    seconds = time.perf_counter() - start
    return plan.model_copy(
        update={
            "predicted": predicted.model_copy(update={"simulated_seconds": simulated}),
            "search": {"seconds": round(seconds, 3), **(plan.search or {})},
        }
    )


def find_plans(
    request: PlanRequest,
    *,
    most: int,
    profile: ProfileTable | None = None,
    progress: Progress | None = None,
) -> list[Plan]:
    """The best distinct plans that the search priced, `find_plan`'s first; fewer if it priced fewer."""
    shortlist = Shortlist(most)
    best = find_plan(request, profile=profile, progress=progress, offer=shortlist.offer)
    others = [plan for plan in shortlist.plans if pipelines_key(plan) != pipelines_key(best)]
    return [best, *(_replayed(plan, profile) for plan in others[: most - 1])]


def _replayed(plan: Plan, profile: ProfileTable | None) -> Plan:
    assert plan.predicted is not None
    simulated = simulate(plan, profile=profile, events=False).iteration_seconds
    return plan.model_copy(
        update={"predicted": plan.predicted.model_copy(update={"simulated_seconds": simulated})}
    )


def _quiet(message: str) -> None:
    del message
