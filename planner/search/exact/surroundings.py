"""What a stage's time takes from outside it: the links to its neighbours and to the holders of its gradients.

`Expected` is what the plan will probably see, `Least` what no plan can beat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from planner.cluster import Cluster, Link
from planner.cost.exchange import gather_seconds
from planner.search.exact.choices import StageChoice
from planner.search.exact.pool import Kind, Pool


@dataclass(frozen=True)
class Holders:
    """Who holds a gradient: `count` in all, `replicas` of them of one stage, with `tp` devices each of `kinds`."""

    count: float
    replicas: float
    tp: int
    kinds: Sequence[int]


class Surroundings(Protocol):
    """The world around a stage."""

    def receive_seconds(self, choice: StageChoice, *, sides: int) -> float:
        """Receiving one micro-batch's rows from so many neighbours, in all."""
        ...

    def gradient_byte_seconds(self, holders: Holders, *, alone: bool) -> float:
        """All-reducing one byte of a stage's gradient; `alone`: only its own replicas hold it."""
        ...

    def replica_byte_seconds(self, choice: StageChoice) -> float:
        """Sending one byte from one of the stage's replicas to another."""
        ...


@dataclass(frozen=True)
class Expected:
    """Pipelines lie inside nodes as far as they can, so their gradients cross nodes."""

    cluster: Cluster
    pool: Pool
    row_bytes: int

    def receive_seconds(self, choice: StageChoice, *, sides: int) -> float:
        message = max(choice.rows) * self.row_bytes
        kind = self.pool.kinds[choice.kinds[0]]
        across = 0
        if len(self.cluster.nodes) > 1:
            used = choice.tp * choice.kinds.count(choice.kinds[0])
            # A node's worth of stage has both neighbours elsewhere, half a node's worth one of them.
            across = min(sides, 2 if used >= kind.largest else 1 if 2 * used >= kind.largest else 0)
        inside, outside = (
            _quicker(self.cluster, kind, choice.tp, message, _link(self.cluster, kind, kind, same))
            for same in (True, False)
        )
        return across * outside + (sides - across) * inside

    def gradient_byte_seconds(self, holders: Holders, *, alone: bool) -> float:
        """One ring, or inside nodes first, if the other pipelines have as many replicas of the stage and each
        pipeline's share nodes as far as they can."""
        kinds = [self.pool.kinds[kind] for kind in holders.kinds]
        count = holders.replicas * (holders.count - holders.replicas + 1)
        near = min(holders.replicas, max(1, min(kind.largest for kind in kinds) // holders.tp))
        if len(kinds) > 1:
            near = max(1, near // len(kinds))
        inside = max(1 / _link(self.cluster, kind, kind, True).bandwidth for kind in kinds)
        outside = 1 / self._slowest.bandwidth
        return min(
            _ring(count) * (outside if count > near else inside),
            _ring(near) * inside + _ring(count / near) / near * outside,
        )

    def ring_byte_seconds(self, holders: float) -> float:
        """All-reducing one byte over so many devices."""
        return _ring(holders) / self._slowest.bandwidth

    def replica_byte_seconds(self, choice: StageChoice) -> float:
        kinds = [self.pool.kinds[kind] for kind in sorted(set(choice.kinds))]
        inside = len(self.cluster.nodes) == 1 or (
            len(kinds) == 1 and choice.tp * len(choice.rows) <= kinds[0].largest
        )
        return max(1 / _link(self.cluster, a, b, inside).bandwidth for a in kinds for b in kinds)

    @cached_property
    def _slowest(self) -> Link:
        kinds, same = self.pool.kinds, len(self.cluster.nodes) == 1
        links = [_link(self.cluster, a, b, same) for a in kinds for b in kinds]
        return min(links, key=lambda link: link.bandwidth)


@dataclass(frozen=True)
class Least:
    """Every transfer has the best link that any plan could give it."""

    cluster: Cluster
    pool: Pool
    row_bytes: int
    measured_rate: float = math.inf
    """Least seconds a byte of any all-reduce that the profile has measured."""
    _received: dict[tuple[int, int, int], tuple[float, float]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def receive_seconds(self, choice: StageChoice, *, sides: int) -> float:
        return max(self._receive(kind, choice.tp, max(choice.rows), sides) for kind in set(choice.kinds))

    def _receive(self, index: int, tp: int, rows: int, sides: int) -> float:
        kind, asked = self.pool.kinds[index], (index, tp, rows)
        if asked not in self._received:
            self._received[asked] = self._from_neighbour(kind, tp, rows * self.row_bytes)
        inside, outside = self._received[asked]
        if len(self.cluster.nodes) == 1:
            return sides * inside
        # A neighbour inside the node needs a device there.
        near = min(sides, kind.neighbours - tp)
        return near * min(inside, outside) + (sides - near) * outside

    def _from_neighbour(self, kind: Kind, tp: int, message: float) -> tuple[float, float]:
        """Inside the node and across."""
        inside, outside = (
            min(
                _quicker(self.cluster, kind, tp, message, _link(self.cluster, kind, other, same))
                for other in self.pool.kinds
            )
            for same in (True, False)
        )
        return inside, outside

    def gradient_byte_seconds(self, holders: Holders, *, alone: bool) -> float:
        """The least of three ways (planner/collectives.py): one ring, which is the first with one holder a node; with
        equally many in each node, inside the nodes first, then between them what is each device's share; or all of it
        between one device of each node."""
        inside, outside = self._bandwidths
        if len(self.cluster.nodes) == 1:
            return self._ring_seconds(holders.count, inside)
        together = self._replicas_a_node(holders)
        # Holders of the same part share no TP group, so beside one of them a node has room for as many devices.
        room = max(self.pool.kinds[kind].neighbours for kind in holders.kinds) - holders.tp + 1
        nodes = -(-holders.replicas // together)
        if len(holders.kinds) > 1 and holders.replicas > 1 and not self._mixed_nodes:
            nodes = max(nodes, 2.0)
        most = min(together if alone else room, int(holders.count / nodes * (1 + 1e-9)))
        equal = min(
            self._ring_seconds(min(near, holders.count), max(inside, outside))
            + self._ring_seconds(holders.count / near, outside) / near
            for near in range(1, max(most, 1) + 1)
        )
        return min(equal, self._ring_seconds(max(nodes, 2.0), outside))

    @cached_property
    def _mixed_nodes(self) -> bool:
        """Whether any node has devices of several kinds."""
        return any(kind.neighbours > kind.largest for kind in self.pool.kinds)

    def _replicas_a_node(self, holders: Holders) -> int:
        """Most replicas of the stage in one node."""
        kinds = [self.pool.kinds[kind] for kind in holders.kinds]
        return max(kind.largest if len(kinds) == 1 else kind.neighbours for kind in kinds) // holders.tp

    def _ring_seconds(self, holders: float, bandwidth: float) -> float:
        """A byte on a ring: by the link, or as quick as any was measured."""
        return min(_ring(holders) / bandwidth, self.measured_rate)

    def replica_byte_seconds(self, choice: StageChoice) -> float:
        return 1 / max(self._bandwidths)

    @cached_property
    def _bandwidths(self) -> tuple[float, float]:
        """The best inside and between nodes."""
        kinds = self.pool.kinds
        inside, outside = (
            max(_link(self.cluster, a, b, same).bandwidth for a in kinds for b in kinds)
            for same in (True, False)
        )
        return inside, outside


def _link(cluster: Cluster, a: Kind, b: Kind, same_node: bool) -> Link:
    return cluster.links.between(type_a=a.type, type_b=b.type, same_node=same_node)


def _quicker(cluster: Cluster, kind: Kind, tp: int, message: float, link: Link) -> float:
    """Seconds of receiving a message over a link: whole, or a slice that the TP group gathers. Whoever sends takes
    at least as long, since a rank gets the message, or its slice, over such links and one after the other."""
    slices = link.seconds(message / tp) + gather_seconds(
        cluster.links, kind.type, tp=tp, message_bytes=message
    )
    return min(link.seconds(message), slices)


def _ring(holders: float) -> float:
    """Messages' worth that each device of a ring all-reduce sends."""
    return 2 * (holders - 1) / holders if holders > 1 else 0.0
