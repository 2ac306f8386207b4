"""The registry of planning strategies and the one entry to them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from planner.cost.price import with_prediction
from planner.errors import UserError
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search import enumerate_hpp
from planner.simulate import simulate

Progress = Callable[[str], None]


class Strategy(Protocol):
    """Makes a Plan without prediction; `search` holds its statistics. Raises UserError if nothing fits."""

    def __call__(self, request: PlanRequest, *, profile: ProfileTable, progress: Progress) -> Plan: ...


STRATEGIES: dict[str, Strategy] = {"eth": enumerate_hpp.plan}


def strategy_names() -> list[str]:
    return sorted(STRATEGIES)


def find_plan(
    request: PlanRequest, *, profile: ProfileTable | None = None, progress: Progress | None = None
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
    plan = strategy(request, profile=profile, progress=progress or _quiet)
    plan = with_prediction(plan, profile=profile)
    assert plan.predicted is not None
    simulated = simulate(plan, profile=profile, events=False).iteration_seconds
    seconds = time.perf_counter() - start
    return plan.model_copy(
        update={
            "predicted": plan.predicted.model_copy(update={"simulated_seconds": simulated}),
            "search": {"seconds": round(seconds, 3), **(plan.search or {})},
        }
    )


def _quiet(message: str) -> None:
    del message
