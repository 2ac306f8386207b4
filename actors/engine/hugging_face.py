"""Weights between our names and layouts and those of Hugging Face's GPT-2 and LLaMA, a tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch

from planner.model_spec import ModelSpec
from planner.parameters import Parameter, model_parameters

# Our modules by the end of their names.
_GPT2_ENDS = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
    "head": "lm_head",
}
_GPT2_LAYER = {
    "attention_norm": "ln_1",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp_norm": "ln_2",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_LLAMA_ENDS = {"embedding.tokens": "model.embed_tokens", "final_norm": "model.norm", "head": "lm_head"}
_LLAMA_LAYER = {
    "attention_norm": "input_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
}
_FUSED = ("attention.query", "attention.key", "attention.value")


class Sliced(Protocol):
    """A tensor, or one in a file of which only what is asked for is read."""

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class TheirTensor:
    """Where a parameter of ours lies in their model.

    `transposed`: GPT-2's layers hold the transpose of a linear layer's weight. `part` is which third of the fused
    query, key and value projection it is, along outputs.
    """

    name: str
    transposed: bool = False
    part: int | None = None


def their_tensor(model: ModelSpec, parameter: Parameter) -> TheirTensor:
    """The tensor of GPT2LMHeadModel or LlamaForCausalLM that holds a parameter."""
    module, kind = parameter.name.rsplit(".", 1)
    gpt2 = model.family == "gpt3"
    ends, layers, prefix = (
        (_GPT2_ENDS, _GPT2_LAYER, "transformer.h") if gpt2 else (_LLAMA_ENDS, _LLAMA_LAYER, "model.layers")
    )
    if module in ends:
        return TheirTensor(f"{ends[module]}.{kind}")
    _, layer, inner = module.split(".", 2)
    return TheirTensor(
        f"{prefix}.{layer}.{layers[inner]}.{kind}",
        transposed=gpt2 and len(parameter.shape) > 1,
        part=_FUSED.index(inner) if gpt2 and inner in _FUSED else None,
    )


def from_theirs(
    model: ModelSpec,
    parameter: Parameter,
    get: Callable[[str], Sliced],
    *,
    tp_range: tuple[int, int] | None = None,
) -> torch.Tensor:
    """A parameter, or its logical range `tp_range` along `tp_dim`, read from their tensors."""
    ranges = [(0, size) for size in parameter.shape]
    if tp_range is not None:
        assert parameter.tp_dim is not None
        ranges[parameter.tp_dim] = tp_range
    place = their_tensor(model, parameter)
    if place.part is not None:
        start = place.part * parameter.shape[0]
        ranges[0] = (start + ranges[0][0], start + ranges[0][1])
    if place.transposed:
        ranges.reverse()
    found = get(place.name)[tuple(slice(*bounds) for bounds in ranges)]
    return found.T if place.transposed else found


def to_theirs(model: ModelSpec, get: Callable[[str], torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Their tensors, each made when it is asked for; a tied head is left out, as in their files."""
    parts: dict[str, list[Parameter]] = {}
    for parameter in model_parameters(model):
        parts.setdefault(their_tensor(model, parameter).name, []).append(parameter)
    for name, parameters in parts.items():
        whole = torch.cat([get(parameter.name) for parameter in parameters])
        transposed = their_tensor(model, parameters[0]).transposed
        yield name, (whole.T if transposed else whole).contiguous()


def their_shapes(model: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The shape of each of their tensors, in the order of `to_theirs`."""
    shapes: dict[str, tuple[int, ...]] = {}
    for parameter in model_parameters(model):
        place, shape = their_tensor(model, parameter), list(parameter.shape)
        if place.part is not None:
            shape[0] *= len(_FUSED)
        shapes[place.name] = tuple(reversed(shape) if place.transposed else shape)
    return shapes
