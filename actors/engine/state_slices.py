"""A rank's training state as slices of logical tensors, under addresses that know nothing of the plan.

`model.<name>` is a parameter; `optimizer.<state>.<name>` its optimizer state (`exp_avg`, `exp_avg_sq`,
`momentum_buffer`, and `master` beside parameters narrower than fp32), in the parameter's shape. A slice is an
N-dimensional rectangle of one of them. So what one plan's ranks wrote, those of any other can read (law 8).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from actors.engine.gradient_buffer import HeldParameter
from actors.engine.optimizer import PieceState
from actors.engine.sharded_optimizer import ShardState
from planner.parameters import Parameter, model_parameters, stage_parameters
from planner.plan import Plan


@dataclass(frozen=True)
class StateSlice:
    """A rectangle of the logical tensor `key` of shape `size`, and the rank's tensor that holds it.

    Writing into `tensor` loads it. `owned` marks the one copy that is saved.
    """

    key: str
    size: tuple[int, ...]
    offsets: tuple[int, ...]
    tensor: torch.Tensor
    owned: bool

    def staged(self, buffer: torch.Tensor | None = None) -> StateSlice:
        """The same with a copy of the tensor on the host, in `buffer` if that is given: one of an earlier copy."""
        if buffer is None:
            buffer = torch.empty(self.tensor.shape, dtype=self.tensor.dtype)
        return replace(self, tensor=buffer.copy_(self.tensor.detach()))


def owned_parameters(plan: Plan, rank: int) -> frozenset[str]:
    """Names of the parameters whose shards this rank saves: those of pipeline 0's first replicas, a copy that
    TP replicates by TP rank 0, a tied table by the stage that embeds."""
    place = plan.ranks[rank]
    if place.pipeline != 0 or place.replica != 0:
        return frozenset()
    stages = plan.pipelines[0].stages
    earlier = {
        parameter.name for stage in stages[: place.stage] for parameter in stage_parameters(plan.model, stage)
    }
    return frozenset(
        parameter.name
        for parameter in stage_parameters(plan.model, stages[place.stage])
        if parameter.name not in earlier and (parameter.tp_dim is not None or place.tp_rank == 0)
    )


def parameter_slices(handles: Iterable[HeldParameter], owned: frozenset[str]) -> Iterator[StateSlice]:
    """The rank's parameters without vocabulary padding."""
    for handle in handles:
        spec, tensor = handle.spec, handle.local.detach()
        offsets = [0] * len(spec.shape)
        if spec.tp_dim is not None:
            start, stop = spec.shard_range(tp=handle.tp, tp_rank=handle.tp_rank)
            tensor = tensor.narrow(spec.tp_dim, 0, stop - start)
            offsets[spec.tp_dim] = start
        if tensor.numel():
            yield StateSlice(
                parameter_key(spec.name), spec.shape, tuple(offsets), tensor, owned=spec.name in owned
            )


def piece_slices(plan: Plan, states: Iterable[PieceState], owned: frozenset[str]) -> Iterator[StateSlice]:
    """Optimizer state of whole pieces of parameters."""
    shapes = _shapes(plan)
    for state in states:
        shape = shapes[state.name]
        offsets = [0] * len(shape)
        if state.tp_dim is not None and state.tp_range is not None:
            offsets[state.tp_dim] = state.tp_range[0]
        for name, tensor in state.tensors.items():
            yield StateSlice(_key(name, state.name), shape, tuple(offsets), tensor, owned=state.name in owned)


def shard_slices(plan: Plan, states: Iterable[ShardState]) -> Iterator[StateSlice]:
    """Optimizer state of flat shards (ZeRO): each is cut into the few rectangles that it is made of."""
    specs = {parameter.name: parameter for parameter in model_parameters(plan.model)}
    for state in states:
        spec = specs[state.name]
        slab, origin = _slab(spec, state.tp_range)
        first = 0
        for offsets, sizes in rectangles(slab, state.start, state.stop):
            count = math.prod(sizes)
            place = tuple(a + b for a, b in zip(origin, offsets, strict=True))
            for name, tensor in state.tensors.items():
                part = tensor.narrow(0, first, count).view(sizes)
                yield StateSlice(_key(name, state.name), spec.shape, place, part, owned=state.owned)
            first += count


Rectangle = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes, a number a dim."""


def rectangles(shape: Sequence[int], start: int, stop: int) -> list[Rectangle]:
    """Elements `[start, stop)` of a tensor in row-major order, as rectangles in that order.

    At most 2 x dims - 1 of them: the end of a row, whole rows, the beginning of a row.
    """
    if start >= stop:
        return []
    if len(shape) == 1:
        return [((start,), (stop - start,))]
    row = math.prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if start % row == 0 and stop % row == 0:
        zeros = (0,) * (len(shape) - 1)
        return [((first, *zeros), (stop // row - first, *shape[1:]))]
    if first == last:
        inner = rectangles(shape[1:], start - first * row, stop - first * row)
        return [((first, *offsets), (1, *sizes)) for offsets, sizes in inner]
    # Cut at the first and the last whole row between.
    head, tail = -(-start // row) * row, stop // row * row
    return [
        *rectangles(shape, start, head),
        *rectangles(shape, head, tail),
        *rectangles(shape, tail, stop),
    ]


def _slab(spec: Parameter, tp_range: tuple[int, int] | None) -> tuple[list[int], list[int]]:
    """Shape of a TP range of a parameter, and where it begins."""
    shape, origin = list(spec.shape), [0] * len(spec.shape)
    if tp_range is not None:
        assert spec.tp_dim is not None
        shape[spec.tp_dim] = tp_range[1] - tp_range[0]
        origin[spec.tp_dim] = tp_range[0]
    return shape, origin


def _shapes(plan: Plan) -> dict[str, tuple[int, ...]]:
    return {parameter.name: parameter.shape for parameter in model_parameters(plan.model)}


def parameter_key(name: str) -> str:
    """The address of a parameter."""
    return f"model.{name}"


def _key(state: str, name: str) -> str:
    return f"optimizer.{state}.{name}"
