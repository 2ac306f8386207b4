"""AdamW or SGD over the pieces of a rank's parameters, with fp32 master copies where parameters are narrower."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

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
    if limit is None:
        return 1.0
    ratio = limit / (norm + 1e-6)
    # A norm that is no number must reach the parameters of a job that goes on, and not vanish in a comparison.
    return 1.0 if ratio >= 1.0 else ratio


@dataclass(frozen=True)
class PieceState:
    """Optimizer state of a slice of a logical parameter, under the plan-free address (name, tp_range).

    `tensors` holds `exp_avg` and `exp_avg_sq` (AdamW) or `momentum_buffer` (SGD) and, for parameters narrower
    than fp32, `master`, in the shape of the slice: views, so that writing into them loads a checkpoint. `step`
    counts updates.
    """

    name: str
    tp_dim: int | None
    tp_range: tuple[int, int] | None
    step: torch.Tensor
    tensors: dict[str, torch.Tensor]


def make_optimizer(
    groups: list[dict[str, Any]],
    settings: OptimizerSettings,
    *,
    form: Literal["foreach", "fused", "single"] = "foreach",
) -> torch.optim.Optimizer:
    """AdamW or SGD over groups of flat or strided fp32 tensors, with its state made at once.

    Form `foreach` makes a temporary of every tensor at once, `single` of one after the other, and `fused` none;
    that needs contiguous tensors, and rounds a tensor's last few elements otherwise than the rest.
    """
    how: dict[str, Any] = {"lr": 0.0, "foreach": form == "foreach", "fused": form == "fused"}
    made: torch.optim.Optimizer
    names: tuple[str, ...]
    if settings.name == "adamw":
        made = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.epsilon, **how)
        names = ("exp_avg", "exp_avg_sq")
    else:
        made = torch.optim.SGD(groups, momentum=settings.momentum, **how)
        names = ("momentum_buffer",) if settings.momentum else ()
    for group in made.param_groups:
        for tensor in group["params"]:
            state = {name: torch.zeros_like(tensor) for name in names}
            made.state[tensor] = {"step": torch.zeros(()), **state}
    return made


class Optimizer:
    """AdamW with decoupled weight decay, or SGD, on matrices; no decay on norms and biases.

    It works on plain local views, so parameters may be DTensors of any mesh or none. State exists from
    the start: what fits before the first iteration fits after it.
    """

    def __init__(
        self, *, buffer: GradientBuffer, settings: OptimizerSettings, gradient_clip: float | None
    ) -> None:
        assert buffer.flat.dtype == torch.float32, (
            "the optimizer runs in the gradients' precision, which must be fp32"
        )
        self._buffer = buffer
        self._gradient_clip = gradient_clip
        self._pieces = buffer.pieces()
        self._updated = [_updated_tensor(piece) for piece in self._pieces]
        groups = _parameter_groups(self._pieces, self._updated, settings.weight_decay)
        self._torch = make_optimizer(groups, settings)

    def step(self, *, gradient_norm: float, learning_rate: float, loss_scale: float = 1.0) -> None:
        """Update the parameters from the synchronised gradients, clipped to the job's `gradient_clip`.

        `gradient_norm` is the world's, so every rank clips alike; the gradients are those of the loss times
        `loss_scale`.
        """
        coefficient = clip_coefficient(gradient_norm, self._gradient_clip) / loss_scale
        if coefficient != 1.0:
            self._buffer.flat.mul_(coefficient)
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        self._torch.step()
        self._write_parameters()

    def gather(self) -> None:
        """Every rank has updated all of its parameters itself."""

    def states(self) -> Iterator[PieceState]:
        """The state of every piece of this rank."""
        for piece, tensor in zip(self._pieces, self._updated, strict=True):
            state = self._torch.state[tensor]
            tensors = {name: piece.logical(value) for name, value in state.items() if name != "step"}
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
) -> list[dict[str, Any]]:
    """Groups by decay and, since one strided tensor takes a whole group off the fast path, by layout."""
    groups: dict[tuple[bool, bool], list[torch.Tensor]] = {}
    for piece, tensor in zip(pieces, updated, strict=True):
        dense = tensor.is_contiguous() and piece.gradient.is_contiguous()
        groups.setdefault((piece.decays, dense), []).append(tensor)
    return [
        {"params": tensors, "weight_decay": weight_decay if decays else 0.0}
        for (decays, _), tensors in groups.items()
    ]
