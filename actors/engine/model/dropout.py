"""Dropout whose masks are a function of seed, iteration, sample, layer, operator and element.

So a sample gets the same mask under every plan, on every kind of device, and again when backward replays an
operator. A mask needs no state: a hash of 64 bits of key a line (of heads x positions, or of positions) and
of the column's number decides, 16 bits an element. The probability is therefore a multiple of 2^-16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
# Hashed at a time: on a CPU its two buffers stay in cache, elsewhere a launch is worth it.
_CPU_WORDS, _ACCELERATOR_WORDS = 1 << 17, 1 << 23


@dataclass(frozen=True)
class Draws:
    """What decides the masks of one replica's rows of a micro-batch.

    `first_sample` is the first row's index in the iteration's global batch.
    """

    seed: int
    iteration: int
    first_sample: int

    def keys(self, *, layer: int, operator: str, rows: int) -> list[int]:
        """A 64-bit key a row. The embedding counts as layer -1."""
        label = int.from_bytes(operator.encode(), "little")
        common = _mixed(self.seed)
        for part in (self.iteration, layer + 1, label & _WORD, label >> 64):
            common = _mixed(common ^ (part & _WORD))
        samples = range(self.first_sample, self.first_sample + rows)
        return [_mixed(common ^ _mixed(sample)) for sample in samples]


@dataclass(frozen=True)
class Dropout:
    """Dropout of one operator of one layer; `first_line` is where a TP rank's lines begin."""

    probability: float
    layer: int
    operator: str
    first_line: int = 0

    def __call__(self, values: torch.Tensor, draws: Draws | None, *, rows: int) -> torch.Tensor:
        """`values` are `rows` samples, each some lines of columns (the last dim). Only kept ones remain, and
        are scaled up to the same mean."""
        if not self.probability:
            return values
        assert draws is not None, "dropout needs to know its samples"
        columns = values.shape[-1]
        dropped = min(round(self.probability * 2**16), 2**16 - 1)
        mask = kept_mask(
            draws.keys(layer=self.layer, operator=self.operator, rows=rows),
            lines=values.numel() // (rows * columns),
            first_line=self.first_line,
            columns=columns,
            dropped=dropped,
            device=values.device,
        )
        result: torch.Tensor = _Masked.apply(values, mask.view(values.shape), 2**16 / (2**16 - dropped))
        return result


class _Masked(torch.autograd.Function):
    """Keeps the mask, a byte an element."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, mask: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (values * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return (gradients[0] * mask).mul_(ctx.scale), None, None


def kept_mask(
    keys: list[int], *, lines: int, first_line: int, columns: int, dropped: int, device: torch.device
) -> torch.Tensor:
    """bool `[len(keys), lines, columns]`: False for a share `dropped / 2^16` of the elements.

    An element depends on its row's key, its line counted with `first_line`, and its column alone.
    """
    pairs = -(-columns // 2)
    words = _line_words(keys, lines, first_line, device)
    mask = torch.empty(words.shape[0], columns, dtype=torch.bool, device=device)
    # Odd multiples: unlike for every pair, and unlike in every bit's neighbourhood.
    counters = torch.arange(1, 2 * pairs, 2, dtype=torch.int64, device=device)
    counters = _wrapped(counters * (_GOLDEN >> 32))
    # Halves of a word are two elements; as signed numbers they start at -2^15.
    least = dropped - 2**15
    for first, last in _chunks(words.shape[0], pairs, device):
        halves = _hashed(words[first:last], counters).view(torch.int16)
        torch.ge(halves[:, :columns], least, out=mask[first:last])
    return mask.view(len(keys), lines, columns)


def _chunks(lines: int, pairs: int, device: torch.device) -> Iterator[tuple[int, int]]:
    size = max(1, (_CPU_WORDS if device.type == "cpu" else _ACCELERATOR_WORDS) // pairs)
    for first in range(0, lines, size):
        yield first, min(first + size, lines)


def _line_words(keys: list[int], lines: int, first_line: int, device: torch.device) -> torch.Tensor:
    """Two 32-bit words a line: int32 `[keys x lines, 2]`."""
    rows = torch.tensor([_signed(key) for key in keys], dtype=torch.int64, device=device)
    numbers = torch.arange(first_line + 1, first_line + lines + 1, dtype=torch.int64, device=device)
    mixed = rows.unsqueeze(1) + numbers * _signed(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted_right(mixed, shift)) * _signed(factor)
    mixed = mixed ^ _shifted_right(mixed, 31)
    return mixed.flatten().view(torch.int32).view(-1, 2)


def _shifted_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Zeros come in, whatever the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _hashed(words: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """int32 `[lines, pairs]` of two words a line and a counter a pair: two rounds of multiply and xor-shift,
    a word of the line's key before each."""
    first, second = words[:, :1], words[:, 1:]
    values = first ^ counters
    shifted = torch.empty_like(values)

    def fold(bits: int) -> None:
        torch.bitwise_right_shift(values, bits, out=shifted)
        values.bitwise_xor_(shifted.bitwise_and_((1 << (32 - bits)) - 1))

    fold(16)
    values.mul_(0x7FEB352D).bitwise_xor_(second)
    fold(15)
    values.mul_(0x846CA68B - 2**32)
    fold(16)
    return values


def _wrapped(values: torch.Tensor) -> torch.Tensor:
    """The low 32 bits, as int32."""
    low = values & 0xFFFFFFFF
    return torch.where(low >= 2**31, low - 2**32, low).to(torch.int32)


def _mixed(value: int) -> int:
    """Every bit of the input changes about half the bits of the output (splitmix64)."""
    value = (value + _GOLDEN) & _WORD
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value
