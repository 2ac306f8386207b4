"""Pipeline: the actor group of one pipeline: its workers, its progress and what befell it."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from actors.coordinator import RankProcess, Rendezvous
from actors.failure import FailureKind, RankFailure, rank_failure, root_cause
from actors.placement import Bundle
from actors.storage import StoragePath
from actors.worker import MakeTrainer, WorkerActor
from planner.plan import RankPlace

if TYPE_CHECKING:
    from actors.engine.trainer import TrainerConfig

# How long the other ranks may take to tell what they saw, once one of them has failed in some way. A lost
# connection says least: Ray may need seconds to learn that the process behind it has ended.
_GRACE_SECONDS = {
    FailureKind.DIED: 0.5,
    FailureKind.ERROR: 0.5,
    FailureKind.HUNG: 3.0,
    FailureKind.TIMED_OUT: 3.0,
    FailureKind.DISCONNECTED: 10.0,
}
# A worker that is busy still answers on its control thread; one that does not is stopped or gone.
_CONTROL_SECONDS = 2.0


@dataclass
class Outcome:
    """What came of one call to every rank of a pipeline: `results` by rank, failures, and who was silent."""

    results: dict[int, Any] = field(default_factory=dict)
    failures: list[RankFailure] = field(default_factory=list)
    silent: list[int] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.failures and not self.silent


class Pipeline:
    """Owns the pipeline's workers: they end when it ends, and it ends with the driver.

    An asynchronous actor: calls run beside each other, and each reaches the workers in the order made.
    """

    def __init__(
        self,
        places: Sequence[RankPlace],
        bundles: Sequence[Bundle],
        *,
        group: PlacementGroup,
        make_trainer: MakeTrainer,
    ) -> None:
        self._places = {place.rank: place for place in places}
        self._turn = asyncio.Condition()
        self._ended: int | None = None
        self._processes: dict[int, RankProcess] = {}
        self._owed: Counter[int] = Counter()
        self._failures: list[RankFailure] = []
        self._workers: dict[int, ActorHandle] = {
            place.rank: _create_worker(place, bundle, group=group, index=index, make_trainer=make_trainer)
            for index, (place, bundle) in enumerate(zip(places, bundles, strict=True))
        }

    async def process(self) -> tuple[str, int]:
        """The host and id of this actor's own process."""
        return ray.util.get_node_ip_address(), os.getpid()

    async def identify(self) -> Outcome:
        """The process of every rank, once it is up."""
        outcome = await self._everywhere(lambda worker: worker.identify.remote())
        self._processes = dict(outcome.results)
        return outcome

    async def start(self, config: TrainerConfig, rendezvous: Rendezvous) -> Outcome:
        """Build the engine on every rank."""
        return await self._everywhere(lambda worker: worker.start.remote(config, rendezvous))

    async def run_iteration(self, iteration: int, first: int, checkpoint: StoragePath | None) -> Outcome:
        """One iteration on every rank; results are IterationReports. `first` is the run's first iteration.

        Ray may start calls of an asynchronous actor out of order, so each waits for the iteration before it.
        """
        async with self._turn:
            await self._turn.wait_for(
                lambda: iteration == (first if self._ended is None else self._ended + 1)
            )
            try:
                return await self._everywhere(
                    lambda worker: worker.run_iteration.remote(iteration, checkpoint)
                )
            finally:
                self._ended = iteration
                self._turn.notify_all()

    async def save_checkpoint(
        self, path: StoragePath, iteration: int, loss: float, validation_loss: float | None
    ) -> Outcome:
        return await self._everywhere(
            lambda worker: worker.save_checkpoint.remote(path, iteration, loss, validation_loss)
        )

    async def finish_checkpoints(self) -> Outcome:
        return await self._everywhere(lambda worker: worker.finish_checkpoints.remote())

    async def evaluate(self, iteration: int) -> Outcome:
        return await self._everywhere(lambda worker: worker.evaluate.remote(iteration))

    async def save_weights(self, path: Path) -> Outcome:
        return await self._everywhere(lambda worker: worker.save_weights.remote(path))

    async def close(self) -> Outcome:
        return await self._everywhere(lambda worker: worker.close.remote())

    async def suspects(self) -> list[RankFailure]:
        """What has failed so far, and the ranks that owe an answer and are not merely waiting for another rank,
        with their stacks. Answers at once, also while a call still waits for what other ranks saw."""
        ranks = sorted(rank for rank, answers in self._owed.items() if answers)
        found = await asyncio.gather(*(self._suspect(rank) for rank in ranks))
        return self._failures + [failure for failure in found if failure is not None]

    async def _everywhere(self, call: Callable[[ActorHandle], Any]) -> Outcome:
        """Make a call on every worker and wait for all, or for the rest only so long once one has failed."""
        outcome = Outcome()
        # The calls go out before the first await, so that two calls cannot overtake each other.
        waiting = {
            asyncio.ensure_future(_answer(call(worker))): rank for rank, worker in self._workers.items()
        }
        self._owed.update(waiting.values())
        deadline = math.inf
        clock = asyncio.get_running_loop().time
        while waiting:
            patience = None if deadline == math.inf else max(0.0, deadline - clock())
            done, _ = await asyncio.wait(waiting, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                self._note(outcome, rank=waiting.pop(future), answer=future.result())
            if outcome.failures:
                grace = _GRACE_SECONDS[root_cause(outcome.failures).kind]
                deadline = min(deadline, clock() + grace)
        outcome.silent = sorted(waiting.values())
        return outcome

    def _note(self, outcome: Outcome, *, rank: int, answer: Any) -> None:
        self._owed[rank] -= 1
        if isinstance(answer, BaseException):
            answer = self._death(rank, answer)
        if isinstance(answer, RankFailure):
            outcome.failures.append(answer)
            self._failures.append(answer)
        else:
            outcome.results[rank] = answer

    async def _suspect(self, rank: int) -> RankFailure | None:
        stack: str | None
        try:
            stack = await asyncio.wait_for(_ref(self._workers[rank].stack.remote()), _CONTROL_SECONDS)
        except TimeoutError:
            stack = None
        except RayActorError as error:
            return self._death(rank, error)
        return _suspect(self._places[rank], stack)

    def _death(self, rank: int, error: BaseException) -> RankFailure:
        return _death(self._places[rank], self._processes.get(rank), error)


PipelineActor: Any = ray.remote(Pipeline).options(num_cpus=0, max_restarts=0, max_task_retries=0)


def _create_worker(
    place: RankPlace, bundle: Bundle, *, group: PlacementGroup, index: int, make_trainer: MakeTrainer
) -> ActorHandle:
    resources = dict(bundle.resources)
    worker: ActorHandle = WorkerActor.options(
        num_cpus=resources.pop("CPU", 0),
        num_gpus=resources.pop("GPU", 0),
        resources=resources,
        scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index),
    ).remote(place, make_trainer=make_trainer)
    return worker


