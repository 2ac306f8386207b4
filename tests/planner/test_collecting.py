"""Reference cycles are looked for seldom while a search runs, and as before when it has ended."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from planner.cluster import resolve_cluster
from planner.errors import UserError
from planner.model_spec import resolve_model
from planner.request import PlanRequest
from planner.search import find_plan
from planner.search.collecting import collecting_seldom
from tests.planner.baselines.jobs import CLUSTERS, draw_request


@pytest.fixture(autouse=True)
def own_thresholds() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(700, 11, 12)
    yield
    gc.set_threshold(*before)


def test_searches_inside_each_other_put_back_what_was_before_the_first() -> None:
    with collecting_seldom():
        seldom = gc.get_threshold()
        assert seldom[0] > 10_000 and seldom[1:] == (11, 12)
        with collecting_seldom():
            assert gc.get_threshold() == seldom
        assert gc.get_threshold() == seldom
    assert gc.get_threshold() == (700, 11, 12)
    with pytest.raises(RuntimeError), collecting_seldom():
        raise RuntimeError
    assert gc.get_threshold() == (700, 11, 12)


@pytest.mark.parametrize("threshold", [0, 1_000_000])
def test_who_collects_more_seldom_or_never_goes_on_so(threshold: int) -> None:
    gc.set_threshold(threshold, 11, 12)
    with collecting_seldom():
        assert gc.get_threshold() == (threshold, 11, 12)
    assert gc.get_threshold() == (threshold, 11, 12)


def test_a_search_does_so_whether_it_finds_a_plan_or_not() -> None:
    seen = []

    def progress(message: str) -> None:
        seen.append(gc.get_threshold()[0])

    find_plan(draw_request(1, CLUSTERS[1], strategy="metis"), progress=progress)
    assert seen and min(seen) > 10_000
    assert gc.get_threshold() == (700, 11, 12)
    too_large = PlanRequest(
        model=resolve_model("gpt3-13b"),
        cluster=resolve_cluster("1x1:RTX3090"),
        global_batch_size=1,
        sequence_length=2048,
        strategy="uniform",
    )
    with pytest.raises(UserError, match="does not fit"):
        find_plan(too_large)
    assert gc.get_threshold() == (700, 11, 12)
