"""The monitor: one thread that moves every job on, and the only one that talks to the cluster about jobs."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import structlog
import yaml

from eth_service import run_files
from eth_service.backend import AttemptReport, AttemptStatus, Backend, ClusterUnreachable, SubmissionRefused
from eth_service.settings import EMBEDDED, Settings
from eth_service.states import ACTIVE, JobState
from eth_service.store import AttemptRow, JobRow, Store, now

log = structlog.get_logger(__name__)

# The driver writes these files one after the other; what exists tells how far it is.
_PROGRESS = (
    (run_files.PLAN, JobState.STARTING, "the plan is made"),
    (run_files.METRICS, JobState.RUNNING, "the first iteration is done"),
)
# Share of the monitor's time that reading one driver's whole output again may take.
_OUTPUT_SHARE = 0.05


class Monitor:
    """Starts queued jobs in order, follows active ones, and carries out stops.

    It keeps nothing that matters in memory: whatever a service that died had begun is found in the database
    and compared with what the cluster and the run folders say.
    """

    def __init__(self, *, settings: Settings, store: Store, backend: Backend) -> None:
        self._settings = settings
        self._store = store
        self._backend = backend
        self._wake = threading.Event()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="job-monitor", daemon=True)
        self._output_due: dict[str, float] = {}
        self.obstacle: str | None = None
        """Why the first job of the queue cannot start although it is its turn."""

    def start(self) -> None:
        """Begin with what an earlier service left, then look at every turn."""
        if not self._settings.embedded:
            for job in self._store.in_states(ACTIVE):
                if job.attempt and job.attempt.cluster == EMBEDDED:
                    self._move(job, JobState.FAILED, reason="the service ended, and its embedded Ray with it")
        self._thread.start()

    def wake(self) -> None:
        """Look now rather than at the next turn."""
        self._wake.set()

    def close(self) -> None:
        """End the thread; jobs go on."""
        self._ending.set()
        self._wake.set()
        self._thread.join()

    def stop_active(
        self, *, reason: str, timeout_seconds: float, hurry: threading.Event | None = None
    ) -> None:
        """Stop every active job of this cluster and wait for the ends, or until `hurry` is set. Call it after `close`.

        What has not ended by then is written down as stopped: the caller is about to end the cluster itself.
        """
        deadline, hurry = time.monotonic() + timeout_seconds, hurry or threading.Event()
        while (jobs := self.active()) and time.monotonic() < deadline and not hurry.is_set():
            for job in jobs:
                self._store.ask_to_stop(job, reason=reason)
            for job in self.active():
                self._follow(job)
            hurry.wait(min(0.3, self._settings.poll_seconds))
        for job in self.active():
            self._move(job, JobState.STOPPED, reason=f"{reason}; its driver did not end in time")

    def tick(self) -> None:
        """One look at everything. What goes wrong with one job must not leave the others unwatched."""
        for job in self.active():
            try:
                self._follow(job)
            except Exception:
                log.exception("following a job failed; it is tried again", job=job.id)
        self._start_next()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self.tick()
            except Exception:
                # A monitor that dies of one surprise would leave every job unwatched.
                log.exception("the monitor's turn failed; it tries again")
            self._wake.wait(self._settings.poll_seconds)
            self._wake.clear()

    def active(self) -> Sequence[JobRow]:
        """Active jobs of this cluster. What another cluster holds only that one can tell about."""
        jobs = self._store.in_states(ACTIVE)
        return [job for job in jobs if job.attempt and job.attempt.cluster == self._settings.cluster]

    def _start_next(self) -> None:
        free = max(0, self._settings.concurrent_jobs - len(self.active()))
        for job in self._store.in_states([JobState.QUEUED])[:free]:
            # A job leaves the queue only for a cluster that is there.
            try:
                self._backend.check()
                self.obstacle = None
            except ClusterUnreachable as error:
                self.obstacle = str(error)
                return
            home = job_folder(self._settings, job.id)
            if self._store.begin_attempt(job, cluster=self._settings.cluster, home=home):
                begun = self._store.get(job.id)
                assert begun is not None
                self._follow(begun)

    def _follow(self, job: JobRow) -> None:
        attempt = job.attempt
        assert attempt is not None, f"active job {job.id} has no attempt"
        try:
            if attempt.submitted_at is None:
                self._submit(job, attempt)
            else:
                self._observe(job, attempt)
        except ClusterUnreachable as error:
            self._read_progress(job, attempt)
            if job.unreachable_since is None:
                log.warning("cluster does not answer", job=job.id, error=str(error))
                self._store.set_unreachable(job, now())
            return
        if job.unreachable_since is not None:
            self._store.set_unreachable(job, None)

    def _submit(self, job: JobRow, attempt: AttemptRow) -> None:
        # A service that died between submitting and writing it down finds the submission here.
        known = self._backend.report(attempt.submission_id).status is not AttemptStatus.UNKNOWN
        if not known and job.stop_reason is not None:
            self._move(job, JobState.STOPPED, reason=job.stop_reason)
            return
        try:
            if not known:
                self._backend.submit(
                    attempt.submission_id, prepare_attempt(Path(attempt.folder), job.document)
                )
        except SubmissionRefused as error:
            self._move(job, JobState.FAILED, reason=f"Ray refused the job: {error}")
            return
        self._store.mark_submitted(attempt)

    def _observe(self, job: JobRow, attempt: AttemptRow) -> None:
        # The status first: once it is final, the files that are read after it are complete.
        report = self._backend.report(attempt.submission_id)
        if job.stop_reason is not None and not report.status.final:
            self._backend.stop(attempt.submission_id)
        self._keep_output(attempt, final=report.status.final)
        self._read_progress(job, attempt)
        if report.status.final:
            self._finish(job, attempt, report)

    def _keep_output(self, attempt: AttemptRow, *, final: bool) -> None:
        key = attempt.submission_id
        if not final and time.monotonic() < self._output_due.get(key, 0.0):
            return
        start = time.monotonic()
        whole = self._backend.output(key)
        run_files.append_output(output_path(attempt), whole, final=final)
        took = time.monotonic() - start
        self._output_due[key] = start + took / _OUTPUT_SHARE

    def _read_progress(self, job: JobRow, attempt: AttemptRow) -> None:
        """Take over how far the driver has come, as the files of its run folder tell."""
        folder = Path(attempt.folder)
        for name, state, reason in _PROGRESS:
            if job.state.may_become(state) and (since := run_files.first_written(folder / name)) is not None:
                self._store.transition(job, state, reason=reason, at=since, attempt=attempt.number)

    def _finish(self, job: JobRow, attempt: AttemptRow, report: AttemptReport) -> None:
        state, reason = _ending(job, attempt, report, embedded=self._settings.embedded)
        self._move(job, state, reason=reason)
        self._output_due.pop(attempt.submission_id, None)

    def _move(self, job: JobRow, to: JobState, *, reason: str) -> None:
        number = job.attempt.number if job.attempt else 0
        if self._store.transition(job, to, reason=reason, attempt=number):
            log.info("job " + to.value, job=job.id, reason=reason)


def job_folder(settings: Settings, job_id: str) -> Path:
    """Where everything about a job is kept: its job file, a run folder an attempt, each driver's output."""
    return settings.runs / job_id


