"""Law 8 over generated pairs of plans: k iterations under one and k under the other are 2k unbroken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.plan import Plan
from tests.engine.checkpoint_runs import (
    HALF,
    assert_as_unbroken,
    broken_in_two,
    in_precision,
    run,
    with_zero,
)
from tests.engine.covering import Row, covering_rows
from tests.engine.law_plans import drawn_plans, plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import relative_difference, training_of, write_tokens
from tests.plans import Degrees, make_llama, make_model

MODELS = {
    "gpt3": make_model(max_sequence_length=16, dropout=0.1),
    "llama": make_llama(layers=4, kv_heads=6, max_sequence_length=16),
}
# Stages by pipeline, and the samples of each of a global batch of 8.
SHAPES: dict[str, tuple[list[list[Degrees]], list[int]]] = {
    "stages": ([[(1, 1, 1), (1, 1, 2), (1, 1, 1)]], [8]),
    "unlike pipelines": ([[(2, 1, 1), (1, 1, 3)], [(1, 2, 4)]], [3, 5]),
    "cut by three": ([[(3, 1, 2), (1, 1, 2)]], [8]),
}
FACTORS: dict[str, list[Any]] = {
    "model": list(MODELS),
    "precision": ["fp32", "fp16"],
    "shape before": list(SHAPES),
    "shape after": list(SHAPES),
    "zero before": [0, 1, 2],
    "zero after": [0, 1, 2],
    "scope before": ["all", "pipeline"],
    "scope after": ["all", "pipeline"],
}
# Without ZeRO nothing has a scope.
ROWS = covering_rows(
    FACTORS,
    lambda row: (
        not any(
            row[f"zero {when}"] == 0 and row[f"scope {when}"] == "pipeline" for when in ("before", "after")
        )
    ),
)
# One in each half. The break comes two finite iterations after the first: one more, and the scale doubles.
OVERFLOWS = (2, 6)
SCALES = [2.0**16, 2.0**16, 2.0**15, 2.0**15, 2.0**15, 2.0**16, 2.0**15, 2.0**15]
# What two plans' fp16 differs by; biases begin at zero, so that theirs is of all that they moved.
LOSSES, PARAMETERS = 1e-3, 4e-3


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def _plan(row: Row, when: str) -> Plan:
    pipelines, samples = SHAPES[str(row[f"shape {when}"])]
    plan = plan_of(*pipelines, model=MODELS[str(row["model"])], samples=samples)
    plan = with_zero(plan, int(str(row[f"zero {when}"])), str(row[f"scope {when}"]))
    return in_precision(plan, str(row["precision"]))


def assert_fp16_as_unbroken(pool: RankPool, one: Plan, other: Plan, tokens: Path, folder: Path) -> None:
    """The law in fp16, where iterations overflow on one rank: the loss scale and the count of finite iterations
    come along. The unbroken run is the second plan's: overflows are its own, not a single process's."""
    training = training_of(other, steps=2 * HALF)
    unbroken = run(pool, other, training, tokens, folder, first=1, last=2 * HALF, overflow_in=OVERFLOWS)
    before, after = broken_in_two(pool, one, other, training, tokens, folder, overflow_in=OVERFLOWS)
    assert before.scales + after.scales == unbroken.scales == SCALES
    skipped = [iteration in OVERFLOWS for iteration in range(1, 2 * HALF + 1)]
    assert before.skipped + after.skipped == unbroken.skipped == skipped
    assert before.losses + after.losses == pytest.approx(unbroken.losses, rel=LOSSES)
    for name, parameter in unbroken.parameters.items():
        if not name.endswith("attention.key.bias"):
            assert relative_difference(after.parameters[name], parameter) < PARAMETERS, name


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=lambda row: " - ".join(f"{value}" for value in row.values()))
def test_each_of_a_covering_set_of_pairs_goes_on_as_if_unbroken(
    rank_pool: RankPool, tokens: Path, tmp_path: Path, row: Row
) -> None:
    check = assert_fp16_as_unbroken if row["precision"] == "fp16" else assert_as_unbroken
    check(rank_pool, _plan(row, "before"), _plan(row, "after"), tokens, tmp_path)


@pytest.mark.slow
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=8, derandomize=True)
@given(data=st.data())
def test_any_plan_goes_on_with_any_other(
    rank_pool: RankPool, tokens: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    one = data.draw(drawn_plans())
    other = data.draw(drawn_plans(like=one))
    one, other = (with_zero(plan, data.draw(st.sampled_from([0, 1, 2]))) for plan in (one, other))
    assert_as_unbroken(rank_pool, one, other, tokens, tmp_path_factory.mktemp("pair"))
