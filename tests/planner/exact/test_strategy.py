"""Laws of the exact strategy: determinism, idle devices, what recompute and ZeRO are worth, stopping early."""

from __future__ import annotations

import random
from typing import Any

import pytest

from planner.cluster import Cluster, resolve_cluster
from planner.cost.price import check_memory, price_plan
from planner.model_spec import resolve_model
from planner.plan import Plan
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.control import SearchControl, SearchOptions
from planner.search.exact import strategy
from planner.search.exact.solve import ExactSolver
from tests.planner.exact.jobs import make_request
from tests.planner.exact.random_profile import RandomProfile


def request_for(cluster: Cluster, **fields: Any) -> PlanRequest:
    base: dict[str, Any] = {
        "model": resolve_model("gpt3-1.3b"),
        "cluster": cluster,
        "global_batch_size": 64,
        "sequence_length": 2048,
        "bound": False,
    }
    return PlanRequest(**(base | fields))


def planned(request: PlanRequest) -> Plan:
    """The solver's plan with two micro-batch sizes, and its bound if the request wants one."""
    solver = ExactSolver(request, micro_batch_sizes=[1, 2])
    solution = solver.solve()
    assert solution is not None
    if not request.bound:
        return solution.plan
    predicted = strategy.bound_of(solver, solution, solution.plan)
    return solution.plan.model_copy(update={"predicted": predicted})


