"""Law 8 of docs/architecture.md: what one plan saves, any other goes on with."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from actors.engine.mixture import write_mixture
from actors.engine.tokens import TokenFile
from actors.engine.trainer import TrainerConfig
from actors.job import Optimizer
from actors.text.text import prepare_tokens
from planner.plan import Plan
from tests.engine.checkpoint_runs import (
    HALF,
    STAGES,
    THIRDS,
    UNLIKE,
    assert_as_unbroken,
    broken_in_two,
    in_precision,
    run,
    whole_state,
    with_zero,
)
from tests.engine.law_plans import plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import make_trainer, training_of, write_tokens
from tests.plans import make_llama


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(scope="module")
def mixture(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    (folder / "few.txt").write_text("Few words, that come again and again. " * 9)
    few = prepare_tokens(folder / "few.txt", cache_dir=folder)
    return write_mixture([(TokenFile(tokens), 2), (few, 1)], folder).path


LLAMA = [
    plan_of(*pipelines, model=make_llama(layers=4, kv_heads=6, max_sequence_length=16), samples=samples)
    for pipelines, samples in (
        ([[(2, 1, 2), (1, 1, 2)]], [8]),
        ([[(1, 1, 4)], [(3, 1, 1), (1, 1, 3)]], [4, 4]),
    )
]
# test_checkpoint_pairs.py has many more; the second reads a mixture of texts.
PAIRS: dict[str, tuple[Plan, Plan]] = {
    "shards to whole state": (with_zero(UNLIKE, 1), STAGES),
    "llama": (LLAMA[0], LLAMA[1]),
}


@pytest.mark.parametrize("name", PAIRS)
def test_another_plan_goes_on_as_if_unbroken(
    rank_pool: RankPool, tokens: Path, mixture: Path, tmp_path: Path, name: str
) -> None:
    text = mixture if name == "llama" else tokens
    assert_as_unbroken(rank_pool, *PAIRS[name], text, tmp_path)


@pytest.mark.slow
def test_momentum_is_kept(rank_pool: RankPool, tokens: Path, tmp_path: Path) -> None:
    assert_as_unbroken(
        rank_pool, UNLIKE, STAGES, tokens, tmp_path, optimizer=Optimizer(name="sgd", momentum=0.9)
    )


@pytest.mark.parametrize(
    ("precision", "zero_stage"),
    [
        ("fp32", 0),
        ("bf16", 1),
        *(
            pytest.param(precision, stage, marks=pytest.mark.slow)
            for precision, stage in (("fp32", 1), ("bf16", 0), ("bf16", 2), ("fp16", 0), ("fp16", 1))
        ),
    ],
)
def test_the_same_plan_goes_on_to_the_bit(
    rank_pool: RankPool, tokens: Path, tmp_path: Path, precision: str, zero_stage: int
) -> None:
    plan = in_precision(with_zero(UNLIKE, zero_stage), precision)
    training = training_of(plan, steps=2 * HALF)
    unbroken = run(rank_pool, plan, training, tokens, tmp_path, first=1, last=2 * HALF)
    before, after = broken_in_two(rank_pool, plan, plan, training, tokens, tmp_path)
    assert before.losses + after.losses == unbroken.losses
    for name, parameter in unbroken.parameters.items():
        assert torch.equal(after.parameters[name], parameter), name


def _resave_rank(rank: int, config: TrainerConfig, path: Path) -> None:
    trainer = make_trainer(config, rank)
    trainer.save_checkpoint(path, iteration=HALF, loss=0.0)
    trainer.finish_checkpoints()
    trainer.close()


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "bf16"])
@pytest.mark.parametrize(
    ("one", "other"),
    [
        (with_zero(UNLIKE, 1), THIRDS),
        (THIRDS, with_zero(UNLIKE, 1)),
        (STAGES, UNLIKE),
        (with_zero(LLAMA[0], 1), LLAMA[1]),
        (with_zero(UNLIKE, 2, "pipeline"), with_zero(UNLIKE, 2)),
    ],
    ids=["shards to whole", "whole to shards", "other stages", "llama", "shared gradients"],
)
def test_no_bit_is_lost_from_plan_to_plan(
    rank_pool: RankPool, tokens: Path, tmp_path: Path, one: Plan, other: Plan, precision: str
) -> None:
    one, other = in_precision(one, precision), in_precision(other, precision)
    training = training_of(one, steps=2 * HALF)
    (saved,) = run(rank_pool, one, training, tokens, tmp_path, first=1, last=2, save_after=[2]).saved
    config = TrainerConfig(
        plan=other, training=training, tokens=tokens, timeout_seconds=30, resume_from=saved.path
    )
    rank_pool.run(_resave_rank, config, tmp_path / "again", world_size=other.world_size)
    again = whole_state(tmp_path / "again", other)
    for key, tensor in whole_state(saved.path, one).items():
        assert torch.equal(again[key], tensor), key
    assert any(tensor.any() for key, tensor in again.items() if "exp_avg" in key)
