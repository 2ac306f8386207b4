"""A layer as a data flow: which named operator (planner/operators.py) reads and writes which values.

Profiler, cost model and recomputation speak of these operators. Beside what operators make, a layer has
constants: `mask` (causal), `documents` (where each token's document begins, or None), `rotation` (cosines and sines)
and `draws` (what decides dropout).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CONSTANTS = ("mask", "documents", "rotation", "draws")


@dataclass(frozen=True)
class Operator:
    """A named operator, the values it reads and those it writes.

    `last_reads` are the inputs that no later operator reads: the layer lets go of them.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    last_reads: frozenset[str] = frozenset()


def with_last_reads(flow: Sequence[Operator]) -> tuple[Operator, ...]:
    """The same operators, each knowing which of its inputs it is the last to read."""
    needed, found = {"hidden"}, []
    for operator in reversed(flow):
        needed -= set(operator.outputs)
        last = frozenset(operator.inputs) - needed
        found.append(Operator(operator.name, operator.inputs, operator.outputs, last))
        needed |= set(operator.inputs)
    return tuple(reversed(found))


_TO_CONTEXT = (
    Operator("scores", ("query", "key", "mask", "documents"), ("scores",)),
    Operator("softmax", ("scores",), ("weights",)),
    Operator("attention_dropout", ("weights", "draws"), ("weights",)),
    Operator("context", ("weights", "value"), ("context",)),
    Operator("attention_output", ("context",), ("update",)),
    Operator("attention_residual", ("hidden", "update", "draws"), ("hidden",)),
    Operator("mlp_norm", ("hidden",), ("normed",)),
)

GPT3_FLOW = with_last_reads(
    (
        Operator("attention_norm", ("hidden",), ("normed",)),
        Operator("qkv", ("normed",), ("query", "key", "value")),
        *_TO_CONTEXT,
        Operator("mlp_up", ("normed",), ("inner",)),
        Operator("activation", ("inner",), ("inner",)),
        Operator("mlp_down", ("inner",), ("update",)),
        Operator("mlp_residual", ("hidden", "update", "draws"), ("hidden",)),
    )
)

LLAMA_FLOW = with_last_reads(
    (
        Operator("attention_norm", ("hidden",), ("normed",)),
        Operator("qkv", ("normed",), ("query", "key", "value")),
        Operator("rotary", ("query", "key", "rotation"), ("query", "key")),
        *_TO_CONTEXT,
        Operator("mlp_gate_up", ("normed",), ("gate", "inner")),
        Operator("activation", ("gate", "inner"), ("inner",)),
        Operator("mlp_down", ("inner",), ("update",)),
        Operator("mlp_residual", ("hidden", "update", "draws"), ("hidden",)),
    )
)
