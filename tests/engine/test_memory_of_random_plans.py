"""The planner's `tensor_bytes` against a tracker's peak on plans drawn at random: never under, at most 5 % over.

Models of a few MB, in which any part may be the largest: family, sizes, precision, dropout, ends, degrees, ZeRO,
micro-batches (fewer than stages too), sequence parallelism, and recomputation of any operators in any layers.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from planner.cluster import Cluster
from planner.model_spec import ModelSpec
from planner.operators import layer_operators
from planner.plan import Dtypes, Plan
from tests.engine.law_plans import by_position, with_recompute
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import write_tokens
from tests.engine.test_memory_prediction import check_peaks
from tests.plans import Degrees, make_llama, make_model, make_plan

PLANS = 14
MOST_RANKS = 4
ATTENTION = ("qkv", "scores", "softmax", "attention_dropout")


def _model(draw: random.Random) -> ModelSpec:
    hidden = draw.choice([32, 64, 128])
    shape = {
        "layers": draw.choice([2, 3, 4]),
        "hidden_size": hidden,
        "heads": 4,
        "vocab_size": draw.choice([257, 1024, 4096]),
        "max_sequence_length": draw.choice([32, 64, 128, 256]),
        "dropout": draw.choice([0.0, 0.1]),
        "tied_embedding": draw.choice([True, False]),
    }
    if draw.random() < 0.5:
        return make_model(**shape)
    gated = {"kv_heads": draw.choice([2, 4]), "ffn_hidden_size": draw.choice([2, 3, 4]) * hidden}
    return make_llama(**(shape | gated))


def _stages(draw: random.Random, layers: int) -> list[Degrees]:
    """Up to three, with no more than so many ranks, cut anywhere."""
    count = draw.choice([1, 2, min(3, layers)])
    cuts = [0, *sorted(draw.sample(range(1, layers), count - 1)), layers]
    left, found = MOST_RANKS, []
    for stage in range(count):
        fit = [one for one in ((1, 1), (2, 1), (1, 2)) if one[0] * one[1] <= left - (count - 1 - stage)]
        tp, dp = draw.choice(fit)
        left -= tp * dp
        found.append((tp, dp, cuts[stage + 1] - cuts[stage]))
    return found


def _counts(draw: random.Random, model: ModelSpec, layers: int) -> dict[str, int]:
    names = layer_operators(model)
    chosen = draw.choice([(), names, ATTENTION, [name for name in names if draw.random() < 0.4]])
    alike = draw.random() < 0.5
    counts = {name: layers if alike else draw.randint(0, layers) for name in chosen}
    return {name: count for name, count in counts.items() if count}


def random_plan(seed: int) -> Plan:
    draw = random.Random(seed)
    model = _model(draw)
    stages = _stages(draw, model.layers)
    node = {
        "name": "n",
        "devices": [{"type": "910B2", "count": sum(tp * dp for tp, dp, _ in stages)}],
        "emulate": True,
    }
    size = draw.choice([2, 4])
    plan = make_plan(
        model,
        [stages],
        cluster=Cluster.model_validate({"nodes": [node]}),
        dtypes=Dtypes.for_precision(draw.choice(["fp32", "bf16"])),
        micro_batch_sizes=[size],
        samples=[size * draw.choice([1, 2, 5])],
    )
    plan = with_recompute(plan, *(_counts(draw, model, layers) for _, _, layers in stages))
    if draw.random() < 0.3:
        plan = by_position(plan)
    return Plan.model_validate(plan.model_dump() | {"zero_stage": draw.choice([0, 0, 1, 2])})


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(PLANS))
def test_tensor_bytes_of_a_random_plan_are_those_of_a_tracker(
    rank_pool: RankPool, tmp_path: Path, seed: int
) -> None:
    check_peaks(rank_pool, random_plan(seed), write_tokens(tmp_path))
