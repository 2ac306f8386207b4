"""Worker: one actor per device. Its own thread runs the engine; another answers while that is busy."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import ray

from actors.coordinator import RankProcess, Rendezvous
from actors.failure import FailureKind, RankFailure, classify, rank_failure
from actors.network import bind_process_groups
from actors.storage import StoragePath
from planner.errors import UserError
from planner.plan import RankPlace

if TYPE_CHECKING:
    from torch.distributed import Store

    from actors.engine.checkpoint import SavedCheckpoint
    from actors.engine.evaluation import Validation
    from actors.engine.iteration import IterationReport
    from actors.engine.trainer import TrainerConfig

T = TypeVar("T")


class RankTrainer(Protocol):
    """What a worker needs of the engine's Trainer."""

    def run_iteration(self, iteration: int, checkpoint: StoragePath | None = None) -> IterationReport: ...
    def save_checkpoint(
        self, path: StoragePath, *, iteration: int, loss: float, validation_loss: float | None = None
    ) -> None: ...
    def finish_checkpoints(self) -> tuple[SavedCheckpoint, ...]: ...
    def evaluate(self, iteration: int) -> Validation: ...
    def save_weights(self, path: Path) -> None: ...
    def close(self) -> None: ...


MakeTrainer = Callable[["TrainerConfig", int, "Store"], RankTrainer]


def engine_trainer(config: TrainerConfig, rank: int, store: Store) -> RankTrainer:
    """The engine's Trainer for one rank; imports torch, so only workers call it."""
    import torch

    from actors.engine.trainer import Trainer

    # Ranks outnumber cores on a host that plays devices: one compute thread each, or they only contend.
    torch.set_num_threads(1)
    return Trainer(config=config, rank=rank, store=store)


class Worker:
    """Plays one rank. Work is answered with its result or a RankFailure, never with an exception.

    A rank is never restarted alone: its peers' process groups would not know it again.
    """

    def __init__(self, place: RankPlace, *, make_trainer: MakeTrainer) -> None:
        self._place = place
        self._make_trainer = make_trainer
        self._trainer: RankTrainer | None = None
        self._failure: RankFailure | None = None
        self._thread: int | None = None

    @ray.method(concurrency_group="control")
    def identify(self) -> RankProcess:
        """The process behind this rank."""
        return RankProcess(self._place.rank, os.getpid(), ray.util.get_node_ip_address())

    def start(self, config: TrainerConfig, rendezvous: Rendezvous) -> RankFailure | None:
        """Meet the other ranks, make the process groups and build this rank's part of the model."""

        def build() -> None:
            bind_process_groups(ray.util.get_node_ip_address())
            self._trainer = self._make_trainer(config, self._place.rank, rendezvous.store())

        return self._attempt(build)

    def run_iteration(
        self, iteration: int, checkpoint: StoragePath | None = None
    ) -> IterationReport | RankFailure:
        """One iteration, counted from 1, after which the state is saved as `checkpoint`. Calls queue up and run
        in the order they were made."""
        return self._attempt(lambda: self._started().run_iteration(iteration, checkpoint))

    def save_checkpoint(
        self, path: StoragePath, iteration: int, loss: float, validation_loss: float | None
    ) -> RankFailure | None:
        """Begin to save the state after the iteration that ended last."""
        return self._attempt(
            lambda: self._started().save_checkpoint(
                path, iteration=iteration, loss=loss, validation_loss=validation_loss
            )
        )

    def finish_checkpoints(self) -> tuple[SavedCheckpoint, ...] | RankFailure:
        """Wait for the save under way."""
        return self._attempt(lambda: self._started().finish_checkpoints())

    def evaluate(self, iteration: int) -> Validation | RankFailure:
        """The loss of held-out samples under the parameters as they are, which `iteration` left."""
        return self._attempt(lambda: self._started().evaluate(iteration))

    def save_weights(self, path: Path) -> RankFailure | None:
        """Take part in writing the whole model to one file on rank 0's host."""
        return self._attempt(lambda: self._started().save_weights(path))

    def close(self) -> RankFailure | None:
        """Leave the process groups."""
        return self._attempt(lambda: self._started().close())

    @ray.method(concurrency_group="control")
    def stack(self) -> str:
        """Where the working thread is right now; empty when it has no work."""
        frame = sys._current_frames().get(self._thread) if self._thread is not None else None
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def _started(self) -> RankTrainer:
        assert self._trainer is not None, "start() comes first"
        return self._trainer

    def _attempt(self, work: Callable[[], T]) -> T | RankFailure:
        # After a failure the groups are out of step; calls that were queued behind it must not run.
        if self._failure is not None:
            return self._failure
        self._thread = threading.get_ident()
        try:
            return work()
        except Exception as error:
            self._failure = self._describe(error)
            return self._failure
        finally:
            self._thread = None

    def _describe(self, error: Exception) -> RankFailure:
        kind = classify(error)
        message = " ".join(str(error).split())
        if not message or not isinstance(error, RuntimeError | UserError):
            # Such messages were not written for a reader without the name: "0", "'key'".
            message = f"{type(error).__name__}: {message}"
        verb = {
            FailureKind.TIMED_OUT: "timed out waiting for a peer",
            FailureKind.DISCONNECTED: "lost a peer",
        }.get(kind, "failed")
        return rank_failure(
            self._place, kind=kind, cause=f"{verb}: {message}", details=traceback.format_exc()
        )


# Ray's type stubs do not know concurrency groups.
_remote: Any = ray.remote
WorkerActor = _remote(max_restarts=0, max_task_retries=0, concurrency_groups={"control": 2})(Worker)
