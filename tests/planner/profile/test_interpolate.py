"""Interpolation: exact at measured sizes, within the neighbours' values between them, nothing outside."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.profile.interpolate import interpolate

Curve = tuple[list[float], list[float]]


@st.composite
def curves(draw: st.DrawFn) -> Curve:
    sizes = sorted(draw(st.sets(st.integers(1, 10_000), min_size=1, max_size=8)))
    seconds = st.floats(0, 1e3, allow_nan=False, allow_subnormal=False)
    values = draw(st.lists(seconds, min_size=len(sizes), max_size=len(sizes)))
    return [float(size) for size in sizes], values


@given(curves(), st.data())
def test_a_measured_size_gives_its_own_value(curve: Curve, data: st.DataObject) -> None:
    sizes, values = curve
    index = data.draw(st.integers(0, len(sizes) - 1))
    assert interpolate(sizes, values, sizes[index]) == values[index]


@given(curves(), st.floats(0, 20_000, allow_nan=False))
def test_between_the_neighbours_or_nothing(curve: Curve, size: float) -> None:
    sizes, values = curve
    value = interpolate(sizes, values, size)
    if not sizes[0] <= size <= sizes[-1]:
        assert value is None
        return
    below = max(i for i in range(len(sizes)) if sizes[i] <= size)
    above = min(i for i in range(len(sizes)) if sizes[i] >= size)
    assert value is not None
    assert min(values[below], values[above]) <= value <= max(values[below], values[above])


def test_follows_a_straight_line() -> None:
    assert interpolate([1, 4], [10.0, 40.0], 2) == pytest.approx(20)


def test_times_may_fall() -> None:
    assert interpolate([1, 2, 4], [9.0, 3.0, 5.0], 3) == pytest.approx(4)
