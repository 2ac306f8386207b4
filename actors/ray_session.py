"""Connection to Ray: an embedded one that ends with the job, or a cluster that stays."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self

import ray
from ray.exceptions import AuthenticationError

from planner.errors import UserError

# Weights and activations never pass through Ray; its object store only carries reports.
_OBJECT_STORE_BYTES = 100 * 1024**2
EMBEDDED_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # Ray's workers are nice by default; ranks that keep an emulated device's pace must not be.
    "RAY_worker_niceness": "0",
    # Ray would otherwise warn that it will stop hiding accelerators from workers that ask for none.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}


@contextmanager
def ray_session(address: str | None) -> Iterator[None]:
    """Connect to the Ray cluster at `address`, or start one that belongs to this process.

    A connection that the process already has is used and kept. An embedded Ray ends with the block, and
    with the process if that is killed. Raises UserError for an address that does not answer.
    """
    if ray.is_initialized():
        yield
        return
    if address is None:
        _start_embedded()
    else:
        _connect(address)
    try:
        yield
    finally:
        ray.shutdown()


def _start_embedded() -> None:
    for name, value in EMBEDDED_SETTINGS.items():
        os.environ.setdefault(name, value)
    # "local" ignores RAY_ADDRESS: without an address asked for, no cluster may be picked up by accident.
    ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=_OBJECT_STORE_BYTES,
    )


def _connect(address: str) -> None:
    _probe(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except AuthenticationError as error:
        told = " ".join(str(error).split())
        raise UserError(f"--address {address} refuses this token: {told}") from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        told = " ".join(str(error).split())
        raise UserError(
            f"--address {address} cannot be reached: {told}; start Ray there or leave it out"
        ) from None


def _probe(address: str) -> None:
    """Refuse at once a HEAD:PORT where nobody listens: Ray's own try takes minutes to find that out."""
    host, separator, port = address.rpartition(":")
    if "://" in address or not separator or not port.isdecimal() or int(port) > 65535:
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
    except OSError as error:
        raise UserError(
            f"--address {address} cannot be reached: {error.strerror or error}; start Ray there or leave it out"
        ) from None


class StopSignals:
    """Within the block the first SIGINT, SIGTERM or SIGHUP raises KeyboardInterrupt; later ones are ignored.

    Ignored, because the first one starts an orderly end that a second must not cut short. Outside the main
    thread, where Python allows no handlers, the block changes nothing.
    """

    def __init__(self) -> None:
        self._asked = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        self.claim()
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def claim(self) -> None:
        """Put the handlers in place; again after `ray.init`, whose own SIGTERM handler aborts the process."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                # Under nohup the end of the terminal is to change nothing.
                if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                    continue
                replaced = signal.signal(number, self._stop)
                self._previous.setdefault(number, replaced)

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            raise KeyboardInterrupt
