"""Strategy `eth`, first version: complete enumeration of heterogeneous pipelines (paper 4.2).

Exact, for a cluster handed out device by device: pipeline device groups, stage device groups, TP and DP,
layer splits and micro-batch sizes under Eq. 1, and the local batches under Eq. 2-5. Branches are cut only
by bounds. Not exact: rows of a stage that mixes device types (the quickest, and those that hold more
layers); a pipeline's configurations are kept for three numbers of samples before the local batches are
known, then searched again with the assigned ones; memory counts the micro-batches of the largest of these
numbers; gradient blocks are priced for the most promising combinations only. A cluster of more than eight
devices is planned coarsely (`layouts`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Literal

from planner.cost.models import CostModels
from planner.cost.price import check_memory, price_plan
from planner.errors import UserError
from planner.local_batches import Pace, allocate, equal_shares
from planner.plan import PipelinePlan, Plan
from planner.profile.table import ProfileTable
from planner.request import PlanRequest
from planner.search.assemble import DevicePool, pipelines_of, plan_of, renumbered
from planner.search.choice import SearchCounts
from planner.search.combine import Combination
from planner.search.device_groups import DeviceGrid
from planner.search.diagnose import cannot_fit
from planner.search.grid_search import GridSearch, Priced
from planner.search.layouts import Layout, Slice, layouts, whole_cluster
from planner.search.savers import PLAIN, Rungs, Savers, settings

_PROGRESS_SECONDS = 1.0
# Layouts that fit and are compared, of a cluster that is planned coarsely.
MOST_LAYOUTS = 3


class Enumeration:
    """One run of the strategy."""

    def __init__(
        self,
        request: PlanRequest,
        *,
        profile: ProfileTable,
        progress: Callable[[str], None],
        savers: Savers = PLAIN,
        models: CostModels | None = None,
    ) -> None:
        """`models` are those of the request, if there are some already."""
        self._request = request
        self._savers = savers
        self._profile = profile
        self._progress = progress
        self._told = time.monotonic()
        self.counts = SearchCounts()
        self._models = models or CostModels.of_request(request, profile=profile)

    def best(self) -> tuple[Plan, Layout] | None:
        """The cheapest plan over the first few layouts that fit, and its layout; None if nothing fits."""
        found: list[tuple[float, int, Plan, Layout]] = []
        to_try = layouts(self._request.cluster)
        for index, layout in enumerate(to_try):
            plan = self._plan_layout(layout)
            if plan is not None:
                found.append((self._price(plan), index, plan, layout))
            if len(found) == MOST_LAYOUTS:
                break
        if found:
            _, _, plan, layout = min(found, key=lambda one: one[:2])
            return plan, layout
        # The largest pipelines, in the finest parts: slow, but the last that may hold the model.
        resort = Layout((whole_cluster(self._request.cluster),), coarse=True)
        plan = self._plan_layout(resort) if to_try[0].coarse else None
        return (plan, resort) if plan is not None else None

    def _plan_layout(self, layout: Layout) -> Plan | None:
        """Plan every distinct slice for its part of the batch, then balance all pipelines together."""
        batches = self._slice_batches(layout)
        results: dict[tuple[DeviceGrid, int], Priced | None] = {}
        for part, batch in zip(layout.slices, batches, strict=True):
            if (part.grid, batch) not in results:
                results[part.grid, batch] = self._search(part, batch)
        pool = DevicePool(self._request.cluster)
        pipelines: list[PipelinePlan] = []
        paces: list[Pace] = []
        for part, batch in zip(layout.slices, batches, strict=True):
            priced = results[part.grid, batch]
            if priced is not None:
                pipelines += self._pipelines(priced.combination, part, pool)
                paces += [choice.pace for choice in priced.combination.choices]
        if not pipelines:
            return None
        if len(layout.slices) == 1:
            return self._plan(pipelines)
        return self._balanced(pipelines, paces)

    def _balanced(self, pipelines: Sequence[PipelinePlan], paces: Sequence[Pace]) -> Plan:
        """Local batches over the pipelines of all slices; one that gets no sample leaves its devices idle."""
        batch = self._request.global_batch_size
        if self._request.equal_batches:
            pipelines, paces = pipelines[:batch], paces[:batch]
            samples = equal_shares(len(pipelines), global_batch_size=batch)
        else:
            samples = allocate(paces, global_batch_size=batch)
        busy = [(pipeline, count) for pipeline, count in zip(pipelines, samples, strict=True) if count]
        return self._plan(renumbered([p for p, _ in busy], [n for _, n in busy]))

    def _search(self, part: Slice, batch: int) -> Priced | None:
        return GridSearch(
            grid=part.grid,
            models=self._models,
            global_batch_size=batch,
            equal_batches=self._request.equal_batches,
            price=lambda combination: self._price_of(combination, part, batch),
            counts=self.counts,
            tick=self._tick,
            savers=self._savers,
        ).run()

    def _price_of(self, combination: Combination, part: Slice, batch: int) -> float:
        """Price of a combination on its slice alone; inf if it does not fit its devices."""
        pool = DevicePool(self._request.cluster)
        pipelines = self._pipelines(combination, part, pool)
        plan = self._plan(pipelines, batch=batch)
        try:
            check_memory(plan)
        except UserError:
            return math.inf
        return self._price(plan)

    def _pipelines(self, combination: Combination, part: Slice, pool: DevicePool) -> list[PipelinePlan]:
        return pipelines_of(combination, bundles=part.bundles, types=part.grid.types, pool=pool)

    def _plan(self, pipelines: Sequence[PipelinePlan], batch: int | None = None) -> Plan:
        """A Plan of the pipelines, every other device idle; `batch` stands in for the request's."""
        request = self._request
        if batch is not None and batch != request.global_batch_size:
            request = request.model_copy(update={"global_batch_size": batch})
        used = {device for pipeline in pipelines for device in pipeline.devices}
        idle = tuple(device.id for device in request.cluster.devices if device.id not in used)
        return plan_of(
            request, pipelines, idle=idle, profile=self._profile, zero_stage=self._savers.zero_stage
        )

    def _price(self, plan: Plan) -> float:
        return price_plan(plan, cost=self._models.cost).iteration_seconds

    def _slice_batches(self, layout: Layout) -> list[int]:
        """Samples a slice is planned for: its part of the cluster's matrix speed, at least one."""
        types, precision = self._request.cluster.device_types, self._request.dtypes.param
        speeds = [
            sum(
                types[name].tflops(precision) * count
                for name, count in zip(part.grid.types, part.grid.counts(), strict=True)
            )
            for part in layout.slices
        ]
        batch = self._request.global_batch_size
        return [max(1, math.ceil(batch * speed / sum(speeds) - 1e-9)) for speed in speeds]

    def _tick(self) -> None:
        now = time.monotonic()
        if now - self._told >= _PROGRESS_SECONDS:
            self._told = now
            self._progress(
                f"searching: {self.counts.pipelines_searched} pipelines,"
                f" {self.counts.stages_seen} stages seen, {self.counts.branches_cut} branches cut"
            )


