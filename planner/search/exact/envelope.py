"""Which choices can be the cheapest way to run a stage, by layers: those that no cheaper one beats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Of fewer choices all are looked at.
_FEW = 8


def undominated(seconds: FloatArray, other: FloatArray | None = None) -> IntArray:
    """Choices [rank, l] by layers that hold all that no choice before them beats, in seconds and in `other`; where
    these are fewer than elsewhere, the first choice again.

    Args:
        seconds: [choice, l], the choices by ascending price.
        other: a second figure that should be small, of the same shape; None if seconds are all that counts.
    """
    count = len(seconds)
    if count <= _FEW:
        return np.repeat(np.arange(count)[:, None], seconds.shape[1], axis=1)
    if other is None:
        kept = seconds < _before(np.minimum.accumulate(seconds, axis=0), np.inf)
    else:
        kept = ~(_beaten(seconds, other) | _beaten(other, seconds)) & np.isfinite(seconds)
    rank = np.cumsum(kept, axis=0, dtype=np.int32)
    ranked = np.zeros((max(1, int(rank[-1].max())), kept.shape[1]), dtype=np.int64)
    which, layers = np.nonzero(kept)
    ranked[rank[which, layers] - 1, layers] = which
    return ranked


def _beaten(one: FloatArray, two: FloatArray) -> BoolArray:
    """Whether the first of the choices before that are least in `one` is no worse in `two` either."""
    new = one < _before(np.minimum.accumulate(one, axis=0), np.inf)
    places = np.arange(len(one))[:, None]
    leaders = np.full(one.shape, -1)
    leaders[1:] = np.maximum.accumulate(np.where(new, places, -1), axis=0)[:-1]
    known = np.maximum(leaders, 0)
    beaten: BoolArray = (leaders >= 0) & (np.take_along_axis(one, known, axis=0) <= one)
    beaten &= np.take_along_axis(two, known, axis=0) <= two
    return beaten


def _before(values: FloatArray, first: float) -> FloatArray:
    """Each row of the one before."""
    shifted = np.empty_like(values)
    shifted[0], shifted[1:] = first, values[:-1]
    return shifted
