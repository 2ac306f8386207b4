"""Inventory: the devices that a Ray cluster reports, as a planner Cluster."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from planner.catalogue import CATALOGUE, canonical_name
from planner.cluster import Cluster
from planner.errors import UserError, parse

ACCELERATOR_LABEL = "ray.io/accelerator-type"
NODE_LABEL = "ray.io/node-id"
# Devices that are played by host processes only count as places; Ray must not run out of CPUs for them.
PROCESS_CPUS = 0.01
_TYPE_PREFIX = "accelerator_type:"
_ACCELERATORS = {"GPU": "cuda", "NPU": "npu"}
_MAX_CPU_DEVICES = 8
# What Ray keeps for objects and the system has in use is not a device's.
_CPU_MEMORY_SHARE = 0.5

RayNode = Mapping[str, Any]
"""An entry of `ray.nodes()`."""


@dataclass(frozen=True)
class NodeDevices:
    """What a Ray node offers: devices by type, and the Ray resources that one device of a type takes."""

    ray_node_id: str
    address: str
    hostname: str
    counts: dict[str, int]
    claims: dict[str, dict[str, float]] = field(default_factory=dict)
    memory_bytes: int = 0


@dataclass(frozen=True)
class Inventory:
    """The Ray cluster's nodes that hold devices, in a stable order, as Ray and as the planner see them."""

    nodes: tuple[NodeDevices, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Devices by type over all nodes."""
        total: Counter[str] = Counter()
        for node in self.nodes:
            total.update(node.counts)
        return dict(total)

    def cluster(self) -> Cluster:
        """The planner's view; UserError when there is no device at all."""
        if not self.nodes:
            raise UserError("cluster = auto: the Ray cluster reports no devices; name a cluster in the job")
        types: dict[str, Any] = {}
        if cpus := [node for node in self.nodes if "CPU" in node.counts]:
            memory = min(node.memory_bytes // node.counts["CPU"] for node in cpus)
            types["CPU"] = CATALOGUE["CPU"].model_copy(update={"memory_bytes": memory}).model_dump()
        nodes = [
            {
                "name": name,
                "address": node.address,
                "ray_node_id": node.ray_node_id,
                "devices": [{"type": type_, "count": count} for type_, count in node.counts.items()],
            }
            for name, node in zip(_names(self.nodes), self.nodes, strict=True)
        ]
        return parse(Cluster, {"device_types": types, "nodes": nodes}, source="the Ray cluster's inventory")


def read_inventory(ray_nodes: Sequence[RayNode]) -> Inventory:
    """The devices of the living nodes of `ray.nodes()`.

    A node says what it holds by custom resources named as the catalogue's types (`910B4: 8`; a mixed node
    gives several), or by its GPU or NPU count and the label `ray.io/accelerator-type`. Where no node has an
    accelerator, the CPUs count as devices. Raises UserError for an accelerator whose type nothing says.
    """
    alive = sorted(
        (node for node in ray_nodes if node["Alive"]), key=lambda n: (n["NodeManagerAddress"], n["NodeID"])
    )
    found = [_accelerators(node) for node in alive]
    if not any(node.counts for node in found):
        found = [_cpus(node) for node in alive]
    return Inventory(tuple(node for node in found if node.counts))


def _accelerators(node: RayNode) -> NodeDevices:
    resources: Mapping[str, float] = node["Resources"]
    counts: dict[str, int] = {}
    claims: dict[str, dict[str, float]] = {}
    for name, amount in resources.items():
        type_ = None if name in ("CPU", *_ACCELERATORS) or ":" in name else canonical_name(name)
        if type_ is not None and type_ != "CPU" and amount >= 1:
            counts[type_] = int(amount)
            claims[type_] = {name: 1.0}
    for resource, backend in _ACCELERATORS.items():
        held = int(resources.get(resource, 0))
        if not held:
            continue
        if not counts:
            type_ = _accelerator_type(node, resource)
            counts, claims = {type_: held}, {type_: {resource: 1.0}}
        elif sum(counts.values()) <= held:
            # Both are told: claim both, so that Ray also hands out which accelerator is whose.
            claims = {
                t: claim | ({resource: 1.0} if CATALOGUE[t].backend == backend else {})
                for t, claim in claims.items()
            }
    return _node_devices(node, counts, claims)


def _accelerator_type(node: RayNode, resource: str) -> str:
    told = [node.get("Labels", {}).get(ACCELERATOR_LABEL, "")]
    told += [name.removeprefix(_TYPE_PREFIX) for name in node["Resources"] if name.startswith(_TYPE_PREFIX)]
    known = [canonical_name(name) for name in told if name]
    if known and known[0] is not None:
        return known[0]
    shown = next((name for name in told if name), None)
    problem = f"of unknown type {shown!r}" if shown else "of a type that nothing says"
    raise UserError(
        f"Ray node {node['NodeManagerHostname']} ({node['NodeManagerAddress']}) has {resource}s {problem};"
        f" start it with --labels {ACCELERATOR_LABEL}=TYPE, where TYPE is one of {', '.join(CATALOGUE)}"
    )


def _cpus(node: RayNode) -> NodeDevices:
    """A rank uses one core, so a node is as many devices as it has cores, within reason."""
    count = min(_MAX_CPU_DEVICES, int(node["Resources"].get("CPU", 0)))
    counts = {"CPU": count} if count else {}
    return _node_devices(node, counts, {"CPU": {"CPU": PROCESS_CPUS}})


def _node_devices(node: RayNode, counts: dict[str, int], claims: dict[str, dict[str, float]]) -> NodeDevices:
    return NodeDevices(
        ray_node_id=node["NodeID"],
        address=node["NodeManagerAddress"],
        hostname=node["NodeManagerHostname"],
        counts=counts,
        claims=claims,
        memory_bytes=int(node["Resources"].get("memory", 0) * _CPU_MEMORY_SHARE),
    )


def _names(nodes: Sequence[NodeDevices]) -> list[str]:
    """Host names, numbered where several Ray nodes share one."""
    plain = [re.sub(r"[^A-Za-z0-9._-]", "-", node.hostname) or "node" for node in nodes]
    seen: Counter[str] = Counter()
    names = []
    for name in plain:
        names.append(f"{name}-{seen[name]}" if plain.count(name) > 1 else name)
        seen[name] += 1
    return names


def describe_counts(counts: Mapping[str, float]) -> str:
    """`{"910B4": 4, "A100": 2}` -> `4x910B4, 2xA100`."""
    return ", ".join(f"{count:g}x{type_}" for type_, count in counts.items() if count) or "no devices"
