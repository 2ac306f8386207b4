"""Emulated devices: a host process that keeps the pace and the memory of a planned device.

Arithmetic, schedule, messages and collectives are real. Durations and links are the planner's times
`time_scale`; memory is what the tensors really take times `memory_scale`, checked against the device's.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from actors.engine import exchange
from actors.engine.courier import ThreadCourier, Work
from actors.engine.errors import out_of_memory
from actors.engine.gradient_transport import CallTransport, Groups, Span
from actors.engine.live_memory import LiveTensors
from actors.engine.replica_buffer import HeldPart
from actors.engine.replica_shards import PartTransport
from actors.engine.shard_transport import ShardTransport
from planner.cost.backward import BackwardLeft
from planner.cost.exchange import gather_seconds
from planner.cost.gradient import optimizer_seconds
from planner.cost.price import replica_seconds, transfer_seconds
from planner.cost.stage_shape import stage_shape
from planner.cost.stages import StageCost
from planner.cost.sync_seconds import SyncSeconds
from planner.gradient_calls import GradientCall
from planner.plan import Plan, RankPlace
from planner.units import format_bytes

if TYPE_CHECKING:
    from actors.engine.device import StepKind


def sleep_until(deadline: float) -> None:
    """Sleep to a point of `time.monotonic()`; return at once if it has passed."""
    left = deadline - time.monotonic()
    if left > 0:
        time.sleep(left)


class EmulatedDevice:
    """A step lasts its planned seconds times `time_scale`, or the host's time if that is longer."""

    def __init__(self, plan: Plan, place: RankPlace) -> None:
        step = replica_seconds(plan, pipeline=place.pipeline, stage=place.stage, replica=place.replica)
        scale = plan.emulation.time_scale
        cost = StageCost.of_plan(plan)
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        scatter = cost.scatter_seconds(stage_shape(stage, plan.cluster, zero_stage=plan.zero_stage))
        self._seconds: dict[StepKind, float] = {
            "forward": step.forward * scale,
            "backward": (step.backward + scatter) * scale,
            "optimizer": optimizer_seconds(plan, place.device) * scale,
        }
        self._scale = scale
        self._left = BackwardLeft(plan, cost)
        self._deadline = 0.0
        self._place = place
        self._device_type = plan.cluster.device_by_id[place.device].type
        self._memory_scale = plan.emulation.memory_scale
        self._limit_bytes = plan.cluster.type_of(place.device).memory_bytes
        self._live = LiveTensors(self._check_memory)
        self.steps = 0
        self.late_steps = 0

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    @contextlib.contextmanager
    def step(self, kind: StepKind) -> Iterator[None]:
        self._deadline = time.monotonic() + self._seconds[kind]
        yield
        self.steps += 1
        self.late_steps += time.monotonic() > self._deadline
        sleep_until(self._deadline)

    def passed(self, region: int) -> None:
        sleep_until(self._deadline - self._left.seconds(self._place.rank, region) * self._scale)

    def measuring(self) -> AbstractContextManager[None]:
        return self._live.watching()

    def synchronize(self) -> None:
        return None

    def peak_tensor_bytes(self) -> int:
        return int(self._live.peak_bytes * self._memory_scale)

    def _check_memory(self, live_bytes: int) -> None:
        wanted = live_bytes * self._memory_scale
        if wanted > self._limit_bytes:
            raise out_of_memory(
                place=self._place,
                device_type=self._device_type,
                wanted=format_bytes(wanted),
                limit_bytes=self._limit_bytes,
                emulated=True,
            )


class PacedMessages:
    """Messages that take their link's time. Each travels with the time of its sending and how long the sender
    was still busy with earlier ones.

    A device handles its messages of one kind one after the other, whether it sends or receives.
    """

    def __init__(self, inner: exchange.MessageTransport, *, plan: Plan, place: RankPlace) -> None:
        self._inner = inner
        self._plan = plan
        self._place = place
        self._sender_free = 0.0
        self._receiver_free = 0.0

    def send(self, tensor: torch.Tensor, *, receiver: int) -> exchange.Message:
        now = time.monotonic()
        left = max(now, self._sender_free)
        self._sender_free = left + self._link_seconds(self._place.rank, receiver, tensor)
        stamp = torch.tensor([now, left - now], dtype=torch.float64)
        return _Both(
            self._inner.send(stamp, receiver=receiver), self._inner.send(tensor, receiver=receiver), stamp
        )

    def receive(self, tensor: torch.Tensor, *, sender: int) -> exchange.Message:
        stamp = torch.zeros(2, dtype=torch.float64)
        both = _Both(
            self._inner.receive(stamp, sender=sender), self._inner.receive(tensor, sender=sender), stamp
        )
        return _Arrival(self, both, self._link_seconds(sender, self._place.rank, tensor))

    def arrive(self, stamp: torch.Tensor, seconds: float) -> None:
        """Hold a message, whose bytes are here, until its link would have delivered it."""
        sent, delay = stamp.tolist()
        # Clocks of two hosts may differ by any amount: no message was sent after now.
        left = min(sent, time.monotonic()) + delay
        self._receiver_free = max(left, self._receiver_free) + seconds
        sleep_until(self._receiver_free)

    def _link_seconds(self, sender: int, receiver: int, tensor: torch.Tensor) -> float:
        ranks = self._plan.ranks
        seconds = transfer_seconds(
            self._plan,
            sender=ranks[sender].device,
            receiver=ranks[receiver].device,
            message_bytes=tensor.numel() * tensor.element_size(),
        )
        return seconds * self._plan.emulation.time_scale


