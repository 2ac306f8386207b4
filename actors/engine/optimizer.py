"""AdamW over the pieces of a rank's parameters, with fp32 master copies where parameters are narrower."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from actors.engine.gradient_buffer import GradientBuffer, Piece
from actors.job import Optimizer as OptimizerSettings


class NonFiniteGradientError(RuntimeError):
    """The gradient of an iteration holds an infinity or a NaN; raised on every rank, before any update."""

    def __init__(self, *, iteration: int, norm: float) -> None:
        super().__init__(
            f"iteration {iteration}: the gradient's norm is {norm}; lower learning_rate, or train in fp32"
        )
        self.iteration = iteration
        self.norm = norm

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not unpickle by themselves; this one crosses processes.
        return _non_finite, (self.iteration, self.norm)


def _non_finite(iteration: int, norm: float) -> NonFiniteGradientError:
    return NonFiniteGradientError(iteration=iteration, norm=norm)


def clip_coefficient(norm: float, limit: float | None) -> float:
    """What to scale a gradient of that norm by, so that its norm is at most `limit` (None: no limit)."""
    return 1.0 if limit is None else min(1.0, limit / (norm + 1e-6))


@dataclass(frozen=True)
class PieceState:
    """Optimizer state of a slice of a logical parameter, under the plan-free address (name, tp_range).

    `tensors` holds `exp_avg`, `exp_avg_sq` and, for parameters narrower than fp32, `master`, in the shape
    of the slice: views, so that writing into them loads a checkpoint. `step` counts updates.
    """

    name: str
    tp_dim: int | None
    tp_range: tuple[int, int] | None
    step: torch.Tensor
    tensors: dict[str, torch.Tensor]


class Optimizer:
    """AdamW with decoupled weight decay on matrices, none on norms and biases.

    It works on plain local views, so parameters may be DTensors of any mesh or none. State exists from
    the start: what fits before the first iteration fits after it.
    """

    def __init__(
        self, *, buffer: GradientBuffer, settings: OptimizerSettings, gradient_clip: float | None
    ) -> None:
        assert buffer.flat.dtype == torch.float32, (
            "AdamW runs in the gradients' precision, which must be fp32"
        )
        self._buffer = buffer
        self._gradient_clip = gradient_clip
        self._pieces = buffer.pieces()
        self._updated = [_updated_tensor(piece) for piece in self._pieces]
        self._adamw = torch.optim.AdamW(
            _parameter_groups(self._pieces, self._updated, settings.weight_decay),
            lr=0.0,
            betas=settings.betas,
            eps=settings.epsilon,
            foreach=True,
        )
        for tensor in self._updated:
            self._adamw.state[tensor] = {
                "step": torch.zeros(()),
                "exp_avg": torch.zeros_like(tensor),
                "exp_avg_sq": torch.zeros_like(tensor),
            }

    def step(self, *, iteration: int, gradient_norm: float, learning_rate: float) -> None:
        """Update the parameters from the synchronised gradients, clipped to the job's `gradient_clip`.

        `gradient_norm` is the world's, so every rank clips alike, or raises NonFiniteGradientError alike.
        """
        if not math.isfinite(gradient_norm):
            raise NonFiniteGradientError(iteration=iteration, norm=gradient_norm)
        coefficient = clip_coefficient(gradient_norm, self._gradient_clip)
        if coefficient < 1.0:
            self._buffer.flat.mul_(coefficient)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._write_parameters()

    def states(self) -> Iterator[PieceState]:
        """The state of every piece of this rank."""
        for piece, tensor in zip(self._pieces, self._updated, strict=True):
            state = self._adamw.state[tensor]
            tensors = {name: piece.logical(state[name]) for name in ("exp_avg", "exp_avg_sq")}
            if tensor is not piece.parameter:
                tensors["master"] = piece.logical(tensor)
            yield PieceState(piece.name, piece.tp_dim, piece.tp_range, state["step"], tensors)

    def _write_parameters(self) -> None:
        """Master copies to the parameters that they stand for, rounded to their precision."""
        pairs = [
            (piece.parameter, tensor)
            for piece, tensor in zip(self._pieces, self._updated, strict=True)
            if tensor is not piece.parameter
        ]
        if pairs:
            torch._foreach_copy_([parameter for parameter, _ in pairs], [master for _, master in pairs])


def _updated_tensor(piece: Piece) -> torch.Tensor:
    """What AdamW updates for a piece: the parameter's own view, or an fp32 copy of a narrower one."""
    narrower = piece.parameter.dtype != piece.gradient.dtype
    tensor = piece.parameter.to(piece.gradient.dtype) if narrower else piece.parameter
    tensor.grad = piece.gradient
    return tensor


def _parameter_groups(
    pieces: Sequence[Piece], updated: Sequence[torch.Tensor], weight_decay: float
) -> list[dict[str, object]]:
    """Groups by decay and, since one strided tensor takes a whole group off the fast path, by layout."""
    groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for piece, tensor in zip(pieces, updated, strict=True):
        dense = tensor.is_contiguous() and piece.gradient.is_contiguous()
        groups.setdefault((piece.decays, dense), []).append(tensor)
    return [
        {"params": tensors, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), tensors in groups.items()
    ]
