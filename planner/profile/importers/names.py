"""What the sources call models and operators, and what they are here."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from planner.model_spec import PRESETS, ModelSpec
from planner.profile.file import Part

# Models whose published profiles carry another name than the row of the paper's Table 2 that they are.
_MODELS = {"opt-350": "gpt3-350m", "gpt-neo-2.7": "gpt3-2.6b"}
_SIZED = re.compile(r"^gpt-?3?-(\d+)(?:[-.](\d+))?([bm])$")


def preset_of(name: str) -> ModelSpec | None:
    """The preset that a file name means: `gpt_1_3B` -> gpt3-1.3b, `OPT-350` -> gpt3-350m; None if unknown."""
    plain = name.lower().replace("_", "-")
    match = _SIZED.match(plain)
    if match:
        plain = f"gpt3-{match[1]}{'.' + match[2] if match[2] else ''}{match[3]}"
    return PRESETS.get(_MODELS.get(plain, plain))


@dataclass(frozen=True)
class SourceOperator:
    """What a row of an operator CSV is. `weights` gives its matrices' values of a whole model's layer;
    0 where it has none, or only vectors, which the files leave out."""

    name: str
    part: Part
    operators: tuple[str, ...]
    weights: Callable[[ModelSpec], int] = lambda model: 0
    storage: str = ""
    """The storage that its saved activations are; its own if empty."""


def _qkv(model: ModelSpec) -> int:
    return model.hidden_size * (model.hidden_size + 2 * model.kv_heads * model.head_size)


def _square(model: ModelSpec) -> int:
    return model.hidden_size * model.hidden_size


def _mlp(model: ModelSpec) -> int:
    return model.hidden_size * model.ffn_hidden_size


def _one(
    operator: str, part: Part = "layer", weights: Callable[[ModelSpec], int] = lambda model: 0
) -> SourceOperator:
    return SourceOperator(operator, part, (operator,), weights)


_ATTENTION = (
    "attention_norm",
    "qkv",
    "scores",
    "softmax",
    "attention_dropout",
    "context",
    "attention_output",
    "attention_residual",
)
_MLP = ("mlp_norm", "mlp_up", "activation", "mlp_down", "mlp_residual")

# Rows of operator CSVs: one an operator, or (`dec-`) one a half of a layer.
OPERATORS: dict[str, SourceOperator] = {
    "encoder-embedding": _one("embedding", "embedding"),
    "enc-1st-layernorm": _one("attention_norm"),
    "enc-attention-qkv": _one("qkv", weights=_qkv),
    "enc-attention-score": _one("scores"),
    # Softmax works in the storage of the scores (its output takes their place), so the two count once.
    "enc-attention-softmax": SourceOperator("softmax", "layer", ("softmax",), storage="scores"),
    "enc-attention-dropout": _one("attention_dropout"),
    "enc-attention-context": _one("context"),
    "enc-attention-dense": _one("attention_output", weights=_square),
    "enc-post-attention-dropout": _one("attention_residual"),
    "enc-2nd-layernorm": _one("mlp_norm"),
    "enc-MLP-GEMM-1": _one("mlp_up", weights=_mlp),
    "enc-MLP-gelu": _one("activation"),
    "enc-MLP-GEMM-2": _one("mlp_down", weights=_mlp),
    "enc-post-MLP-dropout": _one("mlp_residual"),
    "final-layernorm": _one("final_norm", "head"),
    "gpt-post-process": SourceOperator("projection_and_loss", "head", ("vocabulary_projection", "loss")),
    "dec-embedding": _one("embedding", "embedding"),
    "dec-self-attention": SourceOperator("attention", "layer", _ATTENTION, lambda m: _qkv(m) + _square(m)),
    "dec-mlp": SourceOperator("mlp", "layer", _MLP, lambda m: 2 * _mlp(m)),
    "dec-post-process": SourceOperator("head", "head", ("final_norm", "vocabulary_projection", "loss")),
}
