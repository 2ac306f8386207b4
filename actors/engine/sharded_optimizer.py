"""AdamW or SGD over a rank's shards of the gradient buffer (ZeRO): its state is a share of that of whole parameters.

The buffer plays two parts. Until the update it holds gradients, summed where this rank answers for them;
then the new parameters, of which each holder gathers the others' shards, and from which every parameter,
whatever its shape, is written through the same strided views that its gradient went in by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from actors.engine.gradient_buffer import GradientBuffer
from actors.engine.optimizer import clip_coefficient, make_optimizer
from actors.engine.shard_transport import Shard, ShardTransport, gather_all
from actors.job import Optimizer as OptimizerSettings
from planner.gradient_blocks import Atom
from planner.gradient_calls import GradientCall, Section


@dataclass(frozen=True)
class ShardState:
    """Optimizer state of elements `[start, stop)`, in row-major order, of a parameter's TP range.

    `tensors` is flat and as in `PieceState`: writing into them loads a checkpoint. `step` counts updates.
    """

    name: str
    tp_range: tuple[int, int] | None
    start: int
    stop: int
    step: torch.Tensor
    tensors: dict[str, torch.Tensor]


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
        places = [
            (by_index[shard.section], start, stop, decayed)
            for shard in shards
            for start, stop, decayed in _decay_ranges(by_index[shard.section], shard, decays)
        ]
        self._places_of_shares = [(section, start, stop) for section, start, stop, _ in places]
        ranges = [
            (buffer.section_view(section)[start:stop], decayed) for section, start, stop, decayed in places
        ]
        self._shares = [view for view, _ in ranges]
        self._masters: list[torch.Tensor] | None = None
        if self._parameters[0].dtype != buffer.flat.dtype:
            self._load_parameters()
            self._masters = [view.clone() for view in self._shares]
            buffer.zero()
        self._updated = self._masters or self._shares
        groups = [
            {
                "params": [
                    u for u, (_, decayed) in zip(self._updated, ranges, strict=True) if decayed == which
                ],
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

    def states(self) -> Iterator[ShardState]:
        """The state of the rank's shards, by the pieces of parameters that they are made of."""
        for updated, (section, start, stop) in zip(self._updated, self._places_of_shares, strict=True):
            state = self._torch.state[updated]
            tensors = {name: value for name, value in state.items() if name != "step"}
            if self._masters is not None:
                tensors["master"] = updated
            for atom, first, last, begin in _atoms_within(section, start, stop):
                yield ShardState(
                    atom.parameter,
                    atom.tp_range,
                    first,
                    last,
                    state["step"],
                    {name: value[begin : begin + last - first] for name, value in tensors.items()},
                )

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


def _atoms_within(section: Section, start: int, stop: int) -> Iterator[tuple[Atom, int, int, int]]:
    """The atoms in elements `[start, stop)` of a section: the atom, its own elements' range, and where in
    `[start, stop)` they begin. Rounding at the end belongs to none."""
    place = 0
    for atom in (atom for block in section.blocks for atom in block.atoms):
        first, last = max(start, place), min(stop, place + atom.numel)
        if first < last:
            yield atom, first - place, last - place, first - start
        place += atom.numel


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
