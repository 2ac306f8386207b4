"""The search for a plan: properties of every plan, and the best price of plain enumeration."""

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.cluster import Cluster, resolve_cluster
from planner.cost.price import check_memory, price_plan
from planner.errors import UserError
from planner.model_spec import ModelSpec
from planner.plan import Dtypes, Plan, PlanEmulation
from planner.request import PlanRequest
from planner.search import find_plan
from tests.planner.brute_force import best_price

MODEL = ModelSpec(name="m", layers=3, hidden_size=256, heads=4, vocab_size=500, max_sequence_length=64)
GIB = 2**30


def toy(tflops: float, memory_gib: float) -> dict[str, Any]:
    return {
        "backend": "cpu",
        "peak_tflops": {"fp32": tflops, "bf16": tflops},
        "memory_bytes": int(memory_gib * GIB),
        "memory_bandwidth": 1e12 * tflops / 10,
    }


def toy_cluster(nodes: list[dict[str, int]], **changes: Any) -> Cluster:
    """Nodes of devices of the types `fast` (twice as fast) and `slow`."""
    data: dict[str, Any] = {
        "device_types": {"fast": toy(2, 1), "slow": toy(1, 1)},
        "nodes": [{"devices": [{"type": t, "count": n} for t, n in node.items()]} for node in nodes],
    }
    return resolve_cluster(data | changes)


def request_for(cluster: Cluster, **changes: Any) -> PlanRequest:
    fields: dict[str, Any] = {
        "model": MODEL,
        "cluster": cluster,
        "global_batch_size": 4,
        "sequence_length": 64,
        "dtypes": Dtypes(param="fp32"),
        # What plain enumeration has.
        "recompute": False,
        "zero_stages": (0,),
    }
    return PlanRequest(**(fields | changes))


def random_request(seed: int, nodes: list[dict[str, int]], batch: int, layers: int = 3) -> PlanRequest:
    """Random speeds, memories and links: what binds differs from seed to seed."""
    draw = random.Random(seed)
    types = {
        name: toy(draw.choice([0.5, 1, 2, 3]), draw.choice([0.03, 0.05, 1])) for name in ("fast", "slow")
    }
    links = {
        "intra_node": {"bandwidth": 10 ** draw.uniform(8, 11), "latency": 10 ** draw.uniform(-6, -4)},
        "inter_node": {"bandwidth": 10 ** draw.uniform(7, 10), "latency": 10 ** draw.uniform(-6, -4)},
    }
    return request_for(
        toy_cluster(nodes, device_types=types, links=links),
        global_batch_size=batch,
        model=MODEL.model_copy(update={"layers": layers}),
    )


TINY = [
    [{"fast": 2}, {"slow": 1}],
    [{"fast": 1, "slow": 1}],
    [{"fast": 1}, {"slow": 1}, {"slow": 1}],
    [{"fast": 3}],
]


@pytest.mark.parametrize("nodes", TINY)
@pytest.mark.parametrize("seed", range(4))
def test_no_plan_of_plain_enumeration_is_better(nodes: list[dict[str, int]], seed: int) -> None:
    # The enumeration has no stages that cut activations by position, which can be quicker.
    request = random_request(seed, nodes, batch=3, layers=2).model_copy(update={"sequence_parallel": False})
    best = best_price(request, micro_batch_sizes=[1, 2, 3])
    if best == float("inf"):
        with pytest.raises(UserError, match="does not fit"):
            find_plan(request)
        return
    plan = find_plan(request)
    assert plan.predicted is not None
    # The search prices gradient blocks last; by more than this its order of trials must not be off.
    assert plan.predicted.iteration_seconds <= best * 1.01
    assert plan.predicted.iteration_seconds >= best * (1 - 1e-9)


def devices_of(plan: Plan) -> list[str]:
    return [device for pipeline in plan.pipelines for device in pipeline.devices]


