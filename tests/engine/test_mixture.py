"""Mixtures: every source has its share at any moment, and a sample is the same however the run came to it."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checkpoints import DataIdentity, data_identity
from actors.engine.data import HeldOutSamples, Samples
from actors.engine.documents import PLAIN
from actors.engine.mixture import Mixture, Turns, open_tokens, write_mixture
from actors.engine.tokens import NOTHING_HELD_OUT, TOKEN_TYPE, HeldOut, TokenFile, TokenHeader
from planner.errors import UserError

LENGTH = 5
WEIGHTS = st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=9)


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS, count=st.integers(1, 600))
def test_every_source_has_its_share_of_the_first_samples(weights: list[float], count: int) -> None:
    owners, before = Turns(weights).turns(np.arange(count))
    for source, weight in enumerate(weights):
        mine = owners == source
        # Each sample of a source is its next one: none is left out, none comes twice.
        assert before[mine].tolist() == list(range(mine.sum()))
        had = np.cumsum(mine) - np.arange(1, count + 1) * weight / sum(weights)
        assert np.abs(had).max() <= 0.5 * len(weights)


@settings(max_examples=60, deadline=None)
@given(weights=WEIGHTS, first=st.integers(0, 2**31), count=st.integers(0, 40))
def test_a_sample_far_on_follows_from_its_number_alone(weights: list[float], first: int, count: int) -> None:
    turns = Turns(weights)
    together = turns.turns(np.arange(first, first + count))
    for offset in range(count):
        alone = turns.turns(np.array([first + offset]))
        assert [part.tolist() for part in alone] == [[part[offset]] for part in together]
    for source, had in zip(*together, strict=True):
        share = weights[source] / sum(weights)
        # Shares are rounded to 30 bits a level.
        assert math.isclose(had, first * share, rel_tol=1e-5, abs_tol=count + len(weights))


def _text(folder: Path, *, first: int, windows: int) -> TokenFile:
    path = folder / f"{first}-{windows}.tokens"
    np.arange(first, first + windows * LENGTH + 1, dtype=TOKEN_TYPE).tofile(path)
    return TokenFile(path)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Mixture:
    folder = tmp_path_factory.mktemp("mixture")
    texts = [_text(folder, first=0, windows=40), _text(folder, first=10_000, windows=7)]
    texts.append(_text(folder, first=20_000, windows=13))
    return write_mixture(list(zip(texts, (5, 2, 1), strict=True)), folder)


def _samples(mixture: Mixture, *, seed: int = 3, batch: int = 10, share: float = 0.0) -> Samples:
    return Samples(mixture, sequence_length=LENGTH, global_batch_size=batch, seed=seed, held_out_share=share)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**63), batch=st.integers(1, 30), share=st.sampled_from([0.0, 0.2]))
def test_each_source_goes_through_its_own_epochs(
    mixture: Mixture, seed: int, batch: int, share: float
) -> None:
    samples = _samples(mixture, seed=seed, batch=batch, share=share)
    inputs, labels = (
        torch.cat(parts)
        for parts in zip(*(samples.batch(i, 0, batch) for i in range(1, 300 // batch + 2)), strict=True)
    )
    assert torch.equal(labels, inputs + 1)
    firsts = inputs[:, 0].numpy()
    held = HeldOutSamples(mixture, HeldOut(share=share), sequence_length=LENGTH)
    held_firsts = held.batch(0, held.count)[0][:, 0].tolist()
    assert len(set(held_firsts)) == held.count == (0 if not share else 8 + 1 + 3)
    for source, windows in enumerate((40, 7, 13)):
        mine = firsts[firsts // 10_000 == source]
        left = {10_000 * source + LENGTH * window for window in range(windows)} - set(held_firsts)
        assert len(mine) // len(left) >= 1
        for epoch in range(len(mine) // len(left)):
            assert sorted(mine[epoch * len(left) : (epoch + 1) * len(left)]) == sorted(left)


@settings(max_examples=40, deadline=None)
@given(iteration=st.integers(1, 10**6), cuts=st.lists(st.integers(0, 10), max_size=3))
def test_a_resumed_run_under_another_plan_reads_the_same_samples(
    mixture: Mixture, iteration: int, cuts: list[int]
) -> None:
    """A plan only cuts the global batch; a resumed run has read none of the iterations before."""
    unbroken = _samples(mixture)
    for earlier in range(max(1, iteration - 2), iteration):
        unbroken.batch(earlier, 0, 10)
    whole = unbroken.batch(iteration, 0, 10)
    resumed = _samples(open_tokens(mixture.path))  # type: ignore[arg-type]
    bounds = [0, *sorted(cuts), 10]
    parts = [resumed.batch(iteration, first, last) for first, last in pairwise(bounds)]
    for got, expected in zip(zip(*parts, strict=True), whole, strict=True):
        assert torch.equal(torch.cat(got), expected)


def test_the_order_stays_the_same_between_versions(mixture: Mixture) -> None:
    owners, windows = _samples(mixture).positions(2)
    assert owners.tolist() == [0, 2, 0, 0, 1, 0, 0, 1, 0, 2]
    assert windows.tolist() == [11, 2, 34, 18, 3, 38, 12, 0, 13, 4]


def test_the_identity_of_data_tells_texts_and_weights(mixture: Mixture, tmp_path: Path) -> None:
    def identity(*weights: float) -> DataIdentity:
        sources = list(zip(mixture.sources, weights, strict=True))
        return data_identity(write_mixture(sources, tmp_path), NOTHING_HELD_OUT, PLAIN)

    own = data_identity(mixture, NOTHING_HELD_OUT, PLAIN)
    assert (own.weights, own.tokens) == ((5, 2, 1), 303)
    # The folder has no part in it.
    assert identity(5, 2, 1) == own
    assert identity(5, 1, 2).name != own.name
    turned = write_mixture([(text, 1) for text in mixture.sources[::-1]], tmp_path)
    assert data_identity(turned, NOTHING_HELD_OUT, PLAIN).name != identity(1, 1, 1).name


def test_tokens_of_several_tokenizers_are_no_mixture(mixture: Mixture, tmp_path: Path) -> None:
    other, none = tmp_path / "other.json", tmp_path / "none.json"
    for path, name in ((other, "cafe"), (none, "none")):
        header = mixture.sources[0].header.model_copy(update={"tokenizer": name})
        path.write_text(TokenHeader.model_dump_json(header))
    assert write_mixture([(mixture.sources[1], 1), (TokenFile(none), 1)], tmp_path).tokenizer == "byte"
    with pytest.raises(
        UserError, match=r"data\.mixture holds tokens of several tokenizers \(byte, cafe\); prepare"
    ):
        write_mixture([(mixture.sources[1], 1), (TokenFile(other), 1)], tmp_path)
