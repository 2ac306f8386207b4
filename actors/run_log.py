"""The log of a run: what its terminal shows, with the time, in a file."""

from __future__ import annotations

import io
from datetime import datetime
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from rich.console import Console as Terminal

from actors.lines import Lines
from actors.metrics import Row
from actors.report import LOG_COLUMNS, Console
from actors.run_folder import LOG
from actors.summary import Observer, Summary
from planner.plan import Plan

if TYPE_CHECKING:
    from actors.engine.checkpoint import SavedCheckpoint


class Logged:
    """An Observer that writes down what it passes on to another. The file is made once there is a plan; what came
    before is written then. A disk that is full only makes it wait."""

    def __init__(self, shown: Observer) -> None:
        self._shown = shown
        self._stream = _Stamped()
        self._log = Console(Terminal(file=cast(IO[str], self._stream), width=LOG_COLUMNS, color_system=None))

    def status(self, text: str) -> None:
        self._log.status(text)
        self._shown.status(text)

    def planned(self, plan: Plan, *, folder: Path, steps: int) -> None:
        self._stream.to(folder / LOG)
        self._log.planned(plan, folder=folder, steps=steps)
        self._shown.planned(plan, folder=folder, steps=steps)

    def iteration(self, row: Row) -> None:
        self._log.iteration(row)
        self._shown.iteration(row)

    def checkpoint(self, saved: SavedCheckpoint) -> None:
        self._log.checkpoint(saved)
        self._shown.checkpoint(saved)

    def finished(self, summary: Summary) -> None:
        self._log.finished(summary)
        self._shown.finished(summary)


class _Stamped(io.TextIOBase):
    """A text stream to a file of which each line begins with its time, the host's own."""

    def __init__(self) -> None:
        self._lines: Lines | None = None
        self._before: list[str] = []
        self._begun = ""

    def to(self, path: Path) -> None:
        """Write to a file from now on, and what was held back first."""
        self._lines = Lines(path)
        for line in self._before:
            self._lines.append_text(line)
        self._before = []

    def write(self, text: str) -> int:
        *whole, self._begun = (self._begun + text).split("\n")
        for line in whole:
            stamped = f"{datetime.now().astimezone().isoformat(sep=' ', timespec='seconds')}  {line}".rstrip()
            if self._lines is None:
                self._before.append(stamped)
            else:
                self._lines.append_text(stamped)
        return len(text)
