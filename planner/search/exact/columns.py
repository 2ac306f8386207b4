"""Columns: for every count vector in a box, how soon its best chain of each shape is done.

`held[i, c]` is the most layers that the last p stages can hold when they use c devices by kind and no stage
takes longer than period i. One more stage is one more shifted maximum over the whole box, for all periods
at once.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.search.exact.pool import Vector
from planner.search.exact.role import Role, role_of
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable

# "No way to do it": stays below zero whatever one more stage adds, and 16 bits hold it.
_NONE = -10_000
# Count vectors of a box: few if small units do, and at most so many.
_FEW_CELLS, MOST_CHOSEN_CELLS = 700, 5_000
_SMALL_UNIT = 4
# Periods that are looked at together in search of the first that is long enough: at least so few, and as many as make
# so many numbers with the count vectors of a box.
_FEW_PERIODS, _TRIED_CELLS = 6, 16_000
Layers = npt.NDArray[np.signedinteger]


@dataclass(frozen=True)
class Box:
    """Count vectors from 0 to `size`, in multiples of `unit` devices."""

    size: Vector
    unit: int

    @property
    def shape(self) -> Vector:
        return tuple(size // self.unit + 1 for size in self.size)

    @property
    def cells(self) -> int:
        return int(np.prod(self.shape, dtype=float))

    def vectors(self) -> IntArray:
        """Every count vector in devices: [cell, kind]."""
        grid = np.indices(self.shape).reshape(len(self.size), -1).T * self.unit
        return grid.astype(np.int64)

    def steps(self, table: StageTable) -> dict[Vector, list[int]]:
        """Choices of a table by their counts in units; those that are no multiple are left out."""
        found: dict[Vector, list[int]] = {}
        covers = [
            (len(table.counts) + index, counts)
            for index, cover in enumerate(table.covers)
            for counts in cover.vectors(self.size)
        ]
        for choice, counts in [*enumerate(table.counts), *covers]:
            if all(n % self.unit == 0 and n <= most for n, most in zip(counts, self.size, strict=True)):
                found.setdefault(tuple(n // self.unit for n in counts), []).append(choice)
        return found


def choose_box(counts: Sequence[int]) -> Box:
    """All count vectors up to `counts`, in the smallest power of two of devices that keeps them few."""
    unit = 1
    while True:
        box = Box(tuple(int(count) // unit * unit for count in counts), unit)
        if box.cells <= (_FEW_CELLS if unit < _SMALL_UNIT else MOST_CHOSEN_CELLS):
            return box
        unit *= 2


def least_periods(
    table: StageTable,
    box: Box,
    *,
    periods: FloatArray,
    max_stages: int,
    wanted: Collection[int] | None = None,
) -> IntArray:
    """Index of the first period at which S stages on exactly c devices hold the model: [S - 1, *c].

    `len(periods)` where none does, and for numbers of stages that are not `wanted` (None: all are).
    """
    steps = box.steps(table)
    index = np.full((max_stages, *box.shape), len(periods), dtype=np.int64)
    held: Layers | None = None
    for position in range(1, max_stages + 1):
        if wanted is None or position in wanted:
            closing = Role.SINGLE if position == 1 else Role.FIRST
            covered = _extend(steps, periods, table, closing, position, held, box) >= table.layers
            index[position - 1] = np.where(covered.any(axis=0), covered.argmax(axis=0), len(periods))
        if position == max_stages:
            break
        behind = Role.LAST if position == 1 else Role.MIDDLE
        held = _extend(steps, periods, table, behind, position, held, box)
        if not (held >= 0).any():
            break
    return index


def first_periods(table: StageTable, box: Box, *, periods: FloatArray, max_stages: int) -> IntArray:
    """Index of the first period at which S stages on any devices of the box hold the model: [S - 1]; the least of
    `least_periods` over all devices, in less time."""
    steps = box.steps(table)
    counts = np.array(list(steps)).reshape(-1, len(box.size))
    # [one, other]: one needs as many devices of each kind, and more of some.
    dearer = (counts[:, None] >= counts).all(axis=2) & ~np.eye(len(steps), dtype=bool)
    index = np.full(max_stages, len(periods), dtype=np.int64)
    held: Layers | None = None
    for position in range(1, max_stages + 1):
        layers = _layers_by_step(
            steps, table, Role.SINGLE if position == 1 else Role.FIRST, position, periods
        )
        if held is not None:
            # Most layers on at most these devices.
            corners = tuple((np.array(box.shape) - 1 - counts).T)
            layers = np.maximum(layers + held[(slice(None), *corners)].T, np.int16(_NONE))
        covered = (layers >= table.layers).any(axis=0)
        if covered.any():
            index[position - 1] = covered.argmax()
        if position == max_stages:
            break
        behind = Role.LAST if position == 1 else Role.MIDDLE
        layers = _layers_by_step(steps, table, behind, position, periods)
        no_more = np.all(layers[:, None] <= layers, axis=2)
        beaten: npt.NDArray[np.bool_] = np.any(dearer & no_more, axis=1)
        useful = {step: steps[step] for step, no in zip(steps, beaten, strict=True) if not no}
        held = _extend(useful, periods, table, behind, position, held, box)
        if position == 1:
            for axis in range(1, held.ndim):
                np.maximum.accumulate(held, axis=axis, out=held)
        if not (held >= 0).any():
            break
    return index


def _layers_by_step(
    steps: dict[Vector, list[int]], table: StageTable, role: Role, position: int, periods: FloatArray
) -> Layers:
    """`_layers_within` of the best choice of every step: [step, period]."""
    caps = _layers_within(table, role, position, periods)
    found: Layers = np.array([caps[choices].max(axis=0) for choices in steps.values()])
    return found


def _layers_within(table: StageTable, role: Role, position: int, periods: FloatArray) -> Layers:
    """Most layers that fit and whose seconds stay within each period: [choice, period]; negative for none."""
    assert table.layers < -_NONE, f"a model of {table.layers} layers"
    fewest = 1 if role is Role.MIDDLE else 0
    seconds = table.seconds_at(role, position)
    # More layers never take less time, so that all below the most count.
    rising = np.minimum.accumulate(seconds[:, ::-1], axis=1)[:, ::-1]
    found = (rising[..., None] <= periods).sum(axis=1) - 1
    caps: Layers = np.where(found < fewest, _NONE, found).astype(np.int16)
    return caps


def _extend(
    steps: dict[Vector, list[int]],
    periods: FloatArray,
    table: StageTable,
    role: Role,
    position: int,
    held: Layers | None,
    box: Box,
) -> Layers:
    """Put one more stage before `held` (None: nothing yet) in every way: [period, *c]."""
    result: Layers = np.full((len(periods), *box.shape), _NONE, dtype=np.int16)
    caps = _layers_within(table, role, position, periods)
    for counts, choices in steps.items():
        layers = caps[choices].max(axis=0)
        if (layers < 0).all():
            continue
        if held is None:
            at: tuple[slice | int, ...] = (slice(None), *counts)
            result[at] = np.maximum(result[at], layers)
            continue
        into: tuple[slice, ...] = (slice(None), *(slice(count, None) for count in counts))
        room = (slice(None, size - count) for count, size in zip(counts, box.shape, strict=True))
        source: tuple[slice, ...] = (slice(None), *room)
        layers = layers.reshape(-1, *[1] * len(counts))
        np.maximum(result[into], held[source] + layers, out=result[into])
    return np.maximum(result, np.int16(_NONE))


def first_period(table: StageTable, box: Box, *, stages: int, periods: FloatArray) -> int | None:
    """Index of the first of the ascending `periods` at which so many stages on exactly the devices `box.size` hold
    the model; None if there is none."""
    low, high, most = 0, len(periods), max(_FEW_PERIODS, _TRIED_CELLS // box.cells)
    # Longer periods never hold less, so a few of those that are left at a time are enough.
    while low < high:
        tried = np.linspace(low, high - 1, min(most, high - low)).astype(int)
        enough = _most_layers(table, box, stages, periods[tried]) >= table.layers
        if not enough.any():
            low = int(tried[-1]) + 1
            continue
        first = int(enough.argmax())
        low, high = (int(tried[first - 1]) + 1 if first else low), int(tried[first])
    return high if high < len(periods) else None


def _most_layers(table: StageTable, box: Box, stages: int, periods: FloatArray) -> Layers:
    """On exactly the devices `box.size`, by period."""
    steps = box.steps(table)
    held: Layers | None = None
    for position in range(1, stages + 1):
        role = role_of(position=position, stages=stages)
        held = _extend(steps, periods, table, role, position, held, box)
    assert held is not None
    at = np.ravel_multi_index(tuple(size - 1 for size in box.shape), box.shape)
    found: Layers = held.reshape(len(periods), -1)[:, at]
    return found


def fullest_chain(table: StageTable, box: Box, *, stages: int, period: float) -> list[tuple[int, int]] | None:
    """(choice, layers) of the stages, first to last, that hold most layers on exactly the devices
    `box.size` with no stage above `period`; None if they do not hold the model. They may hold more than it
    has."""
    periods = np.array([period])
    steps = box.steps(table)
    held: list[Layers] = []
    for position in range(1, stages + 1):
        role = role_of(position=position, stages=stages)
        held.append(_extend(steps, periods, table, role, position, held[-1] if held else None, box))
    goal = tuple(size - 1 for size in box.shape)
    if int(held[-1][(0, *goal)]) < table.layers:
        return None
    found = []
    for position in range(stages, 0, -1):
        role = role_of(position=position, stages=stages)
        behind = held[position - 2] if position > 1 else None
        target = int(held[position - 1][(0, *goal)])
        choice, layers, goal = _last_step(
            steps, _layers_within(table, role, position, periods)[:, 0], position, behind, goal, target
        )
        found.append((choice, layers))
    return found


def _last_step(
    steps: dict[Vector, list[int]],
    caps: Layers,
    position: int,
    behind: Layers | None,
    goal: Vector,
    target: int,
) -> tuple[int, int, Vector]:
    """(choice, layers, counts left) of the first choice that leads to `target` layers at `goal`."""
    for counts, choices in steps.items():
        left = tuple(size - count for size, count in zip(goal, counts, strict=True))
        if min(left) < 0 or (behind is None and any(left)):
            continue
        rest = 0 if behind is None else int(behind[(0, *left)])
        for choice in choices:
            layers = int(caps[choice])
            if layers >= 0 and rest >= 0 and rest + layers == target:
                return choice, layers, left
    raise AssertionError("the layers and their trace disagree")
