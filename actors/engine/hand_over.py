"""How what a thread read gets from the host's memory to a rank's device."""

from __future__ import annotations

import torch


class HandOver:
    """Hands tensors of the host's memory over to a device.

    To an accelerator they go through page-locked memory: the copy is queued like any other work of the device, and
    training does not wait for it. torch keeps such memory for later batches, and gives none of it away before the
    copies out of it are done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._page_locked = device.type != "cpu"

    def begin(self) -> None:
        """Called by a thread before its first `prepared`: page-locked memory is that of the thread's device, which is
        device 0, on which the process may have no business, unless it is told."""
        if self._page_locked:
            torch.accelerator.set_device_index(self._device)

    def prepared(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host's memory, where it can be handed over from."""
        return tensor.pin_memory() if self._page_locked else tensor

    def prepared_batch(
        self, tokens: tuple[torch.Tensor, torch.Tensor] | None, documents: torch.Tensor | None
    ) -> tuple[tuple[torch.Tensor, torch.Tensor] | None, torch.Tensor | None]:
        """A micro-batch's inputs and labels, and where documents begin, prepared; what there is not stays None."""
        return (
            None if tokens is None else (self.prepared(tokens[0]), self.prepared(tokens[1])),
            None if documents is None else self.prepared(documents),
        )

    def taken(self, tensor: torch.Tensor) -> torch.Tensor:
        """A prepared tensor on the device, for what is queued on its current stream from now on."""
        # A copy on the host's processor too: its device memory is watched, and the thread's is no part of it.
        return tensor.to(self._device, non_blocking=self._page_locked, copy=True)
