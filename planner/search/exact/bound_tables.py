"""Stage tables for the bound: no stage of any plan of its class is quicker, smaller or cheaper than theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.cost.gradient import update_bytes_per_value
from planner.search.exact.choices import StageChoice, stage_choices
from planner.search.exact.covers import Cover, find_covers
from planner.search.exact.make_table import TableMaker
from planner.search.exact.replays import Replays, Replica, replicas_of
from planner.search.exact.role import Role
from planner.search.exact.stage_table import FloatArray, StageTable, joined, without_dominated
from planner.search.exact.surroundings import Surroundings
from planner.search.exact.zero import Zero


def bound_tables(
    makers: Sequence[TableMaker], *, sizes: Sequence[int], one_type: bool = False
) -> Iterator[StageTable]:
    """The usable tables, by micro-batch size: stages of one type exactly, covers for all others (unless `one_type`).

    Each maker has another ZeRO stage, or cuts activations by position: a stage may be as under any of them.
    """
    by_size = {
        size: list(stage_choices(makers[0].cost, makers[0].pool, micro_batch_size=size, mixed=False))
        for size in sizes
    }
    replicas = [one for choices in by_size.values() for choice in choices for one in replicas_of(choice)]
    for replays, alike in _by_replays(makers):
        replays.prepare(replicas, [maker.zero for maker in alike])
    for size, choices in by_size.items():
        table = without_dominated(joined([maker.table(choices, micro_batch_size=size) for maker in makers]))
        covers = [] if one_type else find_covers(makers[0].cost, makers[0].pool, micro_batch_size=size)
        if covers:
            table = _with_covers(table, covers, makers, max(sizes))
        if table.usable:
            yield table


def _by_replays(makers: Sequence[TableMaker]) -> list[tuple[Replays, list[TableMaker]]]:
    """Makers that have what stages recompute in common."""
    found: dict[int, list[TableMaker]] = {}
    for maker in makers:
        found.setdefault(id(maker.replays), []).append(maker)
    return [(alike[0].replays, alike) for alike in found.values()]


def _with_covers(
    table: StageTable, covers: Sequence[Cover], makers: Sequence[TableMaker], size: int
) -> StageTable:
    """`size` is the largest micro-batch."""
    maker = makers[0]
    seconds = np.array([[_line(cover, makers, role) for cover in covers] for role in Role])
    receive = [[_receive(cover, maker.surroundings, role) for cover in covers] for role in Role]
    replays = _Replay(makers, size)
    replays.prepare(covers)
    replay = np.array([[replays.of(cover, role) for cover in covers] for role in Role])
    gradient, update, gathered = _after(covers, makers)
    holders = [min(m.zero.holders(cover.fewest_replicas) for m in makers) for cover in covers]
    return replace(
        table,
        covers=tuple(covers),
        forward=np.concatenate([table.forward, seconds], axis=1),
        backward=np.concatenate([table.backward, np.zeros_like(seconds)], axis=1),
        receive=np.concatenate([table.receive, np.array(receive)], axis=1),
        replay=np.concatenate([table.replay, replay], axis=1),
        gradient_bytes=np.concatenate([table.gradient_bytes, gradient], axis=1),
        holders=np.concatenate([table.holders, holders]),
        update=np.concatenate([table.update, update], axis=1),
        gathered_bytes=np.concatenate([table.gathered_bytes, gathered], axis=1),
        last=np.concatenate([table.last, update], axis=1),
        after=np.concatenate([table.after, update], axis=1),
        tail=np.concatenate([table.tail, update], axis=1),
    )


def _line(cover: Cover, makers: Sequence[TableMaker], role: Role) -> FloatArray:
    """Seconds of the slowest replica by number of layers, activations whole or cut by position."""
    choice, ways = StageChoice(cover.tp, (cover.kind,), (cover.own,)), {m.by_position: m for m in makers}
    steps = [maker.steps(choice, role) for maker in ways.values()]
    least: FloatArray = np.min([forward + backward for forward, backward in steps], axis=0)
    return least


def _receive(cover: Cover, surroundings: Surroundings, role: Role) -> float:
    choice = StageChoice(cover.tp, (cover.kind,), (cover.own,))
    return surroundings.receive_seconds(choice, sides=role.sides)


class _Replay:
    """The slowest replica's own, under the kindest ZeRO stage; and one other with few rows must fit too.

    Optimizer state takes no memory, and gradients are shared by as many as the largest micro-batch `size` has rows:
    so what a replica recomputes is the same for all covers.
    """

    def __init__(self, makers: Sequence[TableMaker], size: int) -> None:
        self._makers, self._size = makers, size
        self._zeros = [
            Zero(maker.zero.stage, pipelines=2, most=True, limit=maker.zero.limit) for maker in makers
        ]
        self._fitting: dict[tuple[int, tuple[tuple[int, int], ...], Role], list[npt.NDArray[np.bool_]]] = {}

    def prepare(self, covers: Sequence[Cover]) -> None:
        """Work out what all covers need together."""
        loads = {(one.kind, one.tp, one.own) for one in covers}
        loads |= {(kind, one.tp, one.fewest[kind]) for one in covers for kind in one.others}
        replicas = [self._replica(tp, kind, rows) for kind, tp, rows in sorted(loads)]
        zeros = {id(maker): zero for maker, zero in zip(self._makers, self._zeros, strict=True)}
        for replays, alike in _by_replays(self._makers):
            replays.prepare(replicas, [zeros[id(maker)] for maker in alike])

    def _replica(self, tp: int, kind: int, rows: int) -> Replica:
        return Replica(kind, tp, rows, self._size, self._size)

    def of(self, cover: Cover, role: Role) -> FloatArray:
        """[micro-batches in flight, layers]."""
        own = self._by_maker(cover.tp, cover.kind, cover.own, role)
        found = [
            np.where(fit, line, np.inf) for fit, line in zip(self._others(cover, role), own, strict=True)
        ]
        least: FloatArray = np.min(found, axis=0)
        return least

    def _others(self, cover: Cover, role: Role) -> list[npt.NDArray[np.bool_]]:
        """Where any of the other kinds fits, by maker."""
        others = tuple((kind, cover.fewest[kind]) for kind in cover.others)
        key = (cover.tp, others, role)
        if key not in self._fitting:
            every = [self._by_maker(cover.tp, kind, rows, role) for kind, rows in others]
            self._fitting[key] = [
                np.any([np.isfinite(line) for line in lines], axis=0) for lines in zip(*every, strict=True)
            ]
        return self._fitting[key]

    def _by_maker(self, tp: int, kind: int, rows: int, role: Role) -> list[FloatArray]:
        return [
            maker.replays.of(self._replica(tp, kind, rows), role, zero)
            for maker, zero in zip(self._makers, self._zeros, strict=True)
        ]


def _after(covers: Sequence[Cover], makers: Sequence[TableMaker]) -> tuple[FloatArray, ...]:
    """Bytes of gradients, seconds of the optimizer on the quickest kind, and bytes gathered, each under the kindest
    ZeRO stage: [role, cover, layers]. A cover has as many replicas as rows at most."""
    cost, pool, figures = makers[0].cost, makers[0].pool, makers[0].figures
    streaming = min(
        cost.profile.streaming_seconds(device_type=kind.type, moved_bytes=1.0) for kind in pool.kinds
    )
    moved = update_bytes_per_value(cost.dtypes) * streaming
    values, reduced = (
        np.array([[figures.values(cover.tp, role, copies=copies) for cover in covers] for role in Role])
        for copies in (True, False)
    )
    wire = [min(m.zero.gradient_bytes_per_value(cost.dtypes, dp=c.size) for m in makers) for c in covers]
    ways = [
        [
            max(m.replays.ways(cover.tp, cover.size, cover.size, role, m.zero) for m in makers)
            for cover in covers
        ]
        for role in Role
    ]
    gathered = min(m.zero.gathered_bytes_per_value(cost.dtypes)[0] for m in makers)
    return reduced * np.array(wire)[:, None], values * moved / np.array(ways)[..., None], reduced * gathered