class _Both:
    """A message and its stamp, which lives as long."""

    def __init__(self, first: exchange.Message, second: exchange.Message, stamp: torch.Tensor) -> None:
        self._messages = (first, second)
        self.stamp = stamp

    def wait(self) -> None:
        for message in self._messages:
            message.wait()


class _Arrival:
    def __init__(self, messages: PacedMessages, both: _Both, seconds: float) -> None:
        self._messages = messages
        self._both = both
        self._seconds = seconds

    def wait(self) -> None:
        self._both.wait()
        self._messages.arrive(self._both.stamp, self._seconds)


class PacedGather:
    """Gathering slices in its planned time, from when the last rank of the TP group has its slice."""

    def __init__(
        self, inner: exchange.SliceGather, *, group: dist.ProcessGroup, plan: Plan, place: RankPlace
    ) -> None:
        self._inner = inner
        self._group = group
        self._links = plan.cluster.links
        self._device_type = plan.cluster.device_by_id[place.device].type
        self._scale = plan.emulation.time_scale

    def __call__(self, whole: torch.Tensor) -> None:
        ready = torch.tensor([time.monotonic()], dtype=torch.float64)
        dist.all_reduce(ready, dist.ReduceOp.MAX, group=self._group)
        self._inner(whole)
        seconds = gather_seconds(
            self._links,
            self._device_type,
            tp=dist.get_world_size(self._group),
            message_bytes=whole.numel() * whole.element_size(),
        )
        sleep_until(min(float(ready), time.monotonic()) + seconds * self._scale)


class PacedCalls:
    """Collectives of gradients that take their planned time, on a thread: they go on during backward.

    A call starts when the last of its holders is ready for it, which each is after its call before: so
    collectives run one after the other, and the holders agree on the start by a maximum beside the sum.
    """

    def __init__(self, inner: CallTransport, *, groups: Groups, plan: Plan) -> None:
        self._inner = inner
        self._groups = groups
        self._seconds = SyncSeconds(plan)
        self._scale = plan.emulation.time_scale
        self._courier = ThreadCourier()

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        seconds = self._seconds.of(call).reduce
        return self._courier.start(lambda: self._run(call, seconds, lambda: self._inner.reduce(call, data)))

    def close(self) -> None:
        self._groups = {}
        self._courier.close()
        self._inner.close()

    def _run(self, call: GradientCall, seconds: float, start: Callable[[], Work]) -> Span:
        """The whole collective, and what is left of its planned time."""
        ready = torch.tensor([time.monotonic()], dtype=torch.float64)
        agreed = dist.all_reduce(ready, dist.ReduceOp.MAX, group=self._groups[call.holders], async_op=True)
        start().wait()
        assert agreed is not None
        agreed.wait()
        begun = min(float(ready), time.monotonic())
        sleep_until(begun + seconds * self._scale)
        return Span(begun, time.monotonic())


class PacedShards(PacedCalls):
    """Sharded sums and the gathering of parameters, likewise."""

    def __init__(self, inner: ShardTransport, *, groups: Groups, plan: Plan) -> None:
        super().__init__(inner, groups=groups, plan=plan)
        self._shards = inner

    def gather(self, call: GradientCall, data: torch.Tensor) -> Work:
        seconds = self._seconds.of(call).gather
        return self._courier.start(lambda: self._run(call, seconds, lambda: self._shards.gather(call, data)))


class PacedParts(PacedCalls):
    """Sums over replicas' pieces and the gathering of parameters part by part, likewise."""

    def __init__(self, inner: PartTransport, *, groups: Groups, plan: Plan) -> None:
        super().__init__(inner, groups=groups, plan=plan)
        self._parts = inner

    def gather(self, held: HeldPart) -> Work:
        call = held.part.call
        if call is None:
            return self._parts.gather(held)
        seconds = self._seconds.of(call).gather * held.part.numel / call.numel
        return self._courier.start(lambda: self._run(call, seconds, lambda: self._parts.gather(held)))
