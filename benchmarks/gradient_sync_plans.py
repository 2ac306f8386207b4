"""The plans that the benchmark of gradient synchronisation runs."""

from __future__ import annotations

import random
from typing import Any

from planner.catalogue import DeviceType
from planner.cluster import Cluster
from planner.model_spec import ModelSpec
from planner.plan import PipelinePlan, Plan, StagePlan

DEPTHS = (4, 8, 12, 16)
OVERLAP_DEPTHS = (4, 8, 12, 16)
SEEDS = (0, 1, 2)

# (tp, dp) of each stage of two pipelines.
Degrees = tuple[tuple[tuple[int, int], ...], ...]
FAMILIES: dict[int, dict[str, Degrees]] = {
    4: {
        "tp2 | tp1, tp1": (((2, 1),), ((1, 1), (1, 1))),
        "tp3 | tp1": (((3, 1),), ((1, 1),)),
    },
    8: {
        "tp4 | tp2, dp2": (((4, 1),), ((2, 1), (1, 2))),
        "tp4 | tp1 x 4": (((4, 1),), ((1, 1),) * 4),
    },
    12: {
        "tp4, tp4 | tp2, dp2": (((4, 1), (4, 1)), ((2, 1), (1, 2))),
        "tp8 | tp2, dp2": (((8, 1),), ((2, 1), (1, 2))),
    },
}


def model_of(depth: int, hidden: int, *, sequence: int) -> ModelSpec:
    return ModelSpec(
        name="bench", layers=depth, hidden_size=hidden, heads=24, vocab_size=257, max_sequence_length=sequence
    )


def host_cluster(count: int) -> Cluster:
    """One node of so many devices that are the host's processor."""
    kind = DeviceType.model_validate(
        {
            "backend": "cpu",
            "peak_tflops": {"fp32": 1},
            "memory_bytes": "8 GiB",
            "memory_bandwidth": "10 GB/s",
        }
    )
    nodes = [{"name": "host", "devices": [{"type": "cpu", "count": count}]}]
    return Cluster.model_validate({"device_types": {"cpu": kind.model_dump()}, "nodes": nodes})


def make_plan(
    model: ModelSpec, degrees: Degrees, cluster: Cluster, rng: random.Random, *, samples: int, **fields: Any
) -> Plan:
    """Pipelines of these degrees; the seed draws where the layers are cut."""
    devices = iter([device.id for device in cluster.devices])
    pipelines = []
    for index, stages in enumerate(degrees):
        cuts = sorted(rng.sample(range(1, model.layers), len(stages) - 1))
        bounds = [0, *cuts, model.layers]
        made = [
            StagePlan(
                devices=tuple(next(devices) for _ in range(tp * dp)),
                tp=tp,
                dp=dp,
                rows=(2 // dp,) * dp,
                layers=(bounds[number], bounds[number + 1]),
                embedding=number == 0,
                head=number == len(stages) - 1,
            )
            for number, (tp, dp) in enumerate(stages)
        ]
        pipelines.append(
            PipelinePlan(
                id=index, micro_batch_size=2, samples=samples, local_batch_size=samples, stages=tuple(made)
            )
        )
    return Plan(
        model=model,
        cluster=cluster,
        global_batch_size=samples * len(pipelines),
        sequence_length=model.max_sequence_length,
        dtypes={"param": "fp32"},  # type: ignore[arg-type]
        pipelines=tuple(pipelines),
        **fields,
    )


def changed(plan: Plan, **fields: Any) -> Plan:
    return Plan.model_validate(plan.model_dump() | fields)
