"""Connection to Ray: an embedded one that ends with the job, or a cluster that stays."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn, Self

import ray
from ray.exceptions import AuthenticationError

from planner.errors import UserError

# A user at a terminal waits so long for the state to be saved, or asks again.
_STOP_SECONDS = 300.0
# Set by Ray in the environment of a submitted job's driver.
_RAY_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"
_RAY_STOP_SECONDS = 3.0
_END_SECONDS = 8.0
# One Ctrl-C may come twice, from the terminal and from a program between.
_DOUBLE_SECONDS = 1.0
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

    Inside `held` the first signal is only noted, in `asked`: the work may end at a point of its own choosing.
    """

    def __init__(self) -> None:
        self.asked = False
        self._asked_at = 0.0
        self._hold_seconds: float | None = None
        self._stopped = False
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

    @contextmanager
    def held(self, *, seconds: float) -> Iterator[None]:
        """Note the first signal, and raise KeyboardInterrupt only so many seconds after it, or at another Ctrl-C."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = signal.signal(signal.SIGALRM, self._late)
        self._hold_seconds = seconds
        try:
            yield
        finally:
            self._hold_seconds = None
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def stop(self) -> NoReturn:
        """Raise KeyboardInterrupt now; signals that come later are ignored."""
        self._stopped = True
        raise KeyboardInterrupt

    def _stop(self, number: int, frame: FrameType | None) -> None:
        if self._stopped:
            return
        if self._hold_seconds is None:
            self.stop()
        elif not self.asked:
            self.asked, self._asked_at = True, time.monotonic()
            signal.setitimer(signal.ITIMER_REAL, self._hold_seconds)
            # Not by print: the signal may have come in the middle of one.
            with suppress(OSError):
                os.write(2, b"stopping after this iteration, with its state saved; Ctrl-C again: at once\n")
        elif number == signal.SIGINT and time.monotonic() - self._asked_at > _DOUBLE_SECONDS:
            self.stop()

    def _late(self, number: int, frame: FrameType | None) -> None:
        if not self._stopped:
            self.stop()


def stop_seconds() -> float:
    """How long a stop may take until the state of training is saved. Ray kills a job's driver some seconds after it has
    asked it to stop; of these the actors need some to end."""
    if _RAY_JOB not in os.environ:
        return _STOP_SECONDS
    return float(os.environ.get("RAY_JOB_STOP_WAIT_TIME_S", _RAY_STOP_SECONDS)) - _END_SECONDS
