"""Lower bound of the iteration time (design 5.2): no plan of the stated class has a smaller price.

Give every device of kind k the price lambda_k and every pipeline mu, such that the whole cluster costs no
more than the global batch. If no pipeline ends more samples within t than it costs, then no set of
pipelines ends the global batch within t. For pipelines of micro-batch m whose period lies in [P, P'], Eq. 1
gives

    samples <= m ((t - W - W') / P + 1),

with W the sum of stage seconds and W' what comes after the last backward (`bound_cells`), so none is worth
more than it costs before t = P ((g + mu) / m - 1), with g the least sum over stages of m T / P + lambda .
n, no stage above P', and W' m / P. The bound is the least t over all cells; the lowest cells are cut until
they are small.

Where the cluster is small enough, whole pipelines give more: for every count vector c, g - lambda . c
bounds W + W' and so the samples of its best pipeline, and a knapsack over count vectors bounds those of
every set of pipelines.

The seconds of gradients depend on how many pipelines share them, so numbers of pipelines are bounded range
by range. Pipelines with fewer micro-batches than stages hold fewer in flight: they have tables of their
own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from planner.search.exact.bound_cells import ROUNDS, Cells, Group, cut_together, stage_groups
from planner.search.exact.bound_columns import MOST_CELLS, Holding, WholePipelines
from planner.search.exact.bound_single import single_pipeline_seconds
from planner.search.exact.columns import Box
from planner.search.exact.priced_chains import PricedChains
from planner.search.exact.prices import Budget, DevicePrices, Intervals, find_prices, first_chains
from planner.search.exact.ranking import Ranking
from planner.search.exact.stage_table import FloatArray, StageTable, with_in_flight

RELAXATIONS = (
    "gradients: each device's own only, on the best links and with as many holders in a node as its TP groups leave"
    " room for, shared by no more pipelines than a plan must have",
    "optimizer and gathered parameters: of one stage at a time",
    "receiving: on the best link that a stage can have, whole or in slices",
    "recomputation: layers in parts, the fewest seconds that make a stage fit",
    "ZeRO: the kindest stage for each stage apart; over several pipelines the optimizer's state takes no memory",
    "fractions of pipelines, unless the cluster is small",
    "stages that mix device types: the best rows, and memory of one row",
    "periods and seconds after the last backward: rounded down by 0.3 %",
)

# Cells this close to the lowest are cut with it.
_NEAR = 1.01
# Up to so many devices it takes little to find prices that suit the bound's tables, this close, where fractions of
# pipelines are all that is bounded.
_SETTLED_DEVICES, _SETTLED = int(__import__("os").environ.get("SD", "64")), 1e-3
# Count vectors of the largest cluster for which the periods of a single pipeline are looked up by its devices.
_MOST_HELD = 1_200


def lower_bound(
    tables: Callable[[int], Sequence[StageTable]],
    budget: Budget,
    prices: Callable[[int], DevicePrices],
    *,
    upper: float,
    tick: Callable[[], None] = lambda: None,
) -> float:
    """The bound, at most `upper`, the price of a plan that is known.

    `tables(1)` are those of a single pipeline, `tables(2)` of any number from two up; `prices(n)` good prices
    for up to n pipelines: bad ones only make the bound worse. `tick` is called often.
    """
    box = Box(budget.counts, 1)
    small = box if box.cells <= MOST_CELLS else None
    held = box if box.cells <= _MOST_HELD else None
    found = single_pipeline_seconds(tables(1), budget, prices(1), upper=upper, box=held, tick=tick)
    if budget.pipelines > 1:
        several = list(tables(2))
        known = prices(budget.pipelines)
        if small is None and sum(budget.counts) <= _SETTLED_DEVICES:
            known = _settled_prices(several, known, budget, tick)
        part = Part(several, budget, known, found, whole=small is not None, tick=tick)
        seconds = part.fractional()
        if seconds < found and small is not None:
            seconds = max(seconds, part.whole(found, Holding(small)))
        found = min(found, seconds)
    return found


def _settled_prices(
    tables: Sequence[StageTable], known: DevicePrices, budget: Budget, tick: Callable[[], None]
) -> DevicePrices:
    """Those at which no chain of the bound's own tables is worth more than its devices."""
    plain = [table.without_covers() for table in tables]
    chains = first_chains(plain, budget)
    if not chains.chains:
        return known
    found = find_prices(plain, chains, budget, rounds=ROUNDS, close=_SETTLED, tick=tick)
    return found.prices if found else known


