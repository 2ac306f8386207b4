"""The benchmarks of memory and of the engine's own time run, end with a JSON line, and hold what they say."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *arguments: str) -> tuple[list[str], dict[str, Any]]:
    """The lines of the table, and the last line's figures."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    return table, json.loads(last)


@pytest.mark.slow
def test_memory_of_every_stage_is_predicted() -> None:
    table, result = run("memory.py", "--plans", "unlike pipelines", "ZeRO-1")
    assert (result["plans"], result["stages"]) == (2, 6)
    assert len([line for line in table if line.endswith("%")]) == 6
    assert result["least_over"] >= 0 and result["most_over"] <= 0.05 and result["within"] is True
