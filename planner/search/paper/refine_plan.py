"""Refining any priced plan: bottleneck moves inside its pipelines, stages that cut activations by position, and local
batches, devices staying where they are. Only what the full price confirms is kept, so the plan never gets worse."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.cost.models import CostModels
from planner.cost.price import check_memory, iteration_seconds, with_prediction
from planner.errors import UserError
from planner.local_batches import allocate
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.assemble import renumbered
from planner.search.by_position import cut_by_position
from planner.search.exact.pool import every_pool
from planner.search.paper.balance import true_pace
from planner.search.paper.bottleneck import BottleneckSearch
from planner.search.paper.budget import EvaluationBudget
from planner.search.paper.configuration import Configuration, Evaluator, Tuned
from planner.search.paper.stage_figures import StageShop
from planner.search.shortlist import Offer, ignore

# Of the evaluations the moves of all pipelines may take this part, the rest is for prices.
_FOR_MOVES = 0.5


def refine_plan(
    plan: Plan,
    request: PlanRequest,
    *,
    profile: ProfileTable,
    budget: EvaluationBudget,
    models: CostModels | None = None,
    offer: Offer = ignore,
) -> Plan:
    """The plan, or a better one of the same stages' devices. The budget must be limited."""
    models = models or CostModels.of_request(request, profile=profile)
    return _Refiner(request, profile, models, budget, offer).refined(plan)


