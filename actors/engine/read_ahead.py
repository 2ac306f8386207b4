"""Batches made by a thread before they are asked for, so that training does not wait for its data."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

import torch

from actors.engine.batches import ReplicaBatches
from actors.engine.hand_over import HandOver
from actors.engine.model.dropout import Draws

# At most two iterations lie ready, and no more of them than this; two micro-batches in any case.
_ITERATIONS = 2
_BYTES = 64 * 2**20
_Made = TypeVar("_Made")
# A read that hangs must not hold up the end of a rank.
_CLOSE_SECONDS = 5.0


def most_ready(*, micro_batches: int, micro_batch_bytes: int) -> int:
    """How many micro-batches may lie ready where an iteration has so many, each of so many bytes."""
    return max(2, min(_ITERATIONS * micro_batches, _BYTES // micro_batch_bytes))


@dataclass(frozen=True)
class _Ready:
    """A micro-batch in the host's memory. `counted` is of its iteration's global batch."""

    iteration: int
    index: int
    counted: int
    tokens: tuple[torch.Tensor, torch.Tensor] | None
    documents: torch.Tensor | None


class ReadAhead:
    """What `ReplicaBatches` gives, in the order of micro-batches and iterations, made by a thread.

    The thread begins with what `begin` or the first request names, and anew with any that does not follow. What it
    makes depends on the iteration alone, so that nothing of it belongs to a checkpoint. An error of reading is raised
    where the micro-batch that it spoilt is asked for, and again for all that follow. Micro-batches of an iteration are
    asked for in their order.

    Args:
        micro_batches: how many the rank's pipeline has in an iteration.
        reads_tokens: whether the rank's stage needs them: a middle one reads none.
        device: where the tensors are handed over.
    """

    def __init__(
        self, batches: ReplicaBatches, *, micro_batches: int, reads_tokens: bool, device: torch.device
    ) -> None:
        self._batches, self._micro_batches = batches, micro_batches
        self._reads_tokens, self._hand_over = reads_tokens, HandOver(device)
        self._reader: Reader[_Ready] | None = None
        self._current: _Ready | None = None
        # Iteration and index of what the thread hands out next.
        self._next = (0, 0)
        self.waited_seconds = 0.0
        """Wall seconds for which callers waited for the thread, so far."""

    def begin(self, iteration: int) -> None:
        """Let the thread make an iteration before it is asked for."""
        self.close()
        most = most_ready(
            micro_batches=self._micro_batches, micro_batch_bytes=self._batches.micro_batch_bytes
        )
        self._reader = Reader(self._made(iteration), most=most)
        self._next = (iteration, 0)

    def counted(self, iteration: int) -> int:
        """How many labels of the iteration's global batch count. Asked for before the iteration's micro-batches."""
        return self._ready(iteration, 0).counted

    def micro_batch(self, iteration: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs and labels on the device, int64 `[rows, sequence]`."""
        tokens = self._ready(iteration, index).tokens
        assert tokens is not None, "the stage was said to read no tokens"
        return self._hand_over.taken(tokens[0]), self._hand_over.taken(tokens[1])

    def documents(self, iteration: int, index: int) -> torch.Tensor | None:
        """As `ReplicaBatches.documents`, on the device."""
        documents = self._ready(iteration, index).documents
        return None if documents is None else self._hand_over.taken(documents)

    def draws(self, iteration: int, index: int) -> Draws:
        """As `ReplicaBatches.draws`."""
        return self._batches.draws(iteration, index)

    def close(self) -> None:
        """End the thread."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _ready(self, iteration: int, index: int) -> _Ready:
        while self._current is None or (self._current.iteration, self._current.index) != (iteration, index):
            if self._reader is None or (iteration, index) != self._next:
                assert index == 0, "an iteration's micro-batches are asked for in their order"
                self.begin(iteration)
            assert self._reader is not None
            self._current, waited = self._reader.take()
            self._next = self._following(self._current)
            self.waited_seconds += waited
        return self._current

    def _following(self, ready: _Ready) -> tuple[int, int]:
        last = ready.index == self._micro_batches - 1
        return (ready.iteration + last, 0 if last else ready.index + 1)

    def _made(self, first: int) -> Iterator[_Ready]:
        self._hand_over.begin()
        for iteration in count(first):
            counted = self._batches.counted(iteration)
            for index in range(self._micro_batches):
                tokens = self._batches.micro_batch(iteration, index) if self._reads_tokens else None
                documents = self._batches.documents(iteration, index)
                yield _Ready(iteration, index, counted, *self._hand_over.prepared_batch(tokens, documents))


class Reader(Generic[_Made]):
    """A thread that goes through what is made until `most` lies ready, and again when half of that is taken.

    Not after each that is taken: it would run at every micro-batch, and take Python's lock from training as often.
    """

    def __init__(self, made: Iterator[_Made], *, most: int) -> None:
        self._made, self._most = made, most
        self._ready = deque[_Made]()
        self._error: BaseException | None = None
        self._closed = False
        self._changed = threading.Condition()
        # A daemon: a process that ends for another reason does not wait for its disk.
        self._thread = threading.Thread(target=self._run, name="read ahead", daemon=True)
        self._thread.start()

    def take(self) -> tuple[_Made, float]:
        """The next, and the seconds that it was waited for. Raises what the thread ended with, once all that was made
        before is taken: IndexError where that was everything."""
        began = time.monotonic()
        with self._changed:
            waits = not self._ready
            self._changed.wait_for(lambda: self._ready or self._error is not None)
            if not self._ready:
                assert self._error is not None
                raise self._error
            taken = self._ready.popleft()
            if self._half_taken:
                self._changed.notify()
        return taken, time.monotonic() - began if waits else 0.0

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(_CLOSE_SECONDS)

    @property
    def _half_taken(self) -> bool:
        return len(self._ready) <= self._most // 2

    def _run(self) -> None:
        try:
            for ready in self._made:
                with self._changed:
                    if len(self._ready) >= self._most:
                        self._changed.wait_for(lambda: self._half_taken or self._closed)
                    if self._closed:
                        return
                    self._ready.append(ready)
                    self._changed.notify()
            raise IndexError("all that was read ahead has been taken")
        except BaseException as error:
            with self._changed:
                self._error = error
                self._changed.notify()
