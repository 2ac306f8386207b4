"""Training that is saved in the middle and goes on, maybe under another plan, on real ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actors.checkpoints import checkpoint_path
from actors.engine.checkpoint import SavedCheckpoint, load_slices
from actors.engine.iteration import IterationReport
from actors.engine.state_slices import StateSlice
from actors.engine.trainer import TrainerConfig
from actors.engine.weights import DTYPES
from actors.job import Training
from actors.storage import StoragePath
from planner.parameters import model_parameters
from planner.plan import Plan
from tests.engine.law_checks import assert_same_training, one_process
from tests.engine.law_plans import plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import (
    Part,
    assembled,
    held_parameters,
    make_trainer,
    training_of,
)
from tests.engine.reference import Tensors, Trained

HALF = 4
# fp16's loss scale doubles after so many finite iterations where a test makes some overflow.
GROWTH_INTERVAL = 3


def with_zero(plan: Plan, stage: int, scope: str = "all") -> Plan:
    """The same plan that shares optimizer state, or gradients as well."""
    fields = {"zero_stage": stage, "zero_scope": scope, "gradient_sync": "block"}
    return Plan.model_validate(plan.model_dump() | fields)


def in_precision(plan: Plan, precision: str) -> Plan:
    """The same plan in another precision of parameters."""
    return Plan.model_validate(
        plan.model_dump() | {"dtypes": plan.dtypes.model_dump() | {"param": precision}}
    )


UNLIKE = plan_of([(2, 1, 1), (1, 1, 3)], [(1, 2, 4)], samples=[3, 5])
STAGES = plan_of([(1, 1, 1), (1, 1, 2), (1, 1, 1)], samples=[8])
THIRDS = plan_of([(3, 1, 2), (1, 1, 2)], samples=[8])


@dataclass(frozen=True)
class RankRun:
    reports: list[IterationReport]
    saved: list[SavedCheckpoint]
    parameters: list[Part]


@dataclass(frozen=True)
class Run:
    """Iterations of a plan on real ranks."""

    losses: list[float]
    norms: list[float]
    scales: list[float]
    skipped: list[bool]
    saved: list[SavedCheckpoint]
    parameters: Tensors


def run_rank(
    rank: int,
    config: TrainerConfig,
    first: int,
    last: int,
    folder: StoragePath,
    save_after: tuple[int, ...],
    overflow_in: tuple[int, ...] = (),
) -> RankRun:
    """Iterations `first` to `last` of one rank; the last rank meets an infinity in those of `overflow_in`."""
    trainer = make_trainer(config, rank)
    if overflow_in:
        trainer._loss_scale.interval = GROWTH_INTERVAL
    reports = []
    for iteration in range(first, last + 1):
        bad = iteration in overflow_in and rank == config.plan.world_size - 1
        hook = trainer.handles[0].leaf.register_hook(lambda gradient: gradient * math.inf) if bad else None
        path = checkpoint_path(folder, iteration) if iteration in save_after else None
        reports.append(trainer.run_iteration(iteration, path))
        if hook is not None:
            hook.remove()
    saved = [save for report in reports for save in report.saved] + list(trainer.finish_checkpoints())
    parameters = held_parameters(trainer)
    trainer.close()
    return RankRun(reports, saved, parameters)


def run(
    pool: RankPool,
    plan: Plan,
    training: Training,
    tokens: Path,
    folder: StoragePath,
    *,
    first: int,
    last: int,
    save_after: Sequence[int] = (),
    resume_from: StoragePath | None = None,
    overflow_in: tuple[int, ...] = (),
) -> Run:
    """Iterations of a plan on real ranks."""
    config = TrainerConfig(
        plan=plan, training=training, tokens=tokens, timeout_seconds=30, resume_from=resume_from
    )
    ranks: list[RankRun] = pool.run(
        run_rank, config, first, last, folder, tuple(save_after), overflow_in, world_size=plan.world_size
    )
    whole = {parameter.name: parameter for parameter in model_parameters(plan.model)}
    assert not any(rank.saved for rank in ranks[1:]), "rank 0 alone tells"
    return Run(
        losses=[report.loss for report in ranks[0].reports],
        norms=[report.gradient_norm for report in ranks[0].reports],
        scales=[report.loss_scale for report in ranks[0].reports],
        skipped=[report.skipped for report in ranks[0].reports],
        saved=ranks[0].saved,
        parameters=assembled(whole, (part for rank in ranks for part in rank.parameters)),
    )


def broken_in_two(
    pool: RankPool,
    one: Plan,
    other: Plan,
    training: Training,
    tokens: Path,
    folder: Path,
    *,
    overflow_in: tuple[int, ...] = (),
) -> tuple[Run, Run]:
    """The first half of training under one plan, the second under another."""
    middle = training.steps // 2
    before = run(
        pool,
        one,
        training,
        tokens,
        folder,
        first=1,
        last=middle,
        save_after=[middle],
        overflow_in=overflow_in,
    )
    (saved,) = before.saved
    assert saved.error is None
    after = run(
        pool,
        other,
        training,
        tokens,
        folder,
        first=middle + 1,
        last=training.steps,
        resume_from=saved.path,
        overflow_in=overflow_in,
    )
    return before, after


def assert_as_unbroken(
    pool: RankPool, one: Plan, other: Plan, tokens: Path, folder: Path, **fields: Any
) -> None:
    """Law 1 over the break: two halves train as one process does in one go."""
    training = training_of(other, steps=2 * HALF, **fields)
    before, after = broken_in_two(pool, one, other, training, tokens, folder)
    expected = one_process(other, training, tokens)
    got = Trained(
        losses=before.losses + after.losses,
        norms=before.norms + after.norms,
        gradients=expected.gradients,
        parameters=after.parameters,
    )
    assert_same_training(got, expected, lambda: one_process(other, training, tokens, exact=True))


def whole_state(path: StoragePath, plan: Plan) -> Tensors:
    """Every tensor of a checkpoint, whole."""
    states = ["exp_avg", "exp_avg_sq"] + ([] if plan.dtypes.param == "fp32" else ["master"])
    found: Tensors = {}
    for parameter in model_parameters(plan.model):
        found[f"model.{parameter.name}"] = torch.empty(parameter.shape, dtype=DTYPES[plan.dtypes.param])
        for state in states:
            found[f"optimizer.{state}.{parameter.name}"] = torch.empty(parameter.shape)
    load_slices(
        path,
        [
            StateSlice(key, tuple(tensor.shape), (0,) * tensor.dim(), tensor, owned=True)
            for key, tensor in found.items()
        ],
    )
    return found
