"""Law 1 in half precisions and under the other optimizer, on real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from actors.job import Optimizer
from planner.plan import Plan
from tests.engine.law_checks import one_process
from tests.engine.law_plans import plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import relative_difference, train_plan, training_of, write_tokens

STEPS = 10
UNLIKE: list[Any] = [[(2, 1, 2), (1, 1, 2)], [(1, 2, 4)]]


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_half_precision_trains_as_one_process_in_it(
    rank_pool: RankPool, tokens: Path, precision: str, zero_stage: int
) -> None:
    plan = plan_of(*UNLIKE, samples=[3, 4], dtypes={"param": precision}, zero_stage=zero_stage)
    training = training_of(plan, steps=STEPS)
    expected = one_process(plan, training, tokens)
    got = train_plan(rank_pool, plan, training, tokens)
    for name, gradient in expected.gradients.items():
        if not name.endswith("attention.key.bias"):
            assert relative_difference(got.gradients[name], gradient) < 2e-2, name
    assert got.norms[0] == pytest.approx(expected.norms[0], rel=2e-2)
    assert got.losses == pytest.approx(expected.losses, rel=1e-2)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[precision]
    assert all(parameter.dtype == dtype for parameter in got.parameters.values())


@pytest.mark.parametrize("zero_stage", [0, 1])
def test_sgd_trains_as_one_process(rank_pool: RankPool, tokens: Path, zero_stage: int) -> None:
    plan: Plan = plan_of(*UNLIKE, samples=[3, 4], zero_stage=zero_stage)
    # SGD's steps are as long as its gradients: a rate at which parameters move as far as AdamW's do.
    training = training_of(plan, steps=STEPS, optimizer=Optimizer(name="sgd")).model_copy(
        update={"learning_rate": training_of(plan, steps=1).learning_rate.model_copy(update={"peak": 1e-2})}
    )
    expected = one_process(plan, training, tokens)
    got = train_plan(rank_pool, plan, training, tokens)
    assert got.losses == pytest.approx(expected.losses, rel=1e-6)
    for name, parameter in expected.parameters.items():
        if not name.endswith("attention.key.bias"):
            assert relative_difference(got.parameters[name], parameter) < 1e-5, name
