"""The best chain for given prices of devices: a min-plus dynamic program over positions and layers.

Give a device of kind k the price lambda_k in samples. A chain of micro-batch m, period at most P and fill W
(gradients and optimizer of its first stage included) ends m ((t - W) / P + 1) samples within t, for devices
worth lambda . n. So it ends what they are worth at t = P (g / m - 1) with g the sum over its stages of m T
/ P + lambda . n: a sum over stages, whatever the number of devices and of their kinds. A pipeline may have
a price of its own (`each`), where their number is limited.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.search.exact.chains import Chain, make_chain
from planner.search.exact.role import Role, role_of
from planner.search.exact.stage_table import FloatArray, IntArray, StageTable


class PricedChains:
    """The least g of every number of stages, for cells i: no stage above `limits[i]`, priced at `paces[i]`.

    `values[i, S - 1]` is infinite where no S stages hold the model, or where S stages cannot beat fewer.
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


def join(behind: FloatArray, ahead: FloatArray) -> FloatArray:
    """Min-plus convolution over the last axis, row by row."""
    result = np.full_like(behind, np.inf)
    size = behind.shape[1]
    for count in np.flatnonzero(np.isfinite(ahead).any(axis=0)):
        target = result[:, count:]
        np.minimum(target, behind[:, : size - count] + ahead[:, count : count + 1], out=target)
    return result


@dataclass
class _Weights:
    """What a stage of a cell costs, by layers, the best choice taken."""

    table: StageTable
    prices: FloatArray
    paces: FloatArray
    limits: FloatArray

    def __post_init__(self) -> None:
        self._cost = self.table.cost(self.prices)
        self._seconds = self.table.seconds
        self._by_role: dict[Role, FloatArray] = {}
        self._known: dict[tuple[Role, bytes], FloatArray] = {}

    def of(self, role: Role, position: int) -> FloatArray:
        """[cell, layers]; infinite where no choice fits in memory and within the limit."""
        most = self.table.most[role, :, position]
        key = (role, most.tobytes())
        if key not in self._known:
            self._known[key] = self._least(role, most)
        return self._known[key]

    def choice(self, role: Role, position: int, cell: int, layers: int) -> int:
        """The first choice that reaches the weight."""
        weights = self._choices(role)[:, cell, layers]
        fits = self.table.most[role, :, position] >= layers
        return int(np.argmin(np.where(fits, weights, np.inf)))

    def _least(self, role: Role, most: IntArray) -> FloatArray:
        result = np.full((len(self.paces), self.table.layers + 1), np.inf)
        for weights, count in zip(self._choices(role), most, strict=True):
            if count >= 0:
                target = result[:, : count + 1]
                np.minimum(target, weights[:, : count + 1], out=target)
        if role is Role.MIDDLE:
            # Only the ends may hold no layer.
            result[:, 0] = np.inf
        return result

    def _choices(self, role: Role) -> FloatArray:
        """[choice, cell, layers], memory left out."""
        if role not in self._by_role:
            seconds = self._seconds[role][:, None, :]
            spent = seconds + self.table.after[role][:, None, :] if role.embedding else seconds
            rate = (self.table.micro_batch_size / self.paces)[None, :, None]
            weights = spent * rate + self._cost[:, None, None]
            self._by_role[role] = np.where(seconds <= self.limits[None, :, None], weights, np.inf)
        return self._by_role[role]