class _Refiner:
    def __init__(
        self,
        request: PlanRequest,
        profile: ProfileTable,
        models: CostModels,
        budget: EvaluationBudget,
        offer: Offer,
    ) -> None:
        self._models = models
        self._request, self._profile, self._budget, self._offer = request, profile, budget, offer
        self._pool = every_pool(request.cluster, request.model)
        self._kind_of = {kind.type: index for index, kind in enumerate(self._pool.kinds)}

    def refined(self, plan: Plan) -> Plan:
        count = min(2, len(plan.pipelines))
        shop = StageShop(
            self._request,
            self._pool,
            profile=self._profile,
            models=self._models,
            pipelines=count,
            zero_stage=plan.zero_stage,
            by_position=self._request.sequence_parallel,
        )
        groups = _alike(plan)
        left = self._budget.left
        assert left is not None, "refining takes what it is given"
        each = max(1, int(left * _FOR_MOVES) // len(groups))
        plan = self._better(plan, plan.pipelines)
        if self._request.sequence_parallel:
            plan = self._better(plan, cut_by_position(plan, self._request, self._models))
        for members in groups:
            tuned = self._tuned(plan.pipelines[members[0]], shop, evaluations=each)
            if tuned is None:
                continue
            pipelines = list(plan.pipelines)
            for index in members:
                made = self._pipeline(plan, plan.pipelines[index], tuned, shop)
                if made is None:
                    break
                pipelines[index] = made
            else:
                plan = self._better(plan, pipelines)
        return plan

    def _tuned(self, pipeline: PipelinePlan, shop: StageShop, *, evaluations: int) -> Tuned | None:
        """A configuration that ends the pipeline's samples sooner; None if none was found."""
        stages = pipeline.stages
        counts = tuple(self._counts(stage) for stage in stages)
        start = Configuration(
            pipeline.micro_batch_size,
            tuple(stage.tp for stage in stages),
            tuple(stage.layer_count for stage in stages),
        )
        evaluator = Evaluator(shop, counts, batch=pipeline.samples, budget=self._budget)
        found = BottleneckSearch(evaluator, evaluations=evaluations).run([start])
        if found is None or not found.fits or found.configuration == start:
            # What stages cut by position then is decided (planner/search/by_position.py).
            return None
        return found

    def _counts(self, stage: StagePlan) -> tuple[int, ...]:
        counts = [0] * len(self._pool.kinds)
        for device in stage.devices:
            counts[self._kind_of[self._request.cluster.device_by_id[device].type]] += 1
        return tuple(counts)

    def _pipeline(
        self, plan: Plan, pipeline: PipelinePlan, tuned: Tuned, shop: StageShop
    ) -> PipelinePlan | None:
        """The pipeline in another configuration, on its devices; None if they cannot be grouped so."""
        size = tuned.configuration.micro_batch_size
        stages, first = [], 0
        for old, figures, layers in zip(
            pipeline.stages, tuned.stages, tuned.configuration.layers, strict=True
        ):
            tp, rows = figures.choice.tp, figures.choice.rows
            devices: tuple[str, ...] | None = old.devices
            if (tp, size) == (old.tp, pipeline.micro_batch_size):
                rows = old.rows
            else:
                devices = self._regrouped(old, tp)
            recompute = shop.recompute_of(figures)
            if devices is None or recompute is None:
                return None
            update = {
                "devices": devices,
                "tp": tp,
                "dp": len(rows),
                "rows": rows,
                "layers": (first, first + layers),
                "sequence_parallel": figures.by_position,
                "recompute": dict(recompute),
            }
            stages.append(old.model_copy(update=update))
            first += layers
        return pipeline.model_copy(
            update={
                "stages": tuple(stages),
                "micro_batch_size": size,
                "local_batch_size": -(-pipeline.samples // size) * size,
            }
        )

    def _regrouped(self, stage: StagePlan, tp: int) -> tuple[str, ...] | None:
        """The stage's devices in TP groups of another size, kind by kind; None if some would leave its node."""
        known = self._request.cluster.device_by_id
        places: dict[tuple[int, str], list[str]] = {}
        for device in stage.devices:
            place = self._kind_of[known[device].type], known[device].node
            places.setdefault(place, []).append(device)
        if any(len(devices) % tp for devices in places.values()):
            return None
        order = sorted(places, key=lambda place: place[0])
        return tuple(device for place in order for device in places[place])

    def _better(self, plan: Plan, pipelines: Sequence[PipelinePlan]) -> Plan:
        """The best of the plan and what the pipelines make of it."""
        for other in self._priced(plan, pipelines):
            self._offer(other)
            if iteration_seconds(other) < iteration_seconds(plan):
                plan = other
        return plan

    def _priced(self, plan: Plan, pipelines: Sequence[PipelinePlan]) -> Iterator[Plan]:
        """The pipelines with the samples they have, and with those that their true pace suggests."""
        made = plan if pipelines is plan.pipelines else self._price(plan, pipelines)
        if made is None or self._request.equal_batches:
            yield from [made] if made is not None else []
            return
        yield made
        assert made.predicted is not None
        paces = [true_pace(p, seen) for p, seen in zip(made.pipelines, made.predicted.pipelines, strict=True)]
        samples = allocate(paces, global_batch_size=plan.global_batch_size)
        if min(samples) > 0 and samples != [pipeline.samples for pipeline in made.pipelines]:
            again = self._price(plan, renumbered(made.pipelines, samples))
            if again is not None:
                yield again

    def _price(self, plan: Plan, pipelines: Sequence[PipelinePlan]) -> Plan | None:
        if not self._budget.take(len(plan.cluster.devices)):
            return None
        other = Plan.model_validate(
            {**{name: getattr(plan, name) for name in Plan.model_fields}, "pipelines": tuple(pipelines)}
        )
        try:
            check_memory(other)
        except UserError:
            return None
        return with_prediction(other, cost=self._models.cost)


def _alike(plan: Plan) -> list[list[int]]:
    """Pipelines that are the same but for their devices' names, the most numerous first."""
    groups: dict[object, list[int]] = {}
    types = plan.cluster.device_by_id
    for index, pipeline in enumerate(plan.pipelines):
        key = (
            pipeline.micro_batch_size,
            pipeline.micro_batches,
            tuple(
                (
                    tuple(types[device].type for device in stage.devices),
                    stage.tp,
                    stage.rows,
                    stage.layers,
                    stage.sequence_parallel,
                )
                for stage in pipeline.stages
            ),
        )
        groups.setdefault(key, []).append(index)
    return sorted(groups.values(), key=lambda members: -len(members))
