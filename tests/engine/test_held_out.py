"""What is held out of a text: training sees none of it, and it is the same whatever seed and plan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checkpoints import DataIdentity, Manifest, Progress, check_continues, data_identity
from actors.engine.data import HeldOutSamples, Samples
from actors.engine.documents import PLAIN
from actors.engine.tokens import NOTHING_HELD_OUT, TOKEN_TYPE, HeldOut, TokenFile
from actors.engine.windows import WindowSplit
from actors.job import Training
from planner.errors import UserError
from tests.plans import make_model

SHARES = st.floats(0, 0.95)


def _counting(path: Path, tokens: int) -> TokenFile:
    np.arange(tokens, dtype=TOKEN_TYPE).tofile(path)
    return TokenFile(path)


@settings(max_examples=200, deadline=None)
@given(windows=st.integers(2, 400), share=SHARES)
def test_the_two_parts_make_the_whole(windows: int, share: float) -> None:
    try:
        split = WindowSplit(windows, share)
    except UserError:
        assert windows * (1 - share) < 1
        return
    held = split.held_out_windows(np.arange(split.held_out)) if split.held_out else np.array([], np.int64)
    left = split.training_windows(np.arange(split.training))
    assert sorted([*held, *left]) == list(range(windows))
    assert (np.diff(left) > 0).all() and (np.diff(held) > 0).all()
    assert abs(split.held_out - windows * share) <= (0.5 if windows * share >= 0.5 else 1)


def test_what_is_held_out_stands_at_equal_distances() -> None:
    split = WindowSplit(1000, 0.01)
    assert split.held_out_windows(np.arange(10)).tolist() == list(range(50, 1000, 100))


def test_parts_of_a_long_text_are_found_without_a_table() -> None:
    windows = 2**31 - 1
    split = WindowSplit(windows, 0.5)
    ends = np.array([0, 1, split.training - 1])
    assert split.training_windows(ends).tolist()[-1] in (windows - 1, windows - 2)
    assert split.held_out_windows(np.array([split.held_out - 1]))[0] < windows


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(40, 600), length=st.integers(1, 9), share=st.floats(0.01, 0.8), seed=st.integers(0, 9)
)
def test_no_label_is_both_trained_on_and_held_out(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, length: int, share: float, seed: int
) -> None:
    file = _counting(tmp_path_factory.mktemp("text") / "counting.tokens", tokens)
    samples = Samples(file, sequence_length=length, global_batch_size=1, seed=seed, held_out_share=share)
    held = HeldOutSamples(file, HeldOut(share=share), sequence_length=length)
    windows = (tokens - 1) // length
    trained = [samples.batch(i, 0, 1)[1] for i in range(1, 2 * (windows - held.count) + 1)]
    seen = torch.cat(trained).flatten().tolist()
    tested = held.batch(0, held.count)[1].flatten().tolist()
    assert not set(seen) & set(tested)
    # Two epochs of all others, and each held-out label once.
    assert sorted(seen + 2 * tested) == sorted(2 * list(range(1, windows * length + 1)))


def test_held_out_samples_are_read_by_index(tmp_path: Path) -> None:
    file = _counting(tmp_path / "counting.tokens", 1001)
    held = HeldOutSamples(file, HeldOut(share=0.2), sequence_length=10)
    assert held.count == 20
    inputs, labels = held.batch(0, 20)
    assert inputs.shape == labels.shape == (20, 10) and inputs.dtype == torch.int64
    assert torch.equal(labels, inputs + 1)
    assert torch.equal(held.batch(7, 9)[0], inputs[7:9])
    assert held.batch(3, 3)[0].shape == (0, 10)
    # Mixed: the first few are from all over the text.
    assert inputs[:5, 0].max() - inputs[:5, 0].min() > 300


def test_another_text_is_held_out_whole_and_training_keeps_its_own(tmp_path: Path) -> None:
    text, other = _counting(tmp_path / "a.tokens", 101), _counting(tmp_path / "b.tokens", 21)
    held = HeldOutSamples(text, HeldOut(tokens=other.path), sequence_length=10)
    assert held.count == 2
    assert sorted(held.batch(0, 2)[1].flatten().tolist()) == list(range(1, 21))


def test_without_anything_held_out_there_are_none(tmp_path: Path) -> None:
    held = HeldOutSamples(_counting(tmp_path / "a.tokens", 101), NOTHING_HELD_OUT, sequence_length=10)
    assert held.count == 0
    assert held.batch(0, 0)[0].shape == (0, 10)


def test_a_share_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data.held_out = 0.5 leaves nothing .* holds 1 sample; shorten"):
        Samples(
            _counting(tmp_path / "a.tokens", 11),
            sequence_length=10,
            global_batch_size=1,
            seed=0,
            held_out_share=0.5,
        )


def test_the_identity_of_data_tells_what_is_held_out(tmp_path: Path) -> None:
    text = _counting(tmp_path / "a.tokens", 11)
    told = [
        data_identity(text, held_out, PLAIN).held_out
        for held_out in (NOTHING_HELD_OUT, HeldOut(share=0.01), HeldOut(tokens=Path("/cache/0123.tokens")))
    ]
    assert told == ["", "0.01", "0123"]


def test_a_checkpoint_is_not_gone_on_with_when_something_else_is_held_out() -> None:
    model, training = make_model(), Training(global_batch_size=4, sequence_length=16, steps=9)
    manifest = Manifest(
        progress=Progress(iteration=3, updates=3),
        model=model,
        training=training,
        data=DataIdentity(name="0123", tokens=100, held_out="0.01"),
        plan="1 x A100: tp1 dp1, ZeRO-0",
        written="2026-01-01T00:00:00+00:00",
        torch="2",
    )
    other = DataIdentity(name="0123", tokens=100)
    with pytest.raises(UserError, match=r"data.held_out = none but checkpoint runs/a was trained with 0.01;"):
        check_continues(manifest, model=model, training=training, data=other, source=Path("runs/a"))
