"""A peer's plan searched twice: with stages that may cut activations by position, and without.

What a stage may do changes which sketches are changed further, so the search may end elsewhere, and worse.
"""

from __future__ import annotations

from collections.abc import Callable

from planner.cost.price import iteration_seconds
from planner.errors import UserError
from planner.plan import Plan
from planner.request import PlanRequest


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
