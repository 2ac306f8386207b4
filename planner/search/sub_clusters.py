"""Parts of a cluster: so many devices of each type, with the other nodes left out.

Devices of one type are taken node by node, those with most of them first, so that a part breaks up as few
nodes as it can.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from planner.cluster import Cluster, Device, DeviceCount, Node
from planner.plan import Plan

Counts = tuple[int, ...]
"""Devices of each type, in the order of `Cluster.counts`."""

# Clusters of so many devices are parted device by device, larger ones node by node.
_FEW_DEVICES = 16
# Whole nodes of a type that are counted one by one; of more, powers of two.
_FEW_NODES = 8


def sub_counts(cluster: Cluster) -> list[Counts]:
    """Device counts of the parts to look at, the whole cluster first; none is empty."""
    steps = [_type_counts(cluster, name) for name in cluster.counts]
    found = [counts for counts in itertools.product(*steps) if any(counts)]
    return sorted(found, key=lambda counts: (-sum(counts), counts))


def _type_counts(cluster: Cluster, name: str) -> list[int]:
    """Numbers of a type's devices: whole nodes, parts of the first one, and any number where they are few."""
    held = sorted((share for share in _held(cluster, name) if share), reverse=True)
    ends = list(itertools.accumulate(held))
    if len(ends) > _FEW_NODES:
        kept = {2**power - 1 for power in range(len(ends).bit_length())} | {len(ends) - 1}
        kept |= {len(ends) * quarter // 4 - 1 for quarter in (1, 2, 3)}
        ends = [ends[index] for index in sorted(kept)]
    numbers = {0, *ends} | {2**power for power in range(held[0].bit_length()) if 2**power < held[0]}
    if sum(cluster.counts.values()) <= _FEW_DEVICES:
        numbers |= set(range(ends[-1] + 1))
    return sorted(numbers)


def _held(cluster: Cluster, name: str) -> list[int]:
    return [sum(entry.count for entry in node.devices if entry.type == name) for node in cluster.nodes]


class SubCluster:
    """A part as a cluster of its own; `restored` puts its plans back on the whole cluster."""

    def __init__(self, whole: Cluster, counts: Counts) -> None:
        self.whole = whole
        taken = _taken(whole, dict(zip(whole.counts, counts, strict=True)))
        self.cluster = whole.model_copy(update={"nodes": tuple(_nodes(whole, taken))})
        # A mixed node numbers its devices type by type, so a part of it numbers them anew.
        self._names = {ours.id: theirs.id for ours, theirs in zip(self.cluster.devices, taken, strict=True)}

    def restored(self, plan: Plan) -> Plan:
        """The plan on the whole cluster: its price is the same, and all devices outside the part are idle."""
        pipelines = tuple(
            pipeline.model_copy(
                update={
                    "stages": tuple(
                        stage.model_copy(update={"devices": tuple(self._names[d] for d in stage.devices)})
                        for stage in pipeline.stages
                    )
                }
            )
            for pipeline in plan.pipelines
        )
        used = {device for pipeline in pipelines for device in pipeline.devices}
        idle = tuple(device.id for device in self.whole.devices if device.id not in used)
        return plan.model_copy(update={"cluster": self.whole, "pipelines": pipelines, "idle_devices": idle})


def _taken(whole: Cluster, wanted: dict[str, int]) -> list[Device]:
    """The devices of a part, in the cluster's order."""
    left, taken = Counter(wanted), set()
    for name in wanted:
        held = _held(whole, name)
        order = sorted(range(len(held)), key=lambda index: (-held[index], index))
        shares = {whole.nodes[index].name: held[index] for index in order}
        free = {node: [d.id for d in whole.devices if d.node == node and d.type == name] for node in shares}
        for node in shares:
            for device in free[node][: left[name]]:
                taken.add(device)
            left[name] -= min(left[name], len(free[node]))
    return [device for device in whole.devices if device.id in taken]


def _nodes(whole: Cluster, taken: list[Device]) -> Iterator[Node]:
    by_node: dict[str, Counter[str]] = {}
    for device in taken:
        by_node.setdefault(device.node, Counter())[device.type] += 1
    for node in whole.nodes:
        if node.name in by_node:
            counts = by_node[node.name]
            devices = tuple(DeviceCount(type=name, count=count) for name, count in counts.items())
            yield node.model_copy(update={"devices": devices})
