"""What backward takes longer because operators are recomputed until a stage fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from planner.cost.memory import MemoryModel, StageLoad
from planner.cost.recompute import RecomputeModel
from planner.operators import cuts_positions
from planner.search.exact.choices import StageChoice
from planner.search.exact.pool import Pool
from planner.search.exact.role import Role
from planner.search.exact.zero import Zero

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]


class Replays:
    """Extra backward seconds by micro-batches in flight and layers, worked out once for every load.

    Infinite where a stage does not fit, where a middle stage holds no layer, and with none in flight.

    Args:
        recompute: None if nothing may be recomputed.
        relaxed: parts of layers may be recomputed, for bounds.
        by_position: stages whose TP can cut activations by position do.
    """

    def __init__(
        self,
        memory: MemoryModel,
        recompute: RecomputeModel | None,
        pool: Pool,
        *,
        layers: int,
        max_stages: int,
        relaxed: bool = False,
        by_position: bool = False,
    ) -> None:
        self._memory, self._recompute, self._pool = memory, recompute, pool
        self._devices = {kind.type: kind.device for kind in pool.kinds}
        self._layers, self.max_stages, self._relaxed = layers, max_stages, relaxed
        self._by_position = by_position
        self._known: dict[tuple[str, StageLoad], FloatArray] = {}
        self._ways: dict[tuple[object, ...], float] = {}

    def of_choice(self, choice: StageChoice, role: Role, zero: Zero) -> FloatArray:
        """Of the replica that takes longest: [micro-batches in flight, layers]."""
        dp, size = len(choice.rows), sum(choice.rows)
        found: FloatArray = np.max(
            [
                self.of(kind, choice.tp, rows, role, dp=dp, micro_batch_size=size, zero=zero)
                for kind, rows in sorted(choice.loads)
            ],
            axis=0,
        )
        return found

    def of(
        self, kind: int, tp: int, rows: int, role: Role, *, dp: int, micro_batch_size: int, zero: Zero
    ) -> FloatArray:
        """Of one replica of a stage of `dp`: [micro-batches in flight, layers]."""
        # Without replicas to share gradients with, ZeRO-2 is ZeRO-1.
        stage = 1 if zero.stage == 2 and dp == 1 else zero.stage
        load = StageLoad(
            tp,
            rows,
            self._layers,
            role.embedding,
            role.head,
            1,
            zero_stage=stage,
            zero_ways=self.ways(tp, dp, micro_batch_size, role, zero),
            dp=dp if stage == 2 else 1,
            sequence_parallel=self._by_position
            and cuts_positions(tp=tp, sequence_length=self._memory.sequence_length),
        )
        key = (self._pool.kinds[kind].type, load)
        if key not in self._known:
            self._known[key] = self._of(*key)
            if role is Role.MIDDLE:
                # The only role without an end of the model, so that no other has this load.
                self._known[key][:, 0] = np.inf
        return self._known[key]

    def ways(self, tp: int, dp: int, micro_batch_size: int, role: Role, zero: Zero) -> float:
        """Over how many devices such a stage's optimizer state is shared."""
        key = (tp, dp, micro_batch_size, role, zero)
        if key not in self._ways:
            model = self._memory.model
            self._ways[key] = zero.ways(model, tp=tp, dp=dp, micro_batch_size=micro_batch_size, role=role)
        return self._ways[key]

    def _of(self, type_: str, load: StageLoad) -> FloatArray:
        """A single or last stage has one micro-batch in flight, and no other position."""
        most = 1 if load.head else self.max_stages
        found = np.full((self.max_stages + 1, self._layers + 1), np.inf)
        found[: most + 1] = self._table(type_, load, most)
        return found

    def _table(self, type_: str, load: StageLoad, most_in_flight: int) -> FloatArray:
        if self._recompute is not None:
            return self._recompute.seconds_table(
                type_, load, most_in_flight=most_in_flight, relaxed=self._relaxed
            )
        most = self._most_layers(type_, load, most_in_flight)
        return np.where(np.arange(self._layers + 1) <= most[:, None], 0.0, np.inf)

    def _most_layers(self, type_: str, load: StageLoad, most_in_flight: int) -> IntArray:
        """By micro-batches in flight; -1 where nothing fits."""
        device = self._devices[type_]

        def most_layers(position: int, at_most: int) -> int:
            return self._memory.most_layers(replace(load, in_flight=position, layers=at_most), device)

        most = np.full(most_in_flight + 1, -1, dtype=np.int64)
        most[1] = most_layers(1, self._layers)
        most[-1] = most_layers(most_in_flight, int(most[1]))
        _fill(most, 1, most_in_flight, most_layers)
        return most


def _fill(most: IntArray, first: int, last: int, most_layers: Callable[[int, int], int]) -> None:
    """Positions between two known ones: more in flight never leaves room for more layers."""
    if most[first] == most[last]:
        most[first:last] = most[first]
        return
    if last - first > 1:
        middle = (first + last) // 2
        most[middle] = most_layers(middle, int(most[first]))
        _fill(most, first, middle, most_layers)
        _fill(most, middle, last, most_layers)
