"""Where the seconds of a plan go: the terms add up, and each shows what was put into the plan."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.cluster import from_short_form
from planner.compare import Comparison, Row, compare
from planner.cost.price import with_prediction
from planner.errors import UserError
from planner.explain import Terms, causes, fullest_share, slowest_stage, terms_of
from planner.items import items_of
from planner.model_spec import resolve_model
from planner.plan import Plan
from planner.profile.analytic import MATMUL_EFFICIENCY, model_flops_per_sample
from planner.request import PlanRequest
from planner.search import find_plan, find_plans
from planner.search.shortlist import Shortlist, pipelines_key
from planner.why import against_lines, limit_lines, with_ample_memory
from tests.planner.baselines.jobs import CLUSTERS, PEERS, draw_request
from tests.plans import Degrees, make_model, make_plan

MODEL = make_model(layers=4)


def priced(pipelines: list[list[Degrees]], **fields: object) -> Plan:
    return with_prediction(make_plan(MODEL, pipelines, **fields))  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    nodes=st.sampled_from(CLUSTERS),
    strategy=st.sampled_from(PEERS),
    batch=st.sampled_from([2, 8, 13]),
)
def test_the_terms_and_the_items_add_up_to_the_iteration(
    seed: int, nodes: tuple[dict[str, int], ...], strategy: str, batch: int
) -> None:
    try:
        plan = find_plan(draw_request(seed, nodes, strategy=strategy, global_batch_size=batch))
    except UserError:
        return
    assert plan.predicted is not None
    seconds = plan.predicted.iteration_seconds
    terms = terms_of(plan)
    assert terms.total == pytest.approx(seconds, rel=1e-9)
    assert sum(causes(terms).values()) == pytest.approx(seconds, rel=1e-9)
    others = {name: value for name, value in vars(terms).items() if name not in ("ideal", "operators")}
    assert min(others.values()) > -1e-9 * seconds
    items = items_of(plan)
    assert items.iteration == pytest.approx(seconds, rel=1e-9)
    for pipeline, predicted in zip(items.pipelines, plan.predicted.pipelines, strict=True):
        for stage, other in zip(pipeline.stages, predicted.stages, strict=True):
            assert stage.period == pytest.approx(other.forward_seconds + other.backward_seconds)
            assert stage.memory_bytes == other.device_bytes and stage.fits


def test_a_lone_device_loses_nothing_but_the_optimizer() -> None:
    plan = priced([[(1, 1, 4)]], samples=[6], micro_batch_sizes=[2])
    terms = terms_of(plan)
    lost = {name: value for name, value in vars(terms).items() if abs(value) > 1e-9 * terms.ideal}
    assert set(lost) == {"ideal", "optimizer"}


def test_the_ideal_is_the_flops_over_what_the_devices_achieve() -> None:
    model = resolve_model("gpt3-13b")
    request = PlanRequest(
        model=model,
        cluster=from_short_form("1x2:A100,1x2:H100"),
        global_batch_size=64,
        sequence_length=2048,
        strategy="metis",
    )
    found = compare(request, strategies=["metis"])
    flops = 64 * model_flops_per_sample(model, 2048)
    achieved = 2 * found.achieved_flops["A100"] + 2 * found.achieved_flops["H100"]
    assert found.ideal_seconds == pytest.approx(flops / achieved)
    # Operators bound by memory keep a device below what its matrix units reach.
    assert 0.3 * 312e12 * MATMUL_EFFICIENCY < found.achieved_flops["A100"] < 312e12 * MATMUL_EFFICIENCY


def test_idle_devices_cost_their_part_of_the_cluster() -> None:
    plan = priced([[(1, 1, 4)]], cluster=from_short_form("1x4:910B2"), samples=[8])
    assert plan.predicted is not None
    assert terms_of(plan).idle_devices == pytest.approx(0.75 * plan.predicted.iteration_seconds)


def test_unequal_stages_and_pipelines_show_as_imbalance() -> None:
    even = terms_of(priced([[(1, 1, 2), (1, 1, 2)]], samples=[32], micro_batch_sizes=[1]))
    uneven = terms_of(priced([[(1, 1, 1), (1, 1, 3)]], samples=[32], micro_batch_sizes=[1]))
    assert uneven.stage_imbalance > even.stage_imbalance
    apart = terms_of(priced([[(1, 1, 4)], [(1, 1, 4)]], samples=[20, 4], micro_batch_sizes=[1, 1]))
    together = terms_of(priced([[(1, 1, 4)], [(1, 1, 4)]], samples=[12, 12], micro_batch_sizes=[1, 1]))
    assert abs(together.pipeline_imbalance) < 1e-12 < apart.pipeline_imbalance
    assert together.gradient_sync > 0


def test_tensor_parallelism_shows_as_its_collectives() -> None:
    assert terms_of(priced([[(2, 1, 4)]])).tensor_parallel > 0
    assert terms_of(priced([[(1, 2, 4)]])).tensor_parallel == 0


def test_the_difference_names_the_largest_term_first() -> None:
    a, b = Terms(ideal=2.0, bubbles=1.0, exchange=0.5), Terms(ideal=2.0, exchange=0.4)
    assert next(iter(a.minus(b).items())) == ("bubbles", 1.0)
    assert a.total == 3.5


def test_words_name_the_pace_and_the_fullest() -> None:
    plan = priced([[(1, 1, 1), (2, 1, 3)]], samples=[16], micro_batch_sizes=[2])
    assert slowest_stage(plan) == "stage 1 of pipeline 0 (910B2 x 2, tp 2, dp 1, 3 layers)"
    assert 0 < fullest_share(plan) < 1


def test_a_strategy_that_cannot_fit_has_its_reason_in_its_row() -> None:
    request = PlanRequest(
        model=resolve_model("gpt3-13b"),
        cluster=from_short_form("1x1:RTX3090"),
        global_batch_size=8,
        sequence_length=2048,
    )
    found = compare(request, strategies=["metis", "uniform"])
    assert [row.plan for row in found.rows] == [None, None] and found.reference is None
    assert all("does not fit" in row.reason for row in found.rows)
    assert found.ratio(found.rows[0]) is None


def test_an_unknown_strategy_is_refused_before_any_search() -> None:
    with pytest.raises(UserError, match="'magic' is not known; use some of eth, hexiscale, metis"):
        compare(draw_request(0, CLUSTERS[0], strategy="eth"), strategies=["metis", "magic"])


def test_memory_that_limits_is_told() -> None:
    """The fast type holds little, so it gets fewer layers than its speed is worth."""
    request = PlanRequest(
        model=resolve_model("gpt3-2.6b"),
        cluster=from_short_form("1x2:RTX4090,1x2:A6000"),
        global_batch_size=32,
        sequence_length=2048,
        strategy="metis",
    )
    plan = find_plan(request)
    ample = with_ample_memory(request)
    assert ample is not None and ample.predicted is not None and plan.predicted is not None
    assert ample.predicted.iteration_seconds < plan.predicted.iteration_seconds
    assert any(line.startswith("Memory limits it") for line in limit_lines(plan, ample=ample))
    assert any(line.startswith("Memory does not") for line in limit_lines(ample, ample=ample))
    assert len(limit_lines(plan, ample=None)) == 3


def test_against_tells_slower_equal_quicker_and_unfit() -> None:
    slow = priced([[(1, 1, 1), (1, 1, 3)]], samples=[32], micro_batch_sizes=[1])
    fast = priced([[(1, 1, 2), (1, 1, 2)]], samples=[32], micro_batch_sizes=[1])
    rows = comparison_of((Row("metis", slow, terms_of(slow)), Row("uniform", reason="does not fit")))
    lines = against_lines(fast, runners_up=[fast], comparison=rows)
    assert lines[0] == "Against the runner-up (1 x 2): equally quick."
    assert "times as long; it loses imbalance between stages" in lines[1]
    assert lines[2] == "Against uniform: does not fit"
    rows = comparison_of((Row("metis", fast, terms_of(fast)),))
    (line,) = against_lines(slow, runners_up=[], comparison=rows)
    assert "it is QUICKER; this plan loses imbalance between stages" in line


def comparison_of(rows: tuple[Row, ...]) -> Comparison:
    return Comparison(rows, ideal_seconds=1.0, achieved_flops={})


def test_the_shortlist_keeps_the_best_distinct_plans() -> None:
    plans = {
        "even": priced([[(1, 1, 2), (1, 1, 2)]], samples=[32], micro_batch_sizes=[1]),
        "even again": priced([[(1, 1, 2), (1, 1, 2)]], samples=[32], micro_batch_sizes=[1]),
        "uneven": priced([[(1, 1, 1), (1, 1, 3)]], samples=[32], micro_batch_sizes=[1]),
        "replicas": priced([[(1, 2, 4)]], samples=[32], micro_batch_sizes=[2]),
    }
    kept = Shortlist(2)
    for plan in plans.values():
        kept.offer(plan)
    keys = [pipelines_key(plan) for plan in kept.plans]
    assert len(set(keys)) == 2 and pipelines_key(plans["uneven"]) not in keys
    seconds = [plan.predicted.iteration_seconds for plan in kept.plans if plan.predicted]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("strategy", ["metis", "hexiscale"])
def test_the_best_few_plans_are_distinct_and_in_order(strategy: str) -> None:
    found = find_plans(draw_request(1, CLUSTERS[3], strategy=strategy), most=3)
    seconds = [plan.predicted.iteration_seconds for plan in found if plan.predicted]
    assert len(seconds) == 3 and seconds == sorted(seconds)
    assert len({pipelines_key(plan) for plan in found}) == 3
    assert all(plan.predicted and plan.predicted.simulated_seconds for plan in found)
