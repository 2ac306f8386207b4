"""What is told to be hopeless by its seconds alone is what the whole split gives up on."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from planner.baselines.forms import Form, Part, make_form
from planner.baselines.least_seconds import LeastSeconds
from planner.baselines.memory_savers import Zero
from planner.baselines.seats import seat
from planner.baselines.splits import Splitter
from planner.baselines.stage_figures import StageFigures
from planner.cost.models import CostModels
from planner.profile.analytic import AnalyticProfile
from tests.planner.baselines.jobs import draw_request

NODES = ({"fast": 4}, {"fast": 4}, {"slow": 4}, {"slow": 4})
PURE = st.builds(
    lambda type_, tp, dp: make_form(tp, (Part(type_, dp, 4 // dp),)),
    st.sampled_from(["fast", "slow"]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
)
MIXED = st.builds(
    lambda tp, rows: make_form(tp, (Part("fast", 1, rows), Part("slow", 1, 4 - rows))),
    st.sampled_from([1, 2]),
    st.integers(1, 3),
)


@example(295, [make_form(2, (Part("fast", 1, 1), Part("slow", 1, 3)))], 1, Zero(0), True, None, 1.0)
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    forms=st.lists(st.one_of(PURE, MIXED), min_size=1, max_size=5),
    micro_batches=st.integers(1, 40),
    zero=st.sampled_from([Zero(0), Zero(1), Zero(2)]),
    by_position=st.booleans(),
    layers=st.one_of(st.none(), st.lists(st.integers(0, 3), min_size=5, max_size=5)),
    near=st.floats(0.9, 1.1),
)
def test_nothing_that_a_split_finds_is_hopeless(
    seed: int,
    forms: list[Form],
    micro_batches: int,
    zero: Zero,
    by_position: bool,
    layers: list[int] | None,
    near: float,
) -> None:
    request = draw_request(seed, NODES, strategy="metis")
    chain = tuple(forms)
    seats = seat(request.cluster, [chain])
    if seats is None:
        return
    models = CostModels.of_request(
        request, profile=AnalyticProfile(request.model, request.cluster.device_types)
    )
    figures = StageFigures(models, by_position=by_position)
    given_layers = layers and layers[: len(chain)]
    question: Any = (chain, seats[0], micro_batches, given_layers, zero)
    free = Splitter(figures).split(*question)
    least = LeastSeconds(figures).of(chain, micro_batches, given_layers)
    assert least > 0
    if free is None:
        return
    assert least <= (free.fill_seconds + free.period_seconds * (micro_batches - 1)) * (1 + 1e-9)
    # With something to beat, so little above or below the least seconds.
    limited = Splitter(figures, upper=least * near)
    if limited.is_hopeless(chain, micro_batches, given_layers):
        assert limited.split(*question) is None


def test_with_room_and_free_links_the_least_seconds_are_those_of_the_split() -> None:
    """Stages that neither recompute nor wait, of like layers: nothing is lost to the glance."""
    for seed in range(20):
        request = draw_request(seed, NODES, strategy="metis")
        link = {"bandwidth": 1e18, "latency": 0.0}
        types = {
            name: type_.model_copy(update={"memory_bytes": 2**40})
            for name, type_ in request.cluster.device_types.items()
        }
        links = request.cluster.links.model_validate({"intra_node": link, "inter_node": link})
        cluster = request.cluster.model_copy(update={"device_types": types, "links": links})
        request = request.model_copy(update={"cluster": cluster})
        models = CostModels.of_request(
            request, profile=AnalyticProfile(request.model, request.cluster.device_types)
        )
        figures = StageFigures(models)
        chain = (make_form(1, (Part("fast", 1, 1),)), *[make_form(1, (Part("slow", 1, 1),))] * 2)
        seats = seat(request.cluster, [chain])
        assert seats is not None
        found = Splitter(figures).split(chain, seats[0], 1000, None, Zero(1))
        assert found is not None
        seconds = found.fill_seconds + found.period_seconds * 999
        assert LeastSeconds(figures).of(chain, 1000) == pytest.approx(seconds, rel=2e-3)
