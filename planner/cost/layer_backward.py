"""The most that is alive in one layer's backward, operator by operator, for any set of replayed operators.

Backward walks the operators from last to first. A saved value is freed when every backward that reads it is done.
The first one that reads a replayed value has all replayed operators run again, in forward order; from there on
what they gave up is alive, as without recomputation.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from planner.cost.activations import ActivationSizes, Value, layer_values, norm_live_bytes
from planner.cost.layer_flow import OperatorSet, replayed
from planner.operators import OPERATOR_ORDER, SUMMED_OPERATORS, layer_operators

# Their backward reads none of their inputs: of dropout its mask, of rotation the angles, of a sum nothing.
_READS_NO_INPUT = frozenset(("rotary", "attention_dropout", "attention_residual", "mlp_residual"))

# Read by their own operator's backward, whoever else reads them.
_READ_BY_OWN = frozenset(("softmax output",))

# Dropout hashes a word a pair of elements, in two buffers, some lines at a time while the words of those before are
# still there (actors/engine/model/dropout.py). Accelerators hash more at a time: little beside their workspace.
_HASH_WORDS = 2**17


class LayerBackward:
    """One layer and one micro-batch on one TP rank. The gradient that comes in from behind is not counted here, but
    with the stage's messages or its head."""

    def __init__(self, sizes: ActivationSizes) -> None:
        self._sizes = sizes
        self._values = layer_values(sizes)
        self._readers = [_read_in(value) for value in self._values]
        # The last backward that reads a saved value.
        self._freed_after = [
            min(map(OPERATOR_ORDER.__getitem__, names), default=-1) for names in self._readers
        ]
        self._operators = layer_operators(sizes.model)
        self._besides: dict[str, tuple[float, float]] = {}

    def most(self, operators: OperatorSet) -> float:
        """Bytes alive at once at the most when a layer recomputes these operators: of what it keeps, of what is
        revived, and beside both."""
        again = replayed(self._values, operators)
        trigger = self._trigger(again)
        peak = self.most_in_replay(operators)
        for name in self._operators:
            place = OPERATOR_ORDER[name]
            alive = self._alive(again, place, revived=place <= trigger)
            peak = max(peak, alive + self._beside(name)[1])
        return peak

    def most_in_replay(self, operators: OperatorSet) -> float:
        """The same while operators run again, before backward goes on; 0 if none does."""
        again = replayed(self._values, operators)
        if not again:
            return 0.0
        trigger = self._trigger(again)
        name = next(name for name in self._operators if OPERATOR_ORDER[name] == trigger)
        return self._beside(name)[0] + self._replay(again, self._alive(again, trigger, revived=False))

    @cached_property
    def most_kept(self) -> float:
        """`most` of a layer that recomputes nothing."""
        return self.most(frozenset())

    @cached_property
    def least_most(self) -> float:
        """No more than `most` of any operators: when a value is first read it is alive, be it kept or revived."""
        firsts = [max(map(OPERATOR_ORDER.__getitem__, names), default=-1) for names in self._readers]
        return max(
            self._beside(name)[1]
            + sum(
                value.bytes
                for value, first, last in zip(self._values, firsts, self._freed_after, strict=True)
                if value.saved and last <= OPERATOR_ORDER[name] <= first
            )
            for name in self._operators
        )

    def _trigger(self, again: OperatorSet) -> int:
        """Place of the first operator whose backward reads what is replayed; -1 if nothing is."""
        read = zip(self._values, self._readers, strict=True)
        return max(
            (OPERATOR_ORDER[name] for value, names in read if value.producer in again for name in names),
            default=-1,
        )

    def _alive(self, again: OperatorSet, place: int, *, revived: bool) -> float:
        """Values that are kept, or were revived, in the backward of the operator at a place."""
        total = 0.0
        for value, freed_after in zip(self._values, self._freed_after, strict=True):
            if value.saved and (revived or value.producer not in again):
                total += value.bytes if freed_after <= place else 0.0
            elif not revived and value.producer not in again and not again.isdisjoint(value.readers):
                total += value.bytes
        return total

    def _replay(self, again: OperatorSet, alive: float) -> float:
        """The most alive while operators run again, on top of so many bytes."""
        peak = alive
        for name in self._operators:
            if name not in again:
                continue
            alive += sum(value.bytes for value in self._values if value.producer == name)
            peak = max(peak, alive + self._scratch(name))
            place = OPERATOR_ORDER[name]
            alive -= sum(value.bytes for value in self._values if _last_replayed(value, again) == place)
        return peak

    def _scratch(self, name: str) -> float:
        """What an operator needs beside its results when it runs again."""
        sizes, in_fp32 = self._sizes, 4 / self._sizes.width
        if name == "softmax" and sizes.width < 4:
            # The scores in fp32, which are freed before the result is narrowed.
            return (4 - sizes.width) * sizes.square
        if name in ("attention_norm", "mlp_norm") and sizes.width < 4 and sizes.model.family == "llama":
            return in_fp32 * sizes.part
        if name == "qkv":
            # Products, which are then copied head by head.
            return max(sizes.heads + 2 * sizes.kv, self._gathered)
        if name in ("mlp_up", "mlp_gate_up"):
            return self._gathered
        if name == "rotary":
            # Half of the queries, in fp32; the keys' result is not there yet.
            return max(in_fp32 * sizes.heads / 2 - sizes.kv, in_fp32 * sizes.kv / 2)
        if name == "context":
            return sizes.heads
        if name in SUMMED_OPERATORS:
            # This rank's part of the sum; the bias is added to another tensor, and a sum by position is cut up.
            copies = 2 if sizes.model.has_biases or sizes.sequence_parallel else 1
            return copies * sizes.hidden if sizes.tp > 1 else 0.0
        return self._dropout_scratch(name) if sizes.model.dropout else 0.0

    def _dropout_scratch(self, name: str) -> float:
        """A mask is made before there is a result: the larger of the two counts."""
        sizes = self._sizes
        if name == "attention_dropout":
            result = sizes.width * sizes.square
            return max(_mask_scratch(sizes.square, sizes.sequence_length) - result, 0.0)
        made = _mask_scratch(sizes.part / sizes.width, sizes.model.hidden_size)
        if name == "attention_residual":
            # What is left of the update, beside the sum.
            return max(sizes.part, made - sizes.part)
        # No backward of this layer reads the sum, so that it is nobody's value.
        return max(2 * sizes.part, made) if name == "mlp_residual" else 0.0

    def _beside(self, name: str) -> tuple[float, float]:
        """What an operator's backward holds beyond saved values: when it first reads them, and at the most."""
        if name not in self._besides:
            self._besides[name] = self._work_out_beside(name)
        return self._besides[name]

    def _work_out_beside(self, name: str) -> tuple[float, float]:
        if OPERATOR_ORDER[name] > OPERATOR_ORDER["attention_residual"]:
            return self._beside_mlp(name)
        # Past attention goes the sum of the MLP's gradient and of what came in.
        first, most = self._beside_attention(name)
        return self._sizes.part + first, self._sizes.part + most

    def _beside_mlp(self, name: str) -> tuple[float, float]:
        sizes, ffn = self._sizes, self._sizes.ffn
        products = 2 if sizes.model.family == "llama" else 1
        if name == "mlp_residual":
            return 0.0, self._dropped
        if name == "mlp_down":
            first = self._dropped + self._gathered
            return first, first + ffn + self._weight_gradient(ffn)
        if name == "activation":
            # Of the gate's product the gradients of both factors.
            return ffn, (1 + products) * ffn
        if name == "mlp_norm":
            return sizes.part, sizes.part + norm_live_bytes(sizes)
        assert name in ("mlp_up", "mlp_gate_up")
        return products * ffn, self._products([ffn] * products)

    def _beside_attention(self, name: str) -> tuple[float, float]:
        """The same, less the gradient that goes past attention."""
        sizes = self._sizes
        heads, kv, part, weights = sizes.heads, sizes.kv, sizes.part, sizes.width * sizes.square
        if name == "attention_residual":
            return 0.0, self._dropped
        if name == "attention_output":
            first = self._dropped + self._gathered
            return first, first + heads + self._weight_gradient(heads)
        if name == "context":
            return heads, heads + kv + weights
        if name == "attention_dropout":
            return kv + weights, kv + 2 * weights
        if name == "softmax":
            # Its gradient and its input's are both fp32.
            return kv + 4 * sizes.square, kv + 8 * sizes.square
        if name == "scores":
            return kv + weights, kv + weights + heads + kv
        if name == "rotary":
            return heads + 2 * kv, 2 * heads + 3 * kv
        if name == "qkv":
            return heads + 2 * kv, self._products([heads, kv, kv])
        assert name == "attention_norm"
        return part, part + norm_live_bytes(sizes)

    @property
    def _dropped(self) -> float:
        """The gradient behind dropout is another than that which goes past."""
        return self._sizes.part if self._sizes.model.dropout else 0.0

    @property
    def _gathered(self) -> float:
        """The gradient of a row cut's result is gathered from a copy of the rank's positions."""
        return self._sizes.hidden + self._sizes.part if self._sizes.sequence_parallel else 0.0

    def _products(self, results: Sequence[float]) -> float:
        """The gradients of products of one input, of these sizes, and what comes of them, the last product first: a
        weight's gradient and the input's, which are summed. Where inputs are gathered again (sequence parallelism)
        the gradients of all weights, and two whole activations as those are gathered or scattered."""
        sizes = self._sizes
        weights = [self._weight_gradient(result) for result in results]
        if sizes.sequence_parallel:
            return sum(results) + sum(weights) + 2 * sizes.hidden
        peak, left, summed = 0.0, sum(results), 0.0
        for result, weight in zip(reversed(results), reversed(weights), strict=True):
            peak = max(peak, left + summed + sizes.part + weight)
            left -= result
            # The sum is another tensor than the two that it is of.
            peak = max(peak, left + 3 * summed)
            summed = sizes.part
        return peak

    def _weight_gradient(self, features: float) -> float:
        """The gradient of a matrix between the hidden size and as many features as a value of so many bytes has, and
        of its bias: alive until it is in the buffer."""
        sizes, model = self._sizes, self._sizes.model
        by_feature = features / sizes.tokens
        # A row cut's bias is whole.
        bias = max(model.hidden_size * sizes.width, by_feature) if model.has_biases else 0.0
        return by_feature * model.hidden_size + bias


def _mask_scratch(elements: float, columns: int) -> float:
    """Bytes beside a mask of so many elements while it is made: hashes, keys of its lines and its columns' numbers."""
    words = elements / 2
    hashes = 8 * words if words <= _HASH_WORDS else 12 * _HASH_WORDS
    return hashes + 8 * elements / columns + 2 * columns


def _read_in(value: Value) -> Sequence[str]:
    """Operators whose backward reads a saved value."""
    if not value.saved:
        return ()
    readers = [name for name in value.readers if name not in _READS_NO_INPUT]
    if value.producer is not None and (not readers or value.name in _READ_BY_OWN):
        readers.append(value.producer)
    return readers


def _last_replayed(value: Value, again: OperatorSet) -> int | None:
    """Place of the operator after which replay lets go of a value that it makes or reads and that no backward reads."""
    if value.saved or value.producer is None:
        return None
    places = [OPERATOR_ORDER[name] for name in (value.producer, *value.readers) if name in again]
    return max(places, default=None)
