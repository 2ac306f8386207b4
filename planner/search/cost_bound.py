"""What any plan must cost: work takes device time, and device time has a price.

Every sample needs each layer, the embedding and the head once, on some device. A device of type k takes at
least t_k seconds for a part, at its best TP degree and rows, with free transfers and nothing recomputed. So

* a part costs at least min over k of price_k x t_k, whoever does it;
* for any worths w of the parts, devices c do at most sum_k c_k max_j(w_j / t_kj) worth a second, so that the
  iteration takes at least the batch's worth over that.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from planner.cost.ideal import ROWS, DeviceSpeeds
from planner.request import PlanRequest

FloatArray = npt.NDArray[np.float64]
# Count vectors that are bounded one by one.
_MOST_VECTORS = 300_000

RELAXATIONS = (
    "transfers, gradients, the optimizer and waiting are free",
    f"rows of a replica up to {max(ROWS)}",
    "memory only has to hold the model's state once",
)


class CostBound:
    """Bounds for one request with prices; device types in the order of `Cluster.counts`."""

    def __init__(self, request: PlanRequest, speeds: DeviceSpeeds, *, state_bytes: float) -> None:
        """`state_bytes`: the layers' parameters, gradients and optimizer state, held once."""
        types = list(request.cluster.counts)
        self._request = request
        self._counts = np.array([request.cluster.counts[name] for name in types])
        # [type, part]: a layer, the embedding, the head; and how often a sample needs each.
        seconds = np.array([speeds.part_seconds(name) for name in types])
        # A part that some type does in no time costs nothing.
        parts = seconds.min(axis=0) > 0
        self._seconds = seconds[:, parts]
        self._needed = np.array([float(request.model.layers), 1.0, 1.0])[parts]
        self.prices = np.array([_price(request, name) for name in types]) / 3600
        memory = [request.cluster.device_types[name].memory_bytes for name in types]
        self._memory = np.array(memory, dtype=float)
        self._state_bytes = state_bytes

    def holds(self, counts: FloatArray) -> npt.NDArray[np.bool_]:
        """[..., type] -> whether the memory of all these devices together holds the state once."""
        held: npt.NDArray[np.bool_] = counts @ self._memory >= self._state_bytes
        return held

    def least_seconds(self, counts: FloatArray) -> FloatArray:
        """[..., type] -> seconds that any iteration on these devices takes at least."""
        worths = [*self._seconds, (self.prices[:, None] * self._seconds).min(axis=0)]
        found = np.zeros(counts.shape[:-1])
        for worth in worths:
            if not worth.any():
                continue
            speeds = (worth / self._seconds).max(axis=1)
            found = np.maximum(found, worth @ self._needed / (counts @ speeds))
        return found * self._request.global_batch_size

    def least_cost(self, counts: FloatArray) -> FloatArray:
        """[..., type] -> what an iteration costs at least, if these devices are paid for it."""
        cost: FloatArray = self.least_seconds(counts) * (counts @ self.prices)
        return cost

    def lower_bound(self) -> float:
        """Of the cost of an iteration that keeps the throughput floor, on any of the cluster's devices."""
        work = float((self.prices[:, None] * self._seconds).min(axis=0) @ self._needed)
        least = work * self._request.global_batch_size
        if math.prod(int(n) + 1 for n in self._counts) > _MOST_VECTORS:
            return least
        grid = np.indices([int(n) + 1 for n in self._counts]).reshape(len(self._counts), -1).T[1:]
        vectors = grid.astype(np.float64)
        counts = vectors[self.holds(vectors)]
        kept = counts[self.least_seconds(counts) <= self.most_seconds]
        return max(least, float(self.least_cost(kept).min())) if len(kept) else least

    @property
    def most_seconds(self) -> float:
        """Seconds an iteration may take."""
        request = self._request
        if request.throughput_floor is None:
            return math.inf
        return request.global_batch_size * request.sequence_length / request.throughput_floor


def _price(request: PlanRequest, name: str) -> float:
    price = request.cluster.device_types[name].price_per_hour
    assert price is not None, "the request checks prices"
    return price
