"""What a stage's time takes from outside it: the links to its neighbours and to the holders of its gradients.

`Expected` is what the plan will probably see, `Least` what no plan can beat.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from planner.cluster import Cluster, Link
from planner.search.exact.choices import StageChoice
from planner.search.exact.pool import Kind, Pool


class Surroundings(Protocol):
    """The world around a stage."""

    def receive_seconds(self, choice: StageChoice, *, sides: int) -> float:
        """Receiving one micro-batch's rows from so many neighbours, in all."""
        ...

    def gradient_byte_seconds(self, holders: float) -> float:
        """All-reducing one byte of gradient over so many holders."""
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
        inside, outside = (_link(self.cluster, kind, kind, same).seconds(message) for same in (True, False))
        return across * outside + (sides - across) * inside

    def gradient_byte_seconds(self, holders: float) -> float:
        return _ring(holders) / self._slowest.bandwidth

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

    def receive_seconds(self, choice: StageChoice, *, sides: int) -> float:
        message = max(choice.rows) * self.row_bytes
        return max(self._receive(self.pool.kinds[i], choice.tp, message, sides) for i in set(choice.kinds))

    def _receive(self, kind: Kind, tp: int, message: float, sides: int) -> float:
        inside, outside = (
            min(_link(self.cluster, kind, other, same).seconds(message) for other in self.pool.kinds)
            for same in (True, False)
        )
        if len(self.cluster.nodes) == 1:
            return sides * inside
        # A neighbour inside the node needs a device there.
        near = min(sides, kind.neighbours - tp)
        return near * min(inside, outside) + (sides - near) * outside

    def gradient_byte_seconds(self, holders: float) -> float:
        """With some of the holders in each node: reducing inside nodes first, then between them what is each
        device's share, is as quick as it can be."""
        inside, outside = self._bandwidths
        if len(self.cluster.nodes) == 1:
            return _ring(holders) / inside
        most = max(kind.neighbours for kind in self.pool.kinds)
        return min(
            _ring(min(near, holders)) / max(inside, outside) + _ring(holders / near) / near / outside
            for near in range(1, most + 1)
        )

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


def _ring(holders: float) -> float:
    """Messages' worth that each device of a ring all-reduce sends."""
    return 2 * (holders - 1) / holders if holders > 1 else 0.0
