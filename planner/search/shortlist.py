"""Shortlist: the best few distinct plans that a search prices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from planner.cost.price import iteration_seconds
from planner.plan import PipelinePlan, Plan
from planner.prices import cost_per_million_tokens

Offer = Callable[[Plan], None]
"""Takes a priced plan that the search has come across."""


def ignore(plan: Plan) -> None:
    """The Offer of who only wants the best plan."""
    del plan


class Shortlist:
    """Keeps the best plans offered, those of least `rank`. Plans are distinct if their pipelines are, whatever
    devices play them and however the samples are shared; of the others only the best is kept."""

    def __init__(self, most: int, rank: Callable[[Plan], float] | None = None) -> None:
        """Without `rank`, the predicted seconds of an iteration."""
        assert most >= 1
        self._most = most
        self._rank = rank or iteration_seconds
        self._kept: dict[object, tuple[float, int, Plan]] = {}
        self._offered = 0

    def offer(self, plan: Plan) -> None:
        """Keep a priced plan if it is among the best."""
        self._offered += 1
        rank, key = self._rank(plan), pipelines_key(plan)
        if key in self._kept and self._kept[key][0] <= rank:
            return
        self._kept[key] = (rank, self._offered, plan)
        if len(self._kept) > self._most:
            worst = max(self._kept, key=lambda other: self._kept[other][:2])
            del self._kept[worst]

    @property
    def plans(self) -> list[Plan]:
        """Best first; of equal ones, the one offered first."""
        return [plan for _, _, plan in sorted(self._kept.values(), key=lambda one: one[:2])]


def rank_of(objective: str) -> Callable[[Plan], float]:
    """What a plan is ranked by: its seconds, or the cost of its tokens."""
    return iteration_seconds if objective == "time" else _cost


def _cost(plan: Plan) -> float:
    cost = cost_per_million_tokens(plan)
    assert cost is not None, "the request checks prices"
    return cost


def pipelines_key(plan: Plan) -> object:
    """What two plans that are not distinct have in common."""
    pipelines = Counter(_pipeline_key(plan, pipeline) for pipeline in plan.pipelines)
    return plan.zero_stage, frozenset(pipelines.items())


def _pipeline_key(plan: Plan, pipeline: PipelinePlan) -> object:
    stages = []
    for stage in pipeline.stages:
        types = tuple(plan.cluster.device_by_id[device].type for device in stage.devices)
        recompute = tuple(sorted(stage.recompute.items()))
        stages.append((types, stage.tp, stage.rows, stage.layers, recompute))
    return pipeline.micro_batch_size, tuple(stages)
