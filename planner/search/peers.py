"""The peers' plans as candidates of `eth`, which so is never worse than they are.

A peer is searched with a budget that depends on the number of devices, and only for plans that are better than
the one known. On large clusters that budget is small: pipelines of many shapes beat those of one there.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.cost.models import CostModels
from planner.errors import UserError
from planner.plan import Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.shortlist import Offer

PEERS = ("metis", "hexiscale", "type-split", "uniform")
# Beyond so many devices uniform is not looked at, and beyond so many none: their searches would take longer than all
# the rest.
_ALL_DEVICES, _MOST_DEVICES = 512, 1024


def peer_plans(
    request: PlanRequest,
    *,
    profile: ProfileTable,
    models: CostModels | None = None,
    progress: Callable[[str], None],
    offer: Offer,
    upper: float | None = None,
) -> list[Plan]:
    """Priced plans of the peers, under their own names, each quicker than the one before and than `upper` seconds;
    often none."""
    # The peers are built on the search: imported late.
    from planner.baselines import hexiscale, metis, type_split, uniform
    from planner.baselines.bench import Budget
    from planner.baselines.stage_figures import SharedFigures

    modules = {"type-split": type_split, "metis": metis, "hexiscale": hexiscale, "uniform": uniform}
    devices = len(request.cluster.devices)
    if devices > _MOST_DEVICES:
        return []
    figures = SharedFigures(models or CostModels.of_request(request, profile=profile))
    least, found = math.inf if upper is None else upper, []
    for name in PEERS if devices <= _ALL_DEVICES else PEERS[:3]:
        # Without a plan to beat all that matters is to find one.
        budget = None if upper is None else Budget.beside(devices, upper=least)
        try:
            plan = modules[name].plan(
                request.model_copy(update={"strategy": name}),
                profile=profile,
                figures=figures,
                progress=progress,
                offer=offer,
                budget=budget,
            )
        except UserError:
            # Nothing fits its form, or nothing is quick enough.
            continue
        assert plan.predicted is not None
        if plan.predicted.iteration_seconds < least:
            least = plan.predicted.iteration_seconds
            found.append(plan)
    return found
