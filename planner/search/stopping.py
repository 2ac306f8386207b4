"""Ending a search early with the best plan it has priced so far."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from planner.errors import UserError
from planner.plan import Plan
from planner.search.control import SearchControl, SearchStopped
from planner.search.shortlist import Offer

Search = Callable[[Callable[[str], None], Offer], Plan]
"""Makes a plan, telling of its progress and offering the plans that it prices."""


class _TimeUp(Exception):
    """Raised out of a search that does not look at the clock itself, when it tells of its progress."""


def stoppable(search: Search, control: SearchControl, *, rank: Callable[[Plan], float], offer: Offer) -> Plan:
    """What the search finds; if it is stopped before, the plan of least rank that it has offered.

    It is stopped by the control's time budget and, where the control is interruptible, by Ctrl-C. The plan's
    `search` then says which. UserError if time was up before there was any plan, SearchStopped if the user
    did not wait for one.
    """
    best: list[tuple[float, Plan]] = []

    def keep(plan: Plan) -> None:
        offer(plan)
        if not best or rank(plan) < best[0][0]:
            best[:] = [(rank(plan), plan)]

    def tell(message: str) -> None:
        control.tell(message)
        if control.should_stop():
            raise _TimeUp

    try:
        found = search(tell, keep)
    except KeyboardInterrupt:
        if not control.interruptible:
            raise
        control.stopped = "interrupted"
    except (_TimeUp, SearchStopped):
        assert control.stopped
    else:
        return found.model_copy(update={"search": {**(found.search or {}), **_record(control)}})
    if best:
        return best[0][1].model_copy(update={"search": {**control.snapshot(), **_record(control)}})
    if control.stopped == "interrupted":
        raise SearchStopped("stopped before any plan was found")
    raise UserError(
        f"--time-budget = {control.options.time_budget:g} s ended before any plan was found; raise it"
    )


def stopped_words(search: Mapping[str, Any] | None) -> str:
    """What to tell about a search that ended early; empty if it did not."""
    why = (search or {}).get("stopped")
    if why == "interrupted":
        return "Stopped by Ctrl-C: this is the best plan found until then."
    if why == "time_budget":
        return (
            f"Stopped after the time budget of {(search or {})['time_budget']:g} s: this is the best plan found"
            " until then; with other machines or loads it may be another."
        )
    return ""


def _record(control: SearchControl) -> dict[str, object]:
    record: dict[str, object] = {}
    if control.options.time_budget is not None:
        record["time_budget"] = control.options.time_budget
    if control.stopped:
        record["stopped"] = control.stopped
    return record
