"""When the last backward pass of every rank ends, and how much of it is left when it has passed a region."""

from __future__ import annotations

from planner.cost.layer_flow import first_layers, recompute_of
from planner.cost.pipeline import stage_end_seconds
from planner.cost.stage_shape import stage_shape
from planner.cost.stages import StageCost
from planner.plan import Plan


def backward_ends(plan: Plan, cost: StageCost) -> list[list[float]]:
    """Seconds from the start of the iteration to each stage's last backward, by pipeline (Eq. 5)."""
    ends = []
    for pipeline in plan.pipelines:
        shapes = [stage_shape(stage, plan.cluster, zero_stage=plan.zero_stage) for stage in pipeline.stages]
        steps = [stage.step for stage in cost.pipeline_stages(shapes)]
        ends.append(stage_end_seconds(steps, micro_batches=pipeline.micro_batches))
    return ends


class BackwardLeft:
    """How long a rank's backward of one micro-batch still takes when it has passed a region."""

    def __init__(self, plan: Plan, cost: StageCost) -> None:
        self._plan = plan
        self._cost = cost
        self._known: dict[tuple[int, int, int, int], float] = {}

    def seconds(self, rank: int, region: int) -> float:
        """Seconds of the layers below the region and of the embedding (regions count from it, 0)."""
        place = self._plan.ranks[rank]
        stage = self._plan.pipelines[place.pipeline].stages[place.stage]
        first, last = stage.layers
        below = min(max(region - 1 - first, 0), last - first)
        embedding = stage.embedding and region > 0
        if not below and not embedding:
            return 0.0
        key = (place.pipeline, place.stage, place.replica, below)
        if key not in self._known:
            self._known[key] = self._cost.replica_step(
                device_type=self._plan.cluster.device_by_id[place.device].type,
                tp=stage.tp,
                rows=stage.rows[place.replica],
                layers=below,
                embedding=embedding,
                recompute=first_layers(recompute_of(stage.recompute), below),
                sequence_parallel=stage.sequence_parallel,
            ).backward
        return self._known[key]
