"""One service process: its socket, its lock, its Ray if that is embedded, and an orderly end."""

from __future__ import annotations

import fcntl
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from types import FrameType

import structlog
import uvicorn

from eth_service.app import create_app
from eth_service.embedded_ray import embedded_ray
from eth_service.ray_jobs import RayJobs
from eth_service.settings import Settings
from planner.errors import UserError

# One Ctrl-C may come twice, from the terminal and from a program between.
_DOUBLE_SECONDS = 1.0


def run_server(settings: Settings, *, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM. UserError if the port, the folder or the database cannot be had."""
    _configure_logging()
    if not settings.data_root.is_dir():
        raise UserError(f"--data-root = {settings.data_root} is not a folder; make it or name another")
    with ExitStack() as stack:
        # The cheap things that may be refused come before Ray, which takes seconds.
        listener = stack.enter_context(closing(_listen(host, port)))
        stack.enter_context(_only_service(settings))
        if settings.embedded:
            _say("starting Ray on this machine")
            address = stack.enter_context(embedded_ray())
        else:
            address = settings.cluster
        hurry = threading.Event()
        server = Server(
            uvicorn.Config(
                create_app(settings, RayJobs(address), hurry=hurry),
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=3,
            ),
            hurry=hurry,
        )
        _say(f"serving on http://{_shown(host)}:{listener.getsockname()[1]} (Ctrl-C ends it)")
        with _signals_left_to_uvicorn():
            server.run(sockets=[listener])
        if settings.embedded:
            _say("stopping Ray")
    _say("stopped")


class Server(uvicorn.Server):
    """Ends in order at the first signal; a second one sets `hurry`, for who waits for jobs meanwhile."""

    def __init__(self, config: uvicorn.Config, *, hurry: threading.Event) -> None:
        super().__init__(config)
        self._hurry = hurry
        self._asked_at = 0.0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if not self.should_exit:
            self._asked_at = time.monotonic()
        elif time.monotonic() - self._asked_at > _DOUBLE_SECONDS:
            self._hurry.set()
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise UserError(
            f"--port = {port} cannot be had on {host}: {error.strerror}; choose another"
        ) from None
    return listener


@contextmanager
def _only_service(settings: Settings) -> Iterator[None]:
    """Two services over the same folder would both start its queued jobs."""
    try:
        settings.runs.mkdir(parents=True, exist_ok=True)
        lock = (settings.runs / "service.lock").open("w")
    except OSError as error:
        raise UserError(
            f"--runs = {settings.runs} cannot be written: {error.strerror}; name another"
        ) from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"--runs = {settings.runs} is in use by another service; stop it, or name another folder"
            ) from None
        yield


@contextmanager
def _signals_left_to_uvicorn() -> Iterator[None]:
    # uvicorn ends in order on these, then raises them again for whoever was there before: nobody, here.
    def ignore(number: int, frame: FrameType | None) -> None:
        pass

    previous = {number: signal.signal(number, ignore) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _configure_logging() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            structlog.dev.ConsoleRenderer(
                colors=sys.stderr.isatty(), pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            ),
        ],
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")


def _say(text: str) -> None:
    print(f"eth serve: {text}", file=sys.stderr, flush=True)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
