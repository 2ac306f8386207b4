"""Windows that know their documents, against the same said plainly, token by token."""

from __future__ import annotations

from itertools import accumulate, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.checkpoints import Manifest, Progress, check_continues, data_identity
from actors.engine.data import HeldOutSamples, Samples
from actors.engine.documents import PLAIN, Documents, TextWindows
from actors.engine.mixture import Mixture, write_mixture
from actors.engine.model.loss import NOT_COUNTED
from actors.engine.tokens import (
    NOTHING_HELD_OUT,
    TOKEN_TYPE,
    HeldOut,
    Part,
    TokenFile,
    TokenHeader,
    packed_bounds,
)
from actors.job import Training
from planner.errors import UserError
from tests.plans import make_model

LENGTHS = st.lists(st.integers(1, 12), min_size=1, max_size=40)
RULES = st.builds(Documents, attention=st.booleans(), packing=st.booleans())


def text_of(folder: Path, lengths: list[int], *, parts: int = 1, first: int = 1) -> TokenFile:
    """Tokens that count up from `first`, in documents of these lengths, dealt to some parts."""
    made, before = [], first
    for number in range(parts):
        mine = lengths[number::parts]
        tokens = np.arange(before, before + sum(mine), dtype=TOKEN_TYPE)
        tokens.tofile(folder / f"{first}-{number}.tokens")
        np.cumsum(mine, dtype="<i8").tofile(folder / f"{first}-{number}.ends")
        made.append(
            Part(
                path=f"{first}-{number}.tokens",
                dtype=TOKEN_TYPE.str,
                tokens=len(tokens),
                ends=f"{first}-{number}.ends",
                documents=len(mine),
            )
        )
        before += len(tokens)
    header = folder / f"{first}.json"
    header.write_text(TokenHeader(parts=tuple(made)).model_dump_json())
    return TokenFile(header)


def plain_windows(ends: list[int], length: int, rules: Documents) -> list[tuple[int, int]]:
    """First token and end of every window, told document by document."""
    if not rules.packing:
        return [(start, start + length) for start in range(0, ends[-1] - length, length)]
    found, start, filled = list[tuple[int, int]](), 0, 0
    for first, last in pairwise([0, *ends]):
        if last - first <= length and last - start > length:
            found.append((start, first))
            start = first
        while last - start > length:
            found.append((start, start + length))
            start += length
        filled = last
    if filled > start:
        found.append((start, filled))
    return found


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 15), rules=RULES, parts=st.integers(1, 3))
def test_windows_are_those_that_are_told_token_by_token(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], length: int, rules: Documents, parts: int
) -> None:
    parts = min(parts, len(lengths))
    text = text_of(tmp_path_factory.mktemp("text"), lengths, parts=parts)
    total, ends = text.count, text.ends.tolist()
    if total <= length:
        with pytest.raises(UserError, match=f"sequence_length = {length} needs {length + 1} tokens"):
            TextWindows(text, sequence_length=length, documents=rules)
        return
    windows = TextWindows(text, sequence_length=length, documents=rules)
    expected = plain_windows(ends, length, rules)
    assert windows.count == len(expected)
    chosen = np.arange(windows.count)[::-1]
    inputs, labels, counts = windows.read(chosen)
    counts = np.ones_like(labels, dtype=bool) if counts is None else counts
    begins = windows.begins(chosen)
    for row, (start, stop) in enumerate(expected[::-1]):
        counted = 0
        for place in range(length):
            token = start + place
            assert inputs[row, place] == (token + 1 if token < stop else 0)
            counts_here = token < stop and token + 1 < total
            if rules.attention and token + 1 in ends:
                counts_here = False
            assert counts[row, place] == counts_here
            if counts_here:
                assert labels[row, place] == token + 2
                counted += 1
            last = max([0, *(end for end in ends if end <= min(token, stop)), start])
            assert begins[row, place] == last - start
        assert windows.counted(chosen[row : row + 1]) == counted
    assert windows.counted(chosen) == counts.sum()