class Part:
    """The bound for plans of several pipelines."""

    def __init__(
        self,
        tables: Sequence[StageTable],
        budget: Budget,
        prices: DevicePrices,
        upper: float,
        *,
        whole: bool,
        tick: Callable[[], None],
    ) -> None:
        """`whole`: keep pipelines that cannot pay for themselves, which `whole` looks at too."""
        self.budget, self.prices, self.upper = budget, prices, upper
        self._tick = tick
        self._every = whole
        self._variants: dict[tuple[int, int], Variant] = {}
        self._tables = tables
        self.groups = list(self._groups(least_loss=-np.inf, most_loss=0.0))

    def fractional(self) -> float:
        """The least t over cells, which are cut until the lowest are small."""
        each = self.prices.per_pipeline
        for _ in range(ROUNDS):
            self._tick()
            best = self._lowest()
            if best >= self.upper:
                break
            found = [(group, group.seconds(each), group.wide(best)) for group in self.groups]
            if not any((wide & (seconds <= best)).any() for _, seconds, wide in found):
                break
            near = [(group, wide & (seconds <= best * _NEAR)) for group, seconds, wide in found]
            cut_together([(group, which) for group, which in near if which.any()], best)
        return self._lowest()

    def whole(self, upper: float, holding: Holding) -> float:
        """The largest time found within which no whole pipelines end the batch."""
        cheapest = min(float(self._variant(i, 1).costs.min()) for i in range(len(self._tables)))
        most = min(self.budget.pipelines, int(self.budget.samples / max(cheapest, 1e-9)))
        each = self.prices.per_pipeline
        share = max(float(group.gains(upper, each).max(initial=0.0)) for group in self.groups)
        few = self._groups(least_loss=0.0, most_loss=share * self.budget.samples)
        search = WholePipelines(
            [*self.groups, *few], holding, self.prices, self.budget, most_pipelines=most, upper=upper
        )
        return search.least_seconds(max(self._lowest(), upper * 1e-3), upper, tick=self._tick)

    def _lowest(self) -> float:
        each = self.prices.per_pipeline
        return min(
            (float(group.seconds(each).min(initial=self.upper)) for group in self.groups),
            default=self.upper,
        )

    def _groups(self, *, least_loss: float, most_loss: float) -> Iterator[Group]:
        """By number of stages, and by number of micro-batches where pipelines have fewer than stages.

        Those whose pipelines cost so many samples more than they can end, above the least and up to the most.
        """
        for index, table in enumerate(self._tables):
            cheapest = float(self._variant(index, 1).costs.min())
            for stages in stage_groups(table.max_stages):
                for in_flight, micro_batches in _micro_batch_ranges(stages[1]):
                    ended = table.micro_batch_size * micro_batches
                    which = slice(stages[0] - 1, stages[1])
                    # One micro-batch in flight holds the model on the fewest devices.
                    if float(self._variant(index, 1).costs[which].min()) - ended > most_loss:
                        continue
                    if in_flight > 1 and not self._every:
                        # Most have too few micro-batches for their stages even if these held but one in flight.
                        loosest = self._group(self._variant(index, 1), stages, micro_batches, 1e-9)
                        if (loosest.seconds(self.prices.per_pipeline) >= self.upper).all():
                            continue
                    variant = self._variant(index, in_flight)
                    loss = max(float(variant.costs[which].min()) - ended, -1e30)
                    if least_loss < loss <= most_loss and len(variant.cells):
                        yield self._group(variant, stages, micro_batches, max(cheapest, 1e-9))

    def _group(
        self, variant: Variant, stages: tuple[int, int], micro_batches: float, cheapest: float
    ) -> Group:
        table, cells = variant.table, variant.cells
        values = variant.values[:, stages[0] - 1 : stages[1]]
        if not self._every:
            each = self.prices.per_pipeline
            seconds = cells.low * ((values.min(axis=1) + each) / table.micro_batch_size - 1)
            cells, values = cells.chosen(seconds < self.upper), values[seconds < self.upper]
        return Group(table, variant.ranking, stages, cells, values, micro_batches, cheapest)

    def _variant(self, index: int, in_flight: int) -> Variant:
        key = (index, in_flight)
        if key not in self._variants:
            self._tick()
            table = self._tables[index]
            few = with_in_flight(table, in_flight) if in_flight else table
            self._variants[key] = Variant.of(few, self.prices, self.budget, self.upper)
        return self._variants[key]


@dataclass(frozen=True)
class Variant:
    """A table with so many micro-batches in flight at most, and what chains of it cost.

    `values` are g by cell and number of stages with only the first stage's gradients, `costs` the price of
    the cheapest devices that hold the model by number of stages.
    """

    table: StageTable
    ranking: Ranking
    cells: Cells
    values: FloatArray
    costs: FloatArray

    @classmethod
    def of(cls, table: StageTable, prices: DevicePrices, budget: Budget, upper: float) -> Variant:
        held = Intervals.of(table).below(upper, prices).affordable(prices, budget)
        ranking = Ranking(table, table.cost(prices.per_device))
        # At an endless pace seconds cost nothing.
        free = PricedChains(
            table, prices.per_device, paces=np.array([1e30]), limits=np.array([np.inf]), ranking=ranking
        )
        values = np.zeros((0, table.max_stages))
        if held.low.size:
            values = held.priced(prices, below=upper, ranking=ranking).values
        useful = np.isfinite(values).any(axis=1)
        count = int(useful.sum())
        cells = Cells(held.low[useful], held.high[useful], np.zeros(count), np.full(count, np.inf))
        return cls(table, ranking, cells, values[useful], free.values[0] + prices.per_pipeline)


def _micro_batch_ranges(most_stages: int) -> Iterator[tuple[int, float]]:
    """Ranges of micro-batches for pipelines of up to so many stages: (fewest, most). 0: as many or more; then
    fewer, which hold no more in flight."""
    yield 0, np.inf
    least = 1
    while least < most_stages:
        yield least, min(2 * least, most_stages) - 1
        least *= 2
