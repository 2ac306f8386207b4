"""What the exact solver found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from planner.cost.price import iteration_seconds
from planner.plan import Plan
from planner.search.exact.pool import Pool
from planner.search.exact.prices import DevicePrices, first_prices, solve_prices
from planner.search.exact.proposals import Proposal
from planner.search.exact.stage_table import FloatArray


@dataclass(frozen=True)
class Solution:
    """The best plan, and what the search for it learned about the worth of devices."""

    plan: Plan
    proposals: Sequence[Proposal]
    """Of one pool, each for another number of pipelines that share a gradient."""

    @property
    def seconds(self) -> float:
        """The plan's price."""
        return iteration_seconds(self.plan)

    def prices_for(self, pool: Pool) -> Callable[[int], DevicePrices]:
        """Good prices of another pool of the same cluster, by how many pipelines there may be."""

        def prices(pipelines: int) -> DevicePrices:
            # Chains that were found for one pipeline, which shares gradients with none, price several badly.
            least = pipelines if pipelines > 1 else 0
            known = min(self.proposals, key=lambda one: abs(one.budget.pipelines - least))
            budget = replace(known.budget, pipelines=pipelines)
            guess = first_prices(known.tables, known.budget)
            found = solve_prices(known.priced.pool, budget, guess=guess)
            return replace(found, per_device=_by_type(found.per_device, known.pool, pool))

        return prices


def _by_type(prices: FloatArray, known: Pool, wanted: Pool) -> FloatArray:
    """Mean prices of each type's devices, for the kinds of another pool."""
    found = []
    for kind in wanted.kinds:
        same = [i for i, other in enumerate(known.kinds) if other.type == kind.type]
        counts = [known.kinds[i].count for i in same]
        found.append(float(np.average(prices[same], weights=counts)))
    return np.array(found)
