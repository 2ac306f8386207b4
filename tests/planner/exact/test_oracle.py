"""The exact strategy's plan and its bound against the oracle's best plan, on up to six devices."""

from __future__ import annotations

import random
from typing import Any

import pytest

from planner.cost.price import check_memory, iteration_seconds, price_plan
from planner.errors import UserError
from planner.request import PlanRequest
from planner.search.exact import strategy
from planner.search.exact.pool import every_pool
from planner.search.exact.solve import ExactSolver
from tests.planner.brute_force import every_plan
from tests.planner.exact.jobs import make_request
from tests.planner.exact.oracle import Oracle
from tests.planner.exact.random_profile import RandomProfile

TINY: list[list[dict[str, int]]] = [
    [{"fast": 1}, {"slow": 1}],
    [{"fast": 1, "slow": 1}],
    [{"fast": 2}, {"slow": 1}],
]
NODES: list[list[dict[str, int]]] = [
    [{"fast": 3}, {"slow": 2}],
    [{"fast": 3}, {"slow": 3}],
    [{"fast": 2}, {"slow": 4}],
    [{"fast": 4}, {"slow": 2}],
    [{"fast": 2, "slow": 2}],
    [{"fast": 2}, {"fast": 1}, {"slow": 3}],
    [{"fast": 1, "slow": 2}, {"fast": 2, "slow": 1}],
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"zero_stages": (0,), "recompute": False},
    {"zero_stages": (0,)},
    {"zero_stages": (0, 1), "zero_scope": "pipeline"},
    {"zero_stages": (0, 1, 2), "zero_scope": "pipeline"},
]


@pytest.mark.parametrize("seed", range(6))
def test_the_oracle_is_brute_force(seed: int) -> None:
    """Named device by named device, without leaving anything out, on two and three devices."""
    draw = random.Random(seed)
    nodes = TINY[seed % len(TINY)]
    few = nodes != TINY[2]
    options: dict[str, Any] = draw.choice(OPTIONS) if few else {"zero_stages": (0,), "recompute": False}
    batch, layers, sizes = draw.choice([2, 3]), draw.choice([1, 2]), draw.choice([[1, 2], [1, 3]])
    request = make_request(seed, nodes, batch=batch, layers=layers, **options)
    profile = RandomProfile(seed, request.model)
    plans = every_plan(request, sizes, savers=few)
    naive = min((price_plan(plan, profile=profile).iteration_seconds for plan in plans), default=None)
    oracle = Oracle(request, profile, sizes=sizes)
    if naive is None:
        assert oracle.best_below(1.0).plan is None
        return
    best = oracle.best_below(naive * 1.5)
    assert best.plan is not None
    check_memory(best.plan)
    assert best.seconds == pytest.approx(naive)
    assert price_plan(best.plan, profile=profile).iteration_seconds == best.seconds
    # Nothing is below the best.
    assert oracle.best_below(best.seconds).plan is None


def drawn(seed: int) -> tuple[PlanRequest, RandomProfile, list[int]]:
    draw = random.Random(seed)
    nodes, options = draw.choice(NODES), draw.choice(OPTIONS)
    batch, layers = draw.choice([4, 6, 12, 24]), draw.choice([2, 3, 4])
    sizes, share = draw.choice([[1, 2], [2, 4], [1, 3]]), draw.choice([0.6, 1.0])
    request = make_request(seed, nodes, batch=batch, layers=layers, **options)
    spread = draw.choice([1.0, 2.0, 4.0])
    return request, RandomProfile(seed, request.model, spread=spread, share=share), sizes


def compared(request: PlanRequest, profile: RandomProfile, sizes: list[int]) -> float:
    """The strategy's seconds over those of the oracle's best plan, of which no bound is above.

    The strategy looks at more micro-batch sizes than the oracle, so it may be better, and its bound lower.
    """
    oracle = Oracle(request, profile, sizes=sizes)
    try:
        plan = strategy.plan(request, profile=profile, progress=lambda _: None)
    except UserError:
        assert oracle.best_below(1.0).plan is None
        return 1.0
    check_memory(plan)
    best = oracle.best_below(iteration_seconds(plan))
    assert plan.predicted is not None
    assert (plan.predicted.lower_bound_seconds or 0.0) <= best.seconds * (1 + 1e-9)
    solver = ExactSolver(request, profile=profile, micro_batch_sizes=sizes)
    solution = solver.solve()
    if solution is not None:
        known = best.seconds if best.plan else solution.seconds
        pool = every_pool(request.cluster, request.model)
        # With room above the best plan, so that a bound that is too high shows.
        bound = strategy.bound_seconds(solver, pool, solution.prices_for(pool), upper=2 * known)
        assert bound <= known * (1 + 1e-9)
    return iteration_seconds(plan) / best.seconds


@pytest.mark.parametrize("seed", [0, 2])
def test_plan_and_bound_against_the_oracle(seed: int) -> None:
    request = make_request(seed, NODES[seed], batch=6, layers=2, **OPTIONS[seed])
    assert compared(request, RandomProfile(seed, request.model, spread=2.0), [1, 2]) <= 1.01


@pytest.mark.parametrize("seed", [2, 10])
def test_a_profile_that_knows_some_cases(seed: int) -> None:
    """Of (type, TP degree, rows): nothing else is asked for, and the plan and the bound are of what is known."""
    request, profile, sizes = drawn(seed)
    assert profile.share < 1
    assert compared(request, profile, sizes) <= 1.01


def test_four_types_and_nodes_of_unlike_sizes() -> None:
    nodes = [{"fast": 2}, {"slow": 1}, {"other": 1}, {"fourth": 1}]
    request = make_request(0, nodes, batch=4, layers=2, zero_stages=(0,), recompute=False)
    assert compared(request, RandomProfile(0, request.model, spread=2.0), [1, 2]) <= 1.01


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 5, 10])
def test_many_plans_and_bounds_against_the_oracle(first: int) -> None:
    """Three of five plans, and more, are within 1 % of the best.

    Some are not: where gradients take as long as all else, it is left to chance that pipelines are cut so that
    they stay inside nodes.
    """
    found = sorted(compared(*drawn(seed)) for seed in range(first, first + 5))
    assert found[2] <= 1.01
    assert found[4] <= 1.25
