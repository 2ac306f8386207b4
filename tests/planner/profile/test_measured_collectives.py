"""Collectives by measured times where a profile has them, else by the links; and what the price says of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.catalogue import CATALOGUE
from planner.cluster import from_short_form
from planner.cost.price import price_plan
from planner.cost.stages import StageCost
from planner.gradient_calls import gradient_layout
from planner.model_spec import PRESETS
from planner.plan import CollectiveSources, Plan
from planner.profile.file import DeviceProfile, LinkTimes
from planner.profile.measured import MeasuredProfile
from planner.profile.table import Scope
from tests.planner.numbered_profile import NumberedProfile
from tests.plans import make_model, make_plan

MODEL = make_model()
RATE = 1e-6
"""Measured seconds a byte: far slower than any link here, so that no one can take the one for the other."""


def replicas(short: str, **fields: Any) -> Plan:
    return make_plan(MODEL, [[(1, 4, 4)]], cluster=from_short_form(short), **fields)


def sync_seconds(plan: Plan, profile: NumberedProfile) -> float:
    return price_plan(plan, profile=profile).pipelines[0].stages[0].all_reduce_seconds


def gradient_bytes(plan: Plan) -> float:
    return sum(call.numel * 4 for call in gradient_layout(plan).calls)


def test_a_ring_in_a_node_takes_its_measured_time() -> None:
    plan = replicas("1x4:A100")
    measured = NumberedProfile(MODEL, all_reduces={(4, "intra_node"): RATE})
    assert sync_seconds(plan, measured) == pytest.approx(RATE * gradient_bytes(plan))
    assert price_plan(plan, profile=measured).gradient_collectives == CollectiveSources(measured=2)


@pytest.mark.parametrize(
    "profile",
    [
        NumberedProfile(MODEL),
        NumberedProfile(MODEL, all_reduces={(2, "intra_node"): RATE, (4, "inter_node"): RATE}),
        NumberedProfile(MODEL, all_reduces={(4, "intra_node"): RATE}, largest=10),
    ],
    ids=["nothing measured", "other groups", "only small messages"],
)
def test_what_was_not_measured_is_priced_by_links(profile: NumberedProfile) -> None:
    plan = replicas("1x4:A100")
    assert sync_seconds(plan, profile) == sync_seconds(plan, NumberedProfile(MODEL))
    priced = price_plan(plan, profile=profile)
    assert priced.gradient_collectives == CollectiveSources(links=2)
    assert price_plan(plan).gradient_collectives == CollectiveSources(links=2)


def test_one_a_node_is_a_ring_between_nodes() -> None:
    plan = replicas("4x1:A100")
    measured = NumberedProfile(MODEL, all_reduces={(4, "inter_node"): RATE})
    assert sync_seconds(plan, measured) == pytest.approx(RATE * gradient_bytes(plan))
    mixed = replicas("2x1:A100,2x1:RTX3090")
    assert price_plan(mixed, profile=measured).gradient_collectives == CollectiveSources(links=2)


def test_of_a_reduction_in_steps_each_ring_is_priced_apart() -> None:
    """Two nodes of two: rings of two inside nodes, then rings of two between them with half the message."""
    plan = replicas("2x2:A100")
    inside, between = 3 * RATE, 5 * RATE
    measured = NumberedProfile(MODEL, all_reduces={(2, "intra_node"): inside, (2, "inter_node"): between})
    calls = price_plan(plan, profile=measured).gradient_collectives
    assert calls is not None and calls.measured == 2
    assert sync_seconds(plan, measured) == pytest.approx((inside + between / 2) * gradient_bytes(plan))
    half = NumberedProfile(MODEL, all_reduces={(2, "intra_node"): inside})
    assert price_plan(plan, profile=half).gradient_collectives == CollectiveSources(links=2)
    assert sync_seconds(plan, half) == pytest.approx(inside * gradient_bytes(plan), rel=1e-2)


def test_halves_of_zero_are_halves_of_the_measured_time() -> None:
    plan = replicas("1x4:A100", zero_stage=1)
    measured = NumberedProfile(MODEL, all_reduces={(4, "intra_node"): RATE})
    assert sync_seconds(plan, measured) == pytest.approx(RATE * gradient_bytes(plan) / 2)
    gathered = price_plan(plan, profile=measured).gather_seconds
    assert gathered == pytest.approx(RATE * gradient_bytes(plan) / 2 / 2)


def test_tp_all_reduces_take_their_measured_time() -> None:
    plan = make_plan(MODEL, [[(2, 1, 4)]], cluster=from_short_form("1x2:A100"), micro_batch_sizes=[1])
    measured = NumberedProfile(MODEL, all_reduces={(2, "intra_node"): RATE})

    def backward(profile: NumberedProfile) -> float:
        return price_plan(plan, profile=profile).pipelines[0].stages[0].backward_seconds

    # Two a layer, and one behind the head.
    activations = 32 * 24 * 2
    alone = NumberedProfile(MODEL, includes_tp=True)
    assert backward(measured) - backward(alone) == pytest.approx(9 * activations * RATE)
    for profile, sources in (
        (measured, CollectiveSources(measured=1)),
        (alone, CollectiveSources(operators=1)),
        (NumberedProfile(MODEL), CollectiveSources(links=1)),
    ):
        assert price_plan(plan, profile=profile).tp_collectives == sources
    by_links = StageCost(
        model=MODEL,
        device_types=CATALOGUE,
        links=plan.cluster.links,
        sequence_length=32,
        dtypes=plan.dtypes,
        profile=measured,
        measured_collectives=False,
    )
    assert by_links.tp_source("A100", 2, 1) == "links"
    assert price_plan(replicas("1x4:A100")).tp_collectives == CollectiveSources()


@pytest.fixture
def links() -> tuple[LinkTimes, ...]:
    points = ({"message_bytes": 1000, "seconds": 1.0}, {"message_bytes": 3000, "seconds": 2.0})
    return (
        LinkTimes.model_validate(
            {
                "scope": "intra_node",
                "operation": "all_reduce",
                "members": 4,
                "source": "made up",
                "points": points,
            }
        ),
    )


def test_a_profile_file_s_collectives(
    imported: Callable[..., DeviceProfile], links: tuple[LinkTimes, ...]
) -> None:
    """On a line between measured sizes; beyond them in pieces, below them padded; nothing for other groups."""
    profile = imported()
    profile = profile.model_copy(update={"links": links})
    table = MeasuredProfile(PRESETS["gpt3-1.3b"], {"A100": profile}, {"A100": CATALOGUE["A100"]})

    def seconds(size: float, members: int = 4, scope: Scope = "intra_node") -> float | None:
        return table.all_reduce_seconds(
            device_type="A100",
            scope=scope,
            members=members,
            message_bytes=size,
            precision="fp16",
        )

    assert seconds(1000) == 1.0
    assert seconds(1500) == pytest.approx(1.25)
    assert seconds(10) == seconds(1000)
    # Two pieces of 1501 bytes, three of 2500.
    assert seconds(3002) == pytest.approx(2 * 1.2505)
    assert seconds(7500) == pytest.approx(3 * 1.75)
    assert seconds(1000, members=2) is None and seconds(1000, scope="inter_node") is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(size=st.floats(1, 1e6))
def test_no_message_is_quicker_than_the_least_rate(
    imported: Callable[..., DeviceProfile], links: tuple[LinkTimes, ...], size: float
) -> None:
    profile = imported(degrees=(1,), sizes=(1,)).model_copy(update={"links": links})
    table = MeasuredProfile(PRESETS["gpt3-1.3b"], {"A100": profile}, {"A100": CATALOGUE["A100"]})
    seconds = table.all_reduce_seconds(
        device_type="A100", scope="intra_node", members=4, message_bytes=size, precision="fp16"
    )
    assert seconds is not None and seconds >= table.least_all_reduce_rate() * size * (1 - 1e-12)
    assert table.least_all_reduce_rate() == 2 / 3000
    plain = MeasuredProfile(table.model, {"A100": profile.model_copy(update={"links": ()})}, CATALOGUE)
    assert plain.least_all_reduce_rate() == float("inf")
