"""Files that grow by whole lines, also on a disk that is full for a while."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actors.storage import reason


class Lines:
    """Appends lines to a file. What a full disk refuses waits in memory and is written with the next, in order."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._waiting = b""

    def append_text(self, line: str) -> str | None:
        """Write one line, and those that wait; None, or why they have to wait. A reader that follows the file sees
        whole lines only."""
        self._waiting += line.encode("utf-8", "replace") + b"\n"
        try:
            self._write()
        except OSError as error:
            return reason(error)
        self._waiting = b""
        return None

    def _write(self) -> None:
        held = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size, left = os.fstat(held).st_size, memoryview(self._waiting)
            try:
                while left:
                    left = left[os.write(held, left) :]
            except OSError:
                # A part of it may lie there.
                os.ftruncate(held, size)
                raise
        finally:
            os.close(held)


class JsonLines(Lines):
    """Lines of JSON."""

    def append(self, row: Mapping[str, Any]) -> str | None:
        """Write one row, as `append_text`."""
        return self.append_text(json.dumps(row))
