"""Figures that searches share: the plans are those of searches that share nothing."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

from planner.baselines.bench import Budget
from planner.baselines.stage_figures import SharedFigures
from planner.cost.models import CostModels
from planner.errors import UserError
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.request import PlanRequest
from tests.planner.baselines.jobs import CLUSTERS, PEERS, draw_request


def found(request: PlanRequest, strategy: str, **named: Any) -> Plan | None:
    module = import_module(f"planner.baselines.{strategy.replace('-', '_')}")
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    try:
        plan: Plan = module.plan(request, profile=profile, progress=lambda message: None, **named)
    except UserError:
        return None
    return plan


@pytest.mark.parametrize(
    ("nodes", "budget"),
    [(CLUSTERS[1], None), (CLUSTERS[3], Budget(settled=24, priced=4, changes=False, starts=1))],
)
def test_peers_that_share_figures_find_what_each_finds_alone(
    nodes: tuple[dict[str, int], ...], budget: Budget | None
) -> None:
    request = draw_request(1, nodes, strategy="metis")
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    shared = SharedFigures(CostModels.of_request(request, profile=profile))
    plans = []
    # Those of all that a request may allow stand side by side in what is shared.
    for changes in ({}, {"recompute": False}, {"sequence_parallel": False}):
        one = request.model_copy(update=changes)
        for strategy in PEERS:
            together = found(one, strategy, budget=budget, figures=shared)
            assert together == found(one, strategy, budget=budget)
            plans.append(together)
    assert any(plan is not None for plan in plans)


def test_figures_are_kept_by_what_stages_may_do() -> None:
    request = draw_request(0, CLUSTERS[0], strategy="metis")
    profile = AnalyticProfile(request.model, request.cluster.device_types)
    shared = SharedFigures(CostModels.of_request(request, profile=profile))
    whole = shared.of(request)
    assert shared.of(request.model_copy(update={"zero_stages": (0,)})) is whole
    assert shared.of(request.model_copy(update={"recompute": False})) is not whole
    assert shared.of(request.model_copy(update={"sequence_parallel": False})) is not whole
