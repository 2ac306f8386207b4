"""What went wrong in a run, told apart so that the cause is named and not its echoes in other ranks."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from actors.engine.errors import EngineError
from planner.errors import UserError
from planner.plan import RankPlace


class FailureKind(IntEnum):
    """Ordered by how likely the failure is the root cause: the smallest is blamed first.

    A rank that dies or raises breaks its peers' connections, and a rank that hangs makes its peers time
    out; those peers then fail too, but only as witnesses.
    """

    DIED = 0
    """The worker's process ended without an answer."""
    ERROR = 1
    """The rank's own work raised: out of memory, a loss that is no number, a bug."""
    HUNG = 2
    """The rank gave no answer while its peers timed out waiting."""
    TIMED_OUT = 3
    """The rank waited for a peer longer than the timeout."""
    DISCONNECTED = 4
    """The connection to a peer broke."""


@dataclass(frozen=True)
class RankFailure:
    """One rank's failure; plain data, so that it crosses processes unharmed."""

    kind: FailureKind
    rank: int
    pipeline: int
    stage: int
    device: str
    cause: str
    details: str = ""

    def __str__(self) -> str:
        place = f"rank {self.rank} (pipeline {self.pipeline}, stage {self.stage}, device {self.device})"
        return f"{place} {self.cause}"


class TrainingFailed(RuntimeError):
    """A run ended by a failure of its own, not by a user's mistake. The message is one line."""

    def __init__(self, message: str, *, details: str = "") -> None:
        super().__init__(message)
        self.details = details


def rank_failure(place: RankPlace, *, kind: FailureKind, cause: str, details: str = "") -> RankFailure:
    """The failure of the rank at `place`."""
    return RankFailure(
        kind=kind,
        rank=place.rank,
        pipeline=place.pipeline,
        stage=place.stage,
        device=place.device,
        cause=cause,
        details=details,
    )


# Words of gloo, NCCL, HCCL and c10d; torch gives most of these errors no class of their own.
_TIMED_OUT = re.compile(r"timed? ?out|Timeout", re.IGNORECASE)
_DISCONNECTED = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket|unhandled system error|remote process exited"
    r"|no route to host|network is unreachable",
    re.IGNORECASE,
)
_COMMUNICATION = re.compile(
    r"gloo|nccl|hccl|c10d|store|Dist\w*Error|peer|pair closure|connection|broken pipe", re.IGNORECASE
)


def classify(error: BaseException) -> FailureKind:
    """Whether an exception of a rank's work is its own or comes from a peer's failure."""
    if isinstance(error, EngineError | UserError):
        return FailureKind.ERROR
    while error.__cause__ is not None:
        error = error.__cause__
    text = f"{type(error).__name__}: {error}"
    if not isinstance(error, RuntimeError | OSError) or not _COMMUNICATION.search(text):
        return FailureKind.ERROR
    if _TIMED_OUT.search(text):
        return FailureKind.TIMED_OUT
    return FailureKind.DISCONNECTED if _DISCONNECTED.search(text) else FailureKind.ERROR


def root_cause(failures: Iterable[RankFailure]) -> RankFailure:
    """The failure to blame: the likeliest kind, then the lowest rank."""
    return min(failures, key=lambda failure: (failure.kind, failure.rank))
