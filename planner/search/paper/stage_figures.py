"""What one stage takes and holds: its seconds, gradients and memory, with recompute derived from its layers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from planner.cost.exchange import Replica
from planner.cost.gradient import update_bytes_per_value
from planner.cost.held import held_values
from planner.cost.layer_flow import Recompute
from planner.cost.memory import StageLoad
from planner.cost.models import CostModels
from planner.cost.recompute import FloatArray
from planner.cost.stage_shape import StageShape
from planner.cost.zero import search_zero_ways
from planner.operators import cuts_positions
from planner.profile.analytic import PRECISION_BYTES
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.exact.choices import StageChoice
from planner.search.exact.pool import Pool, Vector
from planner.search.exact.surroundings import Expected


class StageKey(NamedTuple):
    """All that a stage's figures depend on. `counts` are its devices by kind."""

    counts: Vector
    tp: int
    micro_batch_size: int
    layers: int
    embedding: bool
    head: bool
    in_flight: int


@dataclass(frozen=True, slots=True)
class StageFigures:
    """One micro-batch of a stage on its slowest replica, receiving and recomputation included; `seconds` is
    forward and backward together.

    `fullness` is its layers over the most that its devices could hold (one more of each, as there may be none);
    over 1 if it does not fit, in which case nothing is recomputed. `after` are the seconds after the last
    backward: gradients and optimizer.
    """

    key: StageKey
    choice: StageChoice
    forward: float
    backward: float
    seconds: float
    after: float
    fullness: float
    by_position: bool = False
    """Activations are cut by position (sequence parallelism): it is quicker, or fits only so."""


