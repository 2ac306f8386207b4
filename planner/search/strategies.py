"""The registry of planning strategies and the one entry to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Protocol

from planner.cost.price import with_prediction
from planner.errors import UserError, did_you_mean
from planner.plan import Plan
from planner.prices import with_cost
from planner.profile.analytic import AnalyticProfile
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search import eth
from planner.search.cheapest import cheapest_plan, finder
from planner.search.collecting import collecting_seldom
from planner.search.control import OF_ALL, SearchControl, SearchOptions
from planner.search.shortlist import Offer, Shortlist, ignore, pipelines_key, rank_of
from planner.search.stopping import stoppable
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
    "eth": eth.plan,
    "metis": _peer("metis"),
    "hexiscale": _peer("hexiscale"),
    "type-split": _peer("type_split"),
    "uniform": _peer("uniform"),
}


def strategy_names() -> list[str]:
    return sorted(STRATEGIES)


def strategy_named(name: str) -> Strategy:
    """A strategy by its name; UserError that lists them."""
    if name not in STRATEGIES:
        raise UserError(
            f"strategy = {name!r} is not known; use one of {', '.join(strategy_names())}"
            f"{did_you_mean(name, STRATEGIES)}"
        )
    return STRATEGIES[name]


def find_plan(
    request: PlanRequest,
    *,
    profile: ProfileTable | None = None,
    progress: Progress | None = None,
    offer: Offer = ignore,
    control: SearchControl | None = None,
) -> Plan:
    """The plan of least predicted iteration time, or of least cost, that the request's strategy finds.

    `predicted` (with `simulated_seconds`) and `search` are filled. The same request gives the same plan,
    `search["seconds"]` apart. `progress` is called now and then with a line for people. `control` says which
    parts of the search are on and what it may spend; it has its own progress. Raises UserError if the strategy
    is unknown or the job cannot fit, saying which stage, by how much and what would help; SearchStopped if
    the user interrupted it before it had a plan.
    """
    strategy = strategy_named(request.strategy)
    start = time.perf_counter()
    profile = profile or AnalyticProfile(request.model, request.cluster.device_types)
    control = control or SearchControl(progress=progress or _quiet)
    if not control.options.on("sequence_parallel"):
        request = request.model_copy(update={"sequence_parallel": False})
    strategy = _controlled(request, strategy, control)

    def search(tell: Progress, offer: Offer) -> Plan:
        if request.objective == "cost":
            find = finder(strategy, profile=profile, progress=tell)
            return cheapest_plan(request, find, profile=profile, progress=tell, offer=offer)
        return strategy(request, profile=profile, progress=tell, offer=offer)

    with collecting_seldom():
        plan = stoppable(search, control, rank=rank_of(request.objective), offer=offer)
        done = _completed(plan, profile)
    seconds = time.perf_counter() - start
    return done.model_copy(update={"search": {"seconds": round(seconds, 3), **(plan.search or {})}})


def find_plans(
    request: PlanRequest,
    *,
    most: int,
    profile: ProfileTable | None = None,
    progress: Progress | None = None,
    control: SearchControl | None = None,
) -> list[Plan]:
    """The best distinct plans that the search priced, `find_plan`'s first; fewer if it priced fewer."""
    shortlist = Shortlist(most, rank_of(request.objective))
    best = find_plan(request, profile=profile, progress=progress, offer=shortlist.offer, control=control)
    others = [plan for plan in shortlist.plans if pipelines_key(plan) != pipelines_key(best)]
    profile = profile or AnalyticProfile(request.model, request.cluster.device_types)
    return [best, *(_completed(plan, profile) for plan in others[: most - 1])]


def _controlled(request: PlanRequest, strategy: Strategy, control: SearchControl) -> Strategy:
    """The strategy with the control, if it takes one. UserError if it does not and the user asks for more than
    a time limit and what all have."""
    if request.strategy == "eth":
        return partial(eth.plan, control=control)
    options = control.options
    if options.without - OF_ALL or options.evaluations is not None or options.alpha != SearchOptions.alpha:
        raise UserError(
            f"strategy = {request.strategy!r} has no parts to choose: --without, --alpha and --evaluations belong"
            f" to the strategy eth, but for --without {', '.join(sorted(OF_ALL))}; leave them out"
        )
    return strategy


def _completed(plan: Plan, profile: ProfileTable) -> Plan:
    """The plan priced, replayed event by event, and with its cost where devices have prices."""
    priced = plan if plan.predicted is not None else with_prediction(plan, profile=profile)
    assert priced.predicted is not None
    simulated = simulate(priced, profile=profile, events=False).iteration_seconds
    predicted = priced.predicted.model_copy(update={"simulated_seconds": simulated})
    return with_cost(priced.model_copy(update={"predicted": predicted}))


def _quiet(message: str) -> None:
    del message
