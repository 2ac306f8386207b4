"""The named operators of a layer, in forward order: what profiler, cost model and recompute share."""

from __future__ import annotations

from planner.model_spec import ModelSpec

# The thirteen operators of a GPT-3 layer; Table 3 of the paper recomputes qkv, scores, softmax and
# attention_dropout.
GPT3_OPERATORS = (
    "attention_norm",
    "qkv",
    "scores",
    "softmax",
    "attention_dropout",
    "context",
    "attention_output",
    "attention_residual",
    "mlp_norm",
    "mlp_up",
    "activation",
    "mlp_down",
    "mlp_residual",
)

LLAMA_OPERATORS = (
    "attention_norm",
    "qkv",
    "rotary",
    "scores",
    "softmax",
    "attention_dropout",
    "context",
    "attention_output",
    "attention_residual",
    "mlp_norm",
    "mlp_gate_up",
    "activation",
    "mlp_down",
    "mlp_residual",
)

# Where each operator stands in forward order, in any family: a plain MLP's first product is where a gated one's is.
OPERATOR_ORDER = {name: index for index, name in enumerate(LLAMA_OPERATORS)} | {
    "mlp_up": LLAMA_OPERATORS.index("mlp_gate_up")
}

# Under TP each rank has a part of their result, which an all-reduce sums.
SUMMED_OPERATORS = ("attention_output", "mlp_down")

# Under TP each rank needs their whole input; with sequence parallelism they gather it first.
GATHERING_OPERATORS = ("qkv", "mlp_up", "mlp_gate_up")

# They work position by position on whole features: with sequence parallelism a rank has its positions alone.
BY_POSITION_OPERATORS = frozenset(("attention_norm", "attention_residual", "mlp_norm", "mlp_residual"))


def cuts_positions(*, tp: int, sequence_length: int) -> bool:
    """Whether sequence parallelism can cut such sequences over so many TP ranks."""
    return tp > 1 and sequence_length % tp == 0


def layer_operators(model: ModelSpec) -> tuple[str, ...]:
    """Names of a layer's operators, in forward order."""
    return GPT3_OPERATORS if model.family == "gpt3" else LLAMA_OPERATORS
