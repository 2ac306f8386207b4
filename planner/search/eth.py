"""Strategy `eth`: the exact solver proposes, the paper's search refines its plan, and the peers' plans are looked
at too; each part alone on request."""

from __future__ import annotations

import time
from collections.abc import Callable

from planner.cost.models import CostModels
from planner.cost.price import iteration_seconds
from planner.errors import UserError
from planner.plan import Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.control import PARTS, SearchControl
from planner.search.exact import strategy as exact
from planner.search.paper import strategy as paper
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.refine_plan import refine_plan
from planner.search.peers import peer_plans
from planner.search.shortlist import Offer, ignore

# What refining takes is small beside the exact search: a few prices, and a few moves for each pipeline.
REFINING_EVALUATIONS = 2000
_REFINING_PRICES = 4


def plan(
    request: PlanRequest,
    *,
    profile: ProfileTable,
    progress: Callable[[str], None],
    offer: Offer = ignore,
    control: SearchControl | None = None,
) -> Plan:
    """The strategy: a priced Plan with `search` statistics. UserError if nothing fits."""
    control = control or SearchControl(progress=progress)
    if not control.options.on("exact"):
        return paper.plan(request, profile=profile, control=control, offer=offer)
    models = CostModels.of_request(request, profile=profile)
    found = _proposed(
        request, profile=profile, models=models, progress=progress, offer=offer, control=control
    )
    if control.should_stop():
        return found
    started = time.thread_time()
    used = 0

    def refined(plan: Plan) -> Plan:
        nonlocal used
        budget = EvaluationBudget(_refining(request, control), control)
        better = refine_plan(plan, request, profile=profile, models=models, budget=budget, offer=offer)
        used += budget.used
        assert iteration_seconds(better) <= iteration_seconds(plan)
        return better

    best, known = refined(found), found.search or {}
    found_by = str(known.get("found_by", "exact"))
    improved = iteration_seconds(best) < iteration_seconds(found)
    peers_started = time.thread_time()
    if control.options.on("peers"):
        upper = iteration_seconds(best)
        others = peer_plans(
            request, profile=profile, models=models, progress=progress, offer=offer, upper=upper
        )
        if others:
            best, found_by = refined(others[-1]), others[-1].strategy
            improved = iteration_seconds(best) < iteration_seconds(others[-1])
    search = {
        **known,
        "parts": [name for name in PARTS if control.options.on(name)],
        "evaluations": used,
        "refined": improved,
        "found_by": found_by,
        "peer_seconds": round(time.thread_time() - peers_started, 3),
        "seconds": round(known.get("seconds", 0.0) + time.thread_time() - started, 3),
    }
    return _with_bound(best, found).model_copy(update={"strategy": "eth", "search": search})


def _refining(request: PlanRequest, control: SearchControl) -> int:
    """Evaluations to refine one plan with."""
    if control.options.evaluations is not None:
        return control.options.evaluations
    return REFINING_EVALUATIONS + _REFINING_PRICES * len(request.cluster.devices)


def _proposed(
    request: PlanRequest,
    *,
    profile: ProfileTable,
    models: CostModels,
    progress: Callable[[str], None],
    offer: Offer,
    control: SearchControl,
) -> Plan:
    """The exact solver's plan; where it finds none that fits, the best of the peers'."""
    started = time.thread_time()
    try:
        return exact.plan(request, profile=profile, models=models, progress=progress, offer=offer)
    except UserError:
        others = (
            peer_plans(request, profile=profile, models=models, progress=progress, offer=offer)
            if control.options.on("peers")
            else []
        )
        if not others:
            raise
        seconds = round(time.thread_time() - started, 3)
        search = {"seconds": seconds, "bound_seconds": 0.0, "found_by": others[-1].strategy}
        return others[-1].model_copy(update={"strategy": "eth", "search": search})


def _with_bound(refined: Plan, found: Plan) -> Plan:
    """The refined plan with the other's bound, which is on every plan."""
    assert refined.predicted is not None and found.predicted is not None
    bound = {name: getattr(found.predicted, name) for name in ("lower_bound_seconds", "bound")}
    return refined.model_copy(update={"predicted": refined.predicted.model_copy(update=bound)})
