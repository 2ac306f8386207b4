"""Several processes that work for one: in order, and what becomes of them when one of them fails."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from actors.text.parallel import in_processes
from planner.errors import UserError


def started() -> None:
    os.environ["STARTED"] = "yes"


def worked_on(unit: int) -> tuple[int, int, str]:
    if unit < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    if unit == 13:
        raise UserError("13 is no unit")
    return unit, os.getpid(), os.environ["STARTED"]


def test_results_come_in_order_and_from_other_processes() -> None:
    made = list(in_processes(worked_on, range(12), processes=2, start=started))
    assert [unit for unit, _, _ in made] == list(range(12))
    assert {word for _, _, word in made} == {"yes"}
    assert 1 <= len({process for _, process, _ in made} - {os.getpid()}) <= 2
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(
    ("unit", "told"),
    [(13, "^13 is no unit$"), (-1, "^a process that made tokens was ended from outside, .* --processes")],
)
def test_a_unit_that_fails_is_told_in_one_line(unit: int, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        list(in_processes(worked_on, [1, 2, unit, 4], processes=2, start=started))
    assert "\n" not in str(caught.value) and not multiprocessing.active_children()


def test_whoever_needs_no_more_leaves_no_process() -> None:
    """And Ctrl-C means what it meant before."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    made = in_processes(worked_on, range(100), processes=2, start=started)
    assert next(made)[0] == 0
    made.close()  # type: ignore[attr-defined]
    assert not multiprocessing.active_children()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before
