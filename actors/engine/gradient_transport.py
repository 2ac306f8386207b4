"""How one collective of gradients travels: at once or inside nodes first, in fp32 or narrower on the wire.

Every holder of a call starts it in the launch order. What needs one operation on one process group is left to
torch; what needs several in a row (`Steps`) runs on a thread or a stream of its own, one call after another,
so that the steps of two calls never mix and backward goes on meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from actors.engine.courier import Work, make_courier
from planner import collectives
from planner.collectives import Reduction
from planner.gradient_calls import GradientCall, call_reduction
from planner.plan import Plan

SEGMENT = collectives.SEGMENT

WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Precisions in which gradients can travel."""

Groups = Mapping[tuple[int, ...], dist.ProcessGroup]
"""Process groups of more than one rank, by their ranks in ascending order."""


@dataclass(frozen=True)
class Span:
    """From when to when a collective used its links, by `time.monotonic()`."""

    start: float
    end: float


class CallTransport(Protocol):
    """How a call is summed over its holders: called on each of them, in launch order."""

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        """Start to sum `data` (flat, contiguous, fp32) in place; it is complete after the work's `wait`.

        Until then nobody else may touch it. Afterwards every holder holds the same bits, or under ZeRO each
        its own shard of them (actors/engine/shard_transport.py).
        """
        ...

    def close(self) -> None:
        """Let go of threads and groups; nothing may be under way, or it has failed."""
        ...


class GroupTransport:
    """One flat all-reduce a call on the process group of its holders."""

    def __init__(self, groups: Groups) -> None:
        self._groups = groups

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        work = dist.all_reduce(data, group=self._groups[call.holders], async_op=True)
        assert work is not None, f"this rank is not among the holders {call.holders}"
        return work

    def close(self) -> None:
        # gloo's connections last as long as anyone refers to their group.
        self._groups = {}


def make_transport(
    plan: Plan,
    groups: Groups,
    *,
    rank: int,
    calls: Sequence[GradientCall],
    device: torch.device,
) -> CallTransport:
    """The transport of a rank's calls: each is reduced as the planner chose for its links and its size."""
    wire = WIRES[plan.dtypes.wire]
    reductions = {call.index: call_reduction(plan, call) for call in calls}
    stepped = [call for call in calls if wire != torch.float32 or reductions[call.index].algorithm != "flat"]
    if not stepped:
        return GroupTransport(groups)
    largest = min(SEGMENT, max(call.numel for call in stepped))
    steps = Steps(groups, rank=rank, wire=wire, device=device, largest=largest)
    return SteppedTransport(groups, steps=steps, reductions=reductions, wire=wire)


class SteppedTransport:
    """Calls whose way takes several steps, or another precision, beside calls that torch does at once."""

    def __init__(
        self, groups: Groups, *, steps: Steps, reductions: dict[int, Reduction], wire: torch.dtype
    ) -> None:
        self._flat = GroupTransport(groups)
        self._steps = steps
        self._reductions = reductions
        self._wire = wire
        self._courier = make_courier(steps.device)

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        reduction = self._reductions[call.index]
        if reduction.algorithm == "flat" and self._wire == data.dtype:
            return self._flat.reduce(call, data)
        return self._courier.start(lambda: self._steps.all_reduce(call.holders, reduction, data))

    def close(self) -> None:
        self._flat.close()
        self._steps.close()
        self._courier.close()


