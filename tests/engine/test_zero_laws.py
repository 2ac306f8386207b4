"""ZeRO on real ranks: the laws hold as without it, at each stage and scope."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from planner.gradient_calls import call_reduction, gradient_layout
from planner.plan import Plan
from tests.engine.law_checks import assert_trains_as_one_process, one_process
from tests.engine.law_plans import HAND_PICKED, drawn_plans, on_nodes, plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import relative_difference, train_plan, training_of, write_tokens

STEPS = 10


FIRST = "two replicas and one against three"
# Unlike numbers of replicas cut the same layers at unlike places; TP copies meet replicas; ends are tied over stages.
UNLIKE: dict[str, Plan] = {
    FIRST: plan_of([(1, 2, 1), (1, 1, 3)], [(1, 3, 4)], micro_batch_sizes=[2, 3], samples=[3, 4]),
    "replicas of tensor parallel ranks against replicas": plan_of([(2, 2, 4)], [(1, 2, 4)], samples=[6, 3]),
    "replicas alone": HAND_PICKED["replicas"],
    "one device": HAND_PICKED["one device"],
}
WAYS: dict[str, dict[str, Any]] = {
    "ZeRO-1 by pipeline": {"zero_stage": 1, "zero_scope": "pipeline"},
    "ZeRO-2": {"zero_stage": 2},
    "ZeRO-2 by pipeline": {"zero_stage": 2, "zero_scope": "pipeline"},
}


def sharded(plan: Plan, **fields: Any) -> Plan:
    return Plan.model_validate(plan.model_dump() | {"zero_stage": 1} | fields)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.mark.parametrize(
    "name",
    [
        "one device",
        "tensor parallel against data parallel",
        "three pipelines of unlike layers",
        "surplus samples masked",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in (
                "replicas",
                "degrees that do not divide each other",
                "four heads on four ranks, unlike replicas",
            )
        ),
    ],
)
def test_sharded_state_trains_as_one_process(rank_pool: RankPool, tokens: Path, name: str) -> None:
    assert_trains_as_one_process(rank_pool, sharded(HAND_PICKED[name]), tokens, steps=STEPS)


def test_overlapped_shards_with_clipping_train_as_one_process(rank_pool: RankPool, tokens: Path) -> None:
    plan = sharded(plan_of([(2, 1, 1), (1, 1, 3)], [(1, 2, 4)], samples=[3, 4]), overlap=True)
    assert_trains_as_one_process(rank_pool, plan, tokens, steps=STEPS, clip=0.2)


def test_shards_cut_inside_nodes_first_train_as_one_process(rank_pool: RankPool, tokens: Path) -> None:
    plan = on_nodes(sharded(plan_of([(1, 2, 4)], [(1, 2, 4)], samples=[4, 4])), 2, 2)
    assert {call_reduction(plan, call).algorithm for call in gradient_layout(plan).calls} == {"slices"}
    assert_trains_as_one_process(rank_pool, plan, tokens, steps=STEPS)


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(name, way, marks=() if name == FIRST else pytest.mark.slow)
        for name in UNLIKE
        for way in WAYS
    ],
)
def test_replicas_that_share_train_as_one_process(
    rank_pool: RankPool, tokens: Path, name: str, way: str
) -> None:
    assert_trains_as_one_process(rank_pool, sharded(UNLIKE[name], **WAYS[way]), tokens, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), list(zip(HAND_PICKED, itertools.cycle(WAYS), strict=False)))
def test_every_hand_picked_plan_trains_with_shared_gradients(
    rank_pool: RankPool, tokens: Path, name: str, way: str
) -> None:
    assert_trains_as_one_process(rank_pool, sharded(HAND_PICKED[name], **WAYS[way]), tokens, steps=STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_overlapped_shared_gradients_with_clipping_train_as_one_process(
    rank_pool: RankPool, tokens: Path, way: str
) -> None:
    plan = sharded(UNLIKE[FIRST], overlap=True, **WAYS[way])
    assert_trains_as_one_process(rank_pool, plan, tokens, steps=STEPS, clip=0.2)


@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    max_examples=3,
    derandomize=True,
)
@given(plan=drawn_plans())
def test_any_plan_trains_sharded_as_one_process(rank_pool: RankPool, tokens: Path, plan: Plan) -> None:
    assert_trains_as_one_process(rank_pool, sharded(plan), tokens, steps=STEPS)


@pytest.mark.slow
@settings(
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    print_blob=True,
    max_examples=8,
    derandomize=True,
)
@given(plan=drawn_plans(), way=st.sampled_from(sorted(WAYS)))
def test_any_plan_trains_with_shared_gradients_as_one_process(
    rank_pool: RankPool, tokens: Path, plan: Plan, way: str
) -> None:
    assert_trains_as_one_process(rank_pool, sharded(plan, **WAYS[way]), tokens, steps=STEPS)


@pytest.mark.parametrize(
    "fields",
    [{"zero_stage": 1}, {"zero_stage": 2, "zero_scope": "pipeline"}],
    ids=["ZeRO-1", "ZeRO-2 by pipeline"],
)
def test_bf16_shards_train_as_one_process_in_bf16(
    rank_pool: RankPool, tokens: Path, fields: dict[str, Any]
) -> None:
    plan = sharded(
        plan_of([(1, 1, 2), (1, 1, 2)], [(1, 2, 4)], samples=[3, 4], dtypes={"param": "bf16"}),
        overlap=True,
        **fields,
    )
    training = training_of(plan, steps=STEPS)
    expected = one_process(plan, training, tokens)
    got = train_plan(rank_pool, plan, training, tokens)
    for name, gradient in expected.gradients.items():
        if not name.endswith("attention.key.bias"):
            assert relative_difference(got.gradients[name], gradient) < 2e-2, name
    assert got.losses == pytest.approx(expected.losses, rel=1e-2)
    assert all(parameter.dtype == torch.bfloat16 for parameter in got.parameters.values())
