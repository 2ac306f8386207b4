"""RMSNorm, the norm of LLaMA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class RmsNorm(nn.Module):
    """`x / sqrt(mean(x^2) + epsilon) * weight` over the last dim, in fp32 whatever the model's precision."""

    def __init__(self, width: int, *, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._epsilon = epsilon

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.is_cpu:
            # torch has a fused kernel for accelerators only: its steps on a CPU keep four copies of the input.
            normed: torch.Tensor = _RmsNorm.apply(hidden, self.weight, self._epsilon)
            return normed
        return F.rms_norm(hidden, self.weight.shape, self.weight, self._epsilon)


class _RmsNorm(torch.autograd.Function):
    """Keeps the input and one float a token."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        norm = torch.linalg.vector_norm(hidden, dim=-1, keepdim=True, dtype=torch.float32)
        inverse = norm.square_().div_(hidden.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, inverse)
        return (hidden * inverse).mul_(weight).to(hidden.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, inverse = ctx.saved_tensors
        (gradient,) = gradients
        normed = hidden * inverse
        weight_gradient = torch.einsum("...w,...w->w", gradient.to(normed.dtype), normed)
        scaled = (
            gradient * weight if gradient.dtype == normed.dtype else gradient.to(normed.dtype).mul_(weight)
        )
        along = torch.linalg.vecdot(scaled, normed).unsqueeze(-1).div_(hidden.shape[-1])
        # Growing along itself does not change the normed input: that part of the gradient is taken out.
        result = scaled.sub_(normed.mul_(along)).mul_(inverse)
        return result.to(hidden.dtype), weight_gradient.to(weight.dtype), None
