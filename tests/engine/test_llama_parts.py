"""What only LLaMA has, piece by piece: values and gradients against plain formulas, and what is kept."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from actors.engine.model.attention import attention_context, attention_scores
from actors.engine.model.layer import causal_mask
from actors.engine.model.norm import RmsNorm
from actors.engine.model.rotary import rotary_frequencies, rotated, rotation_table
from tests.plans import make_llama

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1.6e-2}


def _random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _assert_alike(
    ours: Callable[..., torch.Tensor], theirs: Callable[..., torch.Tensor], *inputs: torch.Tensor
) -> None:
    """Same value and same gradient by every input, `theirs` in fp64."""
    leaves = [value.clone().requires_grad_() for value in inputs]
    wide = [value.double().requires_grad_() for value in inputs]
    got, expected = ours(*leaves), theirs(*wide)
    weight = torch.randn(got.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    # Minus infinity is not a number to multiply with.
    finite = expected.isfinite()
    assert torch.equal(got.isfinite(), finite)
    torch.where(finite, got.double() * weight, 0.0).sum().backward()
    torch.where(finite, expected * weight, 0.0).sum().backward()
    tolerance = TOLERANCE[inputs[0].dtype]
    pairs = [(got[finite], expected[finite]), *((a.grad, b.grad) for a, b in zip(leaves, wide, strict=True))]
    for a, b in pairs:
        assert a is not None and b is not None
        difference = (a.detach().double() - b.detach()).norm() / b.detach().norm()
        assert float(difference) < tolerance


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    norm = RmsNorm(24, epsilon=1e-2).to(dtype)

    def ours(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.func.functional_call(norm, {"weight": weight}, (hidden,))
        return result

    def torchs(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(hidden, (24,), weight, 1e-2)

    _assert_alike(ours, torchs, _random(3, 5, 24, dtype=dtype), 1 + _random(24, dtype=dtype, seed=2))


def test_rms_norm_keeps_its_input_and_a_float_a_token() -> None:
    norm = RmsNorm(24, epsilon=1e-5)
    kept: list[int] = []

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(noted, lambda tensor: tensor):
        norm(_random(3, 5, 24).requires_grad_())
    assert sorted(kept) == [3 * 5, 24, 3 * 5 * 24]


@pytest.mark.parametrize("key_heads", [1, 2, 6])
def test_grouped_attention_is_that_of_repeated_keys(key_heads: int) -> None:
    samples, heads, length, size = 2, 6, 5, 4
    repeats = heads // key_heads
    mask = causal_mask(length, dtype=torch.float32, device=CPU)

    def scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return attention_scores(query, key, mask)

    def plain_scores(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        repeated = key.repeat_interleave(repeats, dim=0)
        return query @ repeated.transpose(1, 2) / math.sqrt(size) + mask

    query = _random(samples * heads, length, size)
    key = _random(samples * key_heads, length, size, seed=2)
    _assert_alike(scores, plain_scores, query, key)

    def plain_context(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return weights @ value.repeat_interleave(repeats, dim=0)

    weights = _random(samples * heads, length, length, seed=3)
    _assert_alike(attention_context, plain_context, weights, key)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotation_is_a_product_of_complex_numbers(dtype: torch.dtype) -> None:
    model = make_llama(hidden_size=96, heads=12, max_sequence_length=11)
    angles = torch.outer(torch.arange(11), 10_000.0 ** (-torch.arange(4, dtype=torch.float64) / 4))
    turn = torch.polar(torch.ones_like(angles), angles)

    def plain(heads: torch.Tensor) -> torch.Tensor:
        turned = torch.complex(heads[..., :4].contiguous(), heads[..., 4:].contiguous()) * turn
        return torch.cat([turned.real, turned.imag], dim=-1)

    table = rotation_table(model, 11, device=CPU)
    _assert_alike(lambda heads: rotated(heads, table), plain, _random(3, 11, 8, dtype=dtype))


def test_scaled_products_depend_on_distance_alone() -> None:
    """What rotary positions are for: moving query and key together changes nothing."""
    model = make_llama(
        hidden_size=96,
        heads=12,
        max_sequence_length=64,
        rope_scaling={"type": "llama3", "factor": 4, "original_sequence_length": 40},
    )
    cosines, sines = rotation_table(model, 64, device=CPU)
    query, key = _random(8), _random(8, seed=2)

    def product(at: int, behind: int) -> float:
        turned = [
            rotated(vector.expand(64, 8), (cosines, sines))[place]
            for vector, place in ((query, at), (key, at - behind))
        ]
        return float(turned[0] @ turned[1])

    assert product(60, 7) == pytest.approx(product(9, 7), rel=1e-4)
    assert product(60, 7) != pytest.approx(product(60, 8), rel=1e-2)


def test_llama3_scaling_slows_slow_pairs_and_leaves_fast_ones() -> None:
    shape = {"hidden_size": 1536, "heads": 12, "max_sequence_length": 64}
    plain = rotary_frequencies(make_llama(**shape))
    scaling = {"type": "llama3", "factor": 8, "original_sequence_length": 8192}
    scaled = rotary_frequencies(make_llama(**shape, rope_scaling=scaling))
    turns = plain * 8192 / (2 * math.pi)
    torch.testing.assert_close(scaled[turns > 4], plain[turns > 4])
    torch.testing.assert_close(scaled[turns < 1], plain[turns < 1] / 8)
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert bool(((scaled < plain) & (scaled > plain / 8))[between].all())
