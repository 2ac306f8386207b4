"""Ending a search early: what is returned, what is raised, what the plan says."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from planner.cost.price import with_prediction
from planner.errors import UserError
from planner.plan import Plan
from planner.search.control import SearchControl, SearchOptions, SearchStopped
from planner.search.shortlist import Offer, ignore
from planner.search.stopping import Search, stoppable, stopped_words
from tests.plans import make_model, make_plan

PLAN = with_prediction(make_plan(make_model(), [[(1, 1, 4)]]))


def seconds_of(plan: Plan) -> float:
    return float((plan.search or {})["rank"])


def ranked(rank: float) -> Plan:
    return PLAN.model_copy(update={"strategy": f"rank {rank:g}", "search": {"rank": rank}})


def offering(ranks: list[float], ending: Callable[[Callable[[str], None]], Plan]) -> Search:
    def search(tell: Callable[[str], None], offer: Offer) -> Plan:
        for rank in ranks:
            offer(ranked(rank))
        return ending(tell)

    return search


def interrupted(tell: Callable[[str], None]) -> Plan:
    raise KeyboardInterrupt


def patient(tell: Callable[[str], None]) -> Plan:
    while True:
        tell("still searching")


def run(search: Search, control: SearchControl) -> Plan:
    return stoppable(search, control, rank=seconds_of, offer=ignore)


def test_a_search_that_is_done_returns_its_plan() -> None:
    plan = run(offering([1.0], lambda tell: ranked(3.0)), SearchControl())
    assert plan.search == {"rank": 3.0}
    assert stopped_words(plan.search) == ""


def test_ctrl_c_returns_the_best_offered_plan_with_the_statistics_so_far() -> None:
    control = SearchControl(interruptible=True, snapshot=lambda: {"evaluations": 7})
    plan = run(offering([3.0, 1.0, 2.0], interrupted), control)
    assert plan.strategy == "rank 1"
    assert plan.search == {"evaluations": 7, "stopped": "interrupted"}
    assert stopped_words(plan.search) == "Stopped by Ctrl-C: this is the best plan found until then."


def test_offers_are_passed_on() -> None:
    passed: list[float] = []
    search = offering([3.0, 1.0, 2.0], lambda tell: ranked(1.0))
    stoppable(search, SearchControl(), rank=seconds_of, offer=lambda plan: passed.append(seconds_of(plan)))
    assert passed == [3.0, 1.0, 2.0]


def test_ctrl_c_is_an_error_before_any_plan_and_where_nobody_asked_for_more() -> None:
    with pytest.raises(SearchStopped, match=r"^stopped before any plan was found$"):
        run(offering([], interrupted), SearchControl(interruptible=True))
    with pytest.raises(KeyboardInterrupt):
        run(offering([1.0], interrupted), SearchControl())


def test_a_search_that_does_not_look_at_the_clock_is_ended_when_it_tells_of_its_progress() -> None:
    control = SearchControl(SearchOptions(time_budget=0.05))
    plan = run(offering([2.0, 5.0], patient), control)
    assert plan.search == {"time_budget": 0.05, "stopped": "time_budget"}
    assert "after the time budget of 0.05 s" in stopped_words(plan.search)
    with pytest.raises(
        UserError, match=r"^--time-budget = 0\.05 s ended before any plan was found; raise it$"
    ):
        run(offering([], patient), SearchControl(SearchOptions(time_budget=0.05)))


def test_without_a_time_budget_nothing_stops_and_the_plan_says_nothing() -> None:
    control = SearchControl()
    assert not control.should_stop()
    assert "time_budget" not in (run(offering([], lambda tell: ranked(1.0)), control).search or {})


def test_progress_is_told_once_a_second_at_most() -> None:
    told: list[str] = []
    control = SearchControl(progress=told.append)
    for number in range(1000):
        control.tell(str(number))
    assert told[0] == "0" and len(told) <= 3
