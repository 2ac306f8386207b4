"""The compute-only ideal: model FLOPs over the FLOPs that the cluster's devices achieve at their best.

A device achieves most at the TP degree and micro-batch that its profile makes fastest, with transfers free.
To be this quick, every device would have to do the like part of the whole model at that speed all the time.
"""

from __future__ import annotations

from planner.cluster import Cluster, Link, Links
from planner.cost.stages import StageCost
from planner.profile.analytic import model_flops_per_sample

# Samples of a micro-batch to look for the best speed at: what profiles hold, as a rule.
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_FREE = Links(intra_node=Link(bandwidth=1e30, latency=0.0), inter_node=Link(bandwidth=1e30, latency=0.0))


class DeviceSpeeds:
    """How fast each device type is at its best on one model."""

    def __init__(self, cost: StageCost, cluster: Cluster) -> None:
        self._cost = cost
        self.without_transfers = StageCost(
            model=cost.model,
            device_types=cost.device_types,
            links=_FREE,
            sequence_length=cost.sequence_length,
            dtypes=cost.dtypes,
            profile=cost.profile,
            measured_collectives=False,
        )
        self._seconds = {type_: self._device_seconds(type_, cluster) for type_ in cluster.counts}
        self._cluster = cluster
        self._counts = cluster.counts

    def device_seconds(self, device_type: str) -> float:
        """Seconds that one device needs for one sample of the whole model, forward and backward."""
        return self._seconds[device_type]

    def achieved_flops(self, device_type: str) -> float:
        """FLOP/s of matrix products at that speed."""
        cost = self._cost
        return model_flops_per_sample(cost.model, cost.sequence_length) / self._seconds[device_type]

    @property
    def samples_per_second(self) -> float:
        """Of the whole cluster."""
        return sum(count / self._seconds[type_] for type_, count in self._counts.items())

    def part_seconds(self, device_type: str) -> tuple[float, float, float]:
        """Device seconds a sample of a layer, the embedding and the head, each at its own best: activations whole or
        cut by position."""
        found = []
        for layers, embedding, head in ((1, False, False), (0, True, False), (0, False, True)):
            found.append(
                min(
                    tp
                    * self.without_transfers.replica_step(
                        device_type=device_type,
                        tp=tp,
                        rows=rows,
                        layers=layers,
                        embedding=embedding,
                        head=head,
                        sequence_parallel=cut,
                    ).total
                    / rows
                    for tp, rows in self._cases(device_type, self._cluster)
                    for cut in (False, True)[: 1 + (tp > 1)]
                )
            )
        layer, first, last = found
        return layer, first, last

    def _device_seconds(self, device_type: str, cluster: Cluster) -> float:
        cost, model = self.without_transfers, self._cost.model
        return min(
            tp
            * cost.replica_step(
                device_type=device_type, tp=tp, rows=rows, layers=model.layers, embedding=True, head=True
            ).total
            / rows
            for tp, rows in self._cases(device_type, cluster)
        )

    def _cases(self, device_type: str, cluster: Cluster) -> list[tuple[int, int]]:
        """(TP degree, rows) that the profile knows."""
        cost, model = self.without_transfers, self._cost.model
        most = max(
            sum(entry.count for entry in node.devices if entry.type == device_type) for node in cluster.nodes
        )
        degrees = [
            tp
            for tp in range(1, most + 1)
            if all(size % tp == 0 for size in (model.heads, model.kv_heads, model.ffn_hidden_size))
        ]
        known = [
            (tp, rows)
            for tp in degrees
            for rows in ROWS
            if cost.covers(device_type=device_type, tp=tp, rows=rows)
        ]
        # Where the profile knows none of these cases, asking for one makes it say what it lacks.
        return known or [(1, 1)]
