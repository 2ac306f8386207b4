"""Prices as people write them, and what devices cost."""

from __future__ import annotations

import pytest

from planner.cluster import from_short_form
from planner.cost.price import with_prediction
from planner.errors import UserError
from planner.prices import cost_per_million_tokens, parse_prices, price_per_hour, with_prices
from tests.plans import make_model, make_plan


def test_prices_are_read_one_by_one_or_together() -> None:
    assert parse_prices(["910B2=4.5", "910B4=2, A100=0"]) == {"910B2": 4.5, "910B4": 2.0, "A100": 0.0}
    assert parse_prices([]) == {}


@pytest.mark.parametrize(
    "text", ["910B2", "910B2=", "=3", "910B2=dear", "910B2=-1", "910B2=inf", "910B2=nan"]
)
def test_what_is_no_price_is_quoted(text: str) -> None:
    with pytest.raises(UserError, match="is not a device type's price an hour") as error:
        parse_prices([text])
    assert repr(text) in str(error.value)


def test_a_price_is_for_a_type_of_the_cluster_under_any_of_its_names() -> None:
    cluster = from_short_form("1x2:910B2")
    assert with_prices(cluster, {"Ascend910B2": 3.0}).device_types["910B2"].price_per_hour == 3.0
    with pytest.raises(UserError, match="the cluster has no A100; it has 910B2"):
        with_prices(cluster, {"A100": 3.0})


def test_only_devices_that_are_used_cost() -> None:
    cluster = with_prices(from_short_form("1x2:A100,1x1:RTX3090"), {"A100": 3.6})
    plan = with_prediction(make_plan(make_model(), [[(1, 1, 4)]], cluster=cluster, samples=[10]))
    assert plan.predicted is not None and len(plan.idle_devices) == 2
    # 3.6 an hour is 0.001 a second.
    tokens = 10 * plan.sequence_length
    expected = 0.001 * plan.predicted.iteration_seconds / tokens * 1e6
    assert price_per_hour(plan) == pytest.approx(3.6)
    assert cost_per_million_tokens(plan) == pytest.approx(expected)


def test_without_a_price_of_every_used_type_there_is_no_cost() -> None:
    plan = with_prediction(make_plan(make_model(), [[(1, 1, 4)]], cluster=from_short_form("1x1:A100")))
    assert price_per_hour(plan) is None and cost_per_million_tokens(plan) is None
