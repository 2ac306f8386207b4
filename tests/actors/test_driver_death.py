"""A driver that is killed on a cluster that lives on takes its actors and reservations with it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray.util import placement_group_table

from tests.e2e.runs import rows, wait_until, write_job


@pytest.mark.slow
@pytest.mark.usefixtures("unlike_ray")
def test_a_killed_driver_leaves_nothing_on_the_cluster(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    job = str(write_job(tmp_path, steps=100_000))
    # RAY_ADDRESS is what Ray sets for the entrypoint of a submitted job.
    address = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, "XDG_CACHE_HOME": str(tmp_path)}
    driver = subprocess.Popen(
        [sys.executable, "-m", "actors.driver", job, "--output", str(folder)],
        env=os.environ | address,
        stdout=subprocess.DEVNULL,
    )
    try:
        assert wait_until(lambda: len(rows(folder)) >= 2)
        held = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
        assert [len(group["bundles"]) for group in held] in ([1, 2], [2, 1])
        workers = actor_processes(tmp_path)
        assert workers
        actors = [*workers, *coordinators()]
        assert len(actors) > len(workers)
    finally:
        driver.kill()
        driver.wait()
    assert wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in actors), seconds=30)
    assert not actor_processes(tmp_path)
    assert wait_until(
        lambda: all(group["state"] == "REMOVED" for group in placement_group_table().values()), seconds=30
    )


def actor_processes(folder: Path) -> list[int]:
    """Living workers' processes of the run, which have its token file open."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            worker = command.startswith(b"ray::Worker")
            opened = [os.readlink(link) for link in (entry / "fd").iterdir()] if worker else []
        except OSError:
            continue
        if any(path.startswith(str(folder)) for path in opened):
            found.append(int(entry.name))
    return found


def coordinators() -> list[int]:
    """Living coordinators on Ray nodes that this process started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes() if entry.name.isdigit() else b""
            if command.startswith(b"ray::Coordinator") and parent(parent(int(entry.name))) == os.getpid():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def parent(pid: int) -> int:
    """The process that started `pid`."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
