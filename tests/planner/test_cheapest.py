"""The objective cost: cheapest of all parts of a cluster, never below its bound, priced as any plan."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import Cluster, resolve_cluster
from planner.cost.price import check_memory, price_plan
from planner.errors import UserError
from planner.model_spec import resolve_model
from planner.plan import Plan
from planner.prices import cost_per_million_tokens, tokens_per_second, with_prices
from planner.request import PlanRequest
from planner.search import find_plan, find_plans
from planner.search.sub_clusters import SubCluster, sub_counts
from tests.planner.baselines.jobs import draw_request

NODES: tuple[tuple[dict[str, int], ...], ...] = (
    ({"fast": 1}, {"slow": 2}),
    ({"fast": 1, "slow": 1}, {"slow": 1}),
    ({"fast": 1}, {"slow": 1}, {"odd": 1}),
)
PRICES = st.lists(st.sampled_from([0.5, 1.0, 2.0, 5.0]), min_size=3, max_size=3)


def priced_request(
    seed: int, nodes: tuple[dict[str, int], ...], prices: list[float], **changes: Any
) -> PlanRequest:
    request = draw_request(seed, nodes, strategy="metis")
    cluster = with_prices(request.cluster, dict(zip(sorted(request.cluster.counts), prices, strict=False)))
    fields = {name: getattr(request, name) for name in PlanRequest.model_fields}
    return PlanRequest(**(fields | {"cluster": cluster, "objective": "cost"} | changes))


def cost_of(plan: Plan) -> float:
    cost = cost_per_million_tokens(plan)
    assert cost is not None
    return cost


def plans_of_all_parts(request: PlanRequest) -> list[Plan]:
    """The strategy's plan for every selection of named devices: shares no code with the search."""
    found = []
    devices = request.cluster.devices
    for size in range(1, len(devices) + 1):
        for chosen in itertools.combinations(devices, size):
            nodes: dict[str, dict[str, int]] = {}
            for device in chosen:
                held = nodes.setdefault(device.node, {})
                held[device.type] = held.get(device.type, 0) + 1
            data = request.cluster.model_dump() | {
                "nodes": [
                    {"name": name, "devices": [{"type": t, "count": n} for t, n in held.items()]}
                    for name, held in nodes.items()
                ]
            }
            part = request.model_copy(
                update={"cluster": resolve_cluster(data), "objective": "time", "throughput_floor": None}
            )
            try:
                found.append(find_plan(part))
            except UserError as error:
                assert "does not fit" in str(error)
    return found


@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.sampled_from(NODES),
    prices=PRICES,
    share=st.sampled_from([0, 0.5, 0.9]),
)
def test_it_is_the_cheapest_of_all_parts_and_keeps_the_floor(
    seed: int, nodes: tuple[dict[str, int], ...], prices: list[float], share: float
) -> None:
    request = priced_request(seed, nodes, prices)
    every = plans_of_all_parts(request)
    if not every:
        with pytest.raises(UserError, match="does not fit"):
            find_plan(request)
        return
    floor = share * max(map(tokens_per_second, every)) or None
    enough = [plan for plan in every if floor is None or tokens_per_second(plan) >= floor]
    plan = find_plan(request.model_copy(update={"throughput_floor": floor}))
    assert cost_of(plan) <= min(map(cost_of, enough)) * (1 + 1e-9)
    assert floor is None or tokens_per_second(plan) >= floor * (1 - 1e-9)
    predicted = plan.predicted
    assert predicted is not None and predicted.lower_bound_cost_per_million_tokens is not None
    assert predicted.lower_bound_cost_per_million_tokens <= cost_of(plan) * (1 + 1e-9)
    assert predicted.cost_per_million_tokens == pytest.approx(cost_of(plan))


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), nodes=st.sampled_from(NODES), prices=PRICES)
def test_the_plan_is_of_the_whole_cluster_and_priced_there(
    seed: int, nodes: tuple[dict[str, int], ...], prices: list[float]
) -> None:
    request = priced_request(seed, nodes, prices)
    try:
        plan = find_plan(request)
    except UserError:
        return
    assert plan.cluster == request.cluster and plan.objective == "cost"
    assert Plan.model_validate(plan.model_dump()) == plan
    check_memory(plan)
    assert plan.predicted is not None
    assert plan.predicted.iteration_seconds == pytest.approx(price_plan(plan).iteration_seconds, rel=1e-12)
    used = sum(len(pipeline.devices) for pipeline in plan.pipelines)
    assert used + len(plan.idle_devices) == len(request.cluster.devices)


