"""Settling a chain: its stages in an order that transfers little, its layers split for the transfers that
remain."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, permutations

import numpy as np

from planner.cluster import Cluster
from planner.cost.exchange import Replica, receive_seconds
from planner.search.exact.chains import Chain, ChainStage
from planner.search.exact.choices import StageChoice
from planner.search.exact.pool import Pool
from planner.search.exact.role import Role, role_of
from planner.search.exact.stage_table import StageTable
from planner.search.layer_split import Split, SplitStage, best_splits

# Orders of so many groups of like stages are all tried.
_MOST_GROUPS = 4
# Orders whose layers are split anew.
_TRIED = 2


class Settler:
    """Settles chains of one table. Stages of like choices are taken to share nodes where they fit in one."""

    def __init__(self, table: StageTable, cluster: Cluster, pool: Pool, row_bytes: float) -> None:
        self.table = table
        self._cluster, self._pool, self._row_bytes = cluster, pool, row_bytes
        self._known: dict[tuple[int, int], float] = {}

    def settled(self, chain: Chain, micro_batches: int) -> Chain:
        """The chain of the same choices that ends so many micro-batches first, of a few orders."""
        orders = sorted(self._orders(chain.specs), key=self._slowest)[:_TRIED]
        found = [split for order in orders if (split := self._split(order, micro_batches)) is not None]
        return min(found, key=lambda one: one.pace.end_seconds(micro_batches), default=chain)

    def _slowest(self, specs: Sequence[tuple[int, int]]) -> float:
        """The slowest stage with the layers as they are, and a little of the others."""
        seconds = self._received(specs)
        for index, (choice, layers) in enumerate(specs):
            position = len(specs) - index
            role = role_of(position=position, stages=len(specs))
            replay = self.table.replay_at(role, position)[choice, layers]
            # Other layers may fit where these do not.
            replay = replay if np.isfinite(replay) else 0.0
            seconds[index] += (
                self.table.forward[role, choice, layers] + self.table.backward[role, choice, layers] + replay
            )
        return max(seconds) + sum(seconds) / 100

    def resplit(self, chain: Chain, exchange: Sequence[float], micro_batches: int) -> Chain:
        """The same stages with the best layers for these seconds of receiving, by stage."""
        found = self._with_received(chain.specs, exchange, micro_batches)
        return chain if found is None else found

    def _orders(self, specs: Sequence[tuple[int, int]]) -> Iterator[list[tuple[int, int]]]:
        """As it is, and with the middle stages sorted by choice, in every order of the choices."""
        yield list(specs)
        middle = list(specs[1:-1])
        groups = sorted({choice for choice, _ in middle})
        if 1 < len(groups) <= _MOST_GROUPS:
            for order in permutations(groups):
                yield [specs[0], *sorted(middle, key=lambda spec: order.index(spec[0])), specs[-1]]

    def _split(self, specs: Sequence[tuple[int, int]], micro_batches: int) -> Chain | None:
        """The best layers for these choices in this order; None if they do not fit."""
        return self._with_received(specs, self._received(specs), micro_batches)

    def _received(self, specs: Sequence[tuple[int, int]]) -> list[float]:
        """Seconds of receiving from both neighbours, by stage."""
        seconds = [0.0] * len(specs)
        for index, ((before, _), (behind, _)) in enumerate(pairwise(specs)):
            seconds[index + 1] += self._receive(before, behind)
            seconds[index] += self._receive(behind, before)
        return seconds

    def _with_received(
        self, specs: Sequence[tuple[int, int]], received: Sequence[float], micro_batches: int
    ) -> Chain | None:
        parts, stages = [], len(specs)
        for index, (choice, _) in enumerate(specs):
            role = role_of(position=stages - index, stages=stages)
            seconds = self.table.forward[role, choice] + self.table.backward[role, choice]
            seconds = seconds + self.table.replay_at(role, stages - index)[choice]
            most = int(self.table.most[role, choice, stages - index])
            fewest = 1 if role is Role.MIDDLE else 0
            parts.append(SplitStage(tuple(map(float, seconds)), received[index], fewest, most))
        splits = best_splits(parts, layers=self.table.layers, micro_batches=[micro_batches])
        return self._chain(specs, splits[0], received) if splits else None

    def _chain(self, specs: Sequence[tuple[int, int]], split: Split, received: Sequence[float]) -> Chain:
        stages = []
        table = self.table
        for index, ((choice, _), layers) in enumerate(zip(specs, split.layers, strict=True)):
            position = len(specs) - index
            role = role_of(position=position, stages=len(specs))
            replay = float(table.replay_at(role, position)[choice, layers])
            stages.append(
                ChainStage(
                    table.choices[choice],
                    layers,
                    float(table.forward[role, choice, layers]),
                    float(table.backward[role, choice, layers]) + replay + received[index],
                    float(table.after[role, choice, layers]),
                    float(table.tail[role, choice, layers]),
                )
            )
        counts = tuple(map(sum, zip(*(table.counts[choice] for choice, _ in specs), strict=True)))
        settled = tuple((choice, layers) for (choice, _), layers in zip(specs, split.layers, strict=True))
        return Chain(table.micro_batch_size, counts, settled, tuple(stages))

    def _receive(self, sender: int, receiver: int) -> float:
        key = (sender, receiver)
        if key not in self._known:
            a, b = self.table.choices[sender], self.table.choices[receiver]
            near = self._near(a, b)
            self._known[key] = max(
                receive_seconds(
                    self._cluster.links,
                    senders=self._replicas(a, 0),
                    sender_tp=a.tp,
                    receivers=self._replicas(b, 0 if near else 1),
                    receiver_tp=b.tp,
                    row_bytes=self._row_bytes,
                )
            )
        return self._known[key]

    def _near(self, a: StageChoice, b: StageChoice) -> bool:
        if len(self._cluster.nodes) == 1:
            return True
        same = a.kinds[0] == b.kinds[0] and len(set(a.kinds) | set(b.kinds)) == 1
        used = a.tp * len(a.kinds) + b.tp * len(b.kinds)
        return same and used <= self._pool.kinds[a.kinds[0]].largest

    def _replicas(self, choice: StageChoice, node: int) -> list[Replica]:
        return [
            Replica(node, self._pool.kinds[kind].type, rows)
            for kind, rows in zip(choice.kinds, choice.rows, strict=True)
        ]
