"""Gradient synchronisation over unlike pipelines, and the norm of the whole model's gradient."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from actors.engine.courier import Work
from actors.engine.gradient_buffer import GradientBuffer, SyncedGradients
from actors.engine.gradient_transport import CallTransport, Span
from planner.gradient_calls import GradientCall, GradientLayout

# A norm taken in fp32 over 20 million elements at once is wrong by 2e-3 on a CPU; in pieces of this many
# elements it is right to 1e-6.
_NORM_PIECE = 1 << 16


@dataclass(frozen=True)
class CallTime:
    """When a call was under way on this rank: from its launch, or where its transport knows it, from when all
    holders were ready; until it was found complete."""

    call: GradientCall
    span: Span


class GradientSync:
    """Turns each rank's own gradients into those of the global batch, by the calls of any scheme.

    The trainer calls `start` when the last backward is done, then `finish`; between the two the buffer
    belongs to the collectives. To overlap them with the last micro-batch's backward, it calls `arm` before
    that: each call is then launched when the last gradient that it takes has arrived, but not before the
    rank's earlier calls. Afterwards every holder of an element holds the same bits, or under ZeRO the one that
    answers for it does.

    Args:
        layout: the plan's; the rank's calls are launched in its order.
        before_launch: told the region with which backward completes each call, before it is launched during
            backward; an emulated device paces itself there.
        own: under ZeRO, what of the sums this rank answers for.
    """

    def __init__(
        self,
        *,
        buffer: SyncedGradients,
        layout: GradientLayout,
        rank: int,
        transport: CallTransport,
        before_launch: Callable[[int], None] | None = None,
        own: Sequence[torch.Tensor] | None = None,
    ) -> None:
        self._buffer = buffer
        self._transport = transport
        self._before_launch = before_launch
        if own is None:
            assert isinstance(buffer, GradientBuffer), "only whole sums are answered for by block"
            blocks = [block for section in layout.sections_of(rank) for block in section.blocks]
            own = [buffer.block_view(block) for block in blocks if block.holders[0] == rank]
        self._own = own
        self._launches = [buffer.call_data(call, rank) for call in layout.calls_of(rank)]
        self._users: dict[str, list[int]] = {}
        for index, launch in enumerate(self._launches):
            for name in launch.parameters:
                self._users.setdefault(name, []).append(index)
        self._missing: list[int] = []
        self._running: list[tuple[GradientCall, float, Work]] = []
        self.times: list[CallTime] = []

    def arm(self) -> None:
        """From now on, each parameter's next gradient is the iteration's last."""
        assert not self._running, "the last synchronisation is not finished"
        self._missing = [len(launch.parameters) for launch in self._launches]
        self._buffer.on_arrival(self._arrived)

    def start(self) -> None:
        """Launch what is not under way yet."""
        self._buffer.on_arrival(None)
        while len(self._running) < len(self._launches):
            self._launch()

    def finish(self) -> None:
        """Wait until the buffer holds the global batch's gradients."""
        self.times = []
        for call, launched, work in self._running:
            try:
                found = work.wait()
            except Exception as error:
                error.add_note(f"while gradients were summed over ranks {', '.join(map(str, call.holders))}")
                raise
            span = found if isinstance(found, Span) else Span(launched, time.monotonic())
            self.times.append(CallTime(call, span))
        self._running.clear()

    def square_sum(self) -> torch.Tensor:
        """Sum of squares of the synchronised gradients that this rank answers for: a scalar, fp32.

        The first holder of a block (under ZeRO its shards' owners) answers for it, so the sum over the world
        counts every parameter element once, however the pipelines are cut, and is not finite on any rank if one
        element is not.
        """
        pieces = [piece for data in self._own for piece in data.split(_NORM_PIECE)]
        if not pieces:
            return torch.zeros((), device=self._buffer.flat.device)
        return torch.stack(torch._foreach_norm(pieces)).float().square().sum()

    def close(self) -> None:
        """Let go of what the transport holds."""
        self._buffer.on_arrival(None)
        self._transport.close()

    def _arrived(self, parameter: str) -> None:
        for index in self._users.get(parameter, ()):
            self._missing[index] -= 1
        while len(self._running) < len(self._launches) and not self._missing[len(self._running)]:
            if self._before_launch is not None:
                self._before_launch(self._launches[len(self._running)].call.region)
            self._launch()

    def _launch(self) -> None:
        launch = self._launches[len(self._running)]
        for data, weight in launch.weighted:
            data.mul_(weight)
        launched = time.monotonic()
        work = self._transport.reduce(launch.call, launch.data)
        self._running.append((launch.call, launched, work))