@given(seed=st.integers(0, 10_000), batch=st.integers(1, 40), mixed=st.booleans())
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_every_plan_keeps_the_laws(seed: int, batch: int, mixed: bool) -> None:
    nodes = [{"fast": 2, "slow": 1}, {"slow": 1}] if mixed else [{"fast": 2}, {"slow": 2}]
    request = random_request(seed, nodes, batch)
    try:
        plan = find_plan(request)
    except UserError as error:
        assert "does not fit" in str(error)
        return
    assert Plan.model_validate_json(plan.model_dump_json()) == plan
    assert sum(pipeline.samples for pipeline in plan.pipelines) == batch
    assert sorted([*devices_of(plan), *plan.idle_devices]) == sorted(d.id for d in request.cluster.devices)
    check_memory(plan)
    assert plan.predicted is not None
    again = price_plan(plan)
    assert again.iteration_seconds == plan.predicted.iteration_seconds
    assert again.pipelines == plan.predicted.pipelines
    assert plan.predicted.simulated_seconds is not None
    assert plan.predicted.simulated_seconds <= again.iteration_seconds * (1 + 1e-9)
    for pipeline in again.pipelines:
        assert all(stage.device_bytes <= stage.memory_limit_bytes for stage in pipeline.stages)


@pytest.mark.parametrize("seed", range(5))
def test_more_samples_are_never_faster(seed: int) -> None:
    prices = []
    for batch in (2, 3, 5, 8, 12):
        plan = find_plan(random_request(seed, [{"fast": 1}, {"slow": 2}], batch))
        assert plan.predicted is not None
        prices.append(plan.predicted.iteration_seconds)
    assert prices == sorted(prices)


@pytest.mark.parametrize("seed", range(5))
def test_more_devices_are_never_slower(seed: int) -> None:
    few = find_plan(random_request(seed, [{"fast": 1}, {"slow": 1}], 6, layers=2))
    more = find_plan(random_request(seed, [{"fast": 1}, {"slow": 2}], 6, layers=2))
    assert few.predicted is not None and more.predicted is not None
    assert more.predicted.iteration_seconds <= few.predicted.iteration_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)]
)
def test_the_order_of_nodes_changes_nothing_in_the_price(seed: int) -> None:
    nodes = [{"fast": 2}, {"slow": 1}, {"fast": 1, "slow": 1}]
    prices = set()
    for order in (nodes, nodes[::-1], [nodes[1], nodes[2], nodes[0]]):
        plan = find_plan(random_request(seed, order, 8))
        assert plan.predicted is not None
        prices.add(plan.predicted.iteration_seconds)
    assert max(prices) == pytest.approx(min(prices), rel=1e-9)


def test_the_same_request_gives_the_same_plan() -> None:
    request = random_request(3, [{"fast": 2}, {"slow": 2}], 16)
    first, second = find_plan(request), find_plan(request)
    assert first.fingerprint() == second.fingerprint()
    assert first.search is not None and second.search is not None
    assert {k: v for k, v in first.search.items() if not k.endswith("seconds")} == {
        k: v for k, v in second.search.items() if not k.endswith("seconds")
    }


def test_slow_links_are_not_crossed_by_activations_and_the_faster_type_gets_more() -> None:
    """With links too slow for stages on unlike nodes, no pipeline hands over between them."""
    links = {"inter_node": {"bandwidth": "1 GB/s", "latency": "20 ms"}}
    request = request_for(toy_cluster([{"fast": 2}, {"slow": 2}], links=links), global_batch_size=4096)
    plan = find_plan(request)
    assert len(plan.pipelines) >= 2
    samples = {"fast": 0.0, "slow": 0.0}
    for pipeline in plan.pipelines:
        nodes = [{plan.cluster.device_by_id[d].node for d in stage.devices} for stage in pipeline.stages]
        assert len(nodes) == 1 or len(set.union(*nodes)) == 1
        for stage in pipeline.stages:
            for device, rows in zip(stage.devices[:: stage.tp], stage.rows, strict=True):
                share = rows / pipeline.micro_batch_size / len(pipeline.stages)
                samples[plan.cluster.device_by_id[device].type] += pipeline.samples * share
    assert samples["fast"] / samples["slow"] == pytest.approx(2, rel=0.1)


