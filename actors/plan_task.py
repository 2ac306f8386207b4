"""The planner as a Ray task, so that a long search runs on the cluster's head and not in the driver."""

from __future__ import annotations

import ray
from ray.exceptions import RayTaskError

from planner.errors import UserError
from planner.plan import Plan
from planner.request import PlanRequest

_HEAD = "node:__internal_head__"


def _search(request: PlanRequest) -> Plan:
    from planner.search import find_plan

    return find_plan(request)


def plan_on_head(request: PlanRequest) -> Plan:
    """Search a plan in a Ray task; a UserError of the search comes back as one.

    The task asks for no CPU, since heads often offer none, but for a trace of the head's own resource,
    so that it does not slow a device's host down.
    """
    task = ray.remote(num_cpus=0, max_retries=0, resources={_HEAD: 0.001})(_search)
    try:
        return ray.get(task.remote(request))
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        raise
