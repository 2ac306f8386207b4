"""A peer's plan searched twice: with stages that may cut activations by position, and without.

What a stage may do changes which sketches are changed further, so the search may end elsewhere, and worse.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec

from planner.cost.price import iteration_seconds
from planner.errors import UserError
from planner.plan import Plan
from planner.request import PlanRequest

_Rest = ParamSpec("_Rest")
Search = Callable[Concatenate[PlanRequest, _Rest], Plan]


def both_ways(search: Search[_Rest]) -> Search[_Rest]:
    """The search made both ways where it has no `budget`: beside another search there is no time for that."""

    @wraps(search)
    def plan(request: PlanRequest, *rest: _Rest.args, **named: _Rest.kwargs) -> Plan:
        if named.get("budget") is not None:
            return search(request, *rest, **named)
        return better_of_both(request, lambda one: search(one, *rest, **named))

    return plan


def better_of_both(request: PlanRequest, plan: Callable[[PlanRequest], Plan]) -> Plan:
    """The quicker of both plans. UserError if neither fits: that of the request as it is."""
    if not request.sequence_parallel:
        return plan(request)
    found, errors = [], []
    for one in (request, request.model_copy(update={"sequence_parallel": False})):
        try:
            found.append(plan(one))
        except UserError as error:
            errors.append(error)
    if not found:
        raise errors[0]
    return min(found, key=iteration_seconds)
