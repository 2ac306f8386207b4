"""One GPT-3 layer as a sequence of named operators (planner/operators.py).

Profiler, cost model and recomputation speak of these operators, so the layer is written as a data flow:
which operator reads and writes which values. An operator is a method of the same name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from actors.engine.model.tensor_parallel import ColumnLinear, RowLinear, shared
from planner.model_spec import ModelSpec


@dataclass(frozen=True)
class Operator:
    """A named operator, the values it reads and those it writes.

    `last_reads` are the inputs that no later operator reads: the layer lets go of them.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_reads: frozenset[str] = frozenset()


_GPT3_FLOW = (
    Operator("attention_norm", ("hidden",), ("normed",)),
    Operator("qkv", ("normed",), ("query", "key", "value")),
    Operator("scores", ("query", "key", "mask"), ("scores",)),
    Operator("softmax", ("scores",), ("weights",)),
    Operator("attention_dropout", ("weights",), ("weights",)),
    Operator("context", ("weights", "value"), ("context",)),
    Operator("attention_output", ("context",), ("update",)),
    Operator("attention_residual", ("hidden", "update"), ("hidden",)),
    Operator("mlp_norm", ("hidden",), ("normed",)),
    Operator("mlp_up", ("normed",), ("inner",)),
    Operator("activation", ("inner",), ("inner",)),
    Operator("mlp_down", ("inner",), ("update",)),
    Operator("mlp_residual", ("hidden", "update"), ("hidden",)),
)


def with_last_reads(flow: Sequence[Operator]) -> tuple[Operator, ...]:
    """The same operators, each knowing which of its inputs it is the last to read."""
    needed, found = {"hidden"}, []
    for operator in reversed(flow):
        needed -= set(operator.outputs)
        last = frozenset(operator.inputs) - needed
        found.append(Operator(operator.name, operator.inputs, operator.outputs, last))
        needed |= set(operator.inputs)
    return tuple(reversed(found))


GPT3_FLOW = with_last_reads(_GPT3_FLOW)


class Attention(nn.Module):
    """Weights of self-attention. Queries, keys and values apart, so that a TP shard is a contiguous slice."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        hidden, kv_width = model.hidden_size, model.kv_heads * model.head_size
        self.query = ColumnLinear(hidden, hidden)
        self.key = ColumnLinear(hidden, kv_width)
        self.value = ColumnLinear(hidden, kv_width)
        self.output = RowLinear(hidden, hidden)


class Mlp(nn.Module):
    """Weights of the feed-forward part."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.up = ColumnLinear(model.hidden_size, model.ffn_hidden_size)
        self.down = RowLinear(model.ffn_hidden_size, model.hidden_size)


class Layer(nn.Module):
    """hidden `[rows, sequence, hidden]` -> the same shape. Between `qkv` and `context`, tensors are
    `[rows x heads of the TP rank, sequence, head size]`, or `[.., sequence, sequence]`."""

    operators = GPT3_FLOW

    def __init__(self, model: ModelSpec, *, tp: int) -> None:
        super().__init__()
        self._heads = model.heads // tp
        self._head_size = model.head_size
        self.attention_norm = nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon)
        self.attention = Attention(model)
        self.mlp_norm = nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon)
        self.mlp = Mlp(model)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """`mask` is `causal_mask` of the sequence length."""
        values = {"hidden": hidden, "mask": mask}
        del hidden
        for operator in self.operators:
            inputs = [
                values.pop(name) if name in operator.last_reads else values[name] for name in operator.inputs
            ]
            result = getattr(self, operator.name)(*inputs)
            del inputs
            values.update(
                zip(operator.outputs, result if isinstance(result, tuple) else (result,), strict=True)
            )
            del result
        return values["hidden"]

    def qkv(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        whole = shared(normed, like=self.attention.query.weight)
        return (
            self._split_heads(self.attention.query(whole)),
            self._split_heads(self.attention.key(whole)),
            self._split_heads(self.attention.value(whole)),
        )

    def scores(self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        # Scale and mask ride on the product: no further pass over the largest tensor of the layer.
        return torch.baddbmm(mask, query, key.transpose(1, 2), alpha=1 / math.sqrt(self._head_size))

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        # In fp32 whatever the model's precision: sums over a long sequence lose too much in 16 bits.
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)

    def attention_dropout(self, weights: torch.Tensor) -> torch.Tensor:
        return weights

    def context(self, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return torch.bmm(weights, value)

    def attention_output(self, context: torch.Tensor) -> torch.Tensor:
        heads = context.unflatten(0, (-1, self._heads))
        update: torch.Tensor = self.attention.output(heads.transpose(1, 2).flatten(2))
        return update

    def attention_residual(self, hidden: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return hidden + update

    def mlp_up(self, normed: torch.Tensor) -> torch.Tensor:
        inner: torch.Tensor = self.mlp.up(shared(normed, like=self.mlp.up.weight))
        return inner

    def activation(self, inner: torch.Tensor) -> torch.Tensor:
        return F.gelu(inner, approximate="tanh")

    def mlp_down(self, inner: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.mlp.down(inner)
        return update

    def mlp_residual(self, hidden: torch.Tensor, update: torch.Tensor) -> torch.Tensor:
        return hidden + update

    def _split_heads(self, merged: torch.Tensor) -> torch.Tensor:
        heads = merged.unflatten(-1, (-1, self._head_size)).transpose(1, 2)
        return heads.flatten(0, 1)


def causal_mask(length: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to scores `[.., length, length]`: 0 up to the own position, minus infinity after it."""
    forbidden = torch.full((length, length), -torch.inf, dtype=dtype, device=device)
    return forbidden.triu(diagonal=1)
