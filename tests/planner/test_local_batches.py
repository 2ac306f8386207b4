import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.cluster import from_short_form
from planner.cost.price import price_plan
from planner.errors import UserError
from planner.local_batches import Pace, allocate, equal_shares, with_equal_batches
from tests.plans import make_model, make_plan

paces = st.lists(
    st.builds(Pace, st.integers(1, 4), st.floats(0.1, 5), st.floats(0.1, 2)).map(
        lambda pace: Pace(pace.micro_batch_size, pace.fill_seconds + pace.period_seconds, pace.period_seconds)
    ),
    min_size=1,
    max_size=3,
)


def latest_end(of: list[Pace], samples: list[int]) -> float:
    return max(pace.end_seconds(pace.micro_batches(n)) for pace, n in zip(of, samples, strict=True))


@given(paces, st.integers(1, 12))
def test_the_greedy_allocation_is_the_best_one(of: list[Pace], batch: int) -> None:
    samples = allocate(of, global_batch_size=batch)
    assert sum(samples) == batch and min(samples) >= 0
    every = itertools.product(range(batch + 1), repeat=len(of))
    best = min(latest_end(of, list(split)) for split in every if sum(split) == batch)
    assert latest_end(of, samples) == pytest.approx(best)


@given(paces, st.integers(1, 200))
def test_more_samples_never_end_sooner(of: list[Pace], batch: int) -> None:
    now = latest_end(of, allocate(of, global_batch_size=batch))
    later = latest_end(of, allocate(of, global_batch_size=batch + 1))
    assert later >= now


@given(paces, st.floats(0.1, 100))
def test_samples_within_a_time_are_as_many_as_end_by_then(of: list[Pace], seconds: float) -> None:
    for pace in of:
        count = pace.samples_within(seconds) // pace.micro_batch_size
        assert pace.end_seconds(count) <= seconds * (1 + 1e-9)
        assert pace.end_seconds(count + 1) > seconds * (1 - 1e-9)


def test_a_pipeline_twice_as_fast_takes_twice_the_samples() -> None:
    samples = allocate([Pace(1, 1.0, 1.0), Pace(1, 2.0, 2.0)], global_batch_size=300)
    assert samples == [200, 100]


def test_equal_shares_differ_by_one_at_most() -> None:
    assert equal_shares(3, global_batch_size=11) == [4, 4, 3]


def test_equal_batches_keep_the_pipelines_and_are_priced() -> None:
    cluster = from_short_form("1x1:A100+1:RTX3090")
    plan = make_plan(make_model(), [[(1, 1, 4)], [(1, 1, 4)]], cluster=cluster, samples=[24, 6])
    equal = with_equal_batches(plan)
    assert [pipeline.samples for pipeline in equal.pipelines] == [15, 15]
    assert [p.stages for p in equal.pipelines] == [p.stages for p in plan.pipelines]
    assert equal.predicted == price_plan(equal)
    assert equal.predicted.iteration_seconds > price_plan(plan).iteration_seconds


def test_fewer_samples_than_pipelines_cannot_be_equal() -> None:
    plan = make_plan(make_model(), [[(1, 1, 4)], [(1, 1, 4)]], samples=[1, 1])
    fewer = plan.model_copy(update={"global_batch_size": 1})
    with pytest.raises(UserError, match="global_batch_size = 1 cannot be split equally over 2 pipelines"):
        with_equal_batches(fewer)
