"""A GPT written with torch's own modules alone, for training loops that know nothing of the engine.

It shares with the engine what makes two runs comparable: the attention kernel, the names of parameters and
their first values. So it can be wrapped by DistributedDataParallel, cut by `parallelize_module`, or cut into
stages of `torch.distributed.pipelining`.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from actors.engine.model.attention import attention_context, attention_scores
from actors.engine.model.layer import causal_mask
from actors.engine.weights import initial_parameter
from planner.model_spec import ModelSpec
from planner.parameters import model_parameters


class Attention(nn.Module):
    """`[rows, sequence, hidden]` -> the same. Under TP it works on as many heads as its linear layers make."""

    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self._head_size = model.head_size
        for name in ("query", "key", "value", "output"):
            self.add_module(name, nn.Linear(model.hidden_size, model.hidden_size))

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        query, key, value = (self._heads(getattr(self, name)(hidden)) for name in ("query", "key", "value"))
        weights = torch.softmax(attention_scores(query, key, mask), dim=-1)
        heads = attention_context(weights, value).unflatten(0, (hidden.shape[0], -1))
        return self.output(heads.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]

    def _heads(self, merged: torch.Tensor) -> torch.Tensor:
        return merged.unflatten(-1, (-1, self._head_size)).transpose(1, 2).flatten(0, 1)


class Mlp(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.up = nn.Linear(model.hidden_size, model.ffn_hidden_size)
        self.down = nn.Linear(model.ffn_hidden_size, model.hidden_size)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(hidden), approximate="tanh"))  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, model: ModelSpec) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon)
        self.attention = Attention(model)
        self.mlp_norm = nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon)
        self.mlp = Mlp(model)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        hidden = hidden + self.attention(self.attention_norm(hidden), mask)
        return hidden + self.mlp(self.mlp_norm(hidden))  # type: ignore[no-any-return]


class PlainGpt(nn.Module):
    """Token ids `[rows, sequence]` -> logits `[rows, sequence, vocabulary]`; or a stage of that, which takes or
    hands on hidden states.

    Args:
        layers: half-open range of the model's layers.
    """

    def __init__(self, model: ModelSpec, *, layers: tuple[int, int] | None = None, seed: int) -> None:
        super().__init__()
        assert model.family == "gpt3" and not model.tied_embedding and not model.dropout
        first, last = layers or (0, model.layers)
        self._mask = causal_mask(model.max_sequence_length, dtype=torch.float32, device=torch.device("cpu"))
        self.embedding = (
            nn.ModuleDict(
                {
                    "tokens": nn.Embedding(model.vocab_size, model.hidden_size),
                    "positions": nn.Embedding(model.max_sequence_length, model.hidden_size),
                }
            )
            if first == 0
            else None
        )
        self.layers = nn.ModuleDict({str(index): Block(model) for index in range(first, last)})
        whole = last == model.layers
        self.final_norm = nn.LayerNorm(model.hidden_size, eps=model.norm_epsilon) if whole else None
        self.head = nn.Linear(model.hidden_size, model.vocab_size, bias=False) if whole else None
        specs = {spec.name: spec for spec in model_parameters(model)}
        for name, parameter in self.named_parameters():
            parameter.data.copy_(initial_parameter(specs[name], model=model, seed=seed))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = inputs
        if self.embedding is not None:
            positions: Any = self.embedding["positions"]
            hidden = self.embedding["tokens"](inputs) + positions.weight[: inputs.shape[1]]
        for layer in self.layers.values():
            hidden = layer(hidden, self._mask)
        if self.final_norm is None or self.head is None:
            return hidden
        return self.head(self.final_norm(hidden))  # type: ignore[no-any-return]
