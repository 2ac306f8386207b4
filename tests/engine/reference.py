"""What the laws compare with: the same model, written plainly, in one process, without the engine's code.

It shares with the engine only what defines the task: a parameter's first value, which samples form an
iteration, and which elements of a sample dropout drops.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from actors.engine.data import Samples
from actors.engine.documents import PLAIN, Documents
from actors.engine.mixture import open_tokens
from actors.engine.model.dropout import Draws, kept_mask
from actors.engine.weights import initial_parameter
from actors.job import Training
from planner.model_spec import ModelSpec
from planner.parameters import model_parameters

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Trained:
    """Losses of every iteration, the unclipped gradient of the first and its norm, the last parameters."""

    losses: list[float]
    norms: list[float]
    gradients: Tensors
    parameters: Tensors


PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def train(
    model: ModelSpec,
    training: Training,
    tokens: Path,
    *,
    exact: bool = False,
    documents: Documents = PLAIN,
) -> Trained:
    """Train as one process would, the whole global batch at once; fp32, or bf16 or fp16 with fp32 master weights.

    `exact` works in fp64 throughout, which shows how far round-off alone takes fp32.
    """
    wide = torch.float64 if exact else torch.float32
    dtype = wide if exact else PRECISIONS[training.precision]
    loss_scale = 2.0**16 if dtype == torch.float16 else 1.0
    masters = {
        p.name: initial_parameter(p, model=model, seed=training.seed).to(wide)
        for p in model_parameters(model)
    }
    optimizer = _optimizer(masters, training)
    samples = Samples(
        open_tokens(tokens),
        sequence_length=training.sequence_length,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
        documents=documents,
    )
    losses, norms, first = [], [], Tensors()
    for iteration in range(1, training.steps + 1):
        inputs, labels = samples.batch(iteration, 0, training.global_batch_size)
        leaves = {name: master.to(dtype).detach().requires_grad_() for name, master in masters.items()}
        dropped = Dropped(model.dropout, Draws(training.seed, iteration, first_sample=0))
        begins = samples.documents(iteration, 0, training.global_batch_size)
        output = logits(model, leaves, inputs, dropped, begins)
        loss = F.cross_entropy(output.to(wide).flatten(0, 1), labels.flatten())
        (loss * loss_scale).backward()
        gradients = {
            name: leaf.grad.to(wide) / loss_scale for name, leaf in leaves.items() if leaf.grad is not None
        }
        assert gradients.keys() == masters.keys()
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
        first = first or {name: gradient.clone() for name, gradient in gradients.items()}
        scale = 1.0
        if training.gradient_clip is not None:
            scale = min(1.0, training.gradient_clip / norm)
        for name, master in masters.items():
            master.grad = gradients[name] * scale
        for group in optimizer.param_groups:
            group["lr"] = training.learning_rate.at(iteration, steps=training.steps)
        optimizer.step()
        losses.append(float(loss.detach()))
        norms.append(norm)
    return Trained(
        losses, norms, first, {name: master.detach().to(dtype) for name, master in masters.items()}
    )


def _optimizer(masters: Tensors, training: Training) -> torch.optim.Optimizer:
    settings = training.optimizer
    matrices = [master for master in masters.values() if master.dim() > 1]
    vectors = [master for master in masters.values() if master.dim() == 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    if settings.name == "sgd":
        return torch.optim.SGD(groups, lr=0.0, momentum=settings.momentum)
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon)


@dataclass(frozen=True)
class Dropped:
    """Dropout of one iteration's whole global batch."""

    probability: float
    draws: Draws

    def __call__(self, x: torch.Tensor, layer: int, operator: str) -> torch.Tensor:
        """`[samples, .., columns]`: some elements zero, the others larger to the same mean."""
        if not self.probability:
            return x
        of_65536 = round(self.probability * 65536)
        mask = kept_mask(
            self.draws.keys(layer=layer, operator=operator, rows=x.shape[0]),
            lines=x[0].numel() // x.shape[-1],
            first_line=0,
            columns=x.shape[-1],
            dropped=of_65536,
            device=x.device,
        )
        return x.masked_fill(~mask.view(x.shape), 0.0) / (1 - of_65536 / 65536)


