"""What a Hugging Face `config.json` of type `gpt2` or `llama` says, as fields of a ModelSpec, and back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from planner.errors import UserError

if TYPE_CHECKING:
    from planner.model_spec import ModelSpec, RopeScaling

# What our layers do not do, by the key that asks for it: the values that are as good as none.
_GPT2_FIXED: dict[str, tuple[Any, ...]] = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}
_LLAMA_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "attention_bias": (False,),
    "mlp_bias": (False,),
    "attention_dropout": (0, 0.0),
}
# Other names of what `hugging_face_config` writes, which could contradict it.
_SUPERSEDED = ("torch_dtype", "rope_theta", "rope_scaling", "n_ctx", "head_dim")


def model_fields(config: Mapping[str, Any], *, name: str) -> dict[str, Any]:
    """Fields of the ModelSpec called `name`.

    Raises UserError for another `model_type`, a key that is missing, or a value that no ModelSpec can say.
    """
    kind = config.get("model_type")
    if config.get("quantization_config"):
        raise UserError(
            f"{name}/config.json: quantization_config is given, but only plain weights are read; use the model that"
            " was not quantised"
        )
    try:
        if kind == "gpt2":
            _check_fixed(config, _GPT2_FIXED, name=name)
            return {"name": name} | _gpt2(config, name)
        if kind == "llama":
            _check_fixed(config, _LLAMA_FIXED, name=name)
            return {"name": name, "family": "llama"} | _llama(config, name)
    except KeyError as error:
        raise UserError(
            f"{name}/config.json: key {error.args[0]!r} is missing for model_type {kind!r}"
        ) from None
    raise UserError(f"{name}/config.json: model_type = {json.dumps(kind)} is not known; use gpt2 or llama")


def _gpt2(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    dropout = {key: config[key] for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop") if key in config}
    if len(set(dropout.values())) > 1:
        said = ", ".join(f"{key} = {value}" for key, value in dropout.items())
        raise UserError(f"{name}/config.json: {said}, but a model has one dropout; make them equal")
    return {
        "layers": config["n_layer"],
        "hidden_size": config["n_embd"],
        "heads": config["n_head"],
        "ffn_hidden_size": config.get("n_inner") or 0,
        "vocab_size": config["vocab_size"],
        "max_sequence_length": config["n_positions"],
        "tied_embedding": config.get("tie_word_embeddings", True),
        "dropout": next(iter(dropout.values()), 0.0),
        "norm_epsilon": config.get("layer_norm_epsilon", 1e-5),
    }


def _llama(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim")
    if head_size and head_size * heads != hidden:
        raise UserError(
            f"{name}/config.json: head_dim = {head_size} must be hidden_size / num_attention_heads ="
            f" {hidden} / {heads}; use a model whose heads are that wide"
        )
    # Newer files hold base and scaling together, older ones apart.
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {
        "layers": config["num_hidden_layers"],
        "hidden_size": hidden,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads") or 0,
        "ffn_hidden_size": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
        "max_sequence_length": config["max_position_embeddings"],
        "tied_embedding": config.get("tie_word_embeddings", False),
        "norm_epsilon": config.get("rms_norm_eps", 1e-6),
        "rope_base": rope.get("rope_theta") or config.get("rope_theta") or 10_000.0,
        "rope_scaling": _rope_scaling(rope, name),
    }


def _rope_scaling(rope: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return {"type": "linear", "factor": rope["factor"]}
    if kind == "llama3":
        return {
            "type": "llama3",
            "factor": rope["factor"],
            "low_turns": rope["low_freq_factor"],
            "high_turns": rope["high_freq_factor"],
            "original_sequence_length": rope["original_max_position_embeddings"],
        }
    raise UserError(f"{name}/config.json: rope type {kind!r} is not supported; use default, linear or llama3")


def _check_fixed(config: Mapping[str, Any], fixed: Mapping[str, tuple[Any, ...]], *, name: str) -> None:
    for key, allowed in fixed.items():
        if key in config and config[key] not in allowed:
            raise UserError(
                f"{name}/config.json: {key} = {json.dumps(config[key])} is not supported; use"
                f" {' or '.join(dict.fromkeys(json.dumps(value) for value in allowed))}"
            )


def hugging_face_config(
    model: ModelSpec, *, dtype: str, origin: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The `config.json` of a model with weights of a torch dtype such as `float32`: `model_fields` reads it back.

    `origin` is the one that the model came with: its other keys, of special tokens for example, stay.
    """
    own = _own_config(model) | {"dtype": dtype}
    if origin is None or origin.get("model_type") != own["model_type"]:
        return own
    return {key: value for key, value in origin.items() if key not in _SUPERSEDED} | own


def _own_config(model: ModelSpec) -> dict[str, Any]:
    if model.family == "gpt3":
        return {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": model.layers,
            "n_embd": model.hidden_size,
            "n_head": model.heads,
            "n_inner": model.ffn_hidden_size,
            "vocab_size": model.vocab_size,
            "n_positions": model.max_sequence_length,
            "tie_word_embeddings": model.tied_embedding,
            "layer_norm_epsilon": model.norm_epsilon,
            "activation_function": "gelu_new",
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), model.dropout),
        }
    return {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": model.layers,
        "hidden_size": model.hidden_size,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "intermediate_size": model.ffn_hidden_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": model.max_sequence_length,
        "tie_word_embeddings": model.tied_embedding,
        "rms_norm_eps": model.norm_epsilon,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_parameters": {"rope_theta": model.rope_base, **_their_scaling(model.rope_scaling)},
    }


def _their_scaling(scaling: RopeScaling | None) -> dict[str, Any]:
    if scaling is None:
        return {"rope_type": "default"}
    if scaling.type == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_turns,
        "high_freq_factor": scaling.high_turns,
        "original_max_position_embeddings": scaling.original_sequence_length,
    }
