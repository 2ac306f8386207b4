"""Gradient synchronisation over unlike pipelines, and the norm of the whole model's gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from actors.engine.gradient_buffer import GradientBuffer
from planner.gradient_blocks import GradientBlock

# A norm taken in fp32 over 20 million elements at once is wrong by 2e-3 on a CPU; in pieces of this many
# elements it is right to 1e-6.
_NORM_PIECE = 1 << 16


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> object: ...


class BlockTransport(Protocol):
    """How a block is summed over its holders: called on each of them, in launch order."""

    def all_reduce(self, block: GradientBlock, data: torch.Tensor) -> Work:
        """Start to sum `data` (flat, contiguous) in place; it is complete after the work's `wait`."""
        ...


class GroupTransport:
    """One flat all-reduce a block on the process group of its holders."""

    def __init__(self, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> None:
        self._groups = groups

    def all_reduce(self, block: GradientBlock, data: torch.Tensor) -> Work:
        work = dist.all_reduce(data, group=self._groups[block.holders], async_op=True)
        assert work is not None, f"this rank is not in the group of block {block.index}"
        return work


class GradientSync(Protocol):
    """Turns each rank's own gradients into those of the global batch.

    The trainer calls `start` when the last backward is done, then `finish`; between the two the buffer
    belongs to the collectives. Afterwards every holder of an element holds the same bits.
    """

    def start(self) -> None: ...
    def finish(self) -> None: ...
    def square_sum(self) -> torch.Tensor: ...


class BlockSync:
    """Block-wise synchronisation (paper 4.3): one collective a block, all started before any is awaited.

    `blocks` are the rank's, in the launch order that all ranks share: no two ranks wait for each other
    crosswise. A block with one holder costs nothing.
    """

    def __init__(
        self,
        *,
        buffer: GradientBuffer,
        blocks: Sequence[GradientBlock],
        rank: int,
        transport: BlockTransport,
    ) -> None:
        self._rank = rank
        self._device = buffer.flat.device
        self._transport = transport
        self._parts = [(block, buffer.block_view(block)) for block in blocks]
        self._running: list[Work] = []

    def start(self) -> None:
        """Scale this rank's contributions and start every collective."""
        assert not self._running, "the last synchronisation is not finished"
        for block, data in self._parts:
            if (weight := block.weight(self._rank)) != 1.0:
                data.mul_(weight)
            if len(block.holders) > 1:
                self._running.append(self._transport.all_reduce(block, data))

    def finish(self) -> None:
        """Wait until the buffer holds the global batch's gradients."""
        for work in self._running:
            work.wait()
        self._running.clear()

    def square_sum(self) -> torch.Tensor:
        """Sum of squares of the synchronised gradients that this rank answers for: a scalar, fp32.

        The first holder of a block answers for it, so the sum over the world counts every parameter
        element once, however the pipelines are cut, and is not finite on any rank if one
        element is not.
        """
        own = [data for block, data in self._parts if block.holders[0] == self._rank]
        pieces = [piece for data in own for piece in data.split(_NORM_PIECE)]
        if not pieces:
            return torch.zeros((), device=self._device)
        return torch.stack(torch._foreach_norm(pieces)).float().square().sum()