@settings(max_examples=150, deadline=None)
@given(lengths=LENGTHS, length=st.integers(1, 15))
def test_packing_cuts_only_what_is_longer_than_a_window(lengths: list[int], length: int) -> None:
    ends = list(accumulate(lengths))
    bounds = packed_bounds(np.array(ends), length).tolist()
    assert (bounds[0], bounds[-1]) == (0, ends[-1])
    assert all(0 < last - first <= length for first, last in pairwise(bounds))
    for first, last in pairwise([0, *ends]):
        cuts = [bound for bound in bounds if first < bound < last]
        # As few windows as it can be cut into, but for the one that it shares with those before it.
        assert len(cuts) <= -(-(last - first) // length) if last - first > length else not cuts
    for (first, last), (_, following) in pairwise(pairwise(bounds)):
        # No window had room for what the next begins with.
        next_end = next(end for end in ends if end > last)
        assert min(next_end, following) - first > length or last - first == length


def _counting(tokens: TokenFile | Mixture, rules: Documents, *, held_out: float = 0.0) -> Samples:
    return Samples(
        tokens,
        sequence_length=6,
        global_batch_size=5,
        seed=3,
        held_out_share=held_out,
        documents=rules,
    )


@settings(max_examples=40, deadline=None)
@given(rules=RULES, mixed=st.booleans())
def test_every_rank_knows_what_counts_of_the_whole_batch(
    tmp_path_factory: pytest.TempPathFactory, rules: Documents, mixed: bool
) -> None:
    folder = tmp_path_factory.mktemp("texts")
    text: TokenFile | Mixture = text_of(folder, [4, 1, 9, 2, 2, 7, 3, 15, 1, 6] * 3)
    if mixed:
        other = text_of(folder, [5] * 9, first=1000)
        text = write_mixture(
            [(text_of(folder, [4, 1, 9, 2, 2, 7, 3, 15, 1, 6] * 3), 2.0), (other, 1.0)], folder
        )
    samples = _counting(text, rules)
    for iteration in range(1, 9):
        inputs, labels = samples.batch(iteration, 0, 5)
        assert samples.counted(iteration) == int((labels != NOT_COUNTED).sum())
        assert torch.equal(labels[labels != NOT_COUNTED], inputs[labels != NOT_COUNTED] + 1)
        whole = samples.documents(iteration, 0, 5)
        assert (whole is None) is not rules.attention
        if whole is not None:
            parts = [samples.documents(iteration, first, last) for first, last in ((0, 2), (2, 2), (2, 5))]
            assert torch.equal(torch.cat([part for part in parts if part is not None]), whole)


@settings(max_examples=40, deadline=None)
@given(rules=RULES, share=st.floats(0.05, 0.6))
def test_what_is_predicted_in_validation_is_never_predicted_in_training(
    tmp_path_factory: pytest.TempPathFactory, rules: Documents, share: float
) -> None:
    text = text_of(tmp_path_factory.mktemp("text"), [4, 1, 9, 2, 2, 7, 3, 15, 1, 6] * 3)
    windows = TextWindows(text, sequence_length=6, documents=rules).count
    held = HeldOutSamples(text, HeldOut(share=share), sequence_length=6, documents=rules)
    trained = _counting(text, rules, held_out=share)
    labels = [trained.batch(i, 0, 5)[1] for i in range(1, (windows - held.count) // 5 + 1)]
    of_training = torch.cat(labels).unique() if labels else torch.empty(0)
    of_validation = held.batch(0, held.count)[1].unique()
    shared = set(of_training.tolist()) & set(of_validation.tolist())
    assert shared <= {NOT_COUNTED}


@pytest.mark.parametrize("field", ["document_attention", "packing"])
def test_a_checkpoint_is_gone_on_with_only_by_the_same_rules(tmp_path: Path, field: str) -> None:
    text = text_of(tmp_path, [4, 9])
    rules = {"document_attention": Documents(attention=True), "packing": Documents(packing=True)}[field]
    model, training = make_model(), Training(global_batch_size=4, sequence_length=6, steps=9)
    manifest = Manifest(
        progress=Progress(iteration=3, updates=3),
        model=model,
        training=training,
        data=data_identity(text, NOTHING_HELD_OUT, rules),
        plan="1 x A100: tp1 dp1, ZeRO-0",
        written="2026-01-01T00:00:00+00:00",
        torch="2",
    )
    told = f"data.{field} = false but checkpoint runs/a was trained with true; write true, or start anew"
    with pytest.raises(UserError, match=told):
        check_continues(
            manifest,
            model=model,
            training=training,
            data=data_identity(text, NOTHING_HELD_OUT, PLAIN),
            source=Path("runs/a"),
        )
    check_continues(
        manifest,
        model=model,
        training=training,
        data=data_identity(text, NOTHING_HELD_OUT, rules),
        source=Path("runs/a"),
    )
