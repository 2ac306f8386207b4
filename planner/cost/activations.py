"""What autograd keeps of one micro-batch for backward, storage by storage, and what is live beside it.

Operators share storages (a linear layer's input is the norm's output), so bytes are counted per value that
the operators hand on, each once, and not per operator. What is kept when some operators are recomputed
follows from the same values (planner/cost/layer_flow.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.model_spec import ModelSpec
from planner.plan import Dtypes
from planner.profile.analytic import PRECISION_BYTES


@dataclass(frozen=True)
class Value:
    """One tensor that an operator of a layer makes.

    `producer` is None for what comes in from outside the layer. `readers` are the operators whose forward
    reads it. `saved` says that some backward reads it, so that it stays alive until then.
    """

    name: str
    bytes: float
    producer: str | None
    readers: tuple[str, ...] = ()
    saved: bool = True


@dataclass(frozen=True)
class ActivationSizes:
    """Sizes that all figures are made of, for `rows` samples on one TP rank."""

    model: ModelSpec
    dtypes: Dtypes
    tp: int
    rows: int
    sequence_length: int
    sequence_parallel: bool = False

    @property
    def width(self) -> int:
        return PRECISION_BYTES[self.dtypes.param]

    @property
    def tokens(self) -> int:
        return self.rows * self.sequence_length

    @property
    def hidden(self) -> float:
        """One activation between stages: whole on every TP rank."""
        return self.tokens * self.model.hidden_size * self.width

    @property
    def part(self) -> float:
        """One activation between operators: whole too, or with sequence parallelism the rank's positions."""
        return self.hidden / self.tp if self.sequence_parallel else self.hidden

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
        tokens = self.tokens / self.tp if self.sequence_parallel else self.tokens
        return tokens * 4 * (2 if self.model.family == "gpt3" else 1)


def layer_values(sizes: ActivationSizes) -> list[Value]:
    """Every value of one layer and one micro-batch, in forward order, storages that are shared once."""
    statistics, hidden = sizes.statistics, sizes.part
    return [
        Value("layer input", hidden, None, ("attention_norm", "attention_residual")),
        Value("attention norm statistics", statistics, "attention_norm"),
        Value("attention norm output", hidden, "attention_norm", ("qkv",)),
        *_queries(sizes),
        *_probabilities(sizes),
        Value("context", sizes.heads, "context", ("attention_output",)),
        Value("attention update", hidden, "attention_output", ("attention_residual",), saved=False),
        *_residual_mask(sizes, "attention_residual"),
        Value("mlp norm input", hidden, "attention_residual", ("mlp_norm", "mlp_residual")),
        Value("mlp norm statistics", statistics, "mlp_norm"),
        Value("mlp norm output", hidden, "mlp_norm", ("mlp_up", "mlp_gate_up")),
        *_inner(sizes),
        Value("mlp update", hidden, "mlp_down", ("mlp_residual",), saved=False),
        *_residual_mask(sizes, "mlp_residual"),
    ]


def _queries(sizes: ActivationSizes) -> list[Value]:
    values = Value("values", sizes.kv, "qkv", ("context",))
    if sizes.model.family == "gpt3":
        return [
            Value("queries", sizes.heads, "qkv", ("scores",)),
            Value("keys", sizes.kv, "qkv", ("scores",)),
            values,
        ]
    # Rotation's backward needs no input, only the angles.
    return [
        Value("unrotated queries", sizes.heads, "qkv", ("rotary",), saved=False),
        Value("unrotated keys", sizes.kv, "qkv", ("rotary",), saved=False),
        values,
        Value("queries", sizes.heads, "rotary", ("scores",)),
        Value("keys", sizes.kv, "rotary", ("scores",)),
    ]


def _probabilities(sizes: ActivationSizes) -> list[Value]:
    """Softmax runs in fp32; the product with the values reads its result in the model's precision."""
    narrow, dropout = sizes.width < 4, bool(sizes.model.dropout)
    read_by = ("attention_dropout",) if dropout else ("context",)
    found = [
        Value("scores", sizes.width * sizes.square, "scores", ("softmax",), saved=False),
        Value("softmax output", 4 * sizes.square, "softmax", () if narrow else read_by),
    ]
    if narrow:
        # Backward of a conversion needs nothing, of dropout its mask; of the product its factors.
        found.append(
            Value("probabilities", sizes.width * sizes.square, "softmax", read_by, saved=not dropout)
        )
    if dropout:
        found += [
            Value("attention mask", sizes.square, "attention_dropout"),
            Value("kept probabilities", sizes.width * sizes.square, "attention_dropout", ("context",)),
        ]
    return found


def _inner(sizes: ActivationSizes) -> list[Value]:
    if sizes.model.family == "gpt3":
        return [
            Value("mlp inner", sizes.ffn, "mlp_up", ("activation",)),
            Value("activated", sizes.ffn, "activation", ("mlp_down",)),
        ]
    # The activated gate and its product with the other half are both factors of a product.
    return [
        Value("gate and up", 2 * sizes.ffn, "mlp_gate_up", ("activation",)),
        Value("activated gate", sizes.ffn, "activation"),
        Value("gated", sizes.ffn, "activation", ("mlp_down",)),
    ]


def _residual_mask(sizes: ActivationSizes, operator: str) -> list[Value]:
    return [Value(f"{operator} mask", sizes.part / sizes.width, operator)] if sizes.model.dropout else []


