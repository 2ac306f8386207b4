"""Stage times: the slowest replica's operators, TP collectives, receiving from the neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from planner.catalogue import DeviceType
from planner.cluster import Links
from planner.cost.exchange import WAYS, Exchange, Replica, Side, Way, choose_exchange
from planner.cost.held import held_values
from planner.cost.layer_flow import OperatorSet, Recompute, recompute_of, replayed_operators, segments
from planner.cost.links import slowest_link
from planner.cost.stage_shape import StageShape
from planner.cost.tensor_parallel import CollectiveSource, TensorParallelCollectives
from planner.model_spec import ModelSpec
from planner.operators import BY_POSITION_OPERATORS, GATHERING_OPERATORS, SUMMED_OPERATORS
from planner.plan import Dtypes, Plan
from planner.profile.analytic import PRECISION_BYTES, AnalyticProfile
from planner.profile.table import OperatorGroup, ProfileTable, StepSeconds

if TYPE_CHECKING:
    from planner.request import PlanRequest

ZERO = StepSeconds(0.0, 0.0)


@dataclass(frozen=True)
class StageSeconds:
    """One micro-batch of a stage. `step` includes `receive`, its part spent receiving from neighbours."""

    step: StepSeconds
    receive: StepSeconds


@dataclass(frozen=True)
class _Parts:
    """What a replica's step is made of; `entry` and `exit` where a stage has no embedding, or no head."""

    embedding: StepSeconds
    layer: StepSeconds
    head: StepSeconds
    entry: StepSeconds = ZERO
    exit: StepSeconds = ZERO


