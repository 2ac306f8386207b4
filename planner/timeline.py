"""One event schema for the simulator, the runtime's trace and the dashboard."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Kind = Literal["forward", "backward", "send", "receive", "gradient_sync", "optimizer"]


@dataclass(frozen=True)
class Event:
    """What one device did from `start_seconds` to `end_seconds`, counted from the iteration's start.

    `micro_batch` is None for gradient_sync and optimizer; `block` is a gradient block's index.
    """

    device: str
    pipeline: int
    stage: int
    kind: Kind
    micro_batch: int | None
    start_seconds: float
    end_seconds: float
    block: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One iteration of every device. `events` are ordered by start, then device."""

    iteration_seconds: float
    pipeline_end_seconds: tuple[float, ...]
    """When each pipeline ends its last backward."""
    events: tuple[Event, ...]

    def busy_seconds(self, device: str) -> float:
        """Seconds that a device computes."""
        return sum(
            event.end_seconds - event.start_seconds
            for event in self.events
            if event.device == device and event.kind in ("forward", "backward", "optimizer")
        )


def ordered(events: Iterable[Event]) -> tuple[Event, ...]:
    return tuple(sorted(events, key=lambda event: (event.start_seconds, event.device, event.kind)))
