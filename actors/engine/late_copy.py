"""What a save writes while training goes on: live tensors for as long as they stand still, copies from then on."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator

import numpy as np
import numpy.typing as npt
import torch

from actors.engine.state_slices import StateSlice

# What is written is still in the processor's cache from when it was read and summed; and for larger writes Linux looks
# for larger runs of free memory, which may take it several times as long as the writing.
PIECE_BYTES = 512 << 10

Address = tuple[str, tuple[int, ...]]
"""Key and offsets of a slice."""
Bytes = npt.NDArray[np.uint8]


class LateCopies:
    """Slices of training state as they are now, for one thread that writes them while another one trains.

    Between two updates training changes nothing of its state. So the writer reads the live tensors, piece by piece
    into one small buffer, and training calls `take` right before it changes any: that copies all slices of which the
    writer has not read the last piece. No piece is ever handed out that an update may have changed: the writer looks
    after each read, under a lock, whether `take` has begun, and if it has throws the piece away and reads the copy.
    `take` says so under that lock before it copies, and returns before the update begins. The lock is held for no more
    than that; training never waits for the writer, however seldom that runs.

    What may change earlier, or cannot be read as it lies, is copied at once: on an accelerator, or in strides.

    `kept` are the copies of earlier saves, whose memory is used again: at most one of every slice, which `take` must
    make if the writer has had no time. Copies are in host memory.
    """

    def __init__(self, slices: Iterable[StateSlice], kept: dict[Address, torch.Tensor]) -> None:
        start = time.monotonic()
        self._kept = kept
        self._slices = {(piece.key, piece.offsets): piece for piece in slices}
        self._live: dict[Address, StateSlice] = {}
        self._copies: dict[Address, torch.Tensor] = {}
        for address, piece in self._slices.items():
            if piece.tensor.device.type == "cpu" and piece.tensor.is_contiguous():
                self._live[address] = piece
            else:
                self._copy(address, piece)
        self._buffer = np.empty(PIECE_BYTES, dtype=np.uint8)
        self._lock = threading.Lock()
        self._taken = False
        self._copied = threading.Event()
        self._failed = False
        self.pause_seconds = time.monotonic() - start
        """How long training has stood still to copy."""

    @property
    def slices(self) -> list[StateSlice]:
        """All of them, with tensors that may be changing."""
        return list(self._slices.values())

    def slice(self, address: Address) -> StateSlice:
        """One of them, with a tensor that may be changing."""
        return self._slices[address]

    def pieces(self, address: Address) -> Iterator[memoryview]:
        """The bytes of a slice in row-major order, each piece valid until the next is asked for. For the one thread
        that writes, once a slice. RuntimeError if training could not copy."""
        piece = self._live.get(address)
        live = None if piece is None else _bytes(piece.tensor)
        copied: Bytes | None = None
        size = self._slices[address].tensor.nbytes
        for start in range(0, size, PIECE_BYTES):
            stop = min(start + PIECE_BYTES, size)
            read = None if live is None else self._read(address, live[start:stop], last=stop == size)
            if read is None:
                copied = self._copied_bytes(address) if copied is None else copied
                read = copied[start:stop]
            yield read.data

    def take(self) -> None:
        """Copy what is not read yet. For the thread that trains, each time before it changes what is saved; the first
        call counts."""
        start = time.monotonic()
        with self._lock:
            if self._taken:
                return
            self._taken = True
            rest = list(self._live.items())
        try:
            for address, piece in rest:
                self._copy(address, piece)
        except BaseException:
            self._failed = True
            raise
        finally:
            self.pause_seconds += time.monotonic() - start
            self._copied.set()

    def close(self) -> None:
        """Nothing more will be read: from now on `take` has nothing to copy."""
        with self._lock:
            self._live.clear()

    def _read(self, address: Address, live: Bytes, *, last: bool) -> Bytes | None:
        """A piece as it is in the live tensor; None once training may be changing it."""
        if self._taken:
            return None
        read = self._buffer[: live.size]
        # Not by torch, which would make this thread a pool of others to copy with.
        np.copyto(read, live)
        return None if self._begun(unless_read=address if last else None) else read

    def _begun(self, *, unless_read: Address | None = None) -> bool:
        """Whether `take` has; if not, it need not copy the slice that is read to its end."""
        with self._lock:
            if not self._taken and unless_read is not None:
                del self._live[unless_read]
            return self._taken

    def _copied_bytes(self, address: Address) -> Bytes:
        if self._taken:
            self._copied.wait()
            if self._failed:
                raise RuntimeError("training failed while it copied what was not saved yet")
        return _bytes(self._copies[address])

    def _copy(self, address: Address, piece: StateSlice) -> None:
        self._kept[address] = self._copies[address] = piece.staged(self._kept.get(address)).tensor


def _bytes(tensor: torch.Tensor) -> Bytes:
    """The memory of a contiguous tensor on the host."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()
