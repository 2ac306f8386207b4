"""The best chain for given prices of devices: a min-plus dynamic program over positions and layers.

Give a device of kind k the price lambda_k in samples. A chain of micro-batch m, period at most P and fill W
(gradients and optimizer of its first stage included) ends m ((t - W) / P + 1) samples within t, for devices
worth lambda . n. So it ends what they are worth at t = P (g / m - 1) with g the sum over its stages of m T
/ P + lambda . n: a sum over stages, whatever the number of devices and of their kinds. A pipeline may have
a price of its own (`each`), where their number is limited.
"""

from __future__ import annotations

import numpy as np

from planner.search.exact.chains import Chain, make_chain
from planner.search.exact.envelope import undominated
from planner.search.exact.ranking import Ranked, Ranking
from planner.search.exact.role import Role, role_of
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable

_CHUNK = 64
# Of so few rows all sums of a convolution are worked out at once.
_FEW_ROWS = 32
# Stands for infinite where that is multiplied by none.
_MUCH = 1e300
# Cells that are done are left out once they are this share.
_DONE = 0.2


class PricedChains:
    """The least g of every number of stages, for cells i: no stage above `limits[i]`, priced at `paces[i]`.

    `values[i, S - 1]` is infinite where no S stages hold the model. Where it is no less than `enough[i]` it may
    be a lower bound that is no less either. Without `enough` it is one from where more stages can only cost more
    than fewer, no less than the least value. Beyond `known` stages it is one in every cell.
    """

    def __init__(
        self,
        table: StageTable,
        prices: FloatArray,
        *,
        paces: FloatArray,
        limits: FloatArray,
        each: float = 0.0,
        enough: FloatArray | None = None,
        least: bool = False,
        ranking: Ranking | None = None,
    ) -> None:
        """With `least` only the least value of each cell is asked for: any other may be a lower bound that is no less.
        `ranking` is that of the table at these prices, if there is one already."""
        self.table = table
        self.paces = paces
        self.each = each
        self._weights = _Weights(ranking or Ranking(table, table.cost(prices)), paces, limits)
        self.values = np.full((len(paces), table.max_stages), np.inf)
        self.known = table.max_stages
        # What the stages behind cost, what one more in the middle does, and the row of each cell.
        self._held: list[tuple[FloatArray, FloatArray, IntArray]] = []
        self._run(enough, least)

    @property
    def seconds(self) -> FloatArray:
        """t by cell and number of stages: when the best such chain ends what its devices are worth."""
        found: FloatArray = self.paces[:, None] * (
            (self.values + self.each) / self.table.micro_batch_size - 1
        )
        return found

    def _run(self, enough: FloatArray | None, least_only: bool) -> None:
        layers, last = self.table.layers, self.table.max_stages
        self.values[:, 0] = self._weights.of(Role.SINGLE, 1)[:, layers]
        held, cells = self._weights.of(Role.LAST, 1), np.arange(len(self.paces))
        if last > 1:
            # Bounds of what a first stage costs: what it costs at an earlier position.
            first = self._weights.of(Role.FIRST, 2).copy()
            on_first = _least_share(first)
        # What each layer that is left costs at least.
        each, bounded = np.zeros(len(self.paces)), least_only or enough is not None
        if bounded:
            each += np.minimum(self._weights.least_layer(), _MUCH)
        left = np.arange(layers, -1, -1)
        for position in range(2, last + 1):
            # What more stages cost only grows, so a cell whose every state costs enough is done.
            costs = (held + each[cells, None] * left).min(axis=1)
            wanted = np.full(len(cells), np.inf) if enough is None else enough[cells]
            best = self.values[cells].min(axis=1)
            if least_only:
                wanted = np.minimum(wanted, best)
            done = costs >= (best if enough is None else wanted)
            if done.all() or (bounded and done.sum() > _DONE * len(cells)):
                self.values[cells[done], position - 1 :] = costs[done, None]
                held, cells, wanted = held[~done], cells[~done], wanted[~done]
            if not len(cells):
                self.known = position - 1
                break
            rows = np.full(len(self.paces), -1)
            rows[cells] = np.arange(len(cells))
            self.values[cells, position - 1] = self._closed(position, held, cells, first, wanted)
            middle = self._weights.of(Role.MIDDLE, position, cells)
            self._held.append((held, middle, rows))
            if position < last:
                held = join(held, middle)
                if bounded:
                    # Of stages further ahead, which hold more micro-batches in flight.
                    each[cells] = np.maximum(each[cells], np.minimum(_least_share(middle), on_first[cells]))

    def _closed(
        self, position: int, held: FloatArray, cells: IntArray, first: FloatArray, wanted: FloatArray
    ) -> FloatArray:
        """Values by cell with the first stage at this position; what is no less than is wanted need not be exact."""
        behind = held[:, ::-1]
        values: FloatArray = (behind + first[cells]).min(axis=1)
        near = np.flatnonzero(values < wanted)
        if near.size:
            first[cells[near]] = self._weights.of(Role.FIRST, position, cells[near])
            values[near] = (behind[near] + first[cells[near]]).min(axis=1)
        return values

    def trace(self, cell: int, stages: int) -> Chain:
        """The chain that reaches a finite value."""
        found: list[tuple[int, int]] = []
        left = self.table.layers
        for position in range(stages, 0, -1):
            role = role_of(position=position, stages=stages)
            taken = left
            if position > 1:
                held, middle, rows = self._held[position - 2]
                weights = middle[rows[cell]]
                if role is Role.FIRST:
                    weights = self._weights.of(role, position, np.array([cell]))[0]
                taken = int(np.argmin(held[rows[cell], left::-1] + weights[: left + 1]))
            found.append((self._weights.best(role, position, cell, taken), taken))
            left -= taken
        return make_chain(self.table, found)