class StageCost:
    """Times of stages of one model on one kind of cluster. Everything asked twice is kept.

    Layers are alike, so the sum over a range of layers is a product: a stage evaluation is O(1) in its
    layers.
    """

    def __init__(
        self,
        *,
        model: ModelSpec,
        device_types: dict[str, DeviceType],
        links: Links,
        sequence_length: int,
        dtypes: Dtypes,
        profile: ProfileTable | None = None,
        measured_collectives: bool = True,
        ways: Sequence[Way] = WAYS,
    ) -> None:
        """Without `measured_collectives` TP all-reduces are priced by the links even where the profile has
        measured them apart. Stages exchange activations in the cheapest of `ways`."""
        self.model = model
        self.device_types = device_types
        self.links = links
        self.sequence_length = sequence_length
        self.dtypes = dtypes
        self.profile: ProfileTable = profile or AnalyticProfile(model, device_types)
        self._collectives = TensorParallelCollectives(
            self.profile, links, precision=dtypes.param, take_measured=measured_collectives
        )
        self._ways = ways
        self._replays: dict[tuple[str, int, int, OperatorSet, bool], float] = {}
        self._parts: dict[tuple[str, int, int, bool], _Parts] = {}
        self._exchanges: dict[tuple[Side, Side], Exchange] = {}

    @classmethod
    def of_plan(
        cls, plan: Plan, *, profile: ProfileTable | None = None, ways: Sequence[Way] = WAYS
    ) -> StageCost:
        return cls(
            model=plan.model,
            device_types=plan.cluster.device_types,
            links=plan.cluster.links,
            sequence_length=plan.sequence_length,
            dtypes=plan.dtypes,
            profile=profile,
            ways=ways,
        )

    @classmethod
    def of_request(cls, request: PlanRequest, *, profile: ProfileTable | None = None) -> StageCost:
        return cls(
            model=request.model,
            device_types=request.cluster.device_types,
            links=request.cluster.links,
            sequence_length=request.sequence_length,
            dtypes=request.dtypes,
            profile=profile,
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one sample's activations between stages."""
        return self.sequence_length * self.model.hidden_size * PRECISION_BYTES[self.dtypes.param]

    def replica_step(
        self,
        *,
        device_type: str,
        tp: int,
        rows: int,
        layers: int,
        embedding: bool = False,
        head: bool = False,
        recompute: Recompute = (),
        sequence_parallel: bool = False,
    ) -> StepSeconds:
        """One micro-batch on one replica: its operators and TP collectives, without receiving.

        Backward replays what is recomputed.
        """
        parts = self._of_parts(device_type, tp, rows, sequence_parallel)
        step = parts.layer.times(layers)
        if recompute:
            again = self.replay_seconds(
                device_type=device_type,
                tp=tp,
                rows=rows,
                layers=layers,
                recompute=recompute,
                sequence_parallel=sequence_parallel,
            )
            step = step.plus(StepSeconds(0.0, again))
        if embedding or sequence_parallel:
            step = step.plus(parts.embedding if embedding else parts.entry)
        if head or sequence_parallel:
            step = step.plus(parts.head if head else parts.exit)
        return step

    def replay_seconds(
        self,
        *,
        device_type: str,
        tp: int,
        rows: int,
        layers: int,
        recompute: Recompute,
        sequence_parallel: bool = False,
    ) -> float:
        """Seconds that one micro-batch's backward spends on recomputation, in all layers of a stage."""
        return sum(
            segment.layers
            * self.layer_replay_seconds(device_type, tp, rows, segment.operators, sequence_parallel)
            for segment in segments(recompute, layers)
        )

    def layer_replay_seconds(
        self,
        device_type: str,
        tp: int,
        rows: int,
        operators: OperatorSet,
        sequence_parallel: bool = False,
    ) -> float:
        """Forward seconds of what one layer replays, TP collectives included.

        Operators that the profile times together are replayed together, or charged as if they were.
        """
        key = (device_type, tp, rows, operators, sequence_parallel)
        if key not in self._replays:
            again = replayed_operators(self.model, self.dtypes, operators)
            groups = [
                group
                for group in self.profile.groups(device_type).layer
                if not set(again).isdisjoint(group.operators)
            ]
            moved: float = sum(name in SUMMED_OPERATORS for name in again)
            if sequence_parallel:
                moved = (moved + sum(name in GATHERING_OPERATORS for name in again)) / 2
            step = self._operators(groups, device_type, tp, rows, sequence_parallel)
            self._replays[key] = step.forward + moved * self.activation_all_reduce(device_type, tp, rows)
        return self._replays[key]

    def covers(self, *, device_type: str, tp: int, rows: int) -> bool:
        """Whether the profile knows the times of such a replica."""
        return self.profile.covers(
            device_type=device_type,
            tp=tp,
            samples=rows,
            sequence_length=self.sequence_length,
            precision=self.dtypes.param,
        )

    def stage_step(self, shape: StageShape) -> StepSeconds:
        """The slowest replica's step, forward and backward apart, without receiving."""
        distinct = {(replica.type, replica.rows) for replica in shape.replicas}
        steps = [
            self.replica_step(
                device_type=type_,
                tp=shape.tp,
                rows=rows,
                layers=shape.layers,
                embedding=shape.embedding,
                head=shape.head,
                recompute=shape.recompute,
                sequence_parallel=shape.sequence_parallel,
            )
            for type_, rows in distinct
        ]
        scatter = self.scatter_seconds(shape)
        return StepSeconds(
            max(step.forward for step in steps), max(step.backward for step in steps) + scatter
        )

    def stage_replay_seconds(self, shape: StageShape) -> float:
        """Seconds of recomputation in a micro-batch's backward, of the replica that spends most."""
        return max(
            self.replay_seconds(
                device_type=type_,
                tp=shape.tp,
                rows=rows,
                layers=shape.layers,
                recompute=shape.recompute,
                sequence_parallel=shape.sequence_parallel,
            )
            for type_, rows in {(replica.type, replica.rows) for replica in shape.replicas}
        )

    def scatter_seconds(self, shape: StageShape) -> float:
        """ZeRO-2: reducing and scattering one micro-batch's gradients over the replicas, region by region.

        Counted in full: backward does not hide it.
        """
        if shape.zero_stage < 2 or len(shape.replicas) < 2:
            return 0.0
        held = held_values(self.model, shape.tp, shape.layers, shape.embedding, shape.head)
        message = held.numel * PRECISION_BYTES[self.dtypes.wire]
        members = len(shape.replicas)
        link = slowest_link(
            self.links,
            ((replica.node, replica.type) for replica in shape.replicas),
            message_bytes=message / members,
        )
        steps = held.regions * (members - 1)
        return steps * link.latency + message * (members - 1) / members / link.bandwidth

    def layer_table(
        self,
        loads: Sequence[tuple[str, int]],
        *,
        tp: int,
        most_layers: int,
        embedding: bool,
        head: bool,
        recomputed: Sequence[str] = (),
        sequence_parallel: bool = False,
    ) -> tuple[float, ...]:
        """`stage_step(...).total` for 0 to `most_layers` layers, of replicas with these (type, rows).

        All layers recompute the same operators.
        """
        one_layer = recompute_of(dict.fromkeys(recomputed, 1))
        lines = []
        for type_, rows in loads:
            ends = self.replica_step(
                device_type=type_,
                tp=tp,
                rows=rows,
                layers=0,
                embedding=embedding,
                head=head,
                sequence_parallel=sequence_parallel,
            )
            layer = self._of_parts(type_, tp, rows, sequence_parallel).layer
            if one_layer:
                again = self.replay_seconds(
                    device_type=type_,
                    tp=tp,
                    rows=rows,
                    layers=1,
                    recompute=one_layer,
                    sequence_parallel=sequence_parallel,
                )
                layer = layer.plus(StepSeconds(0.0, again))
            lines.append((ends, layer))
        count = np.arange(most_layers + 1)
        forward = [ends.forward + count * layer.forward for ends, layer in lines]
        backward = [ends.backward + count * layer.backward for ends, layer in lines]
        return tuple((np.maximum.reduce(forward) + np.maximum.reduce(backward)).tolist())

    def exchange(self, sender: StageShape, receiver: StageShape) -> Exchange:
        """How each replica of `receiver` gets one micro-batch from `sender`."""
        # Nodes are told apart by where they appear: pipelines alike in other nodes exchange alike.
        nodes: dict[int, int] = {}
        sides = []
        for shape in (sender, receiver):
            replicas = (
                Replica(nodes.setdefault(one.node, len(nodes)), one.type, one.rows) for one in shape.replicas
            )
            sides.append(Side(shape.tp, tuple(replicas)))
        key = (sides[0], sides[1])
        if key not in self._exchanges:
            self._exchanges[key] = choose_exchange(
                self.links, senders=key[0], receivers=key[1], row_bytes=self.row_bytes, ways=self._ways
            )
        return self._exchanges[key]

    def receive(self, sender: StageShape, receiver: StageShape) -> list[float]:
        """Seconds until each replica of `receiver` has one micro-batch from `sender`."""
        return self.exchange(sender, receiver).seconds

    def pipeline_stages(self, shapes: Sequence[StageShape]) -> list[StageSeconds]:
        """Every stage of a pipeline, receiving included: activations from before, gradients from behind."""
        stages = []
        for index, shape in enumerate(shapes):
            forward = max(self.receive(shapes[index - 1], shape)) if index else 0.0
            backward = max(self.receive(shapes[index + 1], shape)) if index + 1 < len(shapes) else 0.0
            receive = StepSeconds(forward, backward)
            stages.append(StageSeconds(self.stage_step(shape).plus(receive), receive))
        return stages

    def _of_parts(self, device_type: str, tp: int, rows: int, sequence_parallel: bool) -> _Parts:
        key = (device_type, tp, rows, sequence_parallel and tp > 1)
        if key not in self._parts:
            self._parts[key] = self._make_parts(*key)
        return self._parts[key]

    def _make_parts(self, device_type: str, tp: int, rows: int, sequence_parallel: bool) -> _Parts:
        groups = self.profile.groups(device_type)
        layer = self._operators(groups.layer, device_type, tp, rows, sequence_parallel)
        embedding = self._operators(groups.embedding, device_type, tp, rows)
        head = self._operators(groups.head, device_type, tp, rows)
        # Vocabulary-parallel loss: maximum, sum of exponentials and the label's logit, a float a token.
        statistics = 3 * self._collectives.all_reduce(device_type, tp, rows * self.sequence_length * 4)
        whole = self.activation_all_reduce(device_type, tp, rows)
        if not sequence_parallel:
            return _Parts(
                embedding.plus(StepSeconds(whole, 0.0)),
                # After attention and after the MLP in forward; before both in backward.
                layer.plus(StepSeconds(2 * whole, 2 * whole)),
                head.plus(StepSeconds(statistics, whole)),
            )
        # A gather or a scatter is half an all-reduce. What a column-cut layer gathers it gathers again in
        # backward, whose own sum it scatters. Between stages activations are whole.
        half = whole / 2
        return _Parts(
            embedding.plus(StepSeconds(half, half)),
            layer.plus(StepSeconds(4 * half, 6 * half)),
            head.plus(StepSeconds(statistics + half, 2 * half)),
            entry=StepSeconds(0.0, half),
            exit=StepSeconds(half, 0.0),
        )

    def activation_all_reduce(self, device_type: str, tp: int, rows: int) -> float:
        """Seconds of summing a micro-batch's activations over a TP group; 0 if the operators include it."""
        return self._collectives.all_reduce(device_type, tp, rows * self.row_bytes)

    def group_step(
        self,
        group: OperatorGroup,
        device_type: str,
        tp: int,
        rows: int,
        sequence_parallel: bool = False,
    ) -> StepSeconds:
        """One micro-batch through operators that are timed together, without TP collectives unless timed."""
        step = self.profile.operator_seconds(
            device_type=device_type,
            operator=group.name,
            tp=tp,
            samples=rows,
            sequence_length=self.sequence_length,
            precision=self.dtypes.param,
        )
        by_position = sequence_parallel and BY_POSITION_OPERATORS.issuperset(group.operators)
        return step.times(1 / tp) if by_position else step

    def _operators(
        self,
        groups: Sequence[OperatorGroup],
        device_type: str,
        tp: int,
        rows: int,
        sequence_parallel: bool = False,
    ) -> StepSeconds:
        total = ZERO
        for group in groups:
            total = total.plus(self.group_step(group, device_type, tp, rows, sequence_parallel))
        return total

    def tp_source(self, device_type: str, tp: int, rows: int) -> CollectiveSource:
        """Where the seconds of a replica's TP collectives come from."""
        return self._collectives.source(device_type, tp, rows * self.row_bytes)
