"""Running a benchmark as its reader would."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def run(program: str, *arguments: str) -> tuple[str, dict[str, Any]]:
    """What `benchmarks/program` prints above its last line, and the JSON of that. Asserts that it succeeds."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / program), *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    *table, last = done.stdout.splitlines()
    return "\n".join(table), json.loads(last)
