"""Small plans for tests, written as the degrees and layers of each stage."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from planner.cluster import Cluster, from_short_form
from planner.model_spec import ModelSpec
from planner.plan import PipelinePlan, Plan, StagePlan

# (tp, dp, layers) of one stage.
Degrees = tuple[int, int, int]


def make_model(**changes: Any) -> ModelSpec:
    """A gpt3-style model that ranks on a CPU train in milliseconds; twelve heads divide by 1, 2, 3, 4, 6."""
    shape: dict[str, Any] = {
        "name": "test",
        "layers": 4,
        "hidden_size": 24,
        "heads": 12,
        "vocab_size": 257,
        "max_sequence_length": 32,
    }
    return ModelSpec(**(shape | changes))


def make_llama(**changes: Any) -> ModelSpec:
    """The same of family llama; two queries share each key, of which there are six."""
    shape: dict[str, Any] = {
        "family": "llama",
        "kv_heads": 6,
        "ffn_hidden_size": 36,
        "tied_embedding": False,
        "max_sequence_length": 16,
    }
    return make_model(**(shape | changes))


def make_plan(
    model: ModelSpec,
    pipelines: Sequence[Sequence[Degrees]],
    *,
    cluster: Cluster | None = None,
    micro_batch_sizes: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
    **fields: Any,
) -> Plan:
    """A Plan from each pipeline's stages; devices are taken in the cluster's order.

    Without a cluster, one node of 910B2 holds all devices. Without micro-batch sizes, the smallest that
    every stage's DP degree divides; without samples, two micro-batches a pipeline.
    """
    count = sum(tp * dp for stages in pipelines for tp, dp, _ in stages)
    if cluster is None:
        cluster = from_short_form(f"1x{count}:910B2")
    devices = [device.id for device in cluster.devices]
    made = []
    for index, stages in enumerate(pipelines):
        size = micro_batch_sizes[index] if micro_batch_sizes else _common_multiple(stages)
        taken = samples[index] if samples else 2 * size
        needed = sum(tp * dp for tp, dp, _ in stages)
        made.append(_pipeline(index, stages, devices[:needed], size=size, samples=taken))
        del devices[:needed]
    defaults: dict[str, Any] = {"sequence_length": model.max_sequence_length, "idle_devices": tuple(devices)}
    return Plan(
        model=model,
        cluster=cluster,
        global_batch_size=sum(pipeline.samples for pipeline in made),
        pipelines=tuple(made),
        **(defaults | fields),
    )


def _common_multiple(stages: Sequence[Degrees]) -> int:
    size = 1
    while any(size % dp for _, dp, _ in stages):
        size += 1
    return size


def _pipeline(
    index: int, stages: Sequence[Degrees], devices: Sequence[str], *, size: int, samples: int
) -> PipelinePlan:
    made, layer, first = [], 0, 0
    for number, (tp, dp, layers) in enumerate(stages):
        made.append(
            StagePlan(
                devices=tuple(devices[first : first + tp * dp]),
                tp=tp,
                dp=dp,
                rows=(size // dp,) * dp,
                layers=(layer, layer + layers),
                embedding=number == 0,
                head=number == len(stages) - 1,
            )
        )
        layer, first = layer + layers, first + tp * dp
    return PipelinePlan(
        id=index,
        micro_batch_size=size,
        samples=samples,
        local_batch_size=-(-samples // size) * size,
        stages=tuple(made),
    )
