"""Which devices play which stages: TP groups inside nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from planner.search.exact.chains import Chain
from planner.search.exact.choices import StageChoice
from planner.search.exact.pool import Pool

# `inside`: a pipeline's stages next to each other, so that activations stay in nodes.
# `aligned`: the same stage of like pipelines next to each other, so that gradients do.
# `tight`: wherever the least room is wasted; where TP degrees do not divide each other the others may fail.
Order = Literal["inside", "aligned", "tight"]
Placed = list[list[tuple[str, ...]]]


@dataclass(frozen=True)
class _Seat:
    """A stage that wants devices."""

    pipeline: int
    stage: int
    tp: int
    kinds: tuple[int, ...]

    @property
    def size(self) -> int:
        return self.tp * len(self.kinds)


def place(pool: Pool, chains: Sequence[Chain], *, order: Order) -> Placed | None:
    """Devices of every stage of every chain, as `place_stages` has them."""
    return place_stages(pool, [[stage.choice for stage in chain.stages] for chain in chains], order=order)


def place_stages(pool: Pool, pipelines: Sequence[Sequence[StageChoice]], *, order: Order) -> Placed | None:
    """Devices of every stage of every pipeline, row-major [dp][tp]; None if the nodes cannot be cut that way.

    Wider TP groups choose first, and each takes a node that it fills as well as any; among equals, the node
    that its neighbours in the order took last.
    """
    seats = [
        _Seat(index, number, stage.tp, stage.kinds)
        for index, stages in enumerate(pipelines)
        for number, stage in enumerate(stages)
    ]
    if order == "aligned":
        seats.sort(key=lambda seat: (seat.stage, seat.pipeline))
    free = [[list(ids) for ids in kind.nodes] for kind in pool.kinds]
    taken: dict[tuple[int, int], tuple[str, ...]] = {}
    last: dict[tuple[int, int], int] = {}
    for seat in sorted(seats, key=lambda seat: -seat.tp):
        devices = _seated(seat, free, last, order)
        if devices is None:
            return None
        taken[seat.pipeline, seat.stage] = devices
    return [[taken[index, number] for number in range(len(stages))] for index, stages in enumerate(pipelines)]


def _seated(
    seat: _Seat, free: list[list[list[str]]], last: dict[tuple[int, int], int], order: Order
) -> tuple[str, ...] | None:
    devices: list[str] = []
    near = seat.pipeline if order == "inside" else seat.stage
    for kind in dict.fromkeys(seat.kinds):
        left = seat.kinds.count(kind)
        while left:
            before = None if order == "tight" else last.get((kind, near))
            node = _node(free[kind], seat.tp, left, before)
            if node is None:
                return None
            groups = min(left, len(free[kind][node]) // seat.tp)
            devices += free[kind][node][: groups * seat.tp]
            del free[kind][node][: groups * seat.tp]
            last[kind, near] = node
            left -= groups
    return tuple(devices)


def _node(nodes: list[list[str]], tp: int, groups: int, last: int | None) -> int | None:
    """The node to take groups of a TP degree from: the last one if it has room; else one that the degree
    divides, that holds most of the groups, with the least to spare."""
    if last is not None and len(nodes[last]) >= tp:
        return last
    best, best_key = None, (0, 0, 0)
    for index, ids in enumerate(nodes):
        if len(ids) < tp:
            continue
        fit = min(groups, len(ids) // tp)
        key = (int(len(ids) % tp == 0), fit, -len(ids))
        if best is None or key > best_key:
            best, best_key = index, key
    return best
