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
from planner.search.exact.role import Role, role_of
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable

_CHUNK = 64


class PricedChains:
    """The least g of every number of stages, for cells i: no stage above `limits[i]`, priced at `paces[i]`.

    `values[i, S - 1]` is infinite where no S stages hold the model. From `known` stages on, more can only
    cost more than fewer: there it is a lower bound, no less than the least value.
    """

    def __init__(
        self,
        table: StageTable,
        prices: FloatArray,
        *,
        paces: FloatArray,
        limits: FloatArray,
        each: float = 0.0,
    ) -> None:
        self.table = table
        self.paces = paces
        self.each = each
        self._weights = _Weights(table, prices, paces, limits)
        self.values = np.full((len(paces), table.max_stages), np.inf)
        self.known = table.max_stages
        self._held: list[FloatArray] = []
        self._run()

    @property
    def seconds(self) -> FloatArray:
        """t by cell and number of stages: when the best such chain ends what its devices are worth."""
        found: FloatArray = self.paces[:, None] * (
            (self.values + self.each) / self.table.micro_batch_size - 1
        )
        return found

    def _run(self) -> None:
        layers = self.table.layers
        self.values[:, 0] = self._weights.of(Role.SINGLE, 1)[:, layers]
        held = self._weights.of(Role.LAST, 1)
        for position in range(2, self.table.max_stages + 1):
            self._held.append(held)
            first = self._weights.of(Role.FIRST, position)
            self.values[:, position - 1] = (held[:, ::-1] + first).min(axis=1)
            # What more stages cost only grows, so once every state costs more than a whole chain, stop.
            if (held.min(axis=1) >= self.values.min(axis=1)).all():
                self.known = position
                self.values[:, position:] = held.min(axis=1)[:, None]
                break
            if position < self.table.max_stages:
                held = join(held, self._weights.of(Role.MIDDLE, position))

    def trace(self, cell: int, stages: int) -> Chain:
        """The chain that reaches a finite value."""
        found: list[tuple[int, int]] = []
        left = self.table.layers
        for position in range(stages, 0, -1):
            role = role_of(position=position, stages=stages)
            weights = self._weights.of(role, position)[cell]
            taken = left
            if position > 1:
                behind = self._held[position - 2][cell]
                taken = int(np.argmin(behind[left::-1] + weights[: left + 1]))
            found.append((self._weights.choice(role, position, cell, taken), taken))
            left -= taken
        return make_chain(self.table, found)


def least_seconds(
    table: StageTable, cost: FloatArray, *, paces: FloatArray, limits: FloatArray, each: float
) -> FloatArray:
    """A bound of `PricedChains.seconds` by cell that takes no program: every layer on the stage that does a
    layer cheapest. `cost` is the price of each choice of the table."""
    rate = table.micro_batch_size / paces
    layers = np.arange(1, table.layers + 1)
    best = np.full(len(paces), np.inf)
    for role in Role:
        seconds = table.least[role, :, 1:]
        each_layer, price = seconds / layers, cost[:, None] / layers
        for start in range(0, len(paces), _CHUNK):
            cells = slice(start, start + _CHUNK)
            sums = each_layer[:, None] * rate[cells, None] + price[:, None]
            sums[seconds[:, None] > limits[cells, None]] = np.inf
            best[cells] = np.minimum(best[cells], sums.min(axis=(0, 2), initial=np.inf))
    found: FloatArray = paces * ((best * table.layers + each) / table.micro_batch_size - 1)
    return found


def join(behind: FloatArray, ahead: FloatArray) -> FloatArray:
    """Min-plus convolution over the last axis, row by row."""
    result = np.full_like(behind, np.inf)
    size = behind.shape[1]
    for count in np.flatnonzero(np.isfinite(ahead).any(axis=0)):
        target = result[:, count:]
        np.minimum(target, behind[:, : size - count] + ahead[:, count : count + 1], out=target)
    return result


class _Weights:
    """What a stage of a cell costs, by layers, the best choice taken."""

    def __init__(self, table: StageTable, prices: FloatArray, paces: FloatArray, limits: FloatArray) -> None:
        self._table = table
        self._cost = table.cost(prices)
        self._rate = table.micro_batch_size / paces
        self._limits = limits
        # No cell has room for more layers than this.
        within = (table.least <= limits.max(initial=0.0)).any(axis=(0, 1))
        self.most = int(np.flatnonzero(within).max(initial=0))
        # By price, without those that cost without end.
        order = np.argsort(self._cost, kind="stable")
        self._order = order[np.isfinite(self._cost[order])]
        self._known: dict[tuple[Role, int], FloatArray] = {}

    def of(self, role: Role, position: int) -> FloatArray:
        """[cell, layers]; infinite where no choice fits in memory and within the limit."""
        key = (role, min(position, self._table.in_flight))
        if key not in self._known:
            found = np.full((len(self._rate), self._table.layers + 1), np.inf)
            weights, _ = self._choices(role, position, slice(None))
            weights.min(axis=0, initial=np.inf, out=found[:, : self.most + 1])
            self._known[key] = found
        return self._known[key]

    def choice(self, role: Role, position: int, cell: int, layers: int) -> int:
        """The first choice, of the cheapest devices, that reaches the weight."""
        weights, choices = self._choices(role, position, slice(cell, cell + 1))
        return int(choices[np.argmin(weights[:, 0, layers]), layers])

    def _choices(self, role: Role, position: int, cells: slice) -> tuple[FloatArray, IntArray]:
        """Weights [rank, cell, layers] and which choices they are of: [rank, layers]."""
        table, order, upto = self._table, self._order, self.most + 1
        seconds = table.seconds_at(role, position)[order, :upto]
        spent = seconds + table.after[role, order, :upto] if role.embedding else seconds
        ranked = undominated(seconds, spent if role.embedding else None)
        choices = order[ranked]
        seconds = np.take_along_axis(seconds, ranked, axis=0)
        spent = np.take_along_axis(spent, ranked, axis=0)
        weights: FloatArray = spent[:, None] * self._rate[cells, None] + self._cost[choices][:, None]
        weights[seconds[:, None] > self._limits[cells, None]] = np.inf
        return weights, choices
