"""What a peer may use to save memory besides recomputation and sequence parallelism (`splits.py`): the ZeRO stages that
the request allows, best first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from planner.cost.zero import search_zero_ways
from planner.request import PlanRequest

ZeroStage = Literal[0, 1, 2]


@dataclass(frozen=True)
class Zero:
    """A ZeRO stage, and how many pipelines hold every layer."""

    stage: ZeroStage = 0
    scope: Literal["all", "pipeline"] = "all"
    pipelines: int = 1

    def ways(self, replicas: int) -> float:
        """Over how many devices a stage's optimizer state is shared at least."""
        return search_zero_ways(
            zero_stage=self.stage, zero_scope=self.scope, pipelines=self.pipelines, dp=replicas
        )


def zero_order(request: PlanRequest) -> tuple[ZeroStage, ...]:
    """ZeRO-1 first: it takes less memory than none and no longer; then none, then ZeRO-2, which takes time."""
    return tuple(sorted(set(request.zero_stages), key=(1, 0, 2).index))
