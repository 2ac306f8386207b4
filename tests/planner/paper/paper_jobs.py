"""Small jobs for the paper's search, and what makes a plan right."""

from __future__ import annotations

from typing import Any

from planner.cost.price import check_memory, price_plan
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.control import SearchControl, SearchOptions
from tests.planner.exact.jobs import make_request

# Two, three and two kinds of nodes; unequal nodes; one type alone.
CLUSTERS: list[list[dict[str, int]]] = [
    [{"fast": 2}, {"slow": 2}],
    [{"fast": 1, "slow": 1}, {"fast": 1, "slow": 1}],
    [{"fast": 3}, {"slow": 1}],
    [{"fast": 4}],
    [{"fast": 2}, {"fast": 1}, {"slow": 2}],
]
ALONE = frozenset({"exact"})
SWITCHES = ["cache", "skipping", "order", "dp"]


def search(request: PlanRequest, **options: Any) -> Plan:
    """The paper's search alone."""
    without = frozenset(options.pop("without", ())) | ALONE
    return find_plan(request, control=SearchControl(SearchOptions(without, **options)))


def seconds_of(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


def check_plan_is_right(plan: Plan, request: PlanRequest) -> None:
    """Valid, within memory, of the request, priced as any plan; it says what it spent."""
    Plan.model_validate(plan.model_dump())
    check_memory(plan)
    assert plan.global_batch_size == sum(pipeline.samples for pipeline in plan.pipelines)
    assert plan.zero_stage in request.zero_stages
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    assert price_plan(plan, profile=profile).iteration_seconds == seconds_of(plan)
    if not request.recompute:
        assert not any(stage.recompute for pipeline in plan.pipelines for stage in pipeline.stages)


__all__ = ["ALONE", "CLUSTERS", "SWITCHES", "check_plan_is_right", "make_request", "search", "seconds_of"]
