"""Sets of whole pipelines that the prices of devices promise to be quick, before they are put on devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from planner.search.exact.chains import Chain
from planner.search.exact.columns import MOST_CHOSEN_CELLS, choose_box
from planner.search.exact.combine import FEW_ROUNDS, MAKING_ROUNDS, Columns, Combiner, make_columns
from planner.search.exact.plans import Assembler
from planner.search.exact.pool import Pool
from planner.search.exact.prices import Budget, Intervals, Priced
from planner.search.exact.settle import Settler
from planner.search.exact.stage_table import StageTable

# Beyond so many devices, fewer chains of a column are worked out and only the best sets of pipelines are priced.
MANY_DEVICES = 32
# Pipelines may end so much later than the best plan, by the tables, and still be looked at.
BEYOND = 1.02
# Up to so many devices all micro-batch sizes and more sets of pipelines are looked at.
_MANY_SETS_DEVICES = 64
_MOST_PIPELINES, _FEW_PIPELINES = 6, 2
# Micro-batch sizes of which columns are made, those whose chains price best.
_SIZES = 4


@dataclass(frozen=True)
class Proposal:
    """Sets of pipelines for one assumption of how many share a gradient, each with the time that it takes by the
    tables alone."""

    pool: Pool
    tables: Sequence[StageTable]
    priced: Priced
    budget: Budget
    assembler: Assembler
    settlers: dict[int, Settler]
    sets: list[tuple[float, list[Chain]]] = field(default_factory=list)


def add_sets(proposal: Proposal, *, every: bool, goal: float, tick: Callable[[], None]) -> Columns:
    """Add sets of pipelines that may end the batch before `goal`, of `every` shape or the promising ones; the columns
    that they are from."""
    priced, budget, settlers = proposal.priced, proposal.budget, proposal.settlers
    taken, rest = _whole_part(priced, budget)
    intervals = [Intervals.of(table) for table in proposal.tables] if every else _promising(priced, budget)
    columns = make_columns(
        intervals, priced.prices, choose_box(rest.counts), settlers, every=every, goal=goal
    )
    many = sum(budget.counts) > MANY_DEVICES
    columns.thorough = not many or budget.pipelines == 1
    few = sum(budget.counts) <= _MANY_SETS_DEVICES
    combiner = Combiner(
        columns,
        priced.prices,
        rest,
        taken,
        parts=many and not taken,
        rounds=MAKING_ROUNDS if few else FEW_ROUNDS,
        # What ends later is not priced.
        limit=goal if many else math.inf,
    )
    seen: set[tuple[object, ...]] = set()
    settled = [_settled(settlers[chain.micro_batch_size], chain, priced.prices.seconds) for chain in taken]
    most = min(_MOST_PIPELINES if few else _FEW_PIPELINES, budget.pipelines)
    for chains in combiner.sets(most=most, others=few):
        tick()
        # Smaller ones are put into nodes first: what is left between them suits a large one, not the reverse.
        chains = sorted(chains, key=lambda chain: (sum(chain.counts), chain.specs))
        key = tuple(chain.specs for chain in chains)
        if key in seen:
            continue
        seen.add(key)
        found = [*settled, *chains]
        seconds = proposal.assembler.end_seconds(found)
        proposal.sets.append((seconds, found))
        if many:
            combiner.limit = min(combiner.limit, seconds * BEYOND)
    return columns


def _settled(settler: Settler, chain: Chain, seconds: float) -> Chain:
    return settler.settled(chain, max(1, chain.pace.micro_batches(chain.pace.samples_within(seconds))))


def _promising(priced: Priced, budget: Budget) -> list[Intervals]:
    """The intervals of the micro-batch sizes with the best chains; of all sizes where devices are few."""
    if sum(budget.counts) <= _MANY_SETS_DEVICES:
        return priced.intervals
    order = sorted(range(len(priced.best)), key=lambda index: priced.best[index])[:_SIZES]
    return [priced.intervals[index] for index in sorted(order)]


def _whole_part(priced: Priced, budget: Budget) -> tuple[list[Chain], Budget]:
    """Whole pipelines of the linear program, as long as more than two would still be left to choose."""
    taken: list[Chain] = []
    left = np.array(budget.counts)
    amounts = priced.prices.amounts.copy()
    while math.prod(int(n) + 1 for n in left) > 20 * MOST_CHOSEN_CELLS and amounts.sum() > 3:
        index = int(np.argmax(amounts))
        if amounts[index] < 1:
            break
        chain = priced.pool.chains[index]
        taken.append(chain)
        amounts[index] -= 1
        left = left - np.array(chain.counts)
    return taken, Budget(tuple(int(n) for n in left), budget.samples, budget.pipelines - len(taken))