def logits(
    model: ModelSpec, p: Tensors, ids: torch.Tensor, dropped: Dropped, begins: torch.Tensor | None = None
) -> torch.Tensor:
    """ids `[samples, sequence]` -> logits `[samples, sequence, vocabulary]`; `begins` as StageModel's documents."""
    begins = torch.zeros_like(ids) if begins is None else begins
    hidden = p["embedding.tokens.weight"][ids]
    if model.family == "gpt3":
        hidden = hidden + p["embedding.positions.weight"][torch.arange(ids.shape[1]) - begins]
    hidden = dropped(hidden, -1, "embedding")
    for index in range(model.layers):
        layer = {
            name.removeprefix(f"layers.{index}."): tensor
            for name, tensor in p.items()
            if name.startswith(f"layers.{index}.")
        }
        normed = _norm(model, layer, "attention_norm", hidden)
        dropped_weights = partial(dropped, layer=index, operator="attention_dropout")
        update = _attention(model, layer, normed, begins, dropped_weights)
        hidden = hidden + dropped(update, index, "attention_residual")
        update = _mlp(model, layer, _norm(model, layer, "mlp_norm", hidden))
        hidden = hidden + dropped(update, index, "mlp_residual")
    table = p["embedding.tokens.weight"] if model.tied_embedding else p["head.weight"]
    return _norm(model, p, "final_norm", hidden) @ table.T


def _attention(
    model: ModelSpec,
    layer: Tensors,
    x: torch.Tensor,
    begins: torch.Tensor,
    dropped: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    samples, length, width = x.shape
    query, key, value = (
        _linear(layer, f"attention.{name}", x).view(samples, length, -1, model.head_size)
        for name in ("query", "key", "value")
    )
    if model.family == "llama":
        query, key = _turned(model, query), _turned(model, key)
        queries_per_key = model.heads // model.kv_heads
        key, value = (part.repeat_interleave(queries_per_key, dim=2) for part in (key, value))
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(model.head_size)
    allowed = torch.ones(length, length, dtype=torch.bool).tril() & (
        begins.unsqueeze(1) == begins.unsqueeze(2)
    ).unsqueeze(1)
    wide = torch.promote_types(x.dtype, torch.float32)
    weights = dropped(scores.to(wide).masked_fill(~allowed, -math.inf).softmax(dim=-1).to(x.dtype))
    mixed = torch.einsum("bhij,bjhd->bihd", weights, value)
    return _linear(layer, "attention.output", mixed.reshape(samples, length, width))


def _turned(model: ModelSpec, heads: torch.Tensor) -> torch.Tensor:
    """RoPE as a product of complex numbers: `[samples, length, heads, head size]`."""
    half, length = model.head_size // 2, heads.shape[1]
    angles = torch.tensor(
        [[position * _frequency(model, pair) for pair in range(half)] for position in range(length)],
        dtype=torch.float64,
    )
    exact = heads.dtype == torch.float64
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128 if exact else torch.complex64)
    wide = heads.to(torch.float64 if exact else torch.float32)
    turned = torch.complex(wide[..., :half], wide[..., half:]) * turn[:, None]
    return torch.cat([turned.real, turned.imag], dim=-1).to(heads.dtype)


def _frequency(model: ModelSpec, pair: int) -> float:
    """Radians a position, as LLaMA 3.1 scales them by wave length."""
    plain = model.rope_base ** (-2 * pair / model.head_size)
    scaling = model.rope_scaling
    if scaling is None:
        return plain
    slow = plain / scaling.factor
    if scaling.type == "linear":
        return slow
    wave_length = 2 * math.pi / plain
    if wave_length < scaling.original_sequence_length / scaling.high_turns:
        return plain
    if wave_length > scaling.original_sequence_length / scaling.low_turns:
        return slow
    turns = scaling.original_sequence_length / wave_length
    smooth = (turns - scaling.low_turns) / (scaling.high_turns - scaling.low_turns)
    return (1 - smooth) * slow + smooth * plain


def _mlp(model: ModelSpec, layer: Tensors, x: torch.Tensor) -> torch.Tensor:
    inner = _linear(layer, "mlp.up", x)
    if model.family == "gpt3":
        return _linear(layer, "mlp.down", F.gelu(inner, approximate="tanh"))
    return _linear(layer, "mlp.down", F.silu(_linear(layer, "mlp.gate", x)) * inner)


def _linear(p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, p[f"{name}.weight"], p.get(f"{name}.bias"))


def _norm(model: ModelSpec, p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    weight = p[f"{name}.weight"]
    if model.family == "gpt3":
        return F.layer_norm(x, (model.hidden_size,), weight, p[f"{name}.bias"], model.norm_epsilon)
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    normed = wide / (wide.square().mean(dim=-1, keepdim=True) + model.norm_epsilon).sqrt()
    return (normed * weight).to(x.dtype)
