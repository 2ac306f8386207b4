"""Law 1 where features meet: a pairwise covering set of all that a plan and a model can say, 50 iterations each.

test_laws.py has plans for single reasons; here every two choices are met together in some row.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from planner.model_spec import ModelSpec
from planner.operators import layer_operators
from planner.plan import Plan
from tests.engine.covering import Row, covering_rows
from tests.engine.law_checks import assert_trains_as_one_process, one_process
from tests.engine.law_plans import by_position, plan_of, whole_layers, with_recompute
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import relative_difference, train_plan, training_of, write_tokens
from tests.engine.reference import Trained
from tests.plans import Degrees, make_llama, make_model

STEPS = 50
CLIP = 0.2

# Stages by pipeline, micro-batch sizes, samples.
SHAPES: dict[str, tuple[list[list[Degrees]], list[int], list[int]]] = {
    "one device": ([[(1, 1, 2)]], [2], [4]),
    "stages": ([[(1, 1, 1), (1, 1, 1)]], [1], [5]),
    "tensor parallel, replicas": ([[(2, 1, 1), (1, 2, 1)]], [2], [6]),
    "unlike pipelines": ([[(2, 1, 2)], [(1, 1, 1), (1, 1, 1)]], [1, 2], [2, 4]),
    "degrees that do not divide": ([[(3, 1, 2)], [(2, 1, 2)]], [1, 1], [3, 2]),
    "fewer micro-batches than stages": ([[(1, 1, 1), (1, 1, 1)], [(1, 2, 2)]], [1, 2], [1, 2]),
    "surplus samples": ([[(1, 2, 1), (1, 1, 1)], [(1, 1, 2)]], [4, 3], [5, 4]),
    "unlike replicas": ([[(1, 2, 1), (1, 1, 1)], [(1, 3, 2)]], [2, 3], [3, 4]),
    "replicas of cut layers": ([[(2, 2, 2)], [(1, 2, 2)]], [2, 2], [6, 3]),
    "one cut by six": ([[(6, 1, 2)]], [1], [2]),
}

FACTORS: dict[str, list[Any]] = {
    "shape": list(SHAPES),
    "model": ["gpt3", "llama", "llama with shared keys"],
    "precision": ["fp32", "bf16", "fp16"],
    "recompute": ["nothing", "attention", "everything"],
    "gradient_sync": ["block", "tensor", "device"],
    "tied": [True, False],
    "dropout": [0.0, 0.15],
    "zero": ["whole state", "ZeRO-1", "ZeRO-1 by pipeline", "ZeRO-2", "ZeRO-2 by pipeline"],
    "overlap": [False, True],
    "sequence_parallel": [False, True],
    "clip": [None, CLIP],
}


# What means nothing together, or is refused.
FORBIDDEN: list[dict[str, Any]] = [
    *(
        {"gradient_sync": sync, "zero": zero}
        for sync in ("tensor", "device")
        for zero in FACTORS["zero"]
        if zero != "whole state"
    ),
    *(
        {"shape": name, "sequence_parallel": True}
        for name, (pipelines, _, _) in SHAPES.items()
        if all(tp == 1 for stages in pipelines for tp, _, _ in stages)
    ),
]


def _allowed(row: Row) -> bool:
    return not any(pair.items() <= row.items() for pair in FORBIDDEN)


ROWS = covering_rows(FACTORS, _allowed)


def _model(row: Row) -> ModelSpec:
    fields: dict[str, Any] = {
        "layers": 2,
        # Every TP degree divides it.
        "max_sequence_length": 12,
        "tied_embedding": row["tied"],
        "dropout": row["dropout"],
    }
    if row["model"] == "gpt3":
        return make_model(**fields)
    return make_llama(kv_heads=6 if row["model"] == "llama with shared keys" else 12, **fields)


def _plan(row: Row) -> Plan:
    model, zero = _model(row), str(row["zero"])
    pipelines, sizes, samples = SHAPES[str(row["shape"])]
    plan = plan_of(
        *pipelines,
        model=model,
        micro_batch_sizes=sizes,
        samples=samples,
        dtypes={"param": row["precision"]},
        zero_stage=int(zero[5]) if zero.startswith("ZeRO") else 0,
        zero_scope="pipeline" if zero.endswith("by pipeline") else "all",
        gradient_sync=row["gradient_sync"],
        overlap=row["overlap"],
    )
    counts = []
    for _, _, layers in (stage for stages in pipelines for stage in stages):
        wanted = {} if row["recompute"] == "nothing" else whole_layers(model, layers)
        if row["recompute"] == "attention":
            first, last = (layer_operators(model).index(name) for name in ("qkv", "context"))
            wanted = dict.fromkeys(layer_operators(model)[first:last], max(1, layers - 1))
        counts.append(wanted)
    plan = with_recompute(plan, *counts)
    return by_position(plan) if row["sequence_parallel"] else plan


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def test_every_two_choices_meet() -> None:
    met = {pair for row in ROWS for pair in combinations(row.items(), 2)}
    for (first, ones), (second, others) in combinations(FACTORS.items(), 2):
        for one in ones:
            for other in others:
                pair = {first: one, second: other}
                assert (((first, one), (second, other)) in met) != (pair in FORBIDDEN)
    assert len(ROWS) < 66, "pairs are meant to share rows"


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: " - ".join(f"{value}" for value in row.values()))
def test_features_together_train_as_one_process(rank_pool: RankPool, tokens: Path, row: Row) -> None:
    plan, clip = _plan(row), CLIP if row["clip"] else None
    if row["precision"] == "fp32":
        assert_trains_as_one_process(rank_pool, plan, tokens, steps=STEPS, clip=clip)
        return
    training = training_of(plan, steps=STEPS, gradient_clip=clip)
    expected = one_process(plan, training, tokens)
    got = train_plan(rank_pool, plan, training, tokens)
    _assert_alike_gradients(got, expected, lambda: one_process(plan, training, tokens, exact=True))
    assert got.norms[0] == pytest.approx(expected.norms[0], rel=2e-2)
    assert got.losses == pytest.approx(expected.losses, rel=1e-2)


def _assert_alike_gradients(got: Trained, expected: Trained, exact: Callable[[], Trained]) -> None:
    """Law 1 in half precision. What one process's own round-off moves far is no further from fp64 than twice
    as far as there."""
    far = [
        name
        for name, gradient in expected.gradients.items()
        if not name.endswith("attention.key.bias")
        and relative_difference(got.gradients[name], gradient) >= 2e-2
    ]
    truth = exact().gradients if far else {}
    for name in far:
        alone = relative_difference(expected.gradients[name].double(), truth[name])
        ours = relative_difference(got.gradients[name].double(), truth[name])
        assert ours < max(2e-2, 2 * alone), (name, ours, alone)
