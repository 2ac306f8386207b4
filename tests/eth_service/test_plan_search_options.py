"""`eth plan`: parts of the search switched off, budgets, and a search that the user or the clock ends early."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from eth_service.cli import app
from planner.errors import UserError
from planner.plan import read_plan
from planner.search.control import PARTS

SMALL = ["plan", "gpt3-350m", "--cluster", "1x2:A100,1x1:RTX3090", "--global-batch-size", "32"]
LARGE = ["plan", "gpt3-13b", "--cluster", "4x8:910B2,4x8:910B4", "--global-batch-size", "1024"]
MAIN = "from eth_service.cli import main; main()"
# Runs the command, and interrupts it when it has told of so many steps; 0 stands for at once.
INTERRUPTED = """
import os, signal, sys
import eth_service.commands.common as common
import planner.search.control as control
from eth_service.cli import main
control._PROGRESS_SECONDS = 0
told, when = [], int(sys.argv.pop(1))
def progress(message):
    # A step is told of again and again while it lasts.
    if message not in told[-1:]:
        told.append(message)
    if len(told) > when:
        os.kill(os.getpid(), signal.SIGINT)
common.progress = progress
main()
"""
SECOND = """
import planner.search.strategies as strategies
strategies.simulate = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGINT)
"""


def shown(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


def run(program: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *program], capture_output=True, text=True, timeout=120)


def test_parts_and_evaluations_reach_the_plan(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    options = ["--without", "exact,dp", "--without", "cache", "--alpha", "2", "--evaluations", "900"]
    output = shown(*SMALL, *options, "--json", str(file))
    search = read_plan(file).search
    assert search is not None
    assert search["parts"] == ["skipping", "order"]
    assert search["evaluation_limit"] == 900 and search["evaluations"] <= 900
    assert search["cache_hits"] == search["arrangements"] == 0
    assert "device groups" in output and "pipelines searched" in output
    assert "Stopped" not in output


def test_the_default_plan_says_which_parts_were_on(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    shown(*SMALL, "--json", str(file))
    search = read_plan(file).search
    assert search is not None
    assert search["parts"] == list(PARTS)
    assert "time_budget" not in search and "stopped" not in search


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--without", "exact", "--without", "skiping"],
            f"--without = 'skiping' is not a part of the search; switch off some of {', '.join(PARTS)}",
        ),
        (["--alpha", "0"], "--alpha = 0.0 must be more than 0; the paper's range is 0.5 to 4"),
        (
            ["--evaluations", "0"],
            "--evaluations = 0 must be from 1 to 1000000000; leave it out for the default",
        ),
        (["--time-budget", "0"], "--time-budget = 0.0 must be more than 0 seconds; raise it"),
        (
            ["--strategy", "metis", "--without", "cache"],
            "strategy = 'metis' has no parts to choose: --without, --alpha and --evaluations belong to the"
            " strategy eth, but for --without sequence_parallel; leave them out",
        ),
    ],
)
def test_a_wrong_option_is_one_line(options: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*SMALL, *options])
    assert isinstance(result.exception, UserError)
    assert str(result.exception) == message


def test_a_time_budget_ends_the_search_with_the_best_plan_so_far(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = run(["-c", MAIN, *LARGE, "--without", "exact", "--time-budget", "3", "--json", str(file)])
    assert done.returncode == 0, done.stderr
    assert "Predicted iteration" in done.stdout
    assert "Stopped after the time budget of 3 s: this is the best plan found until then" in done.stdout
    search = json.loads(file.read_text())["search"]
    assert search["time_budget"] == 3 and search["stopped"] == "time_budget"
    assert 0 < search["evaluations"] < search["evaluation_limit"]
    assert not search["complete"]


def test_a_time_budget_that_is_not_used_up_is_recorded_all_the_same(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    output = shown(
        *SMALL, "--without", "exact", "--evaluations", "300", "--time-budget", "100", "--json", str(file)
    )
    search = read_plan(file).search
    assert search is not None and search["time_budget"] == 100 and "stopped" not in search
    assert "Stopped" not in output


@pytest.mark.parametrize("strategy", ["eth", "metis"])
def test_a_time_budget_too_short_for_any_plan_is_one_line(strategy: str) -> None:
    done = run(["-c", MAIN, *LARGE, "--time-budget", "0.000001", "--strategy", strategy])
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "eth: --time-budget = 1e-06 s ended before any plan was found; raise it\n"


@pytest.mark.parametrize(("options", "told"), [(["--without", "exact"], "2"), ([], "2")])
def test_ctrl_c_returns_the_best_plan_so_far(options: list[str], told: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    done = run(["-c", INTERRUPTED, told, *SMALL, *options, "--json", str(file)])
    assert done.returncode == 0, done.stderr
    assert "Stopped by Ctrl-C: this is the best plan found until then." in done.stdout
    assert "Predicted iteration" in done.stdout
    assert json.loads(file.read_text())["search"]["stopped"] == "interrupted"
    read_plan(file)


@pytest.mark.parametrize("options", [["--without", "exact"], [], ["--strategy", "metis"]])
def test_ctrl_c_before_any_plan_is_one_line_and_130(options: list[str]) -> None:
    done = run(["-c", INTERRUPTED, "0", *LARGE, *options])
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr == "eth: stopped before any plan was found\n"


def test_a_second_ctrl_c_ends_at_once_with_130(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    # The replay that every plan gets is what goes on when the second one comes.
    program = INTERRUPTED.replace("main()", SECOND + "main()")
    done = run(["-c", program, "2", *SMALL, "--without", "exact", "--json", str(file)])
    assert done.returncode == 130
    assert done.stdout == ""
    assert done.stderr == ""
    assert not file.exists()


def test_a_signal_from_outside_ends_a_real_process(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *LARGE, "--without", "exact", "--json", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=4)
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode in (0, 130), errors
    # A slow machine may not have found a plan by then.
    if process.returncode == 130:
        assert errors == "eth: stopped before any plan was found\n"
    else:
        assert "Stopped by Ctrl-C" in output
        read_plan(file)
