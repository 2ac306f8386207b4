"""Worker processes of this host: whether they live, and ending those that Ray left."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path


def end_processes(pids: Iterable[int], *, patience_seconds: float) -> None:
    """Wait until these processes of this host have ended; those that outlast the patience are killed.

    Ray asks a worker to leave before it kills it, and a stopped or hung one does not hear.
    """
    left = [pid for pid in pids if _is_worker(pid)]
    deadline = time.monotonic() + patience_seconds
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = [pid for pid in left if _is_worker(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _is_worker(pid: int) -> bool:
    # Ray names its workers' processes; the name guards against an id that was given to another meanwhile.
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False
