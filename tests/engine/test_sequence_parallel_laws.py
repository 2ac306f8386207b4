"""Sequence parallelism on real ranks: the laws hold as without it, and dropout drops the same elements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from planner.plan import Plan
from tests.engine.law_checks import assert_trains_as_one_process, one_process
from tests.engine.law_plans import by_position, plan_of, whole_layers, with_recompute
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import relative_difference, train_plan, training_of, write_tokens
from tests.plans import make_llama, make_model

STEPS = 10
DROPPED = make_model(max_sequence_length=16, dropout=0.15)
LLAMA = make_llama(layers=4, dropout=0.1)


PLANS: dict[str, Plan] = {
    "one stage": plan_of([(2, 1, 4)], samples=[3]),
    # First, middle and last stage; the middle one alone has activations whole on both sides.
    "stages, dropout": plan_of([(2, 1, 1), (2, 1, 2), (2, 1, 1)], model=DROPPED, samples=[3]),
    # Norms of four ranks with parts of the sum beside those of ranks with the whole of it.
    "four parts beside replicas": plan_of([(4, 1, 4)], [(1, 2, 4)], samples=[2, 4]),
    "llama, replicas, all recomputed": with_recompute(
        plan_of([(2, 2, 3), (2, 1, 1)], model=LLAMA, samples=[4]),
        whole_layers(LLAMA, 2),
        {"attention_norm": 1, "attention_residual": 1, "mlp_norm": 1},
    ),
    "stages without layers": plan_of(
        [(2, 1, 0), (2, 1, 4), (2, 1, 0)],
        model=make_model(max_sequence_length=16, tied_embedding=False),
        samples=[3],
    ),
}


QUICK = ("stages, dropout", "llama, replicas, all recomputed")


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in PLANS]
)
def test_activations_cut_by_position_train_as_one_process(
    rank_pool: RankPool, tokens: Path, name: str
) -> None:
    assert_trains_as_one_process(rank_pool, by_position(PLANS[name]), tokens, steps=STEPS)


def test_they_train_as_one_process_in_bf16(rank_pool: RankPool, tokens: Path) -> None:
    plan = by_position(plan_of([(2, 1, 4)], [(1, 1, 4)], samples=[2, 2], dtypes={"param": "bf16"}))
    training = training_of(plan, steps=STEPS)
    expected = one_process(plan, training, tokens)
    got = train_plan(rank_pool, plan, training, tokens)
    for name, gradient in expected.gradients.items():
        if not name.endswith("attention.key.bias"):
            assert relative_difference(got.gradients[name], gradient) < 2e-2, name
    assert got.losses == pytest.approx(expected.losses, rel=1e-2)
    assert all(parameter.dtype == torch.bfloat16 for parameter in got.parameters.values())
