"""The exact solver's story: tables, prices of devices, columns, whole pipelines, devices, a Plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.memory import MemoryModel
from planner.cost.stages import StageCost
from planner.plan import Plan
from planner.profile.analytic import AnalyticProfile
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.exact.chains import Chain
from planner.search.exact.choices import stage_choices
from planner.search.exact.columns import Box
from planner.search.exact.combine import Combiner, make_columns
from planner.search.exact.plans import Assembler, iteration_seconds
from planner.search.exact.pool import Pool, pools
from planner.search.exact.prices import (
    Budget,
    DevicePrices,
    Intervals,
    Priced,
    find_prices,
    first_chains,
    first_prices,
    solve_prices,
)
from planner.search.exact.refine import Refiner
from planner.search.exact.settle import Settler
from planner.search.exact.stage_table import FloatArray, StageTable, build_table
from planner.search.exact.surroundings import Expected
from planner.search.shortlist import Offer, ignore

_FEW_DEVICES = 8
_MOST_STAGES = 64
_CELLS = 5_000
# How many pipelines share a gradient, before that is known.
_SHARING = 4
_ROUNDS = 8
_CLOSE = 3e-3
# Micro-batch sizes of which columns are made, those whose chains price best.
_SIZES = 3
_MOST_PIPELINES = 6
# Up to so many devices all micro-batch sizes and more sets of pipelines are looked at.
_MANY_SETS_DEVICES = 32
# Plans that are refined.
_REFINED = 2


@dataclass(frozen=True)
class Solution:
    """The best plan, and what the search for it learned about the worth of devices."""

    plan: Plan
    pool: Pool
    priced: Priced
    tables: Sequence[StageTable]
    budget: Budget
    statistics: dict[str, int]

    def prices_for(self, pool: Pool) -> Callable[[int], DevicePrices]:
        """Good prices of another pool of the same cluster, by how many pipelines there may be."""
        guess = first_prices(self.tables, self.budget)

        def prices(pipelines: int) -> DevicePrices:
            budget = replace(self.budget, pipelines=pipelines)
            found = solve_prices(self.priced.pool, budget, guess=guess)
            return replace(found, per_device=_by_type(found.per_device, self.pool, pool))

        return prices


class ExactSolver:
    """Plans one request."""

    def __init__(
        self,
        request: PlanRequest,
        *,
        profile: ProfileTable | None = None,
        micro_batch_sizes: Sequence[int] | None = None,
        offer: Offer = ignore,
    ) -> None:
        self.request = request
        self._offer = offer
        self.profile = profile or AnalyticProfile(request.model, request.cluster.device_types)
        sizes = micro_batch_sizes or default_micro_batch_sizes(len(request.cluster.devices))
        self.sizes = [size for size in sizes if size <= request.global_batch_size]
        self.cost = StageCost(
            model=request.model,
            device_types=request.cluster.device_types,
            links=request.cluster.links,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            profile=self.profile,
        )
        self.memory = MemoryModel(
            model=request.model,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            memory_scale=request.emulation.memory_scale,
        )
        self.statistics = {"chains": 0, "columns": 0, "columns_made": 0, "candidates": 0}

    def solve(self) -> Solution | None:
        """The best plan found; None if nothing fits."""
        found = [
            solution
            for pool in pools(self.request.cluster, self.request.model)
            for solution in self._solutions(pool)
        ]
        return min(found, key=lambda solution: iteration_seconds(solution.plan), default=None)

    def budget(self, pool: Pool) -> Budget:
        samples = self.request.global_batch_size
        return Budget(pool.counts, samples, min(pool.devices, samples))

    def _solutions(self, pool: Pool) -> Iterator[Solution]:
        """The best for each assumption of how many pipelines share a gradient."""
        expected = Expected(self.request.cluster, pool, self.cost.row_bytes)
        plain = list(self._tables(pool, expected))
        few = pool.devices <= _FEW_DEVICES
        for sharing in (_SHARING, 1, 2) if few else (_SHARING,):
            budget = self.budget(pool)
            if sharing < _SHARING:
                budget = replace(budget, pipelines=min(budget.pipelines, sharing))
            tables = [table.for_pipelines(expected, sharing) for table in plain]
            chains = first_chains(tables, budget)
            if not chains.chains:
                return
            priced = find_prices(tables, chains, budget, rounds=_ROUNDS, close=_CLOSE)
            self.statistics["chains"] += len(chains.chains)
            best = self._best_plan(pool, tables, priced, budget)
            if best is not None:
                yield Solution(best, pool, priced, tables, budget, self.statistics)

    def _tables(self, pool: Pool, expected: Expected) -> Iterator[StageTable]:
        """The usable tables, by micro-batch size."""
        stages = min(self.request.model.layers + 2, pool.devices, _MOST_STAGES)
        for size in self.sizes:
            choices = list(stage_choices(self.cost, pool, micro_batch_size=size, mixed=True))
            table = build_table(
                self.cost, self.memory, pool, choices, expected, micro_batch_size=size, max_stages=stages
            )
            if table.usable:
                yield table

    def _sets(self, priced: Priced, budget: Budget, settlers: Mapping[int, Settler]) -> Iterator[list[Chain]]:
        """Sets of pipelines that end the batch soon."""
        taken, rest = _whole_part(priced, budget)
        columns = make_columns(_promising(priced, budget), priced.prices, choose_box(rest.counts), settlers)
        combiner = Combiner(columns, priced.prices, rest, taken)
        seen: set[tuple[object, ...]] = set()
        settled = [
            _settled(settlers[chain.micro_batch_size], chain, priced.prices.seconds) for chain in taken
        ]
        few = sum(budget.counts) <= _MANY_SETS_DEVICES
        for chains in combiner.sets(most=_MOST_PIPELINES, others=few):
            key = tuple(chain.specs for chain in chains)
            if key not in seen:
                seen.add(key)
                yield [*settled, *chains]
        self.statistics["columns"] += len(columns.vectors)
        self.statistics["columns_made"] += len(columns.made)

    def _best_plan(
        self, pool: Pool, tables: Sequence[StageTable], priced: Priced, budget: Budget
    ) -> Plan | None:
        """Each set on devices, and the best few of them refined."""
        assembler = Assembler(self.request, pool, self.profile)
        settlers = {
            table.micro_batch_size: Settler(table, self.request.cluster, pool, self.cost.row_bytes)
            for table in tables
        }
        refiner = Refiner(assembler, tables, settlers)
        found = [
            candidate
            for chains in self._sets(priced, budget, settlers)
            for candidate in refiner.candidates(chains)
        ]
        ranked = sorted(found, key=lambda one: one.seconds)[:_REFINED]
        prices = _prices(pool.devices)
        refined = [refiner.improved(candidate, prices=prices) for candidate in ranked]
        for candidate in [*refined, *found]:
            self._offer(candidate.plan)
        self.statistics["candidates"] += assembler.count
        return min((one.plan for one in refined), key=iteration_seconds, default=None)


def _prices(devices: int) -> int:
    """Prices to spend on refining one plan: fewer where each takes longer."""
    return 24 if devices <= 64 else 12 if devices <= 2048 else 3


def default_micro_batch_sizes(devices: int) -> tuple[int, ...]:
    """Micro-batch sizes to try: all that complete enumeration tries where the cluster is small."""
    if devices > _FEW_DEVICES:
        return (1, 2, 4, 8, 16)
    return tuple(size for size in range(1, max(8, 2 * devices) + 1) if size <= 8 or size % 2 == 0)


def _by_type(prices: FloatArray, known: Pool, wanted: Pool) -> FloatArray:
    """Mean prices of each type's devices, for the kinds of another pool."""
    found = []
    for kind in wanted.kinds:
        same = [i for i, other in enumerate(known.kinds) if other.type == kind.type]
        counts = [known.kinds[i].count for i in same]
        found.append(float(np.average(prices[same], weights=counts)))
    return np.array(found)


