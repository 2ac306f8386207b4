"""Looking for reference cycles seldom while a search runs.

A search makes millions of small objects, hardly any of which refer to each other in a circle; Python goes through the
young ones after every few hundred. At a thousand devices that is a tenth of a search.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

# New objects between two looks: some megabytes.
_SELDOM = 50_000


class _Searches:
    """Those that run now, in whatever threads: the first changes what the last one puts back."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._running = 0
        self._before = (0, 0, 0)

    def begin(self) -> None:
        with self._lock:
            if not self._running:
                self._before = gc.get_threshold()
                # None at all stays none.
                often = self._before[0] and max(self._before[0], _SELDOM)
                gc.set_threshold(often, *self._before[1:])
            self._running += 1

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                gc.set_threshold(*self._before)


_SEARCHES = _Searches()


@contextmanager
def collecting_seldom() -> Iterator[None]:
    """Until it ends, however it ends."""
    _SEARCHES.begin()
    try:
        yield
    finally:
        _SEARCHES.end()
