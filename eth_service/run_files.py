"""Reading the files that a driver writes into its run folder while it still writes them."""

from __future__ import annotations

import json
import math
import threading
from bisect import bisect_right
from collections import OrderedDict
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from planner.errors import UserError
from planner.plan import Plan, read_plan

METRICS = "metrics.jsonl"
PLAN = "plan.json"
SUMMARY = "summary.json"
SAVES = "saves.jsonl"
ENVIRONMENT = "environment.jsonl"

_TAIL_BYTES = 1 << 16


class MetricsFile:
    """An index of a growing metrics.jsonl: where each iteration's row starts. Only new bytes are read again.

    A resumed run repeats iterations; the later row replaces the earlier ones from its iteration on.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._iterations: list[int] = []
        self._offsets: list[int] = []
        self._end = 0

    def rows(self, *, since: int, limit: int) -> list[dict[str, Any]]:
        """At most `limit` rows of iterations above `since`, in order."""
        with self._lock:
            self._index()
            first = bisect_right(self._iterations, since)
            offsets = self._offsets[first : first + limit]
        if not offsets:
            return []
        with self._path.open("rb") as file:
            return [row for offset in offsets if (row := _row_at(file, offset)) is not None]

    def _index(self) -> None:
        try:
            size = self._path.stat().st_size
        except FileNotFoundError:
            return
        if size < self._end:
            self._iterations, self._offsets, self._end = [], [], 0
        with self._path.open("rb") as file:
            file.seek(self._end)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._add(_decode(line))
                self._end += len(line)

    def _add(self, row: dict[str, Any] | None) -> None:
        if row is None or not isinstance(row.get("iteration"), int):
            return
        while self._iterations and self._iterations[-1] >= row["iteration"]:
            self._iterations.pop()
            self._offsets.pop()
        self._iterations.append(row["iteration"])
        self._offsets.append(self._end)


def failed_saves(run: Path) -> list[dict[str, Any]]:
    """What the saves of a run's state that failed say of themselves; a later one of the same iteration counts."""
    try:
        lines = (run / SAVES).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    rows = {row.get("iteration"): row for line in lines if (row := _decode(line)) is not None}
    return [row for row in rows.values() if row.get("error") is not None]


def last_start(run: Path) -> dict[str, Any] | None:
    """What a run was last started in; None if that was not kept."""
    return last_row(run / ENVIRONMENT)


def last_row(path: Path) -> dict[str, Any] | None:
    """The last complete row of a JSON-lines file, found from its end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except FileNotFoundError:
        return None
    return next((row for line in reversed(lines) if (row := _decode(line)) is not None), None)


def first_written(path: Path) -> datetime | None:
    """When a file that now has content got it, as far as its own time tells; None while it has none."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return None
    return datetime.fromtimestamp(status.st_mtime, UTC) if status.st_size else None


def read_summary(folder: Path) -> dict[str, Any]:
    """The driver's account of a run that ended; empty while there is none."""
    try:
        return _decode((folder / SUMMARY).read_bytes()) or {}
    except FileNotFoundError:
        return {}


@dataclass(frozen=True)
class TextPart:
    """A piece of a text file by byte offsets; `next_offset` is where to go on."""

    text: str
    offset: int
    next_offset: int
    size: int


def read_text(path: Path, *, offset: int, limit: int) -> TextPart:
    """At most `limit` bytes from `offset`, in whole characters; a negative offset counts from the end."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            start = max(0, size + offset) if offset < 0 else min(offset, size)
            file.seek(start)
            data = file.read(limit)
    except FileNotFoundError:
        return TextPart("", 0, 0, 0)
    if offset < 0:
        skip = next((i for i, byte in enumerate(data[:4]) if byte & 0xC0 != 0x80), len(data[:4]))
        start, data = start + skip, data[skip:]
    data = data[: _whole_characters(data)]
    return TextPart(data.decode("utf-8", "replace"), start, start + len(data), size)


def append_output(path: Path, whole: str, *, final: bool) -> None:
    """Bring the kept copy of a driver's output up to date with all that it has printed so far.

    Until the output is `final` an unfinished line waits, since its last character may be half there.
    """
    data = whole.encode("utf-8", "replace")
    data = data if final else data[: data.rfind(b"\n") + 1]
    known = path.stat().st_size if path.exists() else 0
    if len(data) > known:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            file.write(data[known:])


class RunFiles:
    """Plans and metric indexes of the run folders asked for lately."""

    def __init__(self, *, kept: int = 64) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._metrics: OrderedDict[Path, MetricsFile] = OrderedDict()
        self._plans: OrderedDict[Path, Plan] = OrderedDict()
        self._emulated: dict[Path, bool] = {}

    def metrics(self, folder: Path) -> MetricsFile:
        with self._lock:
            found = self._metrics.pop(folder, None) or MetricsFile(folder / METRICS)
            self._metrics[folder] = found
            _forget_oldest(self._metrics, self._kept)
            return found

    def emulated(self, folder: Path) -> bool | None:
        """Whether the plan is for emulated devices; kept, so that a long list of jobs reads no plans."""
        if folder not in self._emulated:
            plan = self.plan(folder)
            if plan is None:
                return None
            self._emulated[folder] = plan.cluster.emulated
        return self._emulated[folder]

    def plan(self, folder: Path) -> Plan | None:
        """The plan that the driver wrote; None while there is none. A written plan never changes."""
        with self._lock:
            plan = self._plans.pop(folder, None) or _read_plan(folder / PLAN)
            if plan is not None:
                self._plans[folder] = plan
                _forget_oldest(self._plans, self._kept)
            return plan


def _read_plan(path: Path) -> Plan | None:
    if not path.exists():
        return None
    try:
        return read_plan(path)
    except UserError:
        # Half written: it is whole at the next look.
        return None


def _forget_oldest(entries: OrderedDict[Path, Any], kept: int) -> None:
    while len(entries) > kept:
        entries.popitem(last=False)


def _row_at(file: Any, offset: int) -> dict[str, Any] | None:
    file.seek(offset)
    return _decode(file.readline())


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return _finite(row) if isinstance(row, dict) else None


def _finite(value: Any) -> Any:
    # JSON has no NaN; a loss that became one is shown as null.
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _whole_characters(data: bytes) -> int:
    """Length of `data` without a UTF-8 character that is cut at its end."""
    for back in range(1, min(4, len(data)) + 1):
        byte = data[-back]
        if byte & 0xC0 == 0xC0:
            length = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return len(data) if back >= length else len(data) - back
        if byte & 0xC0 != 0x80:
            break
    return len(data)
