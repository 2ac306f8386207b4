"""Strategy `eth`: the exact solver proposes, complete enumeration checks it where the cluster is tiny, and
the bound says how much better any plan could be."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from planner.cost.models import CostModels
from planner.cost.price import iteration_seconds, with_prediction
from planner.errors import UserError
from planner.plan import Bound, Plan, Predicted
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search import enumerate_hpp
from planner.search.diagnose import cannot_fit, fits
from planner.search.exact.bound import RELAXATIONS, lower_bound
from planner.search.exact.bound_tables import bound_tables
from planner.search.exact.make_table import TableMaker
from planner.search.exact.pool import Pool, every_pool
from planner.search.exact.prices import DevicePrices
from planner.search.exact.solution import Solution
from planner.search.exact.solve import ExactSolver
from planner.search.exact.stage_table import StageTable
from planner.search.exact.surroundings import Expected, Least
from planner.search.exact.tightened import ALL_RELAXED, PartlyExpected, Tightened
from planner.search.exact.zero import Zero
from planner.search.shortlist import Offer, ignore

# Clusters that complete enumeration plans in about a second.
_ENUMERATED_DEVICES = 6
# Those of which it also looks at recomputation and ZeRO in that time.
_ENUMERATED_WITH_SAVERS = 4


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
    request: PlanRequest,
    *,
    profile: ProfileTable,
    progress: Callable[[str], None],
    models: CostModels | None = None,
    offer: Offer = ignore,
) -> Plan:
    """The strategy: a priced Plan with its bound and `search` statistics. UserError if nothing fits."""
    clock = Clock.start()
    progress("pricing devices and pipelines")
    solver = ExactSolver(request, profile=profile, models=models, offer=offer, progress=progress)
    solution = solver.solve()
    found = [solution.plan] if solution else []
    statistics: dict[str, object] = {"coarse": False}
    if solution is None and len(request.cluster.devices) > _ENUMERATED_DEVICES and not fits(request):
        raise cannot_fit(request, profile=profile)
    if solution is None or len(request.cluster.devices) <= _ENUMERATED_DEVICES:
        try:
            enumerated = _enumerated(request, profile=profile, progress=progress)
        except UserError:
            # It says what is missing if nothing fits; with activations whole nothing may fit.
            if solution is None:
                raise
        else:
            statistics |= enumerated.search or {}
            found.append(with_prediction(enumerated, profile=profile))
    best = min(found, key=iteration_seconds)
    statistics |= {**solver.statistics, "seconds": clock.seconds()}
    if not request.bound:
        return best.model_copy(update={"search": {**statistics, "bound_seconds": 0.0}})
    clock = Clock.start()
    offer(best)
    solver.tell(f"found {iteration_seconds(best):.4g} s an iteration; bounding every other plan")
    predicted = bound_of(solver, solution, best)
    statistics["bound_seconds"] = clock.seconds()
    return best.model_copy(update={"predicted": predicted, "search": statistics})


def _enumerated(request: PlanRequest, *, profile: ProfileTable, progress: Callable[[str], None]) -> Plan:
    few = len(request.cluster.devices) <= _ENUMERATED_WITH_SAVERS
    return enumerate_hpp.plan(
        request,
        profile=profile,
        progress=progress,
        recompute="all-or-none" if few and request.recompute else "none",
        zero_stages=request.zero_stages if few else request.zero_stages[:1],
    )


def bound_of(solver: ExactSolver, solution: Solution | None, plan: Plan) -> Predicted:
    """The plan's prediction with its lower bound; without a solution of the solver there is none."""
    assert plan.predicted is not None
    if solution is None:
        return plan.predicted
    pool = every_pool(solver.request.cluster, solver.request.model)
    seconds = bound_seconds(solver, pool, solution.prices_for(pool), upper=plan.predicted.iteration_seconds)
    bound = Bound(price="eq5", relaxations=RELAXATIONS)
    return plan.predicted.model_copy(update={"lower_bound_seconds": seconds, "bound": bound})


def bound_seconds(
    solver: ExactSolver,
    pool: Pool,
    prices: Callable[[int], DevicePrices],
    *,
    upper: float,
    tightened: Tightened = ALL_RELAXED,
) -> float:
    """At most `upper`: no plan of the solver's request with its micro-batch sizes takes less.

    Unless `tightened`: then only no plan of the kind that it describes.

    `pool` is that of `every_pool`; any `prices` will do, bad ones bound badly. Where the request allows sequence
    parallelism, every choice of a stage stands in the tables twice, with activations whole and cut by position: what
    holds for each way to run a stage then holds for a plan that mixes them.
    """
    request = solver.request
    least = Least(request.cluster, pool, solver.cost.row_bytes, solver.cost.profile.least_all_reduce_rate())
    most_stages = min(request.model.layers + 2, pool.devices)
    surroundings = PartlyExpected(
        least,
        Expected(request.cluster, pool, solver.cost.row_bytes),
        gradients=tightened.gradients,
        receiving=tightened.receiving,
    )
    stages = solver.zero_stages() if tightened.zero_stage is None else [tightened.zero_stage]
    replays = solver.replays(pool, max_stages=most_stages, relaxed=not tightened.whole_layers)
    ways = [(False, replays)]
    if request.sequence_parallel:
        ways.append((True, replays.cut_by_position()))

    def tables(pipelines: int) -> list[StageTable]:
        makers = [
            TableMaker(
                solver.cost,
                solver.figures,
                pool,
                surroundings,
                replays,
                Zero(stage, request.zero_scope, pipelines, most=True, limit=tightened.most_ways),
                cut,
            )
            for stage in stages
            for cut, replays in ways
        ]
        found = []
        holders = max(pipelines, tightened.pipelines) if pipelines > 1 else 1
        for table in bound_tables(makers, sizes=solver.sizes, one_type=tightened.one_type):
            solver.tick()
            found.append(table.for_pipelines(surroundings, holders))
        return found

    return lower_bound(tables, solver.budget(pool), prices, upper=upper, tick=solver.tick)
