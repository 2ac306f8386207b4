"""Stage tables for the bound: no stage of any plan of its class is quicker, smaller or cheaper than theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from planner.cost.gradient import update_bytes_per_value
from planner.cost.held import held_values
from planner.cost.memory import MemoryModel
from planner.cost.stages import StageCost
from planner.profile.analytic import PRECISION_BYTES
from planner.search.exact.choices import StageChoice, stage_choices
from planner.search.exact.covers import Cover, find_covers
from planner.search.exact.pool import Pool
from planner.search.exact.role import Role
from planner.search.exact.stage_table import Fits, FloatArray, IntArray, StageTable, build_table
from planner.search.exact.surroundings import Surroundings


def bound_tables(
    cost: StageCost,
    memory: MemoryModel,
    pool: Pool,
    surroundings: Surroundings,
    *,
    sizes: Sequence[int],
    max_stages: int,
) -> Iterator[StageTable]:
    """The usable tables, by micro-batch size: stages of one type exactly, covers for all others."""
    for size in sizes:
        choices = list(stage_choices(cost, pool, micro_batch_size=size, mixed=False))
        table = build_table(
            cost, memory, pool, choices, surroundings, micro_batch_size=size, max_stages=max_stages
        )
        covers = find_covers(cost, pool, micro_batch_size=size)
        if covers:
            table = _with_covers(table, covers, cost, memory, pool, surroundings)
        if table.usable:
            yield table


def _with_covers(
    table: StageTable,
    covers: Sequence[Cover],
    cost: StageCost,
    memory: MemoryModel,
    pool: Pool,
    surroundings: Surroundings,
) -> StageTable:
    fits = Fits(memory, pool, table.layers, table.max_stages)
    seconds = np.array([[_line(cover, cost, pool, role) for cover in covers] for role in Role])
    receive = [[_receive(cover, surroundings, role) for cover in covers] for role in Role]
    most = np.array([[_most(cover, fits, role) for cover in covers] for role in Role])
    gradient, update = _after(covers, cost, pool, table.layers)
    return replace(
        table,
        covers=tuple(covers),
        forward=np.concatenate([table.forward, seconds], axis=1),
        backward=np.concatenate([table.backward, np.zeros_like(seconds)], axis=1),
        receive=np.concatenate([table.receive, np.array(receive)], axis=1),
        most=np.concatenate([table.most, most], axis=1),
        gradient_bytes=np.concatenate([table.gradient_bytes, gradient], axis=1),
        update=np.concatenate([table.update, update], axis=1),
        after=np.concatenate([table.after, update], axis=1),
    )


def _line(cover: Cover, cost: StageCost, pool: Pool, role: Role) -> FloatArray:
    """Seconds of the slowest replica by number of layers."""
    none, one = (
        cost.replica_step(
            device_type=pool.kinds[cover.kind].type,
            tp=cover.tp,
            rows=cover.own,
            layers=layers,
            embedding=role.embedding,
            head=role.head,
        ).total
        for layers in (0, 1)
    )
    line: FloatArray = none + np.arange(cost.model.layers + 1, dtype=np.float64) * (one - none)
    return line


def _receive(cover: Cover, surroundings: Surroundings, role: Role) -> float:
    choice = StageChoice(cover.tp, (cover.kind,), (cover.own,))
    return surroundings.receive_seconds(choice, sides=role.sides)


def _most(cover: Cover, fits: Fits, role: Role) -> IntArray:
    """Most layers of the slowest replica, and of one other with a single row."""
    others = [fits.of(kind, cover.tp, 1, role) for kind in cover.others]
    found: IntArray = np.minimum(fits.of(cover.kind, cover.tp, cover.own, role), np.max(others, axis=0))
    return found


def _after(
    covers: Sequence[Cover], cost: StageCost, pool: Pool, layers: int
) -> tuple[FloatArray, FloatArray]:
    """Bytes of gradients, and seconds of the optimizer on the quickest kind: [role, cover, layers]."""
    wire, moved = PRECISION_BYTES[cost.dtypes.wire], update_bytes_per_value(cost.dtypes)
    streaming = min(
        cost.profile.streaming_seconds(device_type=kind.type, moved_bytes=1.0) for kind in pool.kinds
    )
    values = np.array([[_values(cost, cover.tp, layers, role) for cover in covers] for role in Role])
    return values * wire, values * moved * streaming


def _values(cost: StageCost, tp: int, layers: int, role: Role) -> FloatArray:
    none, one = (held_values(cost.model, tp, n, role.embedding, role.head).numel for n in (0, 1))
    found: FloatArray = none + np.arange(layers + 1, dtype=np.float64) * (one - none)
    return found
