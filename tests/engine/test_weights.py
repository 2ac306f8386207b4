"""Initial parameters, shards, and the file of the final weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from actors.engine.weights import initial_parameter, save_weights, shard
from planner.parameters import Parameter, Region, model_parameters
from planner.plan import Plan
from tests.engine.held_parameters import make_handles
from tests.engine.rank_pool import RankPool
from tests.plans import Degrees, make_llama, make_model, make_plan

MODEL = make_model(hidden_size=12, vocab_size=29, max_sequence_length=6)
WIDE = make_model(hidden_size=240, vocab_size=1000)


def _named(name: str) -> Parameter:
    (found,) = [p for p in model_parameters(WIDE) if p.name == name]
    return found


@pytest.mark.parametrize(
    ("name", "deviation"),
    [
        ("embedding.tokens.weight", 0.02),
        ("layers.3.attention.query.weight", 0.02),
        ("layers.3.mlp.up.weight", 0.02),
        ("layers.3.attention.output.weight", 0.02 / math.sqrt(8)),
        ("layers.3.mlp.down.weight", 0.02 / math.sqrt(8)),
    ],
)
def test_matrices_start_normal(name: str, deviation: float) -> None:
    value = initial_parameter(_named(name), model=WIDE, seed=3)
    assert value.dtype == torch.float32
    assert float(value.std()) == pytest.approx(deviation, rel=0.02)
    assert abs(float(value.mean())) < 3 * deviation / math.sqrt(value.numel())


def test_llama_matrices_all_start_alike() -> None:
    model = make_llama(hidden_size=240, vocab_size=1000, ffn_hidden_size=480)
    for parameter in model_parameters(model):
        value = initial_parameter(parameter, model=model, seed=3)
        if len(parameter.shape) == 1:
            assert bool((value == 1.0).all()), parameter.name
        else:
            assert float(value.std()) == pytest.approx(0.02, rel=0.02), parameter.name


def test_norms_start_as_identity_and_biases_at_zero() -> None:
    for parameter in model_parameters(WIDE):
        value = initial_parameter(parameter, model=WIDE, seed=3)
        assert value.shape == parameter.shape
        if len(parameter.shape) == 1:
            assert (value == (0.0 if parameter.name.endswith("bias") else 1.0)).all()


def test_the_start_depends_on_seed_and_name_alone() -> None:
    query, key = _named("layers.3.attention.query.weight"), _named("layers.3.attention.key.weight")
    first = initial_parameter(query, model=WIDE, seed=3)
    torch.randn(1)
    assert torch.equal(first, initial_parameter(query, model=WIDE, seed=3))
    assert not torch.equal(first, initial_parameter(query, model=WIDE, seed=4))
    assert not torch.equal(first, initial_parameter(key, model=WIDE, seed=3))


def test_shards_are_slices_and_padding_is_zero() -> None:
    whole = torch.arange(1.0, 15.0).view(7, 2)
    tokens = Parameter("tokens", (7, 2), Region(0, "embedding"), tp_dim=0, padded=True)
    # ceil(7 / 5) = 2: the fourth shard holds one row, the fifth none.
    shards = [shard(tokens, whole, tp=5, tp_rank=i) for i in range(5)]
    assert torch.equal(torch.cat(shards)[:7], whole)
    assert (torch.cat(shards)[7:] == 0).all()
    down = Parameter("down", (7, 2), Region(1, "layer", 0), tp_dim=1)
    assert torch.equal(shard(down, whole, tp=2, tp_rank=1), whole[:, 1:])
    assert shard(down, whole, tp=2, tp_rank=1).is_contiguous()


def test_a_shard_does_not_share_memory_with_the_whole() -> None:
    whole = torch.zeros(4)
    shard(Parameter("bias", (4,), Region(1, "layer", 0)), whole, tp=1, tp_rank=0).fill_(1.0)
    assert (whole == 0).all()


def _save(rank: int, plan: Plan, path: Path, dtype: torch.dtype) -> bool:
    save_weights(path, plan=plan, handles=make_handles(plan, rank, dtype=dtype), rank=rank)
    return path.exists()


PLANS: dict[str, list[list[Degrees]]] = {
    "one rank": [[(1, 1, 4)]],
    "tp and stages": [[(2, 1, 1), (1, 2, 2), (1, 1, 1)], [(1, 1, 4)]],
    "tp 3 twice": [[(3, 2, 4)]],
    "tp 4, the tied embedding in another cut at the end": [[(4, 1, 3), (2, 1, 1)]],
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", PLANS)
def test_any_plan_saves_the_same_file(
    rank_pool: RankPool, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    plan, path = make_plan(MODEL, PLANS[name]), tmp_path / "run" / "weights.safetensors"
    seen = rank_pool.run(_save, plan, path, dtype, world_size=plan.world_size)
    # On return the file is there for every rank.
    assert all(seen)
    saved = load_file(path)
    assert list(_names(path)) == [parameter.name for parameter in model_parameters(MODEL)]
    for parameter in model_parameters(MODEL):
        value = initial_parameter(parameter, model=MODEL, seed=0).to(dtype)
        assert torch.equal(saved[parameter.name], value)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def _names(path: Path) -> set[str] | list[str]:
    with safe_open(path, framework="pt") as file:
        assert file.metadata()["model"] == MODEL.name
        return sorted(file.keys(), key=_order)


def _order(name: str) -> int:
    return [parameter.name for parameter in model_parameters(MODEL)].index(name)


def test_a_small_vocabulary_leaves_ranks_nothing_to_send(rank_pool: RankPool, tmp_path: Path) -> None:
    model = make_model(hidden_size=12, vocab_size=7, max_sequence_length=6)
    plan = make_plan(model, [[(6, 1, 4)]])
    rank_pool.run(_save, plan, tmp_path / "weights.safetensors", torch.float32, world_size=6)
    saved = load_file(tmp_path / "weights.safetensors")
    assert saved["embedding.tokens.weight"].shape == (7, 12)
