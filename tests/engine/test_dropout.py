"""Dropout masks: uniform, independent, a function of the sample and not of the plan."""

from __future__ import annotations

import math

import pytest
import torch

from actors.engine.model.dropout import Draws, Dropout, kept_mask

CPU = torch.device("cpu")


def _mask(draws: Draws, *, rows: int = 1, first_line: int = 0, **changes: object) -> torch.Tensor:
    place = {"layer": 0, "operator": "softmax"} | {
        k: v for k, v in changes.items() if k in ("layer", "operator")
    }
    size = {"lines": 256, "columns": 256, "dropped": 2**15} | {
        k: v for k, v in changes.items() if k in ("lines", "columns", "dropped")
    }
    keys = draws.keys(rows=rows, **place)  # type: ignore[arg-type]
    return kept_mask(keys, first_line=first_line, device=CPU, **size)  # type: ignore[arg-type]


BASE = Draws(seed=1, iteration=1, first_sample=0)


def _agreement(a: torch.Tensor, b: torch.Tensor) -> float:
    """Standard deviations by which two masks of probability 1/2 agree more often than chance."""
    count = a.numel()
    return float(((a == b).sum() - count / 2) / math.sqrt(count / 4))


@pytest.mark.parametrize("dropped", [1, 655, 6554, 2**15, 60_000, 2**16 - 1])
def test_the_share_of_dropped_elements_is_the_probability(dropped: int) -> None:
    mask = _mask(BASE, rows=4, lines=512, columns=1024, dropped=dropped)
    count, probability = mask.numel(), dropped / 2**16
    deviation = math.sqrt(count * probability * (1 - probability))
    assert abs(int((~mask).sum()) - count * probability) < 4 * deviation + 1


def test_lines_columns_and_bytes_are_uniform() -> None:
    """Chi-squared over the counts of each line and of each column, 4.5 deviations wide."""
    mask = _mask(BASE, lines=2048, columns=2048, dropped=6554).squeeze(0)
    probability = 1 - 6554 / 2**16
    for dim in (0, 1):
        counts = mask.sum(dim=dim, dtype=torch.float64)
        size = mask.shape[dim]
        square = ((counts - size * probability) ** 2).sum() / (size * probability * (1 - probability))
        cells = counts.numel()
        assert abs(float(square) - cells) < 4.5 * math.sqrt(2 * cells)


@pytest.mark.parametrize("shift", [(0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (0, 16), (16, 0), (64, 64)])
def test_neighbours_are_independent(shift: tuple[int, int]) -> None:
    mask = _mask(BASE, lines=1024, columns=1024).squeeze(0)
    down, right = shift
    moved, kept = mask[down:, right:], mask[: 1024 - down, : 1024 - right]
    assert abs(_agreement(moved, kept)) < 4.5


@pytest.mark.parametrize(
    "other",
    [
        _mask(Draws(seed=2, iteration=1, first_sample=0)),
        _mask(Draws(seed=1, iteration=2, first_sample=0)),
        _mask(Draws(seed=1, iteration=1, first_sample=1)),
        _mask(BASE, layer=1),
        _mask(BASE, layer=-1),
        _mask(BASE, operator="context"),
        _mask(BASE, first_line=256),
        _mask(BASE, operator="attention_residual"),
    ],
    ids=["seed", "iteration", "sample", "layer", "embedding", "operator", "lines", "long name"],
)
def test_masks_of_unlike_places_are_independent(other: torch.Tensor) -> None:
    assert abs(_agreement(_mask(BASE), other)) < 4.5


def test_many_masks_agree_no_more_than_chance() -> None:
    """All pairs of 64 samples: the mean square of the agreement is 1, within its own deviation."""
    masks = _mask(BASE, rows=64, lines=64, columns=64).flatten(1).double() * 2 - 1
    products = (masks @ masks.T) / math.sqrt(masks.shape[1])
    pairs = products[torch.triu_indices(64, 64, 1).unbind()]
    assert float(pairs.square().mean()) == pytest.approx(1.0, abs=4.5 * math.sqrt(2 / pairs.numel()))
    assert float(pairs.abs().max()) < 5.0


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 257])
def test_a_part_of_the_lines_or_of_the_samples_is_a_part_of_the_mask(columns: int) -> None:
    whole = _mask(BASE, rows=6, lines=24, columns=columns)
    heads = _mask(BASE, rows=6, lines=8, first_line=16, columns=columns)
    assert torch.equal(whole[:, 16:], heads)
    later = _mask(Draws(seed=1, iteration=1, first_sample=4), rows=2, lines=24, columns=columns)
    assert torch.equal(whole[4:], later)


def test_large_masks_are_made_in_pieces_that_fit_together() -> None:
    whole = _mask(BASE, lines=700, columns=1000)
    for first in range(0, 700, 100):
        assert torch.equal(
            whole[:, first : first + 100], _mask(BASE, lines=100, first_line=first, columns=1000)
        )


def _mixed64(value: int) -> int:
    """Splitmix64's last steps, in numbers of any size."""
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) % 2**64
    return value ^ (value >> 31)


def _kept(key: int, line: int, column: int, dropped: int) -> bool:
    """One element, worked out without tensors: how it must come out on every device."""
    words = _mixed64((key + (line + 1) * 0x9E3779B97F4A7C15) % 2**64)
    value = (words % 2**32) ^ ((2 * (column // 2) + 1) * 0x9E3779B9) % 2**32
    value ^= value >> 16
    value = (value * 0x7FEB352D) % 2**32 ^ (words >> 32)
    value ^= value >> 15
    value = (value * 0x846CA68B) % 2**32
    value ^= value >> 16
    half = value >> 16 if column % 2 else value % 2**16
    # Signed: halves from 2^15 on are the negative ones.
    return (half - 2**16 if half >= 2**15 else half) >= dropped - 2**15


def test_integers_wrap_as_they_must() -> None:
    draws = Draws(seed=7, iteration=3, first_sample=11)
    mask = _mask(draws, rows=2, layer=2, lines=9, first_line=5, columns=31, dropped=20_000)
    keys = draws.keys(layer=2, operator="softmax", rows=2)
    expected = [[[_kept(k, line, c, 20_000) for c in range(31)] for line in range(5, 14)] for k in keys]
    assert mask.tolist() == expected


def test_what_remains_is_scaled_to_the_same_mean_and_its_gradient_too() -> None:
    dropout = Dropout(0.25, layer=0, operator="softmax")
    values = torch.full((2, 64, 64), 3.0, requires_grad=True)
    result = dropout(values, BASE, rows=2)
    assert set(result.unique().tolist()) == {0.0, 4.0}
    result.sum().backward()
    assert values.grad is not None
    assert torch.equal(values.grad * 3.0, result)
    assert torch.equal(dropout(values, BASE, rows=2), result), "drawn anew"


def test_without_dropout_nothing_is_drawn() -> None:
    values = torch.ones(2, 3, 4)
    assert Dropout(0.0, layer=0, operator="softmax")(values, None, rows=2) is values