def plan(
    request: PlanRequest,
    *,
    profile: ProfileTable,
    progress: Callable[[str], None],
    recompute: Rungs = "none",
    zero_stages: tuple[Literal[0, 1, 2], ...] = (0,),
) -> Plan:
    """The strategy: a Plan with `search` statistics, `predicted` left to the caller.

    `recompute` and `zero_stages` widen the enumeration (planner/search/savers.py), one complete run a setting.
    """
    units = len(request.cluster.devices)
    found: list[tuple[float, int, Plan, dict[str, object]]] = []
    models = CostModels.of_request(request, profile=profile)
    for index, savers in enumerate(
        settings(
            recompute=recompute,
            zero_stages=zero_stages,
            zero_scope=request.zero_scope,
            most_pipelines=min(units, request.global_batch_size),
        )
    ):
        run = Enumeration(request, profile=profile, progress=progress, savers=savers, models=models)
        best = run.best()
        if best is not None:
            made, layout = best
            seconds = price_plan(made, cost=models.cost).iteration_seconds
            found.append((seconds, index, made, _statistics(run, layout)))
    if not found:
        raise cannot_fit(request, profile=profile)
    _, _, chosen, statistics = min(found, key=lambda one: one[:2])
    return chosen.model_copy(update={"search": statistics})


def _statistics(run: Enumeration, layout: Layout) -> dict[str, object]:
    return {
        **asdict(run.counts),
        "coarse": layout.coarse,
        "slices": len(layout.slices),
        "steps": dict(zip(layout.slices[0].grid.types, layout.slices[0].grid.steps, strict=True)),
    }
