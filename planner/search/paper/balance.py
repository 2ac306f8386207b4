"""Hierarchical workload balance of one device group (paper 4.2.3): local batches, refinement, and the Plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from planner.cost.price import check_memory, with_prediction
from planner.errors import UserError
from planner.local_batches import Pace, allocate, equal_shares
from planner.plan import PipelinePlan, Plan, PredictedPipeline, StagePlan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.assemble import plan_of, renumbered
from planner.search.exact.placement import Order, Placed, place_stages
from planner.search.exact.pool import Pool, Vector
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.configuration import Tuned
from planner.search.paper.stage_figures import StageShop
from planner.search.shortlist import Offer

_REFINING_ROUNDS = 2


@dataclass(frozen=True)
class Balanced:
    """Pipelines that run together, and the samples each takes of the global batch."""

    pipelines: tuple[Tuned, ...]
    samples: tuple[int, ...]

    @property
    def estimated_seconds(self) -> float:
        """When the last pipeline ends (Eq. 2 and 5), its own gradients and optimizer included."""
        return max(
            tuned.pace.end_seconds(tuned.pace.micro_batches(count))
            for tuned, count in zip(self.pipelines, self.samples, strict=True)
        )

    @property
    def compute_seconds(self) -> float:
        """The same without what comes after the last backward."""
        return max(
            tuned.compute_seconds(count) for tuned, count in zip(self.pipelines, self.samples, strict=True)
        )


class Balancer:
    """Balances pipelines and makes priced Plans of them."""

    def __init__(
        self,
        request: PlanRequest,
        pool: Pool,
        *,
        profile: ProfileTable,
        shop_of: Callable[[Vector], StageShop],
        budget: EvaluationBudget,
        offer: Offer,
        zero_stage: Literal[0, 1, 2] = 0,
    ) -> None:
        self._request, self._pool, self._profile, self._shop_of = request, pool, profile, shop_of
        self._budget, self._offer, self._zero_stage = budget, offer, zero_stage

    def balanced(self, pipelines: Sequence[Tuned], refined: Callable[[Tuned, int], Tuned]) -> Balanced | None:
        """Local batches (Eq. 2-4), then configurations refined for them and the batches shared out again, while
        that ends sooner. None if no pipeline gets samples."""
        best = self._shared(pipelines)
        for _ in range(_REFINING_ROUNDS):
            if best is None:
                return None
            again = [refined(tuned, n) for tuned, n in zip(best.pipelines, best.samples, strict=True)]
            other = self._shared([tuned for tuned in again if tuned.fits])
            if other is None or other.estimated_seconds >= best.estimated_seconds:
                break
            best = other
        return best

    def plans(self, balanced: Balanced) -> Iterator[Plan]:
        """The pipelines on devices in different orders, samples shared out by their true pace; priced, offered."""
        orders: tuple[Order, ...] = ("inside", "aligned")
        placed = [made for order in orders if (made := self._placed(balanced, order)) is not None]
        if not placed and (tight := self._placed(balanced, "tight")) is not None:
            placed.append(tight)
        known: list[Placed] = []
        for devices in placed:
            if devices not in known:
                known.append(devices)
                yield from self._priced(balanced, devices)

    def _shared(self, pipelines: Sequence[Tuned]) -> Balanced | None:
        paces = [tuned.pace for tuned in pipelines]
        samples = self._samples(paces)
        busy = [(tuned, n) for tuned, n in zip(pipelines, samples, strict=False) if n]
        if not busy:
            return None
        return Balanced(tuple(tuned for tuned, _ in busy), tuple(n for _, n in busy))

    def _samples(self, paces: Sequence[Pace]) -> list[int]:
        batch = self._request.global_batch_size
        if not paces:
            return []
        if self._request.equal_batches:
            busy = min(len(paces), batch)
            shares = equal_shares(busy, global_batch_size=batch)
            return [*shares, *[0] * (len(paces) - busy)]
        return allocate(paces, global_batch_size=batch)

    def _placed(self, balanced: Balanced, order: Order) -> Placed | None:
        choices = [[stage.choice for stage in tuned.stages] for tuned in balanced.pipelines]
        return place_stages(self._pool, choices, order=order)

    def _priced(self, balanced: Balanced, devices: Placed) -> Iterator[Plan]:
        pipelines = []
        for index, (tuned, n) in enumerate(zip(balanced.pipelines, balanced.samples, strict=True)):
            made = self._pipeline(index, tuned, n, devices[index])
            if made is None:
                return
            pipelines.append(made)
        plan = self._plan(pipelines)
        if plan is None:
            return
        yield plan
        assert plan.predicted is not None
        true = [true_pace(p, seen) for p, seen in zip(plan.pipelines, plan.predicted.pipelines, strict=True)]
        samples = self._samples(true)
        if samples != list(balanced.samples) and min(samples) > 0:
            again = self._plan(renumbered(pipelines, samples))
            if again is not None:
                yield again

    def _plan(self, pipelines: Sequence[PipelinePlan]) -> Plan | None:
        """Priced; None if it does not fit after all, or the budget does not allow a price."""
        request = self._request
        if not self._budget.take(len(request.cluster.devices)):
            return None
        busy = {device for pipeline in pipelines for device in pipeline.devices}
        idle = tuple(device.id for device in request.cluster.devices if device.id not in busy)
        plan = plan_of(request, pipelines, idle=idle, profile=self._profile, zero_stage=self._zero_stage)
        try:
            check_memory(plan)
        except UserError:
            return None
        plan = with_prediction(plan, profile=self._profile)
        self._offer(plan)
        return plan

    def _pipeline(
        self, index: int, tuned: Tuned, samples: int, devices: Sequence[tuple[str, ...]]
    ) -> PipelinePlan | None:
        """None if a stage does not fit after all."""
        stages, first = [], 0
        shop = self._shop_of(tuned.composition)
        for number, (figures, layers) in enumerate(
            zip(tuned.stages, tuned.configuration.layers, strict=True)
        ):
            recompute = shop.recompute_of(figures)
            if recompute is None:
                return None
            stages.append(
                StagePlan(
                    devices=devices[number],
                    tp=figures.choice.tp,
                    dp=len(figures.choice.rows),
                    rows=figures.choice.rows,
                    layers=(first, first + layers),
                    embedding=number == 0,
                    head=number == len(tuned.stages) - 1,
                    sequence_parallel=figures.by_position,
                    recompute=dict(recompute),
                )
            )
            first += layers
        size = tuned.configuration.micro_batch_size
        return PipelinePlan(
            id=index,
            micro_batch_size=size,
            samples=samples,
            local_batch_size=-(-samples // size) * size,
            stages=tuple(stages),
        )


def true_pace(pipeline: PipelinePlan, seen: PredictedPipeline) -> Pace:
    """A priced pipeline's pace on its devices, gradients left out."""
    period = max(stage.forward_seconds + stage.backward_seconds for stage in seen.stages)
    end = max(stage.end_seconds - stage.all_reduce_seconds for stage in seen.stages)
    return Pace(pipeline.micro_batch_size, end - period * (pipeline.micro_batches - 1), period)
