"""Tensor parallelism by DTensor: how a stage's weights are cut, and what passes between the cuts.

Weights are DTensors on the replica's one-dimensional mesh, cut by `parallelize_module`; what crosses a
cut is redistributed as DTensors are. Between, operators work on the rank's own plain tensors: activations
are cut by heads or features inside a column/row pair. Outside, they are whole on every TP rank or, with
sequence parallelism, cut by position (sequence_parallel.py). (DTensor's dispatch of every single operator would
cost more than a small operator takes.)
Without TP every function here passes its input through, and no DTensor exists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.distributed.tensor.parallel.style import ParallelStyle

from actors.engine.model.sequence_parallel import products_of_all_positions


class Cut(ParallelStyle):
    """Cuts some of a module's parameters along a dim and leaves inputs and outputs to the module itself."""

    def __init__(self, dim: int, *names: str) -> None:
        super().__init__()
        self._placement: Placement = Shard(dim)
        self._names = names

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name in self._names:
            if getattr(module, name) is None:  # a layer without a bias
                continue
            # No values are sent: the module is on the meta device until its own are filled in.
            cut = distribute_tensor(
                module.get_parameter(name), device_mesh, [self._placement], src_data_rank=None
            )
            module.register_parameter(name, nn.Parameter(cut))
        return module


_COLUMNS = partial(Cut, 0, "weight", "bias")

# By the end of a module's name. Column cuts split outputs, row cuts split inputs.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "attention.query": _COLUMNS,
    "attention.key": _COLUMNS,
    "attention.value": _COLUMNS,
    "attention.output": partial(Cut, 1, "weight"),
    "mlp.gate": _COLUMNS,
    "mlp.up": _COLUMNS,
    "mlp.down": partial(Cut, 1, "weight"),
    "embedding.tokens": partial(Cut, 0, "weight"),
    "head": partial(Cut, 0, "weight"),
}


def parallelize(stage: nn.Module, mesh: DeviceMesh) -> None:
    """Cut a stage's weights, which are still on the meta device, over a TP mesh."""
    plan = {
        name: style()
        for name, _ in stage.named_modules()
        for ending, style in _STYLES.items()
        if name == ending or name.endswith("." + ending)
    }
    parallelize_module(stage, mesh, plan)


class ColumnLinear(nn.Linear):
    """A linear layer whose output features are cut over TP; see `column_products`."""


class RowLinear(nn.Linear):
    """A linear layer whose input features are cut over TP; the output is summed over the ranks.

    The bias is added once, after the sum, so every rank holds a copy of it.
    """

    def forward(self, input: torch.Tensor, *, by_position: bool = False) -> torch.Tensor:
        if not isinstance(self.weight, DTensor):
            return super().forward(input)
        part = F.linear(input, own_part(self.weight))
        total = summed(part, like=self.weight, by_position=by_position)
        return total if self.bias is None else total + self.bias


class TokenTable(nn.Module):
    """A matrix of one row a token, cut by rows: looks tokens up, and projects onto them.

    Args:
        rows: vocabulary, padded so that every TP rank holds equally many rows.
    """

    def __init__(self, rows: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))

    def lookup(self, ids: torch.Tensor, *, by_position: bool = False) -> torch.Tensor:
        """Rows of the tokens: ids `[rows, sequence]` -> `[rows, sequence, hidden]`, or the rank's positions of it."""
        if not isinstance(self.weight, DTensor):
            return F.embedding(ids, self.weight)
        own = own_part(self.weight)
        shifted = ids - first_row(self.weight)
        elsewhere = (shifted < 0) | (shifted >= own.shape[0])
        rows = F.embedding(shifted.masked_fill(elsewhere, 0), own)
        found = rows.masked_fill(elsewhere.unsqueeze(-1), 0.0)
        return summed(found, like=self.weight, by_position=by_position)

    def project(self, hidden: torch.Tensor, *, by_position: bool = False) -> torch.Tensor:
        """Logits of the rank's rows: `[.., hidden]`, or the rank's positions of it, -> `[.., rows / tp]`."""
        (logits,) = column_products(hidden, [self], by_position=by_position)
        return logits


def column_products(
    hidden: torch.Tensor, layers: Sequence[ColumnLinear | TokenTable], *, by_position: bool = False
) -> tuple[torch.Tensor, ...]:
    """What layers whose output features are cut over TP make of one input, which every rank holds whole, or
    with `by_position` its positions of it. Its gradient is summed once for all of them."""
    like = layers[0].weight
    weights = [own_part(layer.weight) for layer in layers]
    biases = [own_part(layer.bias) if _has_bias(layer) else None for layer in layers]
    if by_position and isinstance(like, DTensor):
        return products_of_all_positions(hidden, weights, biases, like.device_mesh)
    whole = shared(hidden, like=like)
    return tuple(F.linear(whole, weight, bias) for weight, bias in zip(weights, biases, strict=True))


def _has_bias(layer: ColumnLinear | TokenTable) -> TypeGuard[ColumnLinear]:
    return isinstance(layer, ColumnLinear) and layer.bias is not None


def own_part(parameter: torch.Tensor) -> torch.Tensor:
    """The rank's shard of a parameter, as a plain tensor; the gradient finds its way back."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def shared(whole: torch.Tensor, *, like: torch.Tensor) -> torch.Tensor:
    """An input that every TP rank holds, for column-cut layers.

    Each rank's gradient is a part of the sum; it is summed once for all layers that share the input.
    """
    if not isinstance(like, DTensor):
        return whole
    placed = DTensor.from_local(whole, like.device_mesh, [Replicate()], run_check=False)
    return placed.to_local(grad_placements=[Partial()])


def summed(part: torch.Tensor, *, like: DTensor, by_position: bool = False) -> torch.Tensor:
    """The sum over the TP ranks of what each holds a part of; `by_position`: the rank's positions of it."""
    placed = DTensor.from_local(part, like.device_mesh, [Partial()], run_check=False)
    return placed.redistribute(placements=[Shard(1) if by_position else Replicate()]).to_local()


def first_row(weight: DTensor) -> int:
    """First logical row of the rank's shard; all shards are equally long."""
    rank = weight.device_mesh.get_local_rank()
    return int(rank * weight.to_local().shape[0])
