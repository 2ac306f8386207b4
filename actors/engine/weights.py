"""Parameters as whole tensors: how they start, how a rank takes its part, how they are saved in the end."""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
import torch.distributed as dist

from actors.engine.gradient_buffer import HeldParameter
from actors.whole_file import whole_file
from planner.model_spec import ModelSpec
from planner.parameters import Parameter, model_parameters, stage_parameters
from planner.plan import Plan, Precision

INITIAL_DEVIATION = 0.02

# Weights that write to the residual stream, twice a layer.
_RESIDUAL_OUTPUTS = ("attention.output.weight", "mlp.down.weight")

DTYPES: dict[Precision, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
_SAFETENSORS_TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def initial_parameter(parameter: Parameter, *, model: ModelSpec, seed: int) -> torch.Tensor:
    """A parameter's first value, whole, fp32, on the CPU: the same under every plan.

    Matrices are normal with deviation 0.02, as the configurations of GPT-2 and LLaMA say; in a GPT-3, as in
    GPT-2, those that write to the residual stream are divided by sqrt(2 x layers). Norms are 1, biases 0.
    Drawn from a generator of the parameter's own, seeded by (seed, name).
    """
    if len(parameter.shape) == 1:
        # Only norms and biases are vectors, and only norms have a vector for a weight.
        return torch.full(parameter.shape, 1.0 if parameter.name.endswith(".weight") else 0.0)
    deviation = INITIAL_DEVIATION
    if model.family == "gpt3" and parameter.name.endswith(_RESIDUAL_OUTPUTS):
        deviation /= math.sqrt(2 * model.layers)
    digest = hashlib.sha256(f"{seed} {parameter.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.empty(parameter.shape).normal_(std=deviation, generator=generator)


def shard(parameter: Parameter, tensor: torch.Tensor, *, tp: int, tp_rank: int) -> torch.Tensor:
    """A TP rank's part of a whole tensor, contiguous, padded with zeros to `padded_shard_shape`."""
    if parameter.tp_dim is None:
        return tensor.clone()
    start, stop = parameter.shard_range(tp=tp, tp_rank=tp_rank)
    part = tensor.narrow(parameter.tp_dim, start, stop - start)
    padded = tensor.new_zeros(parameter.padded_shard_shape(tp=tp))
    padded.narrow(parameter.tp_dim, 0, stop - start).copy_(part)
    return padded


def save_weights(
    path: Path,
    *,
    plan: Plan,
    handles: Sequence[HeldParameter],
    rank: int,
    world: dist.ProcessGroup | None = None,
) -> None:
    """Write the model as one unsharded safetensors file with the names of `planner.parameters`.

    Collective over `world`: the ranks of pipeline 0's first replicas send their shards to rank 0, which
    writes them parameter by parameter and so never holds more than one whole parameter. The file appears
    under its name only when it is complete.
    """
    held = {handle.spec.name: handle for handle in handles}
    if rank == 0:
        example = next(iter(held.values())).local
        whole = (
            _assembled(parameter, ranks, held.get(parameter.name), example, world)
            for parameter, ranks in _owners(plan)
        )
        dtypes = {parameter.name: example.dtype for parameter in model_parameters(plan.model)}
        write_model_file(path, plan.model, whole, dtypes=dtypes)
    else:
        for parameter, ranks in _owners(plan):
            if rank in ranks:
                local = _unpadded(held[parameter.name])
                if local.numel():
                    dist.send(local, dst=0, group=world)
    # Only now is the file there, for whoever looks for it after this call.
    dist.barrier(group=world)


def _owners(plan: Plan) -> Iterator[tuple[Parameter, tuple[int, ...]]]:
    """Every parameter in forward order, and the ranks whose shards make it up, by TP rank."""
    first_rank, owners = 0, dict[str, tuple[int, ...]]()
    for stage in plan.pipelines[0].stages:
        for parameter in stage_parameters(plan.model, stage):
            ranks = range(first_rank, first_rank + (1 if parameter.tp_dim is None else stage.tp))
            # A tied embedding comes again with the head.
            owners.setdefault(parameter.name, tuple(ranks))
        first_rank += len(stage.devices)
    for parameter in model_parameters(plan.model):
        yield parameter, owners[parameter.name]


def _unpadded(handle: HeldParameter) -> torch.Tensor:
    """A rank's shard without vocabulary padding, contiguous."""
    spec, local = handle.spec, handle.local.detach()
    if spec.tp_dim is None:
        return local.contiguous()
    start, stop = spec.shard_range(tp=handle.tp, tp_rank=handle.tp_rank)
    return local.narrow(spec.tp_dim, 0, stop - start).contiguous()


def write_model_file(
    path: Path, model: ModelSpec, tensors: Iterable[torch.Tensor], *, dtypes: Mapping[str, torch.dtype]
) -> None:
    """Write whole parameters, handed over in the order of `model_parameters`, as one safetensors file of the given
    precisions. It appears under its name only when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path) as partial, partial.open("wb") as stream:
        _write_header(stream, model, dtypes)
        for tensor in tensors:
            stream.write(tensor.contiguous().view(torch.uint8).numpy().data)


def _write_header(stream: BinaryIO, model: ModelSpec, dtypes: Mapping[str, torch.dtype]) -> None:
    """The safetensors header; the library itself only writes models that are whole in memory."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt", "model": model.name}}
    start = 0
    for parameter in model_parameters(model):
        dtype = dtypes[parameter.name]
        stop = start + parameter.numel * dtype.itemsize
        entries[parameter.name] = {
            "dtype": _SAFETENSORS_TYPES[dtype],
            "shape": list(parameter.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    header = json.dumps(entries).encode()
    # Readers map the file: tensors start at a multiple of eight bytes.
    header += b" " * (-len(header) % 8)
    stream.write(struct.pack("<Q", len(header)) + header)


def _assembled(
    parameter: Parameter,
    ranks: Sequence[int],
    own: HeldParameter | None,
    example: torch.Tensor,
    world: dist.ProcessGroup | None,
) -> torch.Tensor:
    """A whole parameter on the CPU of rank 0, from its own shard and those that it receives."""
    parts = []
    for tp_rank, source in enumerate(ranks):
        if source == 0:
            assert own is not None
            parts.append(_unpadded(own).cpu())
            continue
        shape = list(parameter.shape)
        if parameter.tp_dim is not None:
            start, stop = parameter.shard_range(tp=len(ranks), tp_rank=tp_rank)
            shape[parameter.tp_dim] = stop - start
        received = torch.empty(shape, dtype=example.dtype, device=example.device)
        if received.numel():
            dist.recv(received, src=source, group=world)
        parts.append(received.cpu())
    return parts[0] if parameter.tp_dim is None else torch.cat(parts, dim=parameter.tp_dim)
