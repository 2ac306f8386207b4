"""Slices between unlike stages, gathered by the receiving TP group, on real ranks: training is one process's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from actors.engine.exchange import rank_routes
from planner.model_spec import ModelSpec
from planner.plan import Plan
from tests.engine.law_checks import assert_trains_as_one_process, one_process
from tests.engine.law_plans import by_position, plan_of, slow_between_stages, whole_layers, with_recompute
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import relative_difference, train_plan, training_of, write_tokens
from tests.plans import Degrees, make_llama, make_model

STEPS = 10
GPT = make_model(max_sequence_length=12, dropout=0.1)
LLAMA = make_llama(layers=4, kv_heads=12, max_sequence_length=12)

PLANS: dict[str, Plan] = {
    "one rank to two and back": plan_of([(1, 1, 1), (2, 1, 2), (1, 1, 1)], model=GPT, samples=[3]),
    "four ranks beside two": plan_of([(4, 1, 2), (2, 1, 2)], model=LLAMA, samples=[3]),
    # Slices of a replica come from both replicas before it.
    "unlike replicas, cut by position, recomputed": with_recompute(
        by_position(plan_of([(2, 2, 2), (2, 1, 2)], model=LLAMA, samples=[5])),
        whole_layers(LLAMA, 1),
        {"attention_norm": 2, "softmax": 1},
    ),
    "degrees that do not divide each other, by position": by_position(
        plan_of([(3, 1, 2), (2, 1, 2)], model=GPT, samples=[3])
    ),
}


# Has every reason at once; the others are single ones.
QUICK = "unlike replicas, cut by position, recomputed"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def sliced(plan: Plan) -> Plan:
    """The plan with links between its stages so slow that every TP group receives slices."""
    plan = slow_between_stages(plan)
    for place in plan.ranks:
        stage = plan.pipelines[place.pipeline].stages[place.stage]
        for route in rank_routes(plan, place).values():
            assert route.sliced == (stage.tp > 1 and bool(route.receives))
    return plan


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == QUICK else pytest.mark.slow) for name in PLANS]
)
def test_sliced_exchange_trains_as_one_process(rank_pool: RankPool, tokens: Path, name: str) -> None:
    assert_trains_as_one_process(rank_pool, sliced(PLANS[name]), tokens, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("model", "cut"), [(GPT, False), (LLAMA, True)], ids=["gpt3", "llama by position"])
def test_it_does_in_bf16(rank_pool: RankPool, tokens: Path, model: ModelSpec, cut: bool) -> None:
    plan = plan_of([(2, 1, 2), (3, 1, 2)], model=model, samples=[3], dtypes={"param": "bf16"})
    plan = sliced(by_position(plan) if cut else plan)
    training = training_of(plan, steps=STEPS)
    expected = one_process(plan, training, tokens)
    got = train_plan(rank_pool, plan, training, tokens)
    for name, gradient in expected.gradients.items():
        if not name.endswith("attention.key.bias"):
            assert relative_difference(got.gradients[name], gradient) < 2e-2, name
    assert got.losses == pytest.approx(expected.losses, rel=1e-2)
    assert all(parameter.dtype == torch.bfloat16 for parameter in got.parameters.values())


_degrees = st.tuples(st.integers(1, 4), st.integers(1, 2))


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    degrees=st.lists(_degrees, min_size=2, max_size=3),
    model=st.sampled_from([GPT, LLAMA]),
    cut=st.booleans(),
    samples=st.integers(1, 9),
)
def test_no_pair_of_degrees_trains_otherwise(
    rank_pool: RankPool,
    tokens: Path,
    degrees: list[tuple[int, int]],
    model: ModelSpec,
    cut: bool,
    samples: int,
) -> None:
    assume(sum(tp * dp for tp, dp in degrees) <= 6 and any(tp > 1 for tp, _ in degrees))
    layers = [5 - len(degrees)] + [1] * (len(degrees) - 1)
    stages: list[Degrees] = [(tp, dp, n) for (tp, dp), n in zip(degrees, layers, strict=True)]
    plan = plan_of(stages, model=model, samples=[samples])
    plan = slow_between_stages(by_position(plan) if cut else plan)
    assert_trains_as_one_process(rank_pool, plan, tokens, steps=STEPS)
