"""Which choices can be the cheapest way to run a stage, by layers: those that no cheaper one beats."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

# Of fewer choices all are looked at.
_FEW = 8


def undominated(seconds: FloatArray, *others: FloatArray) -> IntArray:
    """Choices [rank, l] by layers that hold all that no choice before them beats, in seconds and all others; where
    these are fewer than elsewhere, the first choice again.

    Args:
        seconds: [choice, l], the choices by ascending price.
        others: further figures that should be small, of the same shape.
    """
    count = len(seconds)
    if count <= _FEW:
        return np.repeat(np.arange(count)[:, None], seconds.shape[1], axis=1)
    if not others:
        kept = seconds < _before(np.minimum.accumulate(seconds, axis=0), np.inf)
    else:
        figures = (seconds, *others)
        kept = np.isfinite(seconds)
        for index, figure in enumerate(figures):
            kept &= ~_beaten(figure, *figures[:index], *figures[index + 1 :])
    rank = np.cumsum(kept, axis=0, dtype=np.int32)
    ranked = np.zeros((max(1, int(rank[-1].max())), kept.shape[1]), dtype=np.int64)
    which, layers = np.nonzero(kept)
    ranked[rank[which, layers] - 1, layers] = which
    return ranked


def _beaten(one: FloatArray, *others: FloatArray) -> BoolArray:
    """Whether the first of the choices before that are least in `one` is no worse in all others either."""
    new = one < _before(np.minimum.accumulate(one, axis=0), np.inf)
    places = np.arange(len(one))[:, None]
    leaders = np.full(one.shape, -1)
    leaders[1:] = np.maximum.accumulate(np.where(new, places, -1), axis=0)[:-1]
    known = np.maximum(leaders, 0)
    beaten: BoolArray = (leaders >= 0) & (np.take_along_axis(one, known, axis=0) <= one)
    for other in others:
        beaten &= np.take_along_axis(other, known, axis=0) <= other
    return beaten


def _before(values: FloatArray, first: float) -> FloatArray:
    """Each row of the one before."""
    shifted = np.empty_like(values)
    shifted[0], shifted[1:] = first, values[:-1]
    return shifted
