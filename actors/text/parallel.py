"""Work on many units in several processes, which end with the one that started them, however that ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import TypeVar

from planner.errors import UserError

Unit = TypeVar("Unit")
Result = TypeVar("Result")


def in_processes(
    work: Callable[[Unit], Result],
    units: Sequence[Unit],
    *,
    processes: int,
    start: Callable[[], None],
) -> Iterator[Result]:
    """The result of every unit, in order. `start` runs first in each process.

    Where a unit raises, those that are being worked on are finished first; where the caller stops, or is stopped by
    Ctrl-C, they are given up at once. UserError if a process is ended from outside.
    """
    others = set(multiprocessing.active_children())
    # Forked children of a process with threads may hang: new ones are started.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(processes, len(units)), context, _start, (start,)) as pool:
        try:
            with _deaf_children():
                made = [pool.submit(work, unit) for unit in units]
            for future in made:
                yield future.result()
        except BrokenProcessPool:
            raise UserError(
                "a process that made tokens was ended from outside, as happens where memory runs out; run again with"
                " fewer (eth data prepare --processes) or with more memory: what was finished is kept"
            ) from None
        except Exception:
            pool.shutdown(cancel_futures=True)
            raise
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise


@contextmanager
def _deaf_children() -> Iterator[None]:
    """Ctrl-C is meant for the process that was called: it reaches all of a terminal, and those started here would print
    where they were. It waits for the end of the block."""
    # Started later, the tracker would undo the mask.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _start(start: Callable[[], None]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    start()


def _end_with_parent() -> None:
    """Nobody else ends the processes of one that was killed: they would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
