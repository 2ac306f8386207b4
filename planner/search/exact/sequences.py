"""Stages of one pipeline on exactly given devices: least sum of stage seconds within a period."""

from __future__ import annotations

import numpy as np

from planner.search.exact.chains import Chain, make_chain
from planner.search.exact.columns import Box
from planner.search.exact.pool import Vector
from planner.search.exact.role import Role, role_of
from planner.search.exact.stage_table import FloatArray, StageTable


def least_sum(table: StageTable, box: Box, *, stages: int, period: float) -> Chain | None:
    """The chain of exactly `stages` stages on exactly the devices `box.size` with the least sum of seconds,
    those after the first stage's last backward included; none of its stages takes longer than `period`.

    None if there is none. Ties go to the first choice, so the result is deterministic.
    """
    steps = box.steps(table)
    sums: list[FloatArray] = []
    weights = [
        _weights(table, steps, position=position, stages=stages, period=period)
        for position in range(1, stages + 1)
    ]
    for line in weights:
        sums.append(_prepend(line, sums[-1] if sums else None, box.shape, table.layers))
    goal = tuple(size - 1 for size in box.shape)
    if not np.isfinite(sums[-1][(*goal, table.layers)]):
        return None
    return _trace(table, steps, sums, weights, goal, period=period)


Weights = dict[Vector, FloatArray]


def _weights(
    table: StageTable, steps: dict[Vector, list[int]], *, position: int, stages: int, period: float
) -> Weights:
    """Least weight by layers for each count vector of a stage."""
    role = role_of(position=position, stages=stages)
    every = _by_choice(
        table, role, position, [choice for choices in steps.values() for choice in choices], period
    )
    starts = np.cumsum([0, *map(len, steps.values())])[:-1]
    # Of a table without choices that use these devices there is nothing to reduce.
    least = np.minimum.reduceat(every, starts, axis=0) if steps else every
    return dict(zip(steps, least, strict=True))


def _by_choice(table: StageTable, role: Role, position: int, choices: list[int], period: float) -> FloatArray:
    seconds = table.seconds_at(role, position)[choices]
    fits = seconds <= period
    spent = seconds + table.after[role, choices] if role.embedding else seconds
    return np.where(fits, spent, np.inf)


def _prepend(weights: Weights, behind: FloatArray | None, shape: Vector, layers: int) -> FloatArray:
    """Least sum [*c, layers] after one more stage in front."""
    result = np.full((*shape, layers + 1), np.inf)
    for need, line in weights.items():
        if behind is None:
            result[need] = np.minimum(result[need], line)
            continue
        into = result[tuple(slice(n, None) for n in need)]
        source = behind[tuple(slice(None, size - n) for n, size in zip(need, shape, strict=True))]
        for count in np.flatnonzero(np.isfinite(line)):
            target = into[..., count:]
            np.minimum(target, source[..., : layers + 1 - count] + line[count], out=target)
    return result


def _trace(
    table: StageTable,
    steps: dict[Vector, list[int]],
    sums: list[FloatArray],
    weights: list[Weights],
    goal: Vector,
    *,
    period: float,
) -> Chain:
    """Walk back through the sums; the same additions give the same floats, so equality finds the choice."""
    found: list[tuple[int, int]] = []
    counts, left, stages = goal, table.layers, len(sums)
    for position in range(stages, 0, -1):
        behind = sums[position - 2] if position > 1 else None
        need, taken = _step(weights[position - 1], behind, sums[position - 1], counts, left)
        role = role_of(position=position, stages=stages)
        choices = steps[need]
        best = int(_by_choice(table, role, position, choices, period)[:, taken].argmin())
        found.append((choices[best], taken))
        counts = tuple(c - n for c, n in zip(counts, need, strict=True))
        left -= taken
    return make_chain(table, found)


def _step(
    weights: Weights, behind: FloatArray | None, here: FloatArray, counts: Vector, left: int
) -> tuple[Vector, int]:
    target = here[(*counts, left)]
    for need, line in weights.items():
        rest = tuple(c - n for c, n in zip(counts, need, strict=True))
        if min(rest) < 0:
            continue
        if behind is None:
            if not any(rest) and line[left] == target:
                return need, left
            continue
        equal = np.flatnonzero(behind[rest][left::-1] + line[: left + 1] == target)
        if equal.size:
            return need, int(equal[0])
    raise AssertionError("the sums and their trace disagree")
