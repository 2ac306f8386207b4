"""What a device of each kind is worth: column generation over chains, with fractions of pipelines.

A linear program over the chains found so far prices the devices; the best chains for these prices join it;
until no chain is worth more than its devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from planner.search.exact.chains import Chain, make_chain
from planner.search.exact.linear_program import LinearSolution, linear_program
from planner.search.exact.pool import Vector
from planner.search.exact.priced_chains import PricedChains, least_layer, least_seconds
from planner.search.exact.ranking import Ranking
from planner.search.exact.role import Role
from planner.search.exact.stage_table import FloatArray, StageTable

# Ratio between the ends of an interval of periods: at first, and where no further cut pays.
COARSE, FINE = 1.07, 1.005
# An interval is cut in so many.
_PARTS = 4
# Intervals whose best chain ends this much later than the linear program's time are not looked at again.
_NEAR = 1.004
# In the first rounds prices are rough.
_ROUGH, _ROUGH_ROUNDS = 1.01, 2
# Whole pipelines may be that much later than fractions, and than the best plan.
_WIDE, _BEYOND = 1.1, 1.04
# Of the first chains, those by this share later than the best are of no use.
_FIRST = 0.2
# Up to so many devices the first chains are those of several prices.
_FEW_DEVICES = 32
# Intervals that are looked at before all others, to know what that is.
_GUIDES = 4
# Rounds in a row that gain less than this share, after which no more follow.
_LITTLE, _IDLE = 1e-5, 1
# By how much fractions of chains may then still be quicker than those known.
_CONVERGED = 1e-3
# Intervals of a table whose chains are added, or that are cut, in one round: the lowest.
_MOST_CELLS = 10


@dataclass(frozen=True)
class Budget:
    """What all pipelines share: devices by kind, samples to end, and how many pipelines there may be."""

    counts: Vector
    samples: int
    pipelines: int

    @property
    def limits(self) -> FloatArray:
        return np.array([*self.counts, self.pipelines], dtype=float)


@dataclass
class ChainPool:
    """Chains found so far, each once."""

    chains: list[Chain] = field(default_factory=list)
    _seen: set[tuple[object, ...]] = field(default_factory=set)

    def add(self, chain: Chain) -> bool:
        """Whether the chain is new."""
        pace = chain.pace
        key = (chain.micro_batch_size, chain.counts, pace.fill_seconds, pace.period_seconds)
        if key in self._seen:
            return False
        self._seen.add(key)
        self.chains.append(chain)
        return True

    def with_tables(self, tables: Sequence[StageTable]) -> ChainPool:
        """The same chains with the figures of other tables; without those that these do not have or that do not
        fit."""
        known = {
            (table.micro_batch_size, choice): (table, index)
            for table in tables
            for index, choice in enumerate(table.choices)
        }
        pool = ChainPool()
        for chain in self.chains:
            keys = [(chain.micro_batch_size, stage.choice) for stage in chain.stages]
            if all(key in known for key in keys):
                specs = [(known[key][1], stage.layers) for key, stage in zip(keys, chain.stages, strict=True)]
                moved = make_chain(known[keys[0]][0], specs)
                if np.isfinite(moved.pace.fill_seconds):
                    pool.add(moved)
        return pool

    def figures(self) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray]:
        """(counts and one pipeline, micro-batch sizes, fills, periods)."""
        return (
            np.array([(*chain.counts, 1) for chain in self.chains], dtype=float),
            np.array([chain.micro_batch_size for chain in self.chains], dtype=float),
            np.array([chain.pace.fill_seconds for chain in self.chains]),
            np.array([chain.pace.period_seconds for chain in self.chains]),
        )


@dataclass(frozen=True)
class DevicePrices:
    """At `seconds`, all devices and pipelines at these prices (samples each) are worth the global batch.

    `amounts` are the fractions of the pool's chains.
    """

    seconds: float
    per_device: FloatArray
    per_pipeline: float
    amounts: FloatArray


@dataclass
class Intervals:
    """Intervals of periods of one table that are still worth a look."""

    table: StageTable
    low: FloatArray
    high: FloatArray

    @classmethod
    def of(cls, table: StageTable, *, ratio: float = COARSE) -> Intervals:
        """All periods that any chain of the table can have."""
        edges = _period_edges(table, ratio)
        return cls(table, edges[:-1], edges[1:])

    def least(self, prices: DevicePrices) -> FloatArray:
        """No chain of an interval ends what it costs sooner."""
        return least_seconds(
            self.table,
            self.table.cost(prices.per_device),
            paces=self.low,
            limits=self.high,
            each=prices.per_pipeline,
        )

    def below(self, seconds: float, prices: DevicePrices) -> Intervals:
        """Without those whose best chain is known to end what it costs no sooner than that."""
        return self._kept(self.least(prices) < seconds)

    def affordable(self, prices: DevicePrices, budget: Budget) -> Intervals:
        """Without those whose every chain takes more than all devices of the budget."""
        counts, kept = np.array(budget.counts), np.ones(len(self.low), dtype=bool)
        # What holds at the prices holds at any others too.
        for tilt in (np.ones(len(counts)), *(1 + np.eye(len(counts)))):
            price = prices.per_device * tilt
            layer = least_layer(
                # At an endless pace seconds cost nothing.
                self.table,
                self.table.cost(price),
                paces=np.full(len(self.low), np.inf),
                limits=self.high,
            )
            kept &= layer * self.table.layers <= float(price @ counts) * (1 + 1e-9)
        return self._kept(kept)

    def _kept(self, which: npt.NDArray[np.bool_]) -> Intervals:
        return Intervals(self.table, self.low[which], self.high[which])

    def lowest(self, most: int, prices: DevicePrices) -> Intervals:
        """So many of them at most, the most promising."""
        which = np.sort(np.argsort(self.least(prices), kind="stable")[:most])
        return Intervals(self.table, self.low[which], self.high[which])

    def priced(
        self,
        prices: DevicePrices,
        *,
        below: float = np.inf,
        least: bool = False,
        ranking: Ranking | None = None,
    ) -> PricedChains:
        """The best chains; those that end what they cost no sooner than `below` need not be known, nor with `least` any
        but the best of each interval."""
        enough = self.table.micro_batch_size * (below / self.low + 1) - prices.per_pipeline
        return PricedChains(
            self.table,
            prices.per_device,
            paces=self.low,
            limits=self.high,
            each=prices.per_pipeline,
            enough=enough if np.isfinite(below) else None,
            least=least,
            ranking=ranking,
        )

    def kept(self, which: npt.NDArray[np.bool_], split: npt.NDArray[np.bool_]) -> Intervals:
        """Some of the intervals, some of these cut in `_PARTS`."""
        whole, cut = which & ~split, which & split
        edges = np.geomspace(self.low[cut], self.high[cut], _PARTS + 1)
        low = np.concatenate([self.low[whole], edges[:-1].ravel()])
        high = np.concatenate([self.high[whole], edges[1:].ravel()])
        order = np.argsort(low, kind="stable")
        return Intervals(self.table, low[order], high[order])


@dataclass(frozen=True)
class Priced:
    """Prices, the chains seen on the way, and intervals that may hold chains worth more than their devices, with the
    time of the best chain of each table."""

    prices: DevicePrices
    pool: ChainPool
    intervals: list[Intervals]
    best: list[float]

    def least(self, which: Callable[[StageTable], bool]) -> float:
        """The time of the best chain of some tables."""
        found = zip(self.intervals, self.best, strict=True)
        return min((seconds for held, seconds in found if which(held.table)), default=np.inf)


def first_chains(tables: Sequence[StageTable], budget: Budget) -> ChainPool:
    """The best chains at prices in proportion to speed, and among few devices or several kinds with each kind dearer in
    turn; may be empty."""
    pool = ChainPool()
    guess = first_prices(tables, budget)
    # There not all chains that matter are near those prices.
    several = sum(budget.counts) <= _FEW_DEVICES or len(guess) > 2
    for tilt in (np.ones(len(guess)), *(1 + 0.5 * np.eye(len(guess)) if several else ())):
        prices = DevicePrices(0.0, guess * tilt, 0.0, np.empty(0))
        limit = np.inf
        # The most promising first: what is far above its chains need not be known of the others.
        whole = [Intervals.of(table, ratio=COARSE**2) for table in tables]
        whole.sort(key=lambda held: float(held.least(prices).min(initial=np.inf)))
        for held in [*(held.lowest(_GUIDES, prices) for held in whole[:1]), *whole]:
            near = held.below(limit, prices).affordable(prices, budget)
            if near.low.size:
                priced = near.priced(prices, below=limit, least=True)
                best = float(priced.seconds.min(initial=np.inf))
                limit = min(limit, best + _FIRST * abs(best))
                _add_best(priced, pool, below=limit)
    return pool


def any_table(table: StageTable) -> bool:
    """Every table matters."""
    return True


def find_prices(
    tables: Sequence[StageTable],
    pool: ChainPool,
    budget: Budget,
    *,
    rounds: int,
    close: float,
    goal: float = np.inf,
    which: Callable[[StageTable], bool] = any_table,
    tick: Callable[[], None] = lambda: None,
) -> Priced | None:
    """Prices at which no chain is worth more than its devices by a share `close`; the pool grows on the
    way. None once fractions of chains are found to take no less than `goal`, or all chains of the tables `which`
    matter."""
    intervals = [Intervals.of(table) for table in tables]
    guess = first_prices(tables, budget)
    prices = solve_prices(pool, budget, guess=guess)
    idle = 0
    for number in range(rounds):
        near = _ROUGH if number < _ROUGH_ROUNDS else _NEAR
        limit = min(prices.seconds * near, goal * _BEYOND)
        best, mattering, new, nearer = np.inf, np.inf, 0, []
        for whole in intervals:
            tick()
            held = whole.below(limit, prices).affordable(prices, budget)
            if not held.low.size:
                continue
            priced = held.priced(prices, below=limit, least=True)
            least = priced.seconds.min(axis=1, initial=np.inf)
            best = min(best, float(least.min(initial=np.inf)))
            if which(whole.table):
                mattering = min(mattering, float(least.min(initial=np.inf)))
            new += _add_best(priced, pool, below=min(prices.seconds, limit))
            split = (least < prices.seconds) & (held.high / held.low > FINE)
            split[np.argsort(least, kind="stable")[_MOST_CELLS:]] = False
            nearer.append(held.kept(least < limit, split))
        intervals = [held for held in nearer if held.low.size]
        if min(mattering, limit) >= goal:
            return None
        before = prices.seconds
        if new:
            prices = solve_prices(pool, budget, guess=guess)
        idle = 0 if prices.seconds < before * (1 - _LITTLE) else idle + 1
        if idle == _IDLE or best >= prices.seconds * (1 - close):
            break
    if prices.seconds * (1 - (_CONVERGED if idle == _IDLE else close)) >= goal:
        return None
    found = list(_promising(tables, prices, budget, min(prices.seconds * _WIDE, goal * _BEYOND)))
    return Priced(prices, pool, [held for held, _ in found], [best for _, best in found])


def _promising(
    tables: Sequence[StageTable], prices: DevicePrices, budget: Budget, limit: float
) -> Iterator[tuple[Intervals, float]]:
    """Wide intervals, since whole pipelines may be far from fractions of the best, and the time of the best chain."""
    for table in tables:
        held = Intervals.of(table).below(limit, prices).affordable(prices, budget)
        if held.low.size:
            least = held.priced(prices, below=limit, least=True).seconds.min(axis=1, initial=np.inf)
            near = least < limit
            if near.any():
                yield held.kept(near, np.zeros_like(near)), float(least.min())


def first_prices(tables: Sequence[StageTable], budget: Budget) -> FloatArray:
    """In proportion to the speed of the kinds, a layer's seconds on the best choice of each."""
    speeds = np.zeros(len(budget.counts))
    for table in tables:
        for choice, vector in enumerate(table.counts):
            kinds = np.flatnonzero(vector)
            if len(kinds) == 1 and np.isfinite(table.least[:, choice, 1:]).any():
                layer = table.plain[Role.MIDDLE, choice, 1] - table.plain[Role.MIDDLE, choice, 0]
                speed = table.micro_batch_size / max(layer, 1e-30) / vector[kinds[0]]
                speeds[kinds[0]] = max(speeds[kinds[0]], speed)
    speeds = np.maximum(speeds, 1e-6 * max(speeds.max(), 1e-30))
    found: FloatArray = speeds * budget.samples / float(speeds @ np.array(budget.counts))
    return found


