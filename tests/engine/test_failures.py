"""A rank that fails must not leave its peers waiting."""

from __future__ import annotations

import math
import os
import pickle
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from actors.engine.errors import DeviceOutOfMemory, out_of_memory
from actors.engine.loss_scale import LossScale
from actors.engine.trainer import Trainer, TrainerConfig
from planner.plan import Plan
from tests.engine.law_plans import plan_of
from tests.engine.rank_pool import RankError, RankPool
from tests.engine.rank_training import make_trainer, training_of, write_tokens

TIMEOUT_SECONDS = 30.0
VICTIM = 1

# The victim is a neighbour stage of one rank and a holder of gradients with the others.
PLAN = plan_of([(1, 1, 2), (1, 1, 2)], [(2, 1, 4)], samples=[3, 3])

# The victim is one of the replicas that scatter in backward; the other pipeline waits at the end.
SHARED = plan_of([(1, 2, 4)], [(1, 1, 4)], samples=[4, 2], zero_stage=2)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> TrainerConfig:
    return TrainerConfig(
        plan=PLAN,
        training=training_of(PLAN, steps=3),
        tokens=write_tokens(tmp_path_factory.mktemp("tokens")),
        timeout_seconds=TIMEOUT_SECONDS,
    )


def _error(trainer: Trainer) -> str:
    try:
        trainer.run_iteration(2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    raise AssertionError("the iteration went through")


def _raise_on_victim(rank: int, config: TrainerConfig) -> str:
    trainer = make_trainer(config, rank)
    trainer.run_iteration(1)
    if rank == VICTIM:
        layer = next(iter(trainer._model.layers.values()))
        layer.register_forward_hook(_broken)
    return _error(trainer)


def _broken(*_: object) -> None:
    raise ArithmeticError("this device is broken")


def _die_on_victim(rank: int, config: TrainerConfig, folder: Path) -> None:
    trainer = make_trainer(config, rank)
    trainer.run_iteration(1)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    (folder / f"{rank}.txt").write_text(_error(trainer))


@pytest.mark.parametrize("plan", [PLAN, SHARED], ids=["neighbours", "replicas that share gradients"])
def test_an_error_of_one_rank_reaches_all_within_the_timeout(
    rank_pool: RankPool, config: TrainerConfig, plan: Plan
) -> None:
    own = replace(config, plan=plan, training=training_of(plan, steps=3))
    errors = rank_pool.run(_raise_on_victim, own, world_size=plan.world_size)
    assert errors[VICTIM] == "ArithmeticError: this device is broken"
    for rank in set(range(plan.world_size)) - {VICTIM}:
        # Cut off by the victim, not timed out: its process is still there.
        assert "onnection closed" in errors[rank], errors[rank]


def _poison_one(rank: int, config: TrainerConfig) -> str:
    trainer = make_trainer(config, rank)
    trainer.run_iteration(1)
    if rank == VICTIM:
        trainer.handles[0].local.fill_(float("nan"))
    before = [handle.local.clone() for handle in trainer.handles]
    error = _error(trainer)
    unchanged = [torch.equal(a, h.local) for a, h in zip(before, trainer.handles, strict=True)]
    assert rank == VICTIM or all(unchanged), "an update was made"
    return error


def test_a_loss_that_is_no_number_stops_every_rank_before_any_update(
    rank_pool: RankPool, config: TrainerConfig
) -> None:
    errors = rank_pool.run(_poison_one, config, world_size=PLAN.world_size)
    assert len(set(errors)) == 1, errors
    assert errors[0].startswith("NonFiniteLoss: iteration 2: the loss of pipeline 0 is not finite; lower")


@dataclass(frozen=True)
class Went:
    """One iteration with a bad gradient between two good ones, as one rank saw it."""

    skipped: list[bool]
    scales: list[float]
    norms: list[float]
    changed: list[bool]


def _overflow_once(rank: int, config: TrainerConfig) -> Went:
    """An infinity arrives in one element of one rank's gradient, in the second iteration."""
    trainer = make_trainer(config, rank)
    went = Went([], [], [], [])
    for iteration in (1, 2, 3):
        if rank == VICTIM and iteration == 2:
            leaf = trainer.handles[0].leaf
            hook = leaf.register_hook(lambda gradient: gradient * math.inf)
        before = [handle.local.clone() for handle in trainer.handles]
        report = trainer.run_iteration(iteration)
        if rank == VICTIM and iteration == 2:
            hook.remove()
        went.skipped.append(report.skipped)
        went.scales.append(report.loss_scale)
        went.norms.append(report.gradient_norm)
        went.changed.append(
            any(not torch.equal(a, h.local) for a, h in zip(before, trainer.handles, strict=True))
        )
    trainer.close()
    return went


def test_a_bad_gradient_is_skipped_by_all_where_the_job_says_so(
    rank_pool: RankPool, config: TrainerConfig
) -> None:
    for went in rank_pool.run(_overflow_once, replace(config, on_nan="skip"), world_size=PLAN.world_size):
        assert went.skipped == [False, True, False] and went.changed == [True, False, True]
        assert not math.isfinite(went.norms[1]) and math.isfinite(went.norms[2])


def test_a_job_that_goes_on_updates_with_it(rank_pool: RankPool, config: TrainerConfig) -> None:
    for went in rank_pool.run(_overflow_once, replace(config, on_nan="continue"), world_size=PLAN.world_size):
        assert went.skipped == [False] * 3 and went.changed[1]


def test_an_overflow_in_fp16_halves_the_loss_scale_and_does_not_stop(
    rank_pool: RankPool, config: TrainerConfig
) -> None:
    plan = Plan.model_validate(PLAN.model_dump() | {"dtypes": {"param": "fp16"}})
    half = replace(config, plan=plan, training=training_of(plan, steps=3), on_nan="stop")
    for went in rank_pool.run(_overflow_once, half, world_size=plan.world_size):
        assert went.skipped == [False, True, False] and went.changed == [True, False, True]
        assert went.scales == [2.0**16, 2.0**16, 2.0**15]


def test_a_loss_scale_grows_back_and_never_falls_below_one() -> None:
    scale = LossScale(4.0, dynamic=True, interval=3)
    for finite in (False, True, True, True):
        scale.saw(finite=finite)
    assert scale.value == 4.0
    for _ in range(9):
        scale.saw(finite=False)
    assert scale.value == 1.0 and scale.exhausted
    fixed = LossScale.of("bf16")
    fixed.saw(finite=False)
    assert fixed.value == 1.0


def test_an_error_of_a_rank_survives_the_way_to_another_process() -> None:
    error = out_of_memory(place=PLAN.ranks[1], device_type="910B4", wanted="3.0 GiB", limit_bytes=2**31)
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.place) == (DeviceOutOfMemory, str(error), PLAN.ranks[1])


def test_a_plan_for_what_the_runtime_lacks_is_refused_before_any_rank_is_met(config: TrainerConfig) -> None:
    data = PLAN.model_dump()
    data["dtypes"]["grad"] = "bf16"
    refused = TrainerConfig(
        plan=Plan.model_validate(data),
        training=config.training,
        tokens=config.tokens,
        timeout_seconds=TIMEOUT_SECONDS,
    )
    with pytest.raises(ValueError, match=r"dtypes.grad = 'bf16' .* use 'fp32'"):
        # No store: nothing may be asked of it.
        Trainer(config=refused, rank=0, store=None)  # type: ignore[arg-type]


# Last: it costs the pool its processes.
def test_a_death_of_one_rank_reaches_all_within_the_timeout(
    rank_pool: RankPool, config: TrainerConfig, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match="died with exit code -9"):
        rank_pool.run(_die_on_victim, config, tmp_path, world_size=PLAN.world_size)
    witnesses = sorted(path.stem for path in tmp_path.iterdir())
    assert witnesses == [str(rank) for rank in range(PLAN.world_size) if rank != VICTIM]
