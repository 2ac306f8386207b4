"""The linear program over columns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LinearSolution:
    """Most worth, the amount of each column, the price of each limit's unit."""

    worth: float
    amounts: FloatArray
    prices: FloatArray


def linear_program(columns: FloatArray, worth: FloatArray, limits: FloatArray) -> LinearSolution:
    """Most worth of fractions of columns (rows of `columns`, what each uses of every limit) within the
    limits."""
    from scipy.optimize import linprog  # a third of a second, so only where it is used

    amounts = np.zeros(len(columns))
    useful = np.flatnonzero(worth > 0)
    if useful.size == 0:
        return LinearSolution(0.0, amounts, np.zeros(len(limits)))
    result = linprog(-worth[useful], A_ub=columns[useful].T, b_ub=limits, method="highs")
    assert result.status == 0, result.message
    amounts[useful] = result.x
    return LinearSolution(-float(result.fun), amounts, -np.asarray(result.ineqlin.marginals))
