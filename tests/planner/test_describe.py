from typing import Any

import pytest

from planner.cluster import from_short_form
from planner.cost.price import with_prediction
from planner.describe import (
    coarse_words,
    describe,
    gap_words,
    idle_words,
    recompute_legend,
    search_words,
    sequence_parallel_words,
    used_words,
    zero_words,
)
from planner.operators import layer_operators
from planner.plan import Plan
from tests.engine.law_plans import by_position
from tests.plans import make_model, make_plan


def test_alike_stages_and_pipelines_share_a_row() -> None:
    cluster = from_short_form("1x8:A100,1x1:RTX3090")
    stages = [(1, 1, 1), (1, 1, 1), (1, 1, 2)]
    plan = with_prediction(
        make_plan(make_model(), [stages, stages, [(1, 1, 4)]], cluster=cluster, samples=[6, 6, 3])
    )
    shown = describe(plan)
    assert [(rows.name, rows.samples) for rows in shown.pipelines] == [("Pipe-0 to 1", 6), ("Pipe-2", 3)]
    first = shown.pipelines[0].stages
    assert [(row.stages, row.layers, row.tp_dp, row.recompute) for row in first] == [
        ("0,1", "1", "1/1", "none"),
        ("2", "2", "1/1", "none"),
    ]
    assert plan.predicted is not None
    stage = plan.predicted.pipelines[0].stages[2]
    assert first[1].forward_seconds == stage.forward_seconds
    assert first[1].memory_bytes == stage.device_bytes
    assert shown.idle_devices == ("node0/7", "node1/0")


def test_only_neighbours_are_named_as_a_range() -> None:
    stages = [(1, 1, 1)] * 4
    plan = with_prediction(
        make_plan(
            make_model(),
            [stages, [(1, 1, 4)], stages],
            cluster=from_short_form("1x9:A100"),
            samples=[6, 3, 6],
        )
    )
    shown = describe(plan).pipelines
    assert [rows.name for rows in shown] == ["Pipe-0,2", "Pipe-1"]
    assert [row.stages for row in shown[0].stages] == ["0-3"]


def test_balance_compares_ends_of_work_before_synchronisation() -> None:
    cluster = from_short_form("2x1:A100")
    plan = with_prediction(
        make_plan(make_model(), [[(1, 1, 4)], [(1, 1, 4)]], cluster=cluster, samples=[9, 3])
    )
    balance = describe(plan).balance
    assert balance.pipeline_spread == pytest.approx(2 / 3)
    assert balance.stage_spread == 0
    assert plan.predicted is not None
    ends = 9 * (
        plan.predicted.pipelines[0].stages[0].forward_seconds
        + plan.predicted.pipelines[0].stages[0].backward_seconds
    )
    assert balance.sync_seconds == pytest.approx(
        plan.predicted.iteration_seconds - plan.predicted.optimizer_seconds - ends
    )


def test_mixed_stages_name_both_types() -> None:
    cluster = from_short_form("1x1:A100+1:RTX3090")
    plan = with_prediction(make_plan(make_model(), [[(1, 2, 4)]], cluster=cluster))
    assert describe(plan).pipelines[0].stages[0].devices == "A100 x 1 + RTX3090 x 1"


def test_a_plan_that_was_not_searched_has_no_search_words() -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)]])
    assert search_words(plan) == "" and coarse_words(plan) == ""


def recomputing(plan: Plan, recompute: dict[str, int], **changes: Any) -> Plan:
    """The plan with its first stage recomputing."""
    data = plan.model_dump(mode="json")
    data["pipelines"][0]["stages"][0]["recompute"] = recompute
    return with_prediction(Plan.model_validate(data | changes))


def test_recomputed_operators_are_told_as_in_the_papers_table_3() -> None:
    plan = make_plan(make_model(), [[(1, 1, 2), (1, 1, 2)]])
    some = recomputing(plan, {"softmax": 2, "qkv": 1, "attention_dropout": 2, "scores": 0})
    words = [row.recompute for row in describe(some).pipelines[0].stages]
    assert words == ["1 Qkv, 2 AS, 2 AD", "none"]
    assert recompute_legend(some) == "Recomputed in backward: Qkv qkv, AS softmax, AD attention dropout."
    everything = recomputing(plan, dict.fromkeys(layer_operators(plan.model), 2))
    assert describe(everything).pipelines[0].stages[0].recompute == "all"
    assert recompute_legend(everything) == "" == recompute_legend(plan)


def test_zero_is_told_in_a_line() -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)], [(1, 1, 4)]], cluster=from_short_form("2x1:A100"))
    assert zero_words(plan) == ""
    one = recomputing(plan, {}, zero_stage=1)
    assert zero_words(one).startswith("ZeRO 1: optimizer state sharded over the devices of all pipelines")
    two = recomputing(plan, {}, zero_stage=2, zero_scope="pipeline")
    assert (
        "optimizer state and gradients inside a stage sharded over the devices of a pipeline"
        in zero_words(two)
    )


def test_idle_devices_are_counted_and_named_where_they_are_few() -> None:
    cluster = from_short_form("1x4:A100,1x2:RTX3090")
    plan = with_prediction(make_plan(make_model(), [[(1, 1, 4)]], cluster=cluster))
    assert idle_words(plan, most=5) == "3 x A100, 2 x RTX3090 (node0/1, node0/2, node0/3, node1/0, node1/1)"
    assert idle_words(plan, most=2) == "3 x A100, 2 x RTX3090 (node0/1 ... node1/1)"
    assert used_words(plan) == "1 x A100"


@pytest.mark.parametrize(
    ("search", "words"),
    [
        (
            {"seconds": 1, "sketches_seen": 9, "sketches_settled": 5, "plans_priced": 2},
            "9 configurations seen, 5 that fit",
        ),
        (
            {"seconds": 1, "sub_clusters": 7, "sub_clusters_planned": 3, "sub_clusters_ruled_out": 2},
            "1.00 s: 3 of 7 parts of the cluster planned, 2 ruled out",
        ),
        (
            {
                "seconds": 0.5,
                "bound_seconds": 0.25,
                "chains": 4,
                "columns": 3,
                "columns_made": 2,
                "candidates": 1,
                "found_by": "metis",
            },
            "2 of them worked out, 1 plans priced; bound in 0.25 s. Found by metis.",
        ),
        ({"seconds": 1}, ""),
    ],
)
def test_what_the_search_did_is_told(search: dict[str, object], words: str) -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)]]).model_copy(update={"search": search})
    assert words in search_words(plan) and (words or not search_words(plan))


def test_the_gap_is_of_the_cost_where_that_was_the_objective() -> None:
    plan = with_prediction(make_plan(make_model(), [[(1, 1, 4)]]))
    assert plan.predicted is not None and gap_words(plan) == ""
    bounds = {"cost_per_million_tokens": 1.1, "lower_bound_cost_per_million_tokens": 1.0}
    plan = plan.model_copy(update={"predicted": plan.predicted.model_copy(update=bounds)})
    assert "costs less than 1 per million tokens: this one costs at most 10.0% more" in gap_words(plan)


def test_stages_cut_by_position_say_so() -> None:
    plan = make_plan(make_model(), [[(2, 1, 2), (1, 2, 2)]])
    assert sequence_parallel_words(plan) == ""
    plan = with_prediction(by_position(plan))
    assert [row.tp_dp for row in describe(plan).pipelines[0].stages] == ["2/1 SP", "1/2"]
    assert sequence_parallel_words(plan).startswith("SP: norms, residuals and dropout")
