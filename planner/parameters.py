"""Every parameter of a ModelSpec: the single list that memory, blocks, engine and checkpoints read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from planner.model_spec import ModelSpec

RegionKind = Literal["embedding", "layer", "final_norm", "head"]


@dataclass(frozen=True, order=True)
class Region:
    """A part of the model that a stage holds whole or not at all; ordered as the forward pass runs."""

    order: int
    kind: RegionKind
    layer: int | None = None

    def __str__(self) -> str:
        return f"layer {self.layer}" if self.kind == "layer" else self.kind


@dataclass(frozen=True)
class Parameter:
    """One logical (unsharded) parameter.

    `tp_dim` is the dim that tensor parallelism cuts, None when every TP rank holds a copy.
    `tied` marks the token embedding that the head shares: stages with `embedding` or `head` hold it.
    `padded` marks a vocabulary dim: it need not divide by TP, each shard is ceil(size / tp) long and
    the last ones are padded inside the stage; padding is absent from blocks and checkpoints.
    """

    name: str
    shape: tuple[int, ...]
    region: Region
    tp_dim: int | None = None
    tied: bool = False
    padded: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def decays(self) -> bool:
        """Whether AdamW's weight decay applies: matrices yes, norms and biases no."""
        return len(self.shape) > 1

    def shard_range(self, *, tp: int, tp_rank: int) -> tuple[int, int]:
        """Half-open range of logical indices along `tp_dim` that a TP rank holds; may be empty if padded."""
        assert self.tp_dim is not None, f"{self.name} is replicated"
        size = self.shape[self.tp_dim]
        length = -(-size // tp)
        assert self.padded or length * tp == size, f"{self.name}: {size} does not divide by tp {tp}"
        return min(size, tp_rank * length), min(size, (tp_rank + 1) * length)

    def shard_numel(self, *, tp: int, tp_rank: int) -> int:
        """Elements that a TP rank holds, padding left out."""
        if self.tp_dim is None:
            return self.numel
        start, stop = self.shard_range(tp=tp, tp_rank=tp_rank)
        return self.numel // self.shape[self.tp_dim] * (stop - start)

    def padded_shard_shape(self, *, tp: int) -> tuple[int, ...]:
        """Shape of the tensor that a TP rank allocates, padding included."""
        if self.tp_dim is None:
            return self.shape
        shape = list(self.shape)
        shape[self.tp_dim] = -(-shape[self.tp_dim] // tp)
        return tuple(shape)


class HoldsRegions(Protocol):
    """What of a StagePlan decides which parameters it holds."""

    @property
    def layers(self) -> tuple[int, int]: ...
    @property
    def embedding(self) -> bool: ...
    @property
    def head(self) -> bool: ...


@lru_cache(maxsize=64)
def model_parameters(model: ModelSpec) -> tuple[Parameter, ...]:
    """All parameters in forward order; names are those of the engine's modules and of saved weights."""
    return tuple(_parameters(model))


def stage_parameters(model: ModelSpec, stage: HoldsRegions) -> list[Parameter]:
    """The parameters that a stage holds, in forward order; a tied embedding appears once."""
    first, last = stage.layers
    held = []
    for parameter in model_parameters(model):
        kind, layer = parameter.region.kind, parameter.region.layer
        if kind == "layer":
            assert layer is not None
            wanted = first <= layer < last
        elif kind == "embedding":
            wanted = stage.embedding or (parameter.tied and stage.head)
        else:
            wanted = stage.head
        if wanted:
            held.append(parameter)
    return held


def layer_regions(model: ModelSpec) -> list[Region]:
    """Regions of the layers, in order."""
    return [Region(1 + index, "layer", index) for index in range(model.layers)]


def _parameters(model: ModelSpec) -> Iterator[Parameter]:
    hidden, vocab = model.hidden_size, model.vocab_size
    embedding = Region(0, "embedding")
    yield Parameter(
        "embedding.tokens.weight",
        (vocab, hidden),
        embedding,
        tp_dim=0,
        tied=model.tied_embedding,
        padded=True,
    )
    if model.family == "gpt3":
        yield Parameter("embedding.positions.weight", (model.max_sequence_length, hidden), embedding)
    for region in layer_regions(model):
        yield from _layer_parameters(model, region)
    yield from _norm(model, "final_norm", Region(model.layers + 1, "final_norm"))
    if not model.tied_embedding:
        head = Region(model.layers + 2, "head")
        yield Parameter("head.weight", (vocab, hidden), head, tp_dim=0, padded=True)


def _layer_parameters(model: ModelSpec, region: Region) -> Iterator[Parameter]:
    prefix, hidden, ffn = f"layers.{region.layer}", model.hidden_size, model.ffn_hidden_size
    kv_width = model.kv_heads * model.head_size
    yield from _norm(model, f"{prefix}.attention_norm", region)
    for name, width in (("query", hidden), ("key", kv_width), ("value", kv_width)):
        yield from _linear(model, f"{prefix}.attention.{name}", (width, hidden), region, tp_dim=0)
    yield from _linear(model, f"{prefix}.attention.output", (hidden, hidden), region, tp_dim=1)
    yield from _norm(model, f"{prefix}.mlp_norm", region)
    if model.family == "llama":
        yield from _linear(model, f"{prefix}.mlp.gate", (ffn, hidden), region, tp_dim=0)
    yield from _linear(model, f"{prefix}.mlp.up", (ffn, hidden), region, tp_dim=0)
    yield from _linear(model, f"{prefix}.mlp.down", (hidden, ffn), region, tp_dim=1)


def _norm(model: ModelSpec, name: str, region: Region) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (model.hidden_size,), region)
    if model.has_biases:
        yield Parameter(f"{name}.bias", (model.hidden_size,), region)


def _linear(
    model: ModelSpec, name: str, shape: tuple[int, int], region: Region, *, tp_dim: int
) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", shape, region, tp_dim=tp_dim)
    if model.has_biases:
        # A column-parallel bias is cut with its outputs; a row-parallel one is added once, after the
        # reduction, so every TP rank holds a copy.
        yield Parameter(f"{name}.bias", shape[:1], region, tp_dim=0 if tp_dim == 0 else None)
