"""A disk of a few megabytes, for tests of what happens when it is full."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FILLER = "filler"


@contextmanager
def small_disk(folder: Path, *, size: int) -> Iterator[Path]:
    """A tmpfs of so many bytes at `folder`; the test is skipped where none can be mounted."""
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)],
        capture_output=True,
        text=True,
        check=False,
    )
    if mounted.returncode != 0:
        pytest.skip(f"needs root and a kernel that mounts tmpfs: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def free_bytes(disk: Path) -> int:
    told = os.statvfs(disk)
    return told.f_bavail * told.f_frsize


def fill(disk: Path, *, leave: int) -> None:
    """Write a file until only so many bytes are free."""
    with (disk / FILLER).open("wb") as stream:
        stream.write(bytes(max(0, free_bytes(disk) - leave)))


def empty(disk: Path) -> None:
    """Give back what `fill` took."""
    (disk / FILLER).unlink()
