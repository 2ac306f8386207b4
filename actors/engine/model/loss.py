"""Cross-entropy over a vocabulary that may be cut over TP and padded. Always in fp32.

torch's own `loss_parallel` must enclose the backward pass, knows of no padding and keeps whole
log-probabilities; here backward needs no message at all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

NOT_COUNTED = -100
"""Label of a token that does not count: of surplus samples, for example."""


def cross_entropy_sum(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Sum over the counted tokens; `logits` `[.., vocabulary]`, `labels` int64 `[..]`. fp32 scalar."""
    flat = logits.flatten(0, -2).float()
    return F.cross_entropy(flat, labels.flatten(), ignore_index=NOT_COUNTED, reduction="sum")


def vocabulary_parallel_cross_entropy_sum(
    logits: torch.Tensor,
    labels: torch.Tensor,
    *,
    first: int,
    vocab_size: int,
    group: dist.ProcessGroup,
) -> torch.Tensor:
    """The same when each rank of `group` holds the logits from entry `first` on.

    Entries at or beyond `vocab_size` are padding and count as impossible. Every rank gets the sum.
    """
    total: torch.Tensor = _CutCrossEntropy.apply(
        logits.flatten(0, -2), labels.flatten(), first, vocab_size, group
    )
    return total


class _CutCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        labels: torch.Tensor,
        first: int,
        vocab_size: int,
        group: dist.ProcessGroup,
    ) -> torch.Tensor:
        shifted = logits.to(torch.float32, copy=True)
        shifted[:, max(0, vocab_size - first) :] = -torch.inf
        largest = shifted.amax(dim=-1)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        shifted -= largest.unsqueeze(-1)
        column = labels - first
        mine = (column >= 0) & (column < shifted.shape[-1])
        column = column.masked_fill(~mine, 0).unsqueeze(-1)
        at_label = shifted.gather(-1, column).squeeze(-1).masked_fill(~mine, 0.0)
        exponentials = shifted.exp_()
        sums = torch.stack([exponentials.sum(dim=-1), at_label])
        dist.all_reduce(sums, group=group)
        normaliser, at_label = sums
        counted = labels != NOT_COUNTED
        ctx.save_for_backward(exponentials.div_(normaliser.unsqueeze(-1)), column, mine, counted)
        ctx.dtype = logits.dtype
        return torch.where(counted, normaliser.log() - at_label, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        probabilities, column, mine, counted = ctx.saved_tensors
        gradient = probabilities.scatter_add(-1, column, -mine.unsqueeze(-1).to(probabilities.dtype))
        gradient *= (counted * gradients[0]).unsqueeze(-1)
        return gradient.to(ctx.dtype), None, None, None, None
