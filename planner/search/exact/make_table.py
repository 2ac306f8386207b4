"""Fills StageTables from the cost and the memory model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from planner.cost.gradient import update_bytes_per_value
from planner.cost.held import held_values
from planner.cost.stages import StageCost
from planner.operators import cuts_positions
from planner.profile.analytic import PRECISION_BYTES
from planner.search.exact.choices import StageChoice
from planner.search.exact.pool import Pool
from planner.search.exact.replays import Replays
from planner.search.exact.role import Role
from planner.search.exact.stage_table import FloatArray, StageTable, without_dominated
from planner.search.exact.surroundings import Surroundings
from planner.search.exact.zero import Zero


class StageFigures:
    """Seconds and parameter values of stages by number of layers, each worked out once."""

    def __init__(self, cost: StageCost) -> None:
        self._cost = cost
        self._layers = np.arange(cost.model.layers + 1, dtype=np.float64)
        self._steps: dict[tuple[object, ...], tuple[FloatArray, FloatArray]] = {}
        self._values: dict[tuple[int, Role, bool], FloatArray] = {}

    def steps(
        self, tp: int, loads: Sequence[tuple[str, int]], role: Role, *, by_position: bool
    ) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds: the slowest replica's, each apart. `loads` are (device type, rows)."""
        cut = by_position and cuts_positions(tp=tp, sequence_length=self._cost.sequence_length)
        key = (tp, tuple(loads), role, cut)
        if key not in self._steps:
            lines = [self._line(tp, type_, rows, role, cut) for type_, rows in loads]
            forward, backward = (np.maximum.reduce(line) for line in zip(*lines, strict=True))
            self._steps[key] = forward, backward
        return self._steps[key]

    def _line(self, tp: int, type_: str, rows: int, role: Role, cut: bool) -> tuple[FloatArray, FloatArray]:
        ends, one = (
            self._cost.replica_step(
                device_type=type_,
                tp=tp,
                rows=rows,
                layers=count,
                embedding=role.embedding,
                head=role.head,
                sequence_parallel=cut,
            )
            for count in (0, 1)
        )
        return (
            ends.forward + self._layers * (one.forward - ends.forward),
            ends.backward + self._layers * (one.backward - ends.backward),
        )

    def values(self, tp: int, role: Role, *, copies: bool = True) -> FloatArray:
        """Parameter values of a device of a stage; those of which every TP rank has a copy if asked."""
        key = (tp, role, copies)
        if key not in self._values:
            none, one = (_values(self._cost, tp, n, role, copies=copies) for n in (0, 1))
            self._values[key] = none + self._layers * (one - none)
        return self._values[key]


@dataclass(frozen=True)
class TableMaker:
    """Everything that the tables of one pool and ZeRO stage have in common."""

    cost: StageCost
    figures: StageFigures
    pool: Pool
    surroundings: Surroundings
    replays: Replays
    zero: Zero
    by_position: bool = False
    """Stages whose TP can cut activations by position do (and do in `replays`)."""

    def table(self, choices: Sequence[StageChoice], *, micro_batch_size: int) -> StageTable:
        """The table of one micro-batch size, for a single pipeline."""
        layers = self.cost.model.layers
        shape = (len(Role), len(choices))
        forward, backward = (np.zeros((*shape, layers + 1)) for _ in range(2))
        after = np.zeros((4, *shape, layers + 1))
        receive = np.zeros(shape)
        replay = np.full((*shape, self.replays.max_stages + 1, layers + 1), np.inf)
        for index, choice in enumerate(choices):
            sides = {role.sides for role in Role}
            received = {n: self.surroundings.receive_seconds(choice, sides=n) for n in sides}
            replica_byte, streaming = self.surroundings.replica_byte_seconds(choice), self.streaming(choice)
            for role in Role:
                forward[role, index], backward[role, index] = self.steps(choice, role)
                backward[role, index] += self.scatter(choice, role, replica_byte)
                receive[role, index] = received[role.sides]
                replay[role, index] = self.replays.of_choice(choice, role, self.zero)
                after[:, role, index] = self.after(choice, role, replica_byte, streaming)
        table = StageTable(
            micro_batch_size,
            layers,
            tuple(choices),
            tuple(choice.counts(len(self.pool.kinds)) for choice in choices),
            forward,
            backward,
            receive,
            replay,
            gradient_bytes=after[0],
            update=after[1],
            gathered_bytes=after[2],
            last=after[3],
            after=after[1],
            tail=after[3],
            holders=np.array([self.zero.holders(len(choice.rows)) for choice in choices], dtype=float),
        )
        return without_dominated(table)

    def steps(self, choice: StageChoice, role: Role) -> tuple[FloatArray, FloatArray]:
        """Forward and backward seconds by number of layers: the slowest replica's, each apart."""
        loads = [(self.pool.kinds[kind].type, rows) for kind, rows in sorted(choice.loads)]
        return self.figures.steps(choice.tp, loads, role, by_position=self.by_position)

    def streaming(self, choice: StageChoice) -> float:
        """Seconds in which the slowest of its devices moves a byte of memory."""
        kinds = sorted(set(choice.kinds))
        return max(
            self.cost.profile.streaming_seconds(device_type=self.pool.kinds[kind].type, moved_bytes=1.0)
            for kind in kinds
        )

    def scatter(self, choice: StageChoice, role: Role, replica_byte: float) -> FloatArray | float:
        """ZeRO-2: reducing and scattering a micro-batch's gradients inside the stage, by number of layers.
        `replica_byte`: seconds of sending a byte from one replica to another."""
        dp = len(choice.rows)
        if self.zero.stage < 2 or dp == 1:
            return 0.0
        wire = PRECISION_BYTES[self.cost.dtypes.wire]
        return self.figures.values(choice.tp, role) * (wire * replica_byte * (dp - 1) / dp)

    def after(
        self, choice: StageChoice, role: Role, replica_byte: float, streaming: float
    ) -> tuple[FloatArray, ...]:
        """Bytes of gradients of a device that all pipelines reduce (and gather), and the other seconds after
        the last backward: the optimizer's and what the stage reduces alone; by number of layers. Then the parts of
        both that wait for all gradients: bytes gathered, the optimizer's seconds and those that the stage gathers."""
        cost, zero, dp = self.cost, self.zero, len(choice.rows)
        values = self.figures.values(choice.tp, role)
        ways = self.replays.ways(choice.tp, dp, sum(choice.rows), role, zero)
        update = values * (update_bytes_per_value(cost.dtypes) * streaming / ways)
        gathered, own_gathered = zero.gathered_bytes_per_value(cost.dtypes)
        ring = values * (replica_byte * 2 * (dp - 1) / dp)
        own = zero.own_bytes_per_value(cost.dtypes)
        # Copies are reduced by more holders, and some of these share a node: for bounds that may be quick.
        reduced = self.figures.values(choice.tp, role, copies=False) if zero.most else values
        return (
            reduced * zero.gradient_bytes_per_value(cost.dtypes, dp=dp),
            update + ring * own,
            reduced * gathered,
            update + ring * own_gathered,
        )


def _values(cost: StageCost, tp: int, layers: int, role: Role, *, copies: bool) -> int:
    held = held_values(cost.model, tp, layers, role.embedding, role.head)
    return held.numel if copies or tp == 1 else held.numel - held.copied
