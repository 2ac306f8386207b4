"""A crash at any moment of saving leaves the last good checkpoint whole (law 8)."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from datetime import timedelta
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from actors.checkpoints import check_whole, checkpoint_path, checkpoints, incomplete, latest
from actors.engine.checkpoint import load_slices
from actors.engine.state_slices import StateSlice
from actors.engine.trainer import Trainer, TrainerConfig
from actors.storage import StoragePath
from planner.parameters import model_parameters
from tests.engine.law_plans import plan_of
from tests.engine.rank_training import training_of, write_tokens

KILLS = 20
STEPS = 10_000
PLAN = plan_of([(2, 1, 2), (1, 1, 2)], samples=[2])


def _train_and_save(rank: int, config: TrainerConfig, port: int, folder: Path) -> None:
    """Save after every iteration, until killed."""
    torch.set_num_threads(1)
    store = dist.TCPStore(
        "127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60), wait_for_workers=False
    )
    trainer = Trainer(config=config, rank=rank, store=store)
    for iteration in range(1, STEPS + 1):
        trainer.run_iteration(iteration, checkpoint_path(folder, iteration))


def _whole(path: StoragePath) -> dict[str, torch.Tensor]:
    found = {f"model.{p.name}": torch.empty(p.shape) for p in model_parameters(PLAN.model)}
    load_slices(
        path,
        [StateSlice(key, tuple(t.shape), (0,) * t.dim(), t, owned=True) for key, t in found.items()],
    )
    return found


def _killed_while_saving(config: TrainerConfig, folder: Path, *, seconds: float) -> None:
    """Start the ranks, and kill them so long after their first save."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["actors.engine.trainer"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks: list[ForkServerProcess] = [
        context.Process(target=_train_and_save, args=(rank, config, store.port, folder), daemon=True)
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
def test_a_kill_at_any_moment_leaves_the_last_good_checkpoint(tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path)
    config = TrainerConfig(
        plan=PLAN, training=training_of(PLAN, steps=STEPS), tokens=tokens, timeout_seconds=60
    )
    draw = random.Random(0)
    unended = 0
    for number in range(KILLS):
        folder = tmp_path / f"saves{number}"
        _killed_while_saving(config, folder, seconds=draw.uniform(0, 0.5))
        found = checkpoints(folder)
        assert 1 <= len(found) <= 3, "the newest two stay, and a third until they are whole"
        for checkpoint in found:
            check_whole(checkpoint)
        assert all(bool(tensor.isfinite().all()) for tensor in _whole(latest(folder).path).values())
        unended += len(incomplete(folder))
    # Saves follow each other without a pause, so nearly every kill meets one.
    assert unended >= KILLS // 4
