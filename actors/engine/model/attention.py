"""Products of queries and keys whose heads may be shared: grouped-query attention without copies of keys."""

from __future__ import annotations

import math
from typing import Any

import torch


def attention_scores(query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """`query key^T / sqrt(head size) + mask`.

    Args:
        query: `[samples x heads, sequence, head size]`.
        key: `[samples x key heads, sequence, head size]`; each serves as many queries as follow each other.
        mask: `[sequence, sequence]`, added.
    """
    scale = 1 / math.sqrt(query.shape[-1])
    if query.shape[0] == key.shape[0]:
        # Scale and mask ride on the product: no further pass over the largest tensor of the layer.
        return torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale)
    scores: torch.Tensor = _GroupedScores.apply(query, key, mask, scale)
    return scores


def attention_context(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`weights value`: `[samples x heads, sequence, sequence]` with values by key head -> `[.., head size]`."""
    if weights.shape[0] == value.shape[0]:
        return torch.bmm(weights, value)
    grouped = weights.view(value.shape[0], -1, weights.shape[-1])
    return torch.bmm(grouped, value).view(weights.shape[0], weights.shape[1], -1)


class _GroupedScores(torch.autograd.Function):
    """One product for all queries of a key head. The mask fits none of it as a whole, so it is added in place;
    autograd would copy the gradient for that."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, scale: float
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key)
        ctx.scale = scale
        grouped = query.view(key.shape[0], -1, query.shape[-1])
        product = torch.bmm(grouped, key.transpose(1, 2)).view(query.shape[0], query.shape[1], -1)
        return torch.add(mask, product, alpha=scale, out=product)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key = ctx.saved_tensors
        grouped = query.view(key.shape[0], -1, query.shape[-1])
        gradient = gradients[0].reshape(key.shape[0], -1, key.shape[1])
        by_query = torch.bmm(gradient, key).mul_(ctx.scale).view_as(query)
        by_key = torch.bmm(gradient.transpose(1, 2), grouped).mul_(ctx.scale)
        return by_query, by_key, None, None
