"""Storage that fails while the state is saved: training goes on, and the last good checkpoint stays (law 8)."""

from __future__ import annotations

import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import _StoragePrefix

from actors.checkpoints import check_whole, checkpoint_path, checkpoints, incomplete
from actors.engine.checkpoint import SavedCheckpoint, _SliceSavePlanner
from actors.engine.checkpoint_files import CheckpointFileWriter, _Summing
from actors.engine.late_copy import LateCopies
from actors.engine.state_slices import StateSlice
from actors.engine.trainer import TrainerConfig
from actors.storage import RemotePath, StoragePath
from tests.engine.law_plans import plan_of
from tests.engine.rank_pool import RankPool
from tests.engine.rank_training import make_trainer, training_of, write_tokens
from tests.object_storage import Outage, ask
from tests.small_disk import empty, fill, free_bytes, small_disk

PLAN = plan_of([(2, 1, 2), (1, 1, 2)], samples=[2])
STEPS = 4
BAD = 2
"""The iteration whose save fails."""
# Of no other test: a process keeps its connection to a bucket.
FAR = RemotePath("s3://failing/saves")


def _train(rank: int, config: TrainerConfig, folder: StoragePath, disk: Path) -> list[SavedCheckpoint]:
    """Save after every iteration, one at a time; rank 0 fills the disk for one of them, but for a part of its bytes."""
    trainer = make_trainer(config, rank)
    saved: list[SavedCheckpoint] = []
    for iteration in range(1, STEPS + 1):
        if rank == 0 and iteration == BAD:
            fill(disk, leave=saved[0].bytes // 2)
        # The world meets in an iteration before any rank saves.
        report = trainer.run_iteration(iteration, checkpoint_path(folder, iteration))
        assert report.iteration == iteration
        saved += [*report.saved, *trainer.finish_checkpoints()]
        if rank == 0 and iteration == BAD:
            empty(disk)
    trainer.close()
    return saved


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("tokens"))


def config_of(tokens: Path, *, keep: int) -> TrainerConfig:
    return TrainerConfig(
        plan=PLAN,
        training=training_of(PLAN, steps=STEPS),
        tokens=tokens,
        timeout_seconds=30,
        keep_checkpoints=keep,
    )


def test_a_full_disk_fails_the_save_alone(rank_pool: RankPool, tokens: Path, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", size=16 << 20) as disk:
        before = free_bytes(disk)
        ranks = rank_pool.run(
            _train, config_of(tokens, keep=STEPS), disk / "saves", disk, world_size=PLAN.world_size
        )
        assert [saved.iteration for saved in ranks[0]] == list(range(1, STEPS + 1))
        failed = [saved for saved in ranks[0] if saved.error is not None]
        assert [saved.iteration for saved in failed] == [BAD]
        assert "No space left on device" in str(failed[0].error)
        found = checkpoints(disk / "saves")
        assert [one.iteration for one in found] == [1, 3, 4] and not incomplete(disk / "saves")
        for checkpoint in found:
            check_whole(checkpoint)
        # What was half written takes no room.
        assert before - free_bytes(disk) < 1.2 * sum(saved.bytes for saved in ranks[0]) + (1 << 20)


@pytest.mark.parametrize("room", [0, 100, 700, 100_000, 600_000, 800_800])
def test_a_full_disk_is_told_wherever_in_a_file_it_is_met(tmp_path: Path, room: int) -> None:
    tensor = torch.ones(200_000)
    copies = LateCopies([StateSlice("model.large", (200_000,), (0,), tensor, owned=True)], {})
    write, taken = _Summing.write, 0

    def to_small_disk(self: _Summing, data: memoryview) -> int:
        nonlocal taken
        taken += len(data)
        if taken > room:
            raise OSError(28, "No space left on device")
        return write(self, data)

    plan = dataclasses.replace(
        _SliceSavePlanner(copies.slices).create_local_plan(), storage_data=_StoragePrefix("__0_")
    )
    writer = CheckpointFileWriter(tmp_path, copies)
    # On a thread, whose priority it lowers.
    with patch.object(_Summing, "write", to_small_disk), ThreadPoolExecutor(1) as thread:
        written = thread.submit(writer.write_data, plan, DefaultSavePlanner())
        with pytest.raises(OSError, match="No space left"):
            written.result()


def _train_through_outage(
    rank: int, config: TrainerConfig, environment: dict[str, str], desk: Path
) -> list[SavedCheckpoint]:
    """As above in an object store, whose server is stopped in the middle of one file."""
    trainer = make_trainer(config, rank)
    saved: list[SavedCheckpoint] = []
    write = _Summing.write

    def cut_off(self: _Summing, data: object) -> int:
        if not (desk / "stopped").exists():
            ask(desk, "stop", "stopped")
        return write(self, data)

    with patch.dict(os.environ, environment):
        for iteration in range(1, STEPS + 1):
            cut = patch.object(_Summing, "write", cut_off) if (rank, iteration) == (0, BAD) else nullcontext()
            with cut:
                trainer.run_iteration(iteration, checkpoint_path(FAR, iteration))
                # Training goes on meanwhile: it needs none of what is cut off.
                trainer.compute_gradients(iteration)
                saved += trainer.finish_checkpoints()
            if (rank, iteration) == (0, BAD):
                ask(desk, "start", "started")
    trainer.close()
    return saved


@pytest.mark.slow
def test_an_object_store_that_is_lost_fails_the_save_alone(
    rank_pool: RankPool, tokens: Path, tmp_path: Path
) -> None:
    with Outage(tmp_path, bucket="failing") as outage:
        ranks = rank_pool.run(
            _train_through_outage,
            config_of(tokens, keep=STEPS),
            outage.storage.environment,
            tmp_path,
            world_size=PLAN.world_size,
        )
        failed = [saved for saved in ranks[0] if saved.error is not None]
        assert [saved.iteration for saved in failed] == [BAD]
        with patch.dict(os.environ, outage.storage.environment):
            found = checkpoints(FAR)
            assert [one.iteration for one in found] == [1, 3, 4]
            for checkpoint in found:
                check_whole(checkpoint)