class Steps:
    """All-reduce, reduce-scatter and all-gather of flat fp32 data as blocking steps on one rank.

    With a narrower `wire` precision every contribution is rounded once, summed in fp32 and rounded once more:
    two roundings whatever the number of members, where a ring that adds in the wire's precision has one a
    member. `largest` is the most elements that `all_reduce` is given: the scratch that a narrower wire needs for
    it exists from the start. What is only scattered and gathered takes its scratch, a shard at most, when it is
    under way; over gloo, no more than `segment` elements of it at a time.
    """

    def __init__(
        self,
        groups: Groups,
        *,
        rank: int,
        wire: torch.dtype,
        device: torch.device,
        largest: int = 0,
        segment: int = SEGMENT,
    ) -> None:
        self._groups = groups
        self._rank = rank
        self._wire = wire
        self._segment = segment
        self.device = device
        # The members' shares are rounded up, by less than an element each. In fp32 data travels from where it lies.
        narrow = largest and wire != torch.float32
        room = largest + max((len(ranks) for ranks in groups), default=0) if narrow else 0
        self._received = torch.empty(room, dtype=wire, device=device)
        self._sent = torch.empty(room, dtype=wire, device=device)

    def close(self) -> None:
        """Let go of the groups."""
        self._groups = {}

    def all_reduce(self, holders: Sequence[int], reduction: Reduction, data: torch.Tensor) -> None:
        """Sum `data` over the holders in the way that was chosen; all end with the same bits."""
        # A whole number of elements for each holder, and so for each member of even nodes.
        size = max(1, SEGMENT // len(holders)) * len(holders)
        for part in data.split(size):
            self._all_reduce(holders, reduction, part)

    def _all_reduce(self, holders: Sequence[int], reduction: Reduction, data: torch.Tensor) -> None:
        nodes = [tuple(holders[position] for position in node) for node in reduction.nodes]
        across = [tuple(holders[position] for position in group) for group in reduction.across]
        if reduction.algorithm == "flat":
            self._flat(tuple(holders), data)
        elif reduction.algorithm == "slices":
            node, between = self._own(nodes), self._own(across)
            shard = self.reduce_scatter(node, data)
            self._flat(between, shard)
            self.all_gather(node, data)
        else:
            self._by_leader(self._own(nodes), across[0], data)

    def reduce_scatter(self, ranks: tuple[int, ...], data: torch.Tensor) -> torch.Tensor:
        """Sum `data` over the ranks, each its own equal shard of it, in place; returns the shard.

        The ranks must divide the elements (as they do a `Section`'s). What is outside the shard is undefined.
        """
        shard = self._shard(ranks, data)
        if len(ranks) == 1:
            return shard
        group = self._groups[ranks]
        if self._wire == data.dtype and not _is_gloo(group):
            dist.reduce_scatter_single(shard, data, group=group)
            return shard
        rows = data.view(len(ranks), -1)
        for first in range(0, rows.shape[1], self._segment):
            self._sum_own_row(ranks, rows[:, first : first + self._segment])
        return shard

    def _sum_own_row(self, ranks: tuple[int, ...], rows: torch.Tensor) -> None:
        """A message from everyone to everyone, added as it comes in the same order every time."""
        own = rows[ranks.index(self._rank)]
        if self._wire != own.dtype:
            own.copy_(own.to(self._wire))
        received = torch.empty(own.numel(), dtype=self._wire, device=self.device)
        for sender, receiver in self._turns(ranks):
            self._swap(ranks, rows[receiver].to(self._wire), receiver, received, sender)
            own.add_(received)

    def all_gather(self, ranks: tuple[int, ...], data: torch.Tensor) -> None:
        """Give every rank all shards of `data`, each from the rank that `reduce_scatter` left it on.

        On the wire's precision the own shard is rounded too, so that all ranks end with the same bits.
        """
        if len(ranks) == 1:
            return
        if self._wire != data.dtype:
            rows = data.view(len(ranks), -1)
            for first in range(0, rows.shape[1], SEGMENT):
                self._gather_narrow(ranks, rows[:, first : first + SEGMENT])
        elif _is_gloo(self._groups[ranks]):
            self._exchange_shards(ranks, data, self._shard(ranks, data))
        else:
            dist.all_gather_single(data, self._shard(ranks, data), group=self._groups[ranks])

    def _gather_narrow(self, ranks: tuple[int, ...], rows: torch.Tensor) -> None:
        own = rows[ranks.index(self._rank)].to(self._wire)
        rows[ranks.index(self._rank)].copy_(own)
        if not _is_gloo(self._groups[ranks]):
            whole = torch.empty(rows.numel(), dtype=self._wire, device=self.device)
            dist.all_gather_single(whole, own, group=self._groups[ranks])
            rows.copy_(whole.view(rows.shape))
            return
        received = torch.empty_like(own)
        for sender, receiver in self._turns(ranks):
            self._swap(ranks, own, receiver, received, sender)
            rows[sender].copy_(received)

    def _turns(self, ranks: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Positions of whom to receive from and whom to send to, each other member once."""
        me = ranks.index(self._rank)
        for distance in range(1, len(ranks)):
            yield (me - distance) % len(ranks), (me + distance) % len(ranks)

    def _swap(
        self, ranks: tuple[int, ...], sent: torch.Tensor, receiver: int, received: torch.Tensor, sender: int
    ) -> None:
        """Send to one position and receive from another; both messages have arrived at the end."""
        group = self._groups[ranks]
        sending = dist.isend(sent, ranks[receiver], group=group)
        receiving = dist.irecv(received, ranks[sender], group=group)
        assert sending is not None and receiving is not None
        receiving.wait()
        sending.wait()

    def _flat(self, ranks: tuple[int, ...], data: torch.Tensor) -> None:
        if len(ranks) == 1:
            return
        if self._wire == data.dtype:
            dist.all_reduce(data, group=self._groups[ranks])
        else:
            self._narrow(ranks, data)

    def _narrow(self, ranks: tuple[int, ...], data: torch.Tensor) -> None:
        """`data` of any length: the ranks' shares of it are rounded up, and the scratch with them."""
        size = -(-data.numel() // len(ranks))
        sent, received = self._sent[: size * len(ranks)], self._received[: size * len(ranks)]
        sent[: data.numel()].copy_(data)
        sent[data.numel() :].zero_()
        dist.all_to_all_single(received, sent, group=self._groups[ranks])
        rows = received.view(len(ranks), size)
        own = self._shard(ranks, sent)
        own.copy_(torch.sum(rows, 0, dtype=data.dtype))
        if _is_gloo(self._groups[ranks]):
            self._exchange_shards(ranks, sent, own)
        else:
            dist.all_gather_single(received, own, group=self._groups[ranks])
            sent = received
        data.copy_(sent[: data.numel()])

    def _by_leader(self, node: tuple[int, ...], leaders: tuple[int, ...], data: torch.Tensor) -> None:
        leader = node[0]
        if len(node) > 1:
            self._reduce_to(leader, node, data)
        if self._rank == leader:
            self._flat(leaders, data)
        if len(node) > 1:
            self._broadcast_from(leader, node, data)

    def _reduce_to(self, leader: int, node: tuple[int, ...], data: torch.Tensor) -> None:
        if self._wire == data.dtype:
            dist.reduce(data, leader, group=self._groups[node])
            return
        # One member after another: the sum is in fp32, in the same order every time.
        received = self._received[: data.numel()]
        if self._rank != leader:
            dist.send(self._on_wire(data), leader, group=self._groups[node])
            return
        data.copy_(self._on_wire(data))
        for member in node[1:]:
            dist.recv(received, member, group=self._groups[node])
            data.add_(received)

    def _broadcast_from(self, leader: int, node: tuple[int, ...], data: torch.Tensor) -> None:
        wire = data if self._wire == data.dtype else self._on_wire(data)
        dist.broadcast(wire, leader, group=self._groups[node])
        if wire is not data:
            data.copy_(wire)

    def _exchange_shards(self, ranks: tuple[int, ...], whole: torch.Tensor, shard: torch.Tensor) -> None:
        """All-gather in place by messages between every two ranks: gloo's own copies, in more turns."""
        group, rows, works = self._groups[ranks], whole.view(len(ranks), -1), []
        for sender, receiver in self._turns(ranks):
            works.append(dist.isend(shard, ranks[receiver], group=group))
            works.append(dist.irecv(rows[sender], ranks[sender], group=group))
        for work in works:
            assert work is not None
            work.wait()

    def _on_wire(self, data: torch.Tensor) -> torch.Tensor:
        if self._wire == data.dtype:
            return data
        return self._sent[: data.numel()].copy_(data)

    def _shard(self, ranks: tuple[int, ...], data: torch.Tensor) -> torch.Tensor:
        size, rest = divmod(data.numel(), len(ranks))
        assert rest == 0, f"{data.numel()} elements are not cut evenly by {len(ranks)} ranks"
        return data.narrow(0, ranks.index(self._rank) * size, size)

    def _own(self, groups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
        return next(group for group in groups if self._rank in group)


def _is_gloo(group: dist.ProcessGroup) -> bool:
    return dist.get_backend(group) == "gloo"
