"""What autograd keeps of one micro-batch for backward, storage by storage, and what is live beside it.

Operators share storages (a linear layer's input is the norm's output), so bytes are counted per storage,
each once, and not per operator.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.model_spec import ModelSpec
from planner.plan import Dtypes
from planner.profile.analytic import PRECISION_BYTES


@dataclass(frozen=True)
class Storage:
    """One tensor storage that is alive from an operator's forward to the backward of another."""

    name: str
    bytes: float


@dataclass(frozen=True)
class ActivationSizes:
    """Sizes that all figures are made of, for `rows` samples on one TP rank."""

    model: ModelSpec
    dtypes: Dtypes
    tp: int
    rows: int
    sequence_length: int

    @property
    def width(self) -> int:
        return PRECISION_BYTES[self.dtypes.param]

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence_length

    @property
    def hidden(self) -> float:
        """One activation between operators: whole on every TP rank."""
        return self.tokens * self.model.hidden_size * self.width

    @property
    def heads(self) -> float:
        """Queries, or the attention's result: cut by heads."""
        return self.hidden / self.tp

    @property
    def kv(self) -> float:
        """Keys, or values."""
        return self.tokens * self.model.kv_heads * self.model.head_size / self.tp * self.width

    @property
    def ffn(self) -> float:
        return self.tokens * self.model.ffn_hidden_size / self.tp * self.width

    @property
    def square(self) -> float:
        """Scores of all heads of a TP rank, a byte each."""
        return self.tokens * self.sequence_length * self.model.heads / self.tp

    @property
    def logits(self) -> float:
        """One byte a token and vocabulary entry of the rank, padding included."""
        return self.tokens * -(-self.model.vocab_size // self.tp)

    @property
    def statistics(self) -> float:
        """Mean and deviation of a norm, a float each a token."""
        return self.tokens * 4 * (2 if self.model.family == "gpt3" else 1)


def layer_storages(sizes: ActivationSizes) -> list[Storage]:
    """Everything one layer keeps of one micro-batch, in forward order."""
    kept = [
        Storage("layer input", sizes.hidden),
        Storage("attention norm statistics", sizes.statistics),
        Storage("attention norm output", sizes.hidden),
        Storage("queries", sizes.heads),
        Storage("keys", sizes.kv),
        Storage("values", sizes.kv),
        *_probabilities(sizes),
        Storage("context", sizes.heads),
        Storage("mlp norm input", sizes.hidden),
        Storage("mlp norm statistics", sizes.statistics),
        Storage("mlp norm output", sizes.hidden),
        # Gated: gate, up, the activated gate and the product; plain: before and after the activation.
        Storage("mlp inner", sizes.ffn * (4 if sizes.model.family == "llama" else 2)),
    ]
    if sizes.model.dropout:
        kept.append(Storage("residual dropout masks", 2 * sizes.hidden / sizes.width))
    return kept


def _probabilities(sizes: ActivationSizes) -> list[Storage]:
    """Softmax runs in fp32; the product with the values keeps its own copy in a narrower precision."""
    kept = [Storage("softmax output", 4 * sizes.square)]
    if sizes.width < 4:
        kept.append(Storage("probabilities", sizes.width * sizes.square))
    if sizes.model.dropout:
        kept.append(Storage("attention dropout", (1 + sizes.width) * sizes.square))
    return kept


def layer_saved_bytes(sizes: ActivationSizes) -> float:
    """Bytes that one layer keeps of one micro-batch until its backward."""
    return sum(storage.bytes for storage in layer_storages(sizes))


def embedding_saved_bytes(sizes: ActivationSizes) -> float:
    """Token ids and labels; under TP, shifted ids and the mask of those outside the rank's shard too."""
    return sizes.tokens * (16 if sizes.tp == 1 else 25)


def head_saved_bytes(sizes: ActivationSizes) -> float:
    """Input and output of the final norm, labels, and what the loss keeps: (log-)probabilities in fp32.

    A loss over a cut vocabulary also keeps where each label lies, and works on a few floats a token.
    """
    per_token = 24 if sizes.tp == 1 else 48
    return 2 * sizes.hidden + sizes.statistics + 4 * sizes.logits + per_token * sizes.tokens


def layer_live_bytes(sizes: ActivationSizes, *, largest_gradient: float) -> float:
    """Most that a layer's backward holds beyond what the layer keeps, which it frees as it goes.

    `largest_gradient` is the largest parameter gradient of the layer, alive until it is in the buffer.
    The gradient that comes in from behind is counted with the messages, or with the head.
    """
    # Projecting down: the gradient of the inner values beside the weight's.
    mlp = sizes.ffn + largest_gradient
    # Softmax: two fp32 squares beside the kept one; the narrower copy and the MLP's share are freed by then.
    squares = 8 * sizes.square - (sizes.width * sizes.square if sizes.width < 4 else 0.0)
    freed = sizes.ffn * (4 if sizes.model.family == "llama" else 2) + 2 * sizes.hidden
    attention = squares + sizes.hidden + sizes.heads + sizes.kv - freed
    return max(mlp, attention)


def head_live_bytes(sizes: ActivationSizes, *, weight_gradient: float) -> float:
    """Most that the head holds beyond what it keeps: in the loss, or in the projection's backward.

    `weight_gradient` is that of the projection's table.
    """
    if sizes.tp == 1:
        # torch's cross-entropy: gradients by log-probability and by logit, both fp32.
        loss = 8 * sizes.logits
    else:
        loss = (4 + (sizes.width if sizes.width < 4 else 0)) * sizes.logits
    # By then the kept probabilities are freed, and the logits' gradient has the model's precision.
    projection = (sizes.width - 4) * sizes.logits + weight_gradient + sizes.hidden
    return max(loss, projection)
