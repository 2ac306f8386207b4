"""Strategy `eth`: the exact solver proposes, complete enumeration checks it where the cluster is tiny, and
the bound says how much better any plan could be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.price import with_prediction
from planner.plan import Bound, Plan, Predicted
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search import enumerate_hpp
from planner.search.exact.bound import RELAXATIONS, lower_bound
from planner.search.exact.bound_tables import bound_tables
from planner.search.exact.plans import iteration_seconds
from planner.search.exact.pool import every_pool
from planner.search.exact.solve import ExactSolver, Solution
from planner.search.exact.surroundings import Least
from planner.search.shortlist import Offer, ignore

# Clusters that complete enumeration plans in about a second.
_ENUMERATED_DEVICES = 6


@dataclass
class Clock:
    """CPU seconds of this thread, so that what else runs does not count."""

    started: float

    @classmethod
    def start(cls) -> Clock:
        return cls(time.thread_time())

    def seconds(self) -> float:
        return round(time.thread_time() - self.started, 3)


def plan(
    request: PlanRequest, *, profile: ProfileTable, progress: Callable[[str], None], offer: Offer = ignore
) -> Plan:
    """The strategy: a priced Plan with its bound and `search` statistics. UserError if nothing fits."""
    clock = Clock.start()
    progress("pricing devices and pipelines")
    solver = ExactSolver(request, profile=profile, offer=offer)
    solution = solver.solve()
    found = [solution.plan] if solution else []
    statistics: dict[str, object] = {"coarse": False}
    if solution is None or len(request.cluster.devices) <= _ENUMERATED_DEVICES:
        # Raises the error that says what is missing if nothing fits.
        enumerated = enumerate_hpp.plan(request, profile=profile, progress=progress)
        statistics |= enumerated.search or {}
        found.append(with_prediction(enumerated, profile=profile))
    best = min(found, key=iteration_seconds)
    statistics |= {**solver.statistics, "seconds": clock.seconds()}
    clock = Clock.start()
    progress(f"found {iteration_seconds(best):.4g} s an iteration; bounding every other plan")
    predicted = bound_of(solver, solution, best)
    statistics["bound_seconds"] = clock.seconds()
    return best.model_copy(update={"predicted": predicted, "search": statistics})


def bound_of(solver: ExactSolver, solution: Solution | None, plan: Plan) -> Predicted:
    """The plan's prediction with its lower bound; without a solution of the solver there is none."""
    assert plan.predicted is not None
    if solution is None:
        return plan.predicted
    request = solver.request
    pool = every_pool(request.cluster, request.model)
    least = Least(request.cluster, pool, solver.cost.row_bytes)
    tables = list(
        bound_tables(
            solver.cost,
            solver.memory,
            pool,
            least,
            sizes=solver.sizes,
            max_stages=min(request.model.layers + 2, pool.devices),
        )
    )
    seconds = lower_bound(
        tables, least, solver.budget(pool), solution.prices_for(pool), upper=plan.predicted.iteration_seconds
    )
    bound = Bound(price="eq5", relaxations=RELAXATIONS)
    return plan.predicted.model_copy(update={"lower_bound_seconds": seconds, "bound": bound})
