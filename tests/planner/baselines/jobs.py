"""Planning tasks that the peers' tests share: small clusters of drawn speeds, memories and links."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from planner.cluster import resolve_cluster
from planner.model_spec import ModelSpec
from planner.plan import Dtypes
from planner.request import PlanRequest

MODEL = ModelSpec(name="m", layers=4, hidden_size=256, heads=4, vocab_size=500, max_sequence_length=64)
PEERS = ("metis", "hexiscale", "type-split", "uniform")
# Nodes as counts of devices by type.
CLUSTERS: tuple[tuple[dict[str, int], ...], ...] = (
    ({"fast": 2}, {"slow": 2}),
    ({"fast": 1, "slow": 1},),
    ({"fast": 3}, {"slow": 1}),
    ({"fast": 2, "slow": 1}, {"slow": 2}),
    ({"fast": 4},),
    ({"fast": 1}, {"slow": 2}, {"odd": 3}),
)


def draw_request(seed: int, nodes: Sequence[dict[str, int]], *, strategy: str, **changes: Any) -> PlanRequest:
    """What binds (compute, memory, links) differs from seed to seed."""
    draw = random.Random(seed)
    names = sorted({name for node in nodes for name in node})
    links = {
        "intra_node": {"bandwidth": 10 ** draw.uniform(8, 11), "latency": 10 ** draw.uniform(-6, -4)},
        "inter_node": {"bandwidth": 10 ** draw.uniform(7, 10), "latency": 10 ** draw.uniform(-6, -4)},
    }
    cluster = {
        "device_types": {name: _device(draw) for name in names},
        "nodes": [{"devices": [{"type": t, "count": n} for t, n in node.items()]} for node in nodes],
        "links": links,
    }
    fields: dict[str, Any] = {
        "model": MODEL,
        "cluster": resolve_cluster(cluster),
        "global_batch_size": 8,
        "sequence_length": 64,
        "dtypes": Dtypes(param="fp32"),
        "strategy": strategy,
    }
    return PlanRequest(**(fields | changes))


def _device(draw: random.Random) -> dict[str, Any]:
    tflops = draw.choice([0.5, 1, 2, 3])
    return {
        "backend": "cpu",
        "peak_tflops": {"fp32": tflops, "bf16": tflops},
        "memory_bytes": int(draw.choice([0.04, 0.06, 1]) * 2**30),
        "memory_bandwidth": 1e11 * tflops,
    }
