"""How a group that spans fast and slow links reduces: at once, or inside its nodes first.

The runtime does what this module chooses and the cost model prices what it chooses, from the same call.
Links are those of single devices, as everywhere in the cost model: the devices of a node can all talk to
other nodes at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.cluster import Device, Link, Links
from planner.cost.links import all_reduce_seconds, slowest_link

Algorithm = Literal["flat", "slices", "leader"]

SEGMENT = 1 << 22
"""Elements that calls of several steps move at a time, so that their scratch stays small: 16 MB in fp32."""

SCATTER_SEGMENT = 1 << 16
"""The same while backward goes on with activations in memory: 256 kB in fp32."""


@dataclass(frozen=True)
class Reduction:
    """How the members of a group reduce a message. `nodes` are positions in the group, node by node.

    * `flat`: one ring all-reduce over all members.
    * `slices`: every node reduces and scatters, the members that hold one slice all-reduce it between the
      nodes, every node gathers. Each node has equally many members.
    * `leader`: every node reduces to its first member, these all-reduce, every node broadcasts.
    """

    algorithm: Algorithm
    nodes: tuple[tuple[int, ...], ...]
    seconds: float

    @property
    def across(self) -> tuple[tuple[int, ...], ...]:
        """Groups of positions that reduce between nodes: one a slice, or that of the leaders."""
        if self.algorithm == "leader":
            return (tuple(node[0] for node in self.nodes),)
        return tuple(zip(*self.nodes, strict=True)) if self.algorithm == "slices" else ()

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Positions of every group of more than one member that the steps use, beside the whole one."""
        if self.algorithm == "flat":
            return ()
        return tuple(group for group in (*self.nodes, *self.across) if len(group) > 1)


def choose_reduction(links: Links, members: Sequence[Device], *, numel: int, element_bytes: int) -> Reduction:
    """The fastest way for `members` to sum so many elements by their links; `flat` where others gain nothing.

    Slices are equal, so a message that a node's members do not divide is not cut into them.
    """
    nodes, message_bytes = _by_node(members), numel * element_bytes

    def ring(group: Sequence[Device], size: float) -> float:
        return flat_seconds(links, group, message_bytes=size)

    best = Reduction("flat", nodes, ring(members, message_bytes))
    if len(nodes) < 2 or len(nodes) == len(members):
        return best
    options = [Reduction("leader", nodes, _leader_seconds(links, members, nodes, message_bytes, ring))]
    if len({len(node) for node in nodes}) == 1 and numel % len(nodes[0]) == 0:
        options.append(Reduction("slices", nodes, _slices_seconds(members, nodes, message_bytes, ring)))
    return min([best, *options], key=lambda option: option.seconds)


def flat_seconds(links: Links, members: Sequence[Device], *, message_bytes: float) -> float:
    """One ring over all members, paced by the slowest link between any two."""
    if len(members) < 2:
        return 0.0
    link = _slowest(links, members, message_bytes / len(members))
    return all_reduce_seconds(link, members=len(members), message_bytes=message_bytes)


def _by_node(members: Sequence[Device]) -> tuple[tuple[int, ...], ...]:
    positions: dict[str, list[int]] = {}
    for position, device in enumerate(members):
        positions.setdefault(device.node, []).append(position)
    return tuple(map(tuple, positions.values()))


Ring = Callable[[Sequence[Device], float], float]
"""Seconds of one ring all-reduce of so many bytes over some devices."""


def reduction_seconds(
    reduction: Reduction, links: Links, members: Sequence[Device], *, message_bytes: float, ring: Ring
) -> float:
    """Seconds of an all-reduce in the way that `reduction` chose, its rings priced by `ring`."""
    if reduction.algorithm == "slices":
        return _slices_seconds(members, reduction.nodes, message_bytes, ring)
    if reduction.algorithm == "leader":
        return _leader_seconds(links, members, reduction.nodes, message_bytes, ring)
    return ring(members, message_bytes) if len(members) > 1 else 0.0


def half_seconds(
    reduction: Reduction, members: Sequence[Device], *, message_bytes: float, ring: Ring
) -> float:
    """Seconds of reducing a message so that each member has its equal shard of the sum; or, the same way
    back, of gathering one from shards. Two such halves are an all-reduce in slices, or a ring over all.

    `message_bytes` are those of the whole message. Nodes of unlike sizes, which all-reduce by their leaders,
    have no equal slices: there shards are cut over all members at once.
    """
    if reduction.algorithm == "slices":
        return _slices_seconds(members, reduction.nodes, message_bytes, ring) / 2
    return ring(members, message_bytes) / 2 if len(members) > 1 else 0.0


def _slices_seconds(
    members: Sequence[Device], nodes: Sequence[Sequence[int]], message_bytes: float, ring: Ring
) -> float:
    size = len(nodes[0])
    # Reduce-scatter and all-gather of a node are the two halves of its ring all-reduce.
    inside = max(ring(group, message_bytes) for group in _unlike(members, nodes))
    between = max(ring(group, message_bytes / size) for group in _unlike(members, zip(*nodes, strict=True)))
    return inside + between


def _unlike(members: Sequence[Device], groups: Iterable[Sequence[int]]) -> Iterable[list[Device]]:
    """Groups whose rings may differ, all of them inside nodes or all with one member a node: by device types."""
    found: dict[tuple[str, ...], list[Device]] = {}
    for group in groups:
        devices = [members[i] for i in group]
        found.setdefault(tuple([device.type for device in devices]), devices)
    return found.values()


def _leader_seconds(
    links: Links,
    members: Sequence[Device],
    nodes: Sequence[Sequence[int]],
    message_bytes: float,
    ring: Ring,
) -> float:
    inside = 0.0
    for node in _unlike(members, nodes):
        if len(node) > 1:
            link = _slowest(links, node, message_bytes)
            # Reduce and broadcast pass the message along the node's members in a pipeline.
            once = (len(node) - 1) * link.latency + message_bytes / link.bandwidth
            inside = max(inside, 2 * once)
    return inside + ring([members[node[0]] for node in nodes], message_bytes)


def _slowest(links: Links, members: Sequence[Device], message_bytes: float) -> Link:
    return slowest_link(
        links, [(device.node, device.type) for device in members], message_bytes=message_bytes
    )
