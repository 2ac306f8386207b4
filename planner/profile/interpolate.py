"""Straight lines between measured points; nothing outside them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


def interpolate(sizes: Sequence[float], values: Sequence[float], size: float) -> float | None:
    """Value at `size` on the line between its measured neighbours; None outside the measured sizes.

    `sizes` ascend. A measured size gives its own value exactly.
    """
    at = bisect_left(sizes, size)
    if at == len(sizes):
        return None
    if sizes[at] == size:
        return values[at]
    if at == 0:
        return None
    low, high = sizes[at - 1], sizes[at]
    share = (size - low) / (high - low)
    value = values[at - 1] * (1 - share) + values[at] * share
    # Rounding must not leave the neighbours' range.
    return min(max(value, min(values[at - 1 : at + 1])), max(values[at - 1 : at + 1]))
