"""The console script before and after its imports: Ctrl-C is quiet at any moment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Ctrl-C at a chosen moment: just as the module of that name is about to be imported.
PROGRAM = """
import importlib.abc, signal, sys

moment = sys.argv.pop(1)

class Interrupt(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == moment:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
{before}
from eth_service.console import main
main()
"""


def run_interrupted(
    module: str, *arguments: str, before: str = "", folder: Path
) -> subprocess.CompletedProcess[str]:
    program = PROGRAM.format(before=before)
    command = [sys.executable, "-c", program, module, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)


@pytest.mark.parametrize(
    ("module", "out"),
    # Once the command runs, Ctrl-C is an exception again and what must be put away is.
    [("typer", ""), ("planner.errors", ""), ("actors.driver", "put away")],
)
def test_ctrl_c_during_imports_is_quiet_and_130(module: str, out: str, tmp_path: Path) -> None:
    put_away = "import atexit; atexit.register(print, 'put away')"
    done = run_interrupted(module, "train", "job.yaml", before=put_away, folder=tmp_path)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (130, out, "")


def test_ctrl_c_stays_ignored_where_it_was(tmp_path: Path) -> None:
    ignore = "signal.signal(signal.SIGINT, signal.SIG_IGN)"
    done = run_interrupted("typer", "train", "missing.yaml", before=ignore, folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith("eth: ") and "missing.yaml" in done.stderr
