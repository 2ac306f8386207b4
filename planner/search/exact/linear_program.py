"""The linear program over columns: few limits, many columns, so the simplex method on a small basis."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

# A column is worth taking in if it gains this share of the most that any is worth.
_GAIN = 1e-11
# Steps that gain nothing before the first instead of the best column is taken in: then no basis comes twice.
_PATIENCE = 50


@dataclass(frozen=True)
class LinearSolution:
    """Most worth, the amount of each column, the price of each limit's unit."""

    worth: float
    amounts: FloatArray
    prices: FloatArray


def linear_program(columns: FloatArray, worth: FloatArray, limits: FloatArray) -> LinearSolution:
    """Most worth of fractions of columns (rows of `columns`, what each uses of every limit) within the
    limits, none of them negative. Every column that is worth anything must use something."""
    rows, amounts = len(limits), np.zeros(len(columns))
    useful = np.flatnonzero(worth > 0)
    if useful.size == 0:
        return LinearSolution(0.0, amounts, np.zeros(rows))
    # What is left of each limit comes last, worth nothing.
    every = np.concatenate([columns[useful], np.eye(rows)])
    values = np.concatenate([worth[useful], np.zeros(rows)])
    basis = np.arange(len(useful), len(every))
    held, prices = _optimum(every, values, limits.astype(float), basis)
    taken = basis < len(useful)
    amounts[useful[basis[taken]]] = held[taken]
    return LinearSolution(float(amounts @ worth), amounts, np.maximum(prices, 0.0))


def _optimum(
    columns: FloatArray, worth: FloatArray, limits: FloatArray, basis: IntArray
) -> tuple[FloatArray, FloatArray]:
    """(amounts of the basis, prices); `basis` becomes that of the optimum."""
    least, idle = _GAIN * float(worth.max()), 0
    while True:
        square = columns[basis].T
        held: FloatArray = np.maximum(_solved(square, limits), 0.0)
        prices = _solved(square.T, worth[basis])
        gains = worth - columns @ prices
        gains[basis] = 0.0
        entering = int(gains.argmax()) if idle < _PATIENCE else int((gains > least).argmax())
        if gains[entering] <= least:
            return held, prices
        used = _solved(square, columns[entering])
        limiting = used > 1e-12 * np.abs(used).max()
        assert limiting.any(), "a column uses nothing"
        ratios = np.where(limiting, held / np.where(limiting, used, 1.0), np.inf)
        step = float(ratios.min())
        # Of equal ones the first column leaves.
        tied = np.flatnonzero(ratios <= step)
        basis[tied[basis[tied].argmin()]] = entering
        idle = 0 if step > 0 else idle + 1


def _solved(square: FloatArray, right: FloatArray) -> FloatArray:
    return np.linalg.solve(square, right).astype(np.float64)
