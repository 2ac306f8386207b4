"""The `eth` command as a process: a wrong option is one line and exit code 2, help is help."""

import subprocess
import sys
from pathlib import Path

import pytest

ETH = Path(sys.executable).with_name("eth")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ETH, *arguments], capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["plan", "gpt3-nano", "--cluster", "1x2:A100", "--global-batch-size", "0"], "global-batch-size"),
        (["plan", "gpt3-nano", "--cluster", "1x2:A100", "--global-batch-size", "many"], "global-batch-size"),
        (["plan", "gpt3-nano"], "--cluster"),
        (["fly"], "fly"),
        (["train", "--sideways"], "--sideways"),
        (["train", "no-such-job.yaml"], "no-such-job.yaml"),
    ],
)
def test_a_wrong_command_line_is_one_line(arguments: list[str], told: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith("eth: ") and told in done.stderr


def test_help_lists_the_commands() -> None:
    done = run("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("plan", "train", "serve", "profile"))