def layer_saved_bytes(sizes: ActivationSizes) -> float:
    """Bytes that one layer keeps of one micro-batch until its backward."""
    return sum(value.bytes for value in layer_values(sizes) if value.saved)


def constant_bytes(model: ModelSpec, dtypes: Dtypes, sequence_length: int) -> float:
    """What all layers and micro-batches share: the causal mask, and the cosines and sines of rotary positions."""
    mask = sequence_length**2 * PRECISION_BYTES[dtypes.param]
    rotation = sequence_length * model.head_size * 4 if model.family == "llama" else 0
    return mask + rotation


def embedding_saved_bytes(sizes: ActivationSizes) -> float:
    """Token ids and labels; under TP, shifted ids and the mask of those outside the rank's shard too. And
    dropout's mask, a byte an element."""
    dropped = sizes.part / sizes.width if sizes.model.dropout else 0.0
    return sizes.tokens * (16 if sizes.tp == 1 else 25) + dropped


def head_saved_bytes(sizes: ActivationSizes) -> float:
    """Input and output of the final norm, labels, and what the loss keeps: (log-)probabilities in fp32.

    A loss over a cut vocabulary also keeps where each label lies, and works on a few floats a token.
    """
    per_token = 24 if sizes.tp == 1 else 48
    return 2 * sizes.part + sizes.statistics + 4 * sizes.logits + per_token * sizes.tokens


def layer_live_bytes(sizes: ActivationSizes, *, largest_gradient: float) -> float:
    """Most that a layer's backward holds beyond what the layer keeps, which it frees as it goes.

    `largest_gradient` is the largest parameter gradient of the layer, alive until it is in the buffer.
    The gradient that comes in from behind is counted with the messages, or with the head.
    """
    # Projecting down: the gradient of the inner values beside the weight's.
    mlp = sizes.ffn + largest_gradient
    dropout = sizes.model.dropout > 0
    if dropout:
        # The gradient behind dropout is another than that which goes past the layer; the mask is freed.
        mlp += sizes.part - sizes.part / sizes.width
    if sizes.sequence_parallel:
        # The gradient that comes in is gathered from a copy of the rank's positions.
        mlp += sizes.hidden + sizes.part
    if sizes.model.family == "llama":
        # The gate's product: the gradients of both factors beside its own, the product itself freed by then.
        mlp = max(mlp, 2 * sizes.ffn)
    if sizes.sequence_parallel:
        mlp = max(mlp, _projecting_up_live_bytes(sizes, largest_gradient))
    return max(mlp, _attention_live_bytes(sizes))


def _projecting_up_live_bytes(sizes: ActivationSizes, largest_gradient: float) -> float:
    """The same where inputs are gathered again: the gradients of all weights, and two whole activations as those
    are gathered or scattered, beside the inner values' gradients. What lies behind is freed."""
    products = 2 if sizes.model.family == "llama" else 1
    return products * (largest_gradient - sizes.ffn) + 2 * sizes.hidden


def _attention_live_bytes(sizes: ActivationSizes) -> float:
    """The same in attention, in the backward of the weighted sum or in that of softmax.

    The gradient that goes past attention is counted; gradients by context and values lie where those did.
    """
    width, dropout = sizes.width, sizes.model.dropout > 0
    freed = sizes.ffn * (4 if sizes.model.family == "llama" else 2) + 2 * sizes.part
    # Two fp32 squares beside softmax's output, when its narrower copy is freed.
    squares = 8 * sizes.square - (width * sizes.square if width < 4 else 0.0)
    if dropout:
        freed += 2 * sizes.part / width
        # Dropout's result and mask are freed too; in fp32 there is no narrower copy.
        squares = (7 - width) * sizes.square
    weighted_sum = (width * sizes.square) + sizes.kv
    return sizes.part + max(weighted_sum, squares - sizes.heads) - freed


def norm_live_bytes(sizes: ActivationSizes) -> float:
    """What a norm's backward holds beside what it keeps and the gradient that comes in."""
    if sizes.model.family == "gpt3":
        return sizes.part
    # RMSNorm's works in fp32: the normed input, the scaled gradient and their product, and its sum by token; and the
    # weight's gradient.
    return 3 * 4 / sizes.width * sizes.part + sizes.statistics + 4 * sizes.model.hidden_size


def head_live_bytes(
    sizes: ActivationSizes, *, weight_gradient: float, arriving: float = 0.0, waiting: float = 0.0
) -> float:
    """Most that the head holds beyond what it keeps: in the loss, in the projection's backward or in the norm's.

    `weight_gradient` is that of the projection's table; `arriving` comes in when it is done, if replicas share it;
    `waiting` is what of it is still there in the norm's backward.
    """
    if sizes.tp == 1:
        # torch's cross-entropy: gradients by log-probability and by logit, both fp32.
        loss = 8 * sizes.logits
    else:
        loss = (4 + (sizes.width if sizes.width < 4 else 0)) * sizes.logits
    # By then the kept probabilities are freed, and the logits' gradient has the model's precision.
    projection = (sizes.width - 4) * sizes.logits + weight_gradient + sizes.hidden
    if sizes.sequence_parallel:
        # The input is gathered again, and its gradient scattered: a copy of each.
        projection += sizes.hidden + sizes.part
    # The kept probabilities are freed, and the norm's result lies where its gradient does.
    norm = norm_live_bytes(sizes) + waiting - 4 * sizes.logits
    # The logits' gradient is freed when other replicas' gradients of the table come in.
    return max(loss, projection, projection + arriving - sizes.width * sizes.logits, norm)
