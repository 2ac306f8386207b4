"""Activations and their gradients between neighbouring stages of unlike (tp, dp, rows).

The planner says who sends what to whom, whole rows or slices that the receiving TP group gathers
(planner/cost/exchange.py); `Exchange` carries one rank's messages. Sends never block. Receives are posted one
micro-batch ahead, so a message travels while the stage computes; slices are gathered when the stage takes them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from planner.cost.exchange import plan_exchange
from planner.plan import Plan, RankPlace

MessageKind = Literal["activations", "gradients"]


@dataclass(frozen=True)
class Transfer:
    """Elements `start` to `stop` of a micro-batch, from one rank to another."""

    sender: int
    receiver: int
    start: int
    stop: int


def boundary_transfers(
    plan: Plan, pipeline: int, *, sender: int, receiver: int
) -> tuple[list[Transfer], bool]:
    """Everything one stage sends a neighbour for one micro-batch, and whether the receiving ranks get slices."""
    first: dict[int, int] = {}
    for place in plan.ranks:
        if place.pipeline == pipeline:
            first.setdefault(place.stage, place.rank)
    stages = plan.pipelines[pipeline].stages
    way, messages = plan_exchange(plan, pipeline=pipeline, sender=sender, receiver=receiver)
    # The planner counts in equal parts of a row, one for each receiving TP rank; heads are cut by ranks, and so
    # is the hidden size.
    unit, rest = divmod(plan.sequence_length * plan.model.hidden_size, stages[receiver].tp)
    assert rest == 0
    transfers = [
        Transfer(
            first[sender] + message.sender[0] * stages[sender].tp + message.sender[1],
            first[receiver] + message.receiver[0] * stages[receiver].tp + message.receiver[1],
            message.start * unit,
            message.stop * unit,
        )
        for message in messages
    ]
    return transfers, way == "sliced"


@dataclass(frozen=True)
class Route:
    """One rank's part of a boundary in one direction; elements count from the rank's own first row."""

    kind: MessageKind
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()
    sliced: bool = False
    """What is received is the rank's slice, which its TP group gathers."""


def rank_routes(plan: Plan, place: RankPlace) -> dict[MessageKind, Route]:
    """What a rank sends and receives for one micro-batch: activations onwards, gradients back."""
    stages, number = plan.pipelines[place.pipeline].stages, place.stage
    row = plan.sequence_length * plan.model.hidden_size
    offset = stages[number].row_range(place.replica)[0] * row

    def sends(neighbour: int) -> tuple[Transfer, ...]:
        if not 0 <= neighbour < len(stages):
            return ()
        found, _ = boundary_transfers(plan, place.pipeline, sender=number, receiver=neighbour)
        return tuple(_shifted(t, offset) for t in found if t.sender == place.rank)

    def receives(neighbour: int) -> tuple[tuple[Transfer, ...], bool]:
        if not 0 <= neighbour < len(stages):
            return (), False
        found, sliced = boundary_transfers(plan, place.pipeline, sender=neighbour, receiver=number)
        return tuple(_shifted(t, offset) for t in found if t.receiver == place.rank), sliced

    return {
        "activations": Route("activations", sends(number + 1), *receives(number - 1)),
        "gradients": Route("gradients", sends(number - 1), *receives(number + 1)),
    }


def _shifted(transfer: Transfer, offset: int) -> Transfer:
    return Transfer(transfer.sender, transfer.receiver, transfer.start - offset, transfer.stop - offset)


class Message(Protocol):
    """A message under way. Its tensor must live until `wait` returns."""

    def wait(self) -> object: ...


class MessageTransport(Protocol):
    """Starts messages. Those of one kind between two ranks arrive in the order in which they were sent."""

    def send(self, tensor: torch.Tensor, *, receiver: int) -> Message: ...
    def receive(self, tensor: torch.Tensor, *, sender: int) -> Message: ...


class SliceGather(Protocol):
    """Fills, in place, a flat tensor of which each rank of the TP group has its equal slice. A collective."""

    def __call__(self, whole: torch.Tensor) -> None: ...


class GroupGather:
    """Gathers in a process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, whole: torch.Tensor) -> None:
        rank, count = dist.get_rank(self._group), dist.get_world_size(self._group)
        slices = whole.view(count, -1)
        if dist.get_backend(self._group) != "gloo":
            dist.all_gather_single(whole, slices[rank], group=self._group)
            return
        # gloo's own all-gather works on copies of everything, which no one counts.
        works = []
        for distance in range(1, count):
            sender, receiver = (rank - distance) % count, (rank + distance) % count
            works.append(dist.isend(slices[rank], group=self._group, group_dst=receiver))
            works.append(dist.irecv(slices[sender], group=self._group, group_src=sender))
        for work in works:
            _started(work).wait()


class GroupTransport:
    """Messages of one kind in the process group that is theirs alone."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def send(self, tensor: torch.Tensor, *, receiver: int) -> Message:
        return _started(dist.isend(tensor, dst=receiver, group=self._group))

    def receive(self, tensor: torch.Tensor, *, sender: int) -> Message:
        return _started(dist.irecv(tensor, src=sender, group=self._group))


