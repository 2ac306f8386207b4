"""The layers of both families as sequences of named operators. An operator is a method of the same name."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from actors.engine.model.attention import attention_context, attention_scores
from actors.engine.model.dropout import Draws, Dropout
from actors.engine.model.flow import GPT3_FLOW, LLAMA_FLOW, Operator
from actors.engine.model.norm import RmsNorm
from actors.engine.model.recompute import Recording, storages
from actors.engine.model.rotary import Rotation, rotated
from actors.engine.model.tensor_parallel import ColumnLinear, RowLinear, column_products, own_part
from planner.model_spec import ModelSpec


class Attention(nn.Module):
    """Weights of self-attention. Queries, keys and values apart, so that a TP shard is a contiguous slice."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        hidden, kv_width, bias = model.hidden_size, model.kv_heads * model.head_size, model.has_biases
        self.query = ColumnLinear(hidden, hidden, bias=bias)
        self.key = ColumnLinear(hidden, kv_width, bias=bias)
        self.value = ColumnLinear(hidden, kv_width, bias=bias)
        self.output = RowLinear(hidden, hidden, bias=bias)


class Mlp(nn.Module):
    """Weights of the feed-forward part; LLaMA's has a gate beside the product up."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        hidden, width, bias = model.hidden_size, model.ffn_hidden_size, model.has_biases
        if model.family == "llama":
            self.gate = ColumnLinear(hidden, width, bias=bias)
        self.up = ColumnLinear(hidden, width, bias=bias)
        self.down = RowLinear(width, hidden, bias=bias)


class Layer(nn.Module):
    """hidden `[rows, sequence, hidden]` -> the same shape. From `qkv` to `context`, tensors are
    `[rows x heads of the TP rank, sequence, head size]`, or `[.., sequence, sequence]`.

    With `by_position` (sequence parallelism) the TP rank has its share of the sequence in what it is given and
    makes, and in norms, residuals and their dropout.
    """

    operators: tuple[Operator, ...]

    def __init__(
        self,
        model: ModelSpec,
        *,
        index: int,
        tp: int,
        tp_rank: int,
        by_position: bool,
        replayed: frozenset[str],
    ) -> None:
        super().__init__()
        self._by_position, self._tp_rank = by_position, tp_rank
        self._replayed = replayed
        self._parameter_storages: frozenset[int] | None = None
        self._heads = model.heads // tp
        self._head_size = model.head_size
        self.attention_norm = norm(model)
        self.attention = Attention(model)
        self.mlp_norm = norm(model)
        self.mlp = Mlp(model)
        # Heads of the TP ranks before this one.
        self._first_head = tp_rank * self._heads
        self._index, self._probability = index, model.dropout

    def forward(self, hidden: torch.Tensor, constants: dict[str, Any]) -> torch.Tensor:
        """`constants` are the values that flow.CONSTANTS names."""
        values = {"hidden": hidden} | constants
        del hidden
        recording = self._recording()
        for operator in self.operators:
            inputs = [
                values.pop(name) if name in operator.last_reads else values[name] for name in operator.inputs
            ]
            run = getattr(self, operator.name)
            result = recording.run(operator, run, inputs) if recording else run(*inputs)
            del inputs
            values.update(
                zip(operator.outputs, result if isinstance(result, tuple) else (result,), strict=True)
            )
            del result
        output: torch.Tensor = values["hidden"]
        return output

    def _recording(self) -> Recording | None:
        if not self._replayed or not torch.is_grad_enabled():
            return None
        if self._parameter_storages is None:
            self._parameter_storages = storages(own_part(leaf.detach()) for leaf in self.parameters())
        return Recording(self._replayed, self._parameter_storages)

    def qkv(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        layers = [self.attention.query, self.attention.key, self.attention.value]
        query, key, value = column_products(normed, layers, by_position=self._by_position)
        return self._split_heads(query), self._split_heads(key), self._split_heads(value)

    def scores(
        self, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, documents: torch.Tensor | None
    ) -> torch.Tensor:
        return attention_scores(query, key, mask, documents)

    def softmax(self, scores: torch.Tensor) -> torch.Tensor:
        # In fp32 whatever the model's precision: sums over a long sequence lose too much in 16 bits.
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(scores.dtype)

    def attention_dropout(self, weights: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        rows, first_line = weights.shape[0] // self._heads, self._first_head * weights.shape[1]
        return self._dropped("attention_dropout", weights, draws, rows=rows, first_line=first_line)

    def context(self, weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        heads = attention_context(weights, value).unflatten(0, (-1, self._heads))
        return heads.transpose(1, 2).flatten(2)

    def attention_output(self, context: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.attention.output(context, by_position=self._by_position)
        return update

    def attention_residual(
        self, hidden: torch.Tensor, update: torch.Tensor, draws: Draws | None
    ) -> torch.Tensor:
        return hidden + self._dropped_update("attention_residual", update, draws)

    def mlp_down(self, inner: torch.Tensor) -> torch.Tensor:
        update: torch.Tensor = self.mlp.down(inner, by_position=self._by_position)
        return update

    def mlp_residual(self, hidden: torch.Tensor, update: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        return hidden + self._dropped_update("mlp_residual", update, draws)

    def _dropped_update(self, operator: str, update: torch.Tensor, draws: Draws | None) -> torch.Tensor:
        rows, positions = update.shape[:2]
        first_line = self._tp_rank * positions if self._by_position else 0
        return self._dropped(operator, update, draws, rows=rows, first_line=first_line)

    def _dropped(
        self, operator: str, values: torch.Tensor, draws: Draws | None, *, rows: int, first_line: int = 0
    ) -> torch.Tensor:
        if not self._probability or not self.training:
            return values
        return Dropout(self._probability, self._index, operator, first_line)(values, draws, rows=rows)

    def _split_heads(self, merged: torch.Tensor) -> torch.Tensor:
        heads = merged.unflatten(-1, (-1, self._head_size)).transpose(1, 2)
        return heads.flatten(0, 1)


class Gpt3Layer(Layer):
    """LayerNorm, attention, GELU."""

    operators = GPT3_FLOW

    def mlp_up(self, normed: torch.Tensor) -> torch.Tensor:
        (inner,) = column_products(normed, [self.mlp.up], by_position=self._by_position)
        return inner

    def activation(self, inner: torch.Tensor) -> torch.Tensor:
        return F.gelu(inner, approximate="tanh")


class LlamaLayer(Layer):
    """RMSNorm, rotary and grouped-query attention, SwiGLU."""

    operators = LLAMA_FLOW

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return rotated(query, rotation), rotated(key, rotation)

    def mlp_gate_up(self, normed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gate, inner = column_products(normed, [self.mlp.gate, self.mlp.up], by_position=self._by_position)
        return gate, inner

    def activation(self, gate: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        return F.silu(gate) * inner


def make_layer(
    model: ModelSpec,
    *,
    index: int,
    tp: int,
    tp_rank: int,
    by_position: bool = False,
    replayed: frozenset[str] = frozenset(),
) -> Layer:
    """A layer of the model's family.

    Args:
        index: counted from the model's first layer.
        by_position: sequence parallelism inside the TP group.
        replayed: the operators that backward replays, as planner.cost.layer_flow says.
    """
    kind = Gpt3Layer if model.family == "gpt3" else LlamaLayer
    return kind(model, index=index, tp=tp, tp_rank=tp_rank, by_position=by_position, replayed=replayed)


def norm(model: ModelSpec) -> nn.Module:
    """The norm of the model's family."""
    if model.family == "gpt3":
        return nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon)
    return RmsNorm(model.hidden_size, epsilon=model.norm_epsilon)


def causal_mask(length: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """What is added to scores `[.., length, length]`: 0 up to the own position, minus infinity after it."""
    forbidden = torch.full((length, length), -torch.inf, dtype=dtype, device=device)
    return forbidden.triu(diagonal=1)
