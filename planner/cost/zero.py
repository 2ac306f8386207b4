"""ZeRO: over how many devices optimizer state and its update are shared.

From ZeRO-1 on every holder of a gradient block keeps the optimizer state of its equal shard of the block:
with scope `all` over the holders in all pipelines, with `pipeline` over the replicas of its own stage.
ZeRO-2 also keeps no more of the gradients than the shard of the stage's replicas.
"""

from __future__ import annotations

from functools import lru_cache

from planner.cost.held import held_values
from planner.gradient_blocks import StageLayout, layout_blocks, stage_layouts
from planner.model_spec import ModelSpec
from planner.plan import Plan


def search_zero_ways(*, zero_stage: int, zero_scope: str, pipelines: int, dp: int) -> float:
    """Ways of a stage with `dp` replicas when so many pipelines are known: no more than a plan has.

    Every other pipeline holds each layer at least once.
    """
    if not zero_stage:
        return 1.0
    return float(dp + (pipelines - 1 if zero_scope == "all" else 0))


def stage_ways(plan: Plan) -> tuple[tuple[float, ...], ...]:
    """`[pipeline][stage]`: values that the fullest device holds over those whose optimizer state it keeps."""
    if not plan.zero_stage:
        return tuple((1.0,) * len(pipeline.stages) for pipeline in plan.pipelines)
    if plan.zero_scope == "pipeline":
        return tuple(tuple(float(stage.dp) for stage in pipeline.stages) for pipeline in plan.pipelines)
    ways = iter(_layout_ways(plan.model, stage_layouts(plan)))
    return tuple(tuple(next(ways) for _ in pipeline.stages) for pipeline in plan.pipelines)


@lru_cache(maxsize=64)
def _layout_ways(model: ModelSpec, stages: tuple[StageLayout, ...]) -> tuple[float, ...]:
    shares = [0.0] * (stages[-1].first_rank + stages[-1].tp * stages[-1].dp)
    for block in layout_blocks(model, stages):
        share = block.numel / len(block.holders)
        for rank in block.holders:
            shares[rank] += share
    return tuple(
        held_values(model, stage.tp, stage.layers[1] - stage.layers[0], stage.embedding, stage.head).numel
        / max(shares[rank] for rank in stage.all_ranks)
        for stage in stages
    )
