"""What backward takes longer because operators are recomputed until a stage fits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from dataclasses import replace
from typing import NamedTuple

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

# Cells of tables that are worked out together: more would leave the processor's cache.
_TOGETHER = 8_000


class Replica(NamedTuple):
    """One replica of `dp` of a stage for a micro-batch of `size` rows, of which it takes `rows`."""

    kind: int
    tp: int
    rows: int
    dp: int
    size: int


def replicas_of(choice: StageChoice) -> list[Replica]:
    """Those of a stage that differ."""
    dp, size = len(choice.rows), sum(choice.rows)
    return [Replica(kind, choice.tp, rows, dp, size) for kind, rows in sorted(choice.loads)]


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
        self._asked: dict[tuple[Replica, Role, Zero, bool], FloatArray] = {}
        self._keys: dict[tuple[object, ...], tuple[str, StageLoad]] = {}
        self._ways: dict[tuple[object, ...], float] = {}

    def of_choice(self, choice: StageChoice, role: Role, zero: Zero) -> FloatArray:
        """Of the replica that takes longest: [micro-batches in flight, layers]."""
        found = [self.of(replica, role, zero) for replica in replicas_of(choice)]
        return np.maximum.reduce(found) if len(found) > 1 else found[0]

    def of(self, replica: Replica, role: Role, zero: Zero) -> FloatArray:
        """[micro-batches in flight, layers]."""
        asked = (replica, role, zero, self._by_position)
        if asked not in self._asked:
            key = self._key(replica, role, zero)
            if key not in self._known:
                self._work_out(key[0], [key[1]])
            self._asked[asked] = self._known[key]
        return self._asked[asked]

    def prepare(self, replicas: Iterable[Replica], zeros: Sequence[Zero]) -> None:
        """Work out many together, which takes less time than one after the other."""
        together: dict[tuple[object, ...], dict[tuple[str, StageLoad], None]] = {}
        for replica in dict.fromkeys(replicas):
            for role in Role:
                for zero in zeros:
                    key = self._key(replica, role, zero)
                    if key not in self._known:
                        alike = (replica.kind, replica.tp, replica.rows, role)
                        together.setdefault(alike, {})[key] = None
        for keys in together.values():
            loads = [load for _, load in keys]
            type_ = next(iter(keys))[0]
            most = 1 if loads[0].head else self.max_stages
            step = max(1, _TOGETHER // ((most + 1) * (self._layers + 1)))
            for start in range(0, len(loads), step):
                self._work_out(type_, loads[start : start + step])

    def cut_by_position(self) -> Replays:
        """The same where activations are cut by position; what does not differ is worked out once."""
        other = copy(self)
        other._by_position = True
        return other

    def _key(self, replica: Replica, role: Role, zero: Zero) -> tuple[str, StageLoad]:
        tp, dp = replica.tp, replica.dp
        # Without replicas to share gradients with, ZeRO-2 is ZeRO-1.
        stage = 1 if zero.stage == 2 and dp == 1 else zero.stage
        sharing = stage, self.ways(tp, dp, replica.size, role, zero), dp if stage == 2 else 1
        alike = (replica.kind, tp, replica.rows, role, *sharing, self._by_position)
        if alike not in self._keys:
            self._keys[alike] = self._pool.kinds[replica.kind].type, self._load(replica, role, sharing)
        return self._keys[alike]

    def _load(self, replica: Replica, role: Role, sharing: tuple[int, float, int]) -> StageLoad:
        """`sharing`: ZeRO stage, ways, and replicas that share gradients."""
        stage, ways, dp = sharing
        return StageLoad(
            replica.tp,
            replica.rows,
            self._layers,
            role.embedding,
            role.head,
            1,
            zero_stage=stage,
            zero_ways=ways,
            dp=dp,
            sequence_parallel=self._by_position
            and cuts_positions(tp=replica.tp, sequence_length=self._memory.sequence_length),
        )

    def ways(self, tp: int, dp: int, micro_batch_size: int, role: Role, zero: Zero) -> float:
        """Over how many devices such a stage's optimizer state is shared."""
        model = self._memory.model
        if not zero.alone:
            return zero.ways(model, tp=tp, dp=dp, micro_batch_size=micro_batch_size, role=role)
        key = (tp, dp, micro_batch_size, role, zero)
        if key not in self._ways:
            self._ways[key] = zero.ways(model, tp=tp, dp=dp, micro_batch_size=micro_batch_size, role=role)
        return self._ways[key]

    def _work_out(self, type_: str, loads: Sequence[StageLoad]) -> None:
        """Of loads of one role that differ in nothing but ZeRO. A single or last stage has one micro-batch in flight,
        and no other position."""
        most = 1 if loads[0].head else self.max_stages
        found = np.full((len(loads), self.max_stages + 1, self._layers + 1), np.inf)
        found[:, : most + 1] = self._tables(type_, loads, most)
        if not loads[0].head and not loads[0].embedding:
            # A stage in the middle holds layers, having no end of the model.
            found[:, :, 0] = np.inf
        self._known.update(zip(((type_, load) for load in loads), found, strict=True))

    def _tables(self, type_: str, loads: Sequence[StageLoad], most_in_flight: int) -> FloatArray:
        if self._recompute is not None:
            return self._recompute.seconds_tables(
                type_, loads, most_in_flight=most_in_flight, relaxed=self._relaxed
            )
        most = np.array([self._most_layers(type_, load, most_in_flight) for load in loads])
        return np.where(np.arange(self._layers + 1) <= most[..., None], 0.0, np.inf)

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
