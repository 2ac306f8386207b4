"""Receiving activations and their gradients between two neighbouring stages of unlike (tp, dp, rows)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster import Links


@dataclass(frozen=True)
class Replica:
    """One DP replica of a stage as its neighbours see it: a TP group inside `node`, of one device type."""

    node: int
    type: str
    rows: int


@dataclass(frozen=True)
class Overlap:
    """Rows of a micro-batch that one replica of the sending stage owes one of the receiving stage."""

    sender: int
    receiver: int
    rows: int


def row_overlaps(sender_rows: Sequence[int], receiver_rows: Sequence[int]) -> list[Overlap]:
    """Who owes whom how many rows, when both stages cut the same micro-batch by their own `rows`."""
    assert sum(sender_rows) == sum(receiver_rows)
    overlaps, sender, receiver = [], 0, 0
    left_to_send, left_to_receive = sender_rows[0], receiver_rows[0]
    while True:
        rows = min(left_to_send, left_to_receive)
        overlaps.append(Overlap(sender, receiver, rows))
        left_to_send -= rows
        left_to_receive -= rows
        if left_to_send == 0:
            sender += 1
            if sender == len(sender_rows):
                return overlaps
            left_to_send = sender_rows[sender]
        if left_to_receive == 0:
            receiver += 1
            left_to_receive = receiver_rows[receiver]


def receive_seconds(
    links: Links,
    *,
    senders: Sequence[Replica],
    sender_tp: int,
    receivers: Sequence[Replica],
    receiver_tp: int,
    row_bytes: float,
) -> list[float]:
    """Seconds until each receiving replica has its rows of one micro-batch.

    Every TP rank of a receiver gets its whole rows, each from one TP rank of the sender; the ranks of a
    sender take turns. A device handles its messages one after the other, whether it sends or receives.
    """
    inbound = [0.0] * len(receivers)
    outbound = [[0.0] * sender_tp for _ in senders]
    turns = [0] * len(senders)
    overlaps = row_overlaps([r.rows for r in senders], [r.rows for r in receivers])
    for overlap in overlaps:
        a, b = senders[overlap.sender], receivers[overlap.receiver]
        link = links.between(type_a=a.type, type_b=b.type, same_node=a.node == b.node)
        seconds = link.seconds(overlap.rows * row_bytes)
        inbound[overlap.receiver] += seconds
        for _ in range(receiver_tp):
            outbound[overlap.sender][turns[overlap.sender] % sender_tp] += seconds
            turns[overlap.sender] += 1
    for overlap in overlaps:
        inbound[overlap.receiver] = max(inbound[overlap.receiver], *outbound[overlap.sender])
    return inbound
