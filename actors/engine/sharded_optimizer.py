"""AdamW or SGD over a rank's shards of the gradient buffer (ZeRO): its state is a share of that of whole parameters.

The buffer plays two parts. Until the update it holds gradients, summed where this rank answers for them;
then the new parameters, of which each holder gathers the others' shards, and from which every parameter,
whatever its shape, is written through the same strided views that its gradient went in by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from actors.engine.gradient_buffer import GradientBuffer
from actors.engine.optimizer import clip_coefficient, make_optimizer
from actors.engine.shard_transport import Shard, ShardTransport, gather_all
from actors.job import Optimizer as OptimizerSettings
from planner.gradient_calls import GradientCall, Section


class ShardedOptimizer:
    """As `Optimizer`, with state for the rank's shards alone; fp32 masters of them beside narrower parameters.

    Args:
        calls: the rank's, in launch order: in which parameters are gathered too.
    """

    def __init__(
        self,
        *,
        buffer: GradientBuffer,
        sections: Sequence[Section],
        shards: Sequence[Shard],
        calls: Sequence[GradientCall],
        transport: ShardTransport,
        decays: dict[str, bool],
        settings: OptimizerSettings,
        gradient_clip: float | None,
    ) -> None:
        self._buffer, self._calls, self._transport = buffer, calls, transport
        self._gradient_clip = gradient_clip
        pieces = buffer.pieces()
        self._parameters = [piece.parameter for piece in pieces]
        self._places = [piece.gradient for piece in pieces]
        by_index = {section.index: section for section in sections}
        ranges = [
            (buffer.section_view(by_index[shard.section])[start:stop], decayed)
            for shard in shards
            for start, stop, decayed in _decay_ranges(by_index[shard.section], shard, decays)
        ]
        self._shares = [view for view, _ in ranges]
        self._masters: list[torch.Tensor] | None = None
        if self._parameters[0].dtype != buffer.flat.dtype:
            self._load_parameters()
            self._masters = [view.clone() for view in self._shares]
            buffer.zero()
        updated = self._masters or self._shares
        groups = [
            {
                "params": [u for u, (_, decayed) in zip(updated, ranges, strict=True) if decayed == which],
                "weight_decay": settings.weight_decay if which else 0.0,
            }
            for which in (True, False)
        ]
        # Shards are flat and contiguous, and fused updates make no temporaries.
        self._torch = make_optimizer([group for group in groups if group["params"]], settings, fused=True)

    def step(self, *, gradient_norm: float, learning_rate: float, loss_scale: float = 1.0) -> None:
        """Update the shards from their summed gradients, as `Optimizer.step`; `gather` must follow."""
        coefficient = clip_coefficient(gradient_norm, self._gradient_clip) / loss_scale
        if coefficient != 1.0:
            torch._foreach_mul_(self._shares, coefficient)
        for group in self._torch.param_groups:
            group["lr"] = learning_rate
        if self._masters is None:
            self._update_in_the_buffer()
        else:
            self._update_masters(self._masters)

    def gather(self) -> None:
        """Write every parameter of the rank from the shards of all holders."""
        self.gather_buffer()
        torch._foreach_copy_(self._parameters, self._places)

    def gather_buffer(self) -> None:
        """Fill the buffer from the shards of all holders: gradients before the update, parameters after it."""
        gather_all(self._transport, self._calls, self._buffer.call_view)

    def _update_in_the_buffer(self) -> None:
        gradients = [share.clone() for share in self._shares]
        self._load_parameters()
        self._update(self._shares, gradients)

    def _update_masters(self, masters: list[torch.Tensor]) -> None:
        self._update(masters, self._shares)
        torch._foreach_copy_(self._shares, masters)

    def _update(self, updated: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]) -> None:
        for tensor, gradient in zip(updated, gradients, strict=True):
            tensor.grad = gradient
        self._torch.step()
        for tensor in updated:
            tensor.grad = None

    def _load_parameters(self) -> None:
        """Lay the parameters out as their gradients are."""
        torch._foreach_copy_(self._places, self._parameters)


def _decay_ranges(section: Section, shard: Shard, decays: dict[str, bool]) -> Iterator[tuple[int, int, bool]]:
    """The shard cut where weight decay changes; a section's rounding counts with what is before it."""
    found: list[tuple[int, int, bool]] = []
    start = 0
    for atom in (atom for block in section.blocks for atom in block.atoms):
        first, last = max(start, shard.start), min(start + atom.numel, shard.stop)
        start += atom.numel
        if first >= last:
            continue
        decayed = decays[atom.parameter]
        if found and found[-1][2] == decayed:
            found[-1] = found[-1][0], last, decayed
        else:
            found.append((first, last, decayed))
    yield from found
