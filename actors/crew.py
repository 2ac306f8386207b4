"""Crew: all the actors of one job, driven in lock-step; finds out whom to blame when one fails."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import ray
from ray.actor import ActorHandle
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from actors.coordinator import CoordinatorActor, RankProcess
from actors.failure import FailureKind, RankFailure, TrainingFailed, rank_failure, root_cause
from actors.inventory import NodeDevices
from actors.pipeline import Outcome, PipelineActor
from actors.placement import bundles, release, reserve
from actors.processes import end_processes
from actors.storage import StoragePath
from actors.worker import MakeTrainer
from planner.errors import UserError
from planner.plan import Plan

if TYPE_CHECKING:
    from actors.engine.checkpoint import SavedCheckpoint
    from actors.engine.evaluation import Validation
    from actors.engine.trainer import TrainerConfig

PLACEMENT_SECONDS = 60.0
# Workers import torch one after another on a small host; this bounds a start that will never end.
_UP_SECONDS = 300.0
# The driver waits a little longer than a pipeline does, to hear what all of them saw. Once a rank has timed out it
# need not wait for those that only lost a peer: whoever is silent by then is found by asking.
_GRACE_SECONDS = {
    FailureKind.DIED: 0.5,
    FailureKind.ERROR: 0.5,
    FailureKind.HUNG: 3.5,
    FailureKind.TIMED_OUT: 3.5,
    FailureKind.DISCONNECTED: 13.0,
}
_CONTROL_SECONDS = 6.0
_COORDINATOR_GRACE_SECONDS = 1.0
_COORDINATOR_DIED = (
    "the coordinator's process ended unexpectedly: it was killed, crashed or ran its host out of memory;"
    " without its store the ranks cannot meet"
)
_EXIT_SECONDS = 4.0

Pending = Mapping[Any, int]
"""Calls that are out: reference -> pipeline."""


class Crew:
    """Placement groups, coordinator, pipelines and their workers. Use it as a context manager.

    Every method that waits for ranks raises TrainingFailed, which names the rank to blame and the cause.
    """

    def __init__(self, plan: Plan, *, bound: Mapping[str, NodeDevices], make_trainer: MakeTrainer) -> None:
        self._plan = plan
        self._processes: list[RankProcess] = []
        self._actor_processes: list[tuple[str, int]] = []
        listed = bundles(plan, bound)
        self._groups = reserve(listed, timeout_seconds=PLACEMENT_SECONDS)
        self._coordinator = CoordinatorActor.remote()
        self._coordinator_end = self._coordinator.watch.remote()
        self._pipelines: list[ActorHandle] = [
            PipelineActor.remote(
                [place for place in plan.ranks if place.pipeline == index],
                listed[index],
                group=group,
                make_trainer=make_trainer,
            )
            for index, group in enumerate(self._groups)
        ]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    @property
    def processes(self) -> list[RankProcess]:
        """The process of every rank, in rank order; known once `start` has returned."""
        return list(self._processes)

    def start(self, config: TrainerConfig) -> None:
        """Bring every process up, let the ranks meet and build the engine."""
        up = self.collect(self._everywhere(lambda p: p.identify.remote()), patience_seconds=_UP_SECONDS)
        self._processes = [up[rank] for rank in sorted(up)]
        self._actor_processes = ray.get([pipeline.process.remote() for pipeline in self._pipelines])
        _refuse_loopback({process.host for process in self._processes})
        rendezvous = ray.get(self._coordinator.next_generation.remote(timeout_seconds=config.timeout_seconds))
        ray.get(self._coordinator.register.remote(self._processes))
        self.collect(
            self._everywhere(lambda p: p.start.remote(config, rendezvous)), patience_seconds=_UP_SECONDS
        )

    def submit(self, iteration: int, *, first: int = 1, checkpoint: StoragePath | None = None) -> Pending:
        """Ask for an iteration; the workers begin it as soon as they have ended the one before.

        `first` is the run's first. The state after it is saved as `checkpoint`, while training goes on.
        """
        return self._everywhere(lambda p: p.run_iteration.remote(iteration, first, checkpoint))

    def save_checkpoint(
        self,
        path: StoragePath,
        *,
        iteration: int,
        loss: float,
        validation_loss: float | None,
        patience_seconds: float,
    ) -> None:
        """Begin to save the state after an iteration, the last that was submitted and collected."""
        self.collect(
            self._everywhere(lambda p: p.save_checkpoint.remote(path, iteration, loss, validation_loss)),
            patience_seconds=patience_seconds,
        )

    def finish_checkpoints(self, *, patience_seconds: float) -> tuple[SavedCheckpoint, ...]:
        """Wait for the save under way; what became of it."""
        saved = self.collect(
            self._everywhere(lambda p: p.finish_checkpoints.remote()), patience_seconds=patience_seconds
        )
        return tuple(saved[0])

    def evaluate(self, iteration: int, *, patience_seconds: float) -> Validation:
        """The loss of held-out samples, as rank 0 tells it."""
        found = self.collect(
            self._everywhere(lambda p: p.evaluate.remote(iteration)), patience_seconds=patience_seconds
        )
        validation: Validation = found[0]
        return validation

    def save_weights(self, path: Path, *, patience_seconds: float) -> None:
        self.collect(
            self._everywhere(lambda p: p.save_weights.remote(path)), patience_seconds=patience_seconds
        )

    def close(self, *, patience_seconds: float) -> None:
        """Let the ranks leave their process groups in order."""
        self.collect(self._everywhere(lambda p: p.close.remote()), patience_seconds=patience_seconds)

    def collect(self, pending: Pending, *, patience_seconds: float) -> dict[int, Any]:
        """The results of a call by rank, once all ranks have answered."""
        waiting = dict(pending)
        results: dict[int, Any] = {}
        failures: list[RankFailure] = []
        deadline = time.monotonic() + patience_seconds
        late = coordinator_died = False
        while waiting and not late:
            watched = [*waiting] if coordinator_died else [self._coordinator_end, *waiting]
            ready, _ = ray.wait(watched, timeout=max(0.0, deadline - time.monotonic()))
            late = not ready
            if self._coordinator_end in ready:
                coordinator_died = True
                ready.remove(self._coordinator_end)
                # The ranks may have died with it, as on a lost node; they are then named.
                deadline = min(deadline, time.monotonic() + _COORDINATOR_GRACE_SECONDS)
            for reference in ready:
                outcome = self._outcome(reference, pipeline=waiting.pop(reference))
                results |= outcome.results
                failures += outcome.failures
            if failures:
                grace = _GRACE_SECONDS[root_cause(failures).kind]
                deadline = min(deadline, time.monotonic() + grace)
        if coordinator_died and not any(failure.kind <= FailureKind.ERROR for failure in failures):
            raise TrainingFailed(_COORDINATOR_DIED)
        if failures or late:
            raise self._diagnose(failures, patience_seconds=patience_seconds)
        return results

    def end(self) -> None:
        """End every process of the job and give the devices back, whatever state they are in."""
        # On a thread: a Ray that is ending itself, as an embedded one does when SIGTERM goes to the whole
        # process group, holds these calls for a minute and then aborts this process.
        giving_back = threading.Thread(target=self._give_back, daemon=True)
        giving_back.start()
        giving_back.join(_CONTROL_SECONDS)
        here = ray.util.get_node_ip_address()
        ranks = [(process.host, process.pid) for process in self._processes]
        ours = [pid for host, pid in (*ranks, *self._actor_processes) if host == here]
        end_processes(ours, patience_seconds=_EXIT_SECONDS)

    def _give_back(self) -> None:
        # What a Ray that has ended had set aside has ended with it.
        with contextlib.suppress(RayError):
            release(self._groups)
            for actor in (self._coordinator, *self._pipelines):
                ray.kill(actor)

    def _everywhere(self, call: Callable[[ActorHandle], Any]) -> dict[Any, int]:
        return {call(pipeline): index for index, pipeline in enumerate(self._pipelines)}

    def _outcome(self, reference: Any, *, pipeline: int) -> Outcome:
        try:
            outcome: Outcome = ray.get(reference)
            return outcome
        except RayActorError as error:
            cause = "was lost: the actor of its pipeline died"
            return Outcome(failures=[self._of_pipeline(pipeline, FailureKind.DIED, cause, str(error))])

    def _of_pipeline(self, pipeline: int, kind: FailureKind, cause: str, details: str = "") -> RankFailure:
        """The failure of a pipeline's actor, told of its first rank."""
        place = next(place for place in self._plan.ranks if place.pipeline == pipeline)
        return rank_failure(place, kind=kind, cause=cause, details=details)

    def _diagnose(self, failures: list[RankFailure], *, patience_seconds: float) -> TrainingFailed:
        if not failures or root_cause(failures).kind is FailureKind.TIMED_OUT:
            heard = {failure.rank for failure in failures}
            failures = failures + [failure for failure in self._suspects() if failure.rank not in heard]
        if not failures:
            return TrainingFailed(
                f"no rank answered within {patience_seconds:.0f} s; all wait for each other"
            )
        blamed = root_cause(failures)
        if len(failures) == self._plan.world_size > 1 and len({failure.cause for failure in failures}) == 1:
            # A decision that all ranks took together, such as that the loss is no number.
            return TrainingFailed(f"every rank {blamed.cause}", details=blamed.details)
        others = len({failure.rank for failure in failures} - {blamed.rank})
        seen = f" ({others} other ranks failed after it)" if others > 1 else ""
        # A stopped process has no stack to show; what its peers saw then says where the run stood.
        witnesses = (f"{failure}\n{failure.details}" for failure in failures if failure is not blamed)
        return TrainingFailed(f"{blamed}{seen}", details=blamed.details or "\n".join(witnesses))

    def _suspects(self) -> list[RankFailure]:
        found: list[RankFailure] = []
        deadline = time.monotonic() + _CONTROL_SECONDS
        for asked, pipeline in self._everywhere(lambda p: p.suspects.remote()).items():
            try:
                found += ray.get(asked, timeout=max(0.0, deadline - time.monotonic()))
            except GetTimeoutError:
                cause = "was not heard of: the actor of its pipeline does not answer"
                found.append(self._of_pipeline(pipeline, FailureKind.HUNG, cause))
            except RayActorError:
                pass
        return found


def _refuse_loopback(hosts: set[str]) -> None:
    """Process groups bind to the address that Ray knows a node by; others cannot reach a loopback one."""
    local = [host for host in hosts if host.startswith("127.")]
    if len(hosts) > 1 and local:
        raise UserError(
            f"Ray node {local[0]} is known by a loopback address, which other nodes cannot reach;"
            " start it with --node-ip-address"
        )
