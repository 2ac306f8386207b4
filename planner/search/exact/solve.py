"""The exact solver's story: tables, prices of devices, columns, whole pipelines, devices, a Plan."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal

from planner.cost.models import CostModels
from planner.plan import Plan
from planner.profile.analytic import PRECISION_BYTES, AnalyticProfile
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.exact.choices import StageChoice, stage_choices
from planner.search.exact.make_table import StageFigures, TableMaker
from planner.search.exact.plans import Assembler
from planner.search.exact.pool import Pool, pools
from planner.search.exact.prices import (
    Budget,
    ChainPool,
    Priced,
    any_table,
    find_prices,
    first_chains,
)
from planner.search.exact.proposals import BEYOND, MANY_DEVICES, Proposal, add_sets
from planner.search.exact.refine import Candidate, Refiner
from planner.search.exact.replays import Replays, replicas_of
from planner.search.exact.settle import Settler
from planner.search.exact.solution import Solution
from planner.search.exact.stage_table import StageTable
from planner.search.exact.surroundings import Expected
from planner.search.exact.zero import Zero
from planner.search.shortlist import Offer, ignore

ZeroStage = Literal[0, 1, 2]
_FEW_DEVICES = 8
# Stages of a pipeline. Each takes as long to price; up to so many devices more than a few are looked at only if nothing
# fits in these, or a pipeline of the best plan has nearly so many. Among more devices deep pipelines are common.
_STAGES_DEVICES = 64
_FEW_STAGES, _NEARLY_SO_MANY, _MOST_STAGES = 32, 24, 64
# How many pipelines share a gradient, before that is known.
_SHARING = 4
_ROUNDS = 8
# Of solutions this close the first is kept, that of the lower ZeRO stage.
_TIE = 1e-6
_CLOSE = 3e-3
_PRICED_SETS, _FEW_PRICED_SETS = 4, 2
# Beyond so many, each price takes seconds.
_HUGE_DEVICES = 2048
# Plans that are refined, if so near the best.
_REFINED, _NEARLY = 2, 1.01


def _quiet(message: str) -> None:
    del message


class ExactSolver:
    """Plans one request."""

    def __init__(
        self,
        request: PlanRequest,
        *,
        profile: ProfileTable | None = None,
        micro_batch_sizes: Sequence[int] | None = None,
        models: CostModels | None = None,
        offer: Offer = ignore,
        progress: Callable[[str], None] = _quiet,
    ) -> None:
        """`models` are those of the request, if there are some already. `progress` is told, often, what is going on;
        what it raises ends the search (`search/stopping.py`)."""
        self.request = request
        self._offer, self._progress, self._doing = offer, progress, ""
        self.profile = profile or AnalyticProfile(request.model, request.cluster.device_types)
        sizes = micro_batch_sizes or default_micro_batch_sizes(len(request.cluster.devices))
        self.sizes = [size for size in sizes if size <= request.global_batch_size]
        models = models or CostModels.of_request(request, profile=self.profile)
        self.cost, self.memory = models.cost, models.memory
        self.figures = StageFigures(self.cost)
        self.recompute = models.recompute if request.recompute else None
        self._by_position = False
        self._chains, self._chains_of = ChainPool(), Pool(())
        self._choices: dict[int, list[StageChoice]] = {}
        self._choices_of = Pool(())
        self.statistics = {"chains": 0, "columns": 0, "columns_made": 0, "candidates": 0}

    def solve(self) -> Solution | None:
        """The best plan found; None if nothing fits. Activations are whole, unless nothing fits so."""
        best = self._best()
        if best is None and self.request.sequence_parallel:
            self._by_position = True
            best = self._best()
        return best

    def _best(self) -> Solution | None:
        devices = len(self.request.cluster.devices)
        if devices > _STAGES_DEVICES:
            return self._within(_MOST_STAGES)
        best, most = self._within(_FEW_STAGES), min(self.request.model.layers + 2, devices)
        if most > _FEW_STAGES and (best is None or _longest(best.plan) > _NEARLY_SO_MANY):
            found = [one for one in (best, self._within(_MOST_STAGES)) if one is not None]
            best = min(found, key=lambda one: one.seconds, default=None)
        return best

    def _within(self, most_stages: int) -> Solution | None:
        """The best of pipelines of so many stages at most."""
        best: Solution | None = None
        for pool in pools(self.request.cluster, self.request.model):
            stages = min(self.request.model.layers + 2, pool.devices, most_stages)
            replays = self.replays(pool, max_stages=stages)
            if self._by_position:
                replays = replays.cut_by_position()
            for zero_stage in self.zero_stages():
                for found in self._searches(pool, replays, zero_stage, best):
                    if found is not None and (best is None or found.seconds < best.seconds * (1 - _TIE)):
                        best = found
        return best

    def tell(self, doing: str) -> None:
        """What is going on from here."""
        self._doing = doing
        self.tick()

    def tick(self) -> None:
        """It still is."""
        self._progress(self._doing)

    def budget(self, pool: Pool) -> Budget:
        samples = self.request.global_batch_size
        return Budget(pool.counts, samples, min(pool.devices, samples))

    def _searches(
        self,
        pool: Pool,
        replays: Replays,
        zero_stage: ZeroStage,
        best: Solution | None,
    ) -> Iterator[Solution | None]:
        """Searches at a ZeRO stage, for each assumption of how many pipelines share a gradient: among many devices one
        search for all, so that only the best sets of pipelines are priced."""
        if pool.devices > MANY_DEVICES:
            yield self.search(pool, replays, zero_stage, [_SHARING, 1], best)
            return
        sharings = [_SHARING, 1, 2] if pool.devices <= _FEW_DEVICES else [_SHARING, 1]
        for sharing in sharings:
            found = self.search(pool, replays, zero_stage, [sharing], best)
            yield found
            best = min((one for one in (best, found) if one), key=lambda one: one.seconds, default=None)
            pipelines = len(found.plan.pipelines) if found else 0
            if zero_stage and 0 < pipelines < sharing and pipelines not in sharings:
                # Fewer than was assumed: less memory is saved, so plan for that.
                sharings.append(pipelines)

    def search(
        self,
        pool: Pool,
        replays: Replays,
        zero_stage: ZeroStage,
        sharings: Sequence[int],
        best: Solution | None,
    ) -> Solution | None:
        """The best for some assumptions; None if nothing fits, or nothing can beat the best so far."""
        if zero_stage == 2 and best is not None and not recomputes(best.plan):
            return None
        so_far = f", {best.seconds:.4g} s an iteration so far" if best else ""
        self.tell(f"searching pipelines at ZeRO-{zero_stage}{so_far}")
        goal, known = best.seconds if best is not None else math.inf, []
        tables: list[StageTable] = []
        for sharing in sharings:
            # Where fewer pipelines share optimizer state, stages hold no more and take no less.
            if zero_stage == 2 and tables and self._prices(pool, tables, zero_stage, sharing, goal) is None:
                continue
            tables = list(self._tables(pool, replays, zero_stage, sharing))
            found = self._proposal(pool, tables, zero_stage, sharing, goal)
            if found is not None:
                known.append(found)
                goal = min([goal, *(seconds * BEYOND for seconds, _ in found.sets)])
        return self._priced(known, goal=best.seconds if best is not None else math.inf)

    def _proposal(
        self, pool: Pool, tables: Sequence[StageTable], zero_stage: ZeroStage, sharing: int, goal: float
    ) -> Proposal | None:
        """Sets of pipelines that may end the batch before `goal`; None if there are none."""
        known = self._prices(pool, tables, zero_stage, sharing, goal)
        if known is None:
            return None
        tables, budget, priced = known
        assembler = Assembler(
            self.request,
            pool,
            self.profile,
            cost=self.cost,
            recompute=self.recompute,
            zero_stage=zero_stage,
            by_position=self._by_position,
        )
        settlers = {
            table.micro_batch_size: Settler(table, self.request.cluster, pool, self.cost.row_bytes)
            for table in tables
        }
        found = Proposal(pool, tables, priced, budget, assembler, settlers)
        # The true price may be a little less than that of the tables.
        self._propose(found, every=False, goal=goal * BEYOND)
        if not found.sets and pool.devices <= _FEW_DEVICES:
            # Prices of fractions of pipelines say little of so few whole ones.
            self._propose(found, every=True, goal=math.inf)
        return found if found.sets else None

    def _prices(
        self, pool: Pool, tables: Sequence[StageTable], zero_stage: ZeroStage, sharing: int, goal: float
    ) -> tuple[list[StageTable], Budget, Priced] | None:
        """The tables for so many pipelines, their budget and the worth of devices; None if no pipelines end the batch
        before `goal`."""
        expected, budget = self._expected(pool), self._budget(pool, sharing)
        shared = [table.for_pipelines(expected, sharing) for table in tables]
        chains = self._first_chains(pool, shared, budget)
        if not chains.chains:
            return None
        # Without replicas of a stage ZeRO-2 is ZeRO-1, which was searched before.
        again = zero_stage == 2 and 1 in self.request.zero_stages
        which = _has_replicas if again else any_table
        priced = find_prices(
            shared, chains, budget, rounds=_ROUNDS, close=_CLOSE, goal=goal, which=which, tick=self.tick
        )
        self.statistics["chains"] += len(chains.chains)
        if priced is None or (again and priced.least(which) >= goal):
            return None
        return shared, budget, priced

    def _first_chains(self, pool: Pool, tables: Sequence[StageTable], budget: Budget) -> ChainPool:
        """Those of the search before, if it was of the same pool; else the best at a few prices."""
        before = self._chains if self._chains_of is pool else ChainPool()
        chains = before.with_tables(tables)
        if not chains.chains:
            chains = first_chains(tables, budget)
        self._chains, self._chains_of = chains, pool
        return chains

    def zero_stages(self) -> list[ZeroStage]:
        """Those worth a search: ZeRO-1 over all holders takes no longer than ZeRO-0, unless parameters are wider
        than gradients on the wire."""
        stages, dtypes = list(self.request.zero_stages), self.request.dtypes
        narrow = PRECISION_BYTES[dtypes.param] <= PRECISION_BYTES[dtypes.wire]
        if 1 in stages and self.request.zero_scope == "all" and narrow:
            stages = [stage for stage in stages if stage]
        return sorted(stages)

    def _tables(
        self, pool: Pool, replays: Replays, zero_stage: ZeroStage, sharing: int
    ) -> Iterator[StageTable]:
        """The usable tables, by micro-batch size."""
        zero = Zero(zero_stage, self.request.zero_scope, min(sharing, self._budget(pool, sharing).pipelines))
        maker = TableMaker(
            self.cost, self.figures, pool, self._expected(pool), replays, zero, self._by_position
        )
        by_size = self._stage_choices(pool)
        every = [one for choices in by_size.values() for choice in choices for one in replicas_of(choice)]
        replays.prepare(every, [zero])
        for size, choices in by_size.items():
            self.tick()
            table = maker.table(choices, micro_batch_size=size)
            if table.usable:
                yield table

    def _stage_choices(self, pool: Pool) -> dict[int, list[StageChoice]]:
        """By micro-batch size; the same for every ZeRO stage and number of pipelines."""
        if self._choices_of is not pool:
            self._choices_of = pool
            self._choices = {
                size: list(stage_choices(self.cost, pool, micro_batch_size=size, mixed=True))
                for size in self.sizes
            }
        return self._choices

    def _expected(self, pool: Pool) -> Expected:
        return Expected(self.request.cluster, pool, self.cost.row_bytes)

    def _budget(self, pool: Pool, sharing: int) -> Budget:
        """If fewer share gradients than usual, there are no more pipelines than that."""
        budget = self.budget(pool)
        if sharing < _SHARING:
            return replace(budget, pipelines=min(budget.pipelines, sharing))
        return budget

    def replays(self, pool: Pool, *, max_stages: int, relaxed: bool = False) -> Replays:
        """What the stages of pipelines with up to so many stages recompute."""
        layers = self.request.model.layers
        return Replays(
            self.memory,
            self.recompute,
            pool,
            layers=layers,
            max_stages=max_stages,
            relaxed=relaxed,
        )

    def _propose(self, proposal: Proposal, *, every: bool, goal: float) -> None:
        columns = add_sets(proposal, every=every, goal=goal, tick=self.tick)
        self.statistics["columns"] += len(columns.vectors)
        self.statistics["columns_made"] += len(columns.made)

    def _priced(self, proposals: Sequence[Proposal], *, goal: float) -> Solution | None:
        """The best plan of all sets of pipelines: each on devices, and the best few of them refined; among many
        devices only of the most promising sets, if these may beat `goal`."""
        sets = [(seconds, chains, one) for one in proposals for seconds, chains in one.sets]
        if not sets:
            return None
        few = proposals[0].pool.devices <= MANY_DEVICES
        if not few:
            sets.sort(key=lambda one: one[0])
            most = min(sets[0][0], goal) * BEYOND
            tried = _PRICED_SETS if proposals[0].pool.devices <= _HUGE_DEVICES else _FEW_PRICED_SETS
            sets = [one for one in sets[:tried] if one[0] < most]
        refiners = {id(one): Refiner(one.assembler, one.tables, one.settlers) for one in proposals}
        found = [
            (candidate, one)
            for _, chains, one in sets
            for candidate in self._offered(refiners[id(one)].candidates(chains, most=2 if few else 1))
        ]
        ranked = sorted(found, key=lambda one: one[0].seconds)[:_REFINED]
        ranked = [one for one in ranked if one[0].seconds < min(ranked[0][0].seconds, goal) * _NEARLY]
        prices = _prices(proposals[0].pool.devices)
        refined = [
            (better, one)
            for candidate, one in ranked
            for better in self._offered([refiners[id(one)].improved(candidate, prices=prices)])
        ]
        self.statistics["candidates"] += sum(one.assembler.count for one in proposals)
        if not refined:
            return None
        best, _ = min(refined, key=lambda one: one[0].seconds)
        return Solution(best.plan, proposals)

    def _offered(self, candidates: Iterable[Candidate]) -> Iterator[Candidate]:
        for candidate in candidates:
            self._offer(candidate.plan)
            self.tick()
            yield candidate


def _has_replicas(table: StageTable) -> bool:
    return any(len(choice.rows) > 1 for choice in table.choices)


def recomputes(plan: Plan) -> bool:
    """Whether any stage does."""
    return any(stage.recompute for pipeline in plan.pipelines for stage in pipeline.stages)


def _longest(plan: Plan) -> int:
    return max(len(pipeline.stages) for pipeline in plan.pipelines)


def _prices(devices: int) -> int:
    """Prices to spend on refining one plan: fewer where each takes longer."""
    return 24 if devices <= 64 else 12 if devices <= 2048 else 3


def default_micro_batch_sizes(devices: int) -> tuple[int, ...]:
    """Micro-batch sizes to try: all that complete enumeration tries where the cluster is small."""
    if devices > _FEW_DEVICES:
        return (1, 2, 4, 8, 16)
    return tuple(size for size in range(1, max(8, 2 * devices) + 1) if size <= 8 or size % 2 == 0)
