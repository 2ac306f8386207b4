"""How many parameter values a device of a stage holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from planner.model_spec import ModelSpec
from planner.parameters import Parameter, model_parameters


@dataclass(frozen=True)
class HeldValues:
    """Parameter values of TP rank 0, the fullest; `padded` counts the vocabulary's padding too, `copied` those alone
    of which every TP rank has a copy.

    `largest_end_shard` is the largest parameter outside the layers (a token table, as a rule),
    `largest_layer_shard` the largest of a layer; both with padding. `largest_region` are the values of the
    largest of the `regions`, the layers and ends that the stage holds.
    """

    numel: int
    padded: int
    largest_end_shard: int
    largest_layer_shard: int
    largest_region: int
    regions: int
    copied: int


@cache
def held_values(model: ModelSpec, tp: int, layers: int, embedding: bool, head: bool) -> HeldValues:
    """Values of a stage of so many layers. Layers are alike, so the first stands for any."""
    ends: list[Parameter] = []
    layer: list[Parameter] = []
    for parameter in model_parameters(model):
        kind = parameter.region.kind
        if kind == "layer":
            if parameter.region.layer == 0:
                layer.append(parameter)
        elif (embedding and kind == "embedding") or (head and (kind != "embedding" or parameter.tied)):
            ends.append(parameter)

    def shard(parameter: Parameter) -> int:
        return parameter.shard_numel(tp=tp, tp_rank=0)

    def padded(parameter: Parameter) -> int:
        values = 1
        for size in parameter.padded_shard_shape(tp=tp):
            values *= size
        return values

    kinds = {parameter.region.kind for parameter in ends}
    regions = [sum(shard(p) for p in ends if p.region.kind == kind) for kind in kinds]
    regions += [sum(map(shard, layer))] * layers

    def copied(parameters: Sequence[Parameter]) -> int:
        return sum(parameter.numel for parameter in parameters if parameter.tp_dim is None)

    return HeldValues(
        numel=sum(map(shard, ends)) + layers * sum(map(shard, layer)),
        padded=sum(map(padded, ends)) + layers * sum(map(padded, layer)),
        largest_end_shard=max(map(padded, ends), default=0),
        largest_layer_shard=max(map(padded, layer)),
        largest_region=max(regions, default=0),
        regions=len(regions),
        copied=copied(ends) + layers * copied(layer),
    )
