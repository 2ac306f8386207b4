"""The models of one request's stages, which searches of the same request share: each keeps what it is asked twice."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cost.memory import MemoryModel
from planner.cost.recompute import RecomputeModel
from planner.cost.stages import StageCost
from planner.profile.table import ProfileTable
from planner.request import PlanRequest


@dataclass(frozen=True)
class CostModels:
    """Seconds, memory and recomputation of stages. They depend neither on how many devices of a type there are, nor on
    the batch and what a plan may make use of."""

    cost: StageCost
    memory: MemoryModel
    recompute: RecomputeModel

    @classmethod
    def of_request(cls, request: PlanRequest, *, profile: ProfileTable) -> CostModels:
        cost, memory = StageCost.of_request(request, profile=profile), MemoryModel.of_request(request)
        return cls(cost, memory, RecomputeModel(cost, memory))
