"""Early skipping: the matching against every assignment, and both bounds by hand."""

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.catalogue import DeviceType
from planner.search.exact.pool import Kind, Pool
from planner.search.paper.skipping import ThroughputBounds

GIB = 2**30


def pool(*kinds: tuple[float, float]) -> Pool:
    """Kinds of (TFLOP/s, GiB)."""
    made = []
    for index, (tflops, memory) in enumerate(kinds):
        device = DeviceType(
            backend="cpu",
            peak_tflops={"bf16": tflops},
            memory_bytes=int(memory * GIB),
            memory_bandwidth=1e12,
        )
        made.append(Kind(f"type{index}", device, (1,), (("a",),), 1))
    return Pool(tuple(made))


def bounds(*kinds: tuple[float, float], alpha: float = 1.5) -> ThroughputBounds:
    return ThroughputBounds(pool(*kinds), precision="bf16", alpha=alpha)


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.tuples(*[st.tuples(st.sampled_from([1, 2, 3]), st.sampled_from([1, 2, 3]))] * 3),
    smaller=st.tuples(*[st.integers(0, 2)] * 3),
    larger=st.tuples(*[st.integers(0, 2)] * 3),
)
def test_a_pipeline_covers_another_if_some_assignment_of_devices_does(
    kinds: tuple[tuple[int, int], ...], smaller: tuple[int, ...], larger: tuple[int, ...]
) -> None:
    few = [kinds[k] for k, n in enumerate(smaller) for _ in range(n)]
    many = [kinds[k] for k, n in enumerate(larger) for _ in range(n)]
    expected = any(
        all(a[0] >= b[0] and a[1] >= b[1] for a, b in zip(chosen, few, strict=True))
        for chosen in itertools.permutations(many, len(few))
    )
    assert bounds(*kinds).covers(larger, smaller) == expected


def test_the_deterministic_bound_is_the_least_throughput_of_what_covers() -> None:
    # As with 910B2 and 910B3: equal memory, which a strict comparison would never let stand in.
    known = bounds((376, 64), (313, 64), (280, 32))
    assert known.deterministic((0, 2, 0)) == math.inf
    known.learn((2, 0, 0), 10.0)
    known.learn((4, 0, 0), 18.0)
    assert known.deterministic((0, 2, 0)) == 10.0
    assert known.deterministic((0, 1, 1)) == 10.0
    assert known.deterministic((0, 2, 1)) == 18.0
    assert known.deterministic((0, 5, 0)) == math.inf
    # A faster device with less memory covers nothing.
    known.learn((0, 0, 4), 1.0)
    assert known.deterministic((0, 2, 0)) == 10.0
    # That nothing was found to fit is a fact about those devices alone.
    known.learn((1, 0, 0), 0.0)
    assert known.of_pipeline((1, 0, 0)) == 0
    assert known.deterministic((0, 1, 0)) == 10.0


def test_the_approximate_bound_scales_the_most_alike_pipeline() -> None:
    known = bounds((400, 64), (200, 32), alpha=2.0)
    assert known.approximate((1, 1)) == math.inf
    known.learn((2, 0), 10.0)
    known.learn((0, 6), 3.0)
    # 600 against 800 TFLOP/s, 48 against 64 GiB a device.
    assert known.approximate((1, 1)) == pytest.approx(10 * (600 / 800) * (48 / 64) * 2)
    assert known.approximate((0, 5)) == pytest.approx(3 * (5 / 6) * 2)
    # Nothing within a factor of two is known.
    assert known.approximate((0, 1)) == math.inf
    # Two halves of a known pipeline are not rated below it at alpha 1.
    even = bounds((400, 64), alpha=1.0)
    even.learn((4,), 12.0)
    assert even.of_group([(2,), (2,)]) == pytest.approx(12.0)


def test_what_is_known_stands_for_itself_and_the_smaller_bound_counts() -> None:
    known = bounds((400, 64), (200, 64), alpha=4.0)
    known.learn((2, 0), 10.0)
    assert known.of_group([(2, 0)]) == 10.0
    assert known.of_pipeline((0, 2)) == 10.0
    assert known.of_group([(2, 0), (0, 2)]) == 20.0
    known = bounds((400, 64), (200, 64), alpha=1.0)
    known.learn((2, 0), 10.0)
    assert known.of_pipeline((0, 2)) == pytest.approx(5.0)
