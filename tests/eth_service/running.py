"""Services that run: in a thread of the test, and waiting for what they do."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import TypeVar

import uvicorn

from eth_service.app import create_app
from eth_service.backend import Backend
from eth_service.settings import Settings

T = TypeVar("T")


@contextmanager
def serving(settings: Settings, backend: Backend) -> Iterator[str]:
    """A service in a thread, from start to orderly end; yields its address."""
    with closing(socket.socket()) as listener:
        listener.bind(("127.0.0.1", 0))
        config = uvicorn.Config(create_app(settings, backend), log_config=None, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: server.started or not thread.is_alive(), what="the service to start")
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


def wait_for(look: Callable[[], T | None], *, what: str, seconds: float = 60.0) -> T:
    """The first true answer of `look`; the limit only ends a test that would never end."""
    deadline = time.monotonic() + seconds
    while not (answer := look()):
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.02)
    return answer
