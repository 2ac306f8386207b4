"""Seconds of a plan's gradient collectives, and of gathering the parameters after a sharded update.

What one call takes, by ZeRO stage and scope; "half" is a reduce-scatter or an all-gather:

* ZeRO-0: an all-reduce over all holders; nothing to gather.
* ZeRO-1: half, over all holders (scope `all`); or half inside each stage's replicas, then an all-reduce of
  the shards between stages (scope `pipeline`).
* ZeRO-2: the half inside each stage was made micro-batch by micro-batch; what is left is half (`all`) or an
  all-reduce (`pipeline`) of the shards between stages. The stage with the fewest replicas has the largest.
* Gathering, from ZeRO-1 on: half, in the parameters' precision, over those that share the shards.

The links choose how a group reduces, as in the runtime. A ring inside one device type takes its measured
time where the profile has one of that size, else that of its slowest link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.cluster import Device
from planner.collectives import choose_reduction, flat_seconds, half_seconds, reduction_seconds
from planner.gradient_blocks import GradientBlock
from planner.gradient_calls import GradientCall
from planner.plan import Plan
from planner.profile.analytic import PRECISION_BYTES
from planner.profile.table import ProfileTable

Call = GradientCall | GradientBlock


@dataclass(frozen=True)
class CallPrice:
    """Seconds of a call, and of gathering its parameters; `measured` if all of its rings were."""

    reduce: float
    gather: float
    measured: bool


class SyncSeconds:
    """Prices of one plan's calls, or of its blocks: told apart by their index, and worked out once for holders
    at alike places and messages of one size."""

    def __init__(self, plan: Plan, profile: ProfileTable | None = None) -> None:
        self._plan, self._profile = plan, profile
        self._links = plan.cluster.links
        self._devices = [plan.cluster.device_by_id[place.device] for place in plan.ranks]
        self._places = [(device.node, device.type) for device in self._devices]
        self._replicas_of = [(place.pipeline, place.stage, place.tp_rank) for place in plan.ranks]
        self._wire, self._width = PRECISION_BYTES[plan.dtypes.wire], PRECISION_BYTES[plan.dtypes.param]
        self._asked: dict[tuple[type[Call], int], CallPrice] = {}
        self._known: dict[tuple[int, int], CallPrice] = {}
        self._patterns: dict[tuple[int, ...], int] = {}
        self._numbers: dict[object, int] = {}
        # Reducing to shards and gathering from them are then the same half of the same all-reduce.
        self._alike_halves = (plan.zero_stage, plan.zero_scope) == (1, "all") and self._wire == self._width
        self._from_links = False

    def of(self, call: Call) -> CallPrice:
        """The price of a call or whole block."""
        asked = type(call), call.index
        if asked not in self._asked:
            self._asked[asked] = self._alike(call)
        return self._asked[asked]

    def _alike(self, call: Call) -> CallPrice:
        key = (call.numel, self._pattern(call.holders))
        if key not in self._known:
            self._from_links = False
            reduce = self._reduce(call)
            gather = reduce if self._alike_halves else self._gather(call)
            self._known[key] = CallPrice(reduce, gather, not self._from_links)
        return self._known[key]

    def _pattern(self, holders: tuple[int, ...]) -> int:
        """The same for holders at places that links cannot tell apart: nodes, and stages under ZeRO, by number as they
        appear."""
        if holders not in self._patterns:
            nodes: dict[str, int] = {}
            places: object = tuple(
                [
                    (nodes.setdefault(node, len(nodes)), type_)
                    for node, type_ in map(self._places.__getitem__, holders)
                ]
            )
            if self._plan.zero_stage:
                order: dict[object, int] = {}
                group = map(self._replicas_of.__getitem__, holders)
                places = places, tuple([order.setdefault(place, len(order)) for place in group])
            self._patterns[holders] = self._numbers.setdefault(places, len(self._numbers))
        return self._patterns[holders]

    def _reduce(self, call: Call) -> float:
        stage, scope = self._plan.zero_stage, self._plan.zero_scope
        if not stage:
            return self._all_reduce(self._of(call.holders), call.numel)
        if stage == 1 and scope == "all":
            return self._half(self._of(call.holders), call.numel, self._wire)
        groups = [self._of(group) for group in self._groups(call)]
        between = self._between(groups, call.numel, half=scope == "all")
        if stage == 2:
            return between
        return between + max(self._half(group, call.numel, self._wire) for group in groups)

    def _gather(self, call: Call) -> float:
        if not self._plan.zero_stage:
            return 0.0
        groups = [call.holders] if self._plan.zero_scope == "all" else self._groups(call)
        return max(self._half(self._of(group), call.numel, self._width) for group in groups)

    def _between(self, groups: Sequence[Sequence[Device]], numel: int, *, half: bool) -> float:
        """Shards between stages: replica by replica, all at once, so the slowest counts."""
        if len(groups) < 2:
            return 0.0
        shard = -(-numel // min(map(len, groups)))
        lanes = {
            tuple((device.node, device.type) for device in lane): lane
            for lane in (
                [group[replica % len(group)] for group in groups] for replica in range(max(map(len, groups)))
            )
        }
        return max(
            self._half(lane, shard, self._wire) if half else self._all_reduce(lane, shard)
            for lane in lanes.values()
        )

    def _all_reduce(self, members: Sequence[Device], numel: int) -> float:
        if len(members) < 2:
            return 0.0
        reduction = choose_reduction(self._links, members, numel=numel, element_bytes=self._wire)
        return reduction_seconds(
            reduction, self._links, members, message_bytes=numel * self._wire, ring=self._ring
        )

    def _half(self, members: Sequence[Device], numel: int, width: int) -> float:
        if len(members) < 2:
            return 0.0
        reduction = choose_reduction(self._links, members, numel=numel, element_bytes=width)
        return half_seconds(reduction, members, message_bytes=numel * width, ring=self._ring)

    def _ring(self, members: Sequence[Device], message_bytes: float) -> float:
        measured = self._measured(members, message_bytes)
        if measured is not None:
            return measured
        self._from_links = True
        return flat_seconds(self._links, members, message_bytes=message_bytes)

    def _measured(self, members: Sequence[Device], message_bytes: float) -> float | None:
        types, nodes = {device.type for device in members}, {device.node for device in members}
        if self._profile is None or len(types) > 1 or 1 < len(nodes) < len(members):
            return None
        return self._profile.all_reduce_seconds(
            device_type=members[0].type,
            scope="intra_node" if len(nodes) == 1 else "inter_node",
            members=len(members),
            message_bytes=message_bytes,
            precision=self._plan.dtypes.param,
        )

    def _of(self, ranks: Sequence[int]) -> list[Device]:
        return [self._devices[rank] for rank in ranks]

    def _groups(self, call: Call) -> list[tuple[int, ...]]:
        """The holders by stage, in rank order: the replicas of one TP rank, also where all TP ranks hold it."""
        groups: dict[tuple[int, int, int], list[int]] = {}
        for rank in call.holders:
            groups.setdefault(self._replicas_of[rank], []).append(rank)
        return [tuple(group) for group in groups.values()]
