"""What can be done with jobs: the service's own interface, which the routes put on HTTP."""

from __future__ import annotations

from http import HTTPStatus
from pathlib import Path

from pydantic import ValidationError

from eth_service import run_files
from eth_service.errors import ProblemError, unknown_job
from eth_service.monitor import Monitor, output_path
from eth_service.schemas import JobDetail, JobList, JobSummary, LogPart, Metrics, MetricsRow
from eth_service.settings import Settings
from eth_service.states import ACTIVE, JobState
from eth_service.store import JobRow, Store, new_job_id
from eth_service.submission import accept_job, job_document
from eth_service.views import detail, summary


class Jobs:
    """Submits, shows and stops jobs. Writes wishes to the database; the monitor carries them out."""

    def __init__(self, *, settings: Settings, store: Store, monitor: Monitor) -> None:
        self._settings = settings
        self._store = store
        self._monitor = monitor
        self._files = run_files.RunFiles()

    def submit(self, data: object) -> JobDetail:
        """Check a decoded job file and put the job in the queue; UserError if it cannot be done."""
        job = accept_job(data, root=self._settings.data_root)
        row = self._store.add(job_id=new_job_id(), name=job.name, document=job_document(job))
        self._monitor.wake()
        return self._detail(row)

    def page(self, *, limit: int, before: str | None) -> JobList:
        rows = self._store.newest(limit=limit + 1, before=before)
        more = len(rows) > limit
        shown = rows[:limit]
        return JobList(jobs=[self._summary(row) for row in shown], next_before=shown[-1].id if more else None)

    def get(self, job_id: str) -> JobDetail:
        return self._detail(self._row(job_id))

    def stop(self, job_id: str) -> JobSummary:
        """Ask for the end of a job; it may take some seconds. Asking again changes nothing.

        ProblemError 409 if the job has ended, or if another cluster holds it.
        """
        row = self._row(job_id)
        if row.state is JobState.QUEUED and self._store.transition(
            row, JobState.STOPPED, reason="stopped on request before it started"
        ):
            return self._summary(self._row(job_id))
        # It may have left the queue, or ended, since it was read.
        row = self._row(job_id)
        if row.attempt and row.attempt.cluster != self._settings.cluster and not row.state.final:
            raise ProblemError(
                HTTPStatus.CONFLICT,
                f"job {job_id} runs on the cluster {row.attempt.cluster}; start the service with that"
                " --address",
            )
        if not self._store.ask_to_stop(row, reason="stopped on request"):
            row = self._row(job_id)
            raise ProblemError(
                HTTPStatus.CONFLICT,
                f"job {job_id} has {row.state.value} already ({row.reason}); nothing to stop",
            )
        self._monitor.wake()
        return self._summary(self._row(job_id))

    def metrics(self, job_id: str, *, since: int, limit: int) -> Metrics:
        """Rows of the latest attempt above `since`."""
        # The state before the rows: if it is final, no row comes after those read now.
        row = self._row(job_id)
        if row.attempt is None:
            return Metrics(attempt=0, rows=[], next_since=since, complete=row.state.final)
        found = self._files.metrics(Path(row.attempt.folder)).rows(since=since, limit=limit)
        rows = [read for raw in found if (read := _metrics_row(raw)) is not None]
        return Metrics(
            attempt=row.attempt.number,
            rows=rows,
            next_since=rows[-1].iteration if rows else since,
            complete=row.state.final and len(found) < limit,
        )

    def logs(self, job_id: str, *, offset: int, limit: int) -> LogPart:
        """What the latest attempt's driver printed, from a byte offset on."""
        row = self._row(job_id)
        if row.attempt is None:
            return LogPart(attempt=0, text="", offset=0, next_offset=0, complete=row.state.final)
        part = run_files.read_text(output_path(row.attempt), offset=offset, limit=limit)
        return LogPart(
            attempt=row.attempt.number,
            text=part.text,
            offset=part.offset,
            next_offset=part.next_offset,
            complete=row.state.final and part.next_offset >= part.size,
        )

    def active(self) -> int:
        return len(self._store.in_states(ACTIVE))

    def _row(self, job_id: str) -> JobRow:
        row = self._store.get(job_id)
        if row is None:
            raise unknown_job(job_id)
        return row

    def _summary(self, row: JobRow) -> JobSummary:
        emulated = self._files.emulated(Path(row.attempt.folder)) if row.attempt else None
        return summary(row, note=self._note(row), emulated=emulated, latest=_latest(row))

    def _detail(self, row: JobRow) -> JobDetail:
        plan = self._files.plan(Path(row.attempt.folder)) if row.attempt else None
        return detail(row, note=self._note(row), plan=plan, latest=_latest(row))

    def _note(self, row: JobRow) -> str | None:
        """What the job waits for, or what is odd about it."""
        if row.state is JobState.QUEUED:
            return self._wait(row)
        if row.state.final:
            return None
        if row.attempt and row.attempt.cluster != self._settings.cluster:
            return f"held by the cluster {row.attempt.cluster}, which this service is not connected to"
        if row.unreachable_since is not None:
            return (
                f"no answer from Ray since {row.unreachable_since:%H:%M:%S} UTC; the job may still be running"
            )
        return "stopping" if row.stop_reason is not None else None

    def _wait(self, row: JobRow) -> str:
        ahead = [
            job for job in self._store.in_states((*ACTIVE, JobState.QUEUED)) if job.sequence < row.sequence
        ]
        active = [job for job in ahead if job.state in ACTIVE]
        if not ahead:
            return f"waits: {self._monitor.obstacle}" if self._monitor.obstacle else "starts at once"
        place = len(ahead) - len(active) + 1
        if active:
            held = ", ".join(f"{job.id} ({job.name})" for job in active)
            return f"place {place} in the queue; waits for the end of {held}"
        return f"place {place} in the queue"


def _latest(row: JobRow) -> MetricsRow | None:
    raw = run_files.last_row(Path(row.attempt.folder) / run_files.METRICS) if row.attempt else None
    return _metrics_row(raw) if raw is not None else None


def _metrics_row(raw: dict[str, object]) -> MetricsRow | None:
    try:
        return MetricsRow.model_validate(raw)
    except ValidationError:
        return None
