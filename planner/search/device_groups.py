"""Pipeline device groups (paper 4.2.1): unordered multisets of pipelines' devices, each composition once.

Devices of one type in one node are interchangeable, and so are nodes that hold the same, so a pipeline's
devices are described by counts alone: how many of each type it takes from each of its nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import combinations_with_replacement, product

# Devices taken from one node, by type.
NodeShare = tuple[int, ...]
# A pipeline's devices: its shares of nodes, largest first. Which node is which does not matter.
Composition = tuple[NodeShare, ...]


@dataclass(frozen=True)
class DeviceGrid:
    """The devices to plan: per node (or bundle of nodes), how many of each type.

    Devices are handed out `steps[type]` at a time. TP degrees divide `in_node[type]`, the devices of that
    type that every node with any of them can offer to a TP group; None where nodes are handed out singly,
    so that what a stage has of a node says it.
    """

    types: tuple[str, ...]
    nodes: Composition
    steps: tuple[int, ...]
    in_node: tuple[int, ...] | None = None

    @property
    def units(self) -> int:
        """Indivisible parts to hand out."""
        return self.units_of(self.nodes)

    def units_of(self, composition: Composition) -> int:
        """Those of a pipeline."""
        return sum(n // step for share in composition for n, step in zip(share, self.steps, strict=True))

    @property
    def devices(self) -> int:
        return sum(map(sum, self.nodes))

    def counts(self) -> NodeShare:
        """Devices by type, over all nodes."""
        return type_counts(self.nodes, len(self.types))


def type_counts(composition: Composition, types: int) -> NodeShare:
    return tuple(sum(share[k] for share in composition) for k in range(types))


@cache
def sub_shares(share: NodeShare, steps: tuple[int, ...]) -> tuple[NodeShare, ...]:
    """Every part of a node's share, nothing and all included, largest first."""
    ranges = [range(count, -1, -step) for count, step in zip(share, steps, strict=True)]
    return tuple(product(*ranges))


def minus(share: NodeShare, taken: NodeShare) -> NodeShare:
    return tuple(a - b for a, b in zip(share, taken, strict=True))


@cache
def picks(nodes: Composition, steps: tuple[int, ...]) -> tuple[tuple[Composition, Composition], ...]:
    """Every (pipeline, what is left) that can be taken from the nodes; equal ones once, largest first."""
    found: dict[tuple[Composition, Composition], None] = {}
    alike = sorted(Counter(nodes).items(), reverse=True)
    options = [list(combinations_with_replacement(sub_shares(share, steps), times)) for share, times in alike]
    for taken_groups in product(*options):
        taken, left = [], []
        for (share, _), group in zip(alike, taken_groups, strict=True):
            taken += [part for part in group if any(part)]
            left += [rest for part in group if any(rest := minus(share, part))]
        if taken:
            found[_sorted(taken), _sorted(left)] = None
    return tuple(sorted(found, key=lambda pick: (-sum(map(sum, pick[0])), pick)))


def compositions(grid: DeviceGrid) -> list[Composition]:
    """Every distinct pipeline that the grid allows, fewest devices first."""
    distinct = {taken for taken, _ in picks(grid.nodes, grid.steps)}
    return sorted(distinct, key=lambda composition: (sum(map(sum, composition)), composition))


def device_groups(
    grid: DeviceGrid, *, usable: Callable[[Composition], bool], most_pipelines: int
) -> Iterator[tuple[Composition, ...]]:
    """Every multiset of usable pipelines that the grid can hold together; devices may stay idle.

    Different ways to lay the same multiset out on nodes count as one.
    """
    seen: set[tuple[Composition, ...]] = set()
    visited: set[tuple[tuple[Composition, ...], Composition]] = set()

    def extend(chosen: tuple[Composition, ...], left: Composition) -> Iterator[tuple[Composition, ...]]:
        if (chosen, left) in visited:
            return
        visited.add((chosen, left))
        if chosen and chosen not in seen:
            seen.add(chosen)
            yield chosen
        if len(chosen) == most_pipelines:
            return
        for taken, rest in picks(left, grid.steps):
            if (not chosen or _order(taken) <= _order(chosen[-1])) and usable(taken):
                yield from extend((*chosen, taken), rest)

    yield from extend((), grid.nodes)


def place(group: tuple[Composition, ...], nodes: Composition) -> list[list[int]]:
    """For each pipeline of a group, the index of the node that each of its shares is taken from."""
    slots = [(p, s) for p, composition in enumerate(group) for s in range(len(composition))]
    left = list(nodes)
    chosen: dict[tuple[int, int], int] = {}

    def assign(position: int) -> bool:
        if position == len(slots):
            return True
        pipeline, slot = slots[position]
        share = group[pipeline][slot]
        taken = {chosen[pipeline, s] for s in range(slot)}
        tried = set()
        # The node with the least to spare first keeps whole nodes for pipelines that want them.
        for node in sorted(range(len(left)), key=lambda n: (sum(left[n]), n)):
            rest = minus(left[node], share)
            if node in taken or min(rest) < 0 or left[node] in tried:
                continue
            tried.add(left[node])
            before, left[node] = left[node], rest
            chosen[pipeline, slot] = node
            if assign(position + 1):
                return True
            left[node] = before
        return False

    assert assign(0), "the group does not fit its nodes"
    return [[chosen[p, s] for s in range(len(composition))] for p, composition in enumerate(group)]


def _order(composition: Composition) -> tuple[int, Composition]:
    return sum(map(sum, composition)), composition


def _sorted(shares: list[NodeShare]) -> Composition:
    return tuple(sorted(shares, reverse=True))
