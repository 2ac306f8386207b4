"""Strategy `type-split`: one homogeneous pipeline per device type, uneven local batches.

The paper's TypeSplit-HPP (section 7.5): devices are partitioned by type, each type's pipeline is optimised
on its own by ETH's stage search, and local batches are shared out as ETH does.

Here: for types of up to eight devices the complete stage search of the strategy `eth` for one pipeline;
and, for all types, the best single pipeline as found for `metis` (all stages of a type: own tp, dp and
layers). Pipelines are searched for the samples that a type's speed suggests, then again for the samples
they were assigned, and all choices are priced together. A type whose devices cannot hold the model alone
stays idle.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from planner.baselines import metis
from planner.baselines.bench import Bench, Budget, plan_fits
from planner.baselines.memory_savers import ZeroStage
from planner.baselines.stage_figures import SharedFigures
from planner.cluster import Node
from planner.cost.price import iteration_seconds, with_prediction
from planner.local_batches import Pace, allocate, equal_shares
from planner.plan import PipelinePlan, Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.assemble import DevicePool, pipelines_of, plan_of, renumbered
from planner.search.by_position import cut_by_position
from planner.search.choice import SearchCounts
from planner.search.combine import Combination
from planner.search.device_groups import DeviceGrid
from planner.search.grid_search import micro_batch_sizes
from planner.search.paper.balance import true_pace
from planner.search.savers import Savers
from planner.search.shortlist import Offer, ignore
from planner.search.stage_search import StageSearch

# Devices of a type up to which the complete stage search is run.
_MOST_DEVICES = 8
# And up to which it may recompute: that squares the ways to build a stage.
_MOST_RECOMPUTING_DEVICES = 3
# Searches of all pipelines: for the likely samples, then for those assigned.
_ROUNDS = 3


@dataclass(frozen=True)
class _Candidate:
    pipeline: PipelinePlan
    pace: Pace


def plan(
    request: PlanRequest,
    *,
    profile: ProfileTable,
    progress: Callable[[str], None],
    figures: SharedFigures | None = None,
    offer: Offer = ignore,
    budget: Budget | None = None,
) -> Plan:
    """The best pipeline of every type that can hold the model. UserError if none can."""
    bench = Bench(request, profile=profile, figures=figures, offer=offer, budget=budget)
    best: Plan | None = None
    for stage in bench.zero_stages:
        # Further sharding only helps where memory binds.
        if best is not None and stage == 2 and not (best.idle_devices or _recomputes(best)):
            continue
        if best is not None and stage == 0 and budget is not None:
            continue
        rounds = _ROUNDS if budget is None else 1
        for recompute in _recompute_choices(bench, complete=budget is None):
            found = _TypeSplit(bench, progress, stage, recompute=recompute, rounds=rounds).plan()
            if found is not None and (best is None or iteration_seconds(found) < iteration_seconds(best)):
                best = found
    if best is None:
        raise bench.cannot_fit("no type's devices alone can hold it")
    return best.model_copy(update={"search": bench.statistics()})


def _recompute_choices(bench: Bench, *, complete: bool) -> tuple[bool, ...]:
    """With recomputation the stage search is a narrower one, so few devices are also searched without."""
    if not bench.request.recompute:
        return (False,)
    few = max(bench.counts.values()) <= _MOST_DEVICES
    return (True, False) if complete and few else (True,)


def _recomputes(plan: Plan) -> bool:
    return any(stage.recompute for pipeline in plan.pipelines for stage in pipeline.stages)


class _TypeSplit:
    """The search under one ZeRO stage."""

    def __init__(
        self,
        bench: Bench,
        progress: Callable[[str], None],
        zero_stage: ZeroStage,
        *,
        recompute: bool,
        rounds: int,
    ) -> None:
        self._request = bench.request.model_copy(
            update={"zero_stages": (zero_stage,), "recompute": recompute}
        )
        self._profile, self._progress = bench.profile, progress
        self._zero_stage, self._rounds = zero_stage, rounds
        self.bench = bench
        self._types = list(bench.counts)
        self._candidates: dict[tuple[str, int], list[_Candidate]] = {}

    def plan(self) -> Plan | None:
        """The best plan, priced; None if no type can hold the model."""
        best: tuple[float, Plan] | None = None
        samples = self.likely_samples()
        for _ in range(self._rounds):
            found = self.best(samples)
            if found is None or (best is not None and found[0] >= best[0] * (1 - 1e-9)):
                break
            best = found
            samples = self.assigned(best[1])
        return best[1] if best else None

    def likely_samples(self) -> dict[str, int]:
        """Each type's part of the batch by its peak."""
        device_types, precision = self._request.cluster.device_types, self._request.dtypes.param
        speeds = {
            type_: device_types[type_].tflops(precision) * count for type_, count in self.bench.counts.items()
        }
        total = sum(speeds.values())
        batch = self._request.global_batch_size
        return {type_: max(1, math.ceil(batch * speed / total)) for type_, speed in speeds.items()}

    def assigned(self, plan: Plan) -> dict[str, int]:
        """Each busy type's samples."""
        cluster = plan.cluster
        return {cluster.device_by_id[p.devices[0]].type: p.samples for p in plan.pipelines}

    def best(self, samples: dict[str, int]) -> tuple[float, Plan] | None:
        """The cheapest plan of pipelines that were searched for these samples."""
        by_type = [found for type_, count in samples.items() if (found := self._of_type(type_, count))]
        best: tuple[float, Plan] | None = None
        for chosen in itertools.product(*by_type):
            plan = self._plan(chosen) if chosen else None
            if plan is not None:
                priced = self.bench.price(plan)
                assert priced.predicted is not None
                seconds = priced.predicted.iteration_seconds
                if best is None or seconds < best[0]:
                    best = seconds, priced
        return best

    def _plan(self, chosen: Sequence[_Candidate]) -> Plan | None:
        batch = self._request.global_batch_size
        if self._request.equal_batches:
            chosen = chosen[:batch]
            samples = equal_shares(len(chosen), global_batch_size=batch)
        else:
            samples = allocate([one.pace for one in chosen], global_batch_size=batch)
        ends = [
            one.pace.end_seconds(one.pace.micro_batches(n)) for one, n in zip(chosen, samples, strict=True)
        ]
        if not self.bench.of_use(max(ends)):
            return None
        busy = [(one.pipeline, count) for one, count in zip(chosen, samples, strict=True) if count]
        pipelines = renumbered([p for p, _ in busy], [count for _, count in busy])
        plan = self.bench.plan(pipelines, self._zero_stage)
        return plan if plan_fits(plan) else None

    def _of_type(self, type_: str, samples: int) -> list[_Candidate]:
        if (type_, samples) not in self._candidates:
            self._progress(f"type-split: {samples} samples on {type_}")
            self._candidates[type_, samples] = [
                *self._by_stage_search(type_, samples),
                *self._by_changes(type_, samples),
            ]
        return self._candidates[type_, samples]

    def _by_changes(self, type_: str, samples: int) -> Iterator[_Candidate]:
        part = self._request.model_copy(update={"global_batch_size": samples})
        # What beats the plan to beat is seen when all types' pipelines stand together.
        budget = replace(self.bench.budget, upper=math.inf)
        bench = Bench(part, profile=self._profile, figures=self.bench.figures, types=[type_], budget=budget)
        found = metis.best_pipeline(bench, progress=self._progress)
        for name in ("seen_count", "settled_count", "priced_count"):
            setattr(self.bench, name, getattr(self.bench, name) + getattr(bench, name))
        if found is not None:
            settled, _ = found
            yield _Candidate(settled.pipelines[0], settled.paces[0])

    def _by_stage_search(self, type_: str, samples: int) -> Iterator[_Candidate]:
        nodes = self._nodes_of(type_)
        grid = DeviceGrid((type_,), tuple((node.devices[0].count,) for node in nodes), (1,))
        if grid.devices > _MOST_DEVICES:
            return
        search = StageSearch(
            models=self.bench.models,
            grid=grid,
            micro_batch_sizes=micro_batch_sizes(grid, samples),
            counts=SearchCounts(),
            tick=lambda: None,
            savers=Savers(
                recompute=(
                    "all-or-none"
                    if self._request.recompute and grid.devices <= _MOST_RECOMPUTING_DEVICES
                    else "none"
                ),
                zero_stage=self._zero_stage,
                zero_scope=self._request.zero_scope,
            ),
        )
        for choice in search.best(grid.nodes, [samples])[0]:
            combination = Combination((grid.nodes,), (choice,), (samples,))
            (pipeline,) = pipelines_of(
                combination,
                bundles=[[node] for node in nodes],
                types=(type_,),
                pool=DevicePool(self._request.cluster),
            )
            yield _Candidate(pipeline, choice.pace)
            cut = self._cut_by_position(pipeline)
            if cut is not None:
                yield cut

    def _cut_by_position(self, pipeline: PipelinePlan) -> _Candidate | None:
        """The pipeline with stages that cut activations by position; None if it is no quicker so."""
        request = self._request.model_copy(update={"global_batch_size": pipeline.samples})
        if not request.sequence_parallel or all(stage.tp == 1 for stage in pipeline.stages):
            return None
        idle = tuple(
            device.id for device in request.cluster.devices if device.id not in set(pipeline.devices)
        )
        plan = plan_of(request, [pipeline], idle=idle, profile=self._profile, zero_stage=self._zero_stage)
        cut = cut_by_position(plan, request, self.bench.models)
        if cut == plan.pipelines:
            return None
        priced = with_prediction(plan.model_copy(update={"pipelines": cut}), cost=self.bench.cost)
        assert priced.predicted is not None
        return _Candidate(cut[0], true_pace(cut[0], priced.predicted.pipelines[0]))

    def _nodes_of(self, type_: str) -> list[Node]:
        """The nodes with their devices of one type only, those with most of them first."""
        held = []
        for node in self._request.cluster.nodes:
            entries = [entry for entry in node.devices if entry.type == type_]
            if entries:
                total = sum(entry.count for entry in entries)
                held.append(
                    node.model_copy(update={"devices": (entries[0].model_copy(update={"count": total}),)})
                )
        return sorted(held, key=lambda node: -node.devices[0].count)
