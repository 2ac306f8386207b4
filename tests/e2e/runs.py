"""Runs of `eth train` in a process of their own, and what is left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from planner.cluster import resolve_cluster
from planner.plan import Dtypes, PlanEmulation
from tests.plans import make_model, make_plan

_MARK = "ETH_TEST_RUN"
TEXT = "def square(x):\n    return x * x\n\n\n" * 200


def write_job(folder: Path, *, steps: int, time_scale: float = 20_000.0, **changes: Any) -> Path:
    """A job of three emulated devices in two unlike pipelines: one stage, and two stages."""
    model = make_model(name="small", layers=2, hidden_size=24, heads=2)
    cluster = resolve_cluster(
        {
            "nodes": [
                {"name": "new", "emulate": True, "devices": [{"type": "A100", "count": 1}]},
                {"name": "old", "emulate": True, "devices": [{"type": "RTX3090", "count": 2}]},
            ]
        }
    )
    plan = make_plan(
        model,
        [[(1, 1, 2)], [(1, 1, 1), (1, 1, 1)]],
        cluster=cluster,
        micro_batch_sizes=[2, 1],
        samples=[5, 3],
        dtypes=Dtypes.for_precision("fp32"),
        emulation=PlanEmulation(time_scale=time_scale),
    )
    (folder / "plan.json").write_text(plan.model_dump_json())
    (folder / "text.txt").write_text(TEXT)
    job: dict[str, Any] = {
        "name": "small",
        "model": model.model_dump(),
        "data": {"path": "text.txt"},
        "training": {
            "global_batch_size": 8,
            "sequence_length": 32,
            "steps": steps,
            "learning_rate": {"peak": 0.01},
        },
        "plan": "plan.json",
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job | changes))
    return path


@dataclass
class Run:
    """`eth train`, or another command, in its own process group. All processes that it starts carry its mark."""

    arguments: list[str]
    cache: Path
    command: str = "train"
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)

    def __post_init__(self) -> None:
        environment = os.environ | {
            _MARK: self.mark,
            "XDG_CACHE_HOME": str(self.cache),
            "OMP_NUM_THREADS": "1",
        }
        environment.pop("RAY_ADDRESS", None)
        command = [sys.executable, "-c", "from eth_service.cli import main; main()", self.command]
        command += self.arguments
        self.process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def end(self, *, seconds: float = 200.0) -> tuple[int, str, str]:
        """Exit code, standard output and standard error, once it has ended."""
        out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def processes(self, *, name: str = "") -> list[int]:
        """Living processes of the run, those whose command starts with `name`."""
        return [pid for pid in _all_pids() if self._owns(pid) and _command(pid).startswith(name)]

    def leaves_nothing(self) -> bool:
        """Whether every process of the run is gone, given a moment."""
        return wait_until(lambda: not self.processes(), seconds=120)

    def _owns(self, pid: int) -> bool:
        try:
            return f"{_MARK}={self.mark}".encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False


def wait_until(true: Callable[[], bool], *, seconds: float = 120.0) -> bool:
    """Whether something became true in time."""
    deadline = time.monotonic() + seconds
    while not true():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def rows(folder: Path) -> list[dict[str, Any]]:
    """The rows of a run's metrics so far."""
    metrics = folder / "metrics.jsonl"
    return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""
