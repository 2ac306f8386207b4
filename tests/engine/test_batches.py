"""Exactly the global batch is trained, whatever the plan (laws 2 and 3)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings

from actors.engine.batches import ReplicaBatches
from actors.engine.data import Samples
from actors.engine.model.dropout import Draws
from actors.engine.model.loss import NOT_COUNTED
from actors.engine.tokens import TokenFile
from planner.plan import Plan
from tests.engine.law_plans import drawn_plans, uneven_rows
from tests.engine.rank_training import write_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def _check(plan: Plan, tokens: Path) -> None:
    samples = Samples(
        TokenFile(tokens),
        sequence_length=plan.sequence_length,
        global_batch_size=plan.global_batch_size,
        seed=3,
    )
    inputs, labels = [], []
    for place in plan.ranks:
        # One rank of each replica of the first stages, which hold what all others work on.
        if place.stage or place.tp_rank:
            continue
        pipeline = plan.pipelines[place.pipeline]
        batches = ReplicaBatches(plan=plan, place=place, samples=samples)
        for index in range(pipeline.micro_batches):
            ids, wanted = batches.micro_batch(2, index)
            rows = pipeline.stages[0].rows[place.replica]
            assert ids.shape == wanted.shape == (rows, plan.sequence_length)
            counted = (wanted != NOT_COUNTED).all(dim=1)
            assert ((wanted != NOT_COUNTED).any(dim=1) == counted).all(), (
                "a sample counts whole or not at all"
            )
            inputs.append(ids[counted])
            labels.append(wanted[counted])
    expected = samples.batch(2, 0, plan.global_batch_size)
    for got, want in zip((inputs, labels), expected, strict=True):
        assert _as_set(torch.cat(got)) == _as_set(want)


def _as_set(rows: torch.Tensor) -> list[tuple[int, ...]]:
    return sorted(tuple(row) for row in rows.tolist())


@settings(max_examples=60, deadline=None)
@given(plan=drawn_plans())
def test_every_sample_counts_once(tokens: Path, plan: Plan) -> None:
    _check(plan, tokens)


def test_every_sample_counts_once_when_rows_are_unlike(tokens: Path) -> None:
    _check(uneven_rows(), tokens)


@settings(max_examples=60, deadline=None)
@given(plan=drawn_plans())
def test_every_stage_draws_dropout_by_the_sample(tokens: Path, plan: Plan) -> None:
    """On every stage, the rows that count have the keys of the global batch's samples, each once."""
    samples = Samples(
        TokenFile(tokens),
        sequence_length=plan.sequence_length,
        global_batch_size=plan.global_batch_size,
        seed=3,
    )
    place = {"layer": 1, "operator": "softmax"}
    whole = Draws(seed=3, iteration=2, first_sample=0)
    expected = whole.keys(rows=plan.global_batch_size, **place)  # type: ignore[arg-type]
    found: dict[tuple[int, int], list[int]] = {}
    for rank in plan.ranks:
        pipeline = plan.pipelines[rank.pipeline]
        batches = ReplicaBatches(plan=plan, place=rank, samples=samples)
        rows = pipeline.stages[rank.stage].rows[rank.replica]
        for index in range(pipeline.micro_batches):
            keys = batches.draws(2, index).keys(rows=rows, **place)  # type: ignore[arg-type]
            _, labels = batches.micro_batch(2, index)
            counted = (labels != NOT_COUNTED).all(dim=1).tolist()
            if not rank.tp_rank:
                stage = found.setdefault((rank.pipeline, rank.stage), [])
                stage += [key for key, counts in zip(keys, counted, strict=True) if counts]
    for (pipeline_index, _), stage in found.items():
        first, last = plan.sample_ranges()[pipeline_index]
        assert sorted(stage) == sorted(expected[first:last])
