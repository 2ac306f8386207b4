"""A crash at any moment of saving leaves the last good checkpoint whole, and training goes on from it (law 8)."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from dataclasses import replace
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors.checkpoints import check_whole, checkpoint_path, checkpoints, incomplete, latest
from actors.engine.trainer import Trainer, TrainerConfig
from tests.engine.checkpoint_runs import run, whole_state
from tests.engine.law_plans import plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import training_of, write_tokens

KILLS = 20
STEPS = 10_000
PLAN = plan_of([(2, 1, 2), (1, 1, 2)], samples=[2])


def _train_and_save(rank: int, config: TrainerConfig, port: int, folder: Path, first: int) -> None:
    """Save after every iteration from `first` on, until killed."""
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    trainer = Trainer(config=config, rank=rank, store=store)
    for iteration in range(first, STEPS + 1):
        trainer.run_iteration(iteration, checkpoint_path(folder, iteration))


def _killed_while_saving(config: TrainerConfig, folder: Path, *, first: int, seconds: float) -> None:
    """Start the ranks with iteration `first`, and kill them so long after their first save."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["actors.engine.trainer"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[ForkServerProcess] = [
        context.Process(target=_train_and_save, args=(rank, config, store.port, folder, first), daemon=True)
        for rank in range(PLAN.world_size)
    ]
    for process in ranks:
        process.start()
    try:
        deadline = time.monotonic() + 120
        while not checkpoints(folder) and time.monotonic() < deadline:
            assert all(process.is_alive() for process in ranks)
            time.sleep(0.005)
        assert checkpoints(folder), "nothing was saved"
        time.sleep(seconds)
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.join()
            with contextlib.suppress(ValueError):
                process.close()


@pytest.mark.slow
def test_a_kill_at_any_moment_leaves_a_checkpoint_to_go_on_from(rank_pool: RankPool, tmp_path: Path) -> None:
    """Each start goes on from what the kill before it left. At the end of all, every loss, parameter and moment is to
    the bit that of a run that was never killed: sample, learning rate and optimizer state of each start were the
    right ones."""
    tokens = write_tokens(tmp_path)
    training = training_of(PLAN, steps=STEPS)
    config = TrainerConfig(plan=PLAN, training=training, tokens=tokens, timeout_seconds=60)
    draw = random.Random(0)
    unended, iteration = 0, 0
    losses: dict[int, float | None] = {}
    for number in range(KILLS):
        folder = tmp_path / f"saves{number}"
        _killed_while_saving(config, folder, first=iteration + 1, seconds=draw.uniform(0, 0.5))
        found = checkpoints(folder)
        assert 1 <= len(found) <= 3, "the newest two stay, and a third until they are whole"
        for checkpoint in found:
            check_whole(checkpoint)
            losses[checkpoint.iteration] = checkpoint.manifest.loss
        assert found[-1].iteration > iteration
        iteration = found[-1].iteration
        config = replace(config, resume_from=latest(folder).path)
        unended += len(incomplete(folder))
    # Saves follow each other without a pause, so nearly every kill meets one.
    assert unended >= KILLS // 4

    whole = run(
        rank_pool, PLAN, training, tokens, tmp_path / "whole", first=1, last=iteration, save_after=[iteration]
    )
    assert losses == {saved: whole.losses[saved - 1] for saved in losses}
    assert config.resume_from is not None
    left, unbroken = whole_state(config.resume_from, PLAN), whole_state(whole.saved[0].path, PLAN)
    assert any(tensor.any() for key, tensor in left.items() if "exp_avg_sq" in key)
    for key, tensor in unbroken.items():
        assert torch.equal(left[key], tensor), key
