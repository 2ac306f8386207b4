"""AdamW or SGD over a rank's shards of the gradient buffer (ZeRO): its state is a share of that of whole parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from actors.engine.gradient_buffer import Piece
from actors.engine.optimizer import clip_coefficient, make_optimizer
from actors.engine.shard_store import ShardStore, Share
from actors.job import Optimizer as OptimizerSettings


@dataclass(frozen=True)
class ShardState:
    """Optimizer state of elements `[start, stop)`, in row-major order, of a parameter's TP range.

    `tensors` is flat and as in `PieceState`: writing into them loads a checkpoint. `step` counts updates. `owned`
    marks the one copy that is saved.
    """

    name: str
    tp_range: tuple[int, int] | None
    start: int
    stop: int
    step: torch.Tensor
    tensors: dict[str, torch.Tensor]
    owned: bool


class ShardedOptimizer:
    """As `Optimizer`, with state for the rank's shards alone; fp32 masters of them beside narrower parameters.

    Args:
        parameter_dtype: the parameters' precision; gradients and state are fp32.
    """

    def __init__(
        self,
        *,
        store: ShardStore,
        parameter_dtype: torch.dtype,
        settings: OptimizerSettings,
        gradient_clip: float | None,
    ) -> None:
        self._store = store
        self._gradient_clip = gradient_clip
        narrow = parameter_dtype != torch.float32
        self._batches: list[_Batch] = []
        groups: dict[bool, list[torch.Tensor]] = {True: [], False: []}
        for index, shares in enumerate(store.shares()):
            views = [share.view for share in shares]
            if narrow:
                store.load(index)
            batch = _Batch(shares, views, [view.clone() for view in views] if narrow else None)
            self._batches.append(batch)
            for tensor, share in zip(batch.updated, shares, strict=True):
                groups[share.decays].append(tensor)
        self._torch = make_optimizer(
            [
                {"params": tensors, "weight_decay": settings.weight_decay if decays else 0.0}
                for decays, tensors in groups.items()
                if tensors
            ],
            settings,
            # Fused updates round a tensor's last elements otherwise: copies cut elsewhere would differ there.
            form="single" if store.copied else "fused",
        )

    def step(self, *, gradient_norm: float, learning_rate: float, loss_scale: float = 1.0) -> None:
        """Update the shards from their summed gradients, as `Optimizer.step`; `gather` must follow."""
        coefficient = clip_coefficient(gradient_norm, self._gradient_clip) / loss_scale
        if coefficient != 1.0:
            torch._foreach_mul_([view for batch in self._batches for view in batch.views], coefficient)
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        for index, batch in enumerate(self._batches):
            if batch.masters is None:
                gradients = [view.clone() for view in batch.views]
                self._store.load(index)
                self._update(batch.updated, gradients)
            else:
                self._update(batch.updated, batch.views)
                torch._foreach_copy_(batch.views, batch.masters)

    def states(self) -> Iterator[ShardState]:
        """The state of the rank's shards, by the pieces of parameters that they are made of."""
        for batch in self._batches:
            for share, updated in zip(batch.shares, batch.updated, strict=True):
                state = self._torch.state[updated]
                tensors = {name: value for name, value in state.items() if name != "step"}
                if batch.masters is not None:
                    tensors["master"] = updated
                for atom, first, last, begin in share.by_atom():
                    yield ShardState(
                        atom.parameter,
                        atom.tp_range,
                        first,
                        last,
                        state["step"],
                        {name: value[begin : begin + last - first] for name, value in tensors.items()},
                        share.owned,
                    )

    def gather(self) -> None:
        """Write every parameter of the rank from the shards of all holders."""
        self._store.gather(_write_parameters)

    def _update(self, updated: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        for tensor, gradient in zip(updated, gradients, strict=True):
            tensor.grad = gradient
        self._torch.step()
        for tensor in updated:
            tensor.grad = None


@dataclass(frozen=True)
class _Batch:
    """Shares that are updated together; narrower parameters have masters, others are updated in the buffer."""

    shares: list[Share]
    views: list[torch.Tensor]
    masters: list[torch.Tensor] | None

    @property
    def updated(self) -> list[torch.Tensor]:
        return self.views if self.masters is None else self.masters


def _write_parameters(pieces: Sequence[Piece]) -> None:
    if pieces:
        torch._foreach_copy_([piece.parameter for piece in pieces], [piece.gradient for piece in pieces])