def _least_share(weights: FloatArray) -> FloatArray:
    """What a layer of a stage costs at least: by cell."""
    found: FloatArray = (weights[:, 1:] / np.arange(1, weights.shape[1])).min(axis=1, initial=_MUCH)
    return found


def least_seconds(
    table: StageTable, cost: FloatArray, *, paces: FloatArray, limits: FloatArray, each: float
) -> FloatArray:
    """A bound of `PricedChains.seconds` by cell that takes no program: every layer on the stage that does a
    layer cheapest. `cost` is the price of each choice of the table."""
    best = least_layer(table, cost, paces=paces, limits=limits)
    found: FloatArray = paces * ((best * table.layers + each) / table.micro_batch_size - 1)
    return found


def least_layer(table: StageTable, cost: FloatArray, *, paces: FloatArray, limits: FloatArray) -> FloatArray:
    """What a layer costs at least by cell, as part of any stage with as few micro-batches in flight as can be."""
    rate = table.micro_batch_size / paces
    layers = np.arange(1, table.layers + 1)
    best = np.full(len(paces), np.inf)
    order = np.argsort(cost, kind="stable")
    order = order[np.isfinite(cost[order])]
    if not order.size:
        return best
    # What a cheaper choice beats is the least of no cell.
    ranked = undominated(table.least_anywhere[order])
    seconds = np.take_along_axis(table.least_anywhere[order], ranked, axis=0)
    fits = np.isfinite(seconds)
    price = np.where(fits, cost[order][ranked] / layers, np.inf)
    each_layer = np.where(fits, seconds, 0.0) / layers
    for start in range(0, len(paces), _CHUNK):
        cells = slice(start, start + _CHUNK)
        sums = each_layer[:, None] * rate[cells, None] + price[:, None]
        sums[seconds[:, None] > limits[cells, None]] = np.inf
        best[cells] = sums.min(axis=(0, 2), initial=np.inf)
    return best


def join(behind: FloatArray, ahead: FloatArray) -> FloatArray:
    """Min-plus convolution over the last axis, row by row."""
    counts = np.flatnonzero(np.isfinite(ahead).any(axis=0))
    rows, size = behind.shape
    # Rows last, so that numpy's inner loops run over memory in order.
    source, added = behind.T.copy(), ahead.T[counts, None].copy()
    if rows <= _FEW_ROWS and counts.size:
        padded = np.full((2 * size - 1, rows), np.inf)
        padded[size - 1 :] = source
        # [count, l]: what is behind at l - count layers.
        places = size - 1 - counts[:, None] + np.arange(size)
        return (padded[places] + added).min(axis=0).T
    result = np.full_like(source, np.inf)
    for count, line in zip(counts, added, strict=True):
        target = result[count:]
        np.minimum(target, source[: size - count] + line, out=target)
    return result.T


class _Weights:
    """What a stage of a cell costs, by layers, the best choice taken."""

    def __init__(self, ranking: Ranking, paces: FloatArray, limits: FloatArray) -> None:
        self._ranking, self._table = ranking, ranking.table
        table = ranking.table
        self._rate = table.micro_batch_size / paces
        self._paces, self._limits = paces, limits
        # No cell has room for more layers than this.
        within = table.least_by_layers <= limits.max(initial=0.0)
        self.most = int(np.flatnonzero(within).max(initial=0))
        self._known: dict[tuple[Role, int], FloatArray] = {}

    def least_layer(self) -> FloatArray:
        """By cell, infinite where no stage holds any."""
        return least_layer(self._table, self._ranking.cost, paces=self._paces, limits=self._limits)

    def of(self, role: Role, position: int, cells: IntArray | None = None) -> FloatArray:
        """[cell, layers], of some cells or all; infinite where no choice fits in memory and within the limit."""
        key = (role, min(position, self._table.in_flight))
        if key in self._known:
            return self._known[key] if cells is None else self._known[key][cells]
        every = cells is None or key[1] == self._table.in_flight
        found = self._least(role, position, np.arange(len(self._rate)) if every or cells is None else cells)
        if not every:
            return found
        self._known[key] = found
        return found if cells is None else found[cells]

    def _least(self, role: Role, position: int, cells: IntArray) -> FloatArray:
        found = np.full((len(cells), self._table.layers + 1), np.inf)
        ranked, spent = self._ranked(role, position)
        weights = spent[:, None] * self._rate[cells, None] + ranked.cost[:, None]
        np.putmask(weights, ranked.seconds[:, None] > self._limits[cells, None], np.inf)
        weights.min(axis=0, initial=np.inf, out=found[:, : self.most + 1])
        return found

    def best(self, role: Role, position: int, cell: int, layers: int) -> int:
        """The choice that costs least with so many layers, of equal ones that of the cheapest devices."""
        ranked, spent = self._ranked(role, position)
        weights = spent[:, layers] * self._rate[cell] + ranked.cost[:, layers]
        weights[ranked.seconds[:, layers] > self._limits[cell]] = np.inf
        return int(ranked.choices[weights.argmin(), layers])

    def _ranked(self, role: Role, position: int) -> tuple[Ranked, FloatArray]:
        """The choices, and the seconds that each takes of its cell's: [rank, layers]."""
        ranked = self._ranking.of(
            role, position, upto=self.most + 1, by="after" if role.embedding else "seconds"
        )
        return ranked, ranked.seconds + ranked.after if role.embedding else ranked.seconds
