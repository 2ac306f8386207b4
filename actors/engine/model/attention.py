"""Products of queries and keys whose heads may be shared: grouped-query attention without copies of keys."""

from __future__ import annotations

import math
from typing import Any

import torch


def attention_scores(
    query: torch.Tensor, key: torch.Tensor, mask: torch.Tensor, documents: torch.Tensor | None = None
) -> torch.Tensor:
    """`query key^T / sqrt(head size) + mask`, minus infinity where a query and a key are of unlike documents.

    Args:
        query: `[samples x heads, sequence, head size]`.
        key: `[samples x key heads, sequence, head size]`; each serves as many queries as follow each other.
        mask: `[sequence, sequence]`, added.
        documents: `[samples, sequence]`, where each token's document begins in its sample; None if all of a sample
            is one document.
    """
    scale = 1 / math.sqrt(query.shape[-1])
    if documents is None and query.shape[0] == key.shape[0]:
        # Scale and mask ride on the product: no further pass over the largest tensor of the layer.
        return torch.baddbmm(mask, query, key.transpose(1, 2), alpha=scale)
    scores: torch.Tensor = _Scores.apply(query, key, mask, documents, scale)
    return scores


def attention_context(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`weights value`: `[samples x heads, sequence, sequence]` with values by key head -> `[.., head size]`."""
    if weights.shape[0] == value.shape[0]:
        return torch.bmm(weights, value)
    grouped = weights.view(value.shape[0], -1, weights.shape[-1])
    return torch.bmm(grouped, value).view(weights.shape[0], weights.shape[1], -1)


class _Scores(torch.autograd.Function):
    """One product for all queries of a key head. The mask fits none of it as a whole, so it is added in place;
    autograd would copy the gradient for that. Backward needs no mask: where it forbids, softmax's gradient is 0."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        mask: torch.Tensor,
        documents: torch.Tensor | None,
        scale: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(query, key)
        ctx.scale = scale
        grouped = query.view(key.shape[0], -1, query.shape[-1])
        product = torch.bmm(grouped, key.transpose(1, 2)).view(query.shape[0], query.shape[1], -1)
        if documents is None:
            return torch.add(mask, product, alpha=scale, out=product)
        # A sample's own mask lives for its addition alone: those of all samples and layers are never held.
        for sample, starts in zip(product.chunk(len(documents)), documents, strict=True):
            torch.add(_within_documents(mask, starts), sample, alpha=scale, out=sample)
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key = ctx.saved_tensors
        grouped = query.view(key.shape[0], -1, query.shape[-1])
        gradient = gradients[0].reshape(key.shape[0], -1, key.shape[1])
        by_query = torch.bmm(gradient, key).mul_(ctx.scale).view_as(query)
        by_key = torch.bmm(gradient.transpose(1, 2), grouped).mul_(ctx.scale)
        return by_query, by_key, None, None, None


def _within_documents(mask: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
    """The mask `[sequence, sequence]` without what lies before the document of each query, `starts` `[sequence]`."""
    positions = torch.arange(len(starts), dtype=starts.dtype, device=starts.device)
    return mask.masked_fill(positions < starts.unsqueeze(1), -math.inf)
