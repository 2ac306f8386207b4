"""Refining a plan on its true price: samples and layers for the transfers that its devices really have,
then single layers moved while that helps. Budgets count prices, so the result does not depend on the
machine's speed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from planner.cost.pipeline import stage_end_seconds
from planner.cost.price import iteration_seconds
from planner.plan import PipelinePlan, Plan, PredictedPipeline
from planner.profile.table import StepSeconds
from planner.search.exact.chains import Chain
from planner.search.exact.placement import Order, Placed
from planner.search.exact.plans import Assembler
from planner.search.exact.role import Role, role_of
from planner.search.exact.settle import Settler
from planner.search.exact.stage_table import StageTable

_BALANCE_ROUNDS = 3
# A shift that makes its own pipeline this much later may still let gradients start earlier.
_WORSE = 1.003
_TRIED = 6


@dataclass(frozen=True)
class Candidate:
    """Chains on devices, with the plan they make."""

    chains: tuple[Chain, ...]
    placed: Placed
    plan: Plan

    @property
    def seconds(self) -> float:
        return iteration_seconds(self.plan)


class Refiner:
    """Makes and improves candidates. `tables` are for the number of pipelines that share gradients."""

    def __init__(
        self, assembler: Assembler, tables: Sequence[StageTable], settlers: dict[int, Settler]
    ) -> None:
        self._assembler = assembler
        self._tables = {table.micro_batch_size: table for table in tables}
        self._settlers = settlers

    def candidates(self, chains: Sequence[Chain], *, most: int) -> Iterator[Candidate]:
        """The chains on devices in either order, the best ones balanced; none if the nodes cannot be cut so."""
        orders: tuple[Order, ...] = ("inside", "aligned")
        found = [made for order in orders if (made := self._made(chains, order)) is not None]
        if not found and (tight := self._made(chains, "tight")) is not None:
            found.append(tight)
        for candidate in sorted(found, key=lambda one: one.seconds)[:most]:
            yield self._balanced(candidate)

    def improved(self, candidate: Candidate, *, prices: int) -> Candidate:
        """Single layers moved inside the pipelines that end last, for so many prices at most."""
        while prices > 0:
            tried = list(self._shifts(candidate))[: min(prices, _TRIED)]
            if not tried:
                break
            prices -= len(tried)
            best = min((self._rebuilt(candidate, chains) for chains in tried), key=lambda one: one.seconds)
            if best.seconds >= candidate.seconds * (1 - 1e-6):
                break
            candidate = best
        return candidate

    def _made(self, chains: Sequence[Chain], order: Order) -> Candidate | None:
        busy, samples = self._assembler.busy(chains)
        placed = self._assembler.placed(busy, order)
        plan = self._assembler.plan(busy, placed, samples) if placed is not None else None
        return Candidate(tuple(busy), placed, plan) if placed is not None and plan is not None else None

    def _balanced(self, candidate: Candidate) -> Candidate:
        """Layers and samples for the plan's own transfers."""
        for _ in range(_BALANCE_ROUNDS):
            chains = []
            for chain, pipeline, priced in self._priced(candidate):
                exchange = [stage.exchange_seconds for stage in priced.stages]
                settler = self._settlers[chain.micro_batch_size]
                chains.append(settler.resplit(chain, exchange, pipeline.micro_batches))
            better = min(
                (self._rebuilt(candidate, chains), self._rebuilt(candidate, candidate.chains)),
                key=lambda one: one.seconds,
            )
            if better.seconds >= candidate.seconds * (1 - 1e-6):
                break
            candidate = better
        return candidate

    def _rebuilt(self, candidate: Candidate, chains: Sequence[Chain]) -> Candidate:
        """Other layers on the same devices, with samples for their true paces."""
        true = [
            self._true(chain, old, priced)
            for chain, (old, _, priced) in zip(chains, self._priced(candidate), strict=True)
        ]
        busy, samples = self._assembler.busy(true)
        if len(busy) < len(true):
            # A pipeline without samples would leave its devices idle: not this candidate's business.
            return candidate
        plan = self._assembler.plan(true, candidate.placed, samples)
        return candidate if plan is None else Candidate(tuple(true), candidate.placed, plan)

    def _true(self, chain: Chain, old: Chain, priced: PredictedPipeline) -> Chain:
        """The chain with the seconds that its stages have on their devices; layers may differ from the
        priced."""
        stages, count = [], len(chain.stages)
        table = self._tables[chain.micro_batch_size]
        for index, (stage, before, seen) in enumerate(
            zip(chain.stages, old.stages, priced.stages, strict=True)
        ):
            position, choice = count - index, chain.specs[index][0]
            role = role_of(position=position, stages=count)
            forward, backward = table.forward[role, choice], table.backward[role, choice]
            replay = table.replay_at(role, position)[choice]
            again = float(replay[stage.layers]) - float(replay[before.layers])
            stages.append(
                replace(
                    stage,
                    forward=seen.forward_seconds + float(forward[stage.layers] - forward[before.layers]),
                    backward=seen.backward_seconds
                    + float(backward[stage.layers] - backward[before.layers])
                    + (again if math.isfinite(again) else 0.0),
                    after=float(table.after[role, choice, stage.layers]),
                    tail=float(table.tail[role, choice, stage.layers]),
                )
            )
        return replace(chain, stages=tuple(stages))

    def _shifts(self, candidate: Candidate) -> Iterator[list[Chain]]:
        """One layer moved in a pipeline that ends last, and in all pipelines of the same stages; by its own
        end."""
        plan = candidate.plan
        assert plan.predicted is not None
        ends = [pipeline.end_seconds for pipeline in plan.predicted.pipelines]
        last = max(range(len(ends)), key=lambda index: ends[index])
        chain = candidate.chains[last]
        pipeline = plan.pipelines[last]
        own = _own_end(chain, pipeline.micro_batches)
        found = []
        for index, other in enumerate(self._moved(candidate, last)):
            end = _own_end(other, pipeline.micro_batches)
            if end <= own * _WORSE:
                found.append((end, index, other))
        for _, _, other in sorted(found, key=lambda one: one[:2]):
            yield [other if old.specs == chain.specs else old for old in candidate.chains]

    def _moved(self, candidate: Candidate, number: int) -> Iterator[Chain]:
        chain, plan = candidate.chains[number], candidate.plan
        assert plan.predicted is not None
        stages, table = len(chain.stages), self._tables[chain.micro_batch_size]
        for source in range(stages):
            for target in range(stages):
                layers = [stage.layers for stage in chain.stages]
                layers[source] -= 1
                layers[target] += 1
                if source != target and _fits(table, chain, layers):
                    moved = replace(
                        chain,
                        specs=tuple((choice, n) for (choice, _), n in zip(chain.specs, layers, strict=True)),
                        stages=tuple(replace(s, layers=n) for s, n in zip(chain.stages, layers, strict=True)),
                    )
                    yield self._true(moved, chain, plan.predicted.pipelines[number])

    def _priced(self, candidate: Candidate) -> list[tuple[Chain, PipelinePlan, PredictedPipeline]]:
        assert candidate.plan.predicted is not None
        pipelines, predicted = candidate.plan.pipelines, candidate.plan.predicted.pipelines
        return list(zip(candidate.chains, pipelines, predicted, strict=True))


def _fits(table: StageTable, chain: Chain, layers: Sequence[int]) -> bool:
    count = len(layers)
    for index, ((choice, _), held) in enumerate(zip(chain.specs, layers, strict=True)):
        role = role_of(position=count - index, stages=count)
        if not (role is Role.MIDDLE) <= held <= table.most[role, choice, count - index]:
            return False
    return True


def _own_end(chain: Chain, micro_batches: int) -> float:
    """Eq. 5 with each stage's own gradients."""
    steps = [StepSeconds(stage.forward, stage.backward) for stage in chain.stages]
    ends = stage_end_seconds(steps, micro_batches=micro_batches)
    synced = max(end + stage.after - stage.tail for end, stage in zip(ends, chain.stages, strict=True))
    return synced + max(stage.tail for stage in chain.stages)
