"""ZeRO as the search sees it: over how many devices a stage shares its optimizer state, before the other
pipelines are known."""

from __future__ import annotations

import math
from dataclasses import dataclass

from planner.cost.zero import search_zero_ways
from planner.model_spec import ModelSpec
from planner.parameters import model_parameters
from planner.plan import Dtypes
from planner.profile.analytic import PRECISION_BYTES
from planner.search.exact.role import Role

_ANY = 1e9


@dataclass(frozen=True)
class Zero:
    """A ZeRO stage and what is known of the pipelines.

    Args:
        stage: 0, 1 or 2.
        scope: `all` shares over the holders in all pipelines, `pipeline` over the replicas of a stage.
        pipelines: how many there are at least.
        most: take the most ways that any plan could have, for bounds; else the fewest.
        limit: but no more ways than so many.
    """

    stage: int = 0
    scope: str = "all"
    pipelines: int = 1
    most: bool = False
    limit: float = math.inf

    @property
    def alone(self) -> bool:
        """Whether the ways depend on all that a stage of the only pipeline holds, and so take long to tell."""
        return bool(self.stage) and self.most and self.scope == "all" and self.pipelines == 1

    def ways(self, model: ModelSpec, *, tp: int, dp: int, micro_batch_size: int, role: Role) -> float:
        """Over how many devices a stage's optimizer state is shared."""
        if not self.stage:
            return 1.0
        if not self.most or self.scope == "pipeline":
            return search_zero_ways(
                zero_stage=self.stage, zero_scope=self.scope, pipelines=self.pipelines, dp=dp
            )
        if not self.alone:
            return min(_ANY, self.limit)
        ways = _most_ways_alone(model, tp=tp, dp=dp, micro_batch_size=micro_batch_size, role=role)
        return min(ways, self.limit)

    def gradient_bytes_per_value(self, dtypes: Dtypes, *, dp: int) -> float:
        """Bytes that count as one all-reduce over all holders: reducing and, from ZeRO-1 on, gathering halves.

        At scope `pipeline` only what the stages reduce between them; ZeRO-2 has reduced inside the stage before.
        """
        wire, param = PRECISION_BYTES[dtypes.wire], PRECISION_BYTES[dtypes.param]
        if not self.stage:
            return wire
        if self.scope == "pipeline":
            return wire / dp
        return (wire + param) / 2 if self.stage == 1 or dp == 1 else param / 2

    def own_bytes_per_value(self, dtypes: Dtypes) -> float:
        """Bytes that count as one all-reduce over the replicas of the stage alone."""
        if not self.stage or self.scope == "all":
            return 0.0
        wire, param = PRECISION_BYTES[dtypes.wire], PRECISION_BYTES[dtypes.param]
        return (wire + param) / 2 if self.stage == 1 else param / 2

    def gathered_bytes_per_value(self, dtypes: Dtypes) -> tuple[float, float]:
        """Of the bytes that count as an all-reduce over all holders, and over the replicas of the stage alone, those
        of gathering parameters, which waits for the optimizer's step."""
        half = PRECISION_BYTES[dtypes.param] / 2 if self.stage else 0.0
        return (half, 0.0) if self.scope == "all" else (0.0, half)

    def holders(self, dp: int) -> int:
        """Replicas of a stage that take part in the all-reduce over all pipelines."""
        return 1 if self.stage and self.scope == "pipeline" else dp


def _most_ways_alone(model: ModelSpec, *, tp: int, dp: int, micro_batch_size: int, role: Role) -> float:
    """Of a stage of the only pipeline: TP ranks also share what TP replicates, both ends a tied table.

    The part with the most ways stands for all: layers, or an end of the model.
    """
    shares: dict[str, list[float]] = {"ends": [0.0, 0.0], "layer": [0.0, 0.0]}
    for parameter in model_parameters(model):
        kind = parameter.region.kind
        if kind == "layer" and parameter.region.layer:
            continue
        held = kind == "layer" or (role.embedding and kind == "embedding")
        if not (held or (role.head and (kind != "embedding" or parameter.tied))):
            continue
        values = parameter.shard_numel(tp=tp, tp_rank=0)
        ways = dp * (tp if parameter.tp_dim is None else 1)
        if parameter.tied and role is not Role.SINGLE:
            ways += micro_batch_size
        part = shares["layer" if kind == "layer" else "ends"]
        part[0] += values
        part[1] += values / ways
    return max((values / share for values, share in shares.values() if share), default=1.0)
