"""The plans whose losses the benchmark of convergence compares: what each strategy finds for one small cluster."""

from __future__ import annotations

from functools import cache

from planner.cluster import Cluster
from planner.model_spec import ModelSpec
from planner.plan import Dtypes, Plan
from planner.request import PlanRequest
from planner.search.strategies import find_plan

MODEL = ModelSpec(
    name="convergence",
    layers=5,
    hidden_size=64,
    heads=4,
    vocab_size=257,
    max_sequence_length=64,
    tied_embedding=False,
)
GLOBAL_BATCH_SIZE = 16

# Figures of a device stand in the ratio of real generations. There is so little memory that a fast device has just
# room for the whole model at a small micro-batch, and a slow one for a part of it.
_FAST = {"peak_tflops": {"fp32": 0.2}, "memory_bytes": "7 MB"}
_SLOW = {"peak_tflops": {"fp32": 0.1}, "memory_bytes": "3.5 MB"}
# The strategy of each plan, and how many fast and slow devices it is for.
PLANS = {
    "eth": ("eth", 2, 2),
    "metis": ("metis", 2, 2),
    "hexiscale": ("hexiscale", 2, 2),
    "control": ("eth", 4, 0),
}


def cluster(fast: int, slow: int) -> Cluster:
    """One node of each kind, all played by the host's processor."""
    kinds = {"fast": (fast, _FAST), "slow": (slow, _SLOW)}
    used = {name: kind for name, kind in kinds.items() if kind[0]}
    return Cluster.model_validate(
        {
            "device_types": {
                name: {"backend": "cpu", "memory_bandwidth": "400 GB/s"} | figures
                for name, (_, figures) in used.items()
            },
            "nodes": [
                {"name": name, "devices": [{"type": name, "count": count}]}
                for name, (count, _) in used.items()
            ],
            "links": {
                "intra_node": {"bandwidth": "20 GB/s", "latency": 1e-6},
                "inter_node": {"bandwidth": "5 GB/s", "latency": 2e-6},
            },
        }
    )


@cache
def plan_named(name: str) -> Plan:
    """The plan of a curve, found anew: the same on every machine."""
    strategy, fast, slow = PLANS[name]
    request = PlanRequest(
        model=MODEL,
        cluster=cluster(fast, slow),
        global_batch_size=GLOBAL_BATCH_SIZE,
        sequence_length=MODEL.max_sequence_length,
        dtypes=Dtypes.for_precision("fp32"),
        strategy=strategy,
        bound=False,
    )
    return find_plan(request).model_copy(update={"overlap": True})


def described(plan: Plan) -> str:
    """Samples and micro-batch of each pipeline, with type, TP, DP and layers of each stage."""
    types = {device.id: device.type for device in plan.cluster.devices}
    pipelines = []
    for pipeline in plan.pipelines:
        stages = [
            f"{'+'.join(dict.fromkeys(types[d] for d in stage.devices))} tp{stage.tp} dp{stage.dp}"
            f" layers {stage.layers[0]}-{stage.layers[1] - 1}{' recomputes' if stage.recompute else ''}"
            for stage in pipeline.stages
        ]
        pipelines.append(f"{pipeline.samples} by {pipeline.micro_batch_size}: {', '.join(stages)}")
    return f"ZeRO-{plan.zero_stage}; " + " | ".join(pipelines)
