"""The three phases of paper 4.2.3 on one grid of devices: stages, local batches, refinement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from planner.cost.models import CostModels
from planner.search.cache import PipelineCache
from planner.search.choice import PipelineChoice, SearchCounts
from planner.search.combine import Combination, combine, least_end_seconds
from planner.search.device_groups import Composition, DeviceGrid, compositions, device_groups
from planner.search.savers import PLAIN, Savers
from planner.search.stage_search import StageSearch

# Combinations of least estimated time that are priced in full (Eq. 5 with gradient blocks).
MOST_PRICED = 150
# Stages seen of one pipeline at one micro-batch size where the grid is coarse; else all are.
MOST_COARSE_STAGES = 3000
# Priced combinations whose stages are searched again with the samples they were assigned.
REFINED = 3


@dataclass(frozen=True)
class Priced:
    """A combination with the price of the plan it makes."""

    combination: Combination
    seconds: float


class GridSearch:
    """Finds the best combination of pipelines on a grid. `price` prices one in full; inf if it is invalid."""

    def __init__(
        self,
        *,
        grid: DeviceGrid,
        models: CostModels,
        global_batch_size: int,
        equal_batches: bool,
        price: Callable[[Combination], float],
        counts: SearchCounts,
        tick: Callable[[], None],
        savers: Savers = PLAIN,
    ) -> None:
        self._grid = grid
        self._batch = global_batch_size
        self._equal = equal_batches
        self._price = price
        self._counts = counts
        self._stages = StageSearch(
            models=models,
            grid=grid,
            micro_batch_sizes=micro_batch_sizes(grid, global_batch_size),
            counts=counts,
            tick=tick,
            most_stages=MOST_COARSE_STAGES if max(grid.steps) > 1 else None,
            savers=savers,
        )
        self._cache = PipelineCache(self._stages)
        self._fewest_pipelines = savers.pipelines
        self._first: dict[Composition, list[PipelineChoice]] = {}

    def run(self) -> Priced | None:
        """The best combination; None if no pipeline fits its devices."""
        # Of larger ones there are not enough devices left for the other pipelines that are counted on.
        most_units = self._grid.units + 1 - self._fewest_pipelines
        for composition in compositions(self._grid):
            if self._grid.units_of(composition) > most_units:
                continue
            self._first[composition] = self._cache.best(composition, self._likely_samples(composition))
        usable = {composition for composition, choices in self._first.items() if choices}
        if not usable:
            return None
        priced = self._priced(self._promising(usable))
        for candidate in sorted(priced, key=lambda one: one.seconds)[:REFINED]:
            priced.append(self._refined(candidate))
        return min(priced, key=lambda one: one.seconds, default=None)

    def _likely_samples(self, composition: Composition) -> list[int]:
        """Numbers of samples to optimise a pipeline for before it is assigned any.

        The paper takes the whole global batch; a pipeline's part of the cluster's speed and the mean of
        the two bring the first phase closer to what the second will assign.
        """
        size = self._stages.least_known_size()
        rates = [self._stages.rate(devices, size) for devices in (composition, self._grid.nodes)]
        likely = max(1, math.ceil(self._batch * rates[0] / rates[1]))
        return sorted({likely, math.isqrt(likely * self._batch), self._batch})

    def _promising(self, usable: set[Composition]) -> list[Combination]:
        """Combinations that could still be the best, by estimated price."""
        groups = [
            (least_end_seconds([self._first[c] for c in group], self._batch), group)
            for group in device_groups(
                self._grid,
                usable=usable.__contains__,
                most_pipelines=min(self._grid.units, self._batch),
            )
            if len(group) >= self._fewest_pipelines
        ]
        groups.sort()
        self._counts.device_groups += len(groups)
        best_price = best_estimate = math.inf
        found: list[tuple[float, Combination]] = []
        for bound, group in groups:
            if bound >= best_price:
                break
            for combination in combine(
                group,
                [self._first[c] for c in group],
                global_batch_size=self._batch,
                equal=self._equal,
                every=self._fewest_pipelines > 1,
            ):
                found.append((combination.estimated_seconds, combination))
                if combination.estimated_seconds < best_estimate:
                    best_estimate = combination.estimated_seconds
                    best_price = min(best_price, self._price(combination))
        found.sort(key=lambda one: one[0])
        return [combination for _, combination in found]

    def _priced(self, combinations: Iterable[Combination]) -> list[Priced]:
        """Full prices of the first few combinations, but for those whose end alone is later than a price."""
        priced: list[Priced] = []
        best = math.inf
        for combination in combinations:
            if len(priced) == MOST_PRICED:
                break
            if combination.end_seconds < best:
                seconds = self._price(combination)
                if seconds < math.inf:
                    priced.append(Priced(combination, seconds))
                    best = min(best, seconds)
        self._counts.device_groups_priced += len(priced)
        return priced

    def _refined(self, candidate: Priced) -> Priced:
        """Search every pipeline's stages again with its samples, and balance again, while that helps."""
        while True:
            combination = candidate.combination
            options = [
                list(dict.fromkeys([choice, *self._cache.best(composition, [samples])]))
                for composition, choice, samples in zip(
                    combination.compositions, combination.choices, combination.samples, strict=True
                )
            ]
            better = [
                Priced(other, self._price(other))
                for other in combine(
                    combination.compositions, options, global_batch_size=self._batch, equal=self._equal
                )
                if other != combination
            ]
            best = min(better, key=lambda one: one.seconds, default=candidate)
            if best.seconds >= candidate.seconds:
                return candidate
            candidate = best


def micro_batch_sizes(grid: DeviceGrid, global_batch_size: int) -> list[int]:
    """Sizes to try: every small one, then powers of two times 1, 3, 5 and 7, up to twice the devices."""
    largest = min(global_batch_size, max(8, 2 * grid.devices), 64)
    return [m for m in range(1, largest + 1) if m <= 8 or m in _round_sizes(largest)]


def _round_sizes(largest: int) -> Iterator[int]:
    for odd in (1, 3, 5, 7):
        size = odd
        while size <= largest:
            yield size
            size *= 2
