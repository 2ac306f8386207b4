"""What the enumeration may use to save memory: recomputation in all layers of a stage, and ZeRO."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from planner.cost.memory import StageLoad
from planner.cost.recompute import RecomputeModel
from planner.cost.zero import search_zero_ways
from planner.plan import Dtypes
from planner.profile.analytic import PRECISION_BYTES
from planner.search.stage_groups import StageOption

Rungs = Literal["none", "all-or-none", "rungs"]


@dataclass(frozen=True)
class Savers:
    """One setting of an enumeration.

    A stage recomputes nothing, everything (`all-or-none`), or what a rung of its ladder says (`rungs`), in
    all of its layers. ZeRO counts on at least `pipelines` pipelines, and groups of fewer are left out.
    """

    recompute: Rungs = "none"
    zero_stage: Literal[0, 1, 2] = 0
    zero_scope: Literal["all", "pipeline"] = "all"
    pipelines: int = 1

    def ways(self, replicas: int) -> float:
        """Over how many devices the optimizer state of a stage is shared at least."""
        return search_zero_ways(
            zero_stage=self.zero_stage, zero_scope=self.zero_scope, pipelines=self.pipelines, dp=replicas
        )

    def loaded(self, load: StageLoad, option: StageOption) -> StageLoad:
        """The load of a stage's replica as this setting runs it."""
        replicas = len(option.replicas)
        return replace(
            load,
            recompute=tuple((name, load.layers) for name in option.recomputed if load.layers),
            zero_stage=self.zero_stage,
            zero_ways=self.ways(replicas),
            dp=replicas,
        )

    def synchronised(self, dtypes: Dtypes) -> float:
        """Share of an all-reduce of gradients that reducing to shards and gathering from them takes."""
        if not self.zero_stage:
            return 1.0
        wire, param = PRECISION_BYTES[dtypes.wire], PRECISION_BYTES[dtypes.param]
        return (wire + param) / (2 * wire)

    def variants(self, option: StageOption, model: RecomputeModel) -> Iterator[StageOption]:
        """The option itself, and with what the rungs of its ladder recompute."""
        yield option
        if self.recompute == "none":
            return
        type_, rows = option.loads[0]
        rungs = model.ladder(device_type=type_, tp=option.tp, rows=rows)[1:]
        for rung in rungs[-1:] if self.recompute == "all-or-none" else rungs:
            yield replace(option, recomputed=rung.operators)


PLAIN = Savers()


def settings(
    *,
    recompute: Rungs,
    zero_stages: tuple[Literal[0, 1, 2], ...],
    zero_scope: Literal["all", "pipeline"],
    most_pipelines: int,
) -> list[Savers]:
    """Every setting to enumerate: under scope `all` one for each number of pipelines to count on."""
    found = []
    for stage in zero_stages:
        counts = range(1, most_pipelines + 1) if stage and zero_scope == "all" else (1,)
        found += [Savers(recompute, stage, zero_scope, count) for count in counts]
    return found
