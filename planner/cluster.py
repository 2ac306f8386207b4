"""Cluster: the devices, the nodes that hold them and the links between them."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, model_validator

from planner.catalogue import DeviceType, canonical_name, lookup
from planner.errors import Contract, UserError, parse, read_yaml
from planner.units import BytesPerSecond, Seconds

# A plan for so many takes about a minute; a larger cluster would keep its user waiting without an end in sight.
MAX_DEVICES = 16_384


class Link(Contract):
    """Point-to-point link: `bandwidth` in bytes a second and direction, `latency` in seconds a message."""

    bandwidth: BytesPerSecond
    latency: Seconds = 10e-6

    def seconds(self, message_bytes: float) -> float:
        """Time for one message of that many bytes."""
        return self.latency + message_bytes / self.bandwidth


class Links(Contract):
    """Defaults are the paper's section 7.1: 200 Gbps inside a node, 100 Gbps between nodes.

    `overrides` maps a pair of device types `"A100/RTX3090"` (either order), or one type `"A100"` for a
    homogeneous pair, to a link that replaces both defaults for that pair between nodes; a key that ends
    in `@intra` replaces the link inside a node.
    """

    intra_node: Link = Link(bandwidth=25e9, latency=5e-6)
    inter_node: Link = Link(bandwidth=12.5e9, latency=10e-6)
    overrides: dict[str, Link] = Field(default_factory=dict)

    def between(self, *, type_a: str, type_b: str, same_node: bool) -> Link:
        """The link between two devices, given their types and whether they share a node."""
        suffix = "@intra" if same_node else ""
        names = [f"{type_a}/{type_b}{suffix}", f"{type_b}/{type_a}{suffix}"]
        if type_a == type_b:
            names.append(f"{type_a}{suffix}")
        for name in names:
            if name in self.overrides:
                return self.overrides[name]
        return self.intra_node if same_node else self.inter_node


class DeviceCount(Contract):
    """So many devices of one type inside a node."""

    type: str
    count: int = Field(ge=1)


class Node(Contract):
    """One machine. `emulate` says that its devices are played by host processes (docs/architecture.md)."""

    name: str = Field(pattern=r"^[A-Za-z0-9._-]+$")
    devices: tuple[DeviceCount, ...] = Field(min_length=1)
    address: str | None = None
    ray_node_id: str | None = None
    emulate: bool = False


@dataclass(frozen=True)
class Device:
    """One accelerator; `id` is `node name/index inside the node`."""

    id: str
    node: str
    index: int
    type: str


class Cluster(Contract):
    """Device types, nodes, links. Nodes are kept one by one; a file may write `count: 4` for four alike."""

    version: Literal[1] = 1
    device_types: dict[str, DeviceType]
    nodes: tuple[Node, ...] = Field(min_length=1)
    links: Links = Links()

    @model_validator(mode="before")
    @classmethod
    def _expand(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        own = data.get("device_types") or {}
        types: dict[str, Any] = dict(own) if isinstance(own, Mapping) else {}
        nodes: list[Any] = []
        entries = data.get("nodes") or []
        if not isinstance(entries, list | tuple):
            raise ValueError(f"nodes = {entries!r}: write a list with one entry a node")
        for entry in entries:
            nodes.extend(_expand_node(entry, types, taken=len(nodes)))
            if len(nodes) > MAX_DEVICES:
                raise ValueError(f"nodes: more than {MAX_DEVICES} nodes; the planner takes at most that many")
        return {**data, "device_types": types, "nodes": nodes}

    @model_validator(mode="after")
    def _check(self) -> Cluster:
        repeated = [name for name, times in Counter(node.name for node in self.nodes).items() if times > 1]
        if repeated:
            raise ValueError(f"nodes: name {repeated[0]!r} is used twice; give every node its own")
        total = sum(entry.count for node in self.nodes for entry in node.devices)
        if total > MAX_DEVICES:
            raise ValueError(f"nodes: {total} devices; the planner takes at most {MAX_DEVICES}")
        for key in self.links.overrides:
            for name in key.removesuffix("@intra").split("/"):
                if name not in self.device_types:
                    raise ValueError(
                        f"links.overrides: {key!r} names {name!r}, which the cluster does not hold;"
                        f" it holds {', '.join(self.device_types)}"
                    )
        return self

    @cached_property
    def devices(self) -> tuple[Device, ...]:
        """Every device in node order."""
        found = []
        for node in self.nodes:
            types = [entry.type for entry in node.devices for _ in range(entry.count)]
            found += [Device(f"{node.name}/{i}", node.name, i, type_) for i, type_ in enumerate(types)]
        return tuple(found)

    @cached_property
    def device_by_id(self) -> dict[str, Device]:
        return {device.id: device for device in self.devices}

    @cached_property
    def ids_by_place(self) -> dict[tuple[str, str], tuple[str, ...]]:
        """The devices of each (node, type) by id, in node order."""
        found: dict[tuple[str, str], list[str]] = {}
        for device in self.devices:
            found.setdefault((device.node, device.type), []).append(device.id)
        return {place: tuple(ids) for place, ids in found.items()}

    @cached_property
    def node_by_name(self) -> dict[str, Node]:
        return {node.name: node for node in self.nodes}

    @cached_property
    def node_numbers(self) -> dict[str, int]:
        """The place of each node in `nodes`, by name."""
        return {node.name: number for number, node in enumerate(self.nodes)}

    @property
    def counts(self) -> dict[str, int]:
        """Devices by type, in order of first appearance."""
        return dict(Counter(device.type for device in self.devices))

    @property
    def emulated(self) -> bool:
        """Whether any node is played by host processes."""
        return any(node.emulate for node in self.nodes)

    def type_of(self, device_id: str) -> DeviceType:
        return self.device_types[self.device_by_id[device_id].type]

    def link(self, device_a: str, device_b: str) -> Link:
        """The link between two devices by id."""
        a, b = self.device_by_id[device_a], self.device_by_id[device_b]
        return self.links.between(type_a=a.type, type_b=b.type, same_node=a.node == b.node)

    def to_yaml(self) -> str:
        return yaml.safe_dump(self.model_dump(mode="json", exclude_defaults=True), sort_keys=False)


def _expand_node(entry: Any, types: dict[str, Any], *, taken: int) -> list[Any]:
    """One file entry -> nodes of count one, with catalogue names resolved into `types`."""
    if isinstance(entry, Node):
        entry = entry.model_dump()
    if not isinstance(entry, Mapping):
        return [entry]
    node = dict(entry)
    count = node.pop("count", 1)
    if not isinstance(count, int) or isinstance(count, bool) or not 1 <= count <= MAX_DEVICES:
        raise ValueError(f"nodes[{taken}].count = {count!r}: write a whole number from 1 to {MAX_DEVICES}")
    devices = node.get("devices")
    if isinstance(devices, list | tuple):
        node["devices"] = [_resolve_type(device, types) for device in devices]
    if count == 1:
        return [{"name": f"node{taken}", **node}]
    base = node.pop("name", "node")
    start = taken if base == "node" else 0
    if node.get("address") or node.get("ray_node_id"):
        raise ValueError(
            f"nodes: {base!r} has count {count} and an address or ray_node_id; list such nodes singly"
        )
    return [{"name": f"{base}{start + i}", **node} for i in range(count)]


def _resolve_type(device: Any, types: dict[str, Any]) -> Any:
    if isinstance(device, DeviceCount):
        device = device.model_dump()
    if not isinstance(device, Mapping) or not isinstance(device.get("type"), str):
        return device
    name = device["type"].strip()
    if name not in types:
        canonical = canonical_name(name)
        if canonical in types:
            name = canonical
        else:
            name, datasheet = lookup(name)
            types[name] = datasheet
    return {**device, "type": name}


_GROUP = re.compile(r"^(\d+)x(.+)$")
_PART = re.compile(r"^(\d+):(.+)$")


def from_short_form(text: str) -> Cluster:
    """`4x8:910B2,4x8:910B4` (nodes x devices : type); `1x2:RTX3080+2:RTX4090` is one mixed node.

    Raises UserError that quotes the part that does not parse.
    """
    nodes: list[dict[str, Any]] = []
    for part in text.split(","):
        group = _GROUP.match(part.strip())
        if group is None:
            raise UserError(
                f"cluster = {text!r}: {part.strip()!r} is not nodes x devices : type, as in 4x8:910B2"
            )
        devices = []
        for piece in group[2].split("+"):
            match = _PART.match(piece.strip())
            if match is None:
                raise UserError(f"cluster = {text!r}: {piece.strip()!r} is not devices : type, as in 8:910B2")
            if not int(match[1]):
                raise UserError(
                    f"cluster = {text!r}: {piece.strip()!r} is no device; give a node at least one"
                )
            devices.append({"count": int(match[1]), "type": match[2]})
        nodes.append({"count": int(group[1]), "devices": devices})
    return parse(Cluster, {"nodes": nodes}, source=f"cluster {text!r}")


def resolve_cluster(value: object, *, base: Path | None = None) -> Cluster:
    """A Cluster from a short form, a YAML/JSON file (relative to `base`) or a mapping.

    Raises UserError naming the field, the value and the remedy.
    """
    if isinstance(value, Cluster):
        return value
    if isinstance(value, Mapping):
        return parse(Cluster, value, source="cluster")
    if not isinstance(value, str):
        raise UserError(f"cluster = {value!r}: give a short form, a file or a mapping")
    path = (base or Path()) / value
    # Not `Path.is_file`, which raises where a long short form is no possible file name.
    if os.path.isfile(path):
        return parse(Cluster, read_yaml(path, what="cluster"), source=str(path))
    if _GROUP.match(value.split(",")[0].strip()):
        return from_short_form(value)
    raise UserError(f"cluster = {value!r} is neither a file nor a short form such as 4x8:910B2,4x8:910B4")
