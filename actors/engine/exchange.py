"""Activations and their gradients between neighbouring stages of unlike (tp, dp, rows).

`boundary_transfers` says from the plan alone who sends which rows to whom; `Exchange` carries one rank's
messages. Sends never block. Receives are posted one micro-batch ahead, so a message travels while the
stage computes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from planner.cost.exchange import row_overlaps
from planner.plan import Plan, RankPlace, StagePlan

MessageKind = Literal["activations", "gradients"]


@dataclass(frozen=True)
class Transfer:
    """Rows `start` to `stop` of a micro-batch, from one rank to another."""

    sender: int
    receiver: int
    start: int
    stop: int


@dataclass(frozen=True)
class StageRanks:
    """A stage as its neighbours see it."""

    first_rank: int
    tp: int
    rows: tuple[int, ...]

    def rank(self, replica: int, tp_rank: int) -> int:
        return self.first_rank + replica * self.tp + tp_rank


def boundary_transfers(sender: StageRanks, receiver: StageRanks) -> list[Transfer]:
    """Everything one stage sends another for one micro-batch.

    Every rank of a replica holds the replica's whole rows, before and after. So each receiving rank takes
    an overlap of rows from one rank of the sending replica; the replica's ranks take turns.
    """
    transfers = []
    turns = [count() for _ in sender.rows]
    row = 0
    for overlap in row_overlaps(sender.rows, receiver.rows):
        for tp_rank in range(receiver.tp):
            turn = next(turns[overlap.sender]) % sender.tp
            transfers.append(
                Transfer(
                    sender.rank(overlap.sender, turn),
                    receiver.rank(overlap.receiver, tp_rank),
                    row,
                    row + overlap.rows,
                )
            )
        row += overlap.rows
    return transfers


def stage_ranks(plan: Plan, pipeline: int) -> list[StageRanks]:
    """Every stage of a pipeline."""
    first: dict[int, int] = {}
    for place in plan.ranks:
        if place.pipeline == pipeline:
            first.setdefault(place.stage, place.rank)
    stages: Sequence[StagePlan] = plan.pipelines[pipeline].stages
    return [StageRanks(first[number], stage.tp, stage.rows) for number, stage in enumerate(stages)]


@dataclass(frozen=True)
class Route:
    """One rank's part of a boundary in one direction; rows count from the rank's own first row."""

    kind: MessageKind
    sends: tuple[Transfer, ...] = ()
    receives: tuple[Transfer, ...] = ()


def rank_routes(plan: Plan, place: RankPlace) -> dict[MessageKind, Route]:
    """What a rank sends and receives for one micro-batch: activations onwards, gradients back."""
    stages, number = stage_ranks(plan, place.pipeline), place.stage
    own = stages[number]
    before = stages[number - 1] if number else None
    behind = stages[number + 1] if number + 1 < len(stages) else None
    offset = sum(own.rows[: place.replica])

    def sends(neighbour: StageRanks | None) -> tuple[Transfer, ...]:
        found = boundary_transfers(own, neighbour) if neighbour else []
        return tuple(_shifted(t, offset) for t in found if t.sender == place.rank)

    def receives(neighbour: StageRanks | None) -> tuple[Transfer, ...]:
        found = boundary_transfers(neighbour, own) if neighbour else []
        return tuple(_shifted(t, offset) for t in found if t.receiver == place.rank)

    return {
        "activations": Route("activations", sends(behind), receives(before)),
        "gradients": Route("gradients", sends(before), receives(behind)),
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
        shape: of what is received for one micro-batch: `[rows, sequence, hidden]`.
        most_unsent: how many micro-batches may be sent before the first of them must have arrived.
    """

    def __init__(
        self,
        *,
        route: Route,
        transport: MessageTransport | None,
        new_tensor: Callable[[], torch.Tensor],
        most_unsent: int,
    ) -> None:
        assert transport is not None or not (route.sends or route.receives)
        self._route = route
        self._transport = transport
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
        messages = [
            self._transport.receive(tensor[part.start : part.stop], sender=part.sender)
            for part in self._route.receives
        ]
        self._posted.append(_Pending(messages, tensor))
        self._to_post -= 1

    def receive(self) -> torch.Tensor:
        """The next micro-batch's message; posts the receive of the one after it."""
        self.post()
        tensor = self._posted.popleft().wait()
        self.post()
        return tensor

    def send(self, tensor: torch.Tensor) -> None:
        """Start to send a micro-batch's message; blocks only on one that the receiver has long asked for."""
        assert self._transport is not None
        while len(self._unsent) >= self._most_unsent:
            self._unsent.popleft().wait()
        whole = tensor.contiguous()
        messages = [
            self._transport.send(whole[part.start : part.stop], receiver=part.receiver)
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
    ) -> None:
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
