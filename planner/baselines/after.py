"""About what gradients and optimizer take after the last backward; good enough to order candidates by."""

from __future__ import annotations

from collections.abc import Sequence

from planner.baselines.forms import Form
from planner.baselines.memory_savers import Zero
from planner.baselines.sketch import Chain
from planner.cost.gradient import update_bytes_per_value
from planner.cost.held import held_values
from planner.cost.links import all_reduce_seconds
from planner.profile.analytic import PRECISION_BYTES
from planner.profile.table import ProfileTable
from planner.request import PlanRequest


class After:
    """Estimates for one request; what is asked twice is kept."""

    def __init__(self, request: PlanRequest, profile: ProfileTable) -> None:
        self._request, self._profile = request, profile
        self._known: dict[tuple[object, ...], float] = {}

    def seconds(self, chain: Chain, layers: Sequence[int], zero: Zero) -> float:
        """Of the stage that takes longest."""
        last = len(chain) - 1
        return max(
            self._of_stage(form, count, stage == 0, stage == last, zero)
            for stage, (form, count) in enumerate(zip(chain, layers, strict=True))
        )

    def _of_stage(self, form: Form, layers: int, embedding: bool, head: bool, zero: Zero) -> float:
        key = (form, layers, embedding, head, zero)
        if key not in self._known:
            dtypes, links = self._request.dtypes, self._request.cluster.links
            values = held_values(self._request.model, form.tp, layers, embedding, head).numel
            replicas = len(form.replicas)
            update = values * update_bytes_per_value(dtypes) / zero.ways(replicas)
            updating = max(
                self._profile.streaming_seconds(device_type=type_, moved_bytes=update)
                for type_, _ in form.loads
            )
            alone = len(self._request.cluster.nodes) == 1
            link = min(
                (links.between(type_a=type_, type_b=type_, same_node=alone) for type_, _ in form.loads),
                key=lambda one: one.bandwidth,
            )
            # Sharded, gradients are reduced to shards and parameters gathered from them: a half each.
            width = float(PRECISION_BYTES[dtypes.wire])
            if zero.stage:
                width = (width + PRECISION_BYTES[dtypes.param]) / 2
            sync = all_reduce_seconds(link, members=replicas * zero.pipelines, message_bytes=values * width)
            self._known[key] = updating + sync
        return self._known[key]
