import pytest

from planner.cluster import from_short_form
from planner.cost.price import with_prediction
from planner.describe import coarse_words, describe, search_words
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
