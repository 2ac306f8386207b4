import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.search.layer_split import Split, SplitStage, best_splits

LAYERS = 5


@st.composite
def stages(draw: st.DrawFn) -> SplitStage:
    """Convex seconds: the increments do not fall."""
    increments = sorted(draw(st.lists(st.integers(1, 20), min_size=LAYERS, max_size=LAYERS)))
    table = [float(draw(st.integers(0, 10)))]
    for increment in increments:
        table.append(table[-1] + increment)
    fewest = draw(st.integers(0, 1))
    return SplitStage(tuple(table), float(draw(st.integers(0, 5))), fewest, draw(st.integers(fewest, LAYERS)))


@given(st.lists(stages(), min_size=1, max_size=4), st.integers(1, 6), st.integers(1, 40))
def test_splits_are_those_of_brute_force(given_stages: list[SplitStage], few: int, many: int) -> None:
    found = best_splits(given_stages, layers=LAYERS, micro_batches=(few, many))
    every = [
        [stage.seconds(count) for stage, count in zip(given_stages, counts, strict=True)]
        for counts in itertools.product(*(range(s.fewest, s.most + 1) for s in given_stages))
        if sum(counts) == LAYERS
    ]
    if not every:
        assert found == []
        return
    for split, n in zip(found, (few, many), strict=True):
        assert sum(split.layers) == LAYERS
        best = min(sum(seconds) + max(seconds) * (n - 1) for seconds in every)
        assert split.latency(n) == pytest.approx(best)


def test_a_split_reports_its_fill_and_period() -> None:
    quick = SplitStage((0.0, 1.0, 2.0, 3.0), 0.0, 0, 3)
    slow = SplitStage((0.0, 2.0, 4.0, 6.0), 0.5, 0, 3)
    (split,) = best_splits([quick, slow], layers=3, micro_batches=(100,))
    assert split == Split((2, 1), 4.5, 2.5)


def test_a_stage_that_holds_too_little_leaves_no_split() -> None:
    stage = SplitStage((0.0, 1.0, 2.0, 3.0), 0.0, 1, 1)
    assert best_splits([stage, stage], layers=3, micro_batches=(1,)) == []
