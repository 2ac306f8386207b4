"""What one iteration of one rank gives: gradients, a report, and what was done when."""

from __future__ import annotations

from dataclasses import dataclass

from actors.engine.agreement import Agreed
from actors.engine.checkpoint import SavedCheckpoint
from actors.engine.evaluation import Validation
from actors.engine.gradient_sync import CallTime
from actors.engine.stage_runner import StepTime
from planner.plan import RankPlace
from planner.timeline import Event, Kind


@dataclass(frozen=True)
class IterationReport:
    """One iteration of one rank. Times are `time.monotonic()`: comparable between processes of one host.

    `loss` (mean over the global batch's counted tokens) and `gradient_norm` (before clipping) are the
    world's, the same on every rank. An iteration that was `skipped` updated nothing. `steps` counts
    forward, backward and optimizer steps of this iteration, `late_steps` those in which an emulated device's
    host could not keep up. `data_wait_seconds` are wall seconds for which the rank stood still because its samples were
    not read yet. `peak_tensor_bytes` is the most so far; of an emulated device, in its own bytes.
    `events` count wall seconds from `start_time`. `saved` are the checkpoints that ended since the last report,
    told by rank 0. `validation` is there where the iteration was followed by an evaluation, which no other figure
    includes but for `peak_tensor_bytes`.
    """

    iteration: int
    loss: float
    gradient_norm: float
    learning_rate: float
    start_time: float
    compute_end_time: float
    sync_end_time: float
    end_time: float
    steps: int
    late_steps: int
    peak_tensor_bytes: int
    data_wait_seconds: float = 0.0
    skipped: bool = False
    loss_scale: float = 1.0
    events: tuple[Event, ...] = ()
    saved: tuple[SavedCheckpoint, ...] = ()
    validation: Validation | None = None


@dataclass(frozen=True)
class Gradients:
    """What `compute_gradients` found, the same on every rank, and when its parts ended.

    The buffer holds the gradients of the loss times `loss_scale`.
    """

    agreed: Agreed
    loss_scale: float
    compute_end_time: float
    sync_end_time: float
    steps: tuple[StepTime, ...]
    calls: tuple[CallTime, ...]


def events_of(
    place: RankPlace, gradients: Gradients, *, start: float, update: float, end: float
) -> list[Event]:
    """What a rank did in an iteration, in seconds from `start` on; the update began at `update`."""

    def event(
        kind: Kind, micro_batch: int | None, first: float, last: float, block: int | None = None
    ) -> Event:
        return Event(
            place.device, place.pipeline, place.stage, kind, micro_batch, first - start, last - start, block
        )

    return [
        *(event(step.kind, step.micro_batch, step.start, step.end) for step in gradients.steps),
        *(
            event("gradient_sync", None, time.span.start, time.span.end, time.call.block)
            for time in gradients.calls
        ),
        event("optimizer", None, update, end),
    ]
