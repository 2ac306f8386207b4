"""The lower bound against plans: all of a tiny cluster, and random ones of small clusters."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cluster import Link, Links
from planner.cost.price import price_plan
from planner.errors import UserError
from planner.plan import Plan
from planner.profile.table import ProfileTable, Scope
from planner.request import PlanRequest
from planner.search.exact import strategy
from planner.search.exact.pool import Pool, every_pool
from planner.search.exact.prices import DevicePrices
from planner.search.exact.solve import ExactSolver
from planner.search.exact.tightened import ALL_RELAXED, Tightened
from planner.simulate import simulate
from tests.planner.brute_force import every_plan
from tests.planner.exact.jobs import make_request, random_plans
from tests.planner.exact.oracle import Oracle
from tests.planner.exact.random_profile import RandomProfile

TINY: list[list[dict[str, int]]] = [
    [{"fast": 2}, {"slow": 1}],
    [{"fast": 1, "slow": 1}],
    [{"slow": 2}, {"fast": 1}],
    [{"fast": 3}],
]
SMALL: list[list[dict[str, int]]] = [
    [{"fast": 2}, {"slow": 2}],
    [{"fast": 2, "slow": 2}],
    [{"fast": 3}, {"slow": 3}],
    [{"fast": 1, "slow": 2}, {"fast": 2, "slow": 1}],
    [{"fast": 2}, {"fast": 1}, {"slow": 3}],
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"zero_stages": (0,), "recompute": False},
    {"zero_stages": (0, 1), "zero_scope": "pipeline"},
    {"zero_stages": (0, 1, 2), "zero_scope": "pipeline"},
    {"zero_stages": (2,)},
]


def random_prices(pool: Pool, request: PlanRequest, draw: random.Random) -> Callable[[int], DevicePrices]:
    """Prices without sense; the bound must hold for any."""
    shares = [draw.random() + 1e-3 for _ in pool.counts]
    each = draw.choice([0.0, 0.3 * draw.random()])

    def prices(pipelines: int) -> DevicePrices:
        whole = float(np.dot(shares, pool.counts)) + each * pipelines
        unit = request.global_batch_size / whole
        return DevicePrices(0.0, np.array(shares) * unit, each * unit, np.empty(0))

    return prices


def check_bound(
    request: PlanRequest, profile: ProfileTable, sizes: list[int], plans: Iterable[Plan], draw: random.Random
) -> tuple[float, float]:
    """No plan is below the bound, at the solver's prices or any others; (the solver's price, the best seen)."""
    solver = ExactSolver(request, profile=profile, micro_batch_sizes=sizes)
    solution = solver.solve()
    best = min((price_plan(plan, profile=profile).iteration_seconds for plan in plans), default=np.inf)
    if solution is None:
        assert best == np.inf
        return np.inf, np.inf
    pool, known = every_pool(request.cluster, request.model), min(best, solution.seconds)
    # With room above the best plan, so that a bound that is too high shows.
    for prices in (solution.prices_for(pool), random_prices(pool, request, draw)):
        assert strategy.bound_seconds(solver, pool, prices, upper=2 * known) <= known * (1 + 1e-9)
    return solution.seconds, known


@pytest.mark.parametrize("seed", range(10))
def test_no_plan_of_a_tiny_cluster_is_below_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    batch, layers, sizes = draw.choice([2, 3, 4]), draw.choice([1, 2, 3]), draw.choice([[1, 2], [1, 3], [2]])
    options = {"recompute": False, "zero_stages": (0,)}
    request = make_request(seed, draw.choice(TINY), batch=batch, layers=layers, **options)
    profile = RandomProfile(seed, request.model, spread=draw.choice([1.0, 2.0, 4.0]))
    sizes = [size for size in sizes if size <= batch]
    plans = every_plan(request, sizes)
    seconds, best = check_bound(request, profile, sizes, plans, draw)
    assert seconds <= best * 1.25


@pytest.mark.slow
@settings(max_examples=60, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 10**6),
    nodes=st.sampled_from(SMALL),
    batch=st.sampled_from([2, 3, 6, 8, 16, 40]),
    layers=st.integers(1, 4),
    sizes=st.sampled_from([[1, 2], [2, 4], [1, 3]]),
    options=st.sampled_from(OPTIONS),
)
def test_no_random_plan_is_below_the_bound(
    seed: int,
    nodes: list[dict[str, int]],
    batch: int,
    layers: int,
    sizes: list[int],
    options: dict[str, Any],
) -> None:
    draw = random.Random(seed)
    request = make_request(seed, nodes, batch=batch, layers=layers, **options)
    profile = RandomProfile(seed, request.model, spread=draw.choice([1.0, 2.0, 4.0]))
    sizes = [size for size in sizes if size <= batch]
    plans = random_plans(request, draw, sizes=sizes, tries=300)
    check_bound(request, profile, sizes, plans, draw)


@pytest.mark.parametrize("seed", range(4))
def test_a_few_random_plans_are_not_below_the_bound(seed: int) -> None:
    draw = random.Random(seed)
    request = make_request(seed, SMALL[seed], batch=8, layers=3, **OPTIONS[seed])
    profile = RandomProfile(seed, request.model, spread=2.0)
    check_bound(request, profile, [1, 2], random_plans(request, draw, sizes=[1, 2], tries=150), draw)


@pytest.mark.parametrize("nodes", [[{"fast": 4}], [{"fast": 1}] * 3 + [{"slow": 1}]])
@pytest.mark.parametrize("options", [{"zero_stages": (0,)}, {}])
def test_collectives_measured_faster_than_the_links_are_below_no_bound(
    nodes: list[dict[str, int]], options: dict[str, Any]
) -> None:
    """A thousand times as fast as slow links: what gradients take on those would bound too high."""
    request = make_request(1, nodes, batch=8, layers=2, recompute=False, **options)
    slow = Links(intra_node=Link(bandwidth=1e8, latency=1e-6), inter_node=Link(bandwidth=1e8, latency=1e-6))
    cluster = request.cluster.model_copy(update={"links": slow})
    request = request.model_copy(update={"cluster": cluster})
    scopes: tuple[Scope, ...] = ("intra_node", "inter_node")
    rates = {(members, scope): 1e-11 for members in (2, 3, 4) for scope in scopes}
    profile = RandomProfile(1, request.model, spread=2.0, all_reduce_rates=rates)
    plan = ExactSolver(request, profile=profile, micro_batch_sizes=[1, 2]).solve()
    assert plan is not None
    best = Oracle(request, profile, sizes=[1, 2]).best_below(plan.seconds).plan or plan.plan
    check_bound(request, profile, [1, 2], [best], random.Random(1))


def test_a_tightened_bound_holds_for_its_own_kind_of_plans() -> None:
    """Switches that are exact: no mixed stage, no more ways, one ZeRO stage. Plans without them are above."""
    request = make_request(2, SMALL[0], batch=6, layers=2, recompute=False, zero_stages=(0, 1))
    profile = RandomProfile(2, request.model, spread=2.0)
    solver = ExactSolver(request, profile=profile, micro_batch_sizes=[1, 2])
    solution = solver.solve()
    assert solution is not None
    pool = every_pool(request.cluster, request.model)
    plans = random_plans(request, random.Random(2), sizes=[1, 2], tries=300)
    alike = [plan for plan in plans if plan.zero_stage == 0 and not _mixes_types(plan)]
    best = min(price_plan(plan, profile=profile).iteration_seconds for plan in alike)
    bounds = [
        strategy.bound_seconds(solver, pool, solution.prices_for(pool), upper=2 * best, tightened=tightened)
        for tightened in (ALL_RELAXED, Tightened(one_type=True, most_ways=1.0, zero_stage=0))
    ]
    assert bounds[0] <= bounds[1] * (1 + 3e-3) and bounds[1] <= best * (1 + 1e-9)


def _mixes_types(plan: Plan) -> bool:
    types = plan.cluster.device_by_id
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    return any(len({types[name].type for name in stage.devices}) > 1 for stage in stages)


@pytest.mark.parametrize("seed", range(6))
def test_the_strategy_is_between_its_bound_and_every_plan(seed: int) -> None:
    """And its own figure is what the plan's parts add up to, never below a replay of it."""
    draw = random.Random(seed)
    request = make_request(seed, draw.choice(TINY), batch=3, layers=2, zero_stages=(0,), recompute=False)
    profile = RandomProfile(seed, request.model, spread=3.0)
    try:
        plan = strategy.plan(request, profile=profile, progress=lambda _: None)
    except UserError:
        assert not list(every_plan(request, [1, 2, 3]))
        return
    assert plan.predicted is not None and plan.predicted.lower_bound_seconds is not None
    seconds = plan.predicted.iteration_seconds
    prices = [price_plan(p, profile=profile).iteration_seconds for p in every_plan(request, [1, 2, 3])]
    assert plan.predicted.lower_bound_seconds <= min(prices) * (1 + 1e-9)
    assert min(prices) * (1 - 1e-9) <= seconds <= min(prices) * 1.03
    assert seconds == pytest.approx(price_plan(plan, profile=profile).iteration_seconds)
    replay = simulate(plan, profile=profile, events=False).iteration_seconds
    assert replay <= seconds * (1 + 1e-9)