def test_dear_devices_stay_idle_until_the_floor_needs_them() -> None:
    request = PlanRequest(
        model=resolve_model("gpt3-350m"),
        cluster=with_prices(resolve_cluster("1x1:A100,1x2:RTX3090"), {"A100": 100.0, "RTX3090": 1.0}),
        global_batch_size=16,
        sequence_length=1024,
        strategy="metis",
        objective="cost",
    )
    slow = find_plan(request)
    idle = [slow.cluster.device_by_id[device].type for device in slow.idle_devices]
    assert "A100" in idle and idle.count("RTX3090") < 2
    floor = 1.01 * tokens_per_second(slow)
    quick = find_plan(request.model_copy(update={"throughput_floor": floor}))
    assert tokens_per_second(quick) >= floor and cost_of(quick) > cost_of(slow)


def test_a_floor_that_cannot_be_met_is_told_with_the_most_that_can() -> None:
    request = priced_request(3, ({"fast": 1}, {"slow": 2}), [2.0, 1.0])
    most = max(map(tokens_per_second, plans_of_all_parts(request)))
    with pytest.raises(UserError) as error:
        find_plan(request.model_copy(update={"throughput_floor": most * 1.01}))
    told = str(error.value)
    assert "cannot be met" in told and f"{most:.6g} tokens/s" in told and "\n" not in told


def test_the_best_few_are_ranked_by_cost() -> None:
    request = priced_request(3, ({"fast": 1}, {"slow": 2}), [2.0, 1.0])
    costs = [cost_of(plan) for plan in find_plans(request, most=4)]
    assert len(costs) > 1 and costs == sorted(costs)


def test_parts_of_a_large_cluster_are_whole_nodes_and_few() -> None:
    counts = sub_counts(resolve_cluster("64x8:910B2,64x8:910B4"))
    assert counts[0] == (512, 512) and len(counts) < 500
    assert all(n % 8 == 0 or n in (1, 2, 4) for vector in counts for n in vector)


def test_a_part_of_a_mixed_node_keeps_its_devices_names() -> None:
    whole = resolve_cluster("1x2:A100+2:RTX3090,1x3:RTX3090")
    part = SubCluster(whole, (1, 4))
    assert part.cluster.counts == {"A100": 1, "RTX3090": 4}
    assert [node.name for node in part.cluster.nodes] == ["node0", "node1"]
    request = PlanRequest(
        model=draw_request(0, ({"fast": 1},), strategy="eth").model,
        cluster=part.cluster,
        global_batch_size=8,
        sequence_length=64,
        strategy="metis",
    )
    plan = find_plan(request)
    restored = part.restored(plan)
    assert Plan.model_validate(restored.model_dump()) == restored
    assert set(restored.idle_devices) == {"node0/1", "node0/3"}
    for pipeline, other in zip(plan.pipelines, restored.pipelines, strict=True):
        types = [
            [p.cluster.device_by_id[d].type for d in q.devices]
            for p, q in ((plan, pipeline), (restored, other))
        ]
        assert types[0] == types[1]


def test_the_same_request_gives_the_same_plan() -> None:
    request = priced_request(5, ({"fast": 2}, {"slow": 2}), [2.0, 1.0])
    assert find_plan(request).fingerprint() == find_plan(request).fingerprint()


def test_prices_are_needed() -> None:
    cluster: Cluster = resolve_cluster("1x2:A100,1x1:RTX3090")
    request = draw_request(0, ({"fast": 1},), strategy="eth")
    fields = {name: getattr(request, name) for name in PlanRequest.model_fields}
    with pytest.raises(
        ValueError, match="A100, RTX3090 have no price; give --price A100=PRICE --price RTX3090=PRICE"
    ):
        PlanRequest(**(fields | {"cluster": cluster, "objective": "cost"}))
    with pytest.raises(ValueError, match="RTX3090 has no price"):
        PlanRequest(**(fields | {"cluster": with_prices(cluster, {"A100": 1.0}), "objective": "cost"}))


def test_the_plan_is_offered_as_soon_as_it_is_known() -> None:
    """So that a search that is stopped has it."""
    request = priced_request(3, ({"fast": 1}, {"slow": 2}), [2.0, 1.0])
    offered: list[Plan] = []
    best = find_plan(request, offer=offered.append)
    assert all(plan.cluster == request.cluster for plan in offered)
    assert min(map(cost_of, offered)) == pytest.approx(cost_of(best))
