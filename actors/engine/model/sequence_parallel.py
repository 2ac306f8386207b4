"""Sequence parallelism inside a TP group (Korthikanti et al., 2022): activations between cut layers, by position.

Norms, residuals and dropout then work on `[rows, sequence / tp, hidden]`. A column-cut layer gathers its input, a
row-cut one scatters its sum: together as many bytes as the all-reduce that they replace. What a column-cut layer
keeps for backward is its rank's positions alone, so backward gathers them once more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard

_POSITIONS = Shard(1)


def own_positions(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The rank's positions of an activation that every rank holds: a view. Its gradient comes back whole."""
    part: torch.Tensor = _OwnPositions.apply(whole, mesh)
    return part


def all_positions(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The whole activation of which each rank has its positions. Every rank hands back the same gradient."""
    whole: torch.Tensor = _AllPositions.apply(part, mesh)
    return whole


def products_of_all_positions(
    part: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    mesh: DeviceMesh,
) -> tuple[torch.Tensor, ...]:
    """`F.linear` of all ranks' positions with each pair of a rank's own weight and bias: `[rows, sequence, ..]`."""
    products: tuple[torch.Tensor, ...] = _Products.apply(part, mesh, len(weights), *weights, *biases)
    return products


def _gathered(part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    return DTensor.from_local(part, mesh, [_POSITIONS], run_check=False).full_tensor()


def _scattered_sum(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    placed = DTensor.from_local(whole, mesh, [Partial()], run_check=False)
    return placed.redistribute(placements=[_POSITIONS]).to_local()


def _own(whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    size = whole.shape[1] // mesh.size()
    return whole.narrow(1, mesh.get_local_rank() * size, size)


class _OwnPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _own(whole, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _gathered(gradients[0], ctx.mesh), None


class _AllPositions(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        ctx.mesh = mesh
        return _gathered(part, mesh)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _own(gradients[0], ctx.mesh), None


class _Products(torch.autograd.Function):
    """Keeps the rank's positions and the weights."""

    @staticmethod
    def forward(
        ctx: Any, part: torch.Tensor, mesh: DeviceMesh, count: int, *tensors: Any
    ) -> tuple[torch.Tensor, ...]:
        weights, biases = tensors[:count], tensors[count:]
        ctx.save_for_backward(part, *weights)
        ctx.mesh, ctx.has_bias = mesh, [bias is not None for bias in biases]
        whole = _gathered(part, mesh)
        return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        part, *weights = ctx.saved_tensors
        whole = _gathered(part, ctx.mesh).flatten(0, 1)
        flat = [gradient.flatten(0, 1) for gradient in gradients]
        of_weights = [gradient.T @ whole for gradient in flat]
        of_biases = [
            gradient.sum(dim=0) if has_bias else None
            for gradient, has_bias in zip(flat, ctx.has_bias, strict=True)
        ]
        del whole
        total = flat[0] @ weights[0]
        for gradient, weight in zip(flat[1:], weights[1:], strict=True):
            total.addmm_(gradient, weight)
        of_part = _scattered_sum(total.view(*gradients[0].shape[:2], -1), ctx.mesh)
        return of_part, None, None, *of_weights, *of_biases
