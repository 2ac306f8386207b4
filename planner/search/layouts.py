"""How a cluster is cut for the enumeration: device by device if small, coarser if not.

The enumeration handles about eight indivisible units. A larger cluster is cut into equal slices that are
planned once and repeated; inside a slice devices are handed out several of a node at a time, or several
nodes at a time. Several such layouts are tried. What they leave out (stages across slices, repeats that
differ, stages smaller than a unit) makes the plan coarse.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import gcd

from planner.cluster import Cluster, Node
from planner.search.assemble import node_share
from planner.search.device_groups import DeviceGrid

MOST_UNITS = 8
# Coarse units have many ways to run (TP up to the node), so fewer of them are handled in a slice.
MOST_COARSE_UNITS = 4

# Nodes that are handed out together; one node each unless the cluster is large.
Bundle = tuple[Node, ...]


@dataclass(frozen=True)
class Slice:
    """Nodes that are planned together, and the grid that describes them."""

    bundles: tuple[Bundle, ...]
    grid: DeviceGrid


@dataclass(frozen=True)
class Layout:
    """Slices that together are the cluster, or what of it divides evenly. Equal grids are planned once."""

    slices: tuple[Slice, ...]
    coarse: bool


def layouts(cluster: Cluster) -> list[Layout]:
    """The layouts to try, the most repeated first. A cluster of few devices has one, which is not coarse."""
    types = tuple(sorted(cluster.counts))
    whole = _slice(cluster.nodes, types, most_units=MOST_UNITS)
    if whole is not None and max(whole.grid.steps) == 1:
        return [Layout((whole,), coarse=False)]
    kinds = _kinds(cluster, types)
    found = []
    for repeats in sorted(_repeats(kinds), reverse=True):
        for most_units in (MOST_COARSE_UNITS, MOST_UNITS):
            slices = [_slice(nodes, types, most_units=most_units) for nodes in _cut(kinds, repeats) if nodes]
            kept = tuple(part for part in slices if part is not None)
            if len(kept) == len(slices):
                found.append(Layout(kept, coarse=True))
                break
    return found


def whole_cluster(cluster: Cluster) -> Slice:
    """The cluster in one slice, as fine as the enumeration can handle it; else its largest slice."""
    types = tuple(sorted(cluster.counts))
    whole = _slice(cluster.nodes, types, most_units=MOST_UNITS)
    return whole or layouts(cluster)[-1].slices[0]


def _kinds(cluster: Cluster, types: tuple[str, ...]) -> list[list[Node]]:
    """Nodes that hold the same, by kind, the richest kind first."""
    alike: dict[tuple[int, ...], list[Node]] = defaultdict(list)
    for node in cluster.nodes:
        alike[node_share(node, types)].append(node)
    return [alike[share] for share in sorted(alike, reverse=True)]


def _repeats(kinds: Sequence[Sequence[Node]]) -> set[int]:
    """How often a slice may repeat: divisors of every kind's count, or powers of two if there are none."""
    common = gcd(*map(len, kinds))
    if common > 1:
        return {n for n in range(1, common + 1) if common % n == 0}
    return {2**power for power in range(max(map(len, kinds)).bit_length())}


def _cut(kinds: Sequence[Sequence[Node]], repeats: int) -> Iterator[list[Node]]:
    """Equal slices, and one more of what is left over."""
    shares = [len(nodes) // repeats for nodes in kinds]
    for index in range(repeats):
        yield [
            node
            for nodes, n in zip(kinds, shares, strict=True)
            for node in nodes[index * n : (index + 1) * n]
        ]
    yield [node for nodes, n in zip(kinds, shares, strict=True) for node in nodes[repeats * n :]]


def _slice(nodes: Sequence[Node], types: tuple[str, ...], *, most_units: int) -> Slice | None:
    """The finest division of the nodes into at most so many units; None if there is none.

    First parts of nodes, then whole nodes, then bundles of two, four, ... nodes of a kind.
    """
    kinds: dict[tuple[int, ...], list[Node]] = defaultdict(list)
    for node in nodes:
        kinds[node_share(node, types)].append(node)
    size = 1
    while size <= max(map(len, kinds.values())):
        if all(len(alike) % size == 0 for alike in kinds.values()):
            bundles = [
                (tuple(size * count for count in share), tuple(alike[i : i + size]))
                for share, alike in kinds.items()
                for i in range(0, len(alike), size)
            ]
            bundles.sort(key=lambda bundle: bundle[0], reverse=True)
            grid = _grid([share for share, _ in bundles], types, most_units, bundle_size=size)
            if grid is not None:
                return Slice(tuple(bundle for _, bundle in bundles), grid)
        size *= 2
    return None


def _grid(
    shares: Sequence[tuple[int, ...]], types: tuple[str, ...], most_units: int, *, bundle_size: int
) -> DeviceGrid | None:
    """The finest grid of at most so many units; bundles of several nodes are never parted."""
    whole = tuple(gcd(*(share[k] for share in shares)) or 1 for k in range(len(types)))
    in_node = tuple(max(1, count // bundle_size) for count in whole)
    for finest in range(1, max(whole) + 1):
        steps = whole
        if bundle_size == 1:
            steps = tuple(
                max(d for d in range(1, count + 1) if count % d == 0 and d <= finest) for count in whole
            )
        grid = DeviceGrid(types, tuple(shares), steps, in_node if bundle_size > 1 else None)
        if grid.units <= most_units:
            return grid
        if bundle_size > 1:
            return None
    return None