class StageShop:
    """Figures of the stages of one request on one pool. Everything asked twice is kept.

    Args:
        pipelines: how many pipelines are known to share a gradient. With one, only replicas inside a stage do.
        zero_stage: the ZeRO stage of the plan.
        by_position: stages may cut activations by position.
    """

    def __init__(
        self,
        request: PlanRequest,
        pool: Pool,
        *,
        profile: ProfileTable,
        models: CostModels | None = None,
        pipelines: int,
        zero_stage: int = 0,
        by_position: bool = False,
    ) -> None:
        self._by_position = by_position
        self.request, self.pool, self.pipelines, self.zero_stage = request, pool, pipelines, zero_stage
        self.layers = request.model.layers
        models = models or CostModels.of_request(request, profile=profile)
        self.cost, self.memory, self._recompute = models.cost, models.memory, models.recompute
        self._expected = Expected(request.cluster, pool, self.cost.row_bytes)
        self._choices: dict[tuple[Vector, int, int], StageChoice | None] = {}
        self._figures: dict[StageKey, StageFigures | None] = {}
        self._degrees: dict[Vector, tuple[int, ...]] = {}
        self._tables: dict[tuple[str, int, int, bool, bool, int, bool], FloatArray] = {}
        self._recomputed: dict[StageKey, Recompute | None] = {}
        self._most_in_flight = min(pool.devices, self.layers + 2)
        self._able: dict[tuple[Vector, int], tuple[int, ...]] = {}

    def degrees(self, counts: Vector) -> tuple[int, ...]:
        """TP degrees that cut these devices into whole groups of one type inside a node, ascending."""
        if counts not in self._degrees:
            held = [(kind, n) for kind, n in zip(self.pool.kinds, counts, strict=True) if n]
            common = set(held[0][0].degrees).intersection(*(kind.degrees for kind, _ in held))
            self._degrees[counts] = tuple(
                tp for tp in sorted(common) if all(count % tp == 0 for _, count in held)
            )
        return self._degrees[counts]

    def able(self, counts: Vector, micro_batch_size: int) -> tuple[int, ...]:
        """Those of the degrees with which the replicas can share the rows of a micro-batch."""
        key = (counts, micro_batch_size)
        if key not in self._able:
            self._able[key] = tuple(
                tp for tp in self.degrees(counts) if self.choice(counts, tp, micro_batch_size) is not None
            )
        return self._able[key]

    def choice(self, counts: Vector, tp: int, micro_batch_size: int) -> StageChoice | None:
        """Replicas of these devices and their rows; None if rows cannot be shared so, or are not in the profile.

        Replicas of one type take equal rows; of unlike types, those with which the slowest is quickest.
        """
        key = (counts, tp, micro_batch_size)
        if key not in self._choices:
            self._choices[key] = self._choice(*key)
        return self._choices[key]

    def figures(self, key: StageKey) -> StageFigures | None:
        """None if the stage cannot run so at all."""
        if key not in self._figures:
            choice = self.choice(key.counts, key.tp, key.micro_batch_size)
            self._figures[key] = None if choice is None else self._best(key, choice)
        return self._figures[key]

    def _best(self, key: StageKey, choice: StageChoice) -> StageFigures:
        """With activations whole or, where that may be and is better, cut by position."""
        ways = [self._worked_out(key, choice, by_position=False)]
        if self._by_position and cuts_positions(tp=key.tp, sequence_length=self.request.sequence_length):
            ways.append(self._worked_out(key, choice, by_position=True))
        return min(ways, key=lambda way: (max(way.fullness, 1.0), way.seconds))

    def _choice(self, counts: Vector, tp: int, size: int) -> StageChoice | None:
        replicas: dict[str, int] = {}
        for kind, count in zip(self.pool.kinds, counts, strict=True):
            if count:
                replicas[kind.type] = replicas.get(kind.type, 0) + count // tp
        types = list(replicas)
        best: tuple[float, tuple[int, ...]] | None = None
        for rows in _rows(list(replicas.values()), size):
            if all(
                self.cost.covers(device_type=type_, tp=tp, rows=n)
                for type_, n in zip(types, rows, strict=True)
            ):
                slowest = max(
                    self.cost.replica_step(device_type=type_, tp=tp, rows=n, layers=1).total
                    for type_, n in zip(types, rows, strict=True)
                )
                if best is None or slowest < best[0]:
                    best = slowest, rows
        if best is None:
            return None
        of_type = dict(zip(types, best[1], strict=True))
        kinds = tuple(k for k, count in enumerate(counts) for _ in range(count // tp))
        return StageChoice(tp, kinds, tuple(of_type[self.pool.kinds[k].type] for k in kinds))

    def recompute_of(self, figures: StageFigures) -> Recompute | None:
        """What the stage recomputes, the least with which it fits; None if it does not."""
        if figures.key not in self._recomputed:
            loads = self._loads(figures.key, figures.choice, figures.by_position)
            replay = self._recompute.fewest(loads)
            self._recomputed[figures.key] = None if replay is None else replay.recompute
        return self._recomputed[figures.key]

    def _worked_out(self, key: StageKey, choice: StageChoice, *, by_position: bool) -> StageFigures:
        loads = self._loads(key, choice, by_position)
        fullness, replayed = self._room(key, loads)
        steps = [
            self.cost.replica_step(
                device_type=type_,
                tp=key.tp,
                rows=load.rows,
                layers=key.layers,
                embedding=key.embedding,
                head=key.head,
                sequence_parallel=by_position,
            )
            for type_, load in loads
        ]
        sides = (not key.embedding) + (not key.head)
        received = self._expected.receive_seconds(choice, sides=sides) if sides else 0.0
        forward = max(step.forward for step in steps)
        slowest = max(step.backward + extra for step, extra in zip(steps, replayed, strict=True))
        backward = slowest + received + self._scatter(key, choice)
        after = self._after(key, choice, loads)
        return StageFigures(key, choice, forward, backward, forward + backward, after, fullness, by_position)

    def _loads(self, key: StageKey, choice: StageChoice, by_position: bool) -> list[tuple[str, StageLoad]]:
        kinds = {(self.pool.kinds[kind].type, rows) for kind, rows in choice.loads}
        dp = len(choice.rows)
        return [
            (
                type_,
                StageLoad(
                    tp=key.tp,
                    rows=rows,
                    layers=key.layers,
                    embedding=key.embedding,
                    head=key.head,
                    in_flight=key.in_flight,
                    zero_stage=self.zero_stage,
                    zero_ways=self._ways(dp),
                    dp=dp,
                    sequence_parallel=by_position,
                ),
            )
            for type_, rows in sorted(kinds)
        ]

    def _ways(self, dp: int) -> float:
        """Devices that at least share the optimizer state of a stage of so many replicas."""
        scope = self.request.zero_scope
        return search_zero_ways(zero_stage=self.zero_stage, zero_scope=scope, pipelines=self.pipelines, dp=dp)

    def _scatter(self, key: StageKey, choice: StageChoice) -> float:
        """Seconds that ZeRO-2 scatters a micro-batch's gradients, replicas sharing nodes as far as they can."""
        if self.zero_stage < 2:
            return 0.0
        replicas, taken = [], [0] * len(self.pool.kinds)
        for kind, rows in zip(choice.kinds, choice.rows, strict=True):
            node = taken[kind] // max(1, self.pool.kinds[kind].largest // key.tp)
            taken[kind] += 1
            replicas.append(Replica(node, self.pool.kinds[kind].type, rows))
        return self.cost.scatter_seconds(
            StageShape(
                key.tp,
                tuple(replicas),
                key.layers,
                embedding=key.embedding,
                head=key.head,
                zero_stage=self.zero_stage,
            )
        )

    def _room(self, key: StageKey, loads: Sequence[tuple[str, StageLoad]]) -> tuple[float, Sequence[float]]:
        """Fullness, and the seconds of recomputation by load."""
        rows = [self._replay_row(type_, load) for type_, load in loads]
        # Layers fit up to some number, on every replica.
        most = min(int(np.isfinite(row).sum()) - 1 for row in rows)
        fullness = (key.layers + 1) / (most + 1) if most >= 0 else 2.0 + key.layers
        replayed = [float(row[key.layers]) for row in rows]
        if fullness <= 1 and len(loads) > 1 and max(replayed) > 0:
            # What unlike replicas recompute is one choice for all.
            replay = self._recompute.fewest(loads)
            if replay is None:
                return 1.0 + 1 / (key.layers + 1), [0.0] * len(loads)
            return fullness, replay.seconds
        return fullness, replayed if fullness <= 1 else [0.0] * len(loads)

    def _replay_row(self, type_: str, load: StageLoad) -> FloatArray:
        """Seconds of recomputation by layers, with the load's micro-batches in flight; inf where nothing
        fits."""
        ends = load.embedding, load.head
        key = (type_, load.tp, load.rows, *ends, load.dp, load.sequence_parallel)
        if key not in self._tables:
            table = self._recompute.seconds_table(
                type_, replace(load, layers=self.layers), most_in_flight=self._most_in_flight
            )
            # What must be recomputed to fit does not fit if nothing may be.
            self._tables[key] = table if self.request.recompute else np.where(table > 0, np.inf, table)
        return self._tables[key][load.in_flight]

    def _after(self, key: StageKey, choice: StageChoice, loads: Sequence[tuple[str, StageLoad]]) -> float:
        dtypes = self.request.dtypes
        values = held_values(self.request.model, key.tp, key.layers, key.embedding, key.head).numel
        holders = len(choice.rows) + self.pipelines - 1
        sent: float = PRECISION_BYTES[dtypes.wire]
        if self.zero_stage:
            # Reduced and scattered, then gathered in the parameters' precision: two halves of an all-reduce.
            sent = (sent + PRECISION_BYTES[dtypes.param]) / 2
        gradients = values * sent * self._expected.ring_byte_seconds(holders)
        moved = values * update_bytes_per_value(dtypes) / self._ways(len(choice.rows))
        return gradients + max(
            self.cost.profile.streaming_seconds(device_type=type_, moved_bytes=moved) for type_, _ in loads
        )


def _rows(replicas: Sequence[int], size: int) -> Iterator[tuple[int, ...]]:
    """All ways to give each type's replicas one or more rows each so that the micro-batch is used up."""
    first, others = replicas[0], replicas[1:]
    if not others:
        if size % first == 0 and size >= first:
            yield (size // first,)
        return
    for rows in range(1, (size - sum(others)) // first + 1):
        for rest in _rows(others, size - first * rows):
            yield (rows, *rest)
