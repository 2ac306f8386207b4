"""What of a stage decides its times, apart from the plan that it stands in."""

from __future__ import annotations

from dataclasses import dataclass

from planner.cluster import Cluster
from planner.cost.exchange import Replica
from planner.cost.layer_flow import Recompute, recompute_of
from planner.plan import StagePlan


@dataclass(frozen=True)
class StageShape:
    """What of a stage decides its times: its replicas, its TP degree and what it holds."""

    tp: int
    replicas: tuple[Replica, ...]
    layers: int
    embedding: bool = False
    head: bool = False
    recompute: Recompute = ()
    zero_stage: int = 0
    sequence_parallel: bool = False


def stage_shape(stage: StagePlan, cluster: Cluster, *, zero_stage: int = 0) -> StageShape:
    """The StageShape of a stage of a plan; nodes are numbered as in the cluster."""
    replicas = []
    for index, rows in enumerate(stage.rows):
        device = cluster.device_by_id[stage.tp_group(index)[0]]
        replicas.append(Replica(cluster.node_numbers[device.node], device.type, rows))
    return StageShape(
        stage.tp,
        tuple(replicas),
        stage.layer_count,
        stage.embedding,
        stage.head,
        recompute_of(stage.recompute),
        zero_stage,
        stage.sequence_parallel,
    )
