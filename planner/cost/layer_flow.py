"""What a layer keeps when backward replays some of its operators: a function of their set, value by value.

A replayed operator gives up what it makes and needs what it reads: softmax replayed alone keeps the scores
alive, which a layer without recomputation lets go of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from planner.cost.activations import ActivationSizes, Value, layer_values
from planner.model_spec import ModelSpec
from planner.operators import OPERATOR_ORDER, layer_operators
from planner.plan import Dtypes

Recompute = tuple[tuple[str, int], ...]
"""Operators that a stage recomputes, each in its first so many layers: in operator order, none with 0."""

OperatorSet = frozenset[str]


def recompute_of(counts: Mapping[str, int]) -> Recompute:
    """The hashable form of StagePlan.recompute."""
    return tuple(
        sorted(((name, n) for name, n in counts.items() if n), key=lambda pair: OPERATOR_ORDER[pair[0]])
    )


def first_layers(recompute: Recompute, layers: int) -> Recompute:
    """What of it falls on the first so many layers of the stage."""
    return tuple((name, min(count, layers)) for name, count in recompute if layers)


@dataclass(frozen=True)
class Segment:
    """Neighbouring layers of a stage that recompute the same operators."""

    operators: OperatorSet
    layers: int


@cache
def segments(recompute: Recompute, layers: int) -> tuple[Segment, ...]:
    """The layers of a stage, first to last, in segments; none for a stage without layers."""
    assert all(count <= layers for _, count in recompute), "no more layers than the stage has"
    found, start = [], 0
    for stop in sorted({layers, *(count for _, count in recompute)}):
        if stop > start:
            operators = frozenset(name for name, count in recompute if count >= stop)
            found.append(Segment(operators, stop - start))
            start = stop
    return tuple(found)


def replayed(values: Sequence[Value], operators: OperatorSet) -> OperatorSet:
    """Those of the operators that backward really replays: what they make is read by backward, or by another
    one's replay. (The last product of a layer's MLP is not: only the next layer reads its result.)"""
    needed = {value.producer for value in values if value.saved and value.producer in operators}
    growing = True
    while growing:
        further = {
            value.producer
            for value in values
            if value.producer in operators and needed.intersection(value.readers)
        }
        growing = not further <= needed
        needed |= further
    return frozenset(name for name in needed if name is not None)


def kept_bytes(values: Sequence[Value], operators: OperatorSet) -> float:
    """Bytes that stay alive until backward: what it reads and no replay makes, and what replays read."""
    again = replayed(values, operators)
    return sum(
        value.bytes
        for value in values
        if value.producer not in again and (value.saved or not again.isdisjoint(value.readers))
    )


@cache
def replayed_operators(model: ModelSpec, dtypes: Dtypes, operators: OperatorSet) -> tuple[str, ...]:
    """`replayed` of a model's layer, in forward order, whatever the sizes."""
    values = layer_values(ActivationSizes(model, dtypes, tp=1, rows=1, sequence_length=1))
    again = replayed(values, operators)
    return tuple(name for name in layer_operators(model) if name in again)