def test_a_device_that_would_only_slow_the_job_stays_idle_and_is_named() -> None:
    types = {"fast": toy(50, 1), "slow": toy(0.001, 1)}
    plan = find_plan(request_for(toy_cluster([{"fast": 1}, {"slow": 1}], device_types=types)))
    assert plan.idle_devices == ("node1/0",)


def test_equal_batches_are_equal() -> None:
    links = {"inter_node": {"bandwidth": "1 GB/s", "latency": "20 ms"}}
    request = request_for(
        toy_cluster([{"fast": 2}, {"slow": 2}], links=links), global_batch_size=64, equal_batches=True
    )
    samples = [pipeline.samples for pipeline in find_plan(request).pipelines]
    assert max(samples) - min(samples) <= 1


def test_fewer_samples_than_devices_means_fewer_pipelines() -> None:
    plan = find_plan(request_for(toy_cluster([{"fast": 4}]), global_batch_size=1))
    assert len(plan.pipelines) == 1 and plan.pipelines[0].samples == 1


def test_the_memory_scale_of_an_emulated_run_counts() -> None:
    cluster = toy_cluster([{"fast": 2}])
    small = find_plan(request_for(cluster))
    assert small.predicted is not None
    used = small.predicted.pipelines[0].stages[0].device_bytes
    scale = 1.1 * GIB / used
    with pytest.raises(UserError, match="does not fit"):
        find_plan(request_for(cluster, emulation=PlanEmulation(memory_scale=40 * scale)))
    large = find_plan(request_for(cluster, emulation=PlanEmulation(memory_scale=scale)))
    assert large.predicted is not None
    assert [p.stages for p in large.pipelines] != [p.stages for p in small.pipelines]


def test_the_excess_is_what_the_device_lacks() -> None:
    """The bytes too many, added to the memory, make the plan fit; a little less does not."""
    cluster = toy_cluster([{"fast": 1}], device_types={"fast": toy(1, 0.02)})
    with pytest.raises(UserError) as error:
        find_plan(request_for(cluster))
    excess = int(str(error.value).split("(")[2].split(" bytes")[0])
    limit = cluster.device_types["fast"].memory_bytes

    def with_memory(count: int) -> Cluster:
        return toy_cluster([{"fast": 1}], device_types={"fast": toy(1, 1) | {"memory_bytes": count}})

    find_plan(request_for(with_memory(limit + excess)))
    with pytest.raises(UserError):
        find_plan(request_for(with_memory(limit + excess - 4096)))


def test_an_unknown_strategy_names_the_known_ones() -> None:
    with pytest.raises(UserError, match="strategy = 'magic' is not known; use one of eth"):
        find_plan(request_for(toy_cluster([{"fast": 1}]), strategy="magic"))


def test_a_sequence_longer_than_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="sequence_length = 65 is more than the model's"):
        request_for(toy_cluster([{"fast": 1}]), sequence_length=65)


def test_the_record_names_profiles_and_search() -> None:
    plan = find_plan(request_for(toy_cluster([{"fast": 1}, {"slow": 1}])))
    assert [source.type for source in plan.profiles] == ["fast", "slow"]
    assert plan.search is not None
    assert plan.search["coarse"] is False and plan.search["stages_seen"] > 0


def test_a_larger_cluster_is_planned_by_the_exact_solver_with_a_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Every line, however soon it follows another.
    monkeypatch.setattr("planner.search.control._PROGRESS_SECONDS", 0.0)
    cluster = resolve_cluster("2x8:A100,2x8:RTX3090")
    request = request_for(cluster, global_batch_size=128)
    told: list[str] = []
    plan = find_plan(request, progress=told.append)
    assert plan.search is not None and plan.search["coarse"] is False and plan.search["columns"] > 0
    assert plan.predicted is not None and plan.predicted.lower_bound_seconds is not None
    assert 0 < plan.predicted.lower_bound_seconds <= plan.predicted.iteration_seconds
    assert plan.predicted.bound is not None and plan.predicted.bound.relaxations
    # Later lines come once a second at most.
    assert told[0] == "pricing devices and pipelines"
    check_memory(plan)
    assert sum(pipeline.samples for pipeline in plan.pipelines) == 128
