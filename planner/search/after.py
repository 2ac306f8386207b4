"""What a pipeline needs after its last backward, estimated before its company is known.

Gradient blocks depend on all pipelines; the search of one pipeline only has to know that a stage with
data parallelism sends its gradients, and that a stage with many layers has many. Eq. 6, stage by stage.
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.cluster import Link
from planner.cost.gradient import update_bytes_per_value
from planner.cost.held import held_values
from planner.cost.links import all_reduce_seconds, slowest_link
from planner.cost.stages import StageCost
from planner.parameters import model_parameters
from planner.profile.analytic import PRECISION_BYTES
from planner.search.choice import After
from planner.search.device_groups import Composition, DeviceGrid, type_counts
from planner.search.savers import PLAIN, Savers
from planner.search.stage_groups import StageOption


class AfterEstimate:
    """Estimates of After for the pipelines of one grid."""

    def __init__(self, cost: StageCost, grid: DeviceGrid, savers: Savers = PLAIN) -> None:
        self._savers = savers
        self._share = savers.synchronised(cost.dtypes)
        self._cost = cost
        self._grid = grid
        self._wire = PRECISION_BYTES[cost.dtypes.wire]
        self._update = update_bytes_per_value(cost.dtypes)
        self._stages: dict[tuple[StageOption, int, bool, bool], After] = {}

    def of(self, options: Sequence[StageOption], layers: Sequence[int]) -> After:
        """Of a pipeline: its slowest stage's, and of a tied embedding the sum over both ends."""
        last = len(options) - 1
        stages = [
            self._stage(option, count, index == 0, index == last)
            for index, (option, count) in enumerate(zip(options, layers, strict=True))
        ]
        tied = (
            self._tied_seconds(options[0], options[-1]) if last and self._cost.model.tied_embedding else 0.0
        )
        return After(
            alone=max(stage.alone for stage in stages) + tied,
            together=max(stage.together for stage in stages),
        )

    def least(self, composition: Composition) -> After:
        """What any configuration of these devices needs: all parameters spread evenly, on the best links."""
        model, cost = self._cost.model, self._cost
        counts = type_counts(composition, len(self._grid.types))
        used = [type_ for type_, count in zip(self._grid.types, counts, strict=True) if count]
        values = held_values(model, 1, model.layers, True, True).numel / sum(counts)
        update = min(
            cost.profile.streaming_seconds(device_type=type_, moved_bytes=values * self._update)
            for type_ in used
        )
        bandwidths = [
            cost.links.between(type_a=a, type_b=b, same_node=same).bandwidth
            for a in used
            for b in self._grid.types
            for same in (True, False)
        ]
        if self._savers.zero_stage:
            # Shared by devices that are not known yet, and reduced in part before the end.
            return After(0.0, 0.0)
        # Two holders at least: each sends and receives its bytes once.
        return After(update, update + values * self._wire / max(bandwidths))

    def _stage(self, option: StageOption, layers: int, embedding: bool, head: bool) -> After:
        key = (option, layers, embedding, head)
        if key not in self._stages:
            values = held_values(self._cost.model, option.tp, layers, embedding, head).numel
            update = max(
                self._cost.profile.streaming_seconds(device_type=type_, moved_bytes=values * self._update)
                for type_, _ in option.loads
            )
            update /= self._savers.ways(len(option.replicas))
            message = float(values * self._wire) * self._share
            replicas = len(option.replicas)
            own = all_reduce_seconds(self._link(option, message), members=replicas, message_bytes=message)
            others = all_reduce_seconds(
                self._link_to_others(option), members=replicas + 1, message_bytes=message
            )
            self._stages[key] = After(update + own, update + max(own, others))
        return self._stages[key]

    def _link(self, option: StageOption, message: float) -> Link:
        """The slowest link between the stage's replicas; any link if there is but one."""
        if len(option.replicas) == 1:
            return self._cost.links.intra_node
        places = [(replica.node, replica.type) for replica in option.replicas]
        return slowest_link(self._cost.links, places, message_bytes=message / len(places))

    def _link_to_others(self, option: StageOption) -> Link:
        links, same_node = self._cost.links, len(self._grid.nodes) == 1
        own = (links.between(type_a=type_, type_b=type_, same_node=same_node) for type_, _ in option.loads)
        return min(own, key=lambda link: link.bandwidth)

    def _tied_seconds(self, first: StageOption, last: StageOption) -> float:
        """The token table's gradient, between the replicas of the first and the last stage."""
        table = model_parameters(self._cost.model)[0]
        assert table.tied
        message = float(table.numel // min(first.tp, last.tp) * self._wire) * self._share
        places = [(replica.node, replica.type) for replica in (*first.replicas, *last.replicas)]
        link = slowest_link(self._cost.links, places, message_bytes=message / len(places))
        return all_reduce_seconds(link, members=len(places), message_bytes=message)