def seconds_of(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.iteration_seconds


def shape(plan: Plan) -> list[Any]:
    return [
        (pipeline.micro_batch_size, pipeline.samples, stage.tp, stage.rows, stage.layers, stage.recompute)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    ]


def permuted(cluster: Cluster, draw: random.Random) -> Cluster:
    nodes = list(cluster.nodes)
    draw.shuffle(nodes)
    return cluster.model_copy(update={"nodes": tuple(nodes)})


@pytest.mark.parametrize(
    "nodes",
    [
        [{"fast": 4}, {"slow": 2}, {"fast": 3}],
        [{"slow": 2}, {"fast": 3}, {"slow": 2, "fast": 1}],
    ],
)
def test_the_order_of_nodes_changes_names_alone(nodes: list[dict[str, int]]) -> None:
    request = make_request(3, nodes, batch=12, layers=4, bound=False)
    first, again = planned(request), planned(make_request(3, nodes, batch=12, layers=4, bound=False))
    assert first.pipelines == again.pipelines
    cluster = Cluster.model_validate(permuted(request.cluster, random.Random(1)).model_dump())
    assert [node.name for node in cluster.nodes] != [node.name for node in request.cluster.nodes]
    other = planned(request.model_copy(update={"cluster": cluster}))
    assert shape(first) == shape(other)
    assert seconds_of(first) == pytest.approx(seconds_of(other), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_more_devices_never_make_it_slower(seed: int) -> None:
    """On the same profile and links; what is not worth its work stays idle."""
    draw = random.Random(seed)
    fewer: list[dict[str, int]] = [{"fast": 2}, {"slow": 1}]
    more: list[dict[str, int]] = [{"fast": 2}, {"slow": draw.choice([2, 3])}]
    seconds = []
    for nodes in (fewer, more):
        request = make_request(seed, nodes, batch=6, layers=2, bound=False)
        profile = RandomProfile(seed, request.model, spread=4.0)
        seconds.append(seconds_of(strategy.plan(request, profile=profile, progress=lambda _: None)))
    assert seconds[1] <= seconds[0] * (1 + 1e-9)


def test_pipelines_are_as_deep_as_memory_wants() -> None:
    """34 layers of which a device holds just one."""
    types = {
        "one": {
            "backend": "cpu",
            "peak_tflops": {"fp32": 1.0},
            "memory_bytes": 20 << 20,
            "memory_bandwidth": 1e11,
        }
    }
    nodes = [{"devices": [{"type": "one", "count": 1}]} for _ in range(38)]
    request = make_request(1, [{"fast": 1}], batch=64, layers=34, bound=False)
    cluster = resolve_cluster({"device_types": types, "nodes": nodes})
    plan = planned(request.model_copy(update={"cluster": cluster}))
    check_memory(plan)
    assert [len(pipeline.stages) for pipeline in plan.pipelines] == [35]


def test_a_device_that_only_slows_the_job_down_stays_idle() -> None:
    nodes: list[dict[str, int]] = [{"fast": 2}, {"slow": 1}]
    request = make_request(0, nodes, batch=2, layers=2, bound=False)
    slow = request.cluster.device_types["slow"].model_copy(
        update={"peak_tflops": {"fp32": 1e-3}, "memory_bandwidth": 1e6}
    )
    types = request.cluster.device_types | {"slow": slow}
    cluster = request.cluster.model_copy(update={"device_types": types})
    plan = planned(request.model_copy(update={"cluster": Cluster.model_validate(cluster.model_dump())}))
    assert [plan.cluster.device_by_id[name].type for name in plan.idle_devices] == ["slow"]


def test_recompute_and_zero_are_used_where_memory_binds() -> None:
    """And what is recomputed is exactly what makes each stage fit."""
    cluster = resolve_cluster("1x4:910B2,1x4:910B4")
    plain = planned(request_for(cluster, recompute=False, zero_stages=(0,)))
    free = planned(request_for(cluster))
    assert seconds_of(free) < seconds_of(plain) * (1 - 1e-3)
    assert free.zero_stage > 0
    assert plain.zero_stage == 0 and not any(s.recompute for p in plain.pipelines for s in p.stages)
    model = resolve_model("gpt3-2.6b")
    larger = planned(request_for(resolve_cluster("1x2:910B4"), zero_stages=(0,), model=model))
    assert any(stage.recompute for pipeline in larger.pipelines for stage in pipeline.stages)
    for plan in (plain, free, larger):
        check_memory(plan)
        assert Plan.model_validate(plan.model_dump())
        assert price_plan(plan).iteration_seconds == pytest.approx(seconds_of(plan))


@pytest.mark.parametrize(
    "text",
    [
        "1x2:910B2,1x2:910B3,1x2:910B4,1x2:A100-40",
        "1x3:910B2,1x5:910B4",
    ],
)
def test_four_types_and_nodes_of_unlike_sizes(text: str) -> None:
    plan = planned(request_for(resolve_cluster(text), bound=True))
    check_memory(plan)
    assert plan.predicted is not None and plan.predicted.lower_bound_seconds is not None
    assert plan.predicted.lower_bound_seconds <= seconds_of(plan) <= plan.predicted.lower_bound_seconds * 1.15


def test_a_search_whose_time_is_up_ends_with_the_plan_that_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time is up as soon as there is one: nothing more is searched, and no bound is worked out."""
    request = request_for(resolve_cluster("1x2:910B2,1x2:910B4"), bound=True)
    offered: list[Plan] = []
    control = SearchControl(SearchOptions(time_budget=1e9))
    monkeypatch.setattr(control, "should_stop", lambda: bool(offered) and _out_of_time(control))
    stopped = find_plan(request, offer=offered.append, control=control)
    assert len(offered) == 1 and shape(stopped) == shape(offered[0])
    assert stopped.search is not None and stopped.search["stopped"] == "time_budget"
    assert stopped.predicted is not None and stopped.predicted.lower_bound_seconds is None
    check_memory(stopped)
    assert seconds_of(planned(request)) <= seconds_of(stopped)


def _out_of_time(control: SearchControl) -> bool:
    control.stopped = "time_budget"
    return True


@pytest.mark.parametrize("bounding", [False, True])
def test_the_solver_tells_often_what_it_does(bounding: bool) -> None:
    """Since it can be stopped at no other moment: between sizes, prices, pipelines, plans and cells."""
    request = request_for(resolve_cluster("1x2:910B2,1x2:910B4"))
    told: list[str] = []
    solver = ExactSolver(request, micro_batch_sizes=[1, 2], progress=told.append)
    solution = solver.solve()
    assert solution is not None
    if bounding:
        told.clear()
        solver.tell("bounding")
        strategy.bound_of(solver, solution, solution.plan)
    assert len(told) > 20 and len(set(told)) < 10
