"""Rotary positions (RoPE): queries and keys are turned by angles that grow with the position.

Pairs are (i, i + half the head), as in the weights that Hugging Face publishes.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from planner.model_spec import ModelSpec, RopeScaling

Rotation = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines, fp32 `[sequence, head size / 2]` each."""


def rotation_table(model: ModelSpec, length: int, *, device: torch.device) -> Rotation:
    """The rotation of every position. Angles are worked out in fp64: late positions turn many times."""
    frequencies = rotary_frequencies(model)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), frequencies)
    return angles.cos().float().to(device), angles.sin().float().to(device)


def rotary_frequencies(model: ModelSpec) -> torch.Tensor:
    """Radians a position of each pair, fp64 `[head size / 2]`, with the model's scaling."""
    pairs = torch.arange(0, model.head_size, 2, dtype=torch.float64) / model.head_size
    frequencies = model.rope_base**-pairs
    scaling = model.rope_scaling
    if scaling is None:
        return frequencies
    if scaling.type == "linear":
        return frequencies / scaling.factor
    return _llama3(frequencies, scaling)


def _llama3(frequencies: torch.Tensor, scaling: RopeScaling) -> torch.Tensor:
    """Slow pairs, which the original length saw less than `low_turns` of, are slowed by the factor; fast
    ones stay; between, a mixture."""
    turns = frequencies * scaling.original_sequence_length / (2 * math.pi)
    share = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    share = share.clamp(0.0, 1.0)
    return share * frequencies + (1 - share) * frequencies / scaling.factor


def rotated(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Heads `[.., sequence, head size]`, turned; in fp32, rounded once."""
    turned: torch.Tensor = _Rotate.apply(heads, *rotation)
    return turned


class _Rotate(torch.autograd.Function):
    """Backward turns the other way, and so keeps nothing of its input."""

    @staticmethod
    def forward(ctx: Any, heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosines, sines)
        return _turned(heads, cosines, sines, forwards=True)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return _turned(gradients[0], *ctx.saved_tensors, forwards=False), None, None


def _turned(
    heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor, *, forwards: bool
) -> torch.Tensor:
    first, second = heads.chunk(2, dim=-1)
    result = torch.empty_like(heads, memory_format=torch.contiguous_format)
    real, imaginary = result.chunk(2, dim=-1)
    sign = -1 if forwards else 1
    real.copy_((first * cosines).addcmul_(second, sines, value=sign))
    imaginary.copy_((second * cosines).addcmul_(first, sines, value=-sign))
    return result