def output_path(attempt: AttemptRow) -> Path:
    """The kept copy of what the attempt's driver printed."""
    return Path(f"{attempt.folder}.log")


def prepare_attempt(folder: Path, document: dict[str, Any]) -> list[str]:
    """Write the job file beside the run folder; return the argument list that runs it."""
    job_file = folder.parent / "job.yaml"
    job_file.parent.mkdir(parents=True, exist_ok=True)
    job_file.write_text(yaml.safe_dump(document, sort_keys=False), encoding="utf-8")
    return [sys.executable, "-m", "actors.driver", str(job_file), "--output", str(folder)]


def _ending(
    job: JobRow, attempt: AttemptRow, report: AttemptReport, *, embedded: bool
) -> tuple[JobState, str]:
    """The final state and the reason for it."""
    # The driver's own last word; it also counts where the cluster has forgotten the job.
    told = run_files.read_summary(Path(attempt.folder))
    unknown = report.status is AttemptStatus.UNKNOWN
    if report.status is AttemptStatus.SUCCEEDED or (unknown and told.get("state") == "succeeded"):
        return JobState.SUCCEEDED, "all iterations done"
    if job.stop_reason is not None:
        return JobState.STOPPED, job.stop_reason
    if report.status is AttemptStatus.STOPPED:
        return JobState.STOPPED, "stopped in Ray, not through this service"
    if report.status is AttemptStatus.FAILED or told.get("failure"):
        reason = told.get("failure") or _last_word(output_path(attempt)) or report.message
        return JobState.FAILED, str(reason or "the driver gave no reason")
    if embedded:
        return JobState.FAILED, "the service ended unexpectedly, and its embedded Ray with it"
    return JobState.FAILED, "Ray no longer knows the job: its cluster was started anew"


def _last_word(output: Path) -> str:
    """The line of a driver's output that says why it ended: its own error line, else the last one."""
    tail = run_files.read_text(output, offset=-8192, limit=8192).text
    lines = [line.strip() for line in tail.splitlines() if line.strip()]
    own = [line.removeprefix("eth: ") for line in lines if line.startswith("eth: ")]
    return (own or lines or [""])[-1]
