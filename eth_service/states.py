"""The states of a job, and which may follow which."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """Where a job stands. The database holds the truth; Ray and the run folder only report.

    queued
        Accepted and stored. Ends when its turn comes (planning), or by a stop.
    planning
        An attempt exists and its Ray job has been, or is just being, submitted; the driver makes the plan.
        Ends when the driver reports that the plan stands (starting), or fails to make one.
    starting
        The plan stands; devices are reserved, actors start and build their process groups.
        Ends with the first iteration (running).
    running
        Iterations are made. Ends when the driver ends.
    succeeded
        The driver ended by itself and reports success. Final.
    failed
        The driver ended with an error, or Ray no longer knows it. Final; the reason says which.
    stopped
        Ended on request: a user's, or the service's that took its embedded Ray with it. Final.

    A cluster that cannot be reached changes no state: the job says since when nothing was heard of it.
    """

    QUEUED = "queued"
    PLANNING = "planning"
    STARTING = "starting"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def final(self) -> bool:
        return not _NEXT[self]

    def may_become(self, other: JobState) -> bool:
        return other in _NEXT[self]


_ENDS = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.STOPPED})
# A driver that is quick, or a service that was away, may skip states: the end is what counts then.
_NEXT: dict[JobState, frozenset[JobState]] = {
    JobState.QUEUED: frozenset({JobState.PLANNING, JobState.STOPPED}),
    JobState.PLANNING: _ENDS | {JobState.STARTING, JobState.RUNNING},
    JobState.STARTING: _ENDS | {JobState.RUNNING},
    JobState.RUNNING: _ENDS,
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.STOPPED: frozenset(),
}

# An attempt belongs to the job: something may be alive on the cluster.
ACTIVE = (JobState.PLANNING, JobState.STARTING, JobState.RUNNING)
