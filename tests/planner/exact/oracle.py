"""Brute force at up to six devices: the best plan of a small class, or none below a given price.

Independent of the search; only times, memory and price are the product's. The class: TP inside a node and
type, equal rows for the replicas of a type, all or none of a stage's operators recomputed, any ZeRO stage of the
request, idle devices. `tests/planner/brute_force.py` goes over every device by name; here devices of one node
and type are alike, and what cannot be below the price is left out:

* a pipeline ends when Eq. 5 says, so it takes so many samples at most within the price; sets of pipelines that
  take fewer than the global batch are left out;
* beside other pipelines each device has to reduce what it holds, one collective after the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.cost.gradient import slowest_optimizer_seconds
from planner.cost.price import check_memory, price_plan
from planner.cost.sync_seconds import SyncSeconds
from planner.errors import UserError
from planner.gradient_calls import gradient_layout
from planner.operators import layer_operators
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from tests.planner.exact.oracle_pipelines import Pipeline, PipelineMaker, Stage, Vector, minus, vectors

Candidate = tuple[list[Pipeline], Vector, float]
"""Pipelines, their micro-batches, and seconds that no plan of them is below."""


@dataclass(frozen=True)
class Best:
    """The best plan and its price, or the price that no plan is below; and how many plans were priced."""

    plan: Plan | None
    seconds: float
    priced: int


class Oracle:
    """All plans of one request with micro-batches of some `sizes`."""

    def __init__(
        self, request: PlanRequest, profile: ProfileTable, *, sizes: Sequence[int], most_tp: int = 2
    ) -> None:
        self._request, self._profile, self._sizes = request, profile, sizes
        self._maker = PipelineMaker(request, profile, most_tp=most_tp)
        self._counts: Vector = tuple(map(len, self._maker.ids.values()))
        self._after: dict[object, tuple[list[float], float]] = {}

    def best_below(self, upper: float) -> Best:
        """The best plan with a price below `upper`."""
        self._upper, self._priced = upper, 0
        self._plan: Plan | None = None
        self._alone()
        if self._request.global_batch_size > 1:
            self._together()
        return Best(self._plan, self._upper, self._priced)

    def _alone(self) -> None:
        """Plans of a single pipeline."""
        found: list[Candidate] = []
        for vector, size in itertools.product(vectors(self._counts), self._sizes):
            needed = -(-self._request.global_batch_size // size)
            for one in self._maker.pipelines(
                vector, size, micro_batches=needed, seconds=self._upper, alone=True
            ):
                found.append(([one], (needed,), one.least_seconds(needed, alone=True)))
        self._price_all(found)

    def _together(self) -> None:
        """Plans of several: sets of vectors of devices, and of pipelines on each, every one once."""
        known: dict[Vector, list[Pipeline]] = {}
        for vector in sorted(vectors(self._counts), reverse=True):
            pipelines = [
                one
                for size in self._sizes
                for one in self._maker.pipelines(
                    vector, size, micro_batches=1, seconds=self._upper, alone=False
                )
            ]
            if pipelines:
                known[vector] = pipelines
        worth = {vector: max(map(self._worth, pipelines)) for vector, pipelines in known.items()}
        self._price_all(
            (chosen, micro_batches, self._least_of(chosen, micro_batches))
            for chosen in self._sets(known, _most_worth(self._counts, worth))
            for micro_batches in self._micro_batches(chosen)
        )

    def _worth(self, pipeline: Pipeline) -> int:
        """Most samples that it takes beside others, within the price to beat."""
        return pipeline.size * pipeline.most_micro_batches(self._upper, alone=False)

    def _sets(self, known: dict[Vector, list[Pipeline]], most: dict[Vector, int]) -> Iterator[list[Pipeline]]:
        """Two and more pipelines that together may take the whole batch."""
        batch, order = self._request.global_batch_size, list(known)

        def extend(
            first: tuple[int, int], left: Vector, chosen: list[Pipeline], taken: int
        ) -> Iterator[list[Pipeline]]:
            if len(chosen) > 1 and taken >= batch:
                yield chosen
            for index in range(first[0], len(order)):
                rest = minus(left, order[index])
                if min(rest) < 0:
                    continue
                pipelines = known[order[index]]
                for number in range(first[1] if index == first[0] else 0, len(pipelines)):
                    now = taken + self._worth(pipelines[number])
                    if now + most[rest] >= batch:
                        yield from extend((index, number), rest, [*chosen, pipelines[number]], now)

        yield from extend((0, 0), self._counts, [], 0)

    def _micro_batches(self, chosen: Sequence[Pipeline]) -> Iterator[Vector]:
        """Numbers of micro-batches that hold the batch, where one fewer of any pipeline would not."""
        sizes = [one.size for one in chosen]
        most = [one.most_micro_batches(self._upper, alone=False) for one in chosen]
        room = [size * n for size, n in zip(sizes, most, strict=True)]

        def counts(index: int, left: int) -> Iterator[Vector]:
            if index == len(chosen):
                yield ()
                return
            others = sum(room[index + 1 :])
            for n in range(max(1, -(-(left - others) // sizes[index])), most[index] + 1):
                for rest in counts(index + 1, left - n * sizes[index]):
                    yield n, *rest

        batch = self._request.global_batch_size
        for found in counts(0, batch):
            surplus = sum(n * size for n, size in zip(found, sizes, strict=True)) - batch
            least = all(n == 1 or size > surplus for n, size in zip(found, sizes, strict=True))
            # Each pipeline has a sample at least.
            if least and surplus <= sum(size - 1 for size in sizes):
                yield found

    def _least_of(self, chosen: Sequence[Pipeline], micro_batches: Vector) -> float:
        return max(one.least_seconds(n, alone=False) for one, n in zip(chosen, micro_batches, strict=True))

    def _price_all(self, found: Iterable[Candidate]) -> None:
        """The most promising first, as long as they may be better than the best so far."""
        possible = [one for one in found if one[2] < self._upper]
        for chosen, micro_batches, least in sorted(possible, key=lambda one: one[2]):
            if least < self._upper:
                for zero_stage in self._request.zero_stages:
                    self._price(chosen, micro_batches, zero_stage)

    def _price(self, chosen: Sequence[Pipeline], micro_batches: Vector, zero_stage: Literal[0, 1, 2]) -> None:
        if self._least(chosen, micro_batches, zero_stage) >= self._upper:
            return
        plan = self._make_plan(chosen, micro_batches, zero_stage)
        try:
            check_memory(plan)
        except UserError:
            return
        self._priced += 1
        seconds = price_plan(plan, profile=self._profile).iteration_seconds
        if seconds < self._upper:
            self._upper, self._plan = seconds, plan

    def _least(
        self, chosen: Sequence[Pipeline], micro_batches: Vector, zero_stage: Literal[0, 1, 2]
    ) -> float:
        """Below the price: each rank's own collectives one after the other, waiting for nobody."""
        key = (zero_stage, tuple(one.holding for one in chosen))
        if key not in self._after:
            self._after[key] = self._after_backward(self._make_plan(chosen, micro_batches, zero_stage))
        reduce, rest = self._after[key]
        ends = [end for one, n in zip(chosen, micro_batches, strict=True) for end in one.ends(n)]
        return max(end + after for end, after in zip(ends, reduce, strict=True)) + rest

    def _after_backward(self, plan: Plan) -> tuple[list[float], float]:
        """(each stage's seconds of reducing, seconds of update and gathering)."""
        sync = SyncSeconds(plan, self._profile)
        gather = [0.0] * plan.world_size
        reduce = [0.0] * plan.world_size
        for call in gradient_layout(plan).calls:
            for rank in call.holders:
                reduce[rank] += sync.of(call).reduce
                gather[rank] += sync.of(call).gather
        of_stage: dict[tuple[int, int], float] = {}
        for place in plan.ranks:
            key = (place.pipeline, place.stage)
            of_stage[key] = max(of_stage.get(key, 0.0), reduce[place.rank])
        return list(of_stage.values()), slowest_optimizer_seconds(plan, self._profile) + max(gather)

    def _make_plan(
        self, chosen: Sequence[Pipeline], micro_batches: Vector, zero_stage: Literal[0, 1, 2]
    ) -> Plan:
        left = [list(ids) for ids in self._maker.ids.values()]
        held = sum(one.size * n for one, n in zip(chosen, micro_batches, strict=True))
        surplus = held - self._request.global_batch_size
        pipelines = []
        for index, (one, n) in enumerate(zip(chosen, micro_batches, strict=True)):
            masked = min(surplus, one.size - 1)
            surplus -= masked
            pipelines.append(
                PipelinePlan(
                    id=index,
                    micro_batch_size=one.size,
                    samples=one.size * n - masked,
                    local_batch_size=one.size * n,
                    stages=tuple(self._stage_plans(one.stages, left)),
                )
            )
        request = self._request
        return Plan(
            model=request.model,
            cluster=request.cluster,
            global_batch_size=request.global_batch_size,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            zero_stage=zero_stage,
            zero_scope=request.zero_scope,
            idle_devices=tuple(itertools.chain.from_iterable(left)),
            pipelines=tuple(pipelines),
        )

    def _stage_plans(self, stages: Sequence[Stage], left: list[list[str]]) -> Iterator[StagePlan]:
        """With the next devices of each place."""
        everything, first = layer_operators(self._request.model), 0
        for stage in stages:
            devices = []
            for place in stage.places:
                devices += left[place][: stage.tp]
                del left[place][: stage.tp]
            yield StagePlan(
                devices=tuple(devices),
                tp=stage.tp,
                dp=len(stage.rows),
                rows=stage.rows,
                layers=(first, first + stage.layers),
                embedding=stage.embedding,
                head=stage.head,
                recompute=dict.fromkeys(everything, stage.layers) if stage.recomputes else {},
            )
            first += stage.layers


def _most_worth(counts: Vector, worth: dict[Vector, int]) -> dict[Vector, int]:
    """By the devices that are left: the most samples that pipelines on some of them can take."""
    most: dict[Vector, int] = {}
    for left in sorted(itertools.product(*(range(n + 1) for n in counts)), key=sum):
        rests = {vector: minus(left, vector) for vector in worth}
        most[left] = max((worth[v] + most[rest] for v, rest in rests.items() if min(rest) >= 0), default=0)
    return most
