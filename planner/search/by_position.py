"""Which stages of a plan cut activations by position (sequence parallelism), the rest of the plan staying as it is.

Under TP it moves half as much again in backward, and saves time in norms and residuals and memory in every layer; what
memory it saves, a stage need not recompute. A stage cuts if that makes its micro-batch quicker, or if it fits only so.
Under Eq. 5 each stage then is at its best by itself; its neighbours get whole activations either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from planner.cost.layer_flow import Recompute, recompute_of
from planner.cost.memory import StageLoad
from planner.cost.models import CostModels
from planner.cost.plan_memory import PlanMemory
from planner.cost.stage_shape import stage_shape
from planner.operators import cuts_positions
from planner.plan import PipelinePlan, Plan, StagePlan
from planner.request import PlanRequest


def cut_by_position(plan: Plan, request: PlanRequest, models: CostModels) -> tuple[PipelinePlan, ...]:
    """The plan's pipelines, themselves where nothing is to be gained."""
    chooser = _Chooser(plan, request, models)
    pipelines = []
    for index, pipeline in enumerate(plan.pipelines):
        stages = tuple(chooser.best(index, number) for number in range(len(pipeline.stages)))
        pipelines.append(pipeline.model_copy(update={"stages": stages}))
    if pipelines == list(plan.pipelines):
        return plan.pipelines
    return tuple(pipelines)


class _Chooser:
    """Stages of one plan; those alike are worked out once."""

    def __init__(self, plan: Plan, request: PlanRequest, models: CostModels) -> None:
        self._plan, self._request = plan, request
        self._cost, self._recompute = models.cost, models.recompute
        self._memory = PlanMemory(plan)
        self._known: dict[object, tuple[bool, Recompute] | None] = {}

    def best(self, pipeline: int, number: int) -> StagePlan:
        """The stage, cut or not, with the least that it must recompute."""
        stage = self._plan.pipelines[pipeline].stages[number]
        if not cuts_positions(tp=stage.tp, sequence_length=self._plan.sequence_length):
            return stage
        loads = self._loads(pipeline, number)
        nodes = self._plan.cluster.device_by_id
        places = tuple(nodes[stage.tp_group(replica)[0]].node for replica in range(stage.dp))
        order = {node: place for place, node in enumerate(dict.fromkeys(places))}
        key = (loads, stage.sequence_parallel, recompute_of(stage.recompute), tuple(map(order.get, places)))
        if key not in self._known:
            self._known[key] = self._better(stage, loads)
        found = self._known[key]
        if found is None:
            return stage
        return stage.model_copy(update={"sequence_parallel": found[0], "recompute": dict(found[1])})

    def _better(
        self, stage: StagePlan, loads: Sequence[tuple[str, StageLoad]]
    ) -> tuple[bool, Recompute] | None:
        """Whether to cut and what to recompute; None to leave the stage as it is."""
        best, least = None, self._seconds(stage, stage.sequence_parallel, recompute_of(stage.recompute))
        for cut in (False, True):
            needed = self._needed([(type_, replace(load, sequence_parallel=cut)) for type_, load in loads])
            if needed is None:
                continue
            seconds = self._seconds(stage, cut, needed)
            # By more than round-off.
            if seconds < least * (1 - 1e-9):
                best, least = (cut, needed), seconds
        return best

    def _needed(self, loads: Sequence[tuple[str, StageLoad]]) -> Recompute | None:
        if self._request.recompute:
            replay = self._recompute.fewest(loads)
            return replay.recompute if replay else None
        types = self._plan.cluster.device_types
        return () if all(self._memory.model.fits(load, types[type_]) for type_, load in loads) else None

    def _seconds(self, stage: StagePlan, cut: bool, recompute: Recompute) -> float:
        shape = stage_shape(stage, self._plan.cluster, zero_stage=self._plan.zero_stage)
        return self._cost.stage_step(replace(shape, sequence_parallel=cut, recompute=recompute)).total

    def _loads(self, pipeline: int, number: int) -> tuple[tuple[str, StageLoad], ...]:
        """Of each distinct replica, recomputing nothing."""
        stage = self._plan.pipelines[pipeline].stages[number]
        found: dict[tuple[str, int], StageLoad] = {}
        for replica, rows in enumerate(stage.rows):
            type_ = self._plan.cluster.device_by_id[stage.tp_group(replica)[0]].type
            if (type_, rows) not in found:
                load = self._memory.load(pipeline=pipeline, stage=number, replica=replica)
                found[type_, rows] = replace(load, recompute=())
        return tuple((type_, load) for (type_, _), load in sorted(found.items(), key=lambda one: one[0]))
