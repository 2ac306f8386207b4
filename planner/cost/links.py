"""Seconds of collectives on the links of the devices that take part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from planner.cluster import Link, Links


def all_reduce_seconds(link: Link, *, members: int, message_bytes: float) -> float:
    """Ring all-reduce over the group's slowest link: Eq. 6, plus the latency of its 2 (N - 1) steps."""
    if members < 2:
        return 0.0
    steps = 2 * (members - 1)
    return steps * (link.latency + message_bytes / members / link.bandwidth)


def slowest_link(links: Links, places: Iterable[tuple[object, str]], *, message_bytes: float) -> Link:
    """The link that takes longest for such a message, over all pairs of (node, device type).

    Works on the distinct places, so that a thousand devices cost no more than their nodes and types.
    """
    counts = Counter(places)
    nodes: dict[str, set[object]] = {}
    for node, type_ in counts:
        nodes.setdefault(type_, set()).add(node)
    found: list[Link] = []
    types = sorted(nodes)
    for i, a in enumerate(types):
        for b in types[i:]:
            shared = nodes[a] & nodes[b]
            if any(a != b or counts[node, a] > 1 for node in shared):
                found.append(links.between(type_a=a, type_b=b, same_node=True))
            if len(nodes[a] | nodes[b]) > 1:
                found.append(links.between(type_a=a, type_b=b, same_node=False))
    assert found, "a link needs two devices"
    return max(found, key=lambda link: link.seconds(message_bytes))
