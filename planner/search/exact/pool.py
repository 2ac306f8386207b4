"""The devices to plan for, in kinds: devices of one kind are interchangeable for a TP group."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from planner.catalogue import DeviceType
from planner.cluster import Cluster
from planner.model_spec import ModelSpec

Vector = tuple[int, ...]
"""Devices by kind."""


@dataclass(frozen=True)
class Kind:
    """Devices of one type, as the nodes hold them, and the TP degrees that the solver may use on them.

    `neighbours` is the largest number of devices, of any type, in a node that holds the kind.
    """

    type: str
    device: DeviceType
    degrees: tuple[int, ...]
    nodes: tuple[tuple[str, ...], ...]
    neighbours: int

    @property
    def count(self) -> int:
        return sum(map(len, self.nodes))

    @property
    def largest(self) -> int:
        """Most devices of the kind in one node."""
        return max(map(len, self.nodes))


@dataclass(frozen=True)
class Pool:
    """All kinds, in a fixed order."""

    kinds: tuple[Kind, ...]

    @property
    def counts(self) -> Vector:
        return tuple(kind.count for kind in self.kinds)

    @property
    def devices(self) -> int:
        return sum(self.counts)

    def degrees_of(self, type_: str) -> tuple[int, ...]:
        """TP degrees of all kinds of a type."""
        return tuple(tp for kind in self.kinds if kind.type == type_ for tp in kind.degrees)


def every_pool(cluster: Cluster, model: ModelSpec) -> Pool:
    """One kind a device type, with every TP degree that some node allows.

    Where nodes are unequal, stages that fit the counts may not fit the nodes: for bounds only.
    """
    kinds = []
    for type_ in sorted(cluster.counts):
        nodes = tuple(_ids_by_node(cluster, type_).values())
        degrees = tp_degrees(model, max(map(len, nodes)))
        kinds.append(_kind(cluster, type_, degrees, nodes))
    return Pool(tuple(kinds))


def pools(cluster: Cluster, model: ModelSpec) -> list[Pool]:
    """Pools whose stages fit the nodes if they fit the counts: the TP degrees of a kind divide its nodes'
    shares.

    The first has one kind a type, with the degrees that divide every node. Where that leaves wider ones
    out, the second cuts each node into blocks, the largest that some degree fills first, and has a kind for
    each size.
    """
    first, second = [], []
    for type_ in sorted(cluster.counts):
        nodes = tuple(_ids_by_node(cluster, type_).values())
        widest = tp_degrees(model, max(map(len, nodes)))
        common = tuple(tp for tp in widest if all(len(ids) % tp == 0 for ids in nodes))
        first.append(_kind(cluster, type_, common, nodes))
        blocks: dict[int, list[tuple[str, ...]]] = {}
        for ids in nodes:
            for block in _blocks(ids, model):
                blocks.setdefault(len(block), []).append(block)
        for size in sorted(blocks, reverse=True):
            degrees = tuple(tp for tp in tp_degrees(model, size) if size % tp == 0)
            second.append(_kind(cluster, type_, degrees, tuple(blocks[size])))
    found = [Pool(tuple(first))]
    if any(max(kind.degrees) > max(found[0].degrees_of(kind.type)) for kind in second):
        found.append(Pool(tuple(second)))
    return found


def _blocks(ids: tuple[str, ...], model: ModelSpec) -> Iterator[tuple[str, ...]]:
    left = ids
    while left:
        size = max(tp_degrees(model, len(left)))
        yield left[:size]
        left = left[size:]


def tp_degrees(model: ModelSpec, most: int) -> tuple[int, ...]:
    """TP degrees up to `most` that divide the model's heads and feed-forward width."""
    sizes = (model.heads, model.kv_heads, model.ffn_hidden_size)
    return tuple(tp for tp in range(1, most + 1) if all(size % tp == 0 for size in sizes))


def _ids_by_node(cluster: Cluster, type_: str) -> dict[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for device in cluster.devices:
        if device.type == type_:
            found.setdefault(device.node, []).append(device.id)
    return {node: tuple(ids) for node, ids in found.items()}


def _kind(cluster: Cluster, type_: str, degrees: tuple[int, ...], nodes: Iterable[tuple[str, ...]]) -> Kind:
    held = tuple(nodes)
    names = {cluster.device_by_id[ids[0]].node for ids in held}
    neighbours = max(sum(entry.count for entry in cluster.node_by_name[name].devices) for name in names)
    return Kind(type_, cluster.device_types[type_], degrees, held, neighbours)