def _period_edges(table: StageTable, ratio: float) -> FloatArray:
    """Geometric edges from the least seconds of any stage to the most; every chain's period lies between."""
    low, high = table.least_period, table.most_seconds
    if not np.isfinite(low) or high <= 0:
        return np.empty(1)
    low = max(low, high * 1e-6)
    steps = max(1, int(np.ceil(np.log(high / low) / np.log(ratio))))
    edges: FloatArray = np.geomspace(low, high, steps + 1)
    # A hair off, so that rounding puts no stage outside.
    edges[0] *= 1 - 1e-12
    edges[1:] *= 1 + 1e-12
    return edges


def _add_best(found: PricedChains, pool: ChainPool, *, below: float) -> int:
    """Add the best chains of the cells that are lowest, if below; how many are new."""
    seconds = found.seconds
    least = seconds.min(axis=1, initial=np.inf)
    cells = [int(cell) for cell in np.argsort(least, kind="stable")[:_MOST_CELLS] if least[cell] < below]
    return sum(pool.add(found.trace(cell, int(seconds[cell].argmin()) + 1)) for cell in cells)


def solve_prices(pool: ChainPool, budget: Budget, *, guess: FloatArray) -> DevicePrices:
    """The least time at which fractions of the pool's chains end the samples, and the prices there.

    The most samples that fractions end grow with time and are convex in it, so Newton's steps from above stay
    above and converge. `guess` stands in where all devices are worth nothing.
    """
    vectors, sizes, fills, periods = pool.figures()
    # One chain alone, as often as it goes: a time that is enough.
    copies = 1 / (vectors / np.maximum(budget.limits, 1e-9)).max(axis=1)
    seconds = float((fills + periods * np.maximum(0, budget.samples / (sizes * copies) - 1)).min())
    for _ in range(50):
        worth = np.where(seconds >= fills, sizes * ((seconds - fills) / periods + 1), 0.0)
        solution = linear_program(vectors, worth, budget.limits)
        slope = float(solution.amounts @ np.where(worth > 0, sizes / periods, 0.0))
        step = (solution.worth - budget.samples) / slope if slope > 0 else 0.0
        if step <= seconds * 1e-7:
            break
        seconds -= step
    return _normalized(seconds, solution, budget, guess)


def _normalized(seconds: float, solution: LinearSolution, budget: Budget, guess: FloatArray) -> DevicePrices:
    """Prices at which the whole budget is worth the samples exactly."""
    prices = solution.prices
    total = float(prices @ budget.limits)
    if total <= 0:
        prices = np.append(guess, 0.0)
        total = float(prices @ budget.limits)
    prices = prices * (budget.samples / total)
    return DevicePrices(seconds, prices[:-1], float(prices[-1]), solution.amounts)
