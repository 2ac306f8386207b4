"""Covers: what bounds every stage that mixes device types, whatever its rows.

Among the replicas of such a stage some one, of kind k* with r* rows, has the slowest layer. No other
replica has more rows than it can do a layer of in that time: R_k for kind k. So the stage takes at least
the slowest replica's seconds, that replica must fit, and its devices cost at least what covers the
micro-batch with the slowest replica, one of another kind, and any number of replicas of R_k rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from planner.cost.stages import StageCost
from planner.search.exact.pool import Pool, Vector

FloatArray = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Cover:
    """Replicas of `tp` devices: the slowest, of a `kind` with `own` rows, and others of kind k with `fewest[k]` to
    `rows[k]`."""

    tp: int
    size: int
    kind: int
    own: int
    rows: Vector
    fewest: Vector
    layer_seconds: float

    @property
    def others(self) -> list[int]:
        """Kinds that can stand beside the slowest replica."""
        return [kind for kind, rows in enumerate(self.rows) if rows and kind != self.kind]

    @property
    def fewest_replicas(self) -> int:
        """The slowest, and others with the most rows that they can have."""
        return 1 - (self.own - self.size) // max(self.rows)

    def cost(self, prices: FloatArray) -> float:
        """Price of the cheapest replicas that cover the micro-batch."""
        least = [0.0] + [np.inf] * self.size
        for left in range(1, self.size + 1):
            least[left] = min(
                float(price) + least[max(0, left - rows)]
                for rows, price in zip(self.rows, prices, strict=True)
                if rows
            )
        rest = self.size - self.own
        other = min(float(prices[kind]) + least[max(0, rest - self.rows[kind])] for kind in self.others)
        return self.tp * (float(prices[self.kind]) + other)

    def vectors(self, counts: Vector) -> Iterator[Vector]:
        """Devices by kind of every set of replicas that covers the micro-batch and could not do with fewer."""

        def extend(kind: int, left: int, taken: Vector) -> Iterator[Vector]:
            if kind == len(counts):
                if left <= 0 and any(taken[other] for other in self.others):
                    yield taken
                return
            rows, first = self.rows[kind], int(kind == self.kind)
            # One of another kind is there even where the slowest kind alone would do.
            most = min(counts[kind] // self.tp, max(1, -(-left // rows) + first)) if rows else 0
            for replicas in range(first, max(first, most) + 1):
                done = self.own + (replicas - 1) * rows if first else replicas * rows
                yield from extend(kind + 1, left - done, (*taken, replicas * self.tp))

        for vector in extend(0, self.size, ()):
            if all(need <= count for need, count in zip(vector, counts, strict=True)):
                yield vector


def find_covers(cost: StageCost, pool: Pool, *, micro_batch_size: int) -> list[Cover]:
    """All covers of a micro-batch size; none where types cannot be mixed."""
    if micro_batch_size < 2 or len(pool.kinds) < 2:
        return []
    found = []
    for tp in sorted({tp for kind in pool.kinds for tp in kind.degrees}):
        layers = [_layer_seconds(cost, pool, kind, tp, micro_batch_size) for kind in range(len(pool.kinds))]
        for kind, own in enumerate(layers):
            for rows, seconds in own.items():
                possible = [[r for r, s in other.items() if s <= seconds] for other in layers]
                most, fewest = (tuple(end(of_kind, default=0) for of_kind in possible) for end in (max, min))
                cover = Cover(tp, micro_batch_size, kind, rows, most, fewest, seconds)
                if cover.others:
                    found.append(cover)
    return found


def _layer_seconds(cost: StageCost, pool: Pool, kind: int, tp: int, size: int) -> dict[int, float]:
    """Seconds of one layer by rows, fewer than the micro-batch, where the profile has them."""
    held = pool.kinds[kind]
    return {
        rows: cost.replica_step(device_type=held.type, tp=tp, rows=rows, layers=1).total
        for rows in range(1, size)
        if tp in held.degrees and cost.covers(device_type=held.type, tp=tp, rows=rows)
    }
