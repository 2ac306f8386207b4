"""Doing things in order beside the caller: on a thread, or on a stream of a device."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

import torch


class Work(Protocol):
    """A collective under way; `wait` may return its Span."""

    def wait(self) -> object: ...


class Courier(Protocol):
    """Does what it is handed, one thing after another, beside the caller's own work."""

    def start(self, steps: Callable[[], object]) -> Work: ...

    def close(self) -> None: ...


def make_courier(device: torch.device) -> Courier:
    """A thread where collectives block their caller, a stream where they only block their stream."""
    return ThreadCourier() if device.type == "cpu" else StreamCourier(device)


class ThreadCourier:
    """A thread that runs steps in order. After the first error, what follows fails at once and alike."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Callable[[], object], Future[object]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None

    def start(self, steps: Callable[[], object]) -> Work:
        if self._thread is None:
            # A daemon: a process that ends for another reason does not wait for a peer that is gone.
            self._thread = threading.Thread(target=self._run, name="gradient courier", daemon=True)
            self._thread.start()
        done: Future[object] = Future()
        self._queue.put((steps, done))
        return _FutureWork(done)

    def close(self) -> None:
        self._queue.put(None)

    def _run(self) -> None:
        error: BaseException | None = None
        while (task := self._queue.get()) is not None:
            steps, done = task
            if error is None:
                try:
                    done.set_result(steps())
                    continue
                except BaseException as raised:
                    error = raised
            done.set_exception(error)


class _FutureWork:
    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def wait(self) -> object:
        return self._future.result()


class StreamCourier:
    """A stream beside the device's current one; NCCL and HCCL queue their operations on it."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.Stream(device)

    def start(self, steps: Callable[[], object]) -> Work:
        self._stream.wait_stream(torch.accelerator.current_stream())
        with self._stream:
            steps()
            return _EventWork(self._stream.record_event())

    def close(self) -> None:
        return None


class _EventWork:
    def __init__(self, event: torch.Event) -> None:
        self._event = event

    def wait(self) -> object:
        torch.accelerator.current_stream().wait_event(self._event)
        return None
