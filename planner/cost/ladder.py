"""The ladder of recomputation: which operators to replay for the most bytes per second of replay.

Bytes given up are a function of the operators' set. That function is supermodular (operators replayed
together keep no values between them) and the seconds are additive, so the sets on the convex hull of all
2^n are nested: climbing from one to the next recomputes more operators and never fewer, and no other set,
nor any mixture over layers, gives up as many bytes in less time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from planner.cost.activations import Value
from planner.cost.layer_flow import OperatorSet, kept_bytes, replayed
from planner.profile.table import OperatorGroup

# Points this close to a straight line, relatively, are on it: round-off must not make a rung.
_STRAIGHT = 1e-9


@dataclass(frozen=True)
class Rung:
    """Operators to replay; bytes given up and seconds of replay, of one layer and one micro-batch."""

    operators: tuple[str, ...]
    saved_bytes: float
    seconds: float


@dataclass(frozen=True)
class _Sets:
    """Every set worth replaying, as 0/1 rows: over operators, over values given up (-1: kept on top)."""

    operators: npt.NDArray[np.bool_]
    given_up: npt.NDArray[np.float64]


def ladder(
    values: Sequence[Value],
    operators: Sequence[str],
    groups: Sequence[OperatorGroup],
    seconds: dict[str, float],
    extra_seconds: dict[str, float],
) -> tuple[Rung, ...]:
    """The rungs from nothing to full recomputation, where only the layer's input is kept.

    Args:
        values: of one layer.
        operators: the layer's, in forward order.
        groups: operators that are replayed together, as the profile times them.
        seconds: of a group's forward, by its name.
        extra_seconds: of single operators, on top of their group's: TP collectives.
    """
    flow = tuple((value.name, value.producer, value.readers, value.saved) for value in values)
    sets = _sets(flow, tuple(operators), tuple(group.operators for group in groups))
    saved = sets.given_up @ np.array([value.bytes for value in values])
    used = np.stack(
        [sets.operators[:, [operators.index(name) for name in g.operators]].any(axis=1) for g in groups],
        axis=1,
    )
    cost = used @ np.array([seconds[group.name] for group in groups])
    for name, further in extra_seconds.items():
        cost = cost + sets.operators[:, operators.index(name)] * further
    rungs = [Rung((), 0.0, 0.0)]
    for row in _hull(cost, saved):
        # Of sets that are equally good, the union is too: so rungs are nested even where sets tie.
        union = set(rungs[-1].operators) | {
            name for name, on in zip(operators, sets.operators[row], strict=True) if on
        }
        rung = _rung(values, operators, groups, union, seconds, extra_seconds)
        if rung.saved_bytes > rungs[-1].saved_bytes:
            rungs.append(rung)
    return tuple(rungs)


def _rung(
    values: Sequence[Value],
    operators: Sequence[str],
    groups: Sequence[OperatorGroup],
    chosen: set[str],
    seconds: dict[str, float],
    extra_seconds: dict[str, float],
) -> Rung:
    again = replayed(values, frozenset(chosen))
    kept = kept_bytes(values, again)
    return Rung(
        operators=tuple(name for name in operators if name in again),
        saved_bytes=kept_bytes(values, frozenset()) - kept,
        seconds=sum(seconds[group.name] for group in groups if not again.isdisjoint(group.operators))
        + sum(further for name, further in extra_seconds.items() if name in again),
    )


def _hull(cost: npt.NDArray[np.float64], saved: npt.NDArray[np.float64]) -> list[int]:
    """Rows on the upper left of all points, from the origin (left out) to the most saved."""
    hull: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]
    best = 0.0
    order = np.lexsort((-saved, cost))
    # Those that save no more than one before them are passed over anyway.
    most = np.maximum.accumulate(np.concatenate([[0.0], saved[order]]))[:-1]
    for row in order[saved[order] > most]:
        point = (float(cost[row]), float(saved[row]), int(row))
        if point[1] <= best * (1 + _STRAIGHT):
            continue
        best = point[1]
        while len(hull) > 1 and not _turns_right(hull[-2], hull[-1], point):
            hull.pop()
        hull.append(point)
    return [row for _, _, row in hull[1:]]


def _turns_right(
    a: tuple[float, float, int], b: tuple[float, float, int], c: tuple[float, float, int]
) -> bool:
    """Whether b lies clearly above the line from a to c: as (seconds, bytes)."""
    rise, run = b[1] - a[1], b[0] - a[0]
    return rise * (c[0] - a[0]) > (c[1] - a[1]) * run * (1 + _STRAIGHT)


def _distinct(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Each row once, in ascending order, the first column first: `np.unique` by rows, which takes ten times as long."""
    width = rows.shape[1]
    assert width < 63
    numbers = rows @ (1 << np.arange(width, dtype=np.int64)[::-1])
    order = np.argsort(numbers)
    distinct: npt.NDArray[np.bool_] = rows[order[np.diff(numbers[order], prepend=-1) > 0]]
    return distinct


@cache
def _sets(
    flow: tuple[tuple[str, str | None, tuple[str, ...], bool], ...],
    operators: tuple[str, ...],
    groups: tuple[OperatorSet | tuple[str, ...], ...],
) -> _Sets:
    """All unions of groups, less the operators that need no replay; each set once."""
    index = {name: place for place, name in enumerate(operators)}
    count = 2 ** len(groups)
    chosen = np.zeros((count, len(operators)), dtype=bool)
    for bit, group in enumerate(groups):
        on = (np.arange(count) >> bit & 1).astype(bool)
        chosen[:, [index[name] for name in group]] = on[:, None]
    again = np.zeros_like(chosen)
    # Values are read by later operators alone, so one pass from the last operator is enough.
    for name in reversed(operators):
        needed = np.zeros(count, dtype=bool)
        for _, producer, readers, saved in flow:
            if producer == name:
                needed |= saved
                for reader in readers:
                    if reader in index:
                        needed |= again[:, index[reader]]
        again[:, index[name]] = chosen[:, index[name]] & needed
    again = _distinct(again)
    given_up = np.zeros((len(again), len(flow)))
    for column, (_, producer, readers, saved) in enumerate(flow):
        made = again[:, index[producer]] if producer is not None else np.zeros(len(again), dtype=bool)
        if saved:
            given_up[:, column] = made
        else:
            read = np.zeros(len(again), dtype=bool)
            for reader in readers:
                if reader in index:
                    read |= again[:, index[reader]]
            given_up[:, column] = -1.0 * (read & ~made)
    return _Sets(again, given_up)
