"""Placement: which Ray node plays which node of the plan, and the reservation of every pipeline's devices."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from actors.inventory import NODE_LABEL, PROCESS_CPUS, Inventory, NodeDevices, describe_counts
from planner.cluster import Cluster, Node
from planner.errors import UserError
from planner.plan import Plan


@dataclass(frozen=True)
class Bundle:
    """What Ray sets aside for one rank: resources, on a node with these labels."""

    type: str
    resources: dict[str, float]
    labels: dict[str, str] = field(default_factory=dict)


def bind_nodes(cluster: Cluster, inventory: Inventory) -> dict[str, NodeDevices]:
    """The Ray node behind every node of `cluster` that has real accelerators, by node name.

    A node that names its `ray_node_id` or `address` gets that one; the others take the Ray node with the
    fewest devices to spare. Emulated nodes and those with nothing but CPUs run anywhere and are left out.
    Raises UserError that says what is missing.
    """
    wanted = [node for node in cluster.nodes if not node.emulate and _accelerator_counts(node)]
    free = list(inventory.nodes)
    bound: dict[str, NodeDevices] = {}
    # The pickiest first: those that name their machine, then those that hold most.
    for node in sorted(wanted, key=lambda n: (not _names_machine(n), -sum(_accelerator_counts(n).values()))):
        chosen = _best(node, free)
        if chosen is None:
            raise UserError(_missing(node, cluster, inventory))
        free.remove(chosen)
        bound[node.name] = chosen
    return bound


def bundles(plan: Plan, bound: Mapping[str, NodeDevices]) -> list[list[Bundle]]:
    """One bundle a rank, in rank order, listed by pipeline."""
    listed: list[list[Bundle]] = [[] for _ in plan.pipelines]
    for place in plan.ranks:
        device = plan.cluster.device_by_id[place.device]
        node = bound.get(device.node)
        if node is None or device.type not in node.claims:
            made = Bundle(device.type, {"CPU": PROCESS_CPUS})
        else:
            made = Bundle(device.type, node.claims[device.type], {NODE_LABEL: node.ray_node_id})
        listed[place.pipeline].append(made)
    return listed


def reserve(listed: Sequence[Sequence[Bundle]], *, timeout_seconds: float) -> list[PlacementGroup]:
    """A placement group for every pipeline, all of them or none.

    Raises UserError that says what is missing if they are not all placed within the timeout.
    """
    free = ray.available_resources()
    groups = [
        placement_group(
            [bundle.resources for bundle in pipeline],
            strategy="PACK",
            bundle_label_selector=[bundle.labels for bundle in pipeline],
        )
        for pipeline in listed
    ]
    deadline = time.monotonic() + timeout_seconds
    try:
        for group in groups:
            if not group.wait(max(0.0, deadline - time.monotonic())):
                raise UserError(_unplaced(listed, free))
    except BaseException:
        release(groups)
        raise
    return groups


def release(groups: Sequence[PlacementGroup]) -> None:
    """Give the devices back; Ray ends every actor that still runs on them."""
    for group in groups:
        remove_placement_group(group)


def _accelerator_counts(node: Node) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for entry in node.devices:
        if entry.type != "CPU":
            counts[entry.type] += entry.count
    return dict(counts)


def _names_machine(node: Node) -> bool:
    return node.ray_node_id is not None or node.address is not None


def _best(node: Node, free: Sequence[NodeDevices]) -> NodeDevices | None:
    counts = _accelerator_counts(node)
    fitting = [
        offer
        for offer in free
        if node.ray_node_id in (None, offer.ray_node_id)
        and node.address in (None, offer.address)
        and all(offer.counts.get(type_, 0) >= count for type_, count in counts.items())
    ]
    return min(fitting, key=lambda offer: sum(offer.counts.values()), default=None)


def _missing(node: Node, cluster: Cluster, inventory: Inventory) -> str:
    needs = Counter[str]()
    for other in cluster.nodes:
        if not other.emulate:
            needs.update(_accelerator_counts(other))
    place = node.ray_node_id or node.address
    where = f" at {place}" if place else ""
    return (
        f"cluster: node {node.name!r}{where} with {describe_counts(_accelerator_counts(node))} has no match;"
        f" the job needs {describe_counts(needs)}, the Ray cluster has {describe_counts(inventory.counts)}:"
        " start the missing nodes, or say emulate: true to rehearse without them"
    )


def _unplaced(listed: Sequence[Sequence[Bundle]], free: Mapping[str, float]) -> str:
    everything = [bundle for pipeline in listed for bundle in pipeline]
    needs = Counter(bundle.type for bundle in everything)
    total = ray.cluster_resources()
    resources = dict.fromkeys(name for bundle in everything for name in bundle.resources)
    told = ", ".join(f"{free.get(name, 0):g} of {total.get(name, 0):g} {name} free" for name in resources)
    return (
        f"cluster: needs {describe_counts(needs)}; the Ray cluster has {told}:"
        " wait for other jobs to end, or plan for fewer devices"
    )