async def _ref(reference: Any) -> Any:
    return await reference


async def _answer(reference: Any) -> Any:
    """A call's result, or the exception of an actor that cannot answer any more."""
    try:
        return await reference
    except (RayActorError, OutOfMemoryError) as error:
        return error


def _death(place: RankPlace, process: RankProcess | None, error: BaseException) -> RankFailure:
    who = "its process" if process is None else f"its process {process.pid} on {process.host}"
    how = "ended unexpectedly: it was killed, crashed or ran its host out of memory"
    if isinstance(error, OutOfMemoryError):
        how = "was ended by Ray because its host ran out of memory"
    elif "node has died" in str(error):
        how = "was lost with its node"
    elif "creation task" in str(error):
        how = f"could not start: {str(error).strip().splitlines()[-1]}"
    return rank_failure(place, kind=FailureKind.DIED, cause=f"died: {who} {how}", details=str(error))


def _suspect(place: RankPlace, stack: str | None) -> RankFailure | None:
    if stack is None:
        cause = "hung: its process does not answer"
        return rank_failure(place, kind=FailureKind.HUNG, cause=cause)
    if not stack or _waits_for_peer(stack):
        return None
    where = stack.strip().splitlines()[-2].strip()
    return rank_failure(place, kind=FailureKind.HUNG, cause=f"hung: it is busy at {where}", details=stack)


def _waits_for_peer(stack: str) -> bool:
    """Whether the innermost frames are a wait for another rank: such a rank is held up, not to blame."""
    innermost = "\n".join(stack.strip().splitlines()[-4:])
    return "torch/distributed/" in innermost or ".wait(" in innermost
