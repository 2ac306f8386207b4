"""The laws of docs/architecture.md on real gloo ranks: any plan trains as one process does.

`train_plan` itself asserts that every holder of a parameter element, over TP ranks, replicas, pipelines and
both ends of a tied embedding, ends with the same bits (laws 4 and 6). The norm of unlike meshes (law 5) is
compared every iteration; surplus samples (law 2) and the choice of samples (law 3) would change gradients.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings

from planner.plan import Plan
from tests.engine.law_checks import STEPS, assert_trains_as_one_process, one_process
from tests.engine.law_plans import (
    DROPPED_LLAMA,
    HAND_PICKED,
    drawn_plans,
    plan_of,
    whole_layers,
    with_recompute,
)
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import relative_difference, train_plan, training_of, write_tokens


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize("name", HAND_PICKED)
def test_a_plan_trains_as_one_process(rank_pool: RankPool, tokens: Path, name: str) -> None:
    assert_trains_as_one_process(rank_pool, HAND_PICKED[name], tokens)


def test_clipping_counts_every_element_once_over_unlike_meshes(rank_pool: RankPool, tokens: Path) -> None:
    plan = plan_of([(2, 1, 1), (1, 1, 3)], [(1, 2, 4)], samples=[3, 4])
    assert_trains_as_one_process(rank_pool, plan, tokens, clip=0.2)


_DRAWN = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)


@settings(_DRAWN, max_examples=3, derandomize=True)
@given(plan=drawn_plans())
def test_any_plan_trains_as_one_process(rank_pool: RankPool, tokens: Path, plan: Plan) -> None:
    assert_trains_as_one_process(rank_pool, plan, tokens)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@settings(_DRAWN, max_examples=12, derandomize=True)
@given(plan=drawn_plans())
def test_any_of_many_plans_trains_as_one_process(rank_pool: RankPool, tokens: Path, plan: Plan) -> None:
    assert_trains_as_one_process(rank_pool, plan, tokens)


@pytest.mark.parametrize(
    "plan",
    [
        plan_of([(1, 1, 2), (1, 1, 2)], [(1, 2, 4)], samples=[3, 4], dtypes={"param": "bf16"}),
        plan_of([(2, 1, 2), (1, 2, 2)], samples=[6], dtypes={"param": "bf16"}),
        with_recompute(
            plan_of([(2, 1, 1), (1, 2, 1)], model=DROPPED_LLAMA, samples=[6], dtypes={"param": "bf16"}),
            whole_layers(DROPPED_LLAMA, 1),
            {"softmax": 1, "mlp_norm": 1},
        ),
    ],
    ids=["stages and replicas", "tensor parallel", "llama, dropout, recomputation"],
)
def test_bf16_trains_as_one_process_in_bf16(rank_pool: RankPool, tokens: Path, plan: Plan) -> None:
    training = training_of(plan, steps=STEPS)
    expected = one_process(plan, training, tokens)
    got = train_plan(rank_pool, plan, training, tokens)
    for name, gradient in expected.gradients.items():
        if not name.endswith("attention.key.bias"):
            assert relative_difference(got.gradients[name], gradient) < 2e-2, name
    assert got.norms[0] == pytest.approx(expected.norms[0], rel=2e-2)
    assert got.losses == pytest.approx(expected.losses, rel=1e-2)
    assert all(parameter.dtype == torch.bfloat16 for parameter in got.parameters.values())
