"""Our names and layouts of weights, and those of Hugging Face's GPT-2 and LLaMA, both ways."""

from __future__ import annotations

import torch

from planner.model_spec import ModelSpec
from planner.parameters import model_parameters
from tests.engine.reference import Tensors

# By the end of our names.
_GPT2_ENDS = {
    "embedding.tokens": "transformer.wte",
    "embedding.positions": "transformer.wpe",
    "final_norm": "transformer.ln_f",
}
_GPT2_LAYER = {
    "attention_norm": "ln_1",
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


def to_hugging_face(model: ModelSpec, ours: Tensors) -> Tensors:
    """Our whole tensors as a state dict of GPT2LMHeadModel or LlamaForCausalLM, the tied head left out."""
    theirs: Tensors = {}
    for name, tensor in ours.items():
        if _part_of_fused(model, name):
            continue
        theirs[_their_name(model, name)] = _their_layout(model, name, tensor)
    if model.family == "gpt3":
        for layer in range(model.layers):
            for kind in ("weight", "bias"):
                parts = [
                    ours[f"layers.{layer}.attention.{part}.{kind}"] for part in ("query", "key", "value")
                ]
                fused = torch.cat(parts)
                theirs[f"transformer.h.{layer}.attn.c_attn.{kind}"] = fused.T if fused.dim() > 1 else fused
    return {name: tensor.contiguous() for name, tensor in theirs.items()}


def from_hugging_face(model: ModelSpec, theirs: Tensors) -> Tensors:
    """Their state dict as our whole tensors."""
    ours: Tensors = {}
    for parameter in model_parameters(model):
        name = parameter.name
        if _part_of_fused(model, name):
            _, layer, _, part, kind = name.split(".")
            fused = theirs[f"transformer.h.{layer}.attn.c_attn.{kind}"]
            fused = fused.T if fused.dim() > 1 else fused
            ours[name] = fused.chunk(3)[("query", "key", "value").index(part)]
        else:
            # The layout of a product's weight is its own inverse.
            ours[name] = _their_layout(model, name, theirs[_their_name(model, name)])
    return ours


def _part_of_fused(model: ModelSpec, name: str) -> bool:
    return model.family == "gpt3" and any(f"attention.{part}." in name for part in ("query", "key", "value"))


def _their_name(model: ModelSpec, name: str) -> str:
    module, kind = name.rsplit(".", 1)
    ends, layers, prefix = (
        (_GPT2_ENDS, _GPT2_LAYER, "transformer.h")
        if model.family == "gpt3"
        else (_LLAMA_ENDS, _LLAMA_LAYER, "model.layers")
    )
    if module in ends:
        return f"{ends[module]}.{kind}"
    _, layer, inner = module.split(".", 2)
    return f"{prefix}.{layer}.{layers[inner]}.{kind}"


def _their_layout(model: ModelSpec, name: str, tensor: torch.Tensor) -> torch.Tensor:
    """GPT-2's layers hold the transpose of a linear layer's weight."""
    return tensor.T if model.family == "gpt3" and name.startswith("layers.") and tensor.dim() > 1 else tensor
