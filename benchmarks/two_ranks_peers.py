"""torch's own ways to train on two ranks, written as their documentation shows them.

Each is a function that returns one iteration by number. What that returns is this rank's part of the loss: over
the ranks the parts add up to the mean over the global batch. Gradients are clipped by the whole model's norm and
AdamW updates in its `foreach` form, as in the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from paired_runs import torch_adamw
from plain_model import PlainGpt
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from actors.engine.data import Samples
from actors.engine.tokens import TokenFile
from actors.engine.trainer import TrainerConfig

Iterate = Callable[[int], float]


def data_parallel(config: TrainerConfig, rank: int) -> Iterate:
    """DistributedDataParallel; all micro-batches but the last under `no_sync`."""
    plan, training, samples = config.plan, config.training, _samples(config)
    model = DistributedDataParallel(PlainGpt(plan.model, seed=training.seed), gradient_as_bucket_view=True)
    optimizer = torch_adamw(model.parameters(), training, foreach=True)
    pipeline, (first, _) = plan.pipelines[rank], plan.sample_ranges()[rank]
    size, count = pipeline.micro_batch_size, pipeline.micro_batches

    def iterate(iteration: int) -> float:
        total = 0.0
        for index in range(count):
            start = first + index * size
            inputs, labels = samples.batch(iteration, start, start + size)
            if index < count - 1:
                with model.no_sync():
                    loss = _loss(model(inputs), labels) / count
                    loss.backward()
            else:
                loss = _loss(model(inputs), labels) / count
                loss.backward()
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.gradient_clip or torch.inf)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total / dist.get_world_size()

    return iterate


def tensor_parallel(config: TrainerConfig, rank: int) -> Iterate:
    """`parallelize_module` with torch's styles, the loss over a head that stays cut."""
    plan, training, samples = config.plan, config.training, _samples(config)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
    model = PlainGpt(plan.model, seed=training.seed)
    parallelize_module(model, mesh, _styles(plan.model.layers))
    parameters = list(model.parameters())
    optimizer = torch_adamw(parameters, training, foreach=True)
    pipeline = plan.pipelines[0]
    size, count = pipeline.micro_batch_size, pipeline.micro_batches

    def iterate(iteration: int) -> float:
        total = 0.0
        for index in range(count):
            inputs, labels = samples.batch(iteration, index * size, (index + 1) * size)
            with loss_parallel():
                loss = _loss(model(inputs), labels) / count
                loss.backward()
            total += float(loss.detach())
        _clip(parameters, training.gradient_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total if rank == 0 else 0.0

    return iterate


def _styles(layers: int) -> dict[str, ParallelStyle]:
    styles: dict[str, ParallelStyle] = {
        "embedding.tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
        "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    for index in range(layers):
        styles |= {
            # Made a DTensor once, so that the gradients of query, key and value are summed over ranks once.
            f"layers.{index}.attention": PrepareModuleInput(
                input_layouts=(Replicate(), None), desired_input_layouts=(Replicate(), None)
            ),
            f"layers.{index}.attention.query": ColwiseParallel(),
            f"layers.{index}.attention.key": ColwiseParallel(),
            f"layers.{index}.attention.value": ColwiseParallel(),
            f"layers.{index}.attention.output": RowwiseParallel(),
            f"layers.{index}.mlp.up": ColwiseParallel(),
            f"layers.{index}.mlp.down": RowwiseParallel(),
        }
    return styles


def pipeline_parallel(config: TrainerConfig, rank: int) -> Iterate:
    """`torch.distributed.pipelining` with its 1F1B; the norm is summed over the stages."""
    plan, training, samples = config.plan, config.training, _samples(config)
    pipeline = plan.pipelines[0]
    stage = pipeline.stages[rank]
    model = PlainGpt(plan.model, layers=stage.layers, seed=training.seed)
    schedule = Schedule1F1B(
        PipelineStage(model, rank, len(pipeline.stages), torch.device("cpu")),
        pipeline.micro_batches,
        loss_fn=_loss,
    )
    parameters = list(model.parameters())
    optimizer = torch_adamw(parameters, training, foreach=True)

    def iterate(iteration: int) -> float:
        inputs, labels = samples.batch(iteration, 0, plan.global_batch_size)
        losses: list[torch.Tensor] = []
        if stage.embedding:
            schedule.step(inputs, return_outputs=False)
        else:
            schedule.step(target=labels, losses=losses, return_outputs=False)
        _clip(parameters, training.gradient_clip, over=dist.group.WORLD)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(torch.stack(losses).detach().mean()) if losses else 0.0

    return iterate


PEERS: dict[str, Callable[[TrainerConfig, int], Iterate]] = {
    "dp": data_parallel,
    "tp": tensor_parallel,
    "pp": pipeline_parallel,
}


def _samples(config: TrainerConfig) -> Samples:
    return Samples(
        TokenFile(config.tokens),
        sequence_length=config.plan.sequence_length,
        global_batch_size=config.plan.global_batch_size,
        seed=config.training.seed,
    )


def _loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over the tokens."""
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _clip(
    parameters: Iterable[torch.nn.Parameter], limit: float | None, *, over: dist.ProcessGroup | None = None
) -> None:
    """What `clip_grad_norm_` does, for plain beside distributed tensors, or for the stages of a pipeline."""
    members = list(parameters)
    gradients = [parameter.grad for parameter in members if parameter.grad is not None]
    norms = []
    for cut in (False, True):
        alike = [gradient for gradient in gradients if isinstance(gradient, DTensor) == cut]
        if alike:
            norm = torch.nn.utils.get_total_norm(alike)
            norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).square().sum()
    if over is not None:
        dist.all_reduce(total, group=over)
    total = total.sqrt()
    for cut in (False, True):
        alike = [p for p in members if p.grad is not None and isinstance(p.grad, DTensor) == cut]
        if alike:
            torch.nn.utils.clip_grads_with_norm_(alike, limit or torch.inf, total)
