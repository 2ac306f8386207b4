"""Files that appear under their names only when they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to. What was written gets the name `path` when the block ends, and is on the disk
    by then, so that neither a kill nor a loss of power leaves part of a file there; after an error nothing is left."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        with partial.open("rb+") as stream:
            os.fsync(stream.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
