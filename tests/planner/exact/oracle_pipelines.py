"""Every pipeline of the oracle's class, on devices of which those of one node and type are alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from planner.cost.exchange import Replica
from planner.cost.held import held_values
from planner.cost.layer_flow import Recompute
from planner.cost.memory import MemoryModel, StageLoad
from planner.cost.stage_shape import StageShape
from planner.cost.stages import StageCost
from planner.operators import layer_operators
from planner.profile.analytic import PRECISION_BYTES
from planner.profile.table import ProfileTable, StepSeconds
from planner.request import PlanRequest

Vector = tuple[int, ...]
"""Devices by place: one node's devices of one type."""

_ANY_WAYS = 1e9


@dataclass(frozen=True)
class Stage:
    """A stage without the names of its devices: replica i is `tp` devices at `places[i]`."""

    tp: int
    places: Vector
    rows: Vector
    layers: int
    embedding: bool
    head: bool
    recomputes: bool = False


@dataclass(frozen=True)
class Pipeline:
    """Stages with their seconds a micro-batch, and what each must reduce at least where it is not alone."""

    size: int
    stages: tuple[Stage, ...]
    steps: tuple[StepSeconds, ...]
    reduce_seconds: tuple[float, ...]

    @cached_property
    def holding(self) -> tuple[object, ...]:
        """What decides its gradient blocks and where they are."""
        return tuple((stage.tp, stage.places, stage.layers) for stage in self.stages)

    @cached_property
    def period(self) -> float:
        return max(step.total for step in self.steps)

    @cached_property
    def _first_ends(self) -> list[float]:
        """When each stage ends its first micro-batch (Eq. 5)."""
        fill = sum(step.forward for step in self.steps)
        backwards = [step.backward for step in self.steps]
        return [fill + sum(backwards[index:]) for index in range(len(backwards))]

    @cached_property
    def _least_of_one(self) -> float:
        return max(end + more for end, more in zip(self._first_ends, self.reduce_seconds, strict=True))

    def ends(self, micro_batches: int) -> list[float]:
        """When each stage ends its last backward."""
        return [end + self.period * (micro_batches - 1) for end in self._first_ends]

    def least_seconds(self, micro_batches: int, *, alone: bool) -> float:
        """No plan with so many of its micro-batches is done sooner."""
        first = self._first_ends[0] if alone else self._least_of_one
        return first + self.period * (micro_batches - 1)

    def most_micro_batches(self, seconds: float, *, alone: bool) -> int:
        """0 if not even one is done in that time."""
        left = seconds - self.least_seconds(1, alone=alone)
        return int(left / self.period) + 1 if left >= 0 else 0