def _settled(settler: Settler, chain: Chain, seconds: float) -> Chain:
    return settler.settled(chain, max(1, chain.pace.micro_batches(chain.pace.samples_within(seconds))))


def _promising(priced: Priced, budget: Budget) -> list[Intervals]:
    """The intervals of the micro-batch sizes with the best chains; of all sizes where devices are few."""
    if sum(budget.counts) <= _MANY_SETS_DEVICES:
        return priced.intervals
    best = [float(held.priced(priced.prices).seconds.min()) for held in priced.intervals]
    order = sorted(range(len(best)), key=lambda index: best[index])[:_SIZES]
    return [priced.intervals[index] for index in sorted(order)]


def _whole_part(priced: Priced, budget: Budget) -> tuple[list[Chain], Budget]:
    """Whole pipelines of the linear program, as long as more than two would still be left to choose."""
    taken: list[Chain] = []
    left = np.array(budget.counts)
    amounts = priced.prices.amounts.copy()
    while math.prod(int(n) + 1 for n in left) > 20 * _CELLS and amounts.sum() > 3:
        index = int(np.argmax(amounts))
        if amounts[index] < 1:
            break
        chain = priced.pool.chains[index]
        taken.append(chain)
        amounts[index] -= 1
        left = left - np.array(chain.counts)
    return taken, Budget(tuple(int(n) for n in left), budget.samples, budget.pipelines - len(taken))


def choose_box(counts: Sequence[int]) -> Box:
    """All count vectors up to `counts`, in the smallest power of two of devices that keeps them few."""
    unit = 1
    while True:
        box = Box(tuple(int(count) // unit * unit for count in counts), unit)
        if box.cells <= _CELLS:
            return box
        unit *= 2
