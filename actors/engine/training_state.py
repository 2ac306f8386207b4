"""What a rank must keep to go on later: parameters, optimizer state, progress; saved and loaded under any plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime

import torch
import torch.distributed as dist

from actors.checkpoints import DataIdentity, Manifest, Progress, check_continues, plan_line, read_manifest
from actors.engine.checkpoint import CheckpointWriter, SavedCheckpoint, load_slices
from actors.engine.gradient_buffer import HeldParameter
from actors.engine.loss_scale import LossScale
from actors.engine.optimizer import Optimizer
from actors.engine.sharded_optimizer import ShardedOptimizer
from actors.engine.state_slices import (
    StateSlice,
    owned_parameters,
    parameter_slices,
    piece_slices,
    shard_slices,
)
from actors.job import Training
from actors.storage import StoragePath
from planner.plan import Plan


class TrainingState:
    """One rank's part of the state of a training run.

    `updates` counts the iterations that changed parameters; whoever trains keeps it. Samples, the learning rate and
    dropout depend on the seed and the iteration alone, so that the iteration is all that there is to keep of them.
    """

    def __init__(
        self,
        *,
        plan: Plan,
        rank: int,
        training: Training,
        data: DataIdentity,
        handles: Sequence[HeldParameter],
        optimizer: Optimizer | ShardedOptimizer,
        loss_scale: LossScale,
        group: dist.ProcessGroup,
        keep: int,
        keep_best: int,
    ) -> None:
        self._plan, self._rank = plan, rank
        self._training, self._data = training, data
        self._handles, self._optimizer, self._loss_scale = handles, optimizer, loss_scale
        self._writer = CheckpointWriter(rank=rank, group=group, keep=keep, keep_best=keep_best)
        self.updates = 0

    def save(
        self, path: StoragePath, *, iteration: int, loss: float, validation_loss: float | None = None
    ) -> None:
        """Begin to save the state after an iteration, on every rank; `poll` tells when it is whole."""
        manifest = Manifest(
            progress=Progress(
                iteration=iteration,
                updates=self.updates,
                loss_scale=self._loss_scale.value,
                finite_iterations=self._loss_scale.finite,
            ),
            model=self._plan.model,
            training=self._training,
            data=self._data,
            plan=plan_line(self._plan),
            loss=_finite(loss),
            validation_loss=None if validation_loss is None else _finite(validation_loss),
            evaluated=validation_loss is not None,
            written=datetime.now().astimezone().isoformat(timespec="seconds"),
            torch=torch.__version__,
        )
        self._writer.begin(path, self._slices(), manifest)

    def before_update(self) -> None:
        """To be called before anything changes parameters or optimizer state: a save may be reading them."""
        self._writer.before_update()

    def poll(self) -> tuple[SavedCheckpoint, ...]:
        """The saves that have ended since the last call, on rank 0."""
        return self._writer.poll()

    def finish(self) -> tuple[SavedCheckpoint, ...]:
        """Wait for the save under way, then as `poll`."""
        return self._writer.finish()

    def load(self, path: StoragePath) -> int:
        """Take over a checkpoint's state; the iteration after which it was saved. UserError if it is of another
        training, or cannot be read."""
        manifest = read_manifest(path)
        check_continues(
            manifest, model=self._plan.model, training=self._training, data=self._data, source=path
        )
        self.before_update()
        load_slices(path, self._slices())
        progress = manifest.progress
        self.updates = progress.updates
        self._loss_scale.restore(progress.loss_scale, finite=progress.finite_iterations)
        for state in self._optimizer.states():
            state.step.fill_(float(progress.updates))
        return progress.iteration

    def _slices(self) -> list[StateSlice]:
        owned = owned_parameters(self._plan, self._rank)
        slices = list(parameter_slices(self._handles, owned))
        if isinstance(self._optimizer, ShardedOptimizer):
            return slices + list(shard_slices(self._plan, self._optimizer.states()))
        return slices + list(piece_slices(self._plan, self._optimizer.states(), owned))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
