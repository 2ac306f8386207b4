"""How far to stretch time on emulated devices, so that the host can keep up with what it plays."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import ray

from planner.cost.price import replica_seconds
from planner.model_spec import ModelSpec
from planner.plan import Plan

# A step must be long beside the host's scheduling noise, which is a few milliseconds on a busy machine.
SHORTEST_STEP_SECONDS = 0.05
# The engine also tracks tensors, accumulates gradients and passes messages; a bare layer does not.
_ENGINE_OVERHEAD = 1.6
_REPEATS = 8


@dataclass(frozen=True)
class HostSeconds:
    """Host seconds of one sample on one thread: a layer and the head with its loss, forward and backward."""

    layer_forward: float
    layer_backward: float
    head_forward: float
    head_backward: float


class HostMeasurement:
    """Measures the host in a Ray task, while something else is being done."""

    def __init__(self, model: ModelSpec, sequence_length: int) -> None:
        self._task = ray.remote(num_cpus=0)(measure_host).remote(model, sequence_length)

    def seconds(self) -> HostSeconds:
        """Waits for the task."""
        return ray.get(self._task)


def auto_time_scale(plan: Plan, host: HostSeconds) -> float:
    """The least scale, to two digits, at which device times and not the host's decide the run.

    Two conditions: the shortest forward step of any rank lasts SHORTEST_STEP_SECONDS, and every step lasts
    at least the host's own time for its arithmetic, measured here, while all ranks share the host's cores.
    """
    cores = max(node["Resources"].get("CPU", 1.0) for node in ray.nodes() if node["Alive"])
    return least_time_scale(plan, host, cores=cores)


def least_time_scale(plan: Plan, host: HostSeconds, *, cores: float) -> float:
    """See `auto_time_scale`; pure, given the host's measured seconds."""
    crowding = max(1.0, plan.world_size / cores) * _ENGINE_OVERHEAD
    scales = []
    for device, own in _steps(plan, host):
        scales.append(own * crowding / device)
    shortest = min(device for device, _ in _steps(plan, host, forward_only=True))
    scale = max(SHORTEST_STEP_SECONDS / shortest, *scales)
    return float(f"{scale:.2g}") if float(f"{scale:.2g}") >= scale else float(f"{scale * 1.05:.2g}")


def _steps(plan: Plan, host: HostSeconds, *, forward_only: bool = False) -> Iterator[tuple[float, float]]:
    """(device seconds, host seconds) of every distinct step of the plan."""
    for index, pipeline in enumerate(plan.pipelines):
        for number, stage in enumerate(pipeline.stages):
            for replica, rows in enumerate(stage.rows):
                device = replica_seconds(plan, pipeline=index, stage=number, replica=replica)
                share = rows / stage.tp
                forward = stage.layer_count * host.layer_forward + stage.head * host.head_forward
                yield device.forward, share * forward
                if not forward_only:
                    backward = stage.layer_count * host.layer_backward + stage.head * host.head_backward
                    # Backward replays at most the whole forward of the layers that recompute anything.
                    backward += max(stage.recompute.values(), default=0) * host.layer_forward
                    yield device.backward, share * backward


def measure_host(model: ModelSpec, sequence_length: int) -> HostSeconds:
    """Time a layer and the head of the model on one thread of this host."""
    import torch
    from torch import nn

    from actors.engine.model.dropout import Draws
    from actors.engine.model.layer import causal_mask, make_layer
    from actors.engine.model.rotary import rotation_table

    torch.set_num_threads(1)
    cpu = torch.device("cpu")
    layer = make_layer(model, index=0, tp=1, tp_rank=0)
    for parameter in layer.parameters():
        nn.init.normal_(parameter, std=0.02)
    constants: dict[str, object] = {
        "mask": causal_mask(sequence_length, dtype=torch.float32, device=cpu),
        "draws": Draws(seed=0, iteration=1, first_sample=0),
        "documents": None,
    }
    if model.family == "llama":
        constants["rotation"] = rotation_table(model, sequence_length, device=cpu)
    head = nn.Linear(model.hidden_size, model.vocab_size, bias=False)
    hidden = torch.randn(1, sequence_length, model.hidden_size, requires_grad=True)
    labels = torch.zeros(sequence_length, dtype=torch.int64)

    def run_layer() -> torch.Tensor:
        output: torch.Tensor = layer(hidden, constants)
        return output.sum()

    def run_head() -> torch.Tensor:
        return nn.functional.cross_entropy(head(hidden).flatten(0, 1), labels)

    timed = []
    for run in (run_layer, run_head):
        forward, backward = [], []
        for _ in range(_REPEATS + 1):
            began = time.perf_counter()
            result = run()
            between = time.perf_counter()
            result.backward()
            forward.append(between - began)
            backward.append(time.perf_counter() - between)
        # The first of each also allocates; the least of the others is the one least disturbed.
        timed += [min(forward[1:]), min(backward[1:])]
    return HostSeconds(*timed)
