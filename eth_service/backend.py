"""What the service needs of a cluster, however it is reached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class AttemptStatus(Enum):
    """What the cluster says of one submission."""

    PENDING = "not started yet"
    RUNNING = "its driver runs"
    SUCCEEDED = "its driver ended with exit code 0"
    FAILED = "its driver ended with an error, or could not be started"
    STOPPED = "its driver was stopped"
    UNKNOWN = "the cluster knows no such submission"

    @property
    def final(self) -> bool:
        return self not in (AttemptStatus.PENDING, AttemptStatus.RUNNING)


@dataclass(frozen=True)
class AttemptReport:
    """A status and what the cluster adds to it (the last lines of output of a failed driver, for example)."""

    status: AttemptStatus
    message: str = ""


class ClusterUnreachable(Exception):
    """The cluster does not answer. It says nothing about the jobs on it."""


class SubmissionRefused(Exception):
    """The cluster answered, and does not take the job."""


class Backend(Protocol):
    """Starts, watches and stops attempts. Only the monitor's thread calls it, except for `check`.

    Every method may raise ClusterUnreachable.
    """

    def check(self) -> None:
        """Return if the cluster answers."""

    def submit(self, submission_id: str, command: Sequence[str]) -> None:
        """Start `command` (an argument list, no shell) on the cluster; a known id is left as it is.

        Raises SubmissionRefused.
        """

    def report(self, submission_id: str) -> AttemptReport:
        """What the cluster says of a submission."""

    def stop(self, submission_id: str) -> None:
        """Ask for an end. It may come late or, for a submission that is still pending, not at all: ask again
        until `report` is final."""

    def output(self, submission_id: str) -> str:
        """All that the driver has printed so far; empty if the cluster no longer has it."""
