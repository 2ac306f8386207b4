"""Stage times: the slowest replica's operators, TP collectives, receiving from the neighbours."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from planner.catalogue import DeviceType
from planner.cluster import Cluster, Links
from planner.cost.exchange import Replica, receive_seconds
from planner.cost.links import all_reduce_seconds
from planner.model_spec import ModelSpec
from planner.plan import Dtypes, Plan, StagePlan
from planner.profile.analytic import PRECISION_BYTES, AnalyticProfile
from planner.profile.table import OperatorGroup, ProfileTable, StepSeconds

ZERO = StepSeconds(0.0, 0.0)


@dataclass(frozen=True)
class StageShape:
    """What of a stage decides its times: its replicas, its TP degree and what it holds."""

    tp: int
    replicas: tuple[Replica, ...]
    layers: int
    embedding: bool = False
    head: bool = False


@dataclass(frozen=True)
class StageSeconds:
    """One micro-batch of a stage. `step` includes `receive`, its part spent receiving from neighbours."""

    step: StepSeconds
    receive: StepSeconds


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
    ) -> None:
        self.model = model
        self.device_types = device_types
        self.links = links
        self.sequence_length = sequence_length
        self.dtypes = dtypes
        self.profile: ProfileTable = profile or AnalyticProfile(model, device_types)
        self._parts: dict[tuple[str, int, int], tuple[StepSeconds, StepSeconds, StepSeconds]] = {}

    @classmethod
    def of_plan(cls, plan: Plan, *, profile: ProfileTable | None = None) -> StageCost:
        return cls(
            model=plan.model,
            device_types=plan.cluster.device_types,
            links=plan.cluster.links,
            sequence_length=plan.sequence_length,
            dtypes=plan.dtypes,
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
    ) -> StepSeconds:
        """One micro-batch on one replica: its operators and TP collectives, without receiving."""
        first, layer, last = self._of_parts(device_type, tp, rows)
        step = layer.times(layers)
        if embedding:
            step = step.plus(first)
        return step.plus(last) if head else step

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
            )
            for type_, rows in distinct
        ]
        return StepSeconds(max(step.forward for step in steps), max(step.backward for step in steps))

    def layer_table(
        self, loads: Sequence[tuple[str, int]], *, tp: int, most_layers: int, embedding: bool, head: bool
    ) -> tuple[float, ...]:
        """`stage_step(...).total` for 0 to `most_layers` layers, of replicas with these (type, rows)."""
        lines = [
            (
                self.replica_step(
                    device_type=type_, tp=tp, rows=rows, layers=0, embedding=embedding, head=head
                ),
                self.replica_step(device_type=type_, tp=tp, rows=rows, layers=1),
            )
            for type_, rows in loads
        ]
        return tuple(
            max(ends.forward + count * layer.forward for ends, layer in lines)
            + max(ends.backward + count * layer.backward for ends, layer in lines)
            for count in range(most_layers + 1)
        )

    def receive(self, sender: StageShape, receiver: StageShape) -> list[float]:
        """Seconds until each replica of `receiver` has one micro-batch from `sender`."""
        return receive_seconds(
            self.links,
            senders=sender.replicas,
            sender_tp=sender.tp,
            receivers=receiver.replicas,
            receiver_tp=receiver.tp,
            row_bytes=self.row_bytes,
        )

    def pipeline_stages(self, shapes: Sequence[StageShape]) -> list[StageSeconds]:
        """Every stage of a pipeline, receiving included: activations from before, gradients from behind."""
        stages = []
        for index, shape in enumerate(shapes):
            forward = max(self.receive(shapes[index - 1], shape)) if index else 0.0
            backward = max(self.receive(shapes[index + 1], shape)) if index + 1 < len(shapes) else 0.0
            receive = StepSeconds(forward, backward)
            stages.append(StageSeconds(self.stage_step(shape).plus(receive), receive))
        return stages

    def _of_parts(self, device_type: str, tp: int, rows: int) -> tuple[StepSeconds, StepSeconds, StepSeconds]:
        """(embedding, one layer, head) of a replica."""
        key = (device_type, tp, rows)
        if key not in self._parts:
            groups = self.profile.groups(device_type)
            activations = self._tp_all_reduce(device_type, tp, rows * self.row_bytes)
            # Vocabulary-parallel loss: maximum, sum of exponentials and the label's logit, a float a token.
            statistics = 3 * self._tp_all_reduce(device_type, tp, rows * self.sequence_length * 4)
            self._parts[key] = (
                self._operators(groups.embedding, device_type, tp, rows).plus(StepSeconds(activations, 0.0)),
                # After attention and after the MLP in forward; before both in backward.
                self._operators(groups.layer, device_type, tp, rows).plus(
                    StepSeconds(2 * activations, 2 * activations)
                ),
                self._operators(groups.head, device_type, tp, rows).plus(
                    StepSeconds(statistics, activations)
                ),
            )
        return self._parts[key]

    def _operators(
        self, groups: Sequence[OperatorGroup], device_type: str, tp: int, rows: int
    ) -> StepSeconds:
        total = ZERO
        for group in groups:
            total = total.plus(
                self.profile.operator_seconds(
                    device_type=device_type,
                    operator=group.name,
                    tp=tp,
                    samples=rows,
                    sequence_length=self.sequence_length,
                    precision=self.dtypes.param,
                )
            )
        return total

    def _tp_all_reduce(self, device_type: str, tp: int, message_bytes: float) -> float:
        if self.profile.includes_tp_collectives(device_type):
            return 0.0
        link = self.links.between(type_a=device_type, type_b=device_type, same_node=True)
        return all_reduce_seconds(link, members=tp, message_bytes=message_bytes)


def stage_shape(stage: StagePlan, cluster: Cluster) -> StageShape:
    """The StageShape of a stage of a plan; nodes are numbered as in the cluster."""
    numbers = {node.name: index for index, node in enumerate(cluster.nodes)}
    replicas = []
    for index, rows in enumerate(stage.rows):
        device = cluster.device_by_id[stage.tp_group(index)[0]]
        replicas.append(Replica(numbers[device.node], device.type, rows))
    return StageShape(stage.tp, tuple(replicas), stage.layer_count, stage.embedding, stage.head)
