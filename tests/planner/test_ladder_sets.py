"""The distinct sets of a ladder, in the order that ties are broken by."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from planner.cost.ladder import _distinct


@given(
    rows=st.integers(1, 14).flatmap(
        lambda width: st.lists(st.lists(st.booleans(), min_size=width, max_size=width), min_size=1)
    )
)
def test_rows_are_distinct_and_in_order(rows: list[list[bool]]) -> None:
    assert _distinct(np.array(rows)).tolist() == [list(row) for row in sorted(set(map(tuple, rows)))]
