"""Sharded sums (ZeRO): every holder of a call ends with an equal shard of it, and gathers the others' later.

A shard's owner alone keeps its optimizer state and updates its parameters. Calls whose holders are spread
evenly over nodes are reduced and scattered inside the nodes first, then between them, where that is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from actors.engine.courier import Work, make_courier
from actors.engine.gradient_transport import WIRES, Groups, Steps
from planner.gradient_calls import GradientCall, GradientLayout, call_reduction
from planner.plan import Plan


@dataclass(frozen=True)
class Shard:
    """Elements `[start, stop)` of a section that a rank answers for; `call` sums them, None if it alone
    holds them."""

    section: int
    start: int
    stop: int
    call: GradientCall | None


def shards_of(plan: Plan, layout: GradientLayout, rank: int) -> tuple[Shard, ...]:
    """A rank's shards, in buffer order: one a call that it takes part in, and what nobody else holds."""
    found = [
        Shard(section.index, 0, section.numel, None)
        for section in layout.sections_of(rank)
        if len(section.holders) == 1
    ]
    for call in layout.calls_of(rank):
        first, last = _own_range(_levels(plan, call), rank, call.numel)
        found.append(Shard(call.section, call.start + first, call.start + last, call))
    return tuple(sorted(found, key=lambda shard: (shard.section, shard.start)))


Levels = tuple[tuple[tuple[int, ...], ...], ...]
"""Groups of ranks that scatter one after the other: first these, then those, each rank in one of each."""


def _levels(plan: Plan, call: GradientCall) -> Levels:
    reduction = call_reduction(plan, call)
    if reduction.algorithm != "slices":
        return ((call.holders,),)
    return _ranks(call, reduction.nodes), _ranks(call, reduction.across)


def _ranks(call: GradientCall, groups: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(call.holders[position] for position in group) for group in groups)


def _own(groups: Sequence[tuple[int, ...]], rank: int) -> tuple[int, ...]:
    return next(group for group in groups if rank in group)


def _own_range(levels: Levels, rank: int, numel: int) -> tuple[int, int]:
    first, size = 0, numel
    for groups in levels:
        group = _own(groups, rank)
        size, rest = divmod(size, len(group))
        assert rest == 0, f"{numel} elements are not cut evenly"
        first += group.index(rank) * size
    return first, first + size


class ShardTransport(Protocol):
    """A `CallTransport` whose sums are sharded."""

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        """Start to sum `data` in place; after `wait` the rank's shard of it is complete, the rest undefined."""
        ...

    def gather(self, call: GradientCall, data: torch.Tensor) -> Work:
        """Start to fill `data` with every holder's shard, rounded to the parameters' precision."""
        ...

    def close(self) -> None: ...


class GroupShards:
    """Sharded sums over process groups; `sums` and `values` move gradients and parameters."""

    def __init__(self, plan: Plan, *, rank: int, sums: Steps, values: Steps) -> None:
        self._plan, self._rank = plan, rank
        self._sums, self._values = sums, values
        self._courier = make_courier(sums.device)

    def reduce(self, call: GradientCall, data: torch.Tensor) -> Work:
        return self._courier.start(lambda: self._reduce(call, data))

    def gather(self, call: GradientCall, data: torch.Tensor) -> Work:
        return self._courier.start(lambda: self._gather(call, data))

    def close(self) -> None:
        self._sums.close()
        self._values.close()
        self._courier.close()

    def _reduce(self, call: GradientCall, data: torch.Tensor) -> None:
        for groups in _levels(self._plan, call):
            data = self._sums.reduce_scatter(_own(groups, self._rank), data)

    def _gather(self, call: GradientCall, data: torch.Tensor) -> None:
        levels = _levels(self._plan, call)
        for depth in reversed(range(len(levels))):
            first, last = _own_range(levels[:depth], self._rank, call.numel)
            self._values.all_gather(_own(levels[depth], self._rank), data[first:last])


def make_shard_transport(
    plan: Plan,
    groups: Groups,
    *,
    rank: int,
    parameter_dtype: torch.dtype,
    device: torch.device,
) -> GroupShards:
    """The transport of a rank's sharded calls; gradients travel in the plan's `wire` precision."""

    def steps(dtype: torch.dtype) -> Steps:
        return Steps(groups, rank=rank, wire=dtype, device=device)

    return GroupShards(plan, rank=rank, sums=steps(WIRES[plan.dtypes.wire]), values=steps(parameter_dtype))


def gather_all(
    transport: ShardTransport, calls: Sequence[GradientCall], view: Callable[[GradientCall], torch.Tensor]
) -> None:
    """Fill every call's part of a buffer from its holders' shards: a collective of all ranks."""
    works = [transport.gather(call, view(call)) for call in calls]
    for work in works:
        work.wait()
