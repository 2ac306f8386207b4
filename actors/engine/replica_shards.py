"""Sums of which the replicas of each stage keep pieces, and how the parameters made of them are gathered.

Inside a stage pieces are equal, and torch's own collectives move them. Between stages their borders are not
alike: holders exchange what of a piece another one answers for, one partner after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from actors.engine.courier import Work, make_courier
from actors.engine.gradient_transport import SEGMENT, CallTransport, Groups, Steps
from actors.engine.replica_buffer import HeldPart
from planner.gradient_calls import GradientCall
from planner.plan import Plan
from planner.replica_shards import Range, common_ranges

Pick = Callable[[HeldPart, int], list[torch.Tensor]]
"""What of a part goes to, or comes from, another holder: flat views, the same elements on both sides."""


class PartTransport(CallTransport, Protocol):
    """A `CallTransport` after which each rank's shares of the call's pieces are complete."""

    def gather(self, held: HeldPart) -> Work:
        """Start to fill a part's room from its holders' pieces, rounded to the parameters' precision."""
        ...


class ReplicaShards:
    """Sums and gathers the parts of one rank.

    Args:
        replicas: the ranks that hold what this one holds, one a replica of its stage.
        parts: of every call of the rank, by its index.
        inside: with whom rooms are scattered when a call starts; None where each micro-batch did so.
        gather_inside: moves parameters between replicas.
    """

    def __init__(
        self,
        plan: Plan,
        groups: Groups,
        *,
        rank: int,
        replicas: tuple[int, ...],
        parts: Mapping[int, Sequence[HeldPart]],
        inside: Steps | None,
        gather_inside: Steps,
        sums: torch.dtype,
        values: torch.dtype,
    ) -> None:
        self._by_pipeline = plan.zero_scope == "pipeline"
        self._groups, self._rank, self._replicas = groups, rank, replicas
        self._parts, self._inside, self._gather_inside = parts, inside, gather_inside
        self._sums, self._values = sums, values
        self._device = gather_inside.device
        self._courier = make_courier(self._device)

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        """Start to sum the parts of a call, which `data` is the whole of."""
        return self._courier.start(lambda: self._reduce(call))

    def gather(self, held: HeldPart) -> Work:
        """Start to fill a part's room from its holders' pieces, rounded to the parameters' precision."""
        return self._courier.start(lambda: self._gather(held))

    def close(self) -> None:
        """Let go of groups and thread."""
        self._groups = {}
        self._gather_inside.close()
        if self._inside is not None:
            self._inside.close()
        self._courier.close()

    def _reduce(self, call: GradientCall) -> None:
        parts = self._parts[call.index]
        if self._inside is not None:
            for held in parts:
                self._inside.reduce_scatter(self._replicas, held.room)
        for some in _segments(parts):
            self._sum(some)

    def _sum(self, parts: Sequence[HeldPart]) -> None:
        """Over all holders, each what it answers for; by pipeline, every holder then has its whole piece."""
        self._round(parts)
        self._exchange(parts, given=self._for, taken=self._from, wire=self._sums, add=True)
        if self._by_pipeline:
            self._round(parts)
            self._exchange(parts, given=self._from, taken=self._for, wire=self._sums)

    def _for(self, held: HeldPart, other: int) -> list[torch.Tensor]:
        """What of this rank's piece another holder answers for."""
        return held.in_piece(_crossing(held, giver=self._rank, taker=other))

    def _from(self, held: HeldPart, other: int) -> list[torch.Tensor]:
        """What of another holder's piece this rank answers for."""
        return held.in_piece(_crossing(held, giver=other, taker=self._rank))

    def _round(self, parts: Sequence[HeldPart]) -> None:
        """What travels is rounded, so what stays is too: each contribution counts alike."""
        if self._sums == torch.float32:
            return
        for held in parts:
            for own in held.in_piece(held.part.owned(self._rank)):
                own.copy_(own.to(self._sums))

    def _gather(self, held: HeldPart) -> None:
        if held.shared_room:
            held.own_row.copy_(held.piece)
        if self._by_pipeline:
            # Also where there is nobody to send it to: copies in other pipelines are rounded.
            held.own_row.copy_(held.own_row.to(self._values))
            self._gather_inside.all_gather(self._replicas, held.room)
            return
        owned = held.part.owned
        for own in held.in_room(owned(self._rank)):
            own.copy_(own.to(self._values))
        self._exchange(
            [held],
            given=lambda held, _: held.in_room(owned(self._rank)),
            taken=lambda held, other: held.in_room(owned(other)),
            wire=self._values,
        )

    def _exchange(
        self, parts: Sequence[HeldPart], *, given: Pick, taken: Pick, wire: torch.dtype, add: bool = False
    ) -> None:
        """A message to and from every other holder that has something for us, one after the other: in the same
        order every time, and with the scratch of two messages."""
        holders = parts[0].part.holders
        me, count = holders.index(self._rank), len(holders)
        for distance in range(1, count):
            receiver, sender = holders[(me + distance) % count], holders[(me - distance) % count]
            gives = [view for held in parts for view in given(held, receiver)]
            takes = [view for held in parts for view in taken(held, sender)]
            received = torch.empty(sum(view.numel() for view in takes), dtype=wire, device=self._device)
            self._swap(holders, _packed(gives, wire), receiver, received, sender)
            for view, values in zip(takes, received.split([view.numel() for view in takes]), strict=True):
                if add:
                    view.add_(values)
                else:
                    view.copy_(values)

    def _swap(
        self,
        holders: tuple[int, ...],
        sent: torch.Tensor | None,
        receiver: int,
        received: torch.Tensor,
        sender: int,
    ) -> None:
        """Together, since NCCL would else wait for a receive before it sends."""
        group, messages = self._groups[holders], []
        if sent is not None:
            messages.append(dist.P2POp(dist.isend, sent, receiver, group))
        if received.numel():
            messages.append(dist.P2POp(dist.irecv, received, sender, group))
        if messages:
            for work in dist.batch_isend_irecv(messages):
                work.wait()


def _crossing(held: HeldPart, *, giver: int, taker: int) -> list[Range]:
    """What of one holder's piece another answers for."""
    return common_ranges([held.part.piece(giver)], held.part.owned(taker))


def _packed(views: Sequence[torch.Tensor], wire: torch.dtype) -> torch.Tensor | None:
    """One message; None if there is nothing to say."""
    if not views:
        return None
    return views[0].to(wire) if len(views) == 1 else torch.cat([view.to(wire) for view in views])


def _segments(parts: Sequence[HeldPart]) -> Iterator[list[HeldPart]]:
    """Parts that are exchanged together: as many as need little scratch."""
    some: list[HeldPart] = []
    for held in parts:
        if some and sum(other.part.numel for other in some) + held.part.numel > SEGMENT:
            yield some
            some = []
        some.append(held)
    if some:
        yield some
