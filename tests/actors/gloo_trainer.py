"""A trainer for tests of the actors: real process groups and collectives, no model.

A Fault makes one rank misbehave in one iteration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
import torch.distributed as dist

from actors.engine.checkpoint import SavedCheckpoint
from actors.engine.evaluation import Validation
from actors.engine.iteration import IterationReport
from actors.engine.trainer import TrainerConfig
from actors.storage import StoragePath
from actors.worker import MakeTrainer


@dataclass(frozen=True)
class Fault:
    rank: int
    iteration: int
    do: Callable[[], Any]


def spin() -> None:
    while True:
        time.sleep(0.1)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("out of memory: wanted 3.0 GiB, 1.0 GiB of 32.0 GiB free")


class GlooTrainer:
    """Sums the ranks' numbers once an iteration."""

    def __init__(self, config: TrainerConfig, rank: int, store: dist.Store, *, fault: Fault | None) -> None:
        self._rank, self._fault = rank, fault
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=config.plan.world_size,
            timeout=timedelta(seconds=config.timeout_seconds),
        )

    def run_iteration(self, iteration: int, checkpoint: StoragePath | None = None) -> IterationReport:
        if self._fault and (self._rank, iteration) == (self._fault.rank, self._fault.iteration):
            self._fault.do()
        total = torch.tensor([float(self._rank + iteration)])
        dist.all_reduce(total)
        now = time.monotonic()
        return IterationReport(
            iteration=iteration,
            loss=total.item(),
            gradient_norm=1.0,
            learning_rate=1.0,
            start_time=now,
            compute_end_time=now,
            sync_end_time=now,
            end_time=now,
            steps=1,
            late_steps=0,
            peak_tensor_bytes=0,
        )

    def evaluate(self, iteration: int) -> Validation:
        return Validation(iteration=iteration, loss=1.0, samples=1, tokens=1, seconds=0.0)

    def save_checkpoint(
        self, path: StoragePath, *, iteration: int, loss: float, validation_loss: float | None = None
    ) -> None:
        return None

    def finish_checkpoints(self) -> tuple[SavedCheckpoint, ...]:
        return ()

    def save_weights(self, path: Path) -> None:
        """Every rank says which Ray node it is on."""
        path.with_suffix(f".{self._rank}").write_text(ray.get_runtime_context().get_node_id())

    def close(self) -> None:
        dist.destroy_process_group()


def gloo_trainer(fault: Fault | None = None) -> MakeTrainer:
    """What a Worker makes its trainer by."""

    def make(config: TrainerConfig, rank: int, store: dist.Store) -> GlooTrainer:
        return GlooTrainer(config, rank, store, fault=fault)

    return make
