"""The peers' plans as candidates of `eth`."""

from __future__ import annotations

import pytest

from planner.errors import UserError
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.control import SearchControl, SearchOptions
from planner.search.peers import PEERS, peer_plans
from tests.planner.baselines.jobs import CLUSTERS, draw_request


def seconds_of(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


def peers_of(request: PlanRequest, upper: float | None) -> list[Plan]:
    return peer_plans(
        request,
        profile=AnalyticProfile(request.model, request.cluster.device_types),
        progress=lambda message: None,
        offer=lambda plan: None,
        upper=upper,
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("nodes", [CLUSTERS[0], CLUSTERS[3]])
def test_on_small_clusters_the_last_one_is_the_best_that_any_peer_finds(
    seed: int, nodes: tuple[dict[str, int], ...]
) -> None:
    best = []
    for name in PEERS:
        try:
            best.append(seconds_of(find_plan(draw_request(seed, nodes, strategy=name))))
        except UserError:
            continue
    found = peers_of(draw_request(seed, nodes, strategy="eth"), None)
    assert bool(found) == bool(best)
    if found:
        assert seconds_of(found[-1]) == pytest.approx(min(best), rel=1e-9)
        assert [seconds_of(plan) for plan in found] == sorted(map(seconds_of, found), reverse=True)
        # Beside a plan as good as the best there is nothing to find, and beside a worse one the best is.
        request = draw_request(seed, nodes, strategy="eth")
        assert peers_of(request, min(best)) == []
        assert seconds_of(peers_of(request, min(best) * 1.01)[-1]) == pytest.approx(min(best), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_plan_says_what_found_it_and_is_eths(seed: int) -> None:
    request = draw_request(seed, CLUSTERS[1], strategy="eth")
    plan = find_plan(request)
    assert plan.strategy == "eth" and plan.search is not None
    assert plan.search["found_by"] in ("exact", *PEERS)
    without = SearchControl(SearchOptions(without=frozenset({"peers"})))
    alone = find_plan(request, control=without)
    assert alone.search is not None and alone.search["found_by"] == "exact"
    assert seconds_of(plan) <= seconds_of(alone) * (1 + 1e-9)
