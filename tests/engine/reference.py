"""What the laws compare with: the same model, written plainly, in one process, without the engine's code.

It shares with the engine only what defines the task: a parameter's first value, and which samples form
an iteration.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from actors.engine.data import Samples
from actors.engine.tokens import TokenFile
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


def train(model: ModelSpec, training: Training, tokens: Path, *, exact: bool = False) -> Trained:
    """Train as one process would, the whole global batch at once; fp32, or bf16 with fp32 master weights.

    `exact` works in fp64 throughout, which shows how far round-off alone takes fp32.
    """
    wide = torch.float64 if exact else torch.float32
    dtype = torch.bfloat16 if training.precision == "bf16" and not exact else wide
    masters = {
        p.name: initial_parameter(p, model=model, seed=training.seed).to(wide)
        for p in model_parameters(model)
    }
    optimizer = _adamw(masters, training)
    samples = Samples(
        TokenFile(tokens),
        sequence_length=training.sequence_length,
        global_batch_size=training.global_batch_size,
        seed=training.seed,
    )
    losses, norms, first = [], [], Tensors()
    for iteration in range(1, training.steps + 1):
        inputs, labels = samples.batch(iteration, 0, training.global_batch_size)
        leaves = {name: master.to(dtype).detach().requires_grad_() for name, master in masters.items()}
        loss = F.cross_entropy(logits(model, leaves, inputs).to(wide).flatten(0, 1), labels.flatten())
        loss.backward()
        gradients = {name: leaf.grad.to(wide) for name, leaf in leaves.items() if leaf.grad is not None}
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


def _adamw(masters: Tensors, training: Training) -> torch.optim.Optimizer:
    settings = training.optimizer
    matrices = [master for master in masters.values() if master.dim() > 1]
    vectors = [master for master in masters.values() if master.dim() == 1]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=settings.betas,
        eps=settings.epsilon,
    )


def logits(model: ModelSpec, p: Tensors, ids: torch.Tensor) -> torch.Tensor:
    """ids `[samples, sequence]` -> logits `[samples, sequence, vocabulary]`."""
    hidden = p["embedding.tokens.weight"][ids] + p["embedding.positions.weight"][: ids.shape[1]]
    for index in range(model.layers):
        layer = {
            name.removeprefix(f"layers.{index}."): tensor
            for name, tensor in p.items()
            if name.startswith(f"layers.{index}.")
        }
        hidden = hidden + _attention(model, layer, _norm(model, layer, "attention_norm", hidden))
        inner = F.gelu(_linear(layer, "mlp.up", _norm(model, layer, "mlp_norm", hidden)), approximate="tanh")
        hidden = hidden + _linear(layer, "mlp.down", inner)
    table = p["embedding.tokens.weight"] if model.tied_embedding else p["head.weight"]
    return _norm(model, p, "final_norm", hidden) @ table.T


def _attention(model: ModelSpec, layer: Tensors, x: torch.Tensor) -> torch.Tensor:
    samples, length, width = x.shape
    query, key, value = (
        _linear(layer, f"attention.{name}", x).view(samples, length, model.heads, -1)
        for name in ("query", "key", "value")
    )
    scores = torch.einsum("bihd,bjhd->bhij", query, key) / math.sqrt(model.head_size)
    allowed = torch.ones(length, length, dtype=torch.bool).tril()
    wide = torch.promote_types(x.dtype, torch.float32)
    weights = scores.to(wide).masked_fill(~allowed, -math.inf).softmax(dim=-1).to(x.dtype)
    mixed = torch.einsum("bhij,bjhd->bihd", weights, value)
    return _linear(layer, "attention.output", mixed.reshape(samples, length, width))


def _linear(p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def _norm(model: ModelSpec, p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, (model.hidden_size,), p[f"{name}.weight"], p[f"{name}.bias"], model.norm_epsilon)