def _started(work: dist.Work | None) -> Message:
    assert work is not None, "this rank is not in the group"
    return work


@dataclass(frozen=True)
class _Pending:
    messages: list[Message]
    # Dropping a handle or a tensor of a message under way hangs the pair (gloo) or frees what is read.
    tensor: torch.Tensor

    def wait(self) -> torch.Tensor:
        for message in self.messages:
            message.wait()
        return self.tensor


class Channel:
    """One rank's messages of one kind, for the micro-batches of one iteration after another.

    Args:
        new_tensor: makes what is received for one micro-batch, `[rows, sequence, hidden]`.
        gather: needed where slices are received.
        most_unsent: how many micro-batches may be sent before the first of them must have arrived.
    """

    def __init__(
        self,
        *,
        route: Route,
        transport: MessageTransport | None,
        new_tensor: Callable[[], torch.Tensor],
        most_unsent: int,
        gather: SliceGather | None = None,
    ) -> None:
        assert transport is not None or not (route.sends or route.receives)
        assert gather is not None or not route.sliced
        self._route = route
        self._transport = transport
        self._gather = gather if route.sliced else None
        self._new_tensor = new_tensor
        self._most_unsent = most_unsent
        self._unsent: deque[_Pending] = deque()
        self._posted: deque[_Pending] = deque()
        self._to_post = 0

    @property
    def receives(self) -> bool:
        """Whether anything comes in on this channel."""
        return bool(self._route.receives)

    @property
    def sends(self) -> bool:
        """Whether anything goes out on this channel."""
        return bool(self._route.sends)

    def start(self, micro_batches: int) -> None:
        """A new iteration: expect so many messages."""
        assert not self._posted and not self._unsent, "the last iteration is not finished"
        self._to_post = micro_batches if self.receives else 0

    def post(self) -> None:
        """Post the receive of the next micro-batch unless one is posted or none is left."""
        if self._posted or not self._to_post:
            return
        assert self._transport is not None
        tensor = self._new_tensor()
        flat = tensor.view(-1)
        messages = [
            self._transport.receive(flat[part.start : part.stop], sender=part.sender)
            for part in self._route.receives
        ]
        self._posted.append(_Pending(messages, tensor))
        self._to_post -= 1

    def receive(self) -> torch.Tensor:
        """The next micro-batch's message; posts the receive of the one after it."""
        self.post()
        tensor = self._posted.popleft().wait()
        self.post()
        if self._gather is not None:
            self._gather(tensor.view(-1))
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send a micro-batch's message; blocks only on one that the receiver has long asked for."""
        assert self._transport is not None
        while len(self._unsent) >= self._most_unsent:
            self._unsent.popleft().wait()
        whole = tensor.contiguous()
        flat = whole.view(-1)
        messages = [
            self._transport.send(flat[part.start : part.stop], receiver=part.receiver)
            for part in self._route.sends
        ]
        self._unsent.append(_Pending(messages, whole))

    def finish(self) -> None:
        """Wait until every message of the iteration has arrived."""
        assert not self._posted and not self._to_post
        while self._unsent:
            self._unsent.popleft().wait()


class Exchange:
    """A rank's two channels: activations come from the stage before, gradients from the one behind."""

    def __init__(
        self,
        *,
        plan: Plan,
        place: RankPlace,
        transports: dict[MessageKind, MessageTransport],
        dtype: torch.dtype,
        device: torch.device,
        gather: SliceGather | None = None,
    ) -> None:
        """`gather`: over the rank's TP group, if it has one."""
        stages = plan.pipelines[place.pipeline].stages
        rows = stages[place.stage].rows[place.replica]
        shape = (rows, plan.sequence_length, plan.model.hidden_size)

        def new_tensor() -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        routes = rank_routes(plan, place)
        # 1F1B keeps at most so many micro-batches between forward and backward, and the gradient of one
        # proves that its activation arrived: waiting for an older activation never blocks. Of gradients,
        # the stage before has asked for the last but one when it sends the activation that follows it.
        limits: dict[MessageKind, int] = {"activations": len(stages) - place.stage, "gradients": 2}

        def channel(kind: MessageKind) -> Channel:
            return Channel(
                route=routes[kind],
                transport=transports.get(kind),
                new_tensor=new_tensor,
                most_unsent=limits[kind],
                gather=gather,
            )

        self.activations = channel("activations")
        self.gradients = channel("gradients")

    def start(self, micro_batches: int) -> None:
        """A new iteration of so many micro-batches; posts the first activation's receive."""
        self.activations.start(micro_batches)
        self.gradients.start(micro_batches)
        self.activations.post()

    def finish(self) -> None:
        """Wait until everything sent has arrived."""
        self.activations.finish()
        self.gradients.finish()