class PipelineMaker:
    """Makes the pipelines of one request, TP degrees up to `most_tp`."""

    def __init__(self, request: PlanRequest, profile: ProfileTable, *, most_tp: int) -> None:
        self._request, self._most_tp = request, most_tp
        self._cost = StageCost.of_request(request, profile=profile)
        self._memory = MemoryModel.of_request(request)
        self.ids: dict[tuple[str, str], list[str]] = {}
        for device in request.cluster.devices:
            self.ids.setdefault((device.node, device.type), []).append(device.id)
        self._places = list(self.ids)
        self._nodes = {node.name: index for index, node in enumerate(request.cluster.nodes)}
        self._known_forms: dict[tuple[Vector, int], list[tuple[int, Vector, Vector]]] = {}
        self._steps: dict[Stage, StepSeconds] = {}
        self._received: dict[tuple[object, ...], float] = {}
        self._fitting: dict[tuple[str, StageLoad], bool] = {}

    def pipelines(
        self, vector: Vector, size: int, *, micro_batches: int, seconds: float, alone: bool
    ) -> Iterator[Pipeline]:
        """On exactly these devices: those with at least so many micro-batches within so many seconds.

        They may still not fit: how many share their optimizer state is not known here.
        """
        for forms in self._sequences(vector, size):
            for layers in layer_splits(self._request.model.layers, len(forms)):
                plain = [
                    Stage(tp, places, rows, count, index == 0, index == len(forms) - 1)
                    for index, ((tp, places, rows), count) in enumerate(zip(forms, layers, strict=True))
                ]
                choices = [
                    self._variants(stage, len(plain) - index, micro_batches)
                    for index, stage in enumerate(plain)
                ]
                for stages in itertools.product(*choices):
                    one = self._timed(size, stages)
                    if one.most_micro_batches(seconds, alone=alone) >= micro_batches:
                        yield one

    def _sequences(self, vector: Vector, size: int) -> Iterator[list[tuple[int, Vector, Vector]]]:
        """The stages' (tp, places, rows), first to last."""
        if not any(vector):
            yield []
            return
        for part in vectors(vector):
            for others in self._sequences(minus(vector, part), size):
                if len(others) < self._request.model.layers + 2:
                    for form in self._forms(part, size):
                        yield [form, *others]

    def _forms(self, vector: Vector, size: int) -> list[tuple[int, Vector, Vector]]:
        key = (vector, size)
        if key not in self._known_forms:
            self._known_forms[key] = list(self._make_forms(vector, size))
        return self._known_forms[key]

    def _make_forms(self, vector: Vector, size: int) -> Iterator[tuple[int, Vector, Vector]]:
        """Replicas of one type take equal rows."""
        for tp in range(1, self._most_tp + 1):
            if any(count % tp for count in vector) or self._request.model.heads % tp:
                continue
            groups = [place for place, count in enumerate(vector) for _ in range(count // tp)]
            types = sorted({self._places[place][1] for place in groups})
            for shares in itertools.product(range(1, size + 1), repeat=len(types)):
                row = dict(zip(types, shares, strict=True))
                known = all(self._cost.covers(device_type=t, tp=tp, rows=r) for t, r in row.items())
                if known and sum(row[self._places[place][1]] for place in groups) == size:
                    for places in sorted(set(itertools.permutations(groups))):
                        yield tp, places, tuple(row[self._places[place][1]] for place in places)

    def _variants(self, stage: Stage, from_end: int, micro_batches: int) -> list[Stage]:
        """The stage as it is if it always fits; else with and without recomputation, as far as either may."""
        zero_stages = self._request.zero_stages
        dp = float(len(stage.rows))
        if all(self._fits(stage, from_end, zero, dp if zero else 1.0) for zero in zero_stages):
            return [stage]
        most = _ANY_WAYS if self._request.zero_scope == "all" else dp
        again = [replace(stage, recomputes=True)] if stage.layers and self._request.recompute else []
        return [
            one
            for one in [stage, *again]
            if any(
                self._fits(one, min(from_end, micro_batches), zero, most if zero else 1.0)
                for zero in zero_stages
            )
        ]

    def _fits(self, stage: Stage, in_flight: int, zero_stage: int, ways: float) -> bool:
        return all(
            self._load_fits(
                self._places[place][1],
                StageLoad(
                    tp=stage.tp,
                    rows=rows,
                    layers=stage.layers,
                    embedding=stage.embedding,
                    head=stage.head,
                    in_flight=in_flight,
                    recompute=self._recompute(stage),
                    zero_stage=zero_stage,
                    zero_ways=ways,
                    dp=len(stage.rows),
                ),
            )
            for place, rows in set(zip(stage.places, stage.rows, strict=True))
        )

    def _load_fits(self, type_: str, load: StageLoad) -> bool:
        if (type_, load) not in self._fitting:
            device = self._request.cluster.device_types[type_]
            self._fitting[type_, load] = self._memory.device_bytes(load, device) <= device.memory_bytes
        return self._fitting[type_, load]

    def _recompute(self, stage: Stage) -> Recompute:
        names = layer_operators(self._request.model) if stage.recomputes else ()
        return tuple((name, stage.layers) for name in names)

    def _timed(self, size: int, stages: tuple[Stage, ...]) -> Pipeline:
        steps = []
        for index, stage in enumerate(stages):
            before = self._receive(stages[index - 1], stage) if index else 0.0
            behind = self._receive(stages[index + 1], stage) if index + 1 < len(stages) else 0.0
            steps.append(self._step(stage).plus(StepSeconds(before, behind)))
        return Pipeline(size, stages, tuple(steps), tuple(map(self._reduce, stages)))

    def _step(self, stage: Stage) -> StepSeconds:
        """At ZeRO-0 and 1; ZeRO-2 takes no less."""
        if stage not in self._steps:
            self._steps[stage] = self._cost.stage_step(self._shape(stage))
        return self._steps[stage]

    def _receive(self, sender: Stage, receiver: Stage) -> float:
        key = (sender.tp, sender.places, sender.rows, receiver.tp, receiver.places, receiver.rows)
        if key not in self._received:
            self._received[key] = max(self._cost.receive(self._shape(sender), self._shape(receiver)))
        return self._received[key]

    def _shape(self, stage: Stage) -> StageShape:
        replicas = tuple(
            Replica(self._nodes[self._places[place][0]], self._places[place][1], rows)
            for place, rows in zip(stage.places, stage.rows, strict=True)
        )
        return StageShape(
            stage.tp, replicas, stage.layers, stage.embedding, stage.head, self._recompute(stage)
        )

    def _reduce(self, stage: Stage) -> float:
        """Beside other pipelines a device sends what it holds at least once, at best on the quickest link.

        Reducing and gathering a shard are half of that each. ZeRO-2 has done the first half with every
        micro-batch, and at scope `pipeline` only a replica's shard leaves the stage.
        """
        dtypes, zero_stages = self._request.dtypes, self._request.zero_stages
        assert dtypes.param == dtypes.wire
        share = 1.0
        if max(zero_stages) and self._request.zero_scope == "pipeline":
            share = 1 / len(stage.rows)
        elif max(zero_stages) == 2 and len(stage.rows) > 1:
            share = 0.5
        held = held_values(self._request.model, stage.tp, stage.layers, stage.embedding, stage.head).numel
        return share * held * PRECISION_BYTES[dtypes.wire] * self._least_rate

    @cached_property
    def _least_rate(self) -> float:
        """Seconds a byte of the quickest all-reduce that there is: of two devices, or a measured one."""
        cluster = self._request.cluster
        best = max(
            cluster.links.between(type_a=a, type_b=b, same_node=same).bandwidth
            for a in cluster.counts
            for b in cluster.counts
            for same in (True, False)
        )
        return min(1 / best, self._cost.profile.least_all_reduce_rate())


def vectors(counts: Vector) -> Iterator[Vector]:
    """All vectors up to `counts` but zero."""
    return (found for found in itertools.product(*(range(n + 1) for n in counts)) if any(found))


def minus(counts: Vector, part: Vector) -> Vector:
    """What is left; negative where there are too few."""
    return tuple(n - p for n, p in zip(counts, part, strict=True))


def layer_splits(layers: int, stages: int) -> Iterator[Sequence[int]]:
    """Only the first and the last stage may be empty."""
    for counts in itertools.product(range(layers + 1), repeat=stages):
        if sum(counts) == layers and all(counts[1:-1]):
            yield counts
