"""Analytic profile: operator times from datasheet figures, for devices that nobody has measured.

Matrix products run at a constant share of the peak of their precision; everything else is bound by
memory bandwidth. Launch overhead is left out, so times are linear in the samples.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from planner.catalogue import DeviceType
from planner.model_spec import ModelSpec
from planner.plan import ProfileSource
from planner.profile.table import (
    OperatorGroups,
    Scope,
    StepSeconds,
    model_operators,
    single_operators,
)

PRECISION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}

# Shares of the datasheet's peak that well-tuned training reaches.
MATMUL_EFFICIENCY = 0.5
BANDWIDTH_EFFICIENCY = 0.7


@dataclass(frozen=True)
class OperatorWork:
    """Work of one operator: matrix-product FLOPs, or values read and written in device memory.

    `moved` counts values of the parameters' precision, `moved_fp32` values that are always fp32.
    """

    forward_flops: float = 0.0
    backward_flops: float = 0.0
    forward_moved: float = 0.0
    backward_moved: float = 0.0
    forward_moved_fp32: float = 0.0
    backward_moved_fp32: float = 0.0


def _matmul(flops: float) -> OperatorWork:
    # Backward makes two products of the same size: for the input's gradient and for the weight's
    # (or for both inputs of an attention product).
    return OperatorWork(forward_flops=flops, backward_flops=2 * flops)


def _pointwise(values: float, *, forward: float, backward: float) -> OperatorWork:
    """`values` elements, read and written so many times in all."""
    return OperatorWork(forward_moved=forward * values, backward_moved=backward * values)


@lru_cache(maxsize=4096)
def operator_work(
    model: ModelSpec, *, operator: str, tp: int, samples: int, sequence_length: int
) -> OperatorWork:
    """Work of one operator on one TP rank for `samples` samples, from first principles."""
    tokens = samples * sequence_length
    hidden, vocab = model.hidden_size, -(-model.vocab_size // tp)
    ffn = model.ffn_hidden_size / tp
    kv_width = model.kv_heads * model.head_size
    # Attention is not fused: the whole square of scores is made, masked half included.
    square = tokens * sequence_length * model.heads / tp
    match operator:
        case "embedding":
            # Read the rows of the table (and the positions), write their sum; backward adds into the table.
            return _pointwise(tokens * hidden, forward=3, backward=3)
        case "attention_norm" | "mlp_norm" | "final_norm":
            # Read x, write y; backward reads x and dy, writes dx.
            return _pointwise(tokens * hidden, forward=2, backward=3)
        case "qkv":
            return _matmul(2 * tokens * hidden * (hidden + 2 * kv_width) / tp)
        case "rotary":
            return _pointwise(tokens * (hidden + kv_width) / tp, forward=2, backward=2)
        case "scores" | "context":
            return _matmul(2 * square * model.head_size)
        case "softmax":
            # Scale and mask, then normalise: each reads and writes the square.
            return _pointwise(square, forward=4, backward=5)
        case "attention_dropout":
            return _pointwise(square, forward=2.5, backward=2.5) if model.dropout else OperatorWork()
        case "attention_output":
            return _matmul(2 * tokens * hidden * hidden / tp)
        case "attention_residual" | "mlp_residual":
            # Dropout on the branch, where there is one, reads, writes and keeps a mask.
            mask = 2.5 if model.dropout else 0.0
            return _pointwise(tokens * hidden, forward=3 + mask, backward=3 + mask)
        case "mlp_up":
            return _matmul(2 * tokens * hidden * ffn)
        case "mlp_gate_up":
            return _matmul(4 * tokens * hidden * ffn)
        case "activation":
            gated = model.family == "llama"
            return _pointwise(tokens * ffn, forward=5 if gated else 2, backward=8 if gated else 3)
        case "mlp_down":
            return _matmul(2 * tokens * hidden * ffn)
        case "vocabulary_projection":
            return _matmul(2 * tokens * hidden * vocab)
        case "loss":
            # Maximum, exponentials and their sum in fp32; backward writes probabilities minus one-hot.
            values = tokens * vocab
            return OperatorWork(
                forward_moved=values,
                backward_moved=values,
                forward_moved_fp32=3 * values,
                backward_moved_fp32=2 * values,
            )
    raise AssertionError(f"unknown operator {operator!r}")


def model_flops_per_sample(model: ModelSpec, sequence_length: int) -> float:
    """Matrix-product FLOPs of one sample, forward and backward, recompute left out."""
    total = 0.0
    for operator in model_operators(model):
        work = operator_work(model, operator=operator, tp=1, samples=1, sequence_length=sequence_length)
        total += (work.forward_flops + work.backward_flops) * (
            1 if operator in ("embedding", "final_norm", "vocabulary_projection", "loss") else model.layers
        )
    return total


class AnalyticProfile:
    """Times of a model's operators on device types known by their datasheets."""

    def __init__(
        self,
        model: ModelSpec,
        device_types: Mapping[str, DeviceType],
        *,
        matmul_efficiency: float = MATMUL_EFFICIENCY,
        bandwidth_efficiency: float = BANDWIDTH_EFFICIENCY,
    ) -> None:
        assert 0 < matmul_efficiency <= 1 and 0 < bandwidth_efficiency <= 1
        self._model = model
        self._types = dict(device_types)
        self._matmul = matmul_efficiency
        self._bandwidth = bandwidth_efficiency

    def groups(self, device_type: str) -> OperatorGroups:
        return single_operators(self._model)

    def includes_tp_collectives(self, device_type: str) -> bool:
        return False

    def covers(
        self, *, device_type: str, tp: int, samples: int, sequence_length: int, precision: str
    ) -> bool:
        return True

    def operator_seconds(
        self,
        *,
        device_type: str,
        operator: str,
        tp: int,
        samples: int,
        sequence_length: int,
        precision: str,
    ) -> StepSeconds:
        device = self._types[device_type]
        work = operator_work(
            self._model, operator=operator, tp=tp, samples=samples, sequence_length=sequence_length
        )
        flops_per_second = device.tflops(precision) * 1e12 * self._matmul
        width = PRECISION_BYTES[precision]
        forward_bytes = work.forward_moved * width + work.forward_moved_fp32 * 4
        backward_bytes = work.backward_moved * width + work.backward_moved_fp32 * 4
        return StepSeconds(
            work.forward_flops / flops_per_second
            + self.streaming_seconds(device_type=device_type, moved_bytes=forward_bytes),
            work.backward_flops / flops_per_second
            + self.streaming_seconds(device_type=device_type, moved_bytes=backward_bytes),
        )

    def all_reduce_seconds(
        self,
        *,
        device_type: str,
        scope: Scope,
        members: int,
        message_bytes: float,
        precision: str,
    ) -> None:
        return None

    def least_all_reduce_rate(self) -> float:
        return math.inf

    def streaming_seconds(self, *, device_type: str, moved_bytes: float) -> float:
        return moved_bytes / (self._types[device_type].memory_bandwidth * self._bandwidth)

    def sources(self) -> tuple[ProfileSource, ...]:
        return tuple(
            ProfileSource(type=name, sha256=self._digest(name), provenance="analytic")
            for name in sorted(self._types)
        )

    def _digest(self, device_type: str) -> str:
        content = {
            "device": self._types[device_type].model_dump(mode="json", exclude={"price_per_hour"}),
            "matmul_efficiency": self._matmul,
            "bandwidth_efficiency": self._bandwidth,
            "model": self._model.model_dump(mode="json"),
        }
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
