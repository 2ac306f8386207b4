"""Activations and their gradients between two neighbouring stages of unlike (tp, dp, rows).

Every TP rank of a receiving replica ends with the replica's whole rows. They travel in one of two ways:

* `whole`: each rank gets all rows;
* `sliced`: each rank gets its equal slice of the rows, one after the other, and the replica's ranks gather the
  rest from each other. The links between the stages then carry each row once instead of once a rank.

`choose_exchange` takes the cheaper by the links alone, so that planner, simulator and engine agree on it from a Plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal

from planner.cluster import Links
from planner.cost.links import all_reduce_seconds
from planner.plan import Plan
from planner.profile.analytic import PRECISION_BYTES

Way = Literal["whole", "sliced"]
WAYS: tuple[Way, ...] = ("whole", "sliced")


@dataclass(frozen=True)
class Replica:
    """One DP replica of a stage as its neighbours see it: a TP group inside `node`, of one device type."""

    node: int
    type: str
    rows: int


@dataclass(frozen=True)
class Side:
    """A stage as its neighbour sees it."""

    tp: int
    replicas: tuple[Replica, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        return tuple(replica.rows for replica in self.replicas)


@dataclass(frozen=True)
class Overlap:
    """What one replica of the sending stage owes one of the receiving stage: rows of a micro-batch, or parts of
    rows."""

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


@dataclass(frozen=True)
class Message:
    """From one rank to another, both as (replica, TP rank): the elements `start` to `stop` of a micro-batch, of
    which a row has as many as the receiving stage has TP ranks."""

    sender: tuple[int, int]
    receiver: tuple[int, int]
    start: int
    stop: int


def messages(way: Way, *, senders: Side, receivers: Side) -> Iterator[Message]:
    """Everything one stage sends another for one micro-batch. The TP ranks of a sending replica, which all hold its
    rows, take turns."""
    parts = receivers.tp
    turns = [count() for _ in senders.replicas]
    sent = [parts * rows for rows in senders.rows]
    if way == "whole":
        wanted = [parts * rows for rows in receivers.rows]
    else:
        # A slice is as long as the replica has rows, whatever its degree.
        wanted = [rows for rows in receivers.rows for _ in range(parts)]
    start = 0
    for overlap in row_overlaps(sent, wanted):
        if way == "whole":
            targets = [(overlap.receiver, rank) for rank in range(parts)]
        else:
            targets = [divmod(overlap.receiver, parts)]
        for target in targets:
            turn = next(turns[overlap.sender]) % senders.tp
            yield Message((overlap.sender, turn), target, start, start + overlap.rows)
        start += overlap.rows


@dataclass(frozen=True)
class Exchange:
    """A way, and the seconds of one micro-batch by receiving replica: until all its messages are there, and of
    gathering them."""

    way: Way
    arrival: tuple[float, ...]
    gather: tuple[float, ...]

    @property
    def seconds(self) -> list[float]:
        """Both, by receiving replica."""
        return [arrival + gather for arrival, gather in zip(self.arrival, self.gather, strict=True)]


def choose_exchange(
    links: Links, *, senders: Side, receivers: Side, row_bytes: float, ways: Sequence[Way] = WAYS
) -> Exchange:
    """The way in which the last receiving replica has its rows first; the earlier of `ways` if both are as good."""
    # Slices of one rank are whole rows.
    ways = ways if receivers.tp > 1 else ("whole",)
    priced = [_priced(way, links, senders, receivers, row_bytes) for way in ways]
    return min(priced, key=lambda exchange: max(exchange.seconds))


def gather_seconds(links: Links, device_type: str, *, tp: int, message_bytes: float) -> float:
    """Gathering a message from its slices inside a TP group: half of a ring all-reduce."""
    link = links.between(type_a=device_type, type_b=device_type, same_node=True)
    return all_reduce_seconds(link, members=tp, message_bytes=message_bytes) / 2


def _priced(way: Way, links: Links, senders: Side, receivers: Side, row_bytes: float) -> Exchange:
    """A device handles its messages one after the other, whether it sends or receives."""
    inbound: dict[tuple[int, int], float] = {}
    outbound: dict[tuple[int, int], float] = {}
    pairs: dict[tuple[int, int], None] = {}
    for message in messages(way, senders=senders, receivers=receivers):
        pair = message.sender[0], message.receiver[0]
        a, b = senders.replicas[pair[0]], receivers.replicas[pair[1]]
        link = links.between(type_a=a.type, type_b=b.type, same_node=a.node == b.node)
        seconds = link.seconds((message.stop - message.start) * row_bytes / receivers.tp)
        inbound[message.receiver] = inbound.get(message.receiver, 0.0) + seconds
        outbound[message.sender] = outbound.get(message.sender, 0.0) + seconds
        pairs[pair] = None
    arrival, busy = [0.0] * len(receivers.replicas), [0.0] * len(senders.replicas)
    for (replica, _), seconds in inbound.items():
        arrival[replica] = max(arrival[replica], seconds)
    for (replica, _), seconds in outbound.items():
        busy[replica] = max(busy[replica], seconds)
    for sender, receiver in pairs:
        arrival[receiver] = max(arrival[receiver], busy[sender])
    gather = [0.0] * len(arrival)
    if way == "sliced":
        gather = [
            gather_seconds(links, replica.type, tp=receivers.tp, message_bytes=replica.rows * row_bytes)
            for replica in receivers.replicas
        ]
    return Exchange(way, tuple(arrival), tuple(gather))


def receive_seconds(
    links: Links,
    *,
    senders: Sequence[Replica],
    sender_tp: int,
    receivers: Sequence[Replica],
    receiver_tp: int,
    row_bytes: float,
) -> list[float]:
    """Seconds until each receiving replica has its rows of one micro-batch, in the cheaper way."""
    exchange = choose_exchange(
        links,
        senders=Side(sender_tp, tuple(senders)),
        receivers=Side(receiver_tp, tuple(receivers)),
        row_bytes=row_bytes,
    )
    return exchange.seconds


def plan_exchange(plan: Plan, *, pipeline: int, sender: int, receiver: int) -> tuple[Way, list[Message]]:
    """The way between two neighbouring stages of a plan, named by their numbers, and its messages for one
    micro-batch: what the price takes, and what the engine sends."""
    senders, receivers = (_side(plan, pipeline, stage) for stage in (sender, receiver))
    row_bytes = plan.sequence_length * plan.model.hidden_size * PRECISION_BYTES[plan.dtypes.param]
    way = choose_exchange(plan.cluster.links, senders=senders, receivers=receivers, row_bytes=row_bytes).way
    return way, list(messages(way, senders=senders, receivers=receivers))


def _side(plan: Plan, pipeline: int, number: int) -> Side:
    stage, cluster = plan.pipelines[pipeline].stages[number], plan.cluster
    devices = [cluster.device_by_id[stage.tp_group(replica)[0]] for replica in range(stage.dp)]
    replicas = (
        Replica(cluster.node_numbers[device.node], device.type, rows)
        for device, rows in zip(devices, stage.rows, strict=True)
    )
    return Side(stage.tp, tuple(replicas))
